"""rollout and its peers on the workloads, side by side, in one run on one machine.

    .venv/bin/python scripts/bench/compare.py [MODEL] [--engines rollout,vllm,transformers] [--passes 3]

Engines take turns (a machine's speed drifts, so one after the other would compare weathers): each pass starts every
engine once, in a process of its own, over all workloads. The table shows medians over the passes, in tokens per second,
and the first engine's ratio to each of the others. The peers come from `setup_peers.sh`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from rollout.commands.doctor import cpu_info, usable_cores
from rollout.models.pretrained import SMOLLM2, resolve_model

HERE = Path(__file__).resolve().parent
ENGINES = ("rollout", "vllm", "transformers")

Figures = dict[str, dict[str, list[float]]]  # workload -> engine -> one figure a pass


def main() -> int:
    args = parse_arguments()
    try:
        model = resolve_model(args.model)
    except ValueError as error:
        sys.exit(f"error: {error}")
    workloads = args.workloads or sorted((HERE / "workloads").glob("*.json"))
    figures: Figures = defaultdict(lambda: defaultdict(list))
    for number in range(args.passes):
        for engine in args.engines:
            print(f"pass {number + 1} of {args.passes}: {engine} …", file=sys.stderr, flush=True)
            for line in run_engine(engine, model, workloads, args):
                unit = "seconds" if line["workload"] == "startup" else "tokens_per_second"
                figures[line["workload"]][engine].append(line[unit])
                print(f"  {line['workload']}: {line[unit]}", file=sys.stderr, flush=True)
    table = markdown(figures, args.engines, args.passes)
    print(table)
    if args.output:
        args.output.write_text(table + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="rollout and its peers, side by side")
    parser.add_argument("model", nargs="?", default=SMOLLM2, help=f"a folder or a known name (default: {SMOLLM2})")
    parser.add_argument("--workloads", nargs="+", type=Path, metavar="FILE", help="default: all of workloads/")
    parser.add_argument("--engines", type=engine_list, default=list(ENGINES), help=f"default: {','.join(ENGINES)}")
    parser.add_argument("--passes", type=int, default=3, metavar="N")
    parser.add_argument("--no-startup", dest="startup", action="store_false", help="leave out the start-up times")
    parser.add_argument("--rollout-options", default="", metavar="TEXT", help="more options for `rollout bench`")
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS", Path.home() / ".cache/rollout-peers"))
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the table here")
    return parser.parse_args()


def engine_list(text: str) -> list[str]:
    """`rollout,vllm` as a list; argparse shows the error's message."""
    engines = text.split(",")
    if unknown := [engine for engine in engines if engine not in ENGINES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(ENGINES)}")
    return engines


def run_engine(engine: str, model: Path, workloads: list[Path], args: argparse.Namespace) -> list[dict]:
    """The JSON lines of one process of `engine`. Exits with its message where it fails."""
    command = {
        "rollout": [sys.executable, "-m", "rollout.cli", "bench"],
        "vllm": [str(args.peers / "vllm/bin/python"), str(HERE / "peer_vllm.py")],
        "transformers": [str(args.peers / "hf/bin/python"), str(HERE / "peer_hf.py")],
    }[engine]
    if not Path(command[0]).exists():
        sys.exit(
            f"error: {command[0]} is missing: run scripts/bench/setup_peers.sh, or leave {engine} out of --engines"
        )
    command += [str(model), *map(str, workloads)]
    command += ["--startup"] if args.startup else []
    command += args.rollout_options.split() if engine == "rollout" else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {engine} exited with {done.returncode}:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]


def markdown(figures: Figures, engines: list[str], passes: int) -> str:
    """The table: one row a workload, medians, then ratios of the first engine to the others."""
    first, *others = engines
    ratios = [f"{first} / {other}" for other in others]
    processor = cpu_info().get("model name", "unknown processor")
    lines = [
        f"{processor}, {usable_cores()} cores; tokens per second (start-up: seconds), medians of {passes}.",
        "",
        "| " + " | ".join(["workload", *engines, *ratios]) + " |",
        "|---" + "|---:" * (len(engines) + len(ratios)) + "|",
    ]
    for workload in sorted(figures, key=lambda name: (name == "startup", name)):
        medians = {engine: statistics.median(figures[workload][engine]) for engine in engines}
        faster = -1 if workload == "startup" else 1  # fewer seconds, or more tokens per second, is better
        cells = [f"{medians[engine]:,.1f}" for engine in engines]
        cells += [f"{(medians[first] / medians[other]) ** faster:.2f}" for other in others]
        lines.append("| " + " | ".join([workload, *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
