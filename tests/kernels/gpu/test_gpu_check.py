"""scripts/gpu_check.py from its first to its last section, at tiny size, in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_section_runs_and_passes(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--small", "--json", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["failures"] == []
    empty = [name for name, rows in found["sections"].items() if not rows]
    assert empty == ["model"]
    operations = [row["operation"] for row in found["sections"]["kernels"]]
    assert len(operations) == len(set(operations)) == 16
    assert all(row["same bits"] for row in found["sections"]["engine bits"])
    speeds = found["sections"]["engine speed"]
    assert {row["engine"] for row in speeds} == {"rollout", "transformers"} and all(
        row["tokens/s"] > 0 for row in speeds
    )
    assert "everything passed" in done.stdout


def test_a_section_that_fails_is_named_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    module = script()
    check = module.Check(module.SMALL, torch.device("cpu"))

    def broken(check: object, rows: list[dict[str, object]]) -> None:
        rows.append({"fact": "found before the error"})
        raise MemoryError("no room")

    def wrong(check: object, rows: list[dict[str, object]]) -> None:
        assert not module.Check.expect(check, False, "second: another value")

    check.run("first", broken)
    check.run("second", wrong)
    check.run("third", lambda check, rows: rows.append({"fact": 7}))
    assert check.failures == ["first: MemoryError: no room", "second: another value"]
    assert check.sections["first"] == [{"fact": "found before the error"}]
    assert check.sections["third"] == [{"fact": 7}]
    assert "found before the error" in capsys.readouterr().out


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script().main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
