"""How to speculate: `SpeculativeConfig`, with vLLM's field names, checked at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST_DRAFTS = 16
_LATER = ("draft_model", "medusa", "eagle", "eagle3", "mtp", "mlp_speculator")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding, which changes speed and nothing else (`docs/speculation.md`).

    `method` says where the guesses come from. "ngram": what followed the last time that the sample's own tokens, prompt
    and output, ended as they do now, in the longest n-gram of `prompt_lookup_min` to `prompt_lookup_max` tokens.
    "suffix": what mostly followed there, and in the other samples of the same prompt, running or finished, of this call
    and of earlier ones; `suffix_decoding_max_cached_tokens` (ours) is how many tokens of finished ones are remembered.

    A step checks up to `num_speculative_tokens` of them a sequence, fewer where few were right lately, and none while
    more than `max_batch_for_speculation` sequences decode (ours): a full batch has no idle arithmetic to spend.
    With `only_if_faster` (ours) neither are there any in steps of as many sequences as have been slower a token for it
    lately, by the clock. `verification` can only be "coupled": a guess is right where it is the token that would be
    drawn without it.

    Raises `ValueError` naming the field, the value and the valid range.
    """

    method: Literal["ngram", "suffix"]
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_cached_tokens: int = 2**18
    max_batch_for_speculation: int = 8
    only_if_faster: bool = True
    verification: Literal["coupled"] = "coupled"

    def __post_init__(self) -> None:
        if self.method in _LATER:
            raise ValueError(f"method={self.method!r} is not supported yet: use 'ngram' or 'suffix'")
        if self.method not in ("ngram", "suffix"):
            raise ValueError(f"method={self.method!r} is not valid: it must be 'ngram' or 'suffix'")
        if self.verification == "rejection":
            raise ValueError("verification='rejection' is not supported yet: leave it at 'coupled'")
        if self.verification != "coupled":
            raise ValueError(f"verification={self.verification!r} is not valid: it must be 'coupled'")
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_DRAFTS)
        _check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _check_integer("prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        _check_integer("suffix_decoding_max_cached_tokens", self.suffix_decoding_max_cached_tokens, 0, None)
        _check_integer("max_batch_for_speculation", self.max_batch_for_speculation, 1, None)
        if not isinstance(self.only_if_faster, bool):
            raise ValueError(f"only_if_faster={self.only_if_faster!r} is not valid: it must be True or False")
        ngram, suffix = (2, 5), 2**18
        if self.method == "suffix" and (self.prompt_lookup_min, self.prompt_lookup_max) != ngram:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min}, prompt_lookup_max={self.prompt_lookup_max} are not used "
                f"with method='suffix': leave them at {ngram[0]} and {ngram[1]}"
            )
        if self.method == "ngram" and self.suffix_decoding_max_cached_tokens != suffix:
            raise ValueError(
                f"suffix_decoding_max_cached_tokens={self.suffix_decoding_max_cached_tokens} is not used with "
                f"method='ngram': leave it at {suffix}"
            )


def _check_integer(field: str, value: object, least: int, most: object) -> None:
    """`most` may be another field, which is checked by itself."""
    is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not is_valid or (isinstance(most, int) and isinstance(value, int) and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise ValueError(f"{field}={value!r} is not valid: it must be an integer of at least {least}{upper}")
