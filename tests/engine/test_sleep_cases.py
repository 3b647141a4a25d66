"""Sleep and wake through `LLM`: memory goes back, and nothing wrong is ever generated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.errors import EngineAsleepError, RolloutError, UncoveredParametersError, WeightsNotLoadedError
from rollout.worker.ledger import process_resident_bytes
from tests.support.policies import (
    GREEDY,
    LONG,
    InFlight,
    Policies,
    assert_is_beginning,
    assert_same_samples,
    assert_sampled_by,
    push_mapping,
    random_prompt,
)

MIB = 1 << 20
SAMPLED = SamplingParams(n=3, seed=11, max_tokens=9, ignore_eos=True, top_k=40)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("policies"), tie=False)


def calls(llm: LLM, prompt: list[int]) -> list[Callable[[], object]]:
    """Everything that runs a forward pass."""
    return [
        lambda: llm.generate(prompt, GREEDY),
        lambda: llm.generate([prompt] * 3, SAMPLED),
        lambda: llm.score(prompt),
    ]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_outputs_and_buffers_after_waking_are_those_before(
    tmp_path_factory: pytest.TempPathFactory, level: int, rope: str
):  # case SW-01
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    options = {} if rope == "default" else {"rope_scaling": scaling}
    policies = Policies.make(tmp_path_factory.mktemp("rope"), tie=level == 1, **options)
    llm, prompts = policies.engine(), [random_prompt(21), random_prompt(40, seed=1)]
    before = llm.generate(prompts, GREEDY), llm.generate(prompts, SAMPLED)
    buffers = {name: tensor.clone() for name, tensor in llm.engine.buffers().items()}
    receipt = llm.receipt
    assert buffers
    assert receipt is not None
    for cycle in range(3):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            again = push_mapping(llm, policies.weights(0))
            assert again.fingerprint == receipt.fingerprint
            assert again.policy_version == cycle + 1
        assert_same_samples(llm.generate(prompts, GREEDY), before[0])
        assert_same_samples(llm.generate(prompts, SAMPLED), before[1])
        for name, tensor in llm.engine.buffers().items():
            assert torch.equal(tensor, buffers[name]), name
        llm.verify()


@pytest.mark.parametrize("wake", [None, ["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_after_level_2_nothing_generates_until_every_parameter_is_loaded(
    policies: Policies, wake: list[str] | None
):  # case SW-02
    llm, prompt, weights = policies.engine(), random_prompt(15), policies.weights(0)
    before = llm.generate(prompt, GREEDY)
    llm.sleep(2)
    for tag in wake or [None]:
        llm.wake_up(None if tag is None else [tag])
    assert not llm.is_sleeping
    for call in (*calls(llm, prompt), llm.verify):
        with pytest.raises(WeightsNotLoadedError, match=r"weights .*hold no policy"):
            call()
    names = list(weights)
    for half in (names[::2], names[1::2], names[:-1]):
        with pytest.raises(UncoveredParametersError), llm.policy_update() as update:
            update.load({name: weights[name] for name in half})
        for call in calls(llm, prompt):
            with pytest.raises(RolloutError):
                call()
    assert llm.engine.counters.num_steps == len(before[0].outputs[0].token_ids)
    push_mapping(llm, weights)
    assert_same_samples(llm.generate(prompt, GREEDY), before)


def test_an_update_that_fails_before_writing_does_not_clear_the_missing_weights(policies: Policies):  # case SW-02
    llm, prompt = policies.engine(), random_prompt(15)
    llm.sleep(2)
    llm.wake_up()
    with pytest.raises(UncoveredParametersError, match="0 of 21"), llm.policy_update():
        pass
    for call in calls(llm, prompt):
        with pytest.raises(WeightsNotLoadedError):
            call()


def test_reloading_the_checkpoint_is_an_explicit_way_back(policies: Policies):  # case SW-02
    llm, prompt = policies.engine(), random_prompt(15)
    before = llm.generate(prompt, GREEDY)
    push_mapping(llm, policies.weights(1))
    llm.sleep(2)
    llm.wake_up()
    receipt = llm.reload_weights()
    assert receipt.policy_version == llm.policy_version == 2
    assert_same_samples(llm.generate(prompt, GREEDY), before)


@pytest.mark.parametrize("length", [20, 21, 23])
@pytest.mark.parametrize("level", [1, 2])
def test_no_block_from_before_sleep_is_hit_after_it(policies: Policies, length: int, level: int):  # case SW-03
    llm, prompt = policies.engine(), random_prompt(length)
    before = llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == (length - 1) // 4 * 4
    for _ in range(2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            push_mapping(llm, policies.weights(0))
        cold, warm = llm.generate(prompt, GREEDY), llm.generate(prompt, GREEDY)
        assert cold[0].num_cached_tokens == 0
        assert warm[0].num_cached_tokens == (length - 1) // 4 * 4
        assert_same_samples(cold, before)
        assert_same_samples(warm, before)


def test_waking_the_weights_alone_lets_no_forward_pass_run(policies: Policies):  # case SW-04
    llm, prompt = policies.engine(), random_prompt(15)
    llm.generate(prompt, GREEDY)
    steps = llm.engine.counters.num_steps
    assert (llm.is_sleeping, llm.sleeping_tags) == (False, ())
    llm.sleep(1)
    assert (llm.is_sleeping, llm.sleeping_tags) == (True, ("kv_cache", "graphs"))
    llm.wake_up(["weights"])
    assert (llm.is_sleeping, llm.sleeping_tags) == (True, ("kv_cache", "graphs"))
    for call in calls(llm, prompt):
        with pytest.raises(EngineAsleepError, match=r"sleeps \(graphs, kv_cache\): call wake_up"):
            call()
    with pytest.raises(EngineAsleepError), InFlight(llm, [prompt], GREEDY):
        pass
    assert llm.engine.step() == []
    push_mapping(llm, policies.weights(1))
    assert llm.sleeping_tags == ("kv_cache", "graphs")
    with pytest.raises(EngineAsleepError):
        llm.generate(prompt, GREEDY)
    assert llm.engine.counters.num_steps == steps
    llm.wake_up(["kv_cache"])
    assert (llm.is_sleeping, llm.sleeping_tags) == (False, ())
    assert_sampled_by(policies.reference(1), llm.generate(prompt, GREEDY)[0])


def test_the_tags_are_right_at_every_stage_of_a_level_2_sleep(policies: Policies):  # case SW-04
    llm, prompt = policies.engine(), random_prompt(15)
    llm.sleep(2)
    assert llm.sleeping_tags == ("weights", "kv_cache", "graphs")
    llm.wake_up(["kv_cache"])
    assert (llm.is_sleeping, llm.sleeping_tags) == (True, ("weights",))
    with pytest.raises(EngineAsleepError, match=r"sleeps \(weights\)"):
        llm.generate(prompt, GREEDY)
    push_mapping(llm, policies.weights(1))
    assert (llm.is_sleeping, llm.sleeping_tags) == (False, ())
    assert_sampled_by(policies.reference(1), llm.generate(prompt, GREEDY)[0])
    for tags, message in (
        (["weight"], r"\['weight'\] is not valid: they"),
        (["drafter"], "this engine has no drafter"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.wake_up(tags)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("steps", [1, 4, 40])
def test_sleep_returns_what_running_requests_have(policies: Policies, level: int, steps: int):  # case SW-05
    llm, prompts = policies.engine(max_num_seqs=4), [random_prompt(9 + 5 * index, seed=index) for index in range(6)]
    idle = llm.engine.scheduler.stats().num_free_blocks
    whole = policies.engine().generate(prompts, LONG)
    with InFlight(llm, prompts, LONG) as flight:
        flight.wait_for_steps(steps)
        llm.sleep(level)
        assert llm.is_sleeping
        with pytest.raises(EngineAsleepError):
            llm.generate(prompts[0], GREEDY)
    for partial, full in zip(flight.outputs, whole, strict=True):
        assert_is_beginning(partial.outputs[0], full.outputs[0])
        assert len(partial.outputs[0].token_ids) < 400
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.stats().num_free_blocks == idle
    llm.wake_up()
    if level == 2:
        llm.reload_weights()
    assert_same_samples(llm.generate(prompts, LONG), whole)


def test_an_aborted_sample_goes_on_after_sleep_as_if_nothing_had_happened(policies: Policies):  # case SW-05
    params = SamplingParams(seed=3, max_tokens=200, ignore_eos=True)
    llm, prompt = policies.engine(), random_prompt(14)
    whole = llm.generate(prompt, params)[0].outputs[0]
    with InFlight(llm, [prompt], params) as flight:
        flight.wait_for_steps(20)
        llm.sleep(1)
    partial = flight.outputs[0].outputs[0]
    assert 0 < len(partial.token_ids) < 200
    llm.wake_up()
    rest = SamplingParams(seed=3, max_tokens=200 - len(partial.token_ids), ignore_eos=True)
    resumed = llm.generate(prompt + partial.token_ids, rest)[0].outputs[0]
    assert partial.token_ids + resumed.token_ids == whole.token_ids
    assert [*partial.sampled_logprobs, *resumed.sampled_logprobs] == list(whole.sampled_logprobs)


def test_sleeping_twice_and_waking_twice_change_nothing_more(policies: Policies):
    llm, prompt = policies.engine(), random_prompt(14)
    before = llm.generate(prompt, GREEDY)
    llm.wake_up()
    first, second = llm.sleep(1), llm.sleep(1)
    assert first.released["kv_cache"] > 0
    assert second.released["kv_cache"] == 0
    llm.wake_up()
    llm.wake_up()
    assert_same_samples(llm.generate(prompt, GREEDY), before)
    with pytest.raises(ValueError, match="level=3"):
        llm.sleep(3)


def test_level_1_gives_the_kv_pool_back_and_level_2_the_weights_too(tmp_path_factory: pytest.TempPathFactory):
    large = Policies.make(
        tmp_path_factory.mktemp("large"), hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=8
    )
    llm = large.engine(kv_cache_memory="64MiB", max_num_batched_tokens=1024, max_num_seqs=128)
    llm.generate([random_prompt(120, seed=index) for index in range(64)], GREEDY)
    awake = llm.memory_ledger()
    weights = awake["weights"].resident
    assert awake["kv_cache"].resident > 32 * MIB
    assert weights > 16 * MIB

    report = llm.sleep(1)
    assert report.released["kv_cache"] == awake["kv_cache"].resident
    assert report.resident_before - process_resident_bytes() > awake["kv_cache"].resident - 4 * MIB
    assert llm.memory_ledger()["kv_cache"].resident == 0
    assert llm.memory_ledger()["weights"].resident == weights

    report = llm.sleep(2)
    assert report.released["weights"] == weights
    assert abs(report.difference) < 4 * MIB
    assert report.resident_before - process_resident_bytes() > weights - 4 * MIB
    assert llm.memory_ledger()["weights"].resident == 0


def test_weights_that_a_trainer_shares_survive_level_2(policies: Policies):
    llm, prompt = policies.engine(), random_prompt(14)
    model = llm.shared_model()
    before = llm.generate(prompt, GREEDY)
    values = {name: parameter.clone() for name, parameter in model.named_parameters()}
    llm.sleep(2)
    assert llm.sleeping_tags == ("kv_cache", "graphs")
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())
    llm.wake_up()
    assert_same_samples(llm.generate(prompt, GREEDY), before)
