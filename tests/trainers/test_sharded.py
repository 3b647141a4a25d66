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
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.data_parallel_ranks import train
from tests.support.distributed import ROOT, run_ranks
from tests.support.sharded_ranks import ACCELERATE_FSDP2, FSDP2_OF_ACCELERATE, TORCH, TRANSFORMERS, ZERO
from tests.support.tiny import make_tiny_llama
from tests.trainers.test_data_parallel import metrics, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def torch_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("torch_kinds", tmp_path_factory.mktemp("torch_kinds"))


@pytest.fixture(scope="module")
def accelerate_fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("accelerate_fsdp2", tmp_path_factory.mktemp("accelerate_fsdp2"), FSDP2_OF_ACCELERATE)


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


@pytest.mark.parametrize("case", TORCH)
def test_under_fsdp2_or_accelerate_it_learns_what_one_process_learns(
    case: str, torch_kinds: Path, tmp_path: Path
):  # case TR-03
    assert_learned_alike(torch_kinds, case, TORCH[case], tmp_path)


@pytest.mark.parametrize("case", ACCELERATE_FSDP2)
def test_under_accelerates_fsdp2_it_learns_what_one_process_learns(
    case: str, accelerate_fsdp2: Path, tmp_path: Path
):  # case TR-03
    assert_learned_alike(accelerate_fsdp2, case, ACCELERATE_FSDP2[case], tmp_path)


@pytest.mark.parametrize("case", ZERO)
def test_under_deepspeed_it_learns_what_one_process_learns(case: str, zero: Path, tmp_path: Path):  # case TR-03
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


@pytest.mark.parametrize(("kind", "of"), [("fsdp2", "torch_kinds"), ("zero3", "zero"), ("zero1", "zero")])
def test_a_resumed_run_is_that_without_a_break(kind: str, of: str, request: pytest.FixtureRequest):
    folder = request.getfixturevalue(of)
    error = json.loads((folder / f"{kind}-broken" / "result.rank1.json").read_text())["error"]
    assert error == "ValueError: reward 'share_of_low_ids' raised RuntimeError: the judge has left"
    broken, unbroken = weights(folder / f"{kind}-broken"), weights(folder / f"{kind}-unbroken")
    assert [name for name in unbroken if not torch.equal(broken[name], unbroken[name])] == []
    assert metrics(folder / f"{kind}-broken") == metrics(folder / f"{kind}-unbroken")


def test_a_lora_run_leaves_a_folder_that_peft_loads(torch_kinds: Path, zero: Path):
    for folder in (torch_kinds / "fsdp2-lora", zero / "zero3-lora"):
        base = AutoModelForCausalLM.from_pretrained(torch_kinds / "model")
        adapted = PeftModel.from_pretrained(base, str(folder / "model" / "adapter"))
        merged = adapted.merge_and_unload().state_dict()  # pyright: ignore[reportCallIssue]
        for name, tensor in weights(folder).items():
            torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)


def test_what_a_kind_cannot_do_is_refused_on_both_ranks(torch_kinds: Path):
    for rank in (0, 1):
        refused = json.loads((torch_kinds / f"refused.rank{rank}.json").read_text())
        assert "policy.kind='shared' is not valid: it must be 'transformers'" in refused["shared"]
        assert "loss.baseline='critic' is not valid" in refused["critic"]
        assert "policy.model_dtype must be 'float32'" in refused["bfloat16"]
        assert (
            "with FSDP here, of which accelerate makes MULTI_CPU: it must be 'fsdp2'" in refused["accelerate's FSDP2"]
        )
