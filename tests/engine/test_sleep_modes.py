"""Sleep with requests in flight, mode by mode and level by level; tags one by one; sleeps and wakes that fail."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rollout import LLM, RequestOutput, SamplingParams
from rollout.errors import EngineAsleepError, WeightsNotLoadedError
from rollout.platform.cpu import CpuPlatform
from rollout.weights.target import InFlightMode
from rollout.worker.device_slab import StorageSlab
from rollout.worker.ledger import process_resident_bytes, trim_heap
from tests.support.policies import (
    GREEDY,
    InFlight,
    Policies,
    assert_is_beginning,
    assert_same_samples,
    assert_sampled_by,
    push_mapping,
    random_prompt,
)

MIB = 1 << 20
PROMPTS = [random_prompt(17), random_prompt(9, seed=1)]
PARAMS = SamplingParams(n=2, seed=11, max_tokens=30, ignore_eos=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("policies"), tie=False)


@pytest.fixture(scope="module")
def whole(policies: Policies) -> list[RequestOutput]:
    return policies.engine().generate(PROMPTS, PARAMS)


def started(llm: LLM, steps: int = 5) -> None:
    llm.enqueue(PROMPTS, PARAMS)
    for _ in range(steps):
        llm.step()


def wake_whole(llm: LLM, level: int, mode: InFlightMode) -> None:
    """Awake, with the weights of W0 again."""
    llm.wake_up()
    if level == 2:
        with pytest.raises(WeightsNotLoadedError):
            llm.generate(PROMPTS, GREEDY)
        llm.reload_weights(in_flight=mode)


def assert_idle(llm: LLM) -> None:
    llm.engine.scheduler.check_integrity()
    stats = llm.engine.scheduler.stats()
    assert (llm.num_unfinished, stats.num_free_blocks) == (0, stats.num_blocks)


# Requests in flight


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_abort_and_wait_end_requests_before_the_engine_sleeps(
    policies: Policies, whole: list[RequestOutput], mode: InFlightMode, level: int
):  # case SW-05
    llm = policies.engine()
    started(llm)
    llm.sleep(level, mode)
    assert llm.is_sleeping
    assert_idle(llm)
    outputs = llm.wait_for_completion()  # nothing has to run for that
    if mode == "wait":
        assert_same_samples(outputs, whole)
    for output, undisturbed in zip(outputs, whole, strict=True):
        for sample, same in zip(output.outputs, undisturbed.outputs, strict=True):
            if mode == "abort":
                assert_is_beginning(sample, same)
                assert 0 < len(sample.token_ids) < 30
    with pytest.raises(EngineAsleepError):
        llm.generate(PROMPTS, GREEDY)
    wake_whole(llm, level, mode)
    assert_same_samples(llm.generate(PROMPTS, PARAMS), whole)


@pytest.mark.parametrize(("level", "mode"), [(0, "keep"), (0, "recompute"), (1, "recompute"), (2, "recompute")])
def test_requests_that_are_held_go_on_after_waking_as_if_nothing_had_happened(
    policies: Policies, whole: list[RequestOutput], level: int, mode: InFlightMode
):  # case SW-05
    llm = policies.engine()
    started(llm)
    computed = llm.engine.counters.num_computed_tokens
    llm.sleep(level, mode)
    assert llm.num_unfinished == 4
    for call in (llm.step, llm.wait_for_completion, lambda: llm.generate(PROMPTS, GREEDY)):
        with pytest.raises(EngineAsleepError):
            call()
    wake_whole(llm, level, mode)
    outputs = llm.wait_for_completion()
    assert_same_samples(outputs, whole)
    left = sum(25 for output in whole for _ in output.outputs)
    if mode == "keep":
        assert llm.engine.counters.num_computed_tokens == computed + left
    else:
        assert llm.engine.counters.num_computed_tokens > computed + left
    versions = [0] if level < 2 else [0, 1]
    for output in outputs:
        assert [[span.version for span in sample.policy_versions] for sample in output.outputs] == [versions] * 2
    assert_idle(llm)


@pytest.mark.parametrize(("level", "mode"), [(0, "keep"), (1, "recompute")])
def test_a_thread_that_waits_sleeps_with_the_engine(policies: Policies, level: int, mode: InFlightMode):
    llm = policies.engine()
    params = SamplingParams(seed=2, max_tokens=300, ignore_eos=True)
    undisturbed = policies.engine().generate(PROMPTS, params)
    with InFlight(llm, PROMPTS, params) as flight:
        for _ in range(3):
            flight.wait_for_steps(3)
            llm.sleep(level, mode)
            steps = llm.engine.counters.num_steps
            with pytest.raises(EngineAsleepError):
                llm.generate(PROMPTS[0], GREEDY)
            assert llm.engine.counters.num_steps == steps
            llm.wake_up()
    assert_same_samples(flight.outputs, undisturbed)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_policy_that_comes_while_the_engine_sleeps_takes_held_requests_over(policies: Policies, mode: InFlightMode):
    level = 0 if mode == "keep" else 1
    llm, direct = policies.engine(), policies.engine()
    started(llm)
    started(direct)
    llm.sleep(level, mode)
    with llm.policy_update(in_flight=mode) as update:
        update.load(policies.weights(1))
    assert llm.is_sleeping  # an update does not wake what it does not need
    with pytest.raises(EngineAsleepError):
        llm.step()
    llm.wake_up()
    with direct.policy_update(in_flight=mode) as update:
        update.load(policies.weights(1))
    assert_same_samples(llm.wait_for_completion(), direct.wait_for_completion())


@pytest.mark.parametrize("level", [1, 2])
def test_kv_cannot_be_kept_where_its_memory_goes(policies: Policies, whole: list[RequestOutput], level: int):
    llm = policies.engine()
    started(llm)
    with pytest.raises(ValueError, match=f"mode='keep' is not valid at level={level}.*use 'recompute'"):
        llm.sleep(level, "keep")
    assert not llm.is_sleeping
    assert_same_samples(llm.wait_for_completion(), whole)


def test_modes_and_levels_that_do_not_exist_are_refused(policies: Policies):
    llm = policies.engine()
    with pytest.raises(ValueError, match=r"mode='drain' is not valid: it must be one of abort, wait, keep, recompute"):
        llm.sleep(1, "drain")  # pyright: ignore[reportArgumentType]
    for level in (3, -1, True, False, 1.0, "1"):
        with pytest.raises(ValueError, match=f"level={level!r} is not valid: it must be 0 .*, 1 .* or 2"):
            llm.sleep(level)  # pyright: ignore[reportArgumentType]
    assert not llm.is_sleeping


def test_waiting_has_a_limit_after_which_the_engine_goes_on_awake(policies: Policies, whole: list[RequestOutput]):
    llm = policies.engine()
    started(llm)
    with pytest.raises(TimeoutError, match=r"4 requests in flight had not ended after 0\.0001 s, and go on"):
        llm.sleep(1, "wait", timeout=0.0001)
    assert not llm.is_sleeping
    assert_same_samples(llm.wait_for_completion(), whole)
    llm.sleep(1, "wait")
    assert llm.is_sleeping


def test_waiting_for_requests_that_cannot_run_is_refused(policies: Policies, whole: list[RequestOutput]):
    llm = policies.engine()
    started(llm)
    llm.sleep(1, "recompute")
    for call in (lambda: llm.sleep(2, "wait"), llm.policy_update(in_flight="wait").__enter__):
        with pytest.raises(EngineAsleepError, match="'wait' would never end"):
            call()
    assert llm.sleeping_tags == ("kv_cache", "graphs")
    llm.wake_up()
    assert_same_samples(llm.wait_for_completion(), whole)


def test_held_requests_can_be_aborted_and_closing_returns_them(policies: Policies):
    llm = policies.engine()
    started(llm)
    first = next(iter(llm._delivery.groups))
    llm.sleep(1, "recompute")
    llm.abort([first])
    assert llm.num_unfinished == 2
    outputs = llm.step()
    assert [output.request_id for output in outputs] == [first]
    with pytest.raises(EngineAsleepError):
        llm.step()
    llm.close()
    assert llm.num_unfinished == 0
    for output in outputs + llm.wait_for_completion():
        assert {sample.finish_reason for sample in output.outputs} == {"abort"}
        assert all(sample.token_ids for sample in output.outputs)
    assert_idle(llm)


def test_a_sleep_that_is_interrupted_before_anything_went_leaves_the_engine_awake(
    policies: Policies, whole: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
):
    llm = policies.engine()
    started(llm)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "abort", interrupted)
        for call in (lambda: llm.sleep(1), llm.policy_update().__enter__):
            with pytest.raises(KeyboardInterrupt):
                call()
    assert not llm.is_sleeping
    assert_same_samples(llm.wait_for_completion(), whole)


# Levels and tags


def test_level_0_gives_nothing_back_and_keeps_what_is_cached(policies: Policies):
    llm, prompt = policies.engine(), random_prompt(21)
    before = llm.generate(prompt, GREEDY)
    resident = [entry.resident for entry in llm.memory_ledger().entries]
    report = llm.sleep(0)
    assert (report.released, report.total_released, report.difference) == ({}, 0, 0)
    assert llm.sleeping_tags == ("scheduling",)
    assert [entry.resident for entry in llm.memory_ledger().entries] == resident
    with pytest.raises(EngineAsleepError, match=r"sleeps \(scheduling\)"):
        llm.generate(prompt, GREEDY)
    llm.wake_up(["scheduling"])
    again = llm.generate(prompt, GREEDY)
    assert again[0].num_cached_tokens == 20
    assert_same_samples(again, before)


@pytest.mark.parametrize("order", list(itertools.permutations(["scheduling", "weights", "kv_cache"])))
def test_tags_wake_one_by_one_in_any_order(policies: Policies, order: tuple[str, ...]):  # case SW-04
    llm, prompt = policies.engine(), random_prompt(15)
    llm.sleep(2)
    llm.sleep(2)
    llm.sleep(0)
    asleep = ["scheduling", "weights", "kv_cache", "graphs"]
    for tag in order:
        assert llm.sleeping_tags == tuple(asleep)
        with pytest.raises(EngineAsleepError):
            llm.generate(prompt, GREEDY)
        for _ in range(2):
            llm.wake_up([tag])
        asleep = [other for other in asleep if other != tag and (tag, other) != ("kv_cache", "graphs")]
    assert llm.sleeping_tags == ()
    push_mapping(llm, policies.weights(1))
    assert_sampled_by(policies.reference(1), llm.generate(prompt, GREEDY)[0])


def test_graphs_can_be_woken_alone_and_do_not_wake_the_kv_cache(policies: Policies):
    llm = policies.engine()
    llm.generate(PROMPTS, GREEDY)
    llm.sleep(1)
    llm.wake_up(["graphs"])
    assert llm.sleeping_tags == ("kv_cache",)
    eager = policies.engine(enforce_eager=True)
    eager.sleep(1)
    assert eager.sleeping_tags == ("kv_cache",)


def test_a_string_is_one_tag(policies: Policies):
    llm = policies.engine()
    llm.sleep(2)
    llm.wake_up("weights")
    assert llm.sleeping_tags == ("kv_cache", "graphs")
    with pytest.raises(ValueError, match=r"tags=\['kv'\] is not valid: they must be among 'scheduling', 'weights'"):
        llm.wake_up("kv")
    llm.wake_up("kv_cache")
    assert not llm.is_sleeping


# Sleeps and wakes that fail


def movable(policies: Policies, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    """An engine whose memory is freed and allocated again, as on a device; nothing is recorded over it."""
    with monkeypatch.context() as patch:
        patch.setattr(CpuPlatform, "memory", lambda _, owner, size, huge_pages=True: StorageSlab(owner, size, CPU))
        return policies.engine(enforce_eager=True, preemption_mode="swap", swap_space="1MiB", **options)


def fail_at(patch: pytest.MonkeyPatch, count: int) -> None:
    """The allocation `count` (from 0) of those that really take memory fails."""
    resume, taken = StorageSlab.resume, iter(range(100))

    def failing(slab: StorageSlab) -> int:
        if slab.resident_bytes() == 0 and next(taken) == count:
            raise torch.OutOfMemoryError("injected")
        return resume(slab)

    patch.setattr(StorageSlab, "resume", failing)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("tags", [None, ["kv_cache", "weights"]])
def test_a_wake_that_fails_leaves_all_asleep_and_a_second_one_works(
    policies: Policies, monkeypatch: pytest.MonkeyPatch, failing: int, tags: list[str] | None
):  # case SW-07
    llm = movable(policies, monkeypatch)
    before = llm.generate(PROMPTS, PARAMS)
    llm.sleep(2)
    asleep = [(entry.owner, entry.resident) for entry in llm.memory_ledger().entries]
    for _ in range(2):
        with monkeypatch.context() as patch:
            fail_at(patch, failing)
            with pytest.raises(torch.OutOfMemoryError, match="injected"):
                llm.wake_up(tags)
        assert llm.sleeping_tags == ("weights", "kv_cache")
        assert [(entry.owner, entry.resident) for entry in llm.memory_ledger().entries] == asleep
        with pytest.raises(EngineAsleepError):
            llm.generate(PROMPTS, GREEDY)
    report = llm.wake_up(tags)
    assert llm.sleeping_tags == ()
    assert report.resumed["weights"] > 0
    assert report.resumed["kv_cache"] > 0
    llm.reload_weights()
    assert_same_samples(llm.generate(PROMPTS, PARAMS), before)
    llm.verify()


def test_a_policy_update_whose_wake_fails_leaves_the_weights_asleep(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
):  # case SW-07
    llm = movable(policies, monkeypatch)
    llm.sleep(2)
    with monkeypatch.context() as patch:
        fail_at(patch, 0)
        with pytest.raises(torch.OutOfMemoryError):
            push_mapping(llm, policies.weights(1))
    assert llm.sleeping_tags == ("weights", "kv_cache")
    assert llm.memory_ledger()["weights"].resident == 0
    push_mapping(llm, policies.weights(1))
    llm.wake_up()
    assert_sampled_by(policies.reference(1), llm.generate(PROMPTS[0], GREEDY)[0])


def test_held_requests_outlive_a_wake_that_fails(
    policies: Policies, monkeypatch: pytest.MonkeyPatch, whole: list[RequestOutput]
):  # case SW-07
    llm = movable(policies, monkeypatch)
    started(llm)
    llm.sleep(1, "recompute")
    with monkeypatch.context() as patch:
        fail_at(patch, 0)
        with pytest.raises(torch.OutOfMemoryError):
            llm.wake_up()
    llm.wake_up()
    assert_same_samples(llm.wait_for_completion(), whole)


@pytest.mark.parametrize("failing", ["kv_cache", "weights"])
def test_a_sleep_that_fails_half_way_counts_as_asleep(
    policies: Policies, monkeypatch: pytest.MonkeyPatch, failing: str
):
    llm = movable(policies, monkeypatch)
    before = llm.generate(PROMPTS, PARAMS)
    release = StorageSlab.release

    def failing_release(slab: StorageSlab) -> None:
        if slab.owner == failing:
            raise OSError("injected")
        release(slab)

    with monkeypatch.context() as patch:
        patch.setattr(StorageSlab, "release", failing_release)
        with pytest.raises(OSError, match="injected"):
            llm.sleep(2)
    assert llm.sleeping_tags == ("weights", "kv_cache")
    with pytest.raises(EngineAsleepError):
        llm.generate(PROMPTS, GREEDY)
    llm.sleep(2)
    assert llm.memory_ledger()["weights"].resident == llm.memory_ledger()["kv_cache"].resident == 0
    llm.wake_up()
    with pytest.raises(WeightsNotLoadedError):
        llm.generate(PROMPTS, GREEDY)
    llm.reload_weights()
    assert_same_samples(llm.generate(PROMPTS, PARAMS), before)


# What the operating system says


def test_owners_and_operating_system_agree_on_what_went_and_came(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    large = Policies.make(
        tmp_path_factory.mktemp("large"), hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=8
    )
    llm = movable(large, monkeypatch, kv_cache_memory="64MiB")
    garbage = [torch.zeros(MIB // 8) for _ in range(64)]  # 32 MiB that the heap may hold on to
    del garbage
    slept = llm.sleep(2)
    assert slept.total_released > 80 * MIB
    assert abs(slept.difference) < 4 * MIB
    woken = llm.wake_up()
    assert woken.total_resumed > 80 * MIB
    assert abs(woken.difference) < 4 * MIB


@pytest.mark.slow
def test_a_hundred_cycles_of_sleep_wake_and_update_do_not_grow(policies: Policies):
    llm = policies.engine(preemption_mode="swap", swap_space="1MiB")
    weights = [policies.weights(number) for number in range(2)]
    modes: list[InFlightMode] = ["abort", "recompute", "wait", "keep"]
    sizes: list[int] = []
    for cycle in range(100):
        mode = modes[cycle % 4]
        started(llm, steps=3)
        llm.sleep(0 if mode == "keep" else 1 + cycle // 4 % 2, mode)
        llm.wake_up(["weights"])
        with llm.policy_update(in_flight=mode, roll_back=cycle % 3 == 0) as update:
            update.load(weights[cycle % 2])
        llm.wake_up()
        assert all(output.finished for output in llm.wait_for_completion())
        trim_heap()
        sizes.append(process_resident_bytes())
    assert llm.policy_version == 100
    assert_idle(llm)
    assert max(sizes[60:]) - max(sizes[20:60]) < 2 * MIB
