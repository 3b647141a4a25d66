"""What becomes of requests in flight and of their KV when the policy changes."""

from __future__ import annotations

import pytest

from rollout.core.schedule import SchedulePlan
from rollout.request import Request, RequestStatus
from tests.support.core_requests import make_family, make_request, make_scheduler, shape
from tests.support.fake_runner import FakeRunner, expected_output


def start(runner: FakeRunner, *requests: Request, steps: int = 1) -> SchedulePlan:
    for request in requests:
        runner.add(request)
    for _ in range(steps):
        plan = runner.step_plan()
    return plan


def update(runner: FakeRunner, version: int = 1) -> None:
    runner.scheduler.set_policy_version(version, keep_kv=True)
    runner.audit()


def assert_as_alone(runner: FakeRunner, *requests: Request) -> None:
    """Tokens depend on the prefix alone in this runner: whichever KV was kept, the same ones come out."""
    for request in requests:
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)


def test_a_kept_request_goes_on_with_its_kv_and_its_spans_say_so():
    # case WS-02
    runner = FakeRunner(make_scheduler())
    kept = make_request("a", range(9), max_tokens=12)
    start(runner, kept, steps=3)
    table = runner.scheduler.kv.block_ids(kept).copy()
    update(runner)
    assert shape(runner.step_plan()) == [("a/0", 11, 1)]  # one token: nothing is computed again
    assert runner.scheduler.kv.block_ids(kept)[:3] == table
    runner.run()
    assert kept.policy_spans == [(0, 0), (1, 3)]
    assert (kept.policy_version, kept.num_preemptions) == (1, 0)
    assert_as_alone(runner, kept)


def test_no_block_of_a_kept_request_is_ever_hit():
    # case WS-01, WS-02 - neither the blocks filled before the update nor those after it
    runner = FakeRunner(make_scheduler())
    kept = make_request("a", range(9), max_tokens=20)
    start(runner, kept, steps=8)  # 16 tokens are computed
    assert len(runner.scheduler.kv.pool.index) == 4
    update(runner)
    same_prompt = make_request("b", range(9), max_tokens=1, arrival=1)
    same_tokens = make_request("c", kept.token_ids, max_tokens=1, arrival=2)
    start(runner, same_prompt)
    start(runner, same_tokens)
    assert same_prompt.num_cached_tokens == 0
    assert same_tokens.num_cached_tokens == 8  # what b computed
    runner.run()
    assert kept.num_output_tokens == 20
    after = make_request("d", kept.token_ids[:-1], max_tokens=1, arrival=3)
    start(runner, after)
    assert after.num_cached_tokens == 16  # what b and c computed; the kept request has filled 28
    assert_as_alone(runner, kept, same_prompt, same_tokens, after)


def test_a_request_without_a_token_starts_anew_as_if_it_had_just_come():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=8))
    first = make_request("a", range(12), max_tokens=1)
    start(runner, first, steps=2)
    chunked = make_request("b", range(24), max_tokens=4, arrival=1)
    start(runner, chunked)
    assert (chunked.num_cached_tokens, chunked.num_computed_tokens) == (12, 20)
    update(runner)
    assert (chunked.status, chunked.num_computed_tokens) == (RequestStatus.WAITING, 0)
    runner.run()
    assert chunked.policy_spans == [(1, 0)]
    assert chunked.num_cached_tokens == 0
    assert_as_alone(runner, chunked)


def test_samples_that_wait_to_fork_do_so_from_kv_of_the_new_policy_alone():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=8))
    family = make_family("a", range(14), max_tokens=5, n=4)
    start(runner, family[0])
    update(runner)
    runner.run()  # the runner checks that nobody with one span reads older KV
    assert [sample.policy_spans for sample in family] == [[(1, 0)]] * 4
    assert_as_alone(runner, *family)


def test_samples_that_fork_behind_forced_tokens_tell_of_the_policy_that_computed_those():
    # case WS-02 - the leader is kept between two chunks of its forced tokens, and its samples take over what it has
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=6))
    family = make_family("a", range(4), max_tokens=10, n=3, forced=[1, 2, 3, 1, 2])
    start(runner, family[0])
    assert family[0].num_output_tokens == 3
    update(runner)
    runner.run()
    assert [sample.policy_spans for sample in family] == [[(0, 0), (1, 3)]] * 3


def test_samples_that_found_no_seat_do_not_share_the_blocks_of_kept_ones():
    runner = FakeRunner(make_scheduler(max_num_seqs=2))
    family = make_family("a", range(10), max_tokens=6, n=4)
    start(runner, family[0], steps=2)
    assert [sample.num_output_tokens for sample in family] == [2, 2, 0, 0]
    update(runner)
    runner.run()
    assert [sample.policy_spans for sample in family] == [[(0, 0), (1, 2)]] * 2 + [[(1, 0)]] * 2
    assert family[2].num_cached_tokens == 0
    assert_as_alone(runner, *family)


def test_forks_that_are_kept_still_copy_the_block_that_they_share():
    runner = FakeRunner(make_scheduler())
    family = make_family("a", range(10), max_tokens=6, n=3)
    start(runner, family[0])
    assert len({runner.scheduler.kv.block_ids(sample)[-1] for sample in family}) == 1
    update(runner)
    runner.run()
    assert runner.num_copies == 2
    assert_as_alone(runner, *family)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_kept_request_that_is_preempted_later_comes_back(mode: str):
    runner = FakeRunner(make_scheduler(num_blocks=5, preemption_mode=mode, num_host_blocks=5 * (mode == "swap")))
    requests = [make_request(name, [i] * 4, max_tokens=12, arrival=i) for i, name in enumerate("ab")]
    start(runner, *requests, steps=2)
    update(runner)
    last = requests[1]
    while not last.num_preemptions:
        runner.step()
    assert runner.scheduler.kv.holds_older_kv(last) == (mode == "swap")
    runner.run()
    # What was recomputed is of the new policy alone, and can be hit like anything else of it.
    again = make_request("c", last.token_ids[:9], max_tokens=1, arrival=3)
    start(runner, again)
    assert again.num_cached_tokens == (8 if mode == "recompute" else 0)
    assert [request.policy_spans[0] for request in requests] == [(0, 0)] * 2
    assert_as_alone(runner, *requests, again)


def test_kv_that_was_swapped_out_is_kept_too():
    runner = FakeRunner(make_scheduler(num_blocks=5, preemption_mode="swap", num_host_blocks=5))
    requests = [make_request(name, [i] * 4, max_tokens=12, arrival=i) for i, name in enumerate("ab")]
    start(runner, *requests)
    while requests[1].status is not RequestStatus.SWAPPED:
        runner.step()
    num_forward_tokens = runner.num_forward_tokens
    left = sum(request.max_tokens - request.num_output_tokens for request in requests)
    update(runner)
    assert requests[1].status is RequestStatus.SWAPPED
    runner.run()
    assert runner.num_forward_tokens == num_forward_tokens + left  # nothing was computed twice
    assert_as_alone(runner, *requests)


def test_scores_of_a_prompt_are_of_one_policy():
    runner = FakeRunner(make_scheduler(max_num_batched_tokens=4))
    scored = make_request("a", range(10), max_tokens=0, scores_prompt=True)
    start(runner, scored, steps=2)
    assert len(scored.prompt_logprobs) == 8
    update(runner)
    assert len(scored.prompt_logprobs) == 0
    runner.run()
    assert len(scored.prompt_logprobs) == 9


def test_an_update_that_is_taken_back_leaves_one_span():
    runner = FakeRunner(make_scheduler())
    kept = make_request("a", range(9), max_tokens=8)
    start(runner, kept, steps=3)
    update(runner, 1)
    update(runner, 0)
    runner.run()
    assert kept.policy_spans == [(0, 0)]
    assert_as_alone(runner, kept)


def test_the_policy_cannot_change_while_a_plan_is_in_flight():
    runner = FakeRunner(make_scheduler())
    start(runner, make_request("a", range(9)))
    plan = runner.scheduler.schedule()
    with pytest.raises(RuntimeError, match="1 requests are running"):
        runner.scheduler.set_policy_version(1, keep_kv=True)
    runner.scheduler.update(plan, runner.execute(plan))
