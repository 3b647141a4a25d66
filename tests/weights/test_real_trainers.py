"""Two-process trainers of torch, PEFT and accelerate push their policies; engines hold them and sample from them.

The ranks run once (`tests/support/torch_ranks.py`); each test looks at what they wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.weights.broadcast import BroadcastReceiver
from rollout.weights.trainer_tensors import DEFAULT_BUCKET_BYTES
from tests.support.tiny import make_tiny_llama
from tests.support.trainer_ranks import (
    LARGEST_WEIGHT,
    LORA_TRAINED,
    SAVING_TRAINED,
    SMALL_BUCKET,
    Result,
    assert_adapter_arrived,
    assert_received,
    read_memory,
    run_ranks_and_receive,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch_ranks")
    for tie in (True, False):
        make_tiny_llama(folder / ("tied" if tie else "untied"), tie=tie)
    run_ranks_and_receive("tests.support.torch_ranks:main", folder, lambda to: BroadcastReceiver(to, timeout=300))
    return folder


@pytest.mark.parametrize(
    "case", ["ddp", "accelerate", "accelerate-fsdp2", "fsdp2", "fsdp2-tied", "hybrid", "tensor-parallel"]
)
def test_engines_on_both_ranks_hold_and_sample_from_the_trained_policy(folder: Path, case: str):  # case WS-10
    checkpoint = folder / ("tied" if case == "fsdp2-tied" else "untied")
    result = Result.read(folder / case)
    result.assert_every_rank_holds_the_trainers_policy(checkpoint)
    result.assert_sampled_by_the_oracle(checkpoint)


@pytest.mark.parametrize("case", ["fsdp2-bfloat16", "fsdp2-mixed"])
def test_bfloat16_engines_hold_the_policy_rounded_once(folder: Path, case: str):  # case WS-10
    result = Result.read(folder / case)
    result.assert_every_rank_holds_the_trainers_policy(folder / "untied")
    result.assert_sampled_by_the_oracle(folder / "untied", atol=0.1)


@pytest.mark.parametrize(
    ("case", "trained"),
    [
        ("ddp-lora", SAVING_TRAINED),
        ("fsdp2-lora", LORA_TRAINED),
    ],
)
def test_lora_arrives_merged_and_the_rest_as_it_is(
    folder: Path, case: str, trained: frozenset[str]
):  # cases WS-08, WS-11
    result = Result.read(folder / case)
    result.assert_every_rank_holds_the_trainers_policy(folder / "untied", merged=True, trained=trained)
    result.assert_sampled_by_the_oracle(folder / "untied")


def test_fsdp2_pushes_an_adapter_alone_to_engines_that_apply_it(folder: Path):  # case WS-10
    assert_adapter_arrived(folder, "fsdp2-adapter")


def test_fsdp2_parameters_of_every_size_arrive_whole(folder: Path):  # case WS-10
    for rank in (0, 1):
        wrong = json.loads((folder / f"sizes.rank{rank}.json").read_text())
        assert list(wrong.values()) == [[], [], []]


def test_fsdp2_never_holds_more_than_a_bucket_of_gathered_tensors(folder: Path):
    padding = 2 * 64 * 4  # rows that make the parts of all ranks equally long
    for rank in (0, 1):
        peaks, total = read_memory(folder, rank)
        assert peaks[1] <= LARGEST_WEIGHT + padding
        assert peaks[SMALL_BUCKET] <= SMALL_BUCKET
        assert peaks[DEFAULT_BUCKET_BYTES] > total  # the measurement sees what is gathered


def test_fsdp2_pushes_by_broadcast_to_an_engine_in_another_process(folder: Path):  # case WS-10
    assert_received(folder)


def test_a_rank_whose_engine_fails_lets_the_others_finish(folder: Path):  # case WS-10
    whole, broken = (json.loads((folder / f"fails.rank{rank}.json").read_text()) for rank in (0, 1))
    assert whole == {"error": "", "versions": 1}
    assert broken == {"error": "model.layers.0.mlp.up_proj.weight", "versions": 0}
