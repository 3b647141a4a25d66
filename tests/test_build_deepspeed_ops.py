"""What DeepSpeed compiles is found by the next process, and a lock that a killed one left behind is no obstacle."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "build_deepspeed_ops.py"))


@pytest.mark.parametrize("age", [None, 61, 59])
def test_what_is_built_is_used_once_nobody_holds_its_lock(tmp_path: Path, age: int | None):
    operation = tmp_path / SCRIPT["OPERATION"]
    operation.mkdir()
    built, lock = operation / f"{operation.name}.so", operation / "lock"
    built.touch()
    if age is not None:
        lock.touch()
        os.utime(lock, (time.time() - age, time.time() - age))
    assert SCRIPT["build"](tmp_path) == built
    assert not lock.exists()


def test_processes_find_ninja_and_the_folder_by_their_environment(tmp_path: Path):
    environment = SCRIPT["environment"](tmp_path)
    assert environment["TORCH_EXTENSIONS_DIR"] == str(tmp_path)
    assert environment["PATH"].endswith(os.environ["PATH"])
