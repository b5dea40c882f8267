"""One TRL trainer on given data, timed: what compare_trl.py runs beside ours. Prints one line: RESULT {json}.

    PYTHONPATH=<folder of trl> python benchmarks/trl_peer.py ALGORITHM --model FOLDER --data FILE --batch N --steps N ...

TRL's defaults of bfloat16 and gradient checkpointing are off: on a CPU they only cost.
"""

from __future__ import annotations

import os
import time

BEGAN = time.perf_counter()
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true",
               "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip

import argparse  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithm", choices=["sft", "reward", "dpo", "kto", "ppo"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--reward-model")
    parser.add_argument("--data", required=True, help="JSON lines as TRL wants them; of ppo: input_ids.")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=4, help="Passes over a PPO rollout.")
    asked = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    import datasets
    import transformers
    import trl

    datasets.disable_progress_bars()
    marks: dict[str, list[float]] = {"begin": [], "end": [], "backward": []}

    class Timer(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            marks["begin"].append(time.perf_counter())

        def on_step_end(self, *_, **__):
            marks["end"].append(time.perf_counter())

    common = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": asked.batch, "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "bf16": False, "fp16": False, "gradient_checkpointing": False, "use_cpu": True,
        "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "dataloader_pin_memory": False, "optim": "adamw_torch",
    }  # fmt: skip
    data = datasets.load_dataset("json", data_files=asked.data, split="train", cache_dir=tempfile.mkdtemp())
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.model)
    trainer = _trainer(asked, common, data, tokenizer, Timer(), marks)
    trainer.train()
    times = [marks["begin"][0], *marks["end"]]
    steps = [b - a for a, b in itertools.pairwise(times)][asked.warmup :]
    result = {
        "trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__, "steps": len(steps),
        "step_s": statistics.median(steps), "setup_s": marks["begin"][0] - BEGAN, "load": os.getloadavg()[0],
    }  # fmt: skip
    if marks["backward"]:  # of each step: from its first backward pass to its end
        starts = [min(b for b in marks["backward"] if a < b < end) for a, end in itertools.pairwise(times)]
        result["update_s"] = statistics.median([end - start for start, end in zip(starts, times[1:])][asked.warmup :])
    print("RESULT " + json.dumps(result))


def _trainer(asked, common, data, tokenizer, timer, marks):
    import transformers

    options = {"processing_class": tokenizer, "train_dataset": data, "callbacks": [timer]}
    if asked.algorithm == "ppo":
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        tokenizer.padding_side = "left"
        causal = transformers.AutoModelForCausalLM.from_pretrained
        scorer = lambda: transformers.AutoModelForSequenceClassification.from_pretrained(asked.reward_model, num_labels=1)
        arguments = PPOConfig(
            **common, total_episodes=asked.steps * asked.batch, response_length=asked.new_tokens, num_ppo_epochs=asked.epochs,
            num_mini_batches=1, kl_coef=0.05, temperature=1.0, stop_token="eos", missing_eos_penalty=1.0, num_sample_generations=0,
            local_rollout_forward_batch_size=asked.batch,
        )  # fmt: skip
        trainer = PPOTrainer(
            args=arguments, model=causal(asked.model), ref_model=causal(asked.model), reward_model=scorer(), value_model=scorer(),
            eval_dataset=data.select(range(asked.batch)), **options,
        )  # fmt: skip
        backward = trainer.accelerator.backward

        def timed(*arguments, **keywords):
            marks["backward"].append(time.perf_counter())
            return backward(*arguments, **keywords)

        trainer.accelerator.backward = timed
        return trainer
    common |= {"max_steps": asked.steps, "logging_steps": 1, "max_length": 128}
    if asked.algorithm == "sft":
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(model=asked.model, args=SFTConfig(**common, completion_only_loss=True), **options)
    if asked.algorithm == "reward":
        from trl import RewardConfig, RewardTrainer

        model = transformers.AutoModelForSequenceClassification.from_pretrained(asked.model, num_labels=1)
        model.config.pad_token_id = tokenizer.pad_token_id
        return RewardTrainer(model=model, args=RewardConfig(**common), **options)
    if asked.algorithm == "dpo":
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer(model=asked.model, args=DPOConfig(**common, beta=0.1, precompute_ref_log_probs=True), **options)
    from trl import KTOConfig, KTOTrainer

    return KTOTrainer(model=asked.model, args=KTOConfig(**common, beta=0.1, precompute_ref_log_probs=True), **options)


if __name__ == "__main__":
    main()
