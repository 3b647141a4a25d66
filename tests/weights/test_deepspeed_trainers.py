"""Two-process DeepSpeed trainers, ZeRO 1 to 3, push their policies; engines hold them and sample from them.

The ranks run once (`tests/support/deepspeed_ranks.py`); each test looks at what they wrote.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path

import pytest

from rollout.weights.shared_memory import SharedMemoryReceiver
from rollout.weights.trainer_tensors import DEFAULT_BUCKET_BYTES
from tests.support.distributed import ROOT
from tests.support.tiny import make_tiny_llama
from tests.support.trainer_ranks import (
    LARGEST_WEIGHT,
    LORA_TRAINED,
    SMALL_BUCKET,
    Result,
    assert_adapter_arrived,
    assert_received,
    read_memory,
    run_ranks_and_receive,
    tiny_engine,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra `deepspeed`"),
]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What DeepSpeed compiles is compiled before any rank starts."""
    script = runpy.run_path(str(ROOT / "scripts" / "build_deepspeed_ops.py"))
    script["build"]()
    return script["environment"]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed_ranks")
    for tie in (True, False):
        make_tiny_llama(folder / ("tied" if tie else "untied"), tie=tie)
    run_ranks_and_receive(
        "tests.support.deepspeed_ranks:main",
        folder,
        lambda to: SharedMemoryReceiver(to, timeout=300),
        environment,
    )
    return folder


@pytest.mark.parametrize("case", ["zero1", "zero3", "zero3-tied", "zero3-persistent", "accelerate-zero3"])
def test_engines_on_both_ranks_hold_and_sample_from_the_trained_policy(folder: Path, case: str):  # case WS-10
    checkpoint = folder / ("tied" if case == "zero3-tied" else "untied")
    result = Result.read(folder / case)
    result.assert_every_rank_holds_the_trainers_policy(checkpoint)
    result.assert_sampled_by_the_oracle(checkpoint)


@pytest.mark.parametrize("case", ["zero2-bfloat16", "zero3-bfloat16"])
def test_bfloat16_engines_hold_the_weights_of_the_trainers_forward_pass(folder: Path, case: str):  # case WS-10
    result = Result.read(folder / case)
    result.assert_every_rank_holds_the_trainers_policy(folder / "untied")
    result.assert_sampled_by_the_oracle(folder / "untied", atol=0.1)


def test_lora_under_zero3_arrives_merged_and_the_rest_as_it_is(folder: Path):  # cases WS-10, WS-11
    result = Result.read(folder / "zero3-lora")
    result.assert_every_rank_holds_the_trainers_policy(folder / "untied", merged=True, trained=LORA_TRAINED)
    result.assert_sampled_by_the_oracle(folder / "untied")


def test_zero3_pushes_an_adapter_alone_to_engines_that_apply_it(folder: Path):  # case WS-10
    assert_adapter_arrived(folder, "zero3-adapter")


def test_zero3_never_holds_more_than_a_bucket_of_gathered_tensors(folder: Path):
    for rank in (0, 1):
        peaks, total = read_memory(folder, rank)
        assert peaks[1] <= LARGEST_WEIGHT
        assert peaks[SMALL_BUCKET] <= SMALL_BUCKET
        assert peaks[DEFAULT_BUCKET_BYTES] == total  # the measurement sees what is gathered


def test_zero3_pushes_through_shared_memory_to_an_engine_in_another_process(folder: Path):  # case WS-10
    assert_received(folder)


def test_a_pipeline_model_is_refused_by_name(folder: Path):
    for rank in (0, 1):
        assert "PipelineModule" in json.loads((folder / f"pipeline.rank{rank}.json").read_text())


def test_an_engine_loads_its_checkpoint_where_transformers_would_load_placeholders(folder: Path):  # case WS-10
    with tiny_engine(folder / "untied") as llm:
        assert llm.receipt is not None
        for rank in (0, 1):
            assert json.loads((folder / f"loaded.rank{rank}.json").read_text()) == llm.receipt.tensors
