"""What DeepSpeed compiles is found by the next process, and a lock that a killed one left behind is no obstacle."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "build_deepspeed_ops.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with a folder of its own, in which the operation is built."""
    spec = importlib.util.spec_from_file_location("build_deepspeed_ops", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "ops")
    operation = module.FOLDER / module.OPERATION
    operation.mkdir(parents=True)
    (operation / f"{module.OPERATION}.so").write_bytes(b"")
    return module


@pytest.mark.parametrize("age", [None, 61, 59])
def test_what_is_built_is_used_once_nobody_holds_its_lock(script: ModuleType, age: int | None):
    lock = script.FOLDER / script.OPERATION / "lock"
    if age is not None:
        lock.touch()
        then = time.time() - age
        os.utime(lock, (then, then))
    assert script.build() == lock.with_name(f"{script.OPERATION}.so")
    assert not lock.exists()


def test_processes_find_ninja_and_the_folder_by_their_environment(script: ModuleType):
    environment = script.environment()
    assert environment["TORCH_EXTENSIONS_DIR"] == str(script.FOLDER)
    assert environment["PATH"].endswith(os.environ["PATH"])
