"""Which checkpoint of a run is the best, by a metric of its evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollout_trainers.config import CheckpointSection
from rollout_trainers.early_stop import is_better
from rollout_trainers.early_stop_config import Mode


@dataclass(frozen=True, slots=True)
class Best:
    """The step whose evaluation was best, and how good it was."""

    step: int
    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric} is best after step {self.step}: {self.value:g}"


class BestWatch:
    """Looks at the evaluations' metric, one after the other. `best` is None until there has been one, after a step."""

    def __init__(self, section: CheckpointSection) -> None:
        self._metric = section.best_metric
        self._mode: Mode = section.best_mode
        self.best: Best | None = None

    @property
    def step(self) -> int | None:
        return None if self.best is None else self.best.step

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Takes what has been measured after `step` (from 1), and says whether that is the best so far; of equal ones
        the first is."""
        value = None if self._metric is None else metrics.get(self._metric)
        if value is None or not is_better(value, None if self.best is None else self.best.value, self._mode):
            return False
        assert self._metric is not None
        self.best = Best(step, self._metric, value)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"mode": self._mode, "best": None if self.best is None else asdict(self.best)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, unless that was about another metric: then there is no best one yet."""
        if state["best"] is not None and (state["best"]["metric"], state["mode"]) == (self._metric, self._mode):
            self.best = Best(**state["best"])
