"""Histograms of a step's samples, small enough to be logged every step: counts in bins of one width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout_trainers.types import Sample

_BINS = 32
_LARGEST = 1e30

# Ratios are counted in fixed bins, so that the counts of micro-batches add up: 0.05 wide, that of 1 around 1. What is
# above the last one counts in it.
_RATIO_LOW, _RATIO_WIDTH, NUM_RATIO_BINS = -0.025, 0.05, 61


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` values are from `low + i * width` to `low + (i + 1) * width`; the last bin has its upper end, too."""

    low: float
    width: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> list[float]:
        """One more than there are bins."""
        return [self.low + index * self.width for index in range(len(self.counts) + 1)]

    @classmethod
    def of(cls, values: np.ndarray) -> Histogram | None:
        """Of `values` [N], those that are numbers of a size that means anything, over their range; None where there are
        none. Whole numbers get bins around whole numbers."""
        values = values.astype(np.float64)
        values = values[np.abs(values) < _LARGEST]
        if values.size == 0:
            return None
        low, high = float(values.min()), float(values.max())
        if (values == np.round(values)).all() and high < 2**52 and low > -(2**52):
            width = float(max(1.0, np.ceil((high - low + 1) / _BINS)))
            low, num = low - 0.5, int((high - low) // width) + 1
        elif high - low < 1e-9 * max(abs(low), abs(high), 1e-3):  # equal, but for rounding
            width, num = 1e-3 * max(abs(low), 1.0), 1
            low -= width / 2
        else:
            width, num = (high - low) / _BINS, _BINS
        places = np.clip(((values - low) / width).astype(np.int64), 0, num - 1)
        return cls(low, width, tuple(np.bincount(places, minlength=num).tolist()))

    def plain(self) -> dict[str, Any]:
        """For a file of JSON lines; `from_plain` reads it."""
        return {"low": self.low, "width": self.width, "counts": list(self.counts)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Histogram:
        return cls(values["low"], values["width"], tuple(values["counts"]))


def rebin(histogram: Histogram, low: float, width: float, num: int) -> list[float]:
    """The counts in `num` other bins from `low` on; what a bin shares with several is divided by its width."""
    result = np.zeros(num)
    edges = low + width * np.arange(num + 1)
    for index, count in enumerate(histogram.counts):
        if count:
            start = histogram.low + index * histogram.width
            overlap = np.minimum(edges[1:], start + histogram.width) - np.maximum(edges[:-1], start)
            result += count * np.clip(overlap, 0.0, None) / histogram.width
    return result.tolist()


def count_ratios(log_ratios: torch.Tensor) -> np.ndarray:
    """Int64 [61]: how many of the ratios exp(`log_ratios`) [C] are in each bin."""
    ratios = log_ratios.detach().double().clamp(max=10.0).exp()
    places = ((ratios - _RATIO_LOW) / _RATIO_WIDTH).nan_to_num(NUM_RATIO_BINS - 1.0).long()
    return torch.bincount(places.clamp_(0, NUM_RATIO_BINS - 1), minlength=NUM_RATIO_BINS).cpu().numpy()


def ratio_histogram(counts: np.ndarray) -> Histogram | None:
    """Of `count_ratios`' counts, without empty bins at the ends; None where all are empty."""
    places = np.flatnonzero(counts)
    if places.size == 0:
        return None
    first, last = int(places[0]), int(places[-1])
    return Histogram(_RATIO_LOW + first * _RATIO_WIDTH, _RATIO_WIDTH, tuple(counts[first : last + 1].tolist()))


def step_histograms(samples: Sequence[Sample], ratio_counts: np.ndarray) -> dict[str, Histogram]:
    """Of a step's samples: `histogram/length` and `histogram/reward` of each, `histogram/advantage` (its mean over a
    sample's tokens where they differ), `histogram/entropy` of all tokens, `histogram/importance` of the tokens' weights
    where the step has corrected for its sampler, and `histogram/ratio` of new to old probability over all optimiser
    steps' tokens."""
    importance = [sample.importance for sample in samples if sample.importance is not None]
    found = {
        "length": Histogram.of(np.array([sample.num_tokens for sample in samples], np.float64)),
        "reward": Histogram.of(np.array([sample.reward for sample in samples], np.float64)),
        "advantage": Histogram.of(np.array([sample.advantage for sample in samples], np.float64)),
        "entropy": Histogram.of(_joined(sample.entropy for sample in samples)),
        "importance": Histogram.of(_joined(importance)),
        "ratio": ratio_histogram(ratio_counts),
    }
    return {f"histogram/{name}": histogram for name, histogram in found.items() if histogram is not None}


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *parts])
