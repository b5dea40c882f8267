"""Stage import: a model from a folder or a hub, as it is; its tokenizer is checked before anything is trained on it."""

from __future__ import annotations

import shutil
from pathlib import Path

from stages.errors import UserError


def run(context) -> None:
    source, revision = context.params["source"], context.params["revision"]
    folder = Path(source) if Path(source).is_absolute() else context.root / source
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(source, revision=revision, ignore_patterns=["*.bin", "*.pth", "*.gguf"]))
        except Exception as error:  # a hub has many ways to say no; the first line says which
            raise UserError(
                f"models.{context.model}.from: '{source}' is no folder, and the hub said: {str(error).splitlines()[0]}"
            ) from error
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise UserError(f"models.{context.model}.from: '{source}' needs config.json and *.safetensors (pickled weights are not read)")
    target = context.out / "model"
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(".*", "*.bin", "*.pth", "*.gguf", "original", "*.py"))
    template = context.params["template"]
    context.cluster.apply(
        "stages.tokens:complete", folder=str(target), template=(context.root / template).read_text() if template else None,
        pad_token=context.params["pad_token"],
    )  # fmt: skip
    context.cluster.apply("stages.tokens:special", folder=str(target))
