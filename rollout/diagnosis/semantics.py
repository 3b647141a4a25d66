"""Which quantity of a sample the trainer's numbers are: the logprob that it was drawn with, or another one."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from rollout.diagnosis.records import SampleRecord

_CLEARLY = 0.5  # another quantity is named only where it is at least this much closer


class Quantity(enum.StrEnum):
    """What a number beside a sampled token can be."""

    SAMPLED = "sampled"  # of the distribution that it was drawn from: what importance ratios need
    TEMPERED = "tempered"  # the whole distribution at the sampling temperature: the filters are forgotten
    RAW = "raw"  # temperature 1, nothing filtered
    DIVIDED = "divided"  # the raw logprob divided by the temperature: no distribution at all


@dataclass(frozen=True, slots=True)
class TrainerView:
    """A sample's tokens as the trainer scores them now, float64 [tokens]. `tempered` of None: it does not tell."""

    raw: np.ndarray
    tempered: np.ndarray | None


def sampler_values(record: SampleRecord, quantity: Quantity, count: int) -> np.ndarray:
    """The sampler's own values of a quantity, float64, for the first `count` tokens."""
    if quantity is Quantity.SAMPLED:
        return record.sampled_logprobs[:count].astype(np.float64)
    if quantity is Quantity.TEMPERED:
        return record.tempered_logprobs()[:count]
    raw = record.raw_logprobs[:count].astype(np.float64)
    return raw / record.temperature if quantity is Quantity.DIVIDED and record.temperature else raw


def trainer_values(record: SampleRecord, view: TrainerView, quantity: Quantity) -> np.ndarray:
    """What the trainer's numbers should be if they were this quantity.

    A trainer that tells no tempered logprobs is taken to differ from the sampler's by as much as at temperature 1,
    scaled by the temperature: exact at temperature 1.
    """
    count = len(view.raw)
    if quantity is Quantity.RAW:
        return view.raw
    temperature = record.temperature or 1.0
    if quantity is Quantity.DIVIDED:
        return view.raw / temperature
    if record.temperature == 0:  # greedy: the token that is drawn has probability 1
        return np.zeros(count)
    tempered = view.tempered
    if tempered is None or record.temperature is None:
        raw_difference = view.raw - record.raw_logprobs[:count].astype(np.float64)
        tempered = record.tempered_logprobs()[:count] + raw_difference / temperature
    if quantity is Quantity.TEMPERED or record.kept_mass is None:
        return tempered
    return tempered - np.log(record.kept_mass[:count].astype(np.float64))


def likeliest_quantity(
    records: list[SampleRecord], views: list[TrainerView], used: list[np.ndarray], tolerance: float
) -> Quantity:
    """What the numbers `used` are closest to; `SAMPLED`, which is right, unless another is clearly closer."""
    candidates = [Quantity.TEMPERED, Quantity.RAW]
    if all(record.temperature for record in records):
        candidates.append(Quantity.DIVIDED)
    distances = {}
    for quantity in (Quantity.SAMPLED, *candidates):
        pairs = [
            values - trainer_values(record, view, quantity)
            for record, view, values in zip(records, views, used, strict=True)
        ]
        distances[quantity] = float(np.abs(np.concatenate(pairs)).mean())
    best = min(candidates, key=distances.__getitem__)
    right = distances[Quantity.SAMPLED]
    return best if right > tolerance and distances[best] < _CLEARLY * right else Quantity.SAMPLED
