"""What a run has written into its folder, read back: also of a run that is still going, or that has died."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_trainers.histograms import Histogram
from rollout_trainers.run_record import read_record
from rollout_trainers.tracking import (
    ALERTS_FILE,
    DIAGNOSES_FILE,
    HISTOGRAMS_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    read_json_lines,
)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """`summary` is the run's record, which has its name and configuration from the beginning on, and at its end what it
    ended with; empty for older runs. Records are in their order."""

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
    record = read_record(folder) or {}
    return RunFiles(
        folder,
        record.get("name", folder.name),
        record.get("config", {}),
        record,
        *(
            read_json_lines(folder / name) if (folder / name).is_file() else []
            for name in (METRICS_FILE, SAMPLES_FILE, MEMORY_FILE, DIAGNOSES_FILE, ALERTS_FILE, HISTOGRAMS_FILE)
        ),
    )
