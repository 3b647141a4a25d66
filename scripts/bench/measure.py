"""What the peers' scripts share: reading a workload and printing its line. Standard library only, since each peer runs
in an environment of its own."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parse_arguments(description: str) -> argparse.Namespace:
    """MODEL, workload files, and `--startup`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", metavar="MODEL_DIR")
    parser.add_argument("workloads", nargs="*", type=Path, metavar="WORKLOAD.json")
    parser.add_argument("--startup", action="store_true", help="print the seconds from process start to first token")
    return parser.parse_args()


def run_workloads(engine: str, paths: list[Path], run_pass: Callable[[list[dict[str, Any]]], int], passes: int) -> None:
    """Runs each workload `passes` times; the last pass counts. `run_pass(requests)` returns the tokens it sampled."""
    for path in paths:
        workload = json.loads(path.read_text())
        tokens, seconds = 0, 1.0
        for _ in range(passes):
            start = time.perf_counter()
            tokens = run_pass(workload["requests"])
            seconds = time.perf_counter() - start
        print_line(engine, workload["name"], tokens, seconds)


def print_line(engine: str, workload: str, tokens: int, seconds: float, **more: object) -> None:
    """One JSON line on standard output."""
    line = {"engine": engine, "workload": workload, "tokens": tokens, "seconds": round(seconds, 3)}
    print(json.dumps(line | {"tokens_per_second": round(tokens / seconds, 1)} | more), flush=True)


def seconds_since_process_start() -> float:
    """Seconds since the operating system started this process, to about 0.01 s."""
    fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_ticks = int(fields_after_name[19])  # field 22, starttime, in clock ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
