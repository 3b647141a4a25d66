"""The report of a run: one HTML page that needs nothing else, and a PNG of the reward curve.

It has the sections and panels of `layout.py`, as the workspace in W&B.
"""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_trainers.charts import area_chart, heat_map, line_chart, running_mean, save_reward_curve, stacked_bars
from rollout_trainers.durable import partial_name, put_file, write_text
from rollout_trainers.layout import LAYOUT, Panel, panels_of
from rollout_trainers.metric_catalog import describe
from rollout_trainers.report_page import alert_list, card, figures, page, sample_browser, section
from rollout_trainers.run_files import RunFiles, read_run

REPORT_FILE = "report.html"
CURVE_FILE = "reward.png"


def write_report(directory: Path, summary: Mapping[str, Any] | None = None) -> Path:
    """Writes `report.html` and `reward.png` of the run in `directory`; returns the page's path.

    Reads the run's own files; a run that is still going gets a report of what is there. `summary` has `name`, `task`,
    `config`, and where evaluated `base`, `trained` (with `accuracy`, `low`, `high`, `num`) and `p_value`; None: the one
    that the run has written. The picture needs matplotlib, and is left out without it. Raises `ValueError` where the
    folder is not a run's.
    """
    run = read_run(directory)
    summary = {"name": run.name, "config": run.config, **(run.summary if summary is None else summary)}
    title = f"{summary['name']}: {summary['task']}" if "task" in summary else str(summary["name"])
    if importlib.util.find_spec("matplotlib") is not None:
        curve = directory / CURVE_FILE
        save_reward_curve(partial_name(curve), title, run.points("reward"), run.evaluations)
        put_file(curve)
    body = [f'<div class="cards">{_cards(summary, run)}</div>']
    body.append(section("Alerts", alert_list(run.alerts)))
    for each in LAYOUT:
        charts, has_table = [], False
        for panel, names in panels_of(each, run.names):
            if panel.kind == "table":
                has_table = True
            else:
                charts.append((_chart(panel, names, run), _hint(names)))
        if each.name == "Engine and memory":
            charts += [(chart, "") for chart in _memory_charts(run.memory)]
        body.append(section(each.name, figures(charts) + (sample_browser() if has_table else ""), is_open=each.is_open))
    body.append(section("Why sampler and trainer differed", _diagnoses(run.diagnoses)))
    recipe = html.escape(json.dumps(summary["config"], indent=2, ensure_ascii=False, default=str))
    body.append(section("Recipe", f"<pre>{recipe}</pre>", is_open=False))
    path = directory / REPORT_FILE
    write_text(path, page(title, "\n".join(body), run.samples or None))
    return path


def _chart(panel: Panel, names: Sequence[str], run: RunFiles) -> str:
    if panel.kind == "histogram":
        return heat_map(panel.title, run.histograms_of(names[0]))
    if names == ["reward"]:
        return _reward_chart(panel.title, run)
    lines = {label: run.points(name) for name, label in zip(names, short_names(names), strict=True)}
    if panel.kind == "area":
        return area_chart(panel.title, lines)
    return line_chart(panel.title, lines, faint=[label for label in lines if label.endswith(("_low", "_high"))])


def _reward_chart(title: str, run: RunFiles) -> str:
    rewards = run.points("reward")
    smooth = running_mean([value for _, value in rewards], 5)
    lines = {
        "each step": rewards,
        "held-out accuracy": [(step, accuracy) for step, accuracy, _, _ in run.evaluations],
        "mean of 5 steps": [(step, value) for (step, _), value in zip(rewards, smooth, strict=True)],
    }
    return line_chart(title, lines, faint=("each step",))


def short_names(names: Sequence[str]) -> list[str]:
    """What tells the names apart: without the parts that all begin or all end with."""
    parts = [name.split("/") for name in names]
    if len(parts) < 2:
        return list(names)
    while all(len(each) > 1 for each in parts) and len({each[0] for each in parts}) == 1:
        parts = [each[1:] for each in parts]
    while all(len(each) > 1 for each in parts) and len({each[-1] for each in parts}) == 1:
        parts = [each[:-1] for each in parts]
    return ["/".join(each) for each in parts]


def _hint(names: Sequence[str]) -> str:
    known = [(name, describe(name)) for name in names]
    lines = (
        f"{name}: {metric.meaning}" + (f" ({metric.unit})" if metric.unit else "") for name, metric in known if metric
    )
    return "\n".join(lines)


def _memory_charts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The peak of every phase by step, and who held the memory at the phases' ends in the last step that counted it."""
    peaks: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        peaks.setdefault(record["phase"], []).append((record["step"], record["peak"] / 2**20))
    counted = [record for record in records if record["owners"]]
    last = [record for record in counted if record["step"] == counted[-1]["step"]]
    bars = stacked_bars(
        f"Memory (MiB) at the end of each phase by owner, and its peak (line), step {last[-1]['step'] if last else 0}",
        {record["phase"]: {owner: count / 2**20 for owner, count in record["owners"].items()} for record in last},
        {record["phase"]: record["peak"] / 2**20 for record in last},
    )
    return [line_chart("Peak memory (MiB) by phase", peaks), bars]


def _cards(summary: Mapping[str, Any], run: RunFiles) -> str:
    cards = []
    for key, label in (("base", "Untrained, held out"), ("trained", "Trained, held out")):
        result = summary.get(key)
        if result:
            note = f"95 % CI {result['low']:.1%} to {result['high']:.1%}, n = {result['num']}"
            cards.append(card(label, f"{result['accuracy']:.1%}", note))
    if summary.get("p_value") is not None:
        note = "exact McNemar test, same prompts"
        cards.append(card("Chance of such a change", f"p = {summary['p_value']:.2g}", note))
    if summary.get("best"):
        best = summary["best"]
        cards.append(card("Best checkpoint", f"step {best['step']}", f"{best['metric']} is {best['value']:g}"))
    if summary.get("stopped"):
        cards.append(card("Stopped early", f"step {summary['stopped']['step']}", summary["stopped"]["reason"]))
    if summary.get("status") == "unfinished":
        cards.append(card("Status", "not finished", "still going, or broken off"))
    steps = [row for row in run.metrics if row.get("timing_s/step") is not None]
    if steps:
        seconds = sorted(row["timing_s/step"] for row in steps)[len(steps) // 2]
        cards.append(card("Steps", str(len(steps)), f"{seconds:.1f} s each (median)"))
        released = [row["perf/sleep_released_gb"] for row in steps if row.get("perf/sleep_released_gb")]
        if released:
            cards.append(card("Given back by sleep", f"{released[-1] * 1024:.0f} MiB", "for each training phase"))
        compared = [row for row in steps if row.get("sampling/logp_difference/max") is not None]
        if compared:
            difference = max(row["sampling/logp_difference/max"] for row in compared)
            tokens = sum(row["sampling/logp_difference/num_tokens"] for row in compared)
            note = f"largest logprob difference before an update, {tokens:,} tokens"
            cards.append(card("Sampler = trainer", f"{difference:g}", note))
    told = [alert for alert in run.alerts if alert["level"] != "INFO"]
    if told:
        over = len(run.alerts) - len(told)
        cards.append(card("Alerts", str(len(told)), f"{over} of them over" if over else "none of them over"))
    return "".join(cards)


def _diagnoses(records: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"<pre>step {record['step']}: {html.escape(record['text'])}</pre>" for record in records)
