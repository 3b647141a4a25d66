"""Several runs on one page: the panels of a run's report, a line for each run, and what their recipes differ in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_trainers.charts import line_chart
from rollout_trainers.durable import write_text
from rollout_trainers.layout import LAYOUT, panels_of
from rollout_trainers.metric_catalog import describe
from rollout_trainers.report_page import alert_list, figures, page, section, table
from rollout_trainers.run_files import RunFiles, read_run

_UNIMPORTANT = ("name", "output_dir", "resume", "tracking", "checkpoint")  # of a recipe


def write_comparison(path: Path, folders: Sequence[Path]) -> Path:
    """Writes a page about the runs in `folders`, two or more, to `path`. Raises `ValueError` for other folders."""
    if len({folder.resolve() for folder in folders}) != len(folders) or len(folders) < 2:
        raise ValueError("a comparison is of two runs or more, each once")
    runs = dict(zip(_labels(folders), map(read_run, folders), strict=True))
    body = [table(["run", "steps", "reward", "held out, first", "held out, last", "hours", "alerts"], _rows(runs))]
    differences = _differences({label: run.config for label, run in runs.items()})
    if differences:
        body.append(section("What the recipes differ in", table(["", *runs], differences)))
    names = list(dict.fromkeys(name for run in runs.values() for name in run.names))
    for each in LAYOUT:
        charts = [
            (line_chart(_title(panel.title, name, chosen), lines), _meaning(name))
            for panel, chosen in panels_of(each, names)
            if panel.kind in ("lines", "area")
            for name in chosen
            if any((lines := {label: run.points(name) for label, run in runs.items()}).values())
        ]
        body.append(section(each.name, figures(charts), is_open=each.is_open))
    for label, run in runs.items():
        body.append(section(f"Alerts of {label}", alert_list(run.alerts)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page("Runs beside each other", "\n".join(body)))
    return path


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while len({each[-length:] for each in parts}) < len(parts):
        length += 1
    return ["/".join(each[-length:]) for each in parts]


def _rows(runs: Mapping[str, RunFiles]) -> list[list[str]]:
    rows = []
    for label, run in runs.items():
        rewards, evaluations = run.points("reward"), run.evaluations
        seconds = sum(value for _, value in run.points("timing_s/step"))
        last = [value for _, value in rewards[-5:]]
        rows.append(
            [
                label,
                str(len(rewards)),
                f"{sum(last) / len(last):.3f} (last {len(last)} steps)" if last else "-",
                _accuracy(evaluations[0]) if evaluations else "-",
                _accuracy(evaluations[-1]) if evaluations else "-",
                f"{seconds / 3600:.2f}",
                str(sum(alert["level"] != "INFO" for alert in run.alerts)),
            ]
        )
    return rows


def _accuracy(evaluation: tuple[int, float, float, float]) -> str:
    step, accuracy, low, high = evaluation
    return f"{accuracy:.1%} ({low:.1%} to {high:.1%}), step {step}"


def _differences(configs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The keys whose values are not the same in all recipes, each with the values."""
    flat = [dict(_flatten(config)) for config in configs.values()]
    keys = list(dict.fromkeys(key for each in flat for key in each if key.split(".")[0] not in _UNIMPORTANT))
    rows = [[key, *(each.get(key, "-") for each in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def _title(panel: str, name: str, chosen: Sequence[str]) -> str:
    return panel if len(chosen) == 1 else f"{panel}: {name}"


def _meaning(name: str) -> str:
    metric = describe(name)
    return "" if metric is None else f"{name}: {metric.meaning}"
