"""The tables and the picture of docs/quality.md, from docs/curves/quality.jsonl.

    .venv/bin/python scripts/bench/quality_page.py      # writes both anew, between the page's marks

Steps count that all runs of both sides were evaluated at.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "curves" / "quality.jsonl"
PAGE = ROOT / "docs" / "quality.md"
PICTURE = ROOT / "docs" / "quality.png"
SIDES = {"rollout": "rollout", "trl": "TRL 1.16 with transformers"}
COLOURS = {"rollout": "#1f6feb", "trl": "#d1242f"}
SAMPLES_A_STEP = 64

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scores:
    """Held-out accuracies of one side after some steps, one a seed."""

    by_step: dict[int, list[float]]

    def mean(self, step: int) -> float:
        return statistics.fmean(self.by_step[step])

    def text(self, step: int) -> str:
        values = self.by_step[step]
        if min(values) == max(values):
            return f"{values[0]:.0%}"
        return f"{self.mean(step):.1%} ({min(values):.0%} to {max(values):.0%})"


def main() -> None:
    lines = read(DATA)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    plot(lines, PICTURE)


def filled(page: str, lines: Sequence[Line]) -> str:
    """The page with what `lines` say between its marks. Raises `ValueError` for a page without them."""
    for name, text in (("scores", score_table(lines)), ("time", time_table(lines))):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise ValueError(f"the page has no marks {begin.strip()} and {end}")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scores(lines: Sequence[Line]) -> dict[str, Scores]:
    """By side. Raises `ValueError` where the sides have other seeds."""
    found: dict[str, dict[int, dict[int, float]]] = {side: defaultdict(dict) for side in SIDES}
    for line in lines:
        if line["kind"] == "evaluation":
            found[line["side"]][line["step"]][line["seed"]] = line["right"] / line["num"]
    seeds = {side: set().union(*by_step.values()) for side, by_step in found.items()}
    if len(set(map(frozenset, seeds.values()))) != 1:
        raise ValueError(f"the sides have other seeds: {seeds}")
    everyone = seeds["trl"]
    common = [
        step for step in sorted(found["trl"]) if all(found[side].get(step, {}).keys() == everyone for side in SIDES)
    ]
    return {
        side: Scores({step: [by_step[step][seed] for seed in sorted(everyone)] for step in common})
        for side, by_step in found.items()
    }


def seconds_a_step(lines: Sequence[Line], what: str = "seconds") -> dict[str, float]:
    """By side: the median over the turns' steps, without the first of each, which warms up."""
    return {
        side: statistics.median(
            line[what] for line in lines if line["kind"] == "time" and line["side"] == side and line["step"] > 1
        )
        for side in SIDES
    }


def score_table(lines: Sequence[Line]) -> str:
    by_side = scores(lines)
    rows = ["| steps | samples | " + " | ".join(SIDES.values()) + " |", "|---:|---:|---:|---:|"]
    for step in by_side["trl"].by_step:
        cells = [by_side[side].text(step) for side in SIDES]
        rows.append(f"| {step} | {step * SAMPLES_A_STEP:,} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def time_table(lines: Sequence[Line]) -> str:
    rows = ["| | " + " | ".join(SIDES.values()) + " | ratio |", "|---|---:|---:|---:|"]
    for what, name in (("seconds", "seconds a step"), ("processor_seconds", "processor seconds a step")):
        medians = seconds_a_step(lines, what)
        cells = [f"{medians[side]:.1f}" for side in SIDES]
        rows.append(f"| {name} | " + " | ".join(cells) + f" | {medians['trl'] / medians['rollout']:.1f} |")
    return "\n".join(rows)


def plot(lines: Sequence[Line], path: Path) -> None:
    """Held-out accuracy by samples and by time: the seeds' mean as a line, their range as a band."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_side, seconds = scores(lines), seconds_a_step(lines)
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for side, name in SIDES.items():
        steps = list(by_side[side].by_step)
        values = [[100 * value for value in by_side[side].by_step[step]] for step in steps]
        samples = [step * SAMPLES_A_STEP for step in steps]
        minutes = [step * seconds[side] / 60 for step in steps]
        for axes, places in ((left, samples), (right, minutes)):
            axes.fill_between(places, list(map(min, values)), list(map(max, values)), color=COLOURS[side], alpha=0.15)
            axes.plot(places, list(map(statistics.fmean, values)), color=COLOURS[side], label=name, marker="o", ms=4)
    left.set(xlabel="samples", ylabel="held-out questions right, %")
    right.set(xlabel="minutes of training on two cores")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.set_ylim(bottom=0, top=100)
    left.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
