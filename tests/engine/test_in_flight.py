"""What becomes of requests in flight when the policy is updated, mode by mode."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from rollout import LLM, RequestOutput, SamplingParams
from rollout.errors import (
    EngineAsleepError,
    EngineUnusableError,
    PolicyUpdateTimeoutError,
    UncoveredParametersError,
)
from rollout.prompts import Prompt
from rollout.weights.receipt import Receipt
from rollout.weights.target import IN_FLIGHT_MODES, InFlightMode
from tests.support.oracle import sampled_reference
from tests.support.policies import (
    GREEDY,
    InFlight,
    Policies,
    assert_same_samples,
    assert_sampled_by,
    push_mapping,
    random_prompt,
)

SAMPLED = SamplingParams(n=3, seed=11, max_tokens=40, ignore_eos=True)
HELD: list[InFlightMode] = ["keep", "recompute"]
PROMPTS = [random_prompt(17), random_prompt(9, seed=1)]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("policies"), tie=False)


def started(llm: LLM, prompts: list[list[int]], params: SamplingParams, steps: int) -> None:
    """The prompts are enqueued and some steps made; nobody waits for them yet."""
    llm.enqueue(prompts, params)
    for _ in range(steps):
        assert llm.step() == []


def update(llm: LLM, policies: Policies, number: int, mode: InFlightMode) -> Receipt:
    with llm.policy_update(in_flight=mode) as open_update:
        open_update.load(policies.weights(number))
    return open_update.receipt


def assert_idle(llm: LLM) -> None:
    llm.engine.scheduler.check_integrity()
    stats = llm.engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert llm.num_unfinished == 0


@torch.no_grad()
def logprobs_on_kept_kv(
    old: PreTrainedModel, new: PreTrainedModel, prompt: list[int], output: list[int], boundary: int
) -> np.ndarray:
    """float64, of output tokens from `boundary` on: `new` samples, and `old` has computed the keys and values of every
    token but the last before the boundary."""
    tokens = [*prompt, *output]
    num_old = len(prompt) + boundary - 1
    cache = DynamicCache()
    old(torch.tensor([tokens[:num_old]]), past_key_values=cache, use_cache=True)
    logits = new(torch.tensor([tokens[num_old:-1]]), past_key_values=cache, use_cache=True).logits[0]
    rows = torch.log_softmax(logits.double(), dim=-1)
    return rows[torch.arange(len(rows)), torch.tensor(output[boundary:])].numpy()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # `cache` is too new a name
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("mode", HELD)
def test_requests_go_on_under_the_new_policy_and_their_spans_say_from_where(
    policies: Policies, mode: InFlightMode, steps: int
):  # case WS-02
    llm = policies.engine()
    old_receipt = llm.receipt
    whole = policies.engine().generate(PROMPTS, SAMPLED)
    started(llm, PROMPTS, SAMPLED, steps)
    receipt = update(llm, policies, 1, mode)
    outputs = llm.wait_for_completion()
    old, new = policies.reference(0), policies.reference(1)
    assert old_receipt is not None
    for output, undisturbed in zip(outputs, whole, strict=True):
        assert output.receipt_ids == {0: old_receipt.id, 1: receipt.id}
        assert (output.policy_version, output.receipt_id) == (1, receipt.id)
        for sample, same in zip(output.outputs, undisturbed.outputs, strict=True):
            boundary = sample.policy_versions[1].start
            assert sample.policy_versions == [(0, 0, boundary), (1, boundary, 40)]
            assert sample.finish_reason == "length"
            assert sample.token_ids[:boundary] == same.token_ids[:boundary]
            assert sample.token_ids != same.token_ids
            np.testing.assert_array_equal(sample.raw_logprobs[:boundary], same.raw_logprobs[:boundary])
            if mode == "keep":
                prompt, tokens = output.prompt_token_ids, sample.token_ids
                expected = logprobs_on_kept_kv(old, new, prompt, tokens, boundary)
            else:
                expected = sampled_reference(new, output.prompt_token_ids, sample.token_ids)[boundary:]
            np.testing.assert_allclose(sample.raw_logprobs[boundary:], expected, atol=1e-4)
    assert_idle(llm)


def test_recomputing_gives_the_bits_of_an_engine_that_starts_from_what_was_sampled(policies: Policies):
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    llm, prompt = policies.engine(), random_prompt(14)
    started(llm, [prompt], params, 9)
    update(llm, policies, 1, "recompute")
    sample = llm.wait_for_completion()[0].outputs[0]
    boundary = sample.policy_versions[1].start
    rest = SamplingParams(seed=3, max_tokens=40 - boundary, ignore_eos=True)
    fresh = policies.engine(1).generate([prompt + sample.token_ids[:boundary]], rest)[0].outputs[0]
    assert sample.token_ids[boundary:] == fresh.token_ids
    np.testing.assert_array_equal(sample.raw_logprobs[boundary:], fresh.raw_logprobs)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("mode", HELD)
def test_nothing_of_a_request_that_went_on_is_ever_hit_wrongly(policies: Policies, mode: InFlightMode, block_size: int):
    # case WS-01
    llm = policies.engine(block_size=block_size)
    params = SamplingParams(seed=3, max_tokens=60, ignore_eos=True)
    started(llm, [random_prompt(33)], params, 20)
    update(llm, policies, 1, mode)
    beside = llm.enqueue([random_prompt(33)], GREEDY)
    outputs = {output.request_id: output for output in llm.wait_for_completion()}
    went_on = next(output for name, output in outputs.items() if name not in beside)
    fresh = policies.engine(1, block_size=block_size)
    assert_same_samples([outputs[beside[0]]], fresh.generate([random_prompt(33)], GREEDY))
    if mode == "keep":
        assert outputs[beside[0]].num_cached_tokens == 0
    long = went_on.prompt_token_ids + went_on.outputs[0].token_ids
    for prompt in (random_prompt(33), long, long[:-7]):
        assert_same_samples(llm.generate([prompt], SAMPLED), fresh.generate([prompt], SAMPLED))
    assert_idle(llm)


def test_samples_of_a_group_that_found_no_seat_are_of_the_new_policy_alone(policies: Policies):
    params = SamplingParams(n=6, seed=5, max_tokens=12, ignore_eos=True)
    llm, prompt = policies.engine(max_num_seqs=3), random_prompt(18)
    started(llm, [prompt], params, 4)
    update(llm, policies, 1, "keep")
    outputs = llm.wait_for_completion()[0].outputs
    fresh = policies.engine(1).generate([prompt], params)[0].outputs
    spans = [[span.version for span in sample.policy_versions] for sample in outputs]
    assert spans == [[0, 1]] * 3 + [[1]] * 3
    for sample, alone in zip(outputs[3:], fresh[3:], strict=True):
        assert sample.token_ids == alone.token_ids
        np.testing.assert_array_equal(sample.raw_logprobs, alone.raw_logprobs)


@pytest.mark.parametrize("mode", HELD)
def test_a_prompt_that_is_read_in_chunks_is_read_anew(policies: Policies, mode: InFlightMode):
    llm, prompt = policies.engine(max_num_batched_tokens=8), random_prompt(30)
    started(llm, [prompt], SAMPLED, 2)
    update(llm, policies, 1, mode)
    outputs = llm.wait_for_completion()
    assert_same_samples(outputs, policies.engine(1).generate([prompt], SAMPLED))
    assert outputs[0].receipt_ids == {1: outputs[0].receipt_id}
    assert outputs[0].num_cached_tokens == 0


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("mode", HELD)
def test_preemption_before_and_after_the_update_loses_nothing(
    policies: Policies, mode: InFlightMode, preemption_mode: str
):
    swap: Any = {"preemption_mode": "swap", "swap_space": "1MiB"} if preemption_mode == "swap" else {}
    llm = policies.engine(kv_cache_memory="280KiB", **swap)
    params = SamplingParams(n=8, seed=5, max_tokens=70, ignore_eos=True)
    llm.enqueue([random_prompt(17)], params)
    while llm.engine.scheduler.stats().num_preemptions == 0:
        llm.step()
    update(llm, policies, 1, mode)
    output = llm.wait_for_completion()[0]
    undisturbed = policies.engine().generate([random_prompt(17)], params)[0]
    for sample, same in zip(output.outputs, undisturbed.outputs, strict=True):
        assert len(sample.token_ids) == 70
        assert [span.version for span in sample.policy_versions] in ([0, 1], [1])
        boundary = sample.policy_versions[-1].start
        assert sample.token_ids[:boundary] == same.token_ids[:boundary]
    assert_idle(llm)


@pytest.mark.parametrize("mode", HELD)
def test_two_updates_give_three_spans(policies: Policies, mode: InFlightMode):
    llm = policies.engine()
    started(llm, [random_prompt(9)], SamplingParams(max_tokens=12, seed=0, ignore_eos=True), 4)
    receipts = [llm.receipt, update(llm, policies, 1, mode)]
    for _ in range(3):
        llm.step()
    receipts.append(update(llm, policies, 2, mode))
    output = llm.wait_for_completion()[0]
    assert output.outputs[0].policy_versions == [(0, 0, 4), (1, 4, 7), (2, 7, 12)]
    assert list(output.receipt_ids.values()) == [receipt.id for receipt in receipts if receipt is not None]
    assert output.policy_version == 2


def test_scores_in_flight_are_of_the_new_policy(policies: Policies):
    llm, prompt = policies.engine(max_num_batched_tokens=8), random_prompt(60)
    requests = llm._admission.make_requests(Prompt(prompt), SamplingParams(), 0, scores=True)
    groups = llm._admission.submit([(Prompt(prompt), requests)])
    for _ in range(3):
        llm.step()
    update(llm, policies, 1, "keep")
    llm._delivery.wait(groups, lambda count: None)
    scores = np.array(groups[0].samples[0].prompt_logprobs)
    np.testing.assert_array_equal(scores, policies.engine(1).score(prompt)[0].logprobs)


# Threads that wait


@pytest.mark.parametrize("mode", HELD)
def test_a_thread_that_waits_goes_on_after_the_update_and_new_requests_are_refused(
    policies: Policies, mode: InFlightMode
):  # case WS-02
    llm = policies.engine()
    params = SamplingParams(seed=2, max_tokens=300, ignore_eos=True)
    with InFlight(llm, PROMPTS, params) as flight:
        flight.wait_for_steps(5)
        with llm.policy_update(in_flight=mode) as open_update:
            steps = llm.engine.counters.num_steps
            for call in (lambda: llm.generate(PROMPTS[0], GREEDY), lambda: llm.score(PROMPTS[0]), llm.step):
                with pytest.raises(EngineAsleepError, match="a policy update is in progress"):
                    call()
            open_update.load(policies.weights(1))
            assert llm.engine.counters.num_steps == steps
    for output in flight.outputs:
        assert [span.version for span in output.outputs[0].policy_versions] == [0, 1]
        assert len(output.outputs[0].token_ids) == 300
    assert_idle(llm)


def test_waiting_for_enqueued_prompts_inside_the_block_raises_and_loses_none(policies: Policies):
    llm = policies.engine()
    started(llm, PROMPTS, SAMPLED, 3)
    with llm.policy_update(in_flight="keep") as open_update:
        with pytest.raises(EngineAsleepError, match="in progress"):
            llm.wait_for_completion()
        open_update.load(policies.weights(1))
    assert [len(output.outputs[0].token_ids) for output in llm.wait_for_completion()] == [40, 40]


def test_aborting_what_an_update_keeps_returns_it_at_once(policies: Policies):
    llm = policies.engine()
    with InFlight(llm, PROMPTS, SAMPLED) as flight, llm.policy_update(in_flight="keep") as open_update:
        for group_id in list(llm._delivery.groups):
            llm.abort([group_id])
        assert flight._result.result(timeout=120)
        open_update.load(policies.weights(1))
    assert {sample.finish_reason for output in flight.outputs for sample in output.outputs} <= {"abort", "length"}
    assert_idle(llm)


# wait


def test_wait_runs_everything_to_its_end_under_the_old_policy(policies: Policies):  # case WS-02
    llm = policies.engine(max_num_seqs=2)
    whole = policies.engine().generate(PROMPTS, SAMPLED)
    started(llm, PROMPTS, SAMPLED, 3)  # nobody but the update steps the engine from here on
    update(llm, policies, 1, "wait")
    assert llm.num_unfinished == 0
    outputs = llm.wait_for_completion()
    assert_same_samples(outputs, whole)
    assert [sample.policy_versions for output in outputs for sample in output.outputs] == [[(0, 0, 40)]] * 6
    assert_sampled_by(policies.reference(1), llm.generate(PROMPTS[0], GREEDY)[0])


def test_wait_shares_the_steps_with_the_thread_that_waits_and_refuses_others(policies: Policies):
    llm = policies.engine()
    params = SamplingParams(seed=2, max_tokens=300, ignore_eos=True)
    whole = policies.engine().generate(PROMPTS, params)
    refused: list[str] = []

    step = llm.engine.step

    def watching():
        if llm.engine._pause is not None and not refused:
            with pytest.raises(EngineAsleepError, match="after the requests in flight") as caught:
                llm.engine.check_ready()
            refused.append(str(caught.value))
        return step()

    llm.engine.step = watching  # type: ignore[method-assign]
    with InFlight(llm, PROMPTS, params) as flight:
        flight.wait_for_steps(5)
        update(llm, policies, 1, "wait")
    assert refused
    assert_same_samples(flight.outputs, whole)
    assert llm.policy_version == 1


def test_stop_strings_end_requests_that_the_update_waits_for(tmp_path: Path):
    policies = Policies.make(tmp_path, tokenizer=True)
    llm = policies.engine()
    params = SamplingParams(seed=4, max_tokens=200, ignore_eos=True)
    text = llm.generate([PROMPTS[0]], params)[0].outputs[0].text
    stop = text[30:33]
    expected = llm.generate([PROMPTS[0]], SamplingParams(seed=4, max_tokens=200, ignore_eos=True, stop=[stop]))[0]
    assert expected.outputs[0].finish_reason == "stop"
    started(llm, [PROMPTS[0]], SamplingParams(seed=4, max_tokens=200, ignore_eos=True, stop=[stop]), 2)
    update(llm, policies, 1, "wait")
    output = llm.wait_for_completion()[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert (output.text, output.token_ids) == (expected.outputs[0].text, expected.outputs[0].token_ids)


def test_the_time_limit_ends_the_waiting_and_the_requests_go_on(policies: Policies):
    llm = policies.engine()
    params = SamplingParams(seed=2, max_tokens=450, ignore_eos=True)
    started(llm, PROMPTS, params, 2)
    with pytest.raises(PolicyUpdateTimeoutError, match=r"2 requests in flight had not ended after 0\.001 s, and go on"):
        llm.policy_update(in_flight="wait", timeout=0.001).__enter__()
    assert_same_samples(llm.wait_for_completion(), policies.engine().generate(PROMPTS, params))
    assert llm.policy_version == 0
    push_mapping(llm, policies.weights(1))
    assert_sampled_by(policies.reference(1), llm.generate(PROMPTS[0], GREEDY)[0])


def test_a_step_that_fails_while_the_update_waits_leaves_everything_as_before(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
):
    llm = policies.engine()
    started(llm, PROMPTS, SAMPLED, 2)

    def failing(plan: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", failing)
        with pytest.raises(KeyboardInterrupt):
            llm.policy_update(in_flight="wait").__enter__()
    assert_same_samples(llm.wait_for_completion(), policies.engine().generate(PROMPTS, SAMPLED))
    push_mapping(llm, policies.weights(1))


# Weights that a trainer shares, and int8 copies


@pytest.mark.parametrize("mode", HELD)
def test_a_trainer_changes_shared_weights_inside_the_block(policies: Policies, mode: InFlightMode):
    llm = policies.engine()
    model = llm.shared_model()
    separate = policies.engine()
    for engine in (llm, separate):
        started(engine, PROMPTS, SAMPLED, 4)
    weights = policies.weights(1)
    with llm.policy_update(in_flight=mode) as open_update, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        open_update.load(model.named_parameters())
    update(separate, policies, 1, mode)
    assert_same_samples(llm.wait_for_completion(), separate.wait_for_completion())


@pytest.mark.parametrize("mode", HELD)
def test_int8_copies_are_remade_for_requests_that_go_on(policies: Policies, mode: InFlightMode):
    llm = policies.engine(quantization="int8")
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    started(llm, PROMPTS, params, 4)
    update(llm, policies, 1, mode)
    outputs = llm.wait_for_completion()
    llm.verify()
    if mode == "recompute":
        fresh = policies.engine(1, quantization="int8")
        for output in outputs:
            sample = output.outputs[0]
            boundary = sample.policy_versions[1].start
            rest = SamplingParams(seed=3, max_tokens=20 - boundary, ignore_eos=True)
            again = fresh.generate([output.prompt_token_ids + sample.token_ids[:boundary]], rest)[0].outputs[0]
            assert again.token_ids == sample.token_ids[boundary:]


# Updates that fail


@pytest.mark.parametrize("mode", HELD)
@pytest.mark.parametrize("roll_back", [False, True])
def test_requests_go_on_as_if_nothing_had_happened_where_the_old_policy_stays(
    policies: Policies, mode: InFlightMode, roll_back: bool
):
    llm = policies.engine()
    whole = policies.engine().generate(PROMPTS, SAMPLED)
    started(llm, PROMPTS, SAMPLED, 5)
    steps = llm.engine.counters.num_computed_tokens
    half = dict(list(policies.weights(1).items())[:7]) if roll_back else {}
    with pytest.raises(UncoveredParametersError), llm.policy_update(in_flight=mode, roll_back=roll_back) as open_update:
        open_update.load(half)
    assert llm.engine.counters.num_computed_tokens == steps
    outputs = llm.wait_for_completion()
    assert_same_samples(outputs, whole)
    assert [sample.policy_versions for output in outputs for sample in output.outputs] == [[(0, 0, 40)]] * 6
    assert {output.policy_version for output in outputs} == {0}
    llm.verify()
    assert_idle(llm)


@pytest.mark.parametrize("mode", HELD)
def test_requests_end_with_what_they_have_where_the_engine_becomes_unusable(policies: Policies, mode: InFlightMode):
    llm = policies.engine()
    params = SamplingParams(seed=2, max_tokens=400, ignore_eos=True)
    whole = policies.engine().generate(PROMPTS, params)
    half = dict(list(policies.weights(1).items())[:7])
    with InFlight(llm, PROMPTS, params) as flight:
        flight.wait_for_steps(5)
        with pytest.raises(UncoveredParametersError), llm.policy_update(in_flight=mode) as open_update:
            open_update.load(half)
    for output, undisturbed in zip(flight.outputs, whole, strict=True):
        sample, same = output.outputs[0], undisturbed.outputs[0]
        count = len(sample.token_ids)
        assert sample.finish_reason == "abort"
        assert sample.token_ids == same.token_ids[:count]
        assert 0 < count < 400
        assert sample.policy_versions == [(0, 0, count)]
    assert_idle(llm)
    with pytest.raises(EngineUnusableError, match="UncoveredParametersError"):
        llm.generate(PROMPTS[0], GREEDY)
    push_mapping(llm, policies.weights(2))
    assert_sampled_by(policies.reference(2), llm.generate(PROMPTS[0], GREEDY)[0])


# Everything at once


@pytest.mark.slow
def test_threads_that_generate_through_updates_and_sleeps_lose_nothing_and_mix_nothing(policies: Policies):
    """Even versions hold W0, odd ones W1. What a policy sampled alone is, bit for bit, what it samples undisturbed."""
    llm = policies.engine(max_num_seqs=5, max_num_batched_tokens=16, kv_cache_memory="560KiB")
    weights = [policies.weights(number) for number in range(2)]
    params = [SamplingParams(n=2, seed=seed, max_tokens=25, ignore_eos=True) for seed in range(3)]
    prompts = [random_prompt(21), random_prompt(21)[:14] + random_prompt(9, seed=1), random_prompt(5, seed=2)]
    expected = [
        [policies.engine(number).generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
        for number in range(2)
    ]
    outputs: list[tuple[int, RequestOutput]] = []
    done = threading.Event()

    def generate(number: int) -> None:
        while not done.is_set():
            try:
                outputs.append((number, llm.generate([prompts[number]], params[number], use_tqdm=False)[0]))
            except EngineAsleepError:
                time.sleep(0.001)

    with ThreadPoolExecutor(max_workers=3) as pool:
        threads = [pool.submit(generate, number) for number in range(3)]
        try:
            for version in range(1, 33):
                mode = IN_FLIGHT_MODES[version % 4]
                if version % 3 == 0:
                    llm.sleep(0 if mode == "keep" else 1, mode)
                before = len(outputs)
                fails = version % 5 == 0
                with suppress(KeyError), llm.policy_update(version, in_flight=mode, roll_back=fails) as open_update:
                    names = list(weights[version % 2])
                    open_update.load({name: weights[version % 2][name] for name in names[: 9 if fails else None]})
                    if fails:
                        raise KeyError
                llm.wake_up()
                deadline = time.monotonic() + 60
                while len(outputs) < before + 2 and time.monotonic() < deadline:
                    time.sleep(0.001)
        finally:
            done.set()
        for thread in threads:
            thread.result(timeout=120)
    assert llm.policy_version == 32
    assert_idle(llm)
    assert len(outputs) > 60
    num_mixed = 0
    for number, output in outputs:
        for sample, *pure in zip(output.outputs, *(expected[k][number].outputs for k in range(2)), strict=True):
            spans = sample.policy_versions
            assert sample.finish_reason == "length" or sample.finish_reason == "abort"
            assert len(sample.raw_logprobs) == len(sample.token_ids)
            assert len(sample.token_ids) == 25 or sample.finish_reason == "abort"
            if not spans:
                continue
            assert set(output.receipt_ids) >= {span.version for span in spans}
            first = pure[spans[0].version % 2]
            end = spans[0].end
            assert sample.token_ids[:end] == first.token_ids[:end]
            np.testing.assert_array_equal(sample.raw_logprobs[:end], first.raw_logprobs[:end])
            num_mixed += len(spans) > 1
    assert num_mixed > 5
