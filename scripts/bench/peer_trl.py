"""TRL's GRPOTrainer on a CPU: seconds a step on 64 samples of at most 64 new tokens, sampled by transformers or by us.

    $PEERS/hf/bin/pip install trl==1.16.0 reasoning-gym datasets        # once
    $PEERS/hf/bin/python peer_trl.py MODEL_DIR [STEPS]
    .venv/bin/python scripts/bench/peer_trl.py MODEL_DIR [STEPS] [colocate|rollout_func] [DTYPE]

The task: one-digit sums of reasoning-gym, 8 prompts of 8 samples a step, float32 (TRL's default on a CPU), no KL term;
the reward is 1 where the answer stands in the completion. "colocate" is our engine in the place of vLLM, with its
sleep mode; DTYPE is of its weights. Prints one JSON line a step; `processor_seconds` are of all threads.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}  # read by the libraries when they are imported

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


def answer_stands_in_it(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float | None]:
    """TRL's reward signature, on conversations."""
    return [float(right in completion[0]["content"]) for completion, right in zip(completions, answer, strict=True)]


def one_digit_sums(size: int) -> Dataset:
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = reasoning_gym.create_dataset("chain_sum", size=size, seed=1, **digits)
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )


class ProcessorTime(TrainerCallback):
    """Processor seconds of every step; a step's generation comes before its `on_step_begin`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._before = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._before = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self._before)
        self._before = now


def engine_options(kind: str, model_dir: str, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the configuration and of the trainer by which samples come from `kind`."""
    if kind == "transformers":
        return {}, {}
    import rollout.compat  # TRL's modules look for vllm when they are imported

    options = {"kv_cache_memory": "512MiB", "max_model_len": 512, "dtype": dtype}
    if kind == "colocate":
        rollout.compat.install(**options)
        return {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}, {}
    from rollout import LLM

    return {}, {"rollout_func": rollout.compat.make_rollout_func(LLM(model_dir, **options))}


def main() -> None:
    model_dir = sys.argv[1]
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    kind = sys.argv[3] if len(sys.argv) > 3 else "transformers"
    arguments, of_trainer = engine_options(kind, model_dir, sys.argv[4] if len(sys.argv) > 4 else "float32")
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    clock = ProcessorTime()
    with tempfile.TemporaryDirectory() as output_dir:
        config = GRPOConfig(
            output_dir=output_dir,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
            num_generations=8,
            max_completion_length=64,
            max_steps=steps,
            learning_rate=1e-6,
            beta=0.0,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            **arguments,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model_dir, padding_side="left"),
            reward_funcs=answer_stands_in_it,
            train_dataset=one_digit_sums(64),
            args=config,
            callbacks=[clock],
            **of_trainer,
        )
        trainer.train()
    rows = [row for row in trainer.state.log_history if "step_time" in row]
    for row, processor_seconds in zip(rows, clock.seconds, strict=True):
        line = {
            "engine": f"trl with {kind}",
            "workload": "grpo_step",
            "step": row["step"],
            "seconds": float(row["step_time"]),
            "processor_seconds": round(processor_seconds, 1),
            "reward": float(row["reward"]),
            "mean_length": float(row["completions/mean_length"]),
        }
        mismatch = {name: float(row[name]) for name in row if name.startswith("sampling/")}
        print(json.dumps(line | mismatch), flush=True)


if __name__ == "__main__":
    main()
