"""How to speculate: `SpeculativeConfig`, with vLLM's field names, checked at construction."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from rollout.byte_sizes import parse_bytes

MOST_DRAFTS = 16
DraftMethod = Literal["ngram", "suffix", "draft_model", "medusa", "eagle"]
METHODS: tuple[DraftMethod, ...] = get_args(DraftMethod)
WITH_WEIGHTS: tuple[DraftMethod, ...] = ("draft_model", "medusa", "eagle")
_LATER = ("eagle3", "mtp", "mlp_speculator")
# field -> the methods that use it
_USED_BY: dict[str, tuple[DraftMethod, ...]] = {
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "suffix_decoding_max_cached_tokens": ("suffix",),
    "num_alternatives": ("suffix",),
    "model": WITH_WEIGHTS,
    "draft_kv_cache_memory": ("draft_model", "eagle"),
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding, which changes speed and, with the default verification, nothing else
    (`docs/speculation.md`).

    `method` says where the guesses come from. "ngram": what followed the last time that the sample's own tokens, prompt
    and output, ended as they do now, in the longest n-gram of `prompt_lookup_min` to `prompt_lookup_max` tokens.
    "suffix": what the sample's noise makes of all that followed there, and in the other samples of the same prompt,
    running or finished, of this call and of earlier ones, and after the same tokens in any sample;
    `suffix_decoding_max_cached_tokens` (ours) is how many tokens of finished ones are remembered.
    `num_alternatives` (ours) is how many guesses a sequence may have in the place of its drafts: where a draft is
    wrong, one of these may be right. There are none on CUDA, nor with other verification than "coupled".
    "draft_model": what a smaller model with the same vocabulary draws. "medusa", "eagle": what heads on the model's own
    hidden states do. `model` is the folder of their weights. `draft_kv_cache_memory` (ours; bytes, or text such as
    "512MiB") is for the keys and values of a draft model or of EAGLE's layer; without it the sequences of a full batch
    that speculates can be as long as any, if the engine's own pool is as large.

    A step checks up to `num_speculative_tokens` of them a sequence, fewer where few were right lately, and none while
    more than `max_batch_for_speculation` sequences decode (ours): a full batch has no idle arithmetic to spend.
    With `only_if_faster` (ours) neither are there any in steps of as many sequences as have been slower a token for it
    lately, by the clock.

    `verification="coupled"`: a guess is right where it is the token that would be drawn without it. "rejection": it is
    taken with the chance that leaves the distribution of the output as it is (`rollout.speculation.rejection`); which
    tokens come then depends on the guesses, except at temperature 0.

    Raises `ValueError` naming the field, the value and the valid range.
    """

    method: DraftMethod
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_cached_tokens: int = 2**18
    num_alternatives: int = 6
    model: str | None = None
    draft_kv_cache_memory: int | str | None = None
    max_batch_for_speculation: int = 8
    only_if_faster: bool = True
    verification: Literal["coupled", "rejection"] = "coupled"

    def __post_init__(self) -> None:
        if self.method in _LATER:
            usable = ", ".join(repr(method) for method in METHODS if method not in _LATER)
            raise ValueError(f"method={self.method!r} is not supported yet: use one of {usable}")
        if self.method not in METHODS:
            valid = ", ".join(map(repr, METHODS))
            raise ValueError(f"method={self.method!r} is not valid: it must be one of {valid}")
        if self.verification not in ("coupled", "rejection"):
            raise ValueError(f"verification={self.verification!r} is not valid: it must be 'coupled' or 'rejection'")
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_DRAFTS)
        _check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, 64)
        _check_integer("prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ValueError(
                f"prompt_lookup_max={self.prompt_lookup_max} is not valid: it must be at least "
                f"prompt_lookup_min={self.prompt_lookup_min}"
            )
        _check_integer("suffix_decoding_max_cached_tokens", self.suffix_decoding_max_cached_tokens, 0, None)
        _check_integer("num_alternatives", self.num_alternatives, 0, MOST_DRAFTS)
        _check_integer("max_batch_for_speculation", self.max_batch_for_speculation, 1, None)
        if not isinstance(self.only_if_faster, bool):
            raise ValueError(f"only_if_faster={self.only_if_faster!r} is not valid: it must be True or False")
        self._check_model()
        for field in fields(self):
            value, methods = getattr(self, field.name), _USED_BY.get(field.name, METHODS)
            if self.method not in methods and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} is not used with method={self.method!r}: leave it at {field.default!r}"
                )

    @property
    def has_weights(self) -> bool:
        """Whether the guesses come from a model."""
        return self.method in WITH_WEIGHTS

    def _check_model(self) -> None:
        if self.has_weights and (not isinstance(self.model, str) or not self.model):
            raise ValueError(
                f"model={self.model!r} is not valid with method={self.method!r}: it must be the folder of the "
                "drafter's weights"
            )
        if self.draft_kv_cache_memory is not None:
            size = parse_bytes(self.draft_kv_cache_memory, "draft_kv_cache_memory")
            if size <= 0:
                raise ValueError(
                    f"draft_kv_cache_memory={self.draft_kv_cache_memory!r} is not valid: it must be above 0"
                )
            object.__setattr__(self, "draft_kv_cache_memory", size)


def _check_integer(field: str, value: object, least: int, most: object) -> None:
    """`most` may be another field, which is checked by itself."""
    is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not is_valid or (isinstance(most, int) and isinstance(value, int) and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise ValueError(f"{field}={value!r} is not valid: it must be an integer of at least {least}{upper}")
