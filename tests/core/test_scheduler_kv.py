"""Exact plans and states of small scenarios: prefix hits, deferral, preemption and scoring."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.request import FinishReason, Request, RequestStatus
from tests.support.core_requests import empty_result, is_idle, make_family, make_request, make_scheduler, shape
from tests.support.fake_runner import FakeRunner, expected_output, fake_logprob


def test_a_prompt_sent_twice_is_computed_once():
    runner = FakeRunner(make_scheduler())
    first = make_request("a", range(10), max_tokens=2)
    second = make_request("b", range(10), max_tokens=2, arrival=1, seed=5)
    behind = make_request("c", range(50, 53), max_tokens=2, arrival=2)
    for request in (first, second, behind):
        runner.add(request)
    assert shape(runner.step_plan()) == [("a/0", 0, 10), ("c/0", 0, 3)]  # b is passed over, c is not held up
    assert shape(runner.step_plan()) == [("a/0", 10, 1), ("c/0", 3, 1), ("b/0", 8, 2)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    stats = runner.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (23, 8)
    runner.run()
    assert second.output_token_ids == expected_output(second, runner.vocab, 64)


def test_deferral_follows_a_chunked_prefill_and_ends_with_its_request():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=8))
    first, second = make_request("a", range(17)), make_request("b", [*range(12), 70], arrival=1)
    runner.add(first)
    runner.add(second)
    assert shape(runner.step_plan()) == [("a/0", 0, 8)]
    plan = runner.scheduler.schedule()
    assert shape(plan) == [("a/0", 8, 8)]
    result = runner.execute(plan)
    assert runner.scheduler.abort(["a"]) == [first]
    assert runner.scheduler.update(plan, result) == []
    assert shape(runner.step_plan()) == [("b/0", 8, 5)]  # what a never published is computed
    assert second.num_cached_tokens == 8


def test_blocks_are_hittable_only_once_written():
    runner = FakeRunner(make_scheduler())
    runner.add(make_request("a", range(9)))
    plan = runner.scheduler.schedule()
    assert len(runner.scheduler.kv.pool.index) == 0
    runner.scheduler.update(plan, runner.execute(plan))
    assert len(runner.scheduler.kv.pool.index) == 2


def test_reset_refuses_while_blocks_are_in_use():
    # case WS-02, SW-03
    runner = FakeRunner(make_scheduler())
    runner.add(make_request("a", range(9), max_tokens=3))
    runner.step()
    assert not runner.scheduler.reset_prefix_cache()
    runner.run()
    assert runner.scheduler.reset_prefix_cache()
    again = [make_request(name, range(9), max_tokens=1, arrival=i) for i, name in enumerate("bc")]
    for request in again:
        runner.add(request)
        runner.run()
    assert [request.num_cached_tokens for request in again] == [0, 8]


def test_no_block_survives_a_policy_update():
    # case WS-02
    runner = FakeRunner(make_scheduler(preemption_mode="swap", num_host_blocks=8))
    running = make_request("a", range(9), max_tokens=4)
    runner.add(running)
    runner.step()
    with pytest.raises(RuntimeError, match="1 requests are running"):
        runner.scheduler.set_policy_version(1)
    runner.scheduler.preempt_all()
    runner.scheduler.set_policy_version(1)
    later = make_request("b", range(9), max_tokens=1, arrival=1)
    runner.add(later)
    runner.run()  # the runner checks that no KV of version 0 is read
    assert running.policy_spans == [(0, 0), (1, 1)]
    assert running.policy_version == 1
    assert later.num_cached_tokens == 8  # of version 1
    assert running.output_token_ids == expected_output(running, runner.vocab, 64)


def crowded(mode: str, num_host_blocks: int = 0) -> tuple[FakeRunner, list[Request]]:
    """Two requests of up to 4 blocks each in a pool of 5."""
    scheduler = make_scheduler(num_blocks=5, preemption_mode=mode, num_host_blocks=num_host_blocks)
    runner = FakeRunner(scheduler)
    requests = [make_request(name, [i] * 4, max_tokens=12, arrival=i) for i, name in enumerate("ab")]
    for request in requests:
        runner.add(request)
    return runner, requests


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_last_arrived_gives_way_and_resumes(mode: str):
    # case SC-01
    runner, (first, last) = crowded(mode, num_host_blocks=4)
    while not last.num_preemptions:
        plan = runner.step_plan()
    assert first.num_preemptions == 0
    if mode == "swap":
        assert last.status is RequestStatus.SWAPPED
        assert [host for _, host in plan.swap_out] == [0, 1]
        assert last.num_computed_tokens > 0
    else:
        assert last.status is RequestStatus.PREEMPTED
        assert (plan.swap_out, last.num_computed_tokens) == ([], 0)
    runner.run()
    for request in (first, last):
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)
        assert len(request.raw_logprobs) == 12
    assert runner.scheduler.stats().num_preemptions == last.num_preemptions
    assert is_idle(runner.scheduler)


def test_swap_without_host_blocks_recomputes():
    runner, requests = crowded("swap", num_host_blocks=1)
    outputs = runner.run()
    assert requests[1].num_preemptions > 0
    assert runner.num_swapped_blocks == 0
    assert len(outputs) == 24


def test_the_lowest_priority_gives_way():
    runner = FakeRunner(make_scheduler(num_blocks=5, policy="priority"))
    requests = [make_request(name, [i] * 4, max_tokens=12, arrival=i, priority=-i) for i, name in enumerate("ab")]
    for request in requests:
        runner.add(request)
    finished = [request for request, _ in runner.run() if request.num_output_tokens == 12]
    assert finished[0] is requests[1]
    assert requests[0].num_preemptions > 0
    assert requests[1].num_preemptions == 0


def test_the_last_running_request_sits_out_instead_of_losing_its_blocks():
    runner = FakeRunner(make_scheduler(num_blocks=3))
    first = make_request("a", [1] * 3, max_tokens=3)
    last = make_request("b", [2] * 3, max_tokens=4, arrival=1)
    runner.add(first)
    runner.add(last)
    plans = [shape(runner.step_plan()) for _ in range(4)]
    assert plans == [
        [("a/0", 0, 3), ("b/0", 0, 3)],
        [("a/0", 3, 1), ("b/0", 3, 1)],
        [("a/0", 4, 1)],
        [("b/0", 4, 1)],
    ]
    runner.run()
    assert last.num_preemptions == 0


def test_forgetting_a_plan_that_failed_loses_nothing():
    runner, requests = crowded("swap", num_host_blocks=4)
    for _ in range(3):
        runner.step()
    runner.scheduler.schedule()  # and the runner fails
    runner.scheduler.preempt_all()
    runner.audit()
    assert runner.scheduler.kv.pool.num_free == 5
    runner.run()
    for request in requests:
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)


def test_a_result_that_breaks_off_loses_nothing():
    runner = FakeRunner(make_scheduler())
    family = make_family("a", range(6), n=3, max_tokens=3)
    scored = make_request("b", range(10, 15), max_tokens=0, scores_prompt=True, arrival=1)
    runner.add(family[0])
    runner.add(scored)
    plan = runner.scheduler.schedule()
    result = runner.execute(plan)
    scores = result.prompt_logprobs.pop("b/0")
    with pytest.raises(KeyError):
        runner.scheduler.update(plan, result)
    runner.scheduler.preempt_all()
    runner.audit()
    assert (runner.scheduler.num_running, runner.scheduler.num_waiting) == (0, 4)
    runner.run()
    for request in family:
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)
        assert len(request.raw_logprobs) == 3
    assert list(scored.prompt_logprobs) == scores.tolist()
    assert is_idle(runner.scheduler)


def expected_scores(tokens: list[int]) -> np.ndarray:
    return np.array([fake_logprob(tuple(tokens[: i + 1]), tokens[i + 1]) for i in range(len(tokens) - 1)], np.float32)


def test_scoring_chunks_have_their_targets_and_never_hit():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=4))
    for name in "ab":
        request = make_request(name, range(10, 20), max_tokens=0, scores_prompt=True)
        runner.add(request)
        plans = [runner.step_plan() for _ in range(3)]
        targets = [plan.sequences[0].target_token_ids for plan in plans]
        assert targets == [[11, 12, 13, 14], [15, 16, 17, 18], [19]]
        assert all(not plan.draws for plan in plans)
        assert request.finish_reason is FinishReason.LENGTH
        np.testing.assert_array_equal(np.asarray(request.prompt_logprobs), expected_scores(list(range(10, 20))))
    assert is_idle(runner.scheduler)


def test_scores_are_not_doubled_by_a_preemption():
    # case SC-01
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=4))
    family = make_family("a", range(10), n=2, max_tokens=2, scores_prompt=True)
    runner.add(family[0])
    runner.step()
    runner.step()
    runner.scheduler.preempt_all()
    runner.run()
    for request in family:
        np.testing.assert_array_equal(np.asarray(request.prompt_logprobs), expected_scores(list(range(10))))
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)


def test_a_prompt_with_all_its_scores_hits_when_it_resumes():
    runner = FakeRunner(make_scheduler())
    request = make_request("a", range(10), max_tokens=2, scores_prompt=True)
    runner.add(request)
    runner.step()
    runner.scheduler.preempt_all()
    plan = runner.step_plan()
    assert shape(plan) == [("a/0", 8, 3)]
    assert not plan.sequences[0].target_token_ids
    assert (request.num_output_tokens, len(request.prompt_logprobs)) == (2, 9)


def test_a_score_that_is_not_a_number_is_an_error():
    scheduler = make_scheduler()
    request = make_request("a", range(9), max_tokens=0, scores_prompt=True)
    scheduler.add(request)
    plan = scheduler.schedule()
    result = empty_result()
    result.prompt_logprobs["a/0"] = np.array([0, 0, np.nan, 0, 0, 0, 0, 0], dtype=np.float32)
    assert scheduler.update(plan, result) == [(request, [])]
    assert request.finish_reason is FinishReason.ERROR
    assert len(scheduler.kv.pool.index) == 0
    assert is_idle(scheduler)


def test_scoring_several_samples_needs_no_fork():
    runner = FakeRunner(make_scheduler())
    family = make_family("a", range(5), n=3, max_tokens=0, scores_prompt=True)
    runner.add(family[0])
    assert sorted(request.request_id for request, _ in runner.run()) == ["a/0", "a/1", "a/2"]


def test_another_pool_is_empty_and_keeps_the_policy_version():
    runner = FakeRunner(make_scheduler(num_blocks=20))
    runner.scheduler.set_policy_version(3)
    runner.add(make_request("a", range(10), max_tokens=2))
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        runner.scheduler.set_num_blocks(8)
    runner.run()
    runner.scheduler.set_num_blocks(8)
    assert is_idle(runner.scheduler)
    assert runner.scheduler.stats().num_blocks == runner.scheduler.stats().num_free_blocks == 8
    again = make_request("b", range(10), max_tokens=2)
    runner.add(again)
    runner.run()
    assert again.num_cached_tokens == 0
    assert again.policy_spans == [(3, 0)]
    third = make_request("c", range(10), max_tokens=2)
    runner.add(third)
    runner.run()
    assert third.num_cached_tokens == 8
    with pytest.raises(ValueError, match="the pool has 8"):
        runner.add(make_request("d", range(40), max_tokens=2))
