"""The samples of a diagnosis: what the sampler returned, and what the trainer made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout.outputs import PolicyVersionSpan, RequestOutput, check_whole
from rollout.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One sample as the engine returned it. The arrays hold one float32 value per token of `token_ids`.

    `params` of None: how it was sampled is not known, and is not needed for most causes. Without `policy_versions` it
    counts as sampled by `policy_version`.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    raw_logprobs: np.ndarray
    sampled_logprobs: np.ndarray
    kept_mass: np.ndarray | None = None  # None: nothing was filtered
    policy_versions: Sequence[PolicyVersionSpan] = ()
    policy_version: int = 0
    receipt_id: str | None = None
    num_cached_tokens: int = 0
    params: SamplingParams | None = None

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt_token_ids, *self.token_ids]

    @property
    def temperature(self) -> float | None:
        return None if self.params is None else self.params.temperature

    def tempered_logprobs(self) -> np.ndarray:
        """float64 [tokens], of the whole distribution at the sampling temperature."""
        kept = 1.0 if self.kept_mass is None else self.kept_mass.astype(np.float64)
        return self.sampled_logprobs.astype(np.float64) + np.log(kept)

    def versions(self) -> np.ndarray:
        """int64 [tokens]: the policy version that sampled each token."""
        versions = np.full(len(self.token_ids), self.policy_version, np.int64)
        for span in self.policy_versions:
            versions[span.start : span.end] = span.version
        return versions


@dataclass(slots=True)
class Case:
    """A record with the trainer's side of it. `trainer_token_ids` are the completion as the trainer had it."""

    index: int  # position among the samples that were given
    record: SampleRecord
    trainer_token_ids: list[int]
    trainer_logprobs: np.ndarray | None = None  # float64, what the trainer used
    num_tokens: int = field(init=False)  # that both sides have

    def __post_init__(self) -> None:
        self.num_tokens = min(len(self.record.token_ids), len(self.trainer_token_ids))

    @property
    def trainer_sequence(self) -> list[int]:
        return [*self.record.prompt_token_ids, *self.trainer_token_ids]

    @property
    def is_retokenised(self) -> bool:
        return self.trainer_token_ids != self.record.token_ids

    def first_difference(self) -> int:
        """Position of the first completion token that is not the sampled one."""
        pairs = zip(self.record.token_ids, self.trainer_token_ids, strict=False)
        return next((place for place, (a, b) in enumerate(pairs) if a != b), self.num_tokens)


def records_of(
    samples: Sequence[RequestOutput | SampleRecord],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[SampleRecord]:
    """The samples one after the other, prompt after prompt.

    `sampling_params` is that of `generate`: one for all outputs, or one each. Raises `ValueError` where the counts
    differ.
    """
    each: list[SamplingParams | None] = [None] * len(samples)
    if isinstance(sampling_params, SamplingParams):
        each = [sampling_params] * len(samples)
    elif sampling_params is not None:
        each = list(sampling_params)
        if len(each) != len(samples):
            raise ValueError(
                f"sampling_params has {len(each)} entries for {len(samples)} samples: give one, or one each"
            )
    records: list[SampleRecord] = []
    for sample, params in zip(samples, each, strict=True):
        if isinstance(sample, SampleRecord):
            records.append(sample)
            continue
        check_whole(sample, f"the output of request {sample.request_id!r}")
        if sample.lora_request is not None:
            raise ValueError(
                f"samples hold request {sample.request_id!r}, which was sampled with the LoRA adapter "
                f"{sample.lora_request.lora_name!r}: only samples of the base weights can be diagnosed"
            )
        records += [
            SampleRecord(
                prompt_token_ids=sample.prompt_token_ids,
                token_ids=completion.token_ids,
                raw_logprobs=completion.raw_logprobs,
                sampled_logprobs=completion.sampled_logprobs,
                kept_mass=completion.kept_mass,
                policy_versions=completion.policy_versions,
                policy_version=sample.policy_version,
                receipt_id=sample.receipt_id,
                num_cached_tokens=sample.num_cached_tokens,
                params=params,
            )
            for completion in sample.outputs
        ]
    return records


def make_cases(
    records: Sequence[SampleRecord],
    trainer_logprobs: Sequence[np.ndarray | Sequence[float]] | None,
    trainer_token_ids: Sequence[Sequence[int]] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    max_samples: int,
) -> list[Case]:
    """At most `max_samples` cases: those with the largest gap (one that is not finite is the largest) where the
    trainer's numbers are known, else evenly spaced.

    Raises `ValueError` for counts and lengths that do not belong together.
    """
    for name, given in (("trainer_logprobs", trainer_logprobs), ("trainer_token_ids", trainer_token_ids)):
        if given is not None and len(given) != len(records):
            raise ValueError(f"{name} has {len(given)} entries for {len(records)} samples: give one for each")
    cases = []
    for index, record in enumerate(records):
        used = None if trainer_logprobs is None else np.asarray(trainer_logprobs[index], np.float64)
        ids = record.token_ids if trainer_token_ids is None else [int(token) for token in trainer_token_ids[index]]
        if used is not None and len(used) != len(ids):
            again = round_trip(tokenizer, ids) if trainer_token_ids is None else None
            if again is None or len(again) != len(used):
                raise ValueError(
                    f"trainer_logprobs[{index}] has {len(used)} values for {len(ids)} tokens: give one for each "
                    "completion token, and trainer_token_ids where the trainer has other tokens"
                )
            ids = again
        case = Case(index, record, ids, used)
        if case.num_tokens and record.prompt_token_ids:
            cases.append(case)
    if not cases:
        raise ValueError("samples hold no sampled token: there is nothing to compare")
    if trainer_logprobs is not None:
        return sorted(sorted(cases, key=_used_gap, reverse=True)[:max_samples], key=lambda case: case.index)
    places = np.linspace(0, len(cases) - 1, min(max_samples, len(cases))).round().astype(int)
    return [cases[place] for place in places]


def _used_gap(case: Case) -> float:
    assert case.trainer_logprobs is not None
    count = case.num_tokens
    gap = np.abs(case.trainer_logprobs[:count] - case.record.sampled_logprobs[:count])
    return float(gap.max()) if np.isfinite(gap).all() else float("inf")


def round_trip(tokenizer: PreTrainedTokenizerBase | None, token_ids: Sequence[int]) -> list[int] | None:
    """The ids that the tokenizer makes of the tokens' text; None without a tokenizer."""
    if tokenizer is None:
        return None
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return list(tokenizer(text, add_special_tokens=False).input_ids)
