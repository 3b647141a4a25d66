"""Samples for trainer tests, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout_trainers.types import Example, Sample


def make_sample(
    prompt_token_ids: list[int],
    completion_token_ids: list[int],
    *,
    advantage: float = 0.0,
    reward: float = 0.0,
    text: str = "",
    finish_reason: str = "stop",
    group: int = 0,
    prompt: Any = "question",
    columns: dict[str, Any] | None = None,
) -> Sample:
    """A sample whose logprobs are -1, -1.5, -2, ... and whose entropies are 1."""
    count = len(completion_token_ids)
    return Sample(
        example=Example(prompt, columns or {}),
        group=group,
        prompt_token_ids=prompt_token_ids,
        completion_token_ids=completion_token_ids,
        text=text,
        finish_reason=finish_reason,
        sampled_logprobs=(-1 - 0.5 * np.arange(count)).astype(np.float32),
        raw_logprobs=(-1 - 0.5 * np.arange(count)).astype(np.float32),
        entropy=np.ones(count, dtype=np.float32),
        seed=0,
        sample_index=0,
        policy_version=0,
        reward=reward,
        advantage=advantage,
    )
