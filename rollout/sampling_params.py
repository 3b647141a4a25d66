"""How to sample: `SamplingParams`, with vLLM's field names, checked at construction."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields
from typing import Any

MAX_N = 16384
MAX_SEED = 2**63 - 1
_SMALLEST_TOP_P = 1e-30

# Fields that users know from vLLM, with the value that means "not used". Setting one to anything else raises: a
# parameter that is accepted and ignored would change what is sampled without anybody noticing.
_NOT_SUPPORTED_YET: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "structured_outputs": (None,),
    "logits_processors": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "output_kind": (None,),
    "spaces_between_special_tokens": (True,),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request.

    Filters apply to temperature-scaled logits in the order top-k, top-p, min-p. `temperature=0` is greedy. `top_k` of 0
    or -1 and `top_p=1` and `min_p=0` mean off. `max_tokens=None` means up to the model's length limit.

    `seed` makes the request replayable on its own; without one it gets a seed derived from the engine's seed and its
    running number, returned with the output. Sample `i` of a request draws with sample index `first_sample_index + i`,
    so one sample of a group can be replayed or resumed alone.

    `logprobs` takes None or 0: every output carries the sampled tokens' logprob arrays in any case, and 0 adds vLLM's
    per-token dictionaries of the sampled token.

    Raises `ValueError` naming the field, the value and the valid range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    first_sample_index: int = 0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    structured_outputs: Any = None
    logits_processors: Any = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    output_kind: Any = None

    def __post_init__(self) -> None:
        _normalise(self)
        _check_numbers(self)
        _check_stops(self)
        _refuse_unsupported(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty where there are none."""
        return self.stop  # type: ignore[return-value]  # `_normalise` made it a tuple

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is taken instead of a draw."""
        return self.temperature == 0.0


def _normalise(params: SamplingParams) -> None:
    stop, ids = params.stop, params.stop_token_ids
    if stop is not None and not isinstance(stop, (str, Sequence)):
        _fail("stop", stop, "a string that is not empty, or a list of such strings")
    if ids is not None and (isinstance(ids, str) or not isinstance(ids, (Sequence, Set))):
        _fail("stop_token_ids", ids, "a list of token ids of the vocabulary (0 or more)")
    object.__setattr__(params, "stop", (stop,) if isinstance(stop, str) else tuple(stop or ()))
    object.__setattr__(params, "stop_token_ids", tuple(dict.fromkeys(ids or ())))
    if params.top_k == -1:
        object.__setattr__(params, "top_k", 0)


def _fail(field: str, value: object, valid: str) -> None:
    raise ValueError(f"{field}={value!r} is not valid: it must be {valid}")


def _check_integer(params: SamplingParams, field: str, low: int, high: int | None, optional: bool = False) -> None:
    value = getattr(params, field)
    if value is None and optional:
        return
    valid = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    valid += " or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        _fail(field, value, valid)


def _check_real(params: SamplingParams, field: str, low: float, high: float, open_low: bool = False) -> None:
    value = getattr(params, field)
    valid = f"a finite number {'above' if open_low else 'from'} {low:g} {'and up to' if open_low else 'to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _fail(field, value, valid)
    if value > high or value < low or (open_low and value == low):
        _fail(field, value, valid)


def _check_numbers(params: SamplingParams) -> None:
    _check_integer(params, "n", 1, MAX_N)
    _check_integer(params, "first_sample_index", 0, 2**31 - 1)
    _check_integer(params, "seed", 0, MAX_SEED, optional=True)
    _check_integer(params, "top_k", 0, None)
    _check_integer(params, "max_tokens", 1, None, optional=True)
    _check_integer(params, "min_tokens", 0, None)
    _check_integer(params, "logprobs", 0, None, optional=True)
    _check_real(params, "temperature", 0.0, 1e6)
    _check_real(params, "top_p", 0.0, 1.0, open_low=True)
    _check_real(params, "min_p", 0.0, 1.0)
    if params.top_p < _SMALLEST_TOP_P:
        _fail("top_p", params.top_p, f"from {_SMALLEST_TOP_P:g} to 1 (the kernels compute in float32)")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        _fail("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")


def _check_stops(params: SamplingParams) -> None:
    for text in params.stop_strings:
        if not isinstance(text, str) or not text:
            _fail("stop", text, "a string that is not empty, or a list of such strings")
    for token_id in params.stop_token_ids or ():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            _fail("stop_token_ids", token_id, "token ids of the vocabulary (0 or more)")
    if params.stop_strings and not params.detokenize:
        _fail("detokenize", params.detokenize, "True when stop strings are given, since they are matched in text")


def _refuse_unsupported(params: SamplingParams) -> None:
    if params.logprobs:
        raise ValueError(
            f"logprobs={params.logprobs!r} is not supported yet: use None or 0 (the logprobs of sampled tokens are "
            "always returned, as arrays)"
        )
    known = {field.name for field in fields(params)}
    for field, neutral in _NOT_SUPPORTED_YET.items():
        assert field in known
        value = getattr(params, field)
        if value not in neutral:
            raise ValueError(f"{field}={value!r} is not supported yet: leave it at {neutral[0]!r}")
