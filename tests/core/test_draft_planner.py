"""A drafter with weights: who is drafted, what it computes for that, where its KV lies, and when it loses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rollout.core.schedule import DraftPlan
from rollout.core.scheduler import Scheduler, SchedulerConfig
from rollout.core.speculation import Speculation
from rollout.request import FinishReason, Request
from rollout.sampling_options import StructuredOutputsParams
from rollout.sampling_params import SamplingParams
from tests.core.test_beam_groups import BeamWish, check_found
from tests.core.test_scheduler_properties import (
    MAX_MODEL_LEN,
    VOCAB,
    Interruptions,
    Wish,
    check_tokens,
    configs,
    wishes,
)
from tests.support.core_requests import continue_from, is_idle, make_family, make_request, shape
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_runner import FakeRunner, expected_output, next_token

ROOM = SchedulerConfig(8, 64, 64, 4, 64, num_draft_blocks=64)  # blocks of 4 tokens


def make(
    config: SchedulerConfig = ROOM,
    rightness: float = 1.0,
    most_drafts: int = 4,
    most_sequences: int = 8,
    rate: float = 1.0,
    vocab: int = 50,
    may_be_short: bool = False,
    watches_cost: bool = False,
) -> tuple[FakeRunner, FakeDrafter]:
    speculation = Speculation(None, most_drafts, most_sequences, rate, watches_cost=watches_cost)
    runner = FakeRunner(Scheduler(config, speculation), vocab=vocab)
    drafter = runner.drafter = FakeDrafter(runner.scheduler, runner.requests, vocab, rightness, may_be_short)
    return runner, drafter


def parts(plan: DraftPlan) -> list[tuple[str, int, int, int]]:
    """(request, first position, number of tokens, number of guesses) of each sequence."""
    return [
        (sequence.request_id, sequence.start, len(sequence.token_ids), sequence.num_drafts)
        for sequence in plan.sequences
    ]


def steps(runner: FakeRunner, count: int) -> None:
    for _ in range(count):
        runner.step()


def held(runner: FakeRunner) -> int:
    """Draft blocks that somebody holds."""
    planner = runner.scheduler.draft_planner
    assert planner is not None
    return planner.kv.pool.num_blocks - planner.kv.pool.num_free


def assert_as_alone(runner: FakeRunner, *requests: Request) -> None:
    for request in requests:
        assert request.output_token_ids == expected_output(request, runner.vocab, 64)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    configs(),
    st.lists(wishes(), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.booleans(),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(0, 60),
)
def test_tokens_do_not_depend_on_the_drafter(
    config: SchedulerConfig,
    wanted: list[Wish],
    rightness: float,
    may_be_short: bool,
    most_drafts: int,
    most_sequences: int,
    num_draft_blocks: int,
):
    # The drafter asserts that each slot that it reads holds what it should.
    runner, _ = make(
        replace(config, num_draft_blocks=num_draft_blocks),
        rightness,
        most_drafts,
        most_sequences,
        vocab=VOCAB,
        may_be_short=may_be_short,
    )
    requests: list[Request] = []
    for number, wish in enumerate(wanted):
        family = wish.family(str(number), arrival=number)
        runner.add(family[0])
        requests += family
    runner.run(max_steps=5000)
    for request in requests:
        assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        check_tokens(request)
    assert is_idle(runner.scheduler) and held(runner) == 0
    speculation = runner.scheduler.speculation
    assert speculation is not None
    assert all(map(int.__le__, speculation.num_accepted, speculation.num_drafted))
    if rightness == 1.0:
        assert speculation.num_accepted == speculation.num_drafted or any(request.eos_token_ids for request in requests)


class InterruptedGuesses(Interruptions):
    """Requests come and go, plans are forgotten and the policy changes, also between the guesses and the step."""

    drafter: FakeDrafter

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        least = -(-MAX_MODEL_LEN // config.block_size)
        num_draft_blocks = (0, least // 2 + 1, least + 1, 3 * least)[config.num_blocks % 4]
        return Scheduler(replace(config, num_draft_blocks=num_draft_blocks), Speculation(None, 4, 8, 1.0))

    def make_drafter(self, runner: FakeRunner) -> FakeDrafter:
        self.drafter = FakeDrafter(runner.scheduler, runner.requests, VOCAB, 0.8, may_be_short=True)
        return self.drafter

    @rule()
    def forget_guesses_before_they_are_made(self) -> None:
        self.scheduler.plan_drafts()
        self.scheduler.preempt_all()
        assert held(self.runner) == 0

    @rule()
    def fail_half_way(self) -> None:
        """The drafter has written some of its KV, and then there was an error."""
        plan = self.scheduler.plan_drafts()
        if plan is not None:
            self.drafter.propose(plan)
        self.scheduler.preempt_all()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), before=st.booleans())
    def abort_beside_the_guesses(self, data: st.DataObject, before: bool) -> None:
        """Between the drafter's plan, its guesses, and the step."""
        request = data.draw(st.sampled_from(self.requests))
        plan = self.scheduler.plan_drafts()
        guesses = {} if plan is None else self.drafter.propose(plan)
        if before:
            self.scheduler.abort([request.request_id])
        if plan is not None:
            self.scheduler.take_drafts(plan, guesses)
        self.scheduler.abort([request.request_id])
        self.scheduler.check_integrity()
        step = self.scheduler.schedule()
        self.scheduler.update(step, self.runner.execute(step))

    def fall_asleep(self, mode: str) -> None:
        super().fall_asleep(mode)
        self.drafter.device.clear()


TestInterruptedGuesses = InterruptedGuesses.TestCase
TestInterruptedGuesses.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_drafter_catches_up_once_and_then_computes_what_is_new():
    runner, drafter = make()
    request = make_request("a", range(10), max_tokens=20)
    runner.add(request)
    runner.step()
    assert drafter.plans == []  # there is no token yet
    plans = [shape(runner.step_plan()) for _ in range(3)]
    assert [parts(plan) for plan in drafter.plans] == [
        [("a/0", 0, 11, 4)],  # the prompt and the first token
        [("a/0", 11, 5, 4)],  # four right guesses, and the token behind them
        [("a/0", 16, 5, 4)],
    ]
    assert plans == [[("a/0", 10, 5)], [("a/0", 15, 5)], [("a/0", 20, 5)]]
    stats = runner.scheduler.stats()
    assert (stats.num_drafter_tokens, stats.num_draft_blocks, stats.num_free_draft_blocks) == (21, 64, 64 - 6)
    runner.run()
    assert_as_alone(runner, request)


def test_guesses_of_a_step_become_its_drafts():
    runner, _ = make(rightness=0.0)
    request = make_request("a", range(10), max_tokens=20)
    runner.add(request)
    runner.step()
    plan = runner.step_plan()
    assert plan.sequences[0].token_ids == [request.token_ids[10], 50, 50, 50, 50]
    assert request.num_output_tokens == 2
    runner.run()
    assert_as_alone(runner, request)


def test_a_drafter_without_kv_gets_the_last_token_and_no_blocks():
    runner, drafter = make(replace(ROOM, num_draft_blocks=0))
    request = make_request("a", range(10), max_tokens=20)
    runner.add(request)
    steps(runner, 3)
    assert [parts(plan) for plan in drafter.plans] == [[("a/0", 10, 1, 4)], [("a/0", 15, 1, 4)]]
    assert all(sequence.block_ids == [] for plan in drafter.plans for sequence in plan.sequences)
    runner.run()
    assert_as_alone(runner, request)


def test_samples_of_a_prompt_share_its_blocks_in_the_drafters_pool_too():
    runner, drafter = make(most_drafts=1)
    family = make_family("a", range(10), max_tokens=12, n=3)
    runner.add(family[0])
    steps(runner, 3)
    assert [parts(plan) for plan in drafter.plans] == [
        [("a/0", 0, 11, 1)],  # the others will find the prompt's full blocks
        [("a/0", 11, 2, 1), ("a/1", 8, 4, 1), ("a/2", 8, 4, 1)],
    ]
    tables = [sequence.block_ids for sequence in drafter.plans[1].sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({block_id for table in tables for block_id in table[2:]}) == sum(len(table) - 2 for table in tables)
    runner.run()
    assert_as_alone(runner, *family)


@pytest.mark.parametrize("salts", [(None, None), ("salt", None)])
def test_a_branch_and_a_second_epoch_find_what_the_drafter_has_seen(salts: Sequence[str | None]):
    runner, drafter = make(most_drafts=1)
    first = make_request("a", range(10), max_tokens=12, cache_salt=salts[0])
    runner.add(first)
    steps(runner, 5)
    branch = continue_from(first, "b", 4, [7], arrival=1, branch_position=4, forked_from=first)[0]
    runner.add(branch)
    runner.run()
    again = make_request("c", range(10), max_tokens=12, arrival=2, cache_salt=salts[1])
    runner.add(again)
    runner.run()
    starts: dict[str, int] = {}
    for plan in drafter.plans:
        for sequence in plan.sequences:
            starts.setdefault(sequence.request_id, sequence.start)
    assert starts == {"a/0": 0, "b/7": 12, "c/0": 8 if salts[0] == salts[1] else 0}
    assert_as_alone(runner, first, branch, again)


def test_the_last_known_token_is_always_computed_also_where_its_block_could_be_hit():
    runner, drafter = make(rightness=0.0)
    for name in "ab":
        request = make_request(name, range(11), max_tokens=12)
        runner.add(request)
        runner.run()
        assert_as_alone(runner, request)
    first = next(parts(plan)[0] for plan in drafter.plans if plan.sequences[0].request_id == "b/0")
    assert first == ("b/0", 8, 4, 4)


def test_a_long_prompt_is_caught_up_in_chunks_of_the_token_budget():
    runner, drafter = make(replace(ROOM, max_num_batched_tokens=8))
    request = make_request("a", range(20), max_tokens=20)
    runner.add(request)
    while not request.num_output_tokens:
        runner.step()
    assert drafter.plans == []
    steps(runner, 4)
    assert [parts(plan) for plan in drafter.plans] == [
        [("a/0", 0, 8, 0)],
        [("a/0", 8, 8, 0)],
        [("a/0", 16, 7, 4)],  # it has drawn two more tokens meanwhile
        [("a/0", 23, 5, 4)],
    ]
    runner.run()
    assert_as_alone(runner, request)


def test_tokens_drawn_without_guesses_are_caught_up_when_there_are_guesses_again():
    runner, drafter = make(most_sequences=1)
    runner.add(make_request("a", range(10), max_tokens=30))
    steps(runner, 2)
    runner.add(make_request("b", [3], max_tokens=5, arrival=1))
    num_plans = len(drafter.plans)
    steps(runner, 1)
    while runner.scheduler.num_running == 2:
        runner.step()
        assert len(drafter.plans) == num_plans  # it does no work while too many draw, the prompt included
    steps(runner, 1)
    assert parts(drafter.plans[-1])[0][1:3] == (11, 10)
    runner.run()


@pytest.mark.parametrize("seconds", [2.0, 9.0])
def test_the_drafter_does_no_work_in_steps_that_are_timed_without_or_slower_with_it(seconds: float):
    # Of 4 guesses all are right: 5 tokens for the time of 2 or of 9 steps without.
    runner, drafter = make(SchedulerConfig(4, 64, 600, 16, 40, num_draft_blocks=40), watches_cost=True)
    speculation = runner.scheduler.speculation
    assert speculation is not None
    runner.add(make_request("a", range(10), max_tokens=550))
    runner.step()
    asked: list[bool] = []
    for _ in range(60):
        num_plans, before = len(drafter.plans), runner.requests["a/0"].num_tokens
        num_rows = runner.step_plan().num_scheduled_tokens
        asked.append(len(drafter.plans) > num_plans)
        num_tokens = runner.requests["a/0"].num_tokens - before
        speculation.took(1, num_rows, num_tokens, seconds if num_rows > 1 else 1.0)
        assert asked[-1] == (num_rows > 1)
    assert asked[:3] == [False] * 3 and asked[3]
    assert asked.count(True) > 50 if seconds < 5 else asked.count(True) < 8
    runner.scheduler.abort(["a"])
    assert held(runner) == 0


def test_wrong_guesses_end_the_drafters_work_but_for_a_try_now_and_then():
    runner, drafter = make(rightness=0.0, rate=0.5)
    request = make_request("a", [1, 2, 3], max_tokens=60)
    runner.add(request)
    runner.run()
    assert 2 <= len(drafter.plans) < 20
    assert_as_alone(runner, request)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 9])
def test_nothing_is_guessed_that_could_not_be_used(max_tokens: int):
    runner, drafter = make(most_drafts=16)
    request = make_request("a", [1, 2], max_tokens=max_tokens)
    runner.add(request)
    runner.run()
    asked = [sequence.num_drafts for plan in drafter.plans for sequence in plan.sequences]
    assert asked == ([max_tokens - 2] if max_tokens > 2 else [])  # one token before, one behind them
    assert_as_alone(runner, request)


def test_a_long_prompt_is_not_caught_up_for_the_sake_of_a_few_tokens():
    runner, drafter = make(replace(ROOM, num_blocks=256, num_draft_blocks=256))
    planned: dict[str, int] = {}
    for arrival, (name, max_tokens) in enumerate({"a": 3, "b": 4, "c": 3}.items()):
        request = make_request(name, range(40), max_tokens=max_tokens, arrival=arrival)
        runner.add(request)
        runner.run()
        assert_as_alone(runner, request)
        assert held(runner) == 0
        planned[name] = sum(len(sequence.token_ids) for plan in drafter.plans for sequence in plan.sequences)
        drafter.plans.clear()
    assert planned == {"a": 0, "b": 41, "c": 1}  # 41 tokens for 2, for 3; then all but one can be hit


def test_guesses_share_the_token_budget():
    runner, drafter = make(SchedulerConfig(4, 5, 40, 4, 40, num_draft_blocks=40), most_drafts=16)
    for name in "ab":
        runner.add(make_request(name, [1, 2], max_tokens=10))
    steps(runner, 3)
    assert parts(drafter.plans[0]) == [("a/0", 0, 3, 3)]  # five tokens, of which two are not guessed
    runner.run()


def test_guesses_share_the_blocks_that_the_engine_has_left():
    runner, drafter = make(replace(ROOM, num_blocks=5))
    requests = [make_request(name, [1, 2, 3], max_tokens=12, arrival=i) for i, name in enumerate("ab")]
    for request in requests:
        runner.add(request)
    steps(runner, 2)
    # Four known tokens each, in a block each. Of three free blocks one stays free for each of them.
    assert parts(drafter.plans[0]) == [("a/0", 0, 4, 4)]
    runner.run()
    assert_as_alone(runner, *requests)


def test_no_guesses_where_a_prompt_takes_the_budget():
    runner, drafter = make(SchedulerConfig(4, 8, 64, 4, 40, num_draft_blocks=40))
    request = make_request("a", [1, 2], max_tokens=20)
    runner.add(request)
    steps(runner, 2)
    assert len(drafter.plans) == 1
    runner.add(make_request("b", range(22), max_tokens=1, arrival=1))
    steps(runner, 3)
    assert len(drafter.plans) == 1
    steps(runner, 2)
    assert len(drafter.plans) > 1
    runner.run()
    assert_as_alone(runner, request)


def test_the_last_token_is_computed_again_where_the_step_did_not_take_place_for_its_request():
    # The last of two requests sits a step out, since blocks are short; what was guessed for it is forgotten.
    for num_blocks in range(5, 12):
        runner, drafter = make(SchedulerConfig(4, 16, 24, 2, num_blocks + 7, num_draft_blocks=40), most_drafts=2)
        requests = [make_request(name, [1, 2, 3], max_tokens=18, arrival=i) for i, name in enumerate("ab")]
        for request in requests:
            runner.add(request)
        runner.run()
        assert_as_alone(runner, *requests)
    scheduler = runner.scheduler
    runner.add(make_request("c", [1, 2, 3], max_tokens=18, arrival=3))
    steps(runner, 2)
    plan = scheduler.plan_drafts()
    assert plan is not None
    scheduler.take_drafts(plan, drafter.propose(plan))
    again = scheduler.plan_drafts()
    assert again is not None
    (sequence,) = again.sequences
    assert (sequence.start, len(sequence.token_ids)) == (runner.requests["c/0"].num_tokens - 1, 1)
    scheduler.take_drafts(again, drafter.propose(again))
    runner.run()


def test_no_block_is_shared_whose_last_token_may_have_to_be_computed_again():
    runner, drafter = make(rightness=0.0)
    requests = [make_request(name, range(10), max_tokens=20, arrival=i) for i, name in enumerate("ab")]  # the same
    for request in requests:
        runner.add(request)
    while requests[1].num_tokens < 16:
        runner.step()
    for _ in range(2):  # the second time no step has taken place
        plan = runner.scheduler.plan_drafts()
        assert plan is not None
        tables = [sequence.block_ids[:4] for sequence in plan.sequences]
        assert tables[0][:3] == tables[1][:3] and tables[0][3] != tables[1][3]
        runner.scheduler.take_drafts(plan, drafter.propose(plan))
    runner.run()
    assert_as_alone(runner, *requests)


def test_where_the_pool_is_short_those_go_without_kv_that_are_not_drafted_now():
    # Room for the KV of one of them; the first one's guesses are mostly wrong, so that it is seldom drafted.
    config = SchedulerConfig(4, 64, 64, 4, 64, num_draft_blocks=7)
    runner, drafter = make(config, rate=0.3)
    first, second = (make_request(name, [i] * 9, max_tokens=14, arrival=i) for i, name in enumerate("ab"))
    runner.add(first)
    steps(runner, 2)
    speculation = runner.scheduler.speculation
    assert speculation is not None and held(runner) > 0
    for _ in range(40):
        speculation.verified(first, 1, 0, was_wrong=True, is_text=False)
    runner.add(second)
    steps(runner, 2)
    assert {sequence.request_id for sequence in drafter.plans[-1].sequences} == {"b/0"}
    runner.scheduler.check_integrity()
    runner.run()
    assert_as_alone(runner, first, second)
    assert first.num_preemptions == second.num_preemptions == 0


def test_those_go_first_that_were_drafted_longest_ago():
    # After the first plan each of four requests has 3 of the pool's 13 blocks.
    runner, drafter = make(replace(ROOM, num_draft_blocks=13), rightness=0.0, most_drafts=1)
    speculation = runner.scheduler.speculation
    assert speculation is not None
    requests = [make_request(name, [i] * 9, max_tokens=40, arrival=i) for i, name in enumerate("abcd")]
    for request in requests:
        runner.add(request)
    steps(runner, 2)
    assert len(drafter.plans) == 1 and held(runner) == 12

    def draft_only(name: str) -> str:
        """A step that is guessed for this request alone; who holds draft blocks behind it."""
        for request in requests:
            for _ in range(60):
                is_right = request.request_id[0] == name
                speculation.verified(request, 1, int(is_right), was_wrong=not is_right, is_text=False)
        runner.step()
        assert [sequence.request_id[0] for sequence in drafter.plans[-1].sequences] == [name]
        return "".join(other.request_id[0] for other in requests if drafter.planner.kv.holds_blocks(other))

    assert [draft_only(name) for name in "dbc"] == ["abcd"] * 3
    holders = [draft_only("c") for _ in range(20)]  # it needs a block more every fourth time
    assert holders == sorted(holders, key=len, reverse=True)
    assert list(dict.fromkeys(holders)) == ["abcd", "bcd", "bc"]
    runner.run()
    assert_as_alone(runner, *requests)


def test_a_pool_that_is_too_small_is_neither_an_error_nor_a_preemption():
    for num_draft_blocks in (1, 2, 3, 4, 5, 6):
        runner, drafter = make(replace(ROOM, num_draft_blocks=num_draft_blocks))
        requests = [make_request(name, [i] * 9, max_tokens=14, arrival=i) for i, name in enumerate("ab")]
        for request in requests:
            runner.add(request)
        runner.run()
        assert_as_alone(runner, *requests)
        assert sum(request.num_preemptions for request in requests) == 0
        assert bool(drafter.plans) == (num_draft_blocks >= 3)
        assert held(runner) == 0


def test_a_request_that_has_outgrown_the_pool_gives_its_blocks_back():
    runner, drafter = make(replace(ROOM, num_draft_blocks=4), most_drafts=1)
    request = make_request("a", range(9), max_tokens=14)
    runner.add(request)
    while request.num_tokens <= 16:
        assert held(runner) <= 4
        runner.step()
    num_plans = len(drafter.plans)
    assert num_plans > 0 and held(runner) > 0
    runner.step()
    assert held(runner) == 0 and not request.is_finished
    runner.run()
    assert len(drafter.plans) == num_plans
    assert_as_alone(runner, request)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_gives_its_draft_blocks_back_at_once(mode: str):
    config = SchedulerConfig(4, 64, 64, 4, 7, 7, preemption_mode=mode, num_draft_blocks=40)  # type: ignore[arg-type]
    runner, _ = make(config, most_drafts=1)
    requests = [make_request(name, [i] * 4, max_tokens=18, arrival=i) for i, name in enumerate("ab")]
    for request in requests:
        runner.add(request)
    while not requests[1].num_preemptions:
        runner.step()
    kv = runner.scheduler.draft_planner
    assert kv is not None
    assert held(runner) == kv.kv.num_blocks_for(requests[0].num_tokens - 1)
    runner.run()
    assert_as_alone(runner, *requests)


def test_an_aborted_request_gives_its_draft_blocks_back_at_once():
    runner, _ = make()
    runner.add(make_request("a", range(10), max_tokens=20))
    steps(runner, 3)
    assert held(runner) > 0
    runner.scheduler.abort(["a"])
    assert held(runner) == 0
    runner.scheduler.check_integrity()


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_policy_update_forgets_the_drafters_kv(keep_kv: bool):
    runner, drafter = make()
    request = make_request("a", range(10), max_tokens=30)
    runner.add(request)
    steps(runner, 3)
    if not keep_kv:
        runner.scheduler.preempt_all()
    runner.scheduler.set_policy_version(1, keep_kv=keep_kv)
    assert held(runner) == 0 and len(drafter.planner.kv.pool.index) == 0
    num_plans = len(drafter.plans)
    runner.run()
    assert parts(drafter.plans[num_plans])[0][1] == 0
    assert_as_alone(runner, request)


def test_a_reset_and_another_pool_forget_the_drafters_kv():
    runner, drafter = make()
    scheduler = runner.scheduler
    runner.add(make_request("a", range(10), max_tokens=20))
    steps(runner, 3)
    assert not scheduler.reset_prefix_cache()
    assert held(runner) > 0  # nothing is changed while blocks are in use
    runner.run()
    assert len(drafter.planner.kv.pool.index) > 0
    assert scheduler.reset_prefix_cache()
    assert len(drafter.planner.kv.pool.index) == 0
    scheduler.set_num_blocks(32)
    assert drafter.planner.kv.pool.num_blocks == 64
    scheduler.set_policy_version(3)
    scheduler.set_num_blocks(32, num_draft_blocks=16)
    assert (scheduler.kv.pool.num_blocks, drafter.planner.kv.pool.num_blocks) == (32, 16)
    request = make_request("b", range(10), max_tokens=20, arrival=1)
    runner.add(request)
    runner.run()
    assert len(drafter.planner.kv.pool.index) > 0  # audited: under the present version
    assert_as_alone(runner, request)


def test_forced_tokens_and_beams_are_not_drafted():
    runner, drafter = make(vocab=VOCAB)
    search = BeamWish((0, 1, 2, 3, 0), 3, 6, 1.0, False, (), 0)
    beams, plain = search.request("beams"), make_request("plain", [1, 2], max_tokens=12, arrival=1)
    forced = make_family("forced", [1, 2], max_tokens=6, arrival=2, forced=[0, 1, 2, 3, 4, 0])[0]
    for request in (beams, plain, forced):
        runner.add(request)
    runner.run()
    drafted = {sequence.request_id for plan in drafter.plans for sequence in plan.sequences}
    assert drafted == {"plain/0"}
    check_found(beams, search)
    assert forced.output_token_ids == [0, 1, 2, 3, 4, 0]
    assert_as_alone(runner, plain)


class Prescribes:
    """A guide that knows the next two tokens of requests with a grammar for a while, and then allows one guess."""

    def next_tokens(self, request: Request) -> list[int]:
        tokens = list(request.token_ids)
        for _ in range(2):
            tokens.append(next_token(tuple(tokens), request.seed, request.sample_index, 50))
        return tokens[-2:] if request.num_output_tokens < 7 else []

    def num_allowed(self, request: Request, draft_token_ids: list[int]) -> int:
        return len(draft_token_ids) if request.num_output_tokens < 7 else 1


def test_text_that_a_grammar_prescribes_is_drafted_without_the_drafter():
    speculation = Speculation(None, 4, 8, 1.0, guide=Prescribes())
    runner = FakeRunner(Scheduler(ROOM, speculation), vocab=50)
    drafter = runner.drafter = FakeDrafter(runner.scheduler, runner.requests, 50)
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="a*"))
    request = Request("a", "a", list(range(10)), params, seed=0, sample_index=0, max_tokens=20)
    runner.add(request)
    plans = [shape(runner.step_plan()) for _ in range(4)]
    assert plans[1:3] == [[("a", 10, 3)], [("a", 13, 3)]]
    assert [parts(plan) for plan in drafter.plans] == [[("a", 0, 17, 4)]]
    assert plans[3] == [("a", 16, 2)]  # of four guesses its grammar allows one
    runner.run()
    assert_as_alone(runner, request)


def test_more_guesses_than_were_asked_for_are_an_error_of_the_drafter():
    runner, _ = make()
    runner.add(make_request("a", range(10), max_tokens=20))
    runner.step()
    plan = runner.scheduler.plan_drafts()
    assert plan is not None
    with pytest.raises(AssertionError, match="more guesses than were asked for"):
        runner.scheduler.take_drafts(plan, {"a/0": [1] * 5})
    runner.scheduler.preempt_all()
    runner.run()


def test_draft_blocks_cannot_be_fewer_than_none():
    with pytest.raises(ValueError, match=r"num_draft_blocks=-1 is not valid: it must be at least 0"):
        SchedulerConfig(1, 1, 1, 1, 1, num_draft_blocks=-1)
