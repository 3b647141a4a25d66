"""Requests with adapters that are in flight while an adapter is replaced, or the engine sleeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from peft import PeftModel

from rollout import LLM, RequestOutput, SamplingParams
from rollout.weights.transaction import Outcome, PolicyUpdate
from tests.support.adapters import peft_model
from tests.support.policies import Policies, assert_is_beginning, assert_same_samples, random_prompt

PROMPT = random_prompt(18)
PARAMS = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="module")
def adapters(policies: Policies) -> list[PeftModel]:
    return [peft_model(policies.folders[0], seed) for seed in range(2)]


def engine(policies: Policies, adapter: PeftModel, **options: Any) -> LLM:
    llm = policies.engine(0, enable_lora=True, **options)
    push(llm, adapter)
    return llm


def push(llm: LLM, adapter: PeftModel, **options: Any) -> PolicyUpdate:
    with llm.policy_update(**options) as update:
        update.load_adapter("policy", adapter)
    return update


def begin(llm: LLM, num_steps: int) -> None:
    """A request with the adapter and one without, some steps later."""
    llm.enqueue([PROMPT, PROMPT], PARAMS, lora_request=["policy", None])
    for _ in range(num_steps):
        assert llm.step() == []


def whole(llm: LLM) -> list[RequestOutput]:
    return llm.generate([PROMPT, PROMPT], PARAMS, lora_request=["policy", None])


def test_recompute_goes_on_as_if_the_new_adapter_had_been_given_what_was_sampled(
    policies: Policies, adapters: list[PeftModel]
) -> None:
    expected = whole(engine(policies, adapters[0]))
    llm = engine(policies, adapters[0])
    begin(llm, 7)
    push(llm, adapters[1], in_flight="recompute")
    with_adapter, without = llm.wait_for_completion()
    sample, count = with_adapter.outputs[0], with_adapter.outputs[0].policy_versions[0].end
    assert [span.version for span in sample.policy_versions] == [1, 2] and 0 < count < 24
    assert sample.token_ids[:count] == expected[0].outputs[0].token_ids[:count]
    rest = replace(PARAMS, max_tokens=24 - count)
    more = engine(policies, adapters[1]).generate([*PROMPT, *sample.token_ids[:count]], rest, lora_request="policy")
    assert sample.token_ids[count:] == more[0].outputs[0].token_ids
    np.testing.assert_array_equal(sample.raw_logprobs[count:], more[0].outputs[0].raw_logprobs)
    assert_same_samples([without], [expected[1]])  # its policy did not change
    assert_same_samples(whole(llm), whole(engine(policies, adapters[1])))
    llm.engine.scheduler.check_integrity()


def test_kv_that_was_kept_over_an_adapter_update_is_never_hit(policies: Policies, adapters: list[PeftModel]) -> None:
    # case WS-01
    llm = engine(policies, adapters[0])
    begin(llm, 7)
    push(llm, adapters[1], in_flight="keep")
    fresh = whole(engine(policies, adapters[1], enable_prefix_caching=False))
    first = whole(llm)
    assert first[0].num_cached_tokens == 0
    assert_same_samples(first, fresh)
    kept = llm.wait_for_completion()
    assert [[span.version for span in output.outputs[0].policy_versions] for output in kept] == [[1, 2], [1, 2]]
    assert_same_samples(whole(llm), fresh)
    llm.engine.scheduler.check_integrity()


def test_wait_runs_requests_to_their_end_under_the_old_adapter(policies: Policies, adapters: list[PeftModel]) -> None:
    expected = whole(engine(policies, adapters[0]))
    llm = engine(policies, adapters[0])
    begin(llm, 7)
    push(llm, adapters[1], in_flight="wait")
    assert_same_samples(llm.wait_for_completion(), expected)


def test_an_update_that_fails_lets_requests_go_on_with_the_old_adapter(
    policies: Policies, adapters: list[PeftModel]
) -> None:
    expected = whole(engine(policies, adapters[0]))
    llm = engine(policies, adapters[0])
    begin(llm, 7)
    with pytest.raises(ZeroDivisionError), llm.policy_update(in_flight="recompute") as update:
        update.load_adapter("policy", adapters[1])
        update.post_process()
        raise ZeroDivisionError
    assert update.outcome is Outcome.UNCHANGED
    assert_same_samples(llm.wait_for_completion(), expected)
    llm.verify()


def test_a_failure_after_the_new_version_is_in_force_takes_version_and_adapter_back(
    policies: Policies, adapters: list[PeftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(engine(policies, adapters[0]))
    llm = engine(policies, adapters[0])
    begin(llm, 7)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), llm.policy_update(in_flight="recompute") as update:
        update.load_adapter("policy", adapters[1])
        monkeypatch.setattr(llm.engine, "resume", fail)
    assert llm.policy_version == 1 and update.outcome is Outcome.UNCHANGED
    assert_same_samples(llm.wait_for_completion(), expected)
    assert_same_samples(whole(llm), expected)
    llm.verify()


def test_a_roll_back_puts_weights_and_adapter_back_together(policies: Policies, adapters: list[PeftModel]) -> None:
    llm = engine(policies, adapters[0])
    expected, receipt = whole(llm), llm.receipt
    with pytest.raises(ZeroDivisionError), llm.policy_update(roll_back=True) as update:
        update.load(policies.weights(1))
        update.load_adapter("policy", adapters[1])
        update.post_process()
        raise ZeroDivisionError
    assert update.outcome is Outcome.ROLLED_BACK
    assert llm.verify() is receipt
    assert_same_samples(whole(llm), expected)


def test_without_roll_back_half_of_the_weights_leave_the_engine_unusable_until_all_are_there(
    policies: Policies, adapters: list[PeftModel]
) -> None:
    llm = engine(policies, adapters[0])
    with pytest.raises(ZeroDivisionError), llm.policy_update() as update:
        update.load(list(policies.weights(1).items())[:4])
        update.load_adapter("policy", adapters[1])
        raise ZeroDivisionError
    assert update.outcome is Outcome.UNUSABLE
    with llm.policy_update() as update:
        update.load(policies.weights(0))
    assert_same_samples(whole(llm), whole(engine(policies, adapters[0])))


def test_sleep_holds_requests_with_adapters_at_level_1_and_refuses_to_at_level_2(
    policies: Policies, adapters: list[PeftModel]
) -> None:
    # case SW-05
    expected = whole(engine(policies, adapters[0]))
    llm = engine(policies, adapters[0])
    begin(llm, 7)
    llm.sleep(1, mode="recompute")
    llm.wake_up()
    with pytest.raises(ValueError, match="mode='recompute' is not valid at level=2 while requests with LoRA adapters"):
        llm.sleep(2, mode="recompute")
    assert not llm.is_sleeping
    assert_same_samples(llm.wait_for_completion(), expected)
    begin(llm, 7)
    llm.sleep(2)
    for output, wanted in zip(llm.wait_for_completion(), expected, strict=True):
        assert_is_beginning(output.outputs[0], wanted.outputs[0])
    assert llm.engine.scheduler.kv.pool.num_free == llm.engine.scheduler.kv.pool.num_blocks
