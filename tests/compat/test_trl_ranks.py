"""TRL's GRPOTrainer in two processes, unmodified, each with this engine in the place of vLLM.

The ranks run once (`tests/support/trl_ranks.py`); each test looks at what they wrote. The oracle is TRL's own: the
logprobs that its sharded, wrapped model gives to the tokens that the engine sampled.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import ROOT, run_ranks
from tests.support.tiny import make_tiny_llama
from tests.support.trl import needs_trl

pytestmark = [pytest.mark.slow, needs_trl]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")

SAME = 1e-4  # nats a token
DIFFERENCE = "sampling/sampling_logp_difference/max"
RATIO = "sampling/importance_sampling_ratio/mean"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl_ranks")
    make_tiny_llama(folder / "model", vocab_size=160, tokenizer=True)
    run_ranks("tests.support.trl_ranks:main", folder)
    return folder


@pytest.fixture(scope="module")
def deepspeed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = runpy.run_path(str(ROOT / "scripts" / "build_deepspeed_ops.py"))
    script["build"]()
    folder = tmp_path_factory.mktemp("trl_deepspeed_ranks")
    make_tiny_llama(folder / "model", vocab_size=160, tokenizer=True)
    run_ranks("tests.support.trl_ranks:deepspeed", folder, environment=script["environment"]())
    return folder


def both(folder: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{case}.rank{rank}.json").read_text()) for rank in (0, 1)]


def check_two_steps(folder: Path, case: str, wrapper: str, parameter: str = "Parameter") -> None:
    """Both ranks hold the same policy, the second of two, and sampled from it what TRL's model says it would."""
    one, other = both(folder, case)
    assert (one["wrapper"], one["parameter"]) == (wrapper, parameter)
    assert one["version"] == other["version"] == 2
    assert one["fingerprint"] == other["fingerprint"]
    for log in (one["log"], other["log"]):
        assert len(log) == 2
        assert min(row["grad_norm"] for row in log) > 0
        assert max(row[DIFFERENCE] for row in log) < SAME
        assert [row[RATIO] for row in log] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert one["completions"] != other["completions"]


@pytest.mark.parametrize("case", ["ddp", "ddp-lora"])
def test_ddp(folder: Path, case: str):
    check_two_steps(folder, case, "DistributedDataParallel")


@pytest.mark.parametrize("case", ["fsdp2", "fsdp2-lora"])
def test_fsdp2(folder: Path, case: str):
    wrapper = "FSDPPeftModel" if case.endswith("lora") else "FSDPLlamaForCausalLM"
    check_two_steps(folder, case, wrapper, "DTensor")


@needs_deepspeed
@pytest.mark.parametrize("case", ["zero2", "zero3", "zero3-lora"])
def test_deepspeed(deepspeed_folder: Path, case: str):
    check_two_steps(deepspeed_folder, case, "DeepSpeedEngine")


def test_a_group_over_both_ranks_has_other_samples_on_each(folder: Path):
    check_two_steps(folder, "shared-group", "DistributedDataParallel")
    check_no_sample_twice(folder, "shared-group")


def check_no_sample_twice(folder: Path, case: str) -> None:
    one, other = both(folder, case)
    assert one["prompts"] == other["prompts"]
    assert len(one["prompts"]) == 8  # four samples in each of two steps
    samples = [tuple(ids) for ids in one["completions"] + other["completions"]]
    assert len(set(samples[:4] + samples[8:12])) == len(set(samples[4:8] + samples[12:])) == 8


@pytest.mark.parametrize("case", ["ddp-rollout_func", "fsdp2-rollout_func"])
def test_rollout_func_with_lora(folder: Path, case: str):
    check_rollout_func(folder, case)


@needs_deepspeed
def test_rollout_func_with_lora_under_zero3(deepspeed_folder: Path):
    check_rollout_func(deepspeed_folder, "zero3-rollout_func")


def check_rollout_func(folder: Path, case: str) -> None:
    """Ranks whose engines have the same seed hold the same policy and draw other samples for the same prompts."""
    one, other = both(folder, case)
    assert one["version"] == other["version"] == 2
    assert one["fingerprint"] == other["fingerprint"]
    assert min(row["grad_norm"] for row in one["log"]) > 0
    check_no_sample_twice(folder, case)
