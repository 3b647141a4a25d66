"""Policies that FSDP2 or DeepSpeed spread over two processes learn what one process learns.

The ranks run once each (`tests/support/sharded_ranks.py`); each test looks at what they wrote.
"""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.data_parallel_ranks import train
from tests.support.distributed import ROOT, run_ranks
from tests.support.sharded_ranks import FSDP2, TRANSFORMERS, ZERO
from tests.support.tiny import make_tiny_llama
from tests.trainers.test_data_parallel import metrics, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("fsdp2", tmp_path_factory.mktemp("fsdp2"))


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed")
    script = runpy.run_path(str(ROOT / "scripts" / "build_deepspeed_ops.py"))
    script["build"]()
    return run("zero", tmp_path_factory.mktemp("zero"), script["environment"]())


def run(function: str, folder: Path, variables: Mapping[str, str] | None = None) -> Path:
    make_tiny_llama(folder / "model", tokenizer=True)
    run_ranks(f"tests.support.sharded_ranks:{function}", folder, environment=variables)
    return folder


@pytest.mark.parametrize("case", FSDP2)
def test_a_policy_under_fsdp2_learns_what_one_process_learns(case: str, fsdp2: Path, tmp_path: Path):  # case TR-03
    assert_learned_alike(fsdp2, case, FSDP2[case], tmp_path)


@pytest.mark.parametrize("case", ZERO)
def test_a_policy_under_deepspeed_learns_what_one_process_learns(case: str, zero: Path, tmp_path: Path):  # case TR-03
    assert_learned_alike(zero, case, ZERO[case], tmp_path)


def assert_learned_alike(folder: Path, case: str, options: tuple[str, ...], alone: Path) -> None:
    train(folder / "model", alone, *TRANSFORMERS, *options)
    for row, expected in zip(metrics(folder / case), metrics(alone), strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            if not name.startswith("rollout_corr/") and "logp_difference" not in name:  # of rounding alone
                assert math.isclose(row[name], value, rel_tol=1e-3, abs_tol=1e-5), (name, row[name], value)
    before, expected = load_file(folder / "model" / "model.safetensors"), weights(alone)
    ours = weights(folder / case)
    assert ours.keys() == expected.keys() == before.keys()
    changed = [name for name in ours if not torch.equal(ours[name], before[name])]
    assert changed == [name for name in ours if not torch.equal(expected[name], before[name])] != []
    for name in changed:
        torch.testing.assert_close(ours[name] - before[name], expected[name] - before[name], rtol=1e-2, atol=2e-6)


@pytest.mark.parametrize(("kind", "of"), [("fsdp2", "fsdp2"), ("zero3", "zero"), ("zero1", "zero")])
def test_a_resumed_run_is_that_without_a_break(kind: str, of: str, request: pytest.FixtureRequest):
    folder = request.getfixturevalue(of)
    error = json.loads((folder / f"{kind}-broken" / "result.rank1.json").read_text())["error"]
    assert error == "RuntimeError: the judge has left"
    broken, unbroken = weights(folder / f"{kind}-broken"), weights(folder / f"{kind}-unbroken")
    assert [name for name in unbroken if not torch.equal(broken[name], unbroken[name])] == []
    assert metrics(folder / f"{kind}-broken") == metrics(folder / f"{kind}-unbroken")
