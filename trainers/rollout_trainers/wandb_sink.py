"""A run in Weights & Biases, which is imported where a run wants it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from rollout_trainers.alerts import Alert
from rollout_trainers.config import TrackingSection
from rollout_trainers.histograms import Histogram
from rollout_trainers.metric_catalog import describe, wandb_key
from rollout_trainers.types import SampleRow

STEP_METRIC = "train/global_step"
SAMPLE_COLUMNS = tuple(field.name for field in fields(SampleRow))


def wandb_mode(section: TrackingSection, environment: Mapping[str, str]) -> str:
    """The mode that W&B runs in. "auto" follows `WANDB_MODE`, else is online where `WANDB_API_KEY` is set."""
    if section.wandb != "auto":
        return section.wandb
    if environment.get("WANDB_MODE"):
        return environment["WANDB_MODE"]
    return "online" if environment.get("WANDB_API_KEY") else "offline"


class WandbSink:
    """One W&B run, or with `run_id` the continuation of one. Metrics are plotted against `train/global_step`, and its
    summary keeps of each what `metric_catalog.py` says; samples are an incremental table.

    All of a step is one row, whose step in W&B is the run's: what a resumed run repeats is not another step. A row is
    kept until `commit`, or until another step has something to say.
    """

    def __init__(
        self,
        section: TrackingSection,
        mode: str,
        name: str,
        directory: Path,
        config: Mapping[str, Any],
        run_id: str | None = None,
    ) -> None:
        import wandb  # optional; imported when a run wants it

        self._wandb = wandb
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=name,
            group=section.group,
            job_type=section.job_type,
            tags=section.tags,
            notes=section.notes,
            dir=str(directory),
            mode=mode,  # type: ignore[arg-type]  # checked by the section, or W&B's own environment variable
            config=dict(config),
            id=run_id,
            resume="allow" if run_id else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric(STEP_METRIC)
        self._run.define_metric("*", step_metric=STEP_METRIC)
        self._defined: set[str] = set()
        self._step = 0  # of the row
        self._row: dict[str, Any] = {}
        self._table = wandb.Table(columns=list(SAMPLE_COLUMNS), log_mode="INCREMENTAL")

    @property
    def run_id(self) -> str:
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in metrics.keys() - self._defined:
            self._define(name)
        self._add(step, {wandb_key(name): value for name, value in metrics.items()})

    def commit(self) -> None:
        """Hands over what is known of the step. W&B takes nothing more of it."""
        if self._row:
            self._run.log({STEP_METRIC: self._step, **self._row}, step=self._step, commit=True)
            self._row = {}

    def _add(self, step: int, values: Mapping[str, Any]) -> None:
        if step != self._step:
            self.commit()
            self._step = step
        self._row.update(values)

    def _define(self, name: str) -> None:
        self._defined.add(name)
        known = describe(name)
        if known is not None and known.summary != "last":  # W&B's own choice
            self._run.define_metric(wandb_key(name), step_metric=STEP_METRIC, summary=known.summary)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        made = {
            name: self._wandb.Histogram(np_histogram=(np.array(each.counts), np.array(each.edges)))
            for name, each in histograms.items()
        }
        self._add(step, made)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        for row in rows:
            self._table.add_data(*(_cell(value) for value in asdict(row).values()))
        self._add(step, {"completions": self._table})

    def diagnosis(self, step: int, verdict: str, text: str) -> None:
        self._add(step, {"diagnosis/verdict": verdict, "diagnosis/text": text})

    def alert(self, alert: Alert) -> None:
        """W&B sends it to whoever has asked for alerts. It has a limit of its own for equal titles, which is off: the
        same alert does not come twice."""
        text = f"Step {alert.step}: {alert.text}"
        self._run.alert(alert.title, text, level=alert.level, wait_duration=0)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.commit()
        self._run.summary.update(dict(summary))
        self._run.finish()

    def break_off(self) -> None:
        """Ends the run as one that has failed."""
        self.commit()
        self._run.finish(exit_code=1)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict) else value
