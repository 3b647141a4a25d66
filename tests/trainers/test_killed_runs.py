"""A run that is killed again and again, at whatever moment, ends with what one without a break has, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_trainers.checkpoint import list_checkpoints
from rollout_trainers.run_record import read_record
from rollout_trainers.tracking import read_json_lines
from tests.support.distributed import ROOT, kill_group
from tests.support.tiny import make_tiny_llama

MEASURED = ("timing_s/", "perf/", "memory/", "engine/")  # of the process and its clock, not of the training
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with both runs, and what has ended the processes of the broken one."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_tiny_llama(folder / "model", tokenizer=True, dtype=torch.bfloat16)
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "trainers"))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.killed_runs", str(model), str(folder), "3"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=600)
    finally:
        kill_group(process)
    assert process.returncode == 0, errors.decode()[-4000:]
    return folder, json.loads(output)


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = read_json_lines(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]


def test_the_processes_were_really_killed(nursery: tuple[Path, dict[str, Any]]):
    _, report = nursery
    assert report["unbroken"] == [0, ""]
    assert report["last"] == [0, ""]
    ended = [signal for _, signal, _ in report["kills"]]
    assert ended.count(9) >= 4, report
    assert ["half a file", 25, ""] in report["kills"]  # SIGXFSZ, in the middle of a write
    assert set(ended) <= {0, 9, 25}, report


def test_what_the_runs_have_written_is_the_same(nursery: tuple[Path, dict[str, Any]]):
    folder, _ = nursery
    unbroken, broken = folder / "unbroken", folder / "broken"
    assert metrics(broken) == metrics(unbroken)
    assert [row["step"] for row in metrics(broken) if "loss" in row] == [1, 2, 3, 4, 5]
    assert len({row["objective/kl_coef"] for row in metrics(broken) if "loss" in row}) == 5
    for name in ("samples.jsonl", "histograms.jsonl", "alerts.jsonl"):
        assert (broken / name).read_bytes() == (unbroken / name).read_bytes()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (broken / "model" / name).read_bytes() == (unbroken / "model" / name).read_bytes()


def test_checkpoints_and_record_are_the_same(nursery: tuple[Path, dict[str, Any]]):
    folder, _ = nursery
    ours, theirs = (list_checkpoints(folder / name / "checkpoints") for name in ("broken", "unbroken"))
    assert [path.name for path in ours] == [path.name for path in theirs]
    for our, their in zip(ours, theirs, strict=True):
        saved, other = (torch.load(path / "trainer.pt", weights_only=True) for path in (our, their))
        assert saved["trainer"] == other["trainer"]
        for part in ("masters", "moments"):
            torch.testing.assert_close(
                saved["optimizers"]["optimizer"][part], other["optimizers"]["optimizer"][part], rtol=0, atol=0
            )
        assert torch.equal(saved["random"]["torch"], other["random"]["torch"])
        assert saved["random"]["python"] == other["random"]["python"]
    record, other = read_record(folder / "broken"), read_record(folder / "unbroken")
    assert record is not None and other is not None
    for name in ("status", "base", "trained", "p_value", "best", "stopped", "last_step", "model_step"):
        assert record[name] == other[name]
    assert record["status"] == "finished"
    best = record["best"]["step"]
    assert record["model_step"] == best
    assert (folder / "broken" / "checkpoints" / "best").readlink() == Path(f"step-{best:06d}")


def test_nothing_half_written_is_left(nursery: tuple[Path, dict[str, Any]]):
    folder, _ = nursery
    assert [path for path in folder.rglob("*") if ".partial" in path.name] == []


def test_a_full_disk_is_told_and_leaves_the_checkpoints(nursery: tuple[Path, dict[str, Any]]):
    """The run that follows continues from them: `test_what_the_runs_have_written_is_the_same`."""
    _, report = nursery
    signal, error = report["full disk"]
    assert signal == 0
    assert "could not be saved" in error
    assert "cannot be written" in error
