"""Beam searches in the scheduler: what they find depends on nothing around them, and no block is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.core.beam import BeamOptions
from rollout.core.scheduler import Scheduler, SchedulerConfig
from rollout.request import FinishReason, Request
from tests.core.test_scheduler_properties import MAX_MODEL_LEN, VOCAB, Wish, check_tokens, configs, wishes
from tests.support.beams import Found, slow_beam_search
from tests.support.core_requests import is_idle, make_request, make_scheduler
from tests.support.fake_runner import FakeRunner, fake_logprob


@dataclass(frozen=True, slots=True)
class BeamWish:
    """What a search asks for."""

    prompt: tuple[int, ...]
    width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    ends: tuple[int, ...]
    priority: int = 0

    def request(self, name: str, arrival: int = 0) -> Request:
        return make_request(
            name,
            self.prompt,
            self.max_tokens,
            arrival=arrival,
            priority=self.priority,
            eos_token_ids=frozenset(self.ends),
            beam_options=BeamOptions(self.width, self.length_penalty, self.early_stopping),
        )

    def expected(self) -> list[Found]:
        return slow_beam_search(
            lambda tokens: [fake_logprob(tokens, token_id) for token_id in range(VOCAB)],
            self.prompt,
            self.width,
            self.max_tokens,
            self.ends,
            self.length_penalty,
            self.early_stopping,
        )


@st.composite
def beam_wishes(draw: st.DrawFn) -> BeamWish:
    root = draw(st.sampled_from([(0, 1, 2, 3) * 5, (4,) * 20]))
    prompt = root[: draw(st.integers(1, 20))]
    return BeamWish(
        prompt=prompt,
        width=draw(st.integers(1, 6)),
        max_tokens=draw(st.integers(1, min(14, MAX_MODEL_LEN - len(prompt)))),
        length_penalty=draw(st.sampled_from([0.0, 0.6, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
        ends=tuple(draw(st.sampled_from([(), (0,), (0, 3)]))),
        priority=draw(st.integers(-1, 1)),
    )


def check_found(request: Request, wish: BeamWish) -> None:
    assert request.beam_result is not None
    found = [(tuple(h.token_ids), h.cum_logprob, h.score) for h in request.beam_result.hypotheses]
    assert found == [(f.token_ids, f.cum_logprob, f.score) for f in wish.expected()]
    assert request.finish_reason == request.beam_result.hypotheses[0].finish_reason


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), st.lists(beam_wishes(), min_size=1, max_size=3), st.lists(wishes(), max_size=3))
def test_what_is_found_does_not_depend_on_the_scheduler(
    config: SchedulerConfig, wanted: list[BeamWish], beside: list[Wish]
):
    # cases BS-01, SC-01
    # The runner asserts in every step that every slot it reads holds what it should.
    runner = FakeRunner(Scheduler(config), vocab=VOCAB)
    searches = [wish.request(f"search{number}", 2 * number) for number, wish in enumerate(wanted)]
    families = [wish.family(f"family{number}", 2 * number + 1) for number, wish in enumerate(beside)]
    for leader in [*searches, *(family[0] for family in families)]:
        runner.add(leader)
    outputs = runner.run(max_steps=5000)
    for wish, request in zip(wanted, searches, strict=True):
        check_found(request, wish)
        assert outputs.count((request, [])) == 1
    for family in families:
        for request in family:
            check_tokens(request)
    assert is_idle(runner.scheduler)
    stats = runner.scheduler.stats()
    assert (stats.num_slots_allocated, stats.num_running, stats.num_waiting) == (0, 0, 0)


WIDE = BeamWish((0, 1, 2, 3, 0, 1), 6, 12, 1.0, "never", ())


@pytest.mark.parametrize("changes", [{"num_blocks": 6}, {"num_blocks": 6, "num_host_blocks": 8}, {"max_num_seqs": 2}])
@pytest.mark.parametrize("caching", [True, False])
def test_more_beams_than_there_is_room_for(changes: dict[str, Any], caching: bool):
    # Each of 6 beams grows to 18 tokens, in 24 slots or on 2 seats.
    mode = "swap" if "num_host_blocks" in changes else "recompute"
    scheduler = make_scheduler(enable_prefix_caching=caching, preemption_mode=mode, **changes)
    runner = FakeRunner(scheduler, vocab=VOCAB)
    request = WIDE.request("wide")
    runner.add(request)
    runner.run(max_steps=500)
    check_found(request, WIDE)
    assert is_idle(scheduler)


def test_beams_share_the_blocks_of_what_they_have_in_common():
    scheduler = make_scheduler(num_blocks=64)
    runner = FakeRunner(scheduler, vocab=VOCAB)
    wish = BeamWish((0, 1, 2, 3) * 4, 4, 3, 1.0, False, ())
    request = wish.request("search")
    runner.add(request)
    runner.step()
    assert scheduler.num_running == 4
    tables = [scheduler.kv.block_ids(beam) for beam in scheduler.running_requests()]
    assert tables == [tables[0]] * 4
    assert scheduler.stats().num_free_blocks == 64 - 4
    runner.run()
    assert request.beam_result is not None
    # After each of two steps a table has 5 blocks, of which the prompt's 4 are everybody's.
    assert request.beam_result.kv_blocks_saved == pytest.approx(1 - 8 / 20)


def test_a_search_whose_logits_are_not_numbers_ends_in_error_alone():
    bad: set[tuple[str, int]] = set()
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler, vocab=VOCAB, poisoned=lambda draw: (draw.request_id[0], draw.position) in bad)
    wish = BeamWish((0, 1), 3, 8, 1.0, False, ())
    request, other = wish.request("search"), make_request("other", [4], 8, arrival=1)
    runner.add(request)
    runner.add(other)
    for _ in range(3):
        runner.step()
    bad.add(("s", 5))
    runner.run()
    assert request.finish_reason is FinishReason.ERROR
    assert request.beam_result is not None
    assert [h.finish_reason for h in request.beam_result.hypotheses] == ["error"] * 3
    assert {len(h.token_ids) for h in request.beam_result.hypotheses} == {3}
    check_tokens(other)
    assert is_idle(scheduler)


def test_an_aborted_search_returns_the_best_so_far():
    # case BS-01
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler, vocab=VOCAB)
    request = BeamWish((0, 1), 3, 8, 1.0, False, ()).request("search")
    runner.add(request)
    for _ in range(4):
        runner.step()
    assert scheduler.abort(["search"]) == [request]
    assert request.finish_reason is FinishReason.ABORT
    so_far = BeamWish((0, 1), 3, 4, 1.0, False, ()).expected()
    assert request.beam_result is not None
    assert [tuple(h.token_ids) for h in request.beam_result.hypotheses] == [found.token_ids for found in so_far]
    assert is_idle(scheduler)


def test_a_policy_update_is_refused_while_searches_have_begun():
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler, vocab=VOCAB)
    begun, new = WIDE.request("begun"), WIDE.request("new", 1)
    runner.add(begun)
    runner.step()
    runner.add(new)
    scheduler.preempt_all()
    with pytest.raises(RuntimeError, match="1 beam searches have begun"):
        scheduler.set_policy_version(1)
    assert scheduler.begun_beam_searches() == [begun]
    scheduler.abort(["begun"])
    scheduler.set_policy_version(1)
    runner.run()
    check_found(new, WIDE)
    spans = [span for request in runner.requests.values() if request.group_id == "new" for span in request.policy_spans]
    assert {version for version, _ in spans} == {1}


class Interruptions(RuleBasedStateMachine):
    """Searches and ordinary requests come and go while the scheduler steps, forgets, and changes its policy."""

    @initialize(config=configs())
    def start(self, config: SchedulerConfig) -> None:
        self.runner = FakeRunner(Scheduler(config), vocab=VOCAB)
        self.scheduler = self.runner.scheduler
        self.searches: list[tuple[Request, BeamWish]] = []
        self.requests: list[Request] = []
        self.number = 0

    @rule(wish=beam_wishes())
    def add_search(self, wish: BeamWish) -> None:
        request = wish.request(f"search{self.number}", self.number)
        self.number += 1
        self.searches.append((request, wish))
        self.runner.add(request)

    @rule(wish=wishes())
    def add_others(self, wish: Wish) -> None:
        family = wish.family(f"family{self.number}", self.number)
        self.number += 1
        self.requests += family
        self.runner.add(family[0])

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.runner.step()

    @precondition(lambda self: self.searches)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        request, _ = data.draw(st.sampled_from(self.searches))
        had_ended = request.is_finished
        plan = self.scheduler.schedule() if in_flight else None
        result = self.runner.execute(plan) if plan is not None else None
        assert self.scheduler.abort([request.group_id]) == ([] if had_ended else [request])
        if plan is not None and result is not None:
            updated = [member for member, _ in self.scheduler.update(plan, result)]
            assert request not in updated

    @rule()
    def forget_a_plan(self) -> None:
        self.scheduler.schedule()
        self.scheduler.preempt_all()

    @rule()
    def fail_while_a_result_is_taken(self) -> None:
        plan = self.scheduler.schedule()
        result = self.runner.execute(plan)
        tops = result.top_logprobs
        result.top_logprobs = {draw: tops[draw] for draw in tops if 2 * draw < len(plan.draws)}
        if tops and not result.top_logprobs:  # that reads as if nobody had asked for any
            result.top_logprobs = {len(plan.draws): tops[max(tops)]}
        try:
            self.scheduler.update(plan, result)
        except KeyError:
            self.scheduler.preempt_all()

    @rule(keep=st.booleans())
    def update_the_policy(self, keep: bool) -> None:
        self.scheduler.abort([request.request_id for request in self.scheduler.begun_beam_searches()])
        if not keep:
            self.scheduler.preempt_all()
        self.scheduler.set_policy_version(self.scheduler.policy_version + 1, keep_kv=keep)

    @invariant()
    def nothing_is_read_that_was_not_written(self) -> None:
        self.runner.audit()
        for request in self.requests:
            check_tokens(request, complete=request.is_finished)
        for request, wish in self.searches:
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                check_found(request, wish)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(max_steps=5000)
            self.nothing_is_read_that_was_not_written()
            assert all(request.is_finished for request, _ in self.searches)
            assert is_idle(self.scheduler)


TestInterruptions = Interruptions.TestCase
TestInterruptions.settings = settings(max_examples=20, stateful_step_count=20)
