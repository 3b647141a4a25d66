"""How to sample: `SamplingParams`, with vLLM's field names, checked at construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.sampling_checks import MAX_N, MAX_SEED, check, normalise
from rollout.sampling_options import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

__all__ = [
    "MAX_N",
    "MAX_SEED",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request.

    What a token is drawn from, in this order: the model's logits; `repetition_penalty`, `frequency_penalty` and
    `presence_penalty`; `logit_bias`; `logits_processors`; `temperature` (0 is greedy); what may not come at all
    (`allowed_token_ids`, `bad_words`, `min_tokens`, `structured_outputs`); `top_k` (0 or -1 is off), `top_p`, `min_p`.

    `seed` makes the request replayable on its own; without one it gets a seed derived from the engine's seed and its
    running number, returned with the output. Sample `i` of a request draws with sample index `first_sample_index + i`,
    so one sample of a group can be replayed or resumed alone. `max_tokens=None` means up to the model's length limit.
    The output begins with `forced_token_ids`, which are reported on as if they had been drawn (`docs/trees.md`).

    Raises `ValueError` naming the field, the value and the valid range. `docs/sampling.md` says what each field does.
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
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    forced_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        normalise(self)
        check(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty where there are none."""
        return self.stop  # type: ignore[return-value]  # `normalise` made it a tuple

    @property
    def is_greedy(self) -> bool:
        """Whether the argmax is taken instead of a draw."""
        return self.temperature == 0.0

    @property
    def wants_top_logprobs(self) -> bool:
        """Whether each sampled token comes with its rank, the most likely tokens, or tokens that were named."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that a sample has already are more or less likely because of that."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def adjusts_logits(self) -> bool:
        """Whether a draw takes more than the model's logits, the temperature and the filters."""
        optional = (self.logit_bias, self.allowed_token_ids, self.bad_words, self.logits_processors)
        return bool(
            self.has_penalty
            or any(optional)
            or self.structured_outputs is not None
            or self.thinking_token_budget is not None
        )
