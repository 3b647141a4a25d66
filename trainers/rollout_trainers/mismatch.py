"""What a run does when the trainer's logprobs are not the sampler's: it asks the engine why, now and then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollout.diagnosis import Cause, Diagnosis, SampleRecord
from rollout.errors import RolloutError
from rollout.sampling_params import SamplingParams
from rollout_trainers.config import TrackingSection
from rollout_trainers.corrections import Mismatch
from rollout_trainers.packing import pack_micro_batches
from rollout_trainers.policy import Policy
from rollout_trainers.producer import Engine
from rollout_trainers.types import Sample


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis of one step, or why there is none. `difference` is the largest |logprob difference| that was seen."""

    step: int
    difference: float
    verdict: str
    text: str
    metrics: dict[str, float] = field(default_factory=dict)


class MismatchWatch:
    """Says in which steps a diagnosis is due: the difference passes the threshold, and the last one is a while ago.

    A difference that was found to be rounding is known from then on: only twice as much is worth another question.
    """

    def __init__(self, section: TrackingSection) -> None:
        self._above = section.diagnose_above
        self._every = section.diagnose_every
        self._last: int | None = None

    def is_due(self, step: int, mismatch: Mismatch) -> bool:
        """True at most once in `diagnose_every` steps."""
        if self._above is None or mismatch.num_tokens == 0 or mismatch.max <= self._above:
            return False
        if self._last is not None and step - self._last < self._every:
            return False
        self._last = step
        return True

    def learn(self, finding: Finding) -> None:
        """Takes the answer."""
        if finding.verdict == Cause.PRECISION and self._above is not None:
            self._above = max(self._above, 2 * finding.difference)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"above": self._above, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, by the section's own threshold where that is higher or none."""
        self._last = state["last"]
        if self._above is not None and state["above"] is not None:
            self._above = max(self._above, state["above"])


def examine(
    engine: Engine,
    policy: Policy,
    samples: Sequence[Sample],
    temperature: float,
    token_budget: int,
    step: int,
    mismatch: Mismatch,
) -> Finding:
    """Why the policy's logprobs of `samples` are not the engine's. The engine must be awake, and its policy that which
    sampled. Whatever a diagnosis itself runs into is told, and not raised: the training goes on."""
    try:
        diagnosis = _diagnose(engine, policy, samples, temperature, token_budget)
    except (RolloutError, torch.OutOfMemoryError) as error:
        text = f"the diagnosis failed with {type(error).__name__}: {error}"
        return Finding(step, mismatch.max, "failed", text)
    return Finding(step, mismatch.max, diagnosis.verdict.value, str(diagnosis), diagnosis.metrics())


def _diagnose(
    engine: Engine, policy: Policy, samples: Sequence[Sample], temperature: float, token_budget: int
) -> Diagnosis:
    used: dict[int, np.ndarray] = {}
    for batch in pack_micro_batches(samples, token_budget):
        parts = policy.frozen_logprobs(batch.to(policy.device)).split(batch.lengths.tolist())
        used.update((index, part.cpu().numpy()) for index, part in zip(batch.sample_indices, parts, strict=True))
    params = SamplingParams(temperature=temperature)
    turns = [turn for index, logprobs in used.items() for turn in _turns(samples[index], logprobs, params)]
    return engine.diagnose(
        [record for record, _ in turns], policy.model, trainer_logprobs=[logprobs for _, logprobs in turns]
    )


def _turns(
    sample: Sample, trainer_logprobs: np.ndarray, params: SamplingParams
) -> Iterator[tuple[SampleRecord, np.ndarray]]:
    """What the policy sampled without a break, with all before it as its prompt, and the trainer's logprobs of it."""
    first = 0  # place in the sample's arrays
    for start, end in sample.policy_spans:
        own = slice(first, first + end - start)
        first = own.stop
        record = SampleRecord(
            prompt_token_ids=[*sample.prompt_token_ids, *sample.completion_token_ids[:start]],
            token_ids=sample.completion_token_ids[start:end],
            raw_logprobs=sample.raw_logprobs[own],
            sampled_logprobs=sample.sampled_logprobs[own],
            policy_version=sample.policy_version,
            receipt_id=sample.receipt_id,
            params=params,
        )
        yield record, trainer_logprobs[own]
