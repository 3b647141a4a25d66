"""What a run has written into its folder, read back: also of a run that is still going, or that has died."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_trainers.histograms import Histogram
from rollout_trainers.tracking import (
    ALERTS_FILE,
    DIAGNOSES_FILE,
    HISTOGRAMS_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    read_json_lines,
)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """`summary` is what `Tracker.finish` was given, empty where the run has not ended. Records are in their order."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    diagnoses: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    histograms: list[dict[str, Any]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of all metrics and histograms that it has logged, and `completions` where there are samples."""
        logged = {name: None for record in (*self.metrics, *self.histograms) for name in record if name != "step"}
        return [*logged, *(["completions"] if self.samples else [])]

    @property
    def evaluations(self) -> list[tuple[int, float, float, float]]:
        """Step, held-out accuracy, and its interval."""
        keys = ("step", "eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
        return [tuple(row[key] for key in keys) for row in self.metrics if row.get("eval/accuracy") is not None]  # type: ignore[misc]

    def points(self, name: str) -> list[tuple[float, float]]:
        """A metric by step, without what was not finite."""
        return [(row["step"], row[name]) for row in self.metrics if row.get(name) is not None]

    def histograms_of(self, name: str) -> list[tuple[float, Histogram]]:
        """A histogram by step."""
        return [(row["step"], Histogram.from_plain(row[name])) for row in self.histograms if name in row]


def read_run(folder: Path) -> RunFiles:
    """Raises `ValueError` where `folder` is not that of a run."""
    if not (folder / METRICS_FILE).is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no {METRICS_FILE}")
    described = _read_json(folder / RUN_FILE)
    return RunFiles(
        folder,
        described.get("name", folder.name),
        described.get("config", {}),
        _read_json(folder / SUMMARY_FILE),
        *(
            read_json_lines(folder / name) if (folder / name).is_file() else []
            for name in (METRICS_FILE, SAMPLES_FILE, MEMORY_FILE, DIAGNOSES_FILE, ALERTS_FILE, HISTOGRAMS_FILE)
        ),
    )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
