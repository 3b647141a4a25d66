"""The coefficient of the KL to the reference: fixed, or moved so that the KL stays near a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_trainers.loss_config import LossSection
from rollout_trainers.ranks import Ranks
from rollout_trainers.types import Sample

_LARGEST_ERROR = 0.2


@dataclass(slots=True)
class KLControl:
    """A proportional controller in the logarithm (Ziegler et al. 2019, Fine-tuning language models from human
    preferences, arXiv 1909.08593, section 2.2). Without a target the coefficient stays what it is."""

    coefficient: float
    target: float | None
    gain: float

    @classmethod
    def of(cls, section: LossSection) -> KLControl:
        """As the section has it at the beginning of a run."""
        return cls(section.kl_coefficient, section.kl_target, section.kl_gain)

    def observe(self, kl: float) -> None:
        """Takes the KL that a step has found, in nats a sequence: above the target the coefficient rises, below it
        falls. One that is off by more than a fifth counts as that."""
        if self.target is None:
            return
        error = min(max(kl / self.target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
        self.coefficient *= 1.0 + self.gain * error


def sequence_kl(samples: Sequence[Sample], ranks: Ranks | None = None) -> float | None:
    """Mean over the samples (of all `ranks`) of log policy - log reference of the whole sequence (k1), under the policy
    that a step has begun with. None where no sample has reference logprobs."""
    totals = [
        float((sample.frozen_logprobs.astype(np.float64) - sample.reference_logprobs).sum())
        for sample in samples
        if sample.reference_logprobs is not None
    ]
    if ranks is not None:
        totals, _ = ranks.gather_all(totals)
    return float(np.mean(totals)) if totals else None
