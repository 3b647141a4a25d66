"""The KV pool gets another size, asleep or awake: samples stay the same, and the memory follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout import LLM, SamplingParams
from rollout.errors import EngineBusyError
from tests.support.oracle import load_reference
from tests.support.policies import assert_same_samples, assert_sampled_by, random_prompt

PARAMS = SamplingParams(n=3, max_tokens=30, seed=3, ignore_eos=True)
PROMPTS = [random_prompt(40, 1), random_prompt(40, 1)[:33], random_prompt(7, 2)]
BLOCK = 16 * 2 * 2 * 2 * 16 * 4  # 16 tokens of 2 layers' keys and values: 2 heads of 16 float32 each


@pytest.fixture
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model()


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, kv_cache_memory=64 * BLOCK, max_model_len=128, **options)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"kernels": "reference"}])
@pytest.mark.parametrize("asleep", [False, True])
def test_samples_are_the_same_bits_in_a_pool_of_any_size(folder: Path, asleep: bool, options: dict[str, Any]) -> None:
    llm = engine(folder, **options)
    first = llm.generate(PROMPTS, PARAMS)
    for num_blocks in (200, 10, 64):  # with 10 blocks requests are preempted
        if asleep:
            llm.sleep(level=1)
        assert llm.resize_kv_cache(num_blocks * BLOCK + BLOCK // 2) == num_blocks * BLOCK
        assert llm.is_sleeping is asleep
        llm.wake_up()
        assert llm.get_metrics()["kv_cache_blocks"] == num_blocks
        again = llm.generate(PROMPTS, PARAMS)
        assert_same_samples(first, again)
        assert again[0].num_cached_tokens == 0  # nothing of the old pool can be hit
        assert_same_samples(first, llm.generate(PROMPTS, PARAMS))
    llm.engine.scheduler.kv.check_integrity()
    assert_sampled_by(load_reference(folder), llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=9))[0])


def test_the_ledger_follows_and_a_sleeping_pool_holds_nothing(folder: Path) -> None:
    llm = engine(folder)
    llm.generate(PROMPTS, PARAMS)
    llm.sleep(level=1)
    llm.resize_kv_cache(1000 * BLOCK)
    report = llm.memory_ledger()
    assert report["kv_cache"].reserved == pytest.approx(1000 * BLOCK, rel=0.01)
    assert report["kv_cache"].resident == report["workspace"].resident == 0
    llm.wake_up()
    llm.generate(PROMPTS, PARAMS)
    used = llm.memory_ledger()["kv_cache"].resident
    assert 0 < used < 100 * BLOCK
    llm.resize_kv_cache(20 * BLOCK)
    assert llm.memory_ledger()["kv_cache"].resident == 0
    assert llm.memory_ledger()["kv_cache"].reserved == pytest.approx(20 * BLOCK, rel=0.05)


def test_the_policy_and_its_receipt_stay(folder: Path) -> None:
    llm = engine(folder)
    receipt = llm.reload_weights()
    llm.generate(PROMPTS, PARAMS)
    llm.resize_kv_cache(30 * BLOCK)
    assert (llm.policy_version, llm.verify().id) == (1, receipt.id)
    output = llm.generate(PROMPTS[0], PARAMS)[0]
    assert [span.version for span in output.outputs[0].policy_versions] == [1]
    assert llm.generate(PROMPTS[0], PARAMS)[0].num_cached_tokens == 32  # cached under the version that it has
    with llm.policy_update() as update:
        update.load(dict(llm.engine.parameters()))
    assert llm.generate(PROMPTS[0], PARAMS)[0].num_cached_tokens == 0


def test_it_is_refused_while_requests_or_an_update_are_in_flight(folder: Path) -> None:
    llm = engine(folder)
    llm.enqueue(PROMPTS, PARAMS)
    llm.step()
    with pytest.raises(EngineBusyError, match="requests are in flight"):
        llm.resize_kv_cache("1MiB")
    llm.wait_for_completion()
    with llm.policy_update() as update:
        with pytest.raises(EngineBusyError, match="policy update is open"):
            llm.resize_kv_cache("1MiB")
        update.load(dict(llm.engine.parameters()))
    assert llm.get_metrics()["kv_cache_blocks"] == 64


def test_too_little_is_refused_with_numbers_and_changes_nothing(folder: Path) -> None:
    llm = engine(folder)
    llm.generate(PROMPTS[0], PARAMS)
    for value, message in ((BLOCK - 1, r"one block takes 8,192 bytes"), ("much", r"num_bytes='much' is not valid")):
        with pytest.raises(ValueError, match=message):
            llm.resize_kv_cache(value)
    assert llm.generate(PROMPTS[0], PARAMS)[0].num_cached_tokens == 32
    llm.resize_kv_cache(2 * BLOCK)
    with pytest.raises(ValueError, match=r"need 5 KV blocks of 16 tokens, the pool has 2"):
        llm.generate(PROMPTS[0], PARAMS)
    with pytest.raises(ValueError, match=r"use LLM\.resize_kv_cache instead"):
        llm.collective_rpc("resize_kv_cache")
