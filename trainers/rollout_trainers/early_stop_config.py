"""When a run ends before its last step."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from rollout_trainers.checks import check_choice, check_integer, check_real, fail

Mode = Literal["max", "min"]


@dataclass(frozen=True, slots=True)
class EarlyStopSection:
    """A run ends early by what `metric` says: any name that stands in `metrics.jsonl`, of a step (`entropy`) or of an
    evaluation (`eval/accuracy`). None: it does not.

    It ends once `patience` values in a row have not been better than the best before them by more than `min_delta`
    (more where `mode` is "max", less where it is "min"), or with the first value that reaches `threshold`. Values
    before step `from_step` do not count. One that is not finite is never better.
    """

    metric: str | None = None
    mode: Mode = "max"
    patience: int | None = None
    min_delta: float = 0.0
    threshold: float | None = None
    from_step: int = 0

    def __post_init__(self) -> None:
        check_choice("early_stop", "mode", self.mode, get_args(Mode))
        check_real("early_stop", "min_delta", self.min_delta, 0.0)
        check_integer("early_stop", "from_step", self.from_step, 0)
        if self.patience is not None:
            check_integer("early_stop", "patience", self.patience, 1)
        if self.threshold is not None:
            check_real("early_stop", "threshold", self.threshold, -math.inf)
        if self.metric is not None and not (isinstance(self.metric, str) and self.metric):
            fail("early_stop", "metric", self.metric, "the name of a metric, or null")
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if self.metric is None and changed:
            fail("early_stop", "metric", None, f"the name of a metric where {changed[0]} is given")
        if self.metric is not None and self.patience is None and self.threshold is None:
            fail("early_stop", "patience", None, "given, or threshold, where there is a metric")
        if self.min_delta != 0 and self.patience is None:
            fail("early_stop", "min_delta", self.min_delta, "left out without patience, which alone counts progress")
