"""Exact plans and states of small scenarios: order, limits, tokens, forks and aborts."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.core.schedule import SchedulePlan
from rollout.request import FinishReason
from tests.support.core_requests import drawers, empty_result, is_idle, make_family, make_request, make_scheduler, shape
from tests.support.fake_runner import FakeRunner, expected_output, fake_logprob


def test_running_requests_spend_the_budget_before_waiting_ones():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=6))
    for arrival, (name, length) in enumerate([("a", 3), ("b", 8), ("c", 2)]):
        runner.add(make_request(name, range(arrival * 10, arrival * 10 + length), arrival=arrival))
    plans = [runner.step_plan() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [
        [("a/0", 0, 3), ("b/0", 0, 3)],
        [("a/0", 3, 1), ("b/0", 3, 5)],
        [("a/0", 4, 1), ("b/0", 8, 1), ("c/0", 0, 2)],
    ]
    assert [drawers(plan) for plan in plans] == [["a/0"], ["a/0", "b/0"], ["a/0", "b/0", "c/0"]]
    assert [plan.num_scheduled_tokens for plan in plans] == [6, 6, 4]
    assert plans[1].sequences[1].token_ids == [13, 14, 15, 16, 17]
    assert [draw.position for draw in plans[2].draws] == [5, 9, 2]


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["a/0", "b/0", "c/0", "d/0"]), ("priority", ["b/0", "c/0", "d/0", "a/0"])]
)
def test_the_policy_orders_requests(policy: str, order: list[str]):
    runner = FakeRunner(make_scheduler(policy=policy, max_num_seqs=1))
    for arrival, (name, priority) in enumerate([("a", 2), ("b", -1), ("c", 1), ("d", 1)]):
        runner.add(make_request(name, [arrival], max_tokens=1, arrival=arrival, priority=priority))
    assert [request.request_id for request, _ in runner.run()] == order


def test_seats_limit_what_runs():
    runner = FakeRunner(make_scheduler(max_num_seqs=2))
    for arrival in range(3):
        runner.add(make_request("abc"[arrival], [arrival], max_tokens=2, arrival=arrival))
    assert drawers(runner.step_plan()) == ["a/0", "b/0"]
    assert (runner.scheduler.num_running, runner.scheduler.num_waiting) == (2, 1)
    runner.run()
    assert is_idle(runner.scheduler)
    assert runner.scheduler.schedule().is_empty
    assert runner.scheduler.update(SchedulePlan(), empty_result()) == []


def test_what_can_never_fit_is_refused_with_the_true_numbers():
    # case PR-01, PR-02
    scheduler = make_scheduler(max_model_len=10, num_blocks=2)
    refused = [
        ("empty", [], 1, r"the prompt is empty \(0 tokens\)"),
        ("long", range(10), 1, "10 prompt tokens and max_tokens=1 make 11, more than max_model_len=10"),
        ("score", range(11), 0, "11 prompt tokens and max_tokens=0 make 11, more than max_model_len=10"),
        ("negative", range(3), -1, "max_tokens=-1 is not valid"),
        ("wide", range(8), 2, "8 prompt tokens and max_tokens=2 need 3 KV blocks of 4 tokens, the pool has 2"),
    ]
    for name, prompt, max_tokens, message in refused:
        with pytest.raises(ValueError, match=message):
            scheduler.add(make_request(name, prompt, max_tokens=max_tokens))
    runner = FakeRunner(scheduler)
    exact = make_request("exact", range(8), max_tokens=1)  # 8 slots: the last token's KV is never written
    scored = make_request("scored", range(8), max_tokens=0, scores_prompt=True)
    runner.add(exact)
    runner.add(scored)
    runner.run()
    assert (exact.num_output_tokens, exact.finish_reason) == (1, FinishReason.LENGTH)
    assert (scored.num_output_tokens, scored.finish_reason) == (0, FinishReason.LENGTH)


def test_an_id_in_use_is_refused_and_nothing_of_its_family_stays():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    family = make_family("b", [1], n=2)
    family[1].request_id = "a/0"
    with pytest.raises(ValueError, match="already in use"):
        scheduler.add(family[0])
    assert scheduler.num_waiting == 1
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("num_blocks", 0), ("num_host_blocks", -1), ("policy", "lifo"), ("preemption_mode", "drop")],
)
def test_a_wrong_configuration_names_its_field(field: str, value: object):
    with pytest.raises(ValueError, match=f"{field}="):
        make_scheduler(**{field: value})


def test_update_appends_tokens_and_arrays():
    runner = FakeRunner(make_scheduler())
    request = make_request("a", [1, 2, 3], max_tokens=5)
    runner.add(request)
    outputs = runner.run()
    assert outputs == [(request, [token_id]) for token_id in request.output_token_ids]
    assert request.output_token_ids == expected_output(request, runner.vocab, 64)
    logprobs = np.array(
        [fake_logprob(tuple(request.token_ids[:end]), request.token_ids[end]) for end in range(3, 8)], np.float32
    )
    for array, factor in zip(
        (request.raw_logprobs, request.sampled_logprobs, request.kept_mass, request.entropy), (1, 2, 3, 4), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(array), logprobs * np.float32(factor))
    assert request.policy_spans == [(0, 0)]


def test_min_tokens_bans_every_end_until_it_is_reached():
    # case ST-03
    runner = FakeRunner(make_scheduler())
    request = make_request("a", range(50), max_tokens=14, min_tokens=10)
    request.eos_token_ids, request.stop_token_ids = frozenset({0, 1, 2}), frozenset({3, 4})
    runner.add(request)
    banned = []
    while runner.scheduler.has_unfinished():
        banned.append(runner.step_plan().draws[0].banned_token_ids)
    assert banned[:11] == [(0, 1, 2, 3, 4)] * 10 + [()]
    assert set(request.output_token_ids[:10]) <= {5, 6}
    assert request.num_output_tokens > 10
    assert request.output_token_ids == expected_output(request, runner.vocab, 64)


def test_a_stop_id_is_named_and_eos_is_not():
    runner = FakeRunner(make_scheduler())
    every_id = frozenset(range(runner.vocab))
    by_stop_id = make_request("a", [1], stop_token_ids=every_id)
    by_eos = make_request("b", [1], eos_token_ids=every_id, stop_token_ids=every_id, arrival=1)
    runner.add(by_stop_id)
    runner.add(by_eos)
    runner.run()
    assert (by_stop_id.finish_reason, by_stop_id.stop_reason) == (FinishReason.STOP, by_stop_id.output_token_ids[0])
    assert (by_eos.finish_reason, by_eos.stop_reason) == (FinishReason.STOP, None)


def test_logits_that_are_not_numbers_end_one_request_only():
    # case SP-05
    runner = FakeRunner(make_scheduler(), poisoned=lambda draw: draw.request_id == "bad/0" and draw.position == 10)
    bad = make_request("bad", range(8), max_tokens=6)
    good = make_request("good", range(20, 28), max_tokens=6, arrival=1)
    runner.add(bad)
    runner.add(good)
    outputs = runner.run()
    assert (bad, []) in outputs
    assert (bad.finish_reason, bad.stop_reason) == (FinishReason.ERROR, None)
    assert bad.output_token_ids == expected_output(bad, runner.vocab, 64)[:2]
    assert len(bad.raw_logprobs) == 2
    assert good.output_token_ids == expected_output(good, runner.vocab, 64)
    again = make_request("again", range(8), max_tokens=1)
    runner.add(again)
    runner.run()
    assert again.num_cached_tokens == 0
    assert is_idle(runner.scheduler)


def test_a_poisoned_prompt_row_ends_every_fork():
    runner = FakeRunner(make_scheduler(), poisoned=lambda draw: True)
    family = make_family("a", range(6), n=3)
    runner.add(family[0])
    assert runner.run() == [(request, []) for request in family]
    assert is_idle(runner.scheduler)
    assert len(runner.scheduler.kv.pool.index) == 0


def test_samples_fork_in_the_step_that_computes_the_last_prompt_token():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=4))
    family = make_family("a", range(6), n=3, max_tokens=3)
    runner.add(family[0])
    assert runner.scheduler.num_waiting == 3
    assert drawers(runner.step_plan()) == []
    plan = runner.step_plan()
    assert shape(plan) == [("a/0", 4, 2)]
    assert [(draw.request_id, draw.sequence_index, draw.sample_index, draw.position) for draw in plan.draws] == [
        ("a/0", 0, 0, 6),
        ("a/1", 0, 1, 6),
        ("a/2", 0, 2, 6),
    ]
    kv = runner.scheduler.kv
    assert [kv.block_ids(request) for request in family] == [[0, 1]] * 3
    assert [kv.pool.blocks[block_id].ref_count for block_id in (0, 1)] == [3, 3]
    stats = runner.scheduler.stats()
    assert (stats.num_slots_allocated, stats.num_slots_used) == (8, 6)
    assert runner.step_plan().block_copies == [(1, 2), (1, 3)]
    assert [kv.block_ids(request) for request in family] == [[0, 2], [0, 3], [0, 1]]
    runner.run()
    assert runner.num_forward_tokens == 6 + 3 * 2
    assert [request.num_cached_tokens for request in family] == [0, 0, 0]
    for request in family:
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)
    assert is_idle(runner.scheduler)


def test_samples_without_a_seat_wait_right_behind_their_leader():
    runner = FakeRunner(make_scheduler(max_num_seqs=2, enable_prefix_caching=False))
    family = make_family("a", range(6), n=5, max_tokens=2)
    later = make_request("b", [9], max_tokens=2, arrival=1)
    runner.add(family[0])
    runner.add(later)
    order = list(dict.fromkeys(request.request_id for request, _ in runner.run()))
    assert order == ["a/0", "a/1", "a/2", "a/3", "a/4", "b/0"]
    assert runner.num_forward_tokens == 3 * 6 + 5 + 1 + 1  # a prompt for every two samples, then the decodes
    for request in (*family, later):
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)
    assert is_idle(runner.scheduler)


def test_samples_that_end_with_their_first_token_give_everything_back():
    runner = FakeRunner(make_scheduler())
    family = make_family("a", range(6), n=4, max_tokens=1)
    runner.add(family[0])
    assert [request for request, _ in runner.step()] == family
    assert is_idle(runner.scheduler)


def test_abort_by_group_ends_all_and_is_idempotent():
    runner = FakeRunner(make_scheduler(max_num_seqs=2))
    family = make_family("a", range(6), n=4, max_tokens=9)
    runner.add(family[0])
    runner.step()
    runner.step()
    assert runner.scheduler.abort(["a", "a/1", "unknown"]) == family
    assert runner.scheduler.abort(["a", "a/0"]) == []
    assert [request.finish_reason for request in family] == [FinishReason.ABORT] * 4
    assert [request.num_output_tokens for request in family] == [2, 2, 0, 0]
    assert is_idle(runner.scheduler)
    runner.scheduler.check_integrity()


def test_an_aborted_leader_hands_its_samples_on():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=4))
    family = make_family("a", range(6), n=4, max_tokens=3)
    runner.add(family[0])
    runner.step()
    plan = runner.scheduler.schedule()
    assert drawers(plan) == ["a/0", "a/1", "a/2", "a/3"]
    result = runner.execute(plan)
    assert runner.scheduler.abort(["a/0", "a/2"]) == [family[0], family[2]]
    assert runner.scheduler.update(plan, result) == []  # their draws came from the leader's row
    runner.audit()
    runner.run()
    for request in (family[1], family[3]):
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)
    assert is_idle(runner.scheduler)


def test_an_id_that_comes_back_gets_nothing_of_the_old_request():
    runner = FakeRunner(make_scheduler())
    old = make_request("a", range(5))
    runner.add(old)
    plan = runner.scheduler.schedule()
    result = runner.execute(plan)
    runner.scheduler.abort(["a/0"])
    new = make_request("a", range(20, 25), seed=3)
    runner.add(new)
    assert runner.scheduler.update(plan, result) == []
    runner.run()
    assert old.num_output_tokens == 0
    assert new.output_token_ids == expected_output(new, runner.vocab, 64)


def test_finish_from_outside_frees_and_may_correct_the_reason():
    runner = FakeRunner(make_scheduler())
    request = make_request("a", range(5), max_tokens=9)
    runner.add(request)
    runner.step()
    runner.scheduler.finish(request, FinishReason.STOP, "stop string")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "stop string")
    assert is_idle(runner.scheduler)
    last = make_request("b", range(5), max_tokens=1)
    runner.add(last)
    runner.run()
    assert last.finish_reason is FinishReason.LENGTH
    runner.scheduler.finish(last, FinishReason.STOP, "stop string")
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "stop string")
