"""A recipe on every rank, as `torchrun -m rollout.cli train` has it: run by `tests.support.distributed.run_ranks`."""

from __future__ import annotations

import json
from pathlib import Path

from rollout.cli import main as command_line

ARGUMENTS = "arguments.json"  # in the folder: the recipe and its overrides


def main(folder: Path) -> None:
    arguments = json.loads((folder / ARGUMENTS).read_text(encoding="utf-8"))
    status = command_line(["train", *arguments])
    assert status == 0, status
