"""Exact plans of forced tokens, forks of samples, and samples that go on: which tokens are computed, and who shares."""

from __future__ import annotations

import pytest

from rollout.core.schedule import SchedulePlan
from rollout.request import FinishReason, RequestStatus
from tests.support.core_requests import continue_from, is_idle, make_family, make_request, make_scheduler, shape
from tests.support.fake_runner import FakeRunner, expected_output


def draws(plan: SchedulePlan) -> list[tuple[str, int, int, int]]:
    """(request, position, row, forced token) of each draw."""
    return [(draw.request_id, draw.position, draw.row, draw.forced_token_id) for draw in plan.draws]


def test_forced_tokens_are_computed_like_a_prompt_with_a_draw_a_row():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=5))
    request = make_request("a", range(4), max_tokens=6, forced=[6, 5, 4, 3])
    runner.add(request)
    plan = runner.step_plan()
    assert shape(plan) == [("a/0", 0, 5)]
    assert draws(plan) == [("a/0", 4, 3, 6), ("a/0", 5, 4, 5)]
    assert request.output_token_ids == [6, 5]
    plan = runner.step_plan()
    assert shape(plan) == [("a/0", 5, 2)]  # the last forced token is not known before it is drawn
    assert draws(plan) == [("a/0", 6, 0, 4), ("a/0", 7, -1, 3)]
    assert draws(runner.step_plan()) == [("a/0", 8, -1, -1)]
    runner.run()
    assert request.output_token_ids == expected_output(request, runner.vocab, 64)
    assert (len(request.output_token_ids), request.finish_reason) == (6, FinishReason.LENGTH)


def test_forced_tokens_up_to_the_last_allowed_one_need_no_slot_for_it():
    runner = FakeRunner(make_scheduler(num_blocks=2))
    request = make_request("a", range(5), max_tokens=4, forced=[1, 2, 3, 4])
    runner.add(request)
    plan = runner.step_plan()
    assert shape(plan) == [("a/0", 0, 8)]
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == [1, 2, 3, 4]
    assert len(request.raw_logprobs) == 4
    assert is_idle(runner.scheduler)


def test_an_end_token_ends_a_forced_sample_only_as_the_last_one():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=4))
    inside = make_request("a", range(3), max_tokens=6, forced=[9, 1, 9, 2], eos_token_ids=frozenset({9}))
    last = make_request("b", range(3), max_tokens=6, forced=[9, 1, 9], eos_token_ids=frozenset({9}), arrival=1)
    for request in (inside, last):
        runner.add(request)
    runner.run()
    assert inside.output_token_ids[:4] == [9, 1, 9, 2]
    assert len(inside.output_token_ids) > 4
    assert (last.output_token_ids, last.finish_reason) == ([9, 1, 9], FinishReason.STOP)


def test_samples_of_forced_tokens_fork_behind_them():
    runner = FakeRunner(make_scheduler())
    family = make_family("a", range(3), max_tokens=8, n=3, forced=[6, 5, 4])
    runner.add(family[0])
    updates = runner.step()
    assert [(request.request_id, token_ids) for request, token_ids in updates] == [
        (f"a/{index}", [6, 5, 4]) for index in range(3)
    ]
    assert runner.num_forward_tokens == 5
    runner.run()
    for request in family:
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)
        assert list(request.raw_logprobs[:3]) == list(family[0].raw_logprobs[:3])


def test_an_aborted_sample_has_the_forced_tokens_that_were_computed():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=5))
    request = make_request("a", range(4), max_tokens=9, forced=[6, 5, 4, 3, 2, 1])
    runner.add(request)
    runner.step()
    runner.scheduler.abort(["a"])
    assert request.output_token_ids == [6, 5]
    assert len(request.entropy) == 2


def test_hits_reach_no_further_than_the_first_value_that_is_missing():
    runner = FakeRunner(make_scheduler())
    first = make_request("a", range(6), max_tokens=14, forced=range(20, 34))
    runner.add(first)
    runner.run()
    again = make_request("b", range(6), max_tokens=14, forced=range(20, 34), arrival=1)
    runner.add(again)
    assert shape(runner.step_plan()) == [("b/0", 4, 15)]  # 19 tokens are cached, and 14 of their rows are drawn from
    assert list(again.raw_logprobs) == list(first.raw_logprobs)


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_of_a_running_sample_shares_its_blocks(caching: bool):
    runner = FakeRunner(make_scheduler(enable_prefix_caching=caching))
    parent = make_request("a", range(6), max_tokens=20)
    runner.add(parent)
    while parent.num_output_tokens < 8:
        runner.step()
    table = list(runner.scheduler.kv.block_ids(parent))
    family = continue_from(parent, "b", 5, [7, 8], arrival=1, branch_position=5, forked_from=parent)
    runner.add(family[0])
    plan = runner.step_plan()
    assert shape(plan) == [("a/0", 13, 1), ("b/7", 10, 1)]  # of the 11 tokens the last is computed for its row
    assert plan.sequences[1].block_ids[:2] == table[:2]
    assert [source for source, _ in plan.block_copies] == [table[2]]
    assert family[0].num_cached_tokens == 10
    runner.run()
    for request in (parent, *family):
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)
    outputs = {tuple(request.output_token_ids) for request in (parent, *family)}
    assert len(outputs) == 3
    assert all(output[:5] == tuple(parent.output_token_ids[:5]) for output in outputs)
    assert is_idle(runner.scheduler)


@pytest.mark.parametrize(("caching", "num_computed"), [(True, 3), (False, 11)])
def test_a_fork_of_a_sample_that_has_ended_uses_the_prefix_cache(caching: bool, num_computed: int):
    runner = FakeRunner(make_scheduler(enable_prefix_caching=caching))
    parent = make_request("a", range(6), max_tokens=8)
    runner.add(parent)
    runner.run()
    (child,) = continue_from(parent, "b", 5, [1], arrival=1, branch_position=5, forked_from=parent)
    runner.add(child)
    assert shape(runner.step_plan()) == [("b/1", 11 - num_computed, num_computed)]
    runner.run()
    assert child.output_token_ids == expected_output(child, runner.vocab, 64)


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"adapter_key": "x"}])
def test_a_fork_under_another_salt_or_adapter_shares_nothing(other: dict[str, str]):
    runner = FakeRunner(make_scheduler())
    parent = make_request("a", range(6), max_tokens=8)
    runner.add(parent)
    runner.step()
    (child,) = continue_from(parent, "b", 1, [1], arrival=1, branch_position=1, forked_from=parent, **other)
    runner.scheduler.add(child)
    assert shape(runner.scheduler.schedule()) == [("a/0", 6, 1), ("b/1", 0, 7)]


def test_a_fork_takes_no_kv_of_an_older_policy():
    runner = FakeRunner(make_scheduler())
    parent = make_request("a", range(6), max_tokens=12)
    runner.add(parent)
    for _ in range(5):
        runner.step()
    runner.scheduler.set_policy_version(1, keep_kv=True)
    (child,) = continue_from(parent, "b", 2, [1], arrival=1, branch_position=2, forked_from=parent)
    runner.add(child)
    assert shape(runner.step_plan()) == [("a/0", 10, 1), ("b/1", 0, 8)]
    runner.run()
    assert child.policy_spans == [(0, 0), (1, 2)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forks_give_way_and_come_back_like_any_request(mode: str):
    runner = FakeRunner(make_scheduler(num_blocks=9, preemption_mode=mode, num_host_blocks=12))
    parent = make_request("a", range(6), max_tokens=24)
    runner.add(parent)
    for _ in range(6):
        runner.step()
    family = continue_from(parent, "b", 4, [1, 2, 3], arrival=1, branch_position=4, forked_from=parent)
    runner.add(family[0])
    runner.run()
    assert sum(request.num_preemptions for request in family) > 0
    for request in (parent, *family):
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)
    assert is_idle(runner.scheduler)


def test_an_unfinished_sample_goes_on_with_what_it_has():
    runner = FakeRunner(make_scheduler())
    whole = make_request("a", range(6), max_tokens=9)
    cut = make_request("b", range(6), max_tokens=9, arrival=1)
    runner.add(whole)
    runner.add(cut)
    for _ in range(4):
        runner.step()
    runner.scheduler.abort(["b"])
    (more,) = continue_from(cut, "c", cut.num_output_tokens, [0], arrival=2)
    runner.add(more)
    runner.run()
    assert more.status is RequestStatus.FINISHED
    assert more.output_token_ids == whole.output_token_ids
    assert list(more.entropy) == list(whole.entropy)
    assert more.policy_spans == [(0, 0)]
