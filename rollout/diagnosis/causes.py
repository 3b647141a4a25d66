"""What a diagnosis says: the causes of a gap between sampler and trainer, and how much of it each makes up."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Cause(enum.StrEnum):
    """Why the trainer's logprobs of sampled tokens are not the sampler's."""

    NONE = "none"
    WRONG_WEIGHTS = "wrong weights"
    STALE_KV = "stale KV"
    SAMPLING_SEMANTICS = "sampling semantics"
    BATCH_VARIANCE = "batch variance"
    PRECISION = "precision"
    RETOKENISATION = "re-tokenisation"
    POLICY_LAG = "policy lag"
    IMPLEMENTATION = "another implementation"
    UNEXPLAINED = "unexplained"
    NOT_FINITE = "not finite"


@dataclass(frozen=True, slots=True)
class Part:
    """One cause's part of the gap, in nats per token. `share` is its mean_abs over the sum of all parts' mean_abs."""

    mean_abs: float
    max_abs: float
    mean: float
    share: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The gap, trainer less sampler, over `num_tokens` tokens, as parts that add up to it token by token.

    `verdict` is the cause with the largest part, `causes` every cause that is worth naming, the largest first; both say
    "none" where no token differs by more than the tolerance. Two exceptions: "not finite", which has no part, comes
    first, and "another implementation" comes before "precision" from half its size on. `sentence` says it in words,
    `evidence` has the facts. Parts and gap are of the tokens before a sample's first value that is not finite; without
    any such token there are no parts, and the gap is NaN.
    """

    parts: dict[Cause, Part]
    gap: Part
    causes: tuple[Cause, ...]
    sentence: str
    num_samples: int
    num_tokens: int
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Cause:
        return self.causes[0] if self.causes else Cause.NONE

    def metrics(self) -> dict[str, float]:
        """`diagnosis/<cause>` in nats per token (mean of absolute values), for a tracker."""
        return {f"diagnosis/{cause.value.replace(' ', '_')}": part.mean_abs for cause, part in self.parts.items()}

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.sentence}"]
        lines.append(f"{'nats per token':<24} {'mean |d|':>10} {'max |d|':>10} {'mean d':>10} {'share':>6}")
        lines += [_row(cause.value, part) for cause, part in self.parts.items() if part.max_abs > 0]
        lines.append(_row(f"gap ({self.num_samples} samples)", self.gap))
        return "\n".join(lines)


def _row(name: str, part: Part) -> str:
    return f"{name:<24} {part.mean_abs:>10.3g} {part.max_abs:>10.3g} {part.mean:>10.2g} {part.share:>6.0%}"


def summarize(differences: Mapping[Cause, np.ndarray]) -> tuple[dict[Cause, Part], Part]:
    """The parts, the largest first, and the gap that they add up to: NaN without parts. Arrays are float64 [tokens]."""
    if not differences:
        return {}, Part(math.nan, math.nan, math.nan, 1.0)
    sizes = {cause: float(np.abs(values).mean()) for cause, values in differences.items()}
    whole = sum(sizes.values()) or 1.0
    parts = {
        cause: part_of(differences[cause], size / whole)
        for cause, size in sorted(sizes.items(), key=lambda entry: -entry[1])
    }
    return parts, part_of(np.sum(list(differences.values()), axis=0), 1.0)


def part_of(values: np.ndarray, share: float) -> Part:
    absolute = np.abs(values)
    return Part(float(absolute.mean()), float(absolute.max()), float(values.mean()), share)
