"""Alerts: what a run's metrics say is going wrong, why as far as they tell, and where to look.

Pure functions of the metrics that were logged: a run that is resumed reads them again (`AlertWatch.replay`), and knows
what it has told. The rules are in `alert_rules.py`, their limits in the recipe's section `alerts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollout_trainers.alert_history import History
from rollout_trainers.alert_rules import RULES, Reading, RunFacts
from rollout_trainers.alerts_config import AlertsSection

Level = Literal["INFO", "WARN", "ERROR"]  # W&B's names

_CALM = 0.8  # of its limit: where the number behind an alert must be for the alert to be over


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that a run should be told: `name` is the rule's. "INFO" says that an earlier alert is over."""

    step: int
    name: str
    title: str
    text: str
    level: Level


class AlertWatch:
    """Reads the metrics of a run step by step. An alert is told once, and again only after it has been over."""

    def __init__(self, section: AlertsSection, facts: RunFacts) -> None:
        self._section = section
        self._facts = facts
        self._history = History(section.window)
        self._since: dict[str, int] = {}  # step in which an alert was told that is not over, by its rule's name

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the alerts that are not over."""
        return tuple(self._since)

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> list[Alert]:
        """Takes what a step has logged, of training or of an evaluation, and says what is new."""
        if not self._section.enabled:
            return []
        self._history.add(step, metrics)
        told: list[Alert] = []
        for name, rule in RULES.items():
            reading = rule(self._history, self._section, self._facts)
            if reading is None:
                continue
            if name not in self._since and reading.badness > 1.0:
                self._since[name] = step
                told.append(_alert(step, name, reading))
            elif name in self._since and reading.badness < _CALM:
                since = self._since.pop(name)
                text = f"What was told in step {since} is over: {reading.now}."
                told.append(Alert(step, name, f"{reading.title}: over", text, "INFO"))
        return told

    def replay(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Takes what a run has logged before it was interrupted: records with their `step`. Nothing is told again."""
        for record in records:
            self.observe(record["step"], {name: value for name, value in record.items() if name != "step"})


def _alert(step: int, name: str, reading: Reading) -> Alert:
    cause = f" {reading.cause}" if reading.cause else ""
    text = f"{reading.now[:1].upper()}{reading.now[1:]}.{cause} See {reading.page}."
    return Alert(step, name, reading.title, text, "ERROR" if reading.is_fatal else "WARN")
