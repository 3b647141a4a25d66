"""Where a run's numbers go: a JSON-lines file always, Weights & Biases where it is installed, and the terminal."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rollout.memory_phases import PhaseMemory
from rollout_trainers.alerts import Alert
from rollout_trainers.config import TrackingSection
from rollout_trainers.durable import write_text
from rollout_trainers.histograms import Histogram
from rollout_trainers.mismatch import Finding
from rollout_trainers.types import SampleRow
from rollout_trainers.wandb_sink import WandbSink, wandb_mode

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
MEMORY_FILE = "memory.jsonl"
DIAGNOSES_FILE = "diagnoses.jsonl"
ALERTS_FILE = "alerts.jsonl"
HISTOGRAMS_FILE = "histograms.jsonl"


class Timers:
    """Seconds by phase of one step, as `timing_s/<phase>` metrics."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to phase `name`."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}


class JsonLines:
    """An append-only file of one JSON object a line, each with its `step`. Values that are not finite become null."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Opens `path`; records of `first_step` and later, left by a run that is being resumed, are dropped."""
        kept = [record for record in read_json_lines(path) if record["step"] < first_step] if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(_line(record) for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def sync(self) -> None:
        """Waits until all records are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({key: _finite(value) for key, value in record.items()}, ensure_ascii=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; a last line that was cut off by a crash is left out."""
    records = []
    for line in path.read_bytes().split(b"\n")[:-1]:  # texts may hold other ends of lines, such as U+2028
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class Tracker:
    """Sends metrics and samples to every sink. Steps count from 1; step 0 is the untrained policy."""

    def __init__(
        self,
        section: TrackingSection,
        directory: Path,
        name: str,
        config: Mapping[str, Any],
        first_step: int = 0,
        wandb_id: str | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """A resumed run gives the `first_step` that it repeats, and the `wandb_id` that it had."""
        self.directory = directory
        self._metrics = JsonLines(directory / METRICS_FILE, first_step)
        self._samples = JsonLines(directory / SAMPLES_FILE, first_step)
        self._memory = JsonLines(directory / MEMORY_FILE, first_step)
        self._diagnoses = JsonLines(directory / DIAGNOSES_FILE, first_step)
        self._alerts = JsonLines(directory / ALERTS_FILE, first_step)
        self._histograms = JsonLines(directory / HISTOGRAMS_FILE, first_step)
        self._files = (
            *(self._metrics, self._samples, self._memory),
            *(self._diagnoses, self._alerts, self._histograms),
        )
        mode = wandb_mode(section, environment)
        self._wandb = None
        if mode != "disabled" and importlib.util.find_spec("wandb") is not None:
            self._wandb = WandbSink(section, mode, name, directory, config, wandb_id)

    @property
    def wandb_id(self) -> str | None:
        """Id of the W&B run, where there is one."""
        return None if self._wandb is None else self._wandb.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.write({"step": step, **metrics})
        if self._wandb is not None:
            self._wandb.log(step, metrics)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        for row in rows:
            self._samples.write(asdict(row))
        if self._wandb is not None and rows:
            self._wandb.samples(step, rows)

    def log_memory(self, step: int, phases: Iterable[PhaseMemory]) -> None:
        """Who held what in each phase: for the report, in a file of its own."""
        for phase in phases:
            self._memory.write({"step": step, **asdict(phase)})

    def log_diagnosis(self, finding: Finding) -> None:
        self._diagnoses.write(
            {"step": finding.step, "difference": finding.difference, "verdict": finding.verdict, "text": finding.text}
        )
        if self._wandb is not None:
            self._wandb.diagnosis(finding.step, finding.verdict, finding.text)

    def log_alerts(self, alerts: Iterable[Alert]) -> None:
        """To the file, and those that ask for somebody's attention to W&B's alerts."""
        for alert in alerts:
            self._alerts.write(asdict(alert))
            if self._wandb is not None and alert.level != "INFO":
                self._wandb.alert(alert)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """One record a step, and histograms in W&B."""
        if not histograms:
            return
        self._histograms.write({"step": step, **{name: each.plain() for name, each in histograms.items()}})
        if self._wandb is not None:
            self._wandb.histograms(step, histograms)

    def sync(self) -> None:
        """Waits until all files are on the disk: before a checkpoint, from which a resumed run takes them on."""
        self.commit()
        for file in self._files:
            file.sync()

    def commit(self) -> None:
        """Says that a step has nothing more to log, so that W&B shows it."""
        if self._wandb is not None:
            self._wandb.commit()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Closes the files and the W&B run; `summary` becomes its summary."""
        self._close_files()
        if self._wandb is not None:
            self._wandb.finish(summary)

    def break_off(self) -> None:
        """Closes the files, and the W&B run as one that has failed: a resumed run goes on under its id."""
        self._close_files()
        if self._wandb is not None:
            self._wandb.break_off()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()


class ProgressLine:
    """One line that is rewritten in a terminal; one line a step anywhere else."""

    def __init__(
        self, num_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._start: tuple[int, float] | None = None
        self._width = 0

    def update(self, step: int, fields: Mapping[str, str]) -> None:
        """Shows step `step` (from 1) of the run with some fields, and the time that the rest will take."""
        now = self._clock()
        if self._start is None:
            self._start = (step - 1, now)
            remaining = "-:--"
        else:
            seconds = (now - self._start[1]) / max(1, step - 1 - self._start[0]) * (self._num_steps - step)
            remaining = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        bar = "#" * round(20 * step / max(1, self._num_steps))
        text = f"[{bar:<20}] {step}/{self._num_steps} " + " ".join(f"{k} {v}" for k, v in fields.items())
        self.say(f"{text} left {remaining}", keep=not self._stream.isatty() or step == self._num_steps)

    def say(self, text: str, keep: bool = True) -> None:
        """Writes a line; without `keep` the next one in a terminal takes its place."""
        start = "\r" if self._stream.isatty() else ""
        self._stream.write(start + text.ljust(self._width) + ("\n" if keep else ""))
        self._stream.flush()
        self._width = 0 if keep else len(text)
