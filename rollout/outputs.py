"""What `generate` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollout.lora.request import LoRARequest


class PolicyVersionSpan(NamedTuple):
    """Output tokens `start` to `end` (exclusive) were sampled by policy `version`.

    An output with one span was computed by that policy alone. With several, a policy update has kept the request, and
    the later spans may have been sampled from KV that older policies computed ("keep").
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Logprob:
    """vLLM's entry of a logprob dictionary. `rank` is None where it was not computed."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample.

    The arrays hold one float32 value per token of `token_ids`. `raw_logprobs`: the model's own distribution
    (temperature 1, nothing filtered). `sampled_logprobs`: the distribution that the token was drawn from.
    `kept_mass`: the tempered mass that the filters kept, so that the tempered logprob over the whole vocabulary is
    `sampled_logprobs + log(kept_mass)`. `entropy`: nats, of the tempered distribution before filters.
    `seed` and `sample_index` replay it. A fork's first `branch_position` tokens are those of the sample `parent`
    (request id, sample index). The first `num_forced_tokens` tokens were given, not drawn (`forced_token_ids`).
    """

    index: int
    text: str
    token_ids: list[int]
    raw_logprobs: np.ndarray
    sampled_logprobs: np.ndarray
    kept_mass: np.ndarray
    entropy: np.ndarray
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int = 0
    sample_index: int = 0
    policy_versions: list[PolicyVersionSpan] = field(default_factory=list)
    parent: tuple[str, int] | None = None
    branch_position: int = 0
    num_forced_tokens: int = 0
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the raw logprobs of the sampled tokens, in float64."""
        return float(self.raw_logprobs.astype(np.float64).sum())

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its samples, in order of their sample index.

    `policy_version` is the newest that sampled any token, `receipt_id` that of its weights. `receipt_ids` has one for
    every version that the samples' spans name. `error` says why the prompt was refused, where `generate` was told to
    return such prompts; it then has no outputs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    policy_version: int = 0
    receipt_id: str | None = None
    error: str | None = None
    receipt_ids: dict[int, str] = field(default_factory=dict)
    lora_request: LoRARequest | None = None  # the adapter that it was sampled with
    cache_salt: str | None = None  # as it was given with the prompt


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """Log-probabilities of given tokens: `logprobs[i]` is log p(token_ids[i + 1] | token_ids[: i + 1])."""

    token_ids: list[int]
    logprobs: np.ndarray  # float32 [len(token_ids) - 1], raw
