"""Our GRPO beside TRL's on the quickstart recipe: held-out score by samples and by time, for docs/quality.md.

    .venv/bin/python scripts/bench/quality.py train {rollout,trl} SEED [SEED ...] [--steps 20] [--every 5]
    .venv/bin/python scripts/bench/quality.py evaluate
    .venv/bin/python scripts/bench/quality.py time [--steps 3] [--turns 2]

`train` leaves models in runs/quality (`quality_ours.py` and `quality_trl.py`, in processes of their own). `evaluate`
scores all that are there, those of both sides in the same way: greedily, by this engine in float32, on the recipe's
held-out questions with its reward. `time` lets both sides make a few steps in turns (a machine's speed drifts) and
tells the ratio of their seconds a step; it belongs on a machine that does nothing else. The latter two write to
docs/curves/quality.jsonl, of which `quality_page.py` makes the page's tables and picture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rollout import LLM
from rollout.models.pretrained import resolve_model
from rollout_trainers import RunConfig, Task
from rollout_trainers.evaluation import Evaluation, evaluate_rewards
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.recipe import load_recipe
from rollout_trainers.rewards import score
from rollout_trainers.tasks import make_task

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
OUTPUT = ROOT / "docs" / "curves" / "quality.jsonl"
SCRIPTS = {"rollout": "quality_ours.py", "trl": "quality_trl.py"}


def main() -> None:
    args = parse_arguments()
    if args.command == "train":
        for seed in args.seeds:
            overrides = [*args.override, f"steps={args.steps}", f"evaluation.every={args.every}", f"seed={seed}"]
            train(args.side, args.work / f"{args.side}-{seed}", overrides, args.trl_options)
    elif args.command == "evaluate":
        evaluate_all(args)
    else:
        measure(args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="our GRPO beside TRL's on the quickstart recipe")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="one run a seed")
    training.add_argument("side", choices=SCRIPTS)
    training.add_argument("seeds", nargs="+", type=int)
    training.add_argument("--steps", type=int, default=20)
    training.add_argument("--every", type=int, default=5, help="steps between saved models (default: 5)")
    scoring = commands.add_parser("evaluate", help="held-out scores of the models that runs have left")
    timing = commands.add_parser("time", help="seconds a step, both sides in turns")
    timing.add_argument("--steps", type=int, default=3, help="of a turn; the first warms up (default: 3)")
    timing.add_argument("--turns", type=int, default=2)
    for command in (training, scoring, timing):
        command.add_argument("--override", action="append", default=[], metavar="key=value", help="of the recipe")
    for command in (training, scoring):
        command.add_argument("--work", type=Path, default=ROOT / "runs" / "quality", help="(default: runs/quality)")
    for command in (training, timing):
        command.add_argument("--trl-options", default="", metavar="TEXT", help="of quality_trl.py: --float32")
    for command in (scoring, timing):
        command.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


def evaluate_all(args: argparse.Namespace) -> None:
    """Appends what `args.output` does not have yet, and the untrained model's score for every run."""
    config = load_recipe(RECIPE, args.override)
    task = make_task(config.task)
    known = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    done = {(line["side"], line["seed"], line["kind"], line["step"]) for line in known if line["kind"] != "time"}
    base = evaluate(resolve_model(config.model), config, task)
    for folder in sorted(file.parent for file in args.work.glob("*-*/steps.jsonl")):
        side, _, seed = folder.name.partition("-")
        about = {"side": side, "seed": int(seed)}
        found = [about | {"kind": "step"} | line for line in steps_of(folder)] + [about | evaluation_line(0, base)]
        append(args.output, [line for line in found if (side, int(seed), line["kind"], line["step"]) not in done])
        for model in sorted(folder.glob("step-*"), key=step_of):
            if (side, int(seed), "evaluation", step_of(model)) not in done:
                append(args.output, [about | evaluation_line(step_of(model), evaluate(model, config, task))])


def step_of(model: Path) -> int:
    return int(model.name.removeprefix("step-"))


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The lines that a run wrote."""
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def train(side: str, folder: Path, overrides: list[str], trl_options: str) -> list[dict[str, Any]]:
    """The lines of a training run of one side, which leaves its models in `folder`, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    options = trl_options.split() if side == "trl" else []
    command = [sys.executable, str(HERE / SCRIPTS[side]), str(RECIPE), str(folder), *overrides, *options]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return steps_of(folder)


def evaluate(model: Path, config: RunConfig, task: Task) -> Evaluation:
    """The held-out score of a folder, whichever trainer it comes from."""
    section = config.engine
    engine = LLM(model, dtype="float32", max_model_len=section.max_model_len, kv_cache_memory=section.kv_cache_memory)
    producer = RolloutProducer(engine, config.sampling.temperature, config.sampling.max_tokens, config.seed)
    samples = producer.evaluate(task.evaluation, config.evaluation.temperature, config.sampling.max_tokens)
    score(samples, task.rewards)
    lengths = [sample.num_tokens for sample in samples]
    return evaluate_rewards([sample.reward for sample in samples], lengths, config.evaluation.success_threshold)


def evaluation_line(step: int, found: Evaluation) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "step": step,
        "right": sum(found.successes),
        "num": found.num,
        "mean_length": found.mean_length,
    }


def measure(args: argparse.Namespace) -> None:
    """Both sides in turns. Prints a line a step and the ratio of the medians, and appends the former."""
    seconds: dict[str, list[float]] = {side: [] for side in SCRIPTS}
    for turn in range(args.turns):
        for side in SCRIPTS:
            overrides = [*args.override, f"steps={args.steps}", "evaluation.every=0", f"seed={turn}"]
            overrides += ["optimizer.warmup_steps=0"]
            with tempfile.TemporaryDirectory() as scratch:
                lines = train(side, Path(scratch) / side, overrides, args.trl_options)
            lines = [{"side": side, "kind": "time", "turn": turn} | line for line in lines]
            append(args.output, lines)
            for line in lines:
                print(json.dumps(line), flush=True)
            seconds[side] += [line["seconds"] for line in lines[1:]]
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    for side, median in medians.items():
        print(f"{side}: {median:.2f} s a step (median of {len(seconds[side])})")
    print(f"trl / rollout: {medians['trl'] / medians['rollout']:.2f}")


def append(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
