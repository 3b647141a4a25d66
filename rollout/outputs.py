"""What `generate` returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from rollout.config import LogprobsMode
from rollout.logprobs import Logprob, PromptLogprobs, SampleLogprobs
from rollout.lora.request import LoRARequest

__all__ = [
    "SMALLEST_JSON_LOGPROB",
    "CompletionOutput",
    "Logprob",
    "PolicyVersionSpan",
    "RequestOutput",
    "ScoreOutput",
    "json_safe",
]

SMALLEST_JSON_LOGPROB = -9999.0  # stands for -inf, which JSON does not have; the number that vLLM's server writes


class PolicyVersionSpan(NamedTuple):
    """Output tokens `start` to `end` (exclusive) were sampled by policy `version`.

    An output with one span was computed by that policy alone. With several, a policy update has kept the request, and
    the later spans may have been sampled from KV that older policies computed ("keep").
    """

    version: int
    start: int
    end: int


@dataclass(slots=True)
class CompletionOutput:
    """One sample.

    The arrays hold one float32 value per token of `token_ids`. `raw_logprobs`: the model's own distribution
    (temperature 1, nothing filtered). `sampled_logprobs`: the distribution that the token was drawn from.
    `kept_mass`: the tempered mass that the filters kept, so that the tempered logprob over the whole vocabulary is
    `sampled_logprobs + log(kept_mass)`. `entropy`: nats, of the tempered distribution before filters.
    `seed` and `sample_index` replay it. A fork's first `branch_position` tokens are those of the sample `parent`
    (request id, sample index). The first `num_forced_tokens` tokens were given, not drawn (`forced_token_ids`).

    `logprobs` is there where `SamplingParams.logprobs` or `logprob_token_ids` asked for it: a dictionary a token, made
    when it is looked at, of the distribution that `logprobs_mode` names, and the arrays behind it.

    `is_delta`: these are only the tokens, arrays and text that are new since the last output of a stream (DELTA), and
    what counts tokens counts those. Whoever needs whole samples refuses them: `resume`, `fork`, trees and sessions.
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
    logprobs: SampleLogprobs | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    is_delta: bool = False

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the logprobs of the sampled tokens, in float64: of the distribution that `logprobs_mode` names."""
        logprobs = self.raw_logprobs if self.logprobs_mode == "raw_logprobs" else self.sampled_logprobs
        return float(logprobs.astype(np.float64).sum())

    @property
    def tempered_logprobs(self) -> np.ndarray:
        """float32 [T]: at the sampling temperature over the whole vocabulary, before filters and masks. A greedy sample
        has those of temperature 1; a forced token that the filters leave out has -inf."""
        tempered = self.sampled_logprobs.astype(np.float64) + np.log(self.kept_mass.astype(np.float64))
        return tempered.astype(np.float32)

    @property
    def top_token_ids(self) -> np.ndarray | None:
        """int32 [T, k]: the most likely tokens at each position, most likely first."""
        return None if self.logprobs is None else self.logprobs.top_token_ids

    @property
    def top_logprobs(self) -> np.ndarray | None:
        """float32 [T, k]: their logprobs."""
        return None if self.logprobs is None else self.logprobs.top_logprobs

    @property
    def token_ranks(self) -> np.ndarray | None:
        """int32 [T]: 1 + the number of tokens with a larger logit than the sampled one."""
        return None if self.logprobs is None else self.logprobs.token_ranks

    @property
    def chosen_logprobs(self) -> np.ndarray | None:
        """float32 [T, m]: logprobs of `SamplingParams.logprob_token_ids` at each position, in their order."""
        return None if self.logprobs is None else self.logprobs.chosen_logprobs

    def finished(self) -> bool:
        return self.finish_reason is not None

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values for JSON; see `json_safe`."""
        return json_safe(self)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its samples, in order of their sample index.

    `policy_version` is the newest that sampled any token, `receipt_id` that of its weights. `receipt_ids` has one for
    every version that the samples' spans name. `error` says why the prompt was refused, where `generate` was told to
    return such prompts; it then has no outputs.

    `prompt_logprobs` is there where `SamplingParams.prompt_logprobs` asked for it: None for the first token, then a
    dictionary a token, always of the raw distribution, since no prompt token was drawn. Where a request was aborted
    before all of its prompt was computed there are fewer entries than tokens. Of the outputs of a stream of deltas
    (`is_delta`) only the first one has it.
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
    prompt_logprobs: PromptLogprobs | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"  # of the dictionaries of the outputs
    is_delta: bool = False  # holds only the samples, and of them only the tokens, that are new (DELTA)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values for JSON; see `json_safe`."""
        return json_safe(self)


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """Log-probabilities of given tokens: `logprobs[i]` is log p(token_ids[i + 1] | token_ids[: i + 1])."""

    token_ids: list[int]
    logprobs: np.ndarray  # float32 [len(token_ids) - 1], raw
    prompt_logprobs: PromptLogprobs | None = None  # as in `RequestOutput`, where the most likely tokens were asked for

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values for JSON; see `json_safe`."""
        return json_safe(self)


def check_whole(output: RequestOutput | CompletionOutput, name: str) -> None:
    """Raises `ValueError` for an output of which only a part is here: `name` (a delta)."""
    if output.is_delta or (isinstance(output, RequestOutput) and any(sample.is_delta for sample in output.outputs)):
        raise ValueError(
            f"{name} is a delta, which holds only the tokens that were new: collect outputs of "
            "output_kind=RequestOutputKind.CUMULATIVE or FINAL_ONLY instead"
        )


def outputs_each(outputs: RequestOutput | Iterable[RequestOutput]) -> list[RequestOutput]:
    """One output, or several, as a list. Raises `TypeError` for what is none."""
    if isinstance(outputs, RequestOutput):
        return [outputs]
    if not isinstance(outputs, Iterable):
        raise TypeError(f"outputs={outputs!r} is not valid: it must be a RequestOutput or a list of them")
    items = list(outputs)
    for item in items:
        if not isinstance(item, RequestOutput):
            raise TypeError(f"outputs holds a {type(item).__name__}: it must be RequestOutput")
    return items


def json_safe(value: Any) -> Any:
    """Outputs, and what they hold, as values that `json.dumps(..., allow_nan=False)` takes.

    Dataclasses and spans become dicts, arrays lists. -inf, the logprob of a token that cannot come, becomes
    -9999.0, as vLLM's server has it; NaN and inf become None.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_safe(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, PolicyVersionSpan):
        return json_safe(value._asdict())
    if isinstance(value, Mapping):
        return {key: json_safe(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return json_safe(value.tolist())
    if isinstance(value, np.generic):
        return json_safe(value.item())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [json_safe(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return SMALLEST_JSON_LOGPROB if value == -math.inf else None
    return value
