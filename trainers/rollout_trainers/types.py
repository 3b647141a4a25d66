"""The vocabulary of the trainers: examples, samples, and what a step makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Prompt = str | list[dict[str, str]] | list[int]  # text, chat messages, or token ids

# reward(prompts, completions, **columns) -> one number per completion. A chat prompt's completion is a list with one
# assistant message; the completion of a text prompt is text. `columns` are the example's, repeated for each sample.
RewardFunction = Callable[..., Sequence[float]]


@dataclass(frozen=True, slots=True)
class Example:
    """One training or evaluation example: `Example([{"role": "user", "content": "2 + 3 ="}], {"answer": "5"})`."""

    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """Examples to learn from, examples never trained on, and what is rewarded (the sum of the functions' values)."""

    name: str
    train: Sequence[Example]
    evaluation: Sequence[Example]
    rewards: tuple[RewardFunction, ...]


@dataclass(slots=True)
class Sample:
    """One completion of one example. The arrays are float32, one value per token of `completion_token_ids`."""

    example: Example
    group: int  # position of its prompt in the step
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    text: str
    finish_reason: str
    sampled_logprobs: np.ndarray
    raw_logprobs: np.ndarray  # at temperature 1
    entropy: np.ndarray
    seed: int
    sample_index: int
    policy_version: int
    receipt_id: str | None = None  # of the weights that sampled it
    reward: float = 0.0  # filled by `rewards.score`, as are `rewards`
    rewards: dict[str, float] = field(default_factory=dict)
    # What follows is filled by the trainer. The arrays are frozen at the start of a step's updates.
    penalty: float = 0.0  # what is added to the reward for its length, at most 0
    advantage: float = 0.0  # the mean over its tokens where `token_advantages` has one for each
    token_advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None  # None: the sampler's are used
    reference_logprobs: np.ndarray | None = None  # of the policy that the run began with, for a KL term
    importance: np.ndarray | None = None  # weights that account for a sampler that is not the trainer
    values: np.ndarray | None = None  # what the critic expects before each token
    returns: np.ndarray | None = None  # what it should have said

    @property
    def num_tokens(self) -> int:
        """Completion tokens: the engine's own count, never inferred from token values."""
        return len(self.completion_token_ids)

    @property
    def frozen_logprobs(self) -> np.ndarray:
        """Under the policy that the step has begun with: the trainer's where it has recomputed them."""
        return self.sampled_logprobs if self.old_logprobs is None else self.old_logprobs

    @property
    def has_advantage(self) -> bool:
        """Whether some token's advantage is not zero."""
        return bool(self.token_advantages.any()) if self.token_advantages is not None else self.advantage != 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether the length limit, and not the model, ended it."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sample as people read it, in the table of samples and in the report."""

    step: int
    prompt: str
    completion: str
    reward: float
    advantage: float
    num_tokens: int
    finish_reason: str
    columns: dict[str, Any]
    split: str = "train"  # or "held out"
