"""What the fields of `SamplingParams` may hold. Errors name the field, the value and the valid range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NoReturn, TypeGuard

from rollout.sampling_options import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

if TYPE_CHECKING:
    from rollout.sampling_params import SamplingParams

MAX_N = 16384
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_CHOSEN_TOKENS = 128  # in `logprob_token_ids`
MAX_SAMPLE_INDEX = 2**31 - 1
MAX_BIAS = 1e30  # float32, in which the kernels compute, goes to 3e38
_SMALLEST_TOP_P = 1e-30
_MOST_DIGITS = 10  # of a token id
_TOKEN_IDS = "a list of token ids of the vocabulary (0 or more)"
_TEXTS = "a string that is not empty, or a list of such strings"


def normalise(params: SamplingParams) -> None:
    """One form for values that may be given in several: tuples for lists, None for what is not set."""
    set_field = object.__setattr__
    set_field(params, "stop", _texts("stop", params.stop))
    set_field(params, "bad_words", _texts("bad_words", params.bad_words))
    set_field(params, "stop_token_ids", tuple(dict.fromkeys(_ids("stop_token_ids", params.stop_token_ids) or ())))
    for field in ("allowed_token_ids", "logprob_token_ids"):
        ids = _ids(field, getattr(params, field))
        set_field(params, field, None if ids is None else tuple(dict.fromkeys(ids)))
    set_field(params, "forced_token_ids", _ids("forced_token_ids", params.forced_token_ids))
    set_field(params, "logit_bias", _bias(params.logit_bias))
    processors = params.logits_processors
    if processors is not None and not isinstance(processors, (list, tuple)):
        processors = [processors]
    set_field(params, "logits_processors", tuple(processors or ()) or None)
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(params, field) is True:
            set_field(params, field, 1)
    if params.top_k == -1:
        set_field(params, "top_k", 0)
    if params.seed == -1:
        set_field(params, "seed", None)
    if isinstance(params.output_kind, int) and not isinstance(params.output_kind, bool):
        if params.output_kind not in list(RequestOutputKind):
            _fail("output_kind", params.output_kind, "one of RequestOutputKind (0, 1 or 2)")
        set_field(params, "output_kind", RequestOutputKind(params.output_kind))


def check(params: SamplingParams) -> None:
    """Raises `ValueError` for the first field that holds what it must not."""
    _check_numbers(params)
    _check_tokens(params)
    _check_texts(params)
    _check_kinds(params)
    _check_combinations(params)


def resolve_count(count: int | None, vocab_size: int) -> int:
    """How many most likely tokens `logprobs` or `prompt_logprobs` ask for: -1 is the whole vocabulary."""
    return vocab_size if count == -1 else min(count or 0, vocab_size)


def tokens_outside(params: SamplingParams, vocab_size: int) -> str | None:
    """Which field names a token that the vocabulary does not have, in a sentence."""
    fields: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "forced_token_ids": params.forced_token_ids or (),
        "logit_bias": params.logit_bias or (),
    }
    for field, ids in fields.items():
        for token_id in ids:
            if token_id >= vocab_size:
                return f"{field} holds {token_id}: ids must be from 0 to {vocab_size - 1}"
    return None


def _fail(field: str, value: object, valid: str) -> NoReturn:
    raise ValueError(f"{field}={value!r} is not valid: it must be {valid}")


def _texts(field: str, value: object) -> tuple[str, ...]:
    if value is not None and (isinstance(value, bytes) or not isinstance(value, (str, Sequence))):
        _fail(field, value, _TEXTS)
    return (value,) if isinstance(value, str) else tuple(value or ())


def _ids(field: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Set)):
        _fail(field, value, _TOKEN_IDS)
    return tuple(value)


def _is_real(value: object) -> TypeGuard[int | float]:
    """Whether it is a number. One that is too large for a float is left to the check of the range."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _bias(value: object) -> dict[int, float] | None:
    """JSON has no integer keys, so that digits are taken for them."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        _fail("logit_bias", value, "a dict from token ids to numbers")
    bias: dict[int, float] = {}
    for key, number in value.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS
        token_id = int(key) if is_digits else key
        if not _is_token_id(token_id):
            _fail("logit_bias", key, "a dict whose keys are token ids of the vocabulary (0 or more)")
        if token_id in bias:
            _fail("logit_bias", key, "a dict that names each token id once")
        if not _is_real(number) or not -MAX_BIAS <= number <= MAX_BIAS:
            _fail(f"logit_bias[{key!r}]", number, f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        bias[token_id] = float(number)
    return bias or None


def _integer(params: SamplingParams, field: str, low: int, high: int | None = None, optional: bool = False) -> None:
    value = getattr(params, field)
    if value is None and optional:
        return
    valid = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    valid += " or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        _fail(field, value, valid)


def _real(params: SamplingParams, field: str, low: float, high: float, open_low: bool = False) -> None:
    value = getattr(params, field)
    valid = f"a finite number {'above' if open_low else 'from'} {low:g} {'and up to' if open_low else 'to'} {high:g}"
    if not _is_real(value):
        _fail(field, value, valid)
    if value > high or value < low or (open_low and value == low):
        _fail(field, value, valid)


def _check_numbers(params: SamplingParams) -> None:
    _integer(params, "n", 1, MAX_N)
    _integer(params, "first_sample_index", 0, MAX_SAMPLE_INDEX)
    _integer(params, "seed", 0, MAX_SEED, optional=True)
    _integer(params, "top_k", 0)
    _integer(params, "max_tokens", 1, optional=True)
    _integer(params, "min_tokens", 0)
    _integer(params, "logprobs", -1, optional=True)
    _integer(params, "prompt_logprobs", -1, optional=True)
    _integer(params, "thinking_token_budget", 0, optional=True)
    _real(params, "temperature", 0.0, 1e6)
    _real(params, "top_p", 0.0, 1.0, open_low=True)
    _real(params, "min_p", 0.0, 1.0)
    _real(params, "presence_penalty", -2.0, 2.0)
    _real(params, "frequency_penalty", -2.0, 2.0)
    _real(params, "repetition_penalty", 1e-6, 1e6)
    if params.top_p < _SMALLEST_TOP_P:
        _fail("top_p", params.top_p, f"from {_SMALLEST_TOP_P:g} to 1 (the kernels compute in float32)")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        _fail("min_tokens", params.min_tokens, f"at most max_tokens ({params.max_tokens})")


def _check_tokens(params: SamplingParams) -> None:
    for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "forced_token_ids"):
        for token_id in getattr(params, field) or ():
            if not _is_token_id(token_id):
                _fail(field, token_id, "token ids of the vocabulary (0 or more)")
    if params.allowed_token_ids == ():
        _fail("allowed_token_ids", [], "a list of at least one token id, or None")
    if len(params.logprob_token_ids or ()) > MAX_CHOSEN_TOKENS:
        _fail("logprob_token_ids", f"{len(params.logprob_token_ids or ())} ids", f"at most {MAX_CHOSEN_TOKENS} ids")


def _check_texts(params: SamplingParams) -> None:
    for field in ("stop", "bad_words"):
        for text in getattr(params, field):
            if not isinstance(text, str) or not text:
                _fail(field, text, _TEXTS)
            if any("\ud800" <= char <= "\udfff" for char in text):
                _fail(field, text, "text without surrogates, which no output has")
    if params.stop_strings and not params.detokenize:
        _fail("detokenize", params.detokenize, "True when stop strings are given, since they are matched in text")


def _check_kinds(params: SamplingParams) -> None:
    for field in (
        "include_stop_str_in_output",
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    ):
        if not isinstance(getattr(params, field), bool):
            _fail(field, getattr(params, field), "True or False")
    for field, kind in (
        ("structured_outputs", StructuredOutputsParams),
        ("repetition_detection", RepetitionDetectionParams),
    ):
        value = getattr(params, field)
        if value is not None and not isinstance(value, kind):
            _fail(field, value, f"a {kind.__name__}, or None")
    if not isinstance(params.output_kind, RequestOutputKind):
        _fail("output_kind", params.output_kind, "one of RequestOutputKind")
    for processor in params.logits_processors or ():
        if not callable(processor):
            _fail("logits_processors", processor, "a callable on tensors, or a list of such")


def _check_combinations(params: SamplingParams) -> None:
    if params.first_sample_index + params.n - 1 > MAX_SAMPLE_INDEX:
        _fail("first_sample_index", params.first_sample_index, f"at most {MAX_SAMPLE_INDEX + 1} - n (n={params.n})")
    num_forced = len(params.forced_token_ids or ())
    if params.max_tokens is not None and num_forced > params.max_tokens:
        _fail("forced_token_ids", f"{num_forced} ids", f"at most max_tokens ({params.max_tokens}) ids")
    if params.structured_outputs is not None and params.thinking_token_budget is not None:
        _fail(
            "thinking_token_budget",
            params.thinking_token_budget,
            "None with structured_outputs, which is of the whole output and leaves no room for reasoning",
        )
