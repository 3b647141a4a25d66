"""`rollout dashboard ENTITY/PROJECT [RUN]`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="ENTITY/PROJECT", help="project of Weights & Biases")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="folder of a run, whose metrics the workspace then shows; without it there are panels for all metrics",
    )
    parser.add_argument("--name", default="rollout", help="what the saved view is called (%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the view to a file, and send nothing over the network"
    )


def run(args: argparse.Namespace) -> int:
    """Saves a workspace. The trainers are imported here, by name."""
    from rollout_trainers.workspace import save_workspace

    print(save_workspace(args.target, args.folder, args.name, args.json))
    return 0
