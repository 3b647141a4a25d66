"""The vocabulary of the trainers: examples, samples, and what a step makes of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.outputs import PolicyVersionSpan

Prompt = str | list[dict[str, str]] | list[int]  # text, chat messages, or token ids

# reward(prompts, completions, **columns) -> one number per completion, None where it does not apply. It may be async.
# A chat prompt's completion is a list with one assistant message, and of an episode all messages after the prompt; the
# completion of a text prompt is text. `columns` are the example's, repeated for each sample. See `rewards.score`.
RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]


@dataclass(frozen=True, slots=True)
class Example:
    """One training or evaluation example: `Example([{"role": "user", "content": "2 + 3 ="}], {"answer": "5"})`."""

    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """Examples to learn from, examples never trained on, and what is rewarded (the sum of the functions' values).

    `further_evaluations` are more sets of such examples by name, which are evaluated beside `evaluation`; the metrics
    of one that is called "hard" are `eval/hard/accuracy` and so on.

    With an `environment`, which makes a fresh one for each episode, the policy takes turns with it; what it gives is
    added to the reward.
    """

    name: str
    train: Sequence[Example]
    evaluation: Sequence[Example]
    rewards: tuple[RewardFunction, ...]
    environment: Callable[[], Any] | None = None  # -> environments.Environment
    further_evaluations: Mapping[str, Sequence[Example]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.further_evaluations:
            if not name or "/" in name:
                raise ValueError(f"a set of held-out examples cannot be called {name!r}: no name is empty or has a '/'")

    @property
    def held_out(self) -> dict[str, Sequence[Example]]:
        """All sets that are not empty, by name; `evaluation` has none."""
        sets = {"": self.evaluation, **self.further_evaluations}
        return {name: examples for name, examples in sets.items() if len(examples) > 0}


# Finish reasons of what a limit has cut off: of a sample, and (also) of an episode.
TRUNCATED = frozenset({"length", "max_turns", "timeout"})


@dataclass(slots=True)
class EpisodeNotes:
    """What an environment says of an episode, beside its tokens: `messages` are those after the prompt, `turn_rewards`
    what it gave for each of the policy's turns, `metrics` numbers of its own by name. `turn_ends` has an entry for each
    turn, counted in the policy's tokens; the last turn may not have been answered."""

    messages: list[dict[str, Any]]
    turn_rewards: list[float]
    turn_ends: list[int]
    environment: Any  # the instance, closed by now; None of an episode that a checkpoint has kept
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None  # why it broke off, where the environment has failed

    @property
    def reward(self) -> float:
        """The sum over the turns."""
        return sum(self.turn_rewards)

    @property
    def num_turns(self) -> int:
        return len(self.turn_ends)


@dataclass(slots=True)
class Sample:
    """One completion of one example: what was sampled after its prompt or, of an episode in an environment, all that
    came after it, in one sequence: the policy's tokens and what it was answered.

    The arrays are float32, one value per token of the policy's: per token of `completion_token_ids` that `loss_mask`
    marks, or per token of all where that is None.
    """

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
    policy_version: int  # the newest that has sampled some token of it
    receipt_id: str | None = None  # of the weights of that version
    versions: tuple[PolicyVersionSpan, ...] = ()  # where several have: which of the policy's tokens
    loss_mask: np.ndarray | None = None  # bool, one per completion token: the policy's own. None: all are
    episode: EpisodeNotes | None = None  # of a sample that an environment has answered
    reward: float = 0.0  # filled by `rewards.score`, as are `rewards`
    rewards: dict[str, float] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)  # what reward functions have said of it, for people
    # What follows is filled by the trainer. The arrays are frozen at the start of a step's updates.
    penalty: float = 0.0  # what is added to the reward for its length, at most 0
    advantage: float = 0.0  # the mean over its tokens where `token_advantages` has one for each
    token_advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None  # None: the sampler's are used
    reference_logprobs: np.ndarray | None = None  # of the policy that the run began with, for a KL term
    teacher_logprobs: np.ndarray | None = None  # of the model that the policy is distilled from, where there is one
    importance: np.ndarray | None = None  # weights that account for a sampler that is not the trainer
    values: np.ndarray | None = None  # what the critic expects before each token
    returns: np.ndarray | None = None  # what it should have said

    @property
    def num_tokens(self) -> int:
        """Tokens of the policy's: the engine's own count, never inferred from token values."""
        return len(self.completion_token_ids) if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def policy_token_ids(self) -> list[int]:
        """The completion tokens that the policy has sampled."""
        if self.loss_mask is None:
            return self.completion_token_ids
        return [token for token, is_own in zip(self.completion_token_ids, self.loss_mask, strict=True) if is_own]

    @property
    def policy_spans(self) -> list[tuple[int, int]]:
        """Where in `completion_token_ids` the policy's tokens stand: (start, end) of each run of them."""
        if self.loss_mask is None:
            return [(0, len(self.completion_token_ids))] if self.completion_token_ids else []
        edges = np.flatnonzero(np.diff(self.loss_mask.astype(np.int8), prepend=0, append=0))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]

    @property
    def oldest_version(self) -> int:
        """Of the policies that have sampled some token of it."""
        return min((span.version for span in self.versions), default=self.policy_version)

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
        """Whether a limit, and not the model or its environment, ended it."""
        return self.finish_reason in TRUNCATED


def messages_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Who said what, for people to read; of a message without content the tools that it calls."""
    return "\n".join(
        f"{message['role']}: {message.get('content') or message.get('tool_calls', '')}" for message in messages
    )


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
    logprob: float | None = None  # mean of its tokens' at temperature 1; None: it has none
    entropy: float | None = None  # mean, of what they were sampled from
