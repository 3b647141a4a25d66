"""Two processes that train one policy on whole weights each do what one process does.

The ranks run once (`tests/support/data_parallel_ranks.py`); each test looks at what they wrote.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_trainers.tracking import read_json_lines
from tests.support.data_parallel_ranks import CASES, train_case
from tests.support.distributed import ROOT, run_ranks
from tests.support.tiny import make_tiny_llama

pytestmark = pytest.mark.slow

# What is not the same: it depends on the clock, on memory, or on what one engine of two has seen.
_OF_THE_PROCESS = ("timing_s/", "perf/", "memory/", "engine/", "async/idle_seconds/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data_parallel")
    make_tiny_llama(folder / "model", tokenizer=True)
    ends: Any = list(range(20, 40))
    make_tiny_llama(folder / "turns", tokenizer=True, near_uniform=True, eos_token_id=ends)
    run_ranks("tests.support.data_parallel_ranks:main", folder)
    return folder


def metrics(output: Path) -> list[dict[str, Any]]:
    rows = read_json_lines(output / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(_OF_THE_PROCESS)} for row in rows]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_process_learns(case: str, folder: Path, tmp_path: Path):  # case TR-03
    train_case(case, folder / "model", tmp_path, "evaluation.every=1", "tracking.samples=1000")
    ours, alone = metrics(folder / case), metrics(tmp_path)
    assert [row.keys() for row in ours] == [row.keys() for row in alone]
    for row, expected in zip(ours, alone, strict=True):
        for name, value in expected.items():
            slack = 0.01 if "clip" in name else 1e-5  # a token at the very edge may be counted, or not
            assert math.isclose(row[name], value, rel_tol=1e-4, abs_tol=slack), (row["step"], name, row[name], value)
    before, expected = load_file(folder / "model" / "model.safetensors"), weights(tmp_path)
    for name, tensor in weights(folder / case).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)
        assert not torch.equal(tensor, before[name]), name
    samples, expected_samples = first_samples(folder / case), first_samples(tmp_path)
    assert len(samples) == 16  # those of the second rank, too
    if case == "dynamic":  # further rounds of the first rank come before the second rank's first
        assert all(row in expected_samples for row in samples)
    else:
        assert samples == expected_samples[:16]


def first_samples(output: Path) -> list[list[Any]]:
    kept = ("prompt", "completion", "reward", "num_tokens")
    rows = [row for row in read_json_lines(output / "samples.jsonl") if row["step"] == 1 and row["split"] == "train"]
    return [[row[name] for name in kept] for row in rows]


def test_both_ranks_return_the_result_of_the_session(folder: Path):
    for case in CASES:
        ours, other = (json.loads((folder / case / f"result.rank{rank}.json").read_text()) for rank in (0, 1))
        assert ours == other
        assert len(ours["trained"]) == 5  # held-out prompts, of both ranks


def test_a_resumed_run_is_that_without_a_break_bit_for_bit(folder: Path):
    broken, unbroken = weights(folder / "broken"), weights(folder / "unbroken")
    assert all(torch.equal(broken[name], unbroken[name]) for name in unbroken)
    assert metrics(folder / "broken") == metrics(folder / "unbroken")


def test_ranks_sample_their_shares_of_episodes_ahead_and_stay_in_step(folder: Path):
    rows = [row for row in read_json_lines(folder / "in_flight" / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert 1 <= max(row["staleness/max"] for row in rows) <= 2
    assert max(row["num_turns/max"] for row in rows) == 2
    assert 10 <= rows[0]["async/groups_waiting"] + rows[0]["async/groups_in_flight"] <= 15  # of both ranks
    assert rows[-1]["async/groups_waiting"] == rows[-1]["async/groups_in_flight"] == 0
    for rank, size in ((0, 4), (1, 6)):  # episodes of two and of three groups in every step
        found = json.loads((folder / "in_flight" / f"result.rank{rank}.json").read_text())
        steps = [0, 1, 2, 3, 2, 3, 4]  # the checkpoint is of the second
        assert found["seen"] == [[step, size] for step in steps]
        assert found["threads"] == []
        assert found["error"].endswith("RuntimeError: the judge has left" if rank else "the judge has left")
        assert found["no route"].endswith("environments have failed; the first with OSError: no route")


def test_the_error_of_a_rank_ends_the_run_on_both_with_its_message(folder: Path):
    errors = [json.loads((folder / f"failures.rank{rank}.json").read_text()) for rank in (0, 1)]
    for failing in (0, 1):
        own, other = errors[failing][f"rank {failing}"], errors[1 - failing][f"rank {failing}"]
        assert own == "ValueError: reward 'share_of_low_ids' raised RuntimeError: the judge has left"
        assert other == f"RankFailedError: rank {failing} failed with {own}"
    assert json.loads((folder / "broken" / "result.rank0.json").read_text())["error"].startswith("RankFailedError")
    assert errors[0]["session"].startswith("ValueError: output_dir=")  # rank 0 alone writes
    assert errors[1]["session"] == f"RankFailedError: rank 0 failed with {errors[0]['session']}"


def test_engines_that_hold_other_weights_end_the_run(folder: Path):
    for rank in (0, 1):
        error = json.loads((folder / f"failures.rank{rank}.json").read_text())["policies differ"]
        assert error.startswith("FingerprintMismatchError: policy 1 is not the same on all ranks: rank 1 holds"), error


def test_what_does_not_fit_several_processes_is_refused_by_name(folder: Path):
    for rank in (0, 1):
        errors = json.loads((folder / f"failures.rank{rank}.json").read_text())
        assert "distributed.kind='none' is not valid in 2 processes" in errors["none"]
        assert "algorithm.prompts_per_step=1 is not valid: it must be at least 2" in errors["too few groups"]


def test_torchrun_trains_by_the_recipe_of_the_page(folder: Path, tmp_path: Path):
    """`rollout train` in two processes that torchrun starts, with what the page about it says."""
    page = (ROOT / "docs" / "distributed_training.md").read_text(encoding="utf-8")
    command = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].replace("\\\n", " ").split()
    assert command[:5] == ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"]
    assert command[5:8] == ["rollout", "train", "recipes/quickstart.yaml"]
    overrides = [
        *command[8:],
        f"model={folder / 'model'}",
        f"output_dir={tmp_path / 'run'}",
        "tracking.wandb=disabled",
        "steps=1",
        "optimizer.warmup_steps=0",
        "evaluation.every=0",
        "task.eval_size=4",
        "engine.kv_cache_memory=4MiB",
        "algorithm.group_size=2",
        "algorithm.prompts_per_step=3",
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", *command[1:5], sys.executable, "-m", "rollout.cli"]
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "trainers"))
    result = subprocess.run(
        [*launcher, "train", command[7], *overrides],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert [row["step"] for row in metrics(tmp_path / "run") if "reward" in row] == [1]
    assert result.stderr.count("loading") == 1  # one of the two tells
