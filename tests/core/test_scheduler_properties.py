"""What must hold whatever the sizes, modes and interruptions: tokens, blocks, order, and that everything ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.core.schedule import join
from rollout.core.scheduler import Scheduler, SchedulerConfig
from rollout.request import FinishReason, Request
from tests.support.core_requests import continue_from, make_family
from tests.support.fake_runner import Drafts, FakeRunner, expected_output, fake_logprob, fake_top_logprobs

MAX_MODEL_LEN = 40
VOCAB = 5


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    """Any scheduler whose pool can hold the longest request."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    least = -(-MAX_MODEL_LEN // block_size)
    return SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 50)),
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        num_blocks=draw(st.integers(least, 3 * least)),
        num_host_blocks=draw(st.integers(0, 2 * least)),
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
    )


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for. Few roots and few tokens, so that prompts share prefixes and samples coincide."""

    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    min_tokens: int
    seed: int
    priority: int
    ends: tuple[int, ...]
    cache_salt: str | None
    scores_prompt: bool
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    forced: tuple[int, ...] = ()

    def family(self, name: str, arrival: int) -> list[Request]:
        return make_family(
            name,
            self.prompt,
            max_tokens=self.max_tokens,
            n=self.n,
            arrival=arrival,
            seed=self.seed,
            min_tokens=min(self.min_tokens, max(self.max_tokens, 1)),
            forced=self.forced or None,
            priority=self.priority,
            eos_token_ids=frozenset(self.ends[:1]),
            stop_token_ids=frozenset(self.ends[1:]),
            cache_salt=self.cache_salt,
            scores_prompt=self.scores_prompt or self.max_tokens == 0,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs if self.scores_prompt else None,
        )


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    root = draw(st.sampled_from([(0, 1, 2, 3) * 5, (4,) * 20]))
    tail = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
    prompt = (*root[: draw(st.integers(1, 20))], *tail)
    max_tokens = draw(st.integers(0, MAX_MODEL_LEN - len(prompt)))
    num_forced = draw(st.integers(0, max_tokens)) if draw(st.booleans()) else 0
    return Wish(
        prompt=prompt,
        n=draw(st.integers(1, 5)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 1)),
        priority=draw(st.integers(-1, 1)),
        ends=tuple(draw(st.sampled_from([(), (0,), (0, 3)]))),
        cache_salt=draw(st.sampled_from([None, None, "salt"])),
        scores_prompt=draw(st.booleans()),
        forced=tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=num_forced, max_size=num_forced))),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, 0, 2])),
    )


def check_tokens(request: Request, complete: bool = True) -> None:
    """The request has the tokens, and one value of each array for each, that it gets when it is alone."""
    expected = expected_output(request, VOCAB, MAX_MODEL_LEN)
    output = request.output_token_ids
    assert output == (expected if complete else expected[: len(output)])
    tokens, start = [*request.prompt_token_ids, *output], request.num_prompt_tokens
    logprobs = [fake_logprob(tuple(tokens[:end]), tokens[end]) for end in range(start, len(tokens))]
    assert list(request.raw_logprobs) == logprobs
    assert len(request.sampled_logprobs) == len(request.kept_mass) == len(request.entropy) == len(output)
    if request.scores_prompt and (complete or output):
        scores = [fake_logprob(tuple(tokens[:end]), tokens[end]) for end in range(1, start)]
        assert np.asarray(request.prompt_logprobs).tolist() == scores
    check_top_logprobs(request, complete)


def check_top_logprobs(request: Request, complete: bool) -> None:
    """Of each token whose neighbours were asked for there is one row: that of its prefix, wherever it was computed."""
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    start, params = request.num_prompt_tokens, request.params
    parts = [(request.top_logprobs, params.logprobs, params.logprob_token_ids or (), range(start, len(tokens)))]
    if request.scores_prompt and (complete or len(tokens) > start):
        parts.append((request.prompt_top_logprobs, params.prompt_logprobs, (), range(1, start)))
    for columns, num_top, chosen, places in parts:
        assert (columns is None) == (num_top is None)
        if columns is None or num_top is None:
            continue
        assert len(columns) == len(places) and len(columns.packed) == len(places) * columns.width
        if places:
            found = columns.rows()
            expected = join([fake_top_logprobs(tuple(tokens[:end]), tokens[end], num_top, chosen) for end in places])
            assert (found.num_top, found.num_chosen) == (num_top, len(chosen))
            np.testing.assert_array_equal(found.packed, expected.packed)


def run_all(config: SchedulerConfig, wanted: list[Wish]) -> tuple[FakeRunner, list[Request]]:
    runner = FakeRunner(Scheduler(config), vocab=VOCAB)
    requests: list[Request] = []
    for number, wish in enumerate(wanted):
        family = wish.family(str(number), arrival=number)
        runner.add(family[0])
        requests += family
    runner.run(max_steps=5000)
    return runner, requests


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), st.lists(wishes(), min_size=1, max_size=6))
def test_tokens_do_not_depend_on_the_scheduler(config: SchedulerConfig, wanted: list[Wish]):
    # case SC-01
    # The runner asserts in every step that every slot it reads holds what it should.
    runner, requests = run_all(config, wanted)
    for request in requests:
        assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        check_tokens(request)
    stats = runner.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_slots_allocated, stats.num_slots_used, stats.num_running, stats.num_waiting) == (0, 0, 0, 0)
    assert runner.scheduler.kv.host_pool.num_free == config.num_host_blocks


def test_a_small_pool_preempts_often_and_changes_nothing():
    # case SC-01
    wish = Wish((0, 1, 2, 3, 0, 1), 4, 30, 0, 0, 0, (), None, True, 3, 2)
    for caching, num_host_blocks in itertools.product([True, False], [0, 12]):
        mode = "swap" if num_host_blocks else "recompute"
        config = SchedulerConfig(8, 16, MAX_MODEL_LEN, 4, 12, num_host_blocks, caching, "fcfs", mode)
        runner, requests = run_all(config, [wish, wish])
        assert max(request.num_preemptions for request in requests) > 2
        for request in requests:
            check_tokens(request)
        assert runner.scheduler.kv.pool.num_free == 12


@settings(max_examples=40, deadline=None)
@given(configs(), st.lists(wishes(), min_size=2, max_size=6))
def test_the_first_in_order_is_never_preempted_and_moves_in_every_step(config: SchedulerConfig, wanted: list[Wish]):
    scheduler = Scheduler(config)
    runner = FakeRunner(scheduler, vocab=VOCAB)
    for number, wish in enumerate(wanted):
        runner.add(wish.family(str(number), arrival=number)[0])
    while scheduler.has_unfinished():
        running = scheduler.running_requests()
        first = running[0] if running else scheduler.waiting_requests()[0]
        before = (first.num_computed_tokens, first.num_preemptions)
        runner.step()
        after = (first.num_computed_tokens, first.num_preemptions)
        assert first.is_finished or (after[0] > before[0] and after[1] == before[1])


class Interruptions(RuleBasedStateMachine):
    """Requests come and go while the scheduler steps, forgets, resets and changes its policy."""

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return Scheduler(config)

    def make_drafter(self, runner: FakeRunner) -> Drafts | None:
        """What guesses for the runner's scheduler, where that has a drafter with weights."""
        return None

    @initialize(config=configs())
    def start(self, config: SchedulerConfig) -> None:
        scheduler = self.make_scheduler(config)
        self.runner = FakeRunner(scheduler, vocab=VOCAB, poisoned=lambda draw: draw.request_id in self.bad)
        self.runner.drafter = self.make_drafter(self.runner)
        self.scheduler = self.runner.scheduler
        self.requests: list[Request] = []
        self.bad: set[str] = set()
        self.num_families = 0
        self.next_version = 1
        self.next_index = 100

    @rule(wish=wishes(), poison=st.integers(0, 9))
    def add(self, wish: Wish, poison: int) -> None:
        family = wish.family(str(self.num_families), arrival=self.num_families)
        self.num_families += 1
        if poison == 0:
            self.bad.add(family[-1].request_id)
        self.runner.add(family[0])
        self.requests += family

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            for request, token_ids in self.runner.step():
                assert request.output_token_ids[len(request.output_token_ids) - len(token_ids) :] == token_ids

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), by_group=st.booleans(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, by_group: bool, in_flight: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        name = request.group_id if by_group else request.request_id
        plan = self.runner.schedule() if in_flight else None
        result = self.runner.execute(plan) if plan is not None else None
        aborted = self.scheduler.abort([name, name])
        assert all(member.finish_reason is FinishReason.ABORT for member in aborted)
        assert self.scheduler.abort([name]) == []
        if plan is not None and result is not None:
            updated = {member.request_id for member, _ in self.scheduler.update(plan, result)}
            assert updated.isdisjoint(member.request_id for member in aborted)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data: st.DataObject, n: int) -> None:
        """A branch of a sample that waits, runs or has ended, from anywhere in its output."""
        parent = data.draw(st.sampled_from(self.requests))
        last = min(parent.num_output_tokens, parent.max_tokens - 1)
        last -= parent.finish_reason is FinishReason.STOP and last == parent.num_output_tokens
        if last < 0:
            return
        at = data.draw(st.integers(0, last))
        self.next_index += n
        self.go_on(parent, at, range(self.next_index - n, self.next_index), branch_position=at, forked_from=parent)

    @precondition(lambda self: any(request.finish_reason is FinishReason.ABORT for request in self.requests))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        ended = [request for request in self.requests if request.finish_reason is FinishReason.ABORT]
        request = data.draw(st.sampled_from(ended))
        fields = {name: getattr(request, name) for name in ("branch_position", "scores_prompt")}
        fields["prompt_logprobs"] = request.prompt_logprobs[:]
        top = request.prompt_top_logprobs
        fields["prompt_top_logprobs"] = None if top is None else top.copy()
        self.go_on(request, request.num_output_tokens, [request.sample_index], **fields)

    def go_on(self, parent: Request, at: int, sample_indices: Sequence[int], **fields: Any) -> None:
        name = str(self.num_families)
        family = continue_from(parent, name, at, sample_indices, arrival=self.num_families, **fields)
        self.num_families += 1
        self.runner.add(family[0])
        self.requests += family

    @rule()
    def forget_a_plan(self) -> None:
        self.runner.schedule()
        self.scheduler.preempt_all()

    @rule()
    def reset_the_prefix_cache(self) -> None:
        pool = self.scheduler.kv.pool
        assert self.scheduler.reset_prefix_cache() == (pool.num_free == pool.num_blocks)

    @rule(mode=st.sampled_from(["abort", "recompute", "keep"]), back=st.booleans())
    def update_the_policy(self, mode: str, back: bool) -> None:
        """`back`: the update fails once the new version is in force, and the old one is taken up again."""
        before, held = self.scheduler.policy_version, self.scheduler.running_requests()
        if mode == "abort":
            self.scheduler.abort([request.request_id for request in self.scheduler.unfinished()])
        elif mode == "recompute":
            self.scheduler.preempt_all()
        for version in [self.next_version, before] if back else [self.next_version]:
            self.scheduler.set_policy_version(version, keep_kv=mode == "keep")
            assert len(self.scheduler.kv.pool.index) == 0
        if mode == "keep":
            assert self.scheduler.running_requests() == [request for request in held if request.num_output_tokens]
        else:
            assert self.scheduler.kv.pool.num_free == self.scheduler.config.num_blocks
        self.next_version += 1

    @rule(mode=st.sampled_from(["abort", "recompute"]))
    def sleep_and_wake_up(self, mode: str) -> None:
        self.fall_asleep(mode)

    def fall_asleep(self, mode: str) -> None:
        if mode == "abort":
            self.scheduler.abort([request.request_id for request in self.scheduler.unfinished()])
        else:
            self.scheduler.preempt_all()
        assert self.scheduler.reset_prefix_cache()
        self.runner.device.clear()  # whoever reads a slot that was not written again, fails
        self.runner.host.clear()

    @invariant()
    def nothing_is_read_that_was_not_written(self) -> None:
        self.runner.audit()
        stats = self.scheduler.stats()
        assert 0 <= stats.num_slots_used <= stats.num_slots_allocated
        for request in self.requests:
            check_tokens(request, complete=request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH))
            if request.finish_reason is FinishReason.ERROR:
                assert request.request_id in self.bad
            starts = [start for _, start in request.policy_spans]
            versions = [version for version, _ in request.policy_spans]
            assert starts == sorted(set(starts)) and versions == sorted(set(versions))

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.runner.run(max_steps=5000)
        self.nothing_is_read_that_was_not_written()
        assert all(request.is_finished for request in self.requests)
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert self.scheduler.kv.host_pool.num_free == self.scheduler.config.num_host_blocks


TestInterruptions = Interruptions.TestCase
TestInterruptions.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@settings(max_examples=60, deadline=None)
@given(configs(), st.lists(wishes(), min_size=2, max_size=6))
def test_leaves_go_before_roots_whatever_happens(config: SchedulerConfig, wanted: list[Wish]):
    """Every hittable block's parent is hittable after every step: a cached chain never has a hole."""
    runner = FakeRunner(Scheduler(config), vocab=VOCAB)
    for number, wish in enumerate(wanted):
        runner.add(wish.family(str(number), arrival=number)[0])
    size = config.block_size
    while runner.scheduler.has_unfinished():
        runner.step()
        index = runner.scheduler.kv.pool.index
        ends = [runner.device[block.block_id * size + size - 1] for _, block in index.items()]
        chains = {(content.prefix, content.cache_salt) for content in ends}
        for prefix, salt in chains:
            assert len(prefix) == size or (prefix[:-size], salt) in chains
