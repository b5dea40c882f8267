"""Pure functions behind the stages: tensors and plans in, tensors and plans out; no files, no Ray, no DeepSpeed."""
