"""A small run on episodes: its questions, its environment, its model and its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollout_trainers.config import RunConfig
from rollout_trainers.environments import Action, StepResult
from rollout_trainers.recipe import config_from_values
from rollout_trainers.types import Example
from tests.support.environments import Echo
from tests.support.tiny import make_tiny_llama

TRAIN = [Example([{"role": "user", "content": text}], {"answer": text}) for text in ("abc", "what", "two", "q", "the")]


class LowIds(Echo):
    """Two turns; each earns the share of its token ids below 60."""

    def __init__(self) -> None:
        super().__init__(2)

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        share = sum(token < 60 for token in action.token_ids) / len(action.token_ids)
        return result._replace(reward=share / 2)


def make_talkative_llama(folder: Path) -> Path:
    """It ends its turns soon: a fifth of the ids does."""
    return make_tiny_llama(
        folder,
        tokenizer=True,
        dtype=torch.bfloat16,
        near_uniform=True,
        max_position_embeddings=1024,
        eos_token_id=[2, *range(40, 60)],
    )


def episode_run(model: Path, output: Path, *overrides: str, **sections: dict[str, Any]) -> RunConfig:
    """Three steps on groups of three episodes; `sections` stand for the recipe's own."""
    values = {
        "model": str(model),
        "name": "tiny",
        "output_dir": str(output),
        "steps": 3,
        "environment": {"max_turns": 3},
        "optimizer": {"learning_rate": 3e-3},
        "evaluation": {"temperature": 1.0, "success_threshold": 0.6},
        "tracking": {"wandb": "disabled"},
        **sections,
    }
    return config_from_values(values, overrides)
