"""Trainer and engine share one budget of memory: the KV pool follows what the trainer was seen to need."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.errors import EngineAsleepError, MemoryBudgetError
from rollout.memory_treaty import MemoryTreaty, TreatyPlan
from rollout.worker.ledger import process_resident_bytes, trim_heap
from tests.support.policies import assert_same_samples, random_prompt

MIB = 1 << 20
SLACK = 24 * MIB
PARAMS = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=0)
PROMPTS = [random_prompt(100, seed) for seed in range(16)]


@pytest.fixture
def llm(tiny_model: Callable[..., Path]) -> LLM:
    folder = tiny_model(num_layers=4, num_kv_heads=4, head_dim=256)  # 32 KiB of KV a token
    return LLM(folder, kv_cache_memory="16MiB", max_num_seqs=64, max_num_batched_tokens=256)


def budget_over(num_bytes: int) -> int:
    """A budget with so much above what this process holds now."""
    gc.collect()
    trim_heap()
    return process_resident_bytes() + num_bytes


def train(treaty: MemoryTreaty, num_bytes: int) -> None:
    with treaty.training():
        torch.ones(num_bytes, dtype=torch.uint8)


def pool(llm: LLM) -> int:
    return llm.memory_ledger()["kv_cache"].reserved


def test_the_pool_gets_what_the_budget_leaves_and_sampling_stays_within_it(llm: LLM) -> None:
    treaty = MemoryTreaty(llm, budget_over(160 * MIB))
    plan = treaty.settle()
    assert plan.kv_cache == pytest.approx(160 * MIB - plan.margin - plan.engine_step, abs=SLACK)
    assert pool(llm) == pytest.approx(plan.kv_cache, abs=MIB)
    assert plan.while_sampling + plan.margin <= plan.budget
    with treaty.sampling():
        llm.generate(PROMPTS, PARAMS)
    assert treaty.phases.measured["sampling"].peak <= treaty.budget
    llm.sleep(level=1)
    train(treaty, 100 * MIB)
    again = treaty.settle()
    assert again.trainer_peak - again.trainer_rest == pytest.approx(100 * MIB, abs=SLACK)
    assert again.kv_cache == pytest.approx(plan.kv_cache, abs=SLACK)  # it sleeps meanwhile: a peak takes nothing of it
    assert treaty.phases.largest <= treaty.budget
    assert "while training" in str(again)


def test_what_the_trainer_keeps_shrinks_the_pool_and_what_it_gives_back_grows_it(llm: LLM) -> None:
    treaty = MemoryTreaty(llm, budget_over(200 * MIB))
    before = treaty.settle().kv_cache
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.sleep(level=1)
    with treaty.training():
        optimizer_state = torch.ones(80 * MIB, dtype=torch.uint8)
    smaller = treaty.settle().kv_cache
    assert before - smaller == pytest.approx(80 * MIB, abs=SLACK)
    assert pool(llm) == pytest.approx(smaller, abs=MIB)
    llm.wake_up()
    with treaty.sampling():
        assert_same_samples(outputs, llm.generate(PROMPTS, PARAMS))
    assert treaty.phases.measured["sampling"].peak <= treaty.budget
    del optimizer_state
    llm.sleep(level=1)
    assert treaty.settle().kv_cache - smaller == pytest.approx(80 * MIB, abs=SLACK)


def test_a_pool_that_stays_awake_leaves_room_for_the_trainers_peak(llm: LLM) -> None:
    treaty = MemoryTreaty(llm, budget_over(200 * MIB))
    treaty.settle()
    llm.generate(PROMPTS, PARAMS)
    train(treaty, 90 * MIB)
    plan = treaty.settle()
    assert plan.kv_cache_in_training == plan.kv_cache
    assert plan.while_training + plan.margin <= plan.budget
    assert plan.kv_cache == pytest.approx(200 * MIB - 90 * MIB - plan.margin, abs=SLACK)


def test_training_that_does_not_fit_is_refused_with_numbers_and_the_pool_stays(llm: LLM) -> None:
    treaty = MemoryTreaty(llm, budget_over(120 * MIB))
    size = treaty.settle().kv_cache
    llm.sleep(level=1)
    train(treaty, 150 * MIB)
    with pytest.raises(MemoryBudgetError, match=r"too small for training: the trainer takes .* are missing"):
        treaty.settle()
    assert pool(llm) == pytest.approx(size, abs=MIB)


def test_a_budget_without_room_for_one_sequence_is_refused_with_numbers(llm: LLM) -> None:
    treaty = MemoryTreaty(llm, budget_over(2 * MIB), margin=0)
    with pytest.raises(MemoryBudgetError, match=r"one sequence of max_model_len=512 tokens needs 16\.0 MiB"):
        treaty.settle()
    for budget, margin, message in (
        (0, 0, r"budget=0 is not valid"),
        ("1KiB", "32MiB", r"budget='1KiB' is not valid: it must be above margin='32MiB'"),
        ("1GiB", -1, r"margin=-1 is not valid"),
        ("lots", 0, r"budget='lots' is not valid"),
    ):
        with pytest.raises(ValueError, match=message):
            MemoryTreaty(llm, budget, margin=margin)


def test_the_pool_is_no_larger_than_all_sequences_at_their_longest(tiny_model: Callable[..., Path]) -> None:
    llm = LLM(tiny_model(), kv_cache_memory="1MiB", max_num_seqs=4, max_model_len=64)
    plan = MemoryTreaty(llm, budget_over(200 * MIB)).settle()
    assert llm.get_metrics()["kv_cache_blocks"] == 4 * 64 // 16
    assert plan.kv_cache == 16 * 8192


def test_a_pool_that_could_be_a_little_larger_stays_as_it_is(llm: LLM) -> None:
    treaty = MemoryTreaty(llm, budget_over(160 * MIB))
    treaty.settle()
    programs = llm.engine.executor.worker.runner.decode_programs
    treaty.budget += MIB
    treaty.settle()
    assert llm.engine.executor.worker.runner.decode_programs is programs
    assert isinstance(treaty.settle(), TreatyPlan)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"enable_lora": True, "max_loras": 4}])
def test_weights_that_sleep_are_planned_as_awake(tiny_model: Callable[..., Path], options: dict[str, Any]) -> None:
    folder = tiny_model(num_layers=2, hidden_size=512, intermediate_size=2048, vocab_size=8192)
    llm = LLM(folder, dtype="float32", kv_cache_memory="8MiB", max_num_seqs=256, **options)
    treaty = MemoryTreaty(llm, budget_over(160 * MIB))
    awake = treaty.settle()
    weights = sum(
        entry.reserved
        for entry in llm.memory_ledger().entries
        if entry.owner in ("weights", "quantized_weights", "adapters")
    )
    assert weights > 40 * MIB
    llm.sleep(2)
    asleep = treaty.settle()
    assert asleep.engine_rest == pytest.approx(awake.engine_rest, abs=MIB)
    assert asleep.kv_cache == pytest.approx(awake.kv_cache, abs=SLACK)
    llm.wake_up()
    llm.reload_weights()
    with treaty.sampling():
        llm.generate(PROMPTS, PARAMS)
    assert treaty.phases.measured["sampling"].peak <= treaty.budget
    again = treaty.settle()
    assert again.engine_step < awake.engine_step + SLACK  # the weights that came back are no part of a step


def test_weights_that_slept_while_the_trainer_worked_leave_it_their_room(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(num_layers=2, hidden_size=512, intermediate_size=2048, vocab_size=8192)
    llm = LLM(folder, dtype="float32", kv_cache_memory="8MiB", max_num_seqs=64)
    weights = llm.memory_ledger()["weights"].resident
    assert weights > 40 * MIB
    treaty = MemoryTreaty(llm, budget_over(110 * MIB))
    treaty.settle()
    llm.sleep(2)
    train(treaty, 100 * MIB)  # more than fits beside the weights and the margin
    plan = treaty.settle()
    assert plan.engine_in_training < MIB
    assert plan.while_training + plan.margin <= plan.budget
    assert plan.engine_rest >= weights


def test_a_budget_that_is_passed_without_any_kv_is_refused_with_numbers_that_agree(llm: LLM) -> None:
    treaty = MemoryTreaty(llm, budget_over(MIB // 4), margin=0)
    with pytest.raises(MemoryBudgetError, match=r"leaves 0 B for KV, .*\(KV 0 B, ") as caught:
        treaty.settle()
    assert "-" not in str(caught.value)


def test_a_treaty_is_made_while_the_engine_sleeps(tiny_model: Callable[..., Path], llm: LLM) -> None:
    llm.sleep(2)
    assert MemoryTreaty(llm, budget_over(160 * MIB)).settle().kv_cache > 16 * MIB
    quantized = LLM(tiny_model(), kv_cache_memory="1MiB", quantization="int8")
    quantized.sleep(2)
    with pytest.raises(EngineAsleepError, match=r"measures a step of the engine, which needs weights"):
        MemoryTreaty(quantized, budget_over(160 * MIB))
    quantized.wake_up()
    quantized.reload_weights()
    quantized.sleep(1)
    MemoryTreaty(quantized, budget_over(160 * MIB)).settle()
