"""TRL's GRPOTrainer on a CPU, generating with transformers: seconds a step on 64 samples of at most 64 new tokens.

    $PEERS/hf/bin/pip install trl==1.16.0 reasoning-gym datasets        # once
    $PEERS/hf/bin/python peer_trl.py MODEL_DIR [STEPS]

The task: one-digit sums of reasoning-gym, 8 prompts of 8 samples a step, float32 (TRL's default on a CPU), no KL term;
the reward is 1 where the answer stands in the completion. Prints one JSON line a step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}  # read by the libraries when they are imported

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def answer_stands_in_it(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """TRL's reward signature, on conversations."""
    return [float(right in completion[0]["content"]) for completion, right in zip(completions, answer, strict=True)]


def one_digit_sums(size: int) -> Dataset:
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = reasoning_gym.create_dataset("chain_sum", size=size, seed=1, **digits)
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )


def main() -> None:
    model_dir = sys.argv[1]
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3
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
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model_dir, padding_side="left"),
            reward_funcs=answer_stands_in_it,
            train_dataset=one_digit_sums(64),
            args=config,
        )
        trainer.train()
    for row in trainer.state.log_history:
        if "step_time" in row:
            line = {
                "engine": "trl",
                "workload": "grpo_step",
                "step": row["step"],
                "seconds": float(row["step_time"]),
                "reward": float(row["reward"]),
                "mean_length": float(row["completions/mean_length"]),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
