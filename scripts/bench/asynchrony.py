"""Step time and staleness of each mode of asynchrony, on the same recipe.

    .venv/bin/python scripts/bench/asynchrony.py [--steps 9] [--modes NAME ...]    recipes/quickstart.yaml, SmolLM2
    .venv/bin/python scripts/bench/asynchrony.py --recipe FILE [key=value ...]     another one, or other values

One run a mode, one after the other, without evaluations and checkpoints. Medians over the steps but for the first two,
in which the engine warms up and the first batch has nobody who samples it meanwhile, and the last, in which nothing is
sampled ahead. Prints one JSON line a mode, then a table for docs/asynchrony.md. Sampler and trainer share the cores, so
that only what one leaves idle is won.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_trainers.recipe import load_recipe
from rollout_trainers.run import run
from rollout_trainers.tasks import make_task
from rollout_trainers.tracking import METRICS_FILE, read_json_lines

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
AHEAD = ["engine.sleep=false"]
MODES = {  # name -> overrides
    "synchronous": [],
    "synchronous, awake": ["engine.sleep=false"],
    "one step off": ["asynchrony.mode=one_step_off", *AHEAD],
    "in flight, bound 1": ["asynchrony.mode=in_flight", *AHEAD],
    "in flight, bound 2": ["asynchrony.mode=in_flight", "asynchrony.max_staleness=2", *AHEAD],
    "in flight, recomputed": ["asynchrony.mode=in_flight", "asynchrony.held_cache=recompute", *AHEAD],
    "synchronous, over-sampled by half": ["asynchrony.over_sampling=0.5"],
    "synchronous, 1000 tokens a step": ["asynchrony.step_tokens=1000"],
}
MEDIANS = {  # column -> metric, of which the median over steps is taken
    "step s": "timing_s/step",
    "learning s": "timing_s/train",
    "waiting s": "timing_s/gen",
    "sampler idle s": "async/idle_seconds/sampler",
    "tokens/s": "perf/throughput",
    "staleness": "staleness/mean",
    "policies a sample": "staleness/versions_per_sample",
}
NUM_WARM_UP = 2


def main() -> None:
    args = parse_arguments()
    lines = []
    for name in args.modes:
        lines.append(measure(name, args))
        print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="key=value, for all modes")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--steps", type=int, default=9, help="of each run (at least 4)")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES), metavar="NAME")
    args = parser.parse_args()
    if args.steps <= NUM_WARM_UP + 1:
        parser.error(
            f"--steps {args.steps} leaves nothing to measure: the first {NUM_WARM_UP} and the last do not count"
        )
    return args


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one mode, and returns its figures by column."""
    with tempfile.TemporaryDirectory(prefix="rollout-asynchrony-") as folder:
        fixed = [f"output_dir={folder}", f"steps={args.steps}", "tracking.wandb=disabled", "task.eval_size=0"]
        config = load_recipe(args.recipe, [*fixed, *args.overrides, *MODES[name]])
        run(config, task=make_task(config.task))
        rows = [row for row in read_json_lines(Path(folder) / METRICS_FILE) if "reward" in row]
    return {"mode": name, **summary(rows[NUM_WARM_UP:-1])}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Medians over steps, the largest staleness, and the mean distance of the policy from the one that sampled."""
    result: dict[str, float | None] = {}
    for column, metric in MEDIANS.items():
        values = [row[metric] for row in rows if metric in row]
        result[column] = round(statistics.median(values), 3) if values else None
    result["largest staleness"] = max(row.get("staleness/max", 0.0) for row in rows)
    result["old - new logprob"] = round(statistics.fmean(row["ppo_kl"] for row in rows), 5)
    return result


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    columns = list(lines[0])
    rows = [columns, ["---"] + ["---:"] * (len(columns) - 1)]
    rows += [["" if line[column] is None else str(line[column]) for column in columns] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
