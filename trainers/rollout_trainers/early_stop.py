"""Early stopping: a run ends once a metric has stopped getting better, or has got as far as it should."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollout_trainers.early_stop_config import EarlyStopSection, Mode
from rollout_trainers.metric_catalog import describe

STEPS_TO_NAME = 3  # steps in which a metric that nobody knows may be missing before the run says so


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a run has ended before its last step."""

    step: int
    metric: str
    reason: str

    def __str__(self) -> str:
        return f"stopped early after step {self.step}: {self.reason}"


def is_better(value: float, than: float | None, mode: Mode, by: float = 0.0) -> bool:
    """Whether `value` is better than another (None: there is none yet) by more than `by`."""
    if not math.isfinite(value):
        return False
    if than is None:
        return True
    return value - than > by if mode == "max" else than - value > by


class EarlyStop:
    """Looks at one metric, value after value. `stopped` says why the run should end, once it should."""

    def __init__(self, section: EarlyStopSection) -> None:
        self.section = section
        self.best: float | None = None
        self.num_without_progress = 0  # values in a row
        self.stopped: Stop | None = None
        self._num_awaited = 0  # steps without the metric, before its first value
        self._is_known = section.metric is None or describe(section.metric) is not None

    def missing(self, metrics: Mapping[str, float]) -> str | None:
        """Takes what a step of training has logged. After `STEPS_TO_NAME` steps without the metric it says so,
        once: only for a name that an environment or a reward function would have to log, since metrics of the catalogue
        may be absent in any step."""
        if self._is_known or self.best is not None or self.section.metric in metrics:
            self._is_known = True
            return None
        self._num_awaited += 1
        if self._num_awaited != STEPS_TO_NAME:
            return None
        near = difflib.get_close_matches(str(self.section.metric), sorted(metrics), n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return (
            f"early_stop.metric={self.section.metric!r} was in none of {STEPS_TO_NAME} steps{hint}: until it is "
            f"logged, nothing stops the run early. The last step has logged {', '.join(sorted(metrics))}"
        )

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes what has been measured after `step`; where the metric is not among it, nothing happens."""
        section = self.section
        value = None if section.metric is None else metrics.get(section.metric)
        if value is None or step < section.from_step or self.stopped is not None:
            return
        if section.threshold is not None and _has_reached(value, section.threshold, section.mode):
            self._stop(step, f"{section.metric} is {value:g}, and {section.threshold:g} was to be reached")
        elif is_better(value, self.best, section.mode, section.min_delta):
            self.best, self.num_without_progress = value, 0
        else:
            self.num_without_progress += 1
            if section.patience is not None and self.num_without_progress >= section.patience:
                best = "never a number" if self.best is None else f"{self.best:g}"
                self._stop(
                    step, f"{section.metric} has not got better than {best} in {self.num_without_progress} values"
                )

    def _stop(self, step: int, reason: str) -> None:
        assert self.section.metric is not None
        self.stopped = Stop(step, self.section.metric, reason)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        stopped = self.stopped
        return {
            "section": asdict(self.section),
            "best": self.best,
            "num_without_progress": self.num_without_progress,
            "stopped": None if stopped is None else [stopped.step, stopped.metric, stopped.reason],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, unless that was made under another section: then it begins anew, and a run that had
        stopped may go on."""
        if state["section"] != asdict(self.section):
            return
        self.best, self.num_without_progress = state["best"], state["num_without_progress"]
        self.stopped = None if state["stopped"] is None else Stop(*state["stopped"])


def _has_reached(value: float, threshold: float, mode: Mode) -> bool:
    return value >= threshold if mode == "max" else value <= threshold
