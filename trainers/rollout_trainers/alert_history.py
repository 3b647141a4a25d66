"""What alerts look back on: the last steps, the first ones, and every held-out evaluation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

_KEPT = 64  # steps

ACCEPTANCE = "acceptance"  # of the drafts of one step
PREEMPTIONS = "preemptions"  # in one step


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """A held-out evaluation, with the training rewards around it: means of the last steps, None before the first."""

    step: int
    accuracy: float
    low: float
    high: float
    rewards: Mapping[str, float]


class History:
    """Metrics of a run as they come, step after step. Values that are missing or not finite are left out of means.

    Beside what is logged it has what happens in each step to counters of the engine: `ACCEPTANCE`, `PREEMPTIONS`.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.last: Mapping[str, float | None] = {}  # of the last training step
        self.evaluations: list[EvaluationPoint] = []
        self.best_acceptance = 0.0  # largest mean of a window
        self._values: dict[str, deque[float]] = {}
        self._first: dict[str, list[float]] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Takes what one step has logged: of training, or of an evaluation."""
        if metrics.keys() & {"reward", "grad_norm"}:  # a step that breaks off has but the latter
            row = {**metrics, **self._of_counters(metrics)}
            for name, value in row.items():
                if _is_number(value):
                    self._values.setdefault(name, deque(maxlen=max(_KEPT, self.window))).append(float(value))
                    first = self._first.setdefault(name, [])
                    if len(first) < self.window:
                        first.append(float(value))
            self.last = row
            self.best_acceptance = max(self.best_acceptance, self.mean(ACCEPTANCE) or 0.0)
        accuracy, low, high = (metrics.get(f"eval/accuracy{end}") for end in ("", "_low", "_high"))
        if _is_number(accuracy) and _is_number(low) and _is_number(high):
            rewards = {
                name: mean
                for name in self._values
                if name == "reward" or (name.startswith("rewards/") and name.endswith("/mean"))
                if (mean := self.mean(name)) is not None
            }
            self.evaluations.append(EvaluationPoint(step, float(accuracy), float(low), float(high), rewards))

    def recent(self, name: str, count: int) -> list[float]:
        """The last `count` finite values, fewer where there are not as many (or `count` is more than are kept)."""
        values = self._values.get(name, ())
        return list(values)[-count:]

    def mean(self, name: str) -> float | None:
        """Over the last `window` values; None before there are as many."""
        values = self.recent(name, self.window)
        return _mean(values) if len(values) == self.window else None

    def first_mean(self, name: str) -> float | None:
        """Over the first `window` values; None before there are as many."""
        values = self._first.get(name, [])
        return _mean(values) if len(values) == self.window else None

    def _of_counters(self, metrics: Mapping[str, float | None]) -> dict[str, float]:
        preempted = self._increase("engine/num_preemptions_total", metrics)
        result = {} if preempted is None else {PREEMPTIONS: preempted}
        drafted = self._increase("engine/draft_tokens_total", metrics)
        accepted = self._increase("engine/accepted_draft_tokens_total", metrics)
        if drafted and accepted is not None:
            result[ACCEPTANCE] = accepted / drafted
        return result

    def _increase(self, name: str, metrics: Mapping[str, float | None]) -> float | None:
        """Since the step before. A counter that has fallen belongs to an engine that was started anew."""
        value, before = metrics.get(name), self.last.get(name, 0.0)
        if not _is_number(value) or not _is_number(before):
            return None
        return float(value) - float(before) if value >= before else float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)
