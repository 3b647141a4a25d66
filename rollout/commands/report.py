"""`rollout report RUN [RUN …]`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run: its output_dir")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the page about several runs goes (comparison.html); that about one goes into its folder",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page about one run, or the page that compares several. The trainers are imported here, by name."""
    if len(args.runs) == 1 and args.output is not None:
        raise ValueError("--output is for several runs: the report of one is report.html in its folder")
    if len(args.runs) == 1:
        from rollout_trainers.report import write_report

        print(write_report(args.runs[0]))
        return 0
    from rollout_trainers.comparison import write_comparison

    print(write_comparison(args.output or Path("comparison.html"), args.runs))
    return 0
