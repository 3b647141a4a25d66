"""The pictures of `docs/recipes.md`: a recipe's run becomes a small table in `docs/curves`, and the table a picture.

    python scripts/plot_curves.py runs/dapo                  docs/curves/dapo.csv from the run, and docs/curves/dapo.png
    python scripts/plot_curves.py runs/dapo --name clipped   under another name
    python scripts/plot_curves.py                            every picture again, from the tables

Rewards are drawn with their mean over the last 5 steps; held-out accuracy has its 95 % interval.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_trainers.charts import COLORS, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = Path(__file__).resolve().parents[1] / "docs" / "curves"
HELD_OUT = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
COMMON = ("reward", *HELD_OUT, "completions/mean_length", "entropy", "grad_norm", "learning_rate")
# Of some recipes, with the title of its panel. The first that is not 0 throughout is drawn.
FURTHER: Mapping[str, str] = {
    "teacher/kl": "KL to the teacher, nats a token",
    "teacher/logprob": "Logprob of the teacher",
    "critic/vf_explained_var": "Share of the returns' variance that the critic explains",
    "objective/kl": "KL to the untrained model, nats a sample",
    "tools/call_frequency": "Calls of tools in an episode",
    "num_turns/mean": "Turns of an episode",
    "dynamic_sampling/rounds": "Rounds of sampling",
    "clip_ratio/region_mean": "Share of tokens that are clipped",
    "frac_reward_zero_std": "Share of groups of equal rewards",
}
Row = dict[str, float]


def rows_of_run(directory: Path) -> list[Row]:
    """One row a step, from a run's metrics; step 0 is the untrained model. Raises `ValueError` where it has none."""
    by_step: dict[int, Row] = {}
    with (directory / "metrics.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            values = json.loads(line)
            row = by_step.setdefault(values["step"], {"step": values["step"]})
            row |= {name: values[name] for name in (*COMMON, *FURTHER) if values.get(name) is not None}
    if not any("reward" in row for row in by_step.values()):
        raise ValueError(f"{directory}: its metrics.jsonl has no step")
    return [by_step[step] for step in sorted(by_step)]


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """A column for each metric that some row has, with 5 significant digits."""
    columns = ["step", *(name for name in (*COMMON, *FURTHER) if any(name in row for row in rows))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([f"{row[name]:.5g}" if name in row else "" for name in columns] for row in rows)


def read_table(path: Path) -> list[Row]:
    """What `write_table` has written."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Rewards and held-out accuracy, length, entropy, and a metric of the recipe's own, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), dpi=72, layout="constrained")
    FigureCanvasAgg(figure)
    rewards, length, entropy, own = figure.subplots(2, 2, sharex=True).flat
    figure.suptitle(title)
    _draw_rewards(rewards, rows)
    _draw_metric(length, rows, "completions/mean_length", "Tokens of a sample")
    _draw_metric(entropy, rows, "entropy", "Entropy, nats a token")
    name = next((name for name in FURTHER if any(row.get(name) for row in rows)), "grad_norm")
    _draw_metric(own, rows, name, FURTHER.get(name, "Norm of the gradient"))
    for axes in (entropy, own):
        axes.set_xlabel("step")
    figure.savefig(path)


def held_out(rows: Sequence[Row]) -> str:
    """The sentence that the page has about a run."""
    evaluated = [row for row in rows if HELD_OUT[0] in row]
    if len(evaluated) < 2:
        return "no held-out accuracy"
    before, after = (f"{100 * row[HELD_OUT[0]]:.0f} %" for row in (evaluated[0], evaluated[-1]))
    return f"Held out: {before} before, {after} after {evaluated[-1]['step']:.0f} steps"


def _draw_rewards(axes: Axes, rows: Sequence[Row]) -> None:
    _draw_metric(axes, rows, "reward", "Reward", label="training reward (mean of 5 steps)")
    evaluated = [row for row in rows if HELD_OUT[0] in row]
    if evaluated:
        accuracy, low, high = ([row[name] for row in evaluated] for name in HELD_OUT)
        below = [max(0.0, value - bound) for value, bound in zip(accuracy, low, strict=True)]
        above = [max(0.0, bound - value) for value, bound in zip(accuracy, high, strict=True)]
        steps = [row["step"] for row in evaluated]
        axes.errorbar(steps, accuracy, yerr=[below, above], color=COLORS[1], fmt="o-", capsize=3, label="held out")
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False, fontsize=8)


def _draw_metric(axes: Axes, rows: Sequence[Row], name: str, title: str, label: str | None = None) -> None:
    steps = [row["step"] for row in rows if name in row]
    values = [row[name] for row in rows if name in row]
    axes.plot(steps, values, color=COLORS[0], alpha=0.3, linewidth=1)
    axes.plot(steps, running_mean(values, 5), color=COLORS[0], linewidth=2, label=label)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a run")
    parser.add_argument("--name", help="of the table and the picture (default: the run's folder's)")
    parser.add_argument("--folder", type=Path, default=CURVES, help="where they are")
    options = parser.parse_args(arguments)
    if options.run is None:
        tables = sorted(options.folder.glob("*.csv"))
    else:
        tables = [options.folder / f"{options.name or options.run.name}.csv"]
        write_table(tables[0], rows_of_run(options.run))
    for table in tables:
        rows = read_table(table)
        plot(rows, table.stem, table.with_suffix(".png"))
        print(f"{table.with_suffix('.png')}: {held_out(rows)}")


if __name__ == "__main__":
    main()
