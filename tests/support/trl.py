"""TRL's own trainers, unmodified, on tiny models. `rollout.compat.install` comes first where they use vLLM."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra `trl`")

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # read when a trainer is made: online DPO and rollout_func are such

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 2, 4, 8
# What every configuration of the tests has. Nothing ends early, so that every group has samples to compare.
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": NUM_PROMPTS * NUM_SAMPLES,
    "max_steps": 2,
    "learning_rate": 0.01,  # much: a policy that was not pushed must show
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
GROUPS: dict[str, Any] = {"num_generations": NUM_SAMPLES, "max_completion_length": MAX_TOKENS}
ENGINE: dict[str, Any] = {"kv_cache_memory": "1MiB", "block_size": 4, "max_num_batched_tokens": 64, "dtype": "float32"}


def conversations() -> Any:
    """A data set of one-message conversations, with a column that reward functions get."""
    from datasets import Dataset

    texts = [f"add {number} and {number + 3}" for number in range(16)]
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": text[-1]} for text in texts]
    return Dataset.from_list(rows)


def spread(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that differs from sample to sample of a group."""
    return [float(sum(ids) % 13) for ids in completion_ids]


def grpo_trainer(folder: Path, output: Path, reward: Any = spread, **options: Any) -> Any:
    """A `trl.GRPOTrainer` of two steps; what is no argument of its own goes to `GRPOConfig`."""
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    own = {
        name: options.pop(name)
        for name in ("rollout_func", "peft_config", "eval_dataset", "tools", "processing_class")
        if name in options
    }
    values = COMMON | GROUPS | options
    config = GRPOConfig(output_dir=str(output), **values)
    return GRPOTrainer(model=str(folder), reward_funcs=reward, args=config, train_dataset=conversations(), **own)


def rloo_trainer(folder: Path, output: Path, reward: Any = spread, **options: Any) -> Any:
    """A `trl.RLOOTrainer` of two steps."""
    from trl import RLOOConfig, RLOOTrainer  # pyright: ignore[reportPrivateImportUsage]

    values = COMMON | GROUPS | options
    config = RLOOConfig(output_dir=str(output), **values)
    return RLOOTrainer(model=str(folder), reward_funcs=reward, args=config, train_dataset=conversations())


def online_dpo_trainer(folder: Path, output: Path, reward: Any, **options: Any) -> Any:
    """An `OnlineDPOTrainer` of two steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    lengths: dict[str, Any] = {"max_new_tokens": MAX_TOKENS, "max_length": 128}
    values = COMMON | lengths | options
    return OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=reward,
        args=OnlineDPOConfig(output_dir=str(output), **values),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        train_dataset=conversations().remove_columns("answer"),
    )


def logged(trainer: Any, name: str) -> list[float]:
    """What the trainer logged under a name, step by step."""
    return [float(row[name]) for row in trainer.state.log_history if name in row]
