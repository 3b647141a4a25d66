"""Drafts change how many steps a request takes, and nothing else: whatever they guess, and whatever comes between."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.core.scheduler import Scheduler, SchedulerConfig
from rollout.core.speculation import Drafter, Guess, Speculation
from rollout.request import FinishReason, Request
from rollout.sampling_options import RepetitionDetectionParams
from rollout.sampling_params import SamplingParams
from tests.core.test_scheduler_properties import (
    VOCAB,
    Interruptions,
    Wish,
    check_tokens,
    configs,
    wishes,
)
from tests.support.core_requests import is_idle, make_family, make_request, shape
from tests.support.fake_runner import FakeRunner, expected_output, next_token


class Oracle:
    """Right about each token with a probability; the others are those that nobody draws."""

    def __init__(self, request: Request, rightness: float, vocab: int = VOCAB) -> None:
        self.request = request
        self.rightness = rightness
        self.vocab = vocab
        self.random = random.Random(request.request_id)
        self.closed_with: list[int] | None = None

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        assert token_ids == self.request.token_ids and self.closed_with is None
        prefix = list(token_ids)
        drafts: list[int] = []
        for _ in range(most if self.rightness == 1.0 else self.random.randint(most // 2, most)):
            token_id = next_token(tuple(prefix), self.request.seed, self.request.sample_index, self.vocab)
            if self.random.random() >= self.rightness:
                token_id = self.vocab
            prefix.append(token_id)
            drafts.append(token_id)
        return drafts

    def close(self, token_ids: list[int]) -> None:
        self.closed_with = list(token_ids)


class Branching(Oracle):
    """Guesses in the place of its drafts, too: the right token, with the probability that a draft has, and others."""

    def guess(
        self, token_ids: list[int], most: int, least_chance: float, most_alternatives: int
    ) -> tuple[list[Guess], list[Guess]]:
        drafts = [Guess(token_id, 0.9, place) for place, token_id in enumerate(self.propose(token_ids, most))]
        alternatives: list[Guess] = []
        for place, draft in enumerate(drafts):
            prefix = (*token_ids, *(guess.token_id for guess in drafts[:place]))
            right = next_token(prefix, self.request.seed, self.request.sample_index, self.vocab)
            others = {right, self.random.randrange(self.vocab)} if self.random.random() < self.rightness else set()
            alternatives += [Guess(other, 0.5, place) for other in sorted({*others, self.vocab + 1} - {draft.token_id})]
        self.random.shuffle(alternatives)
        return drafts, alternatives[:most_alternatives]

    def saw(self, position: int, token_id: int, likely: list[int], shares: list[float]) -> None:
        raise AssertionError("the fake runner notes nothing")


def branch(rightness: float, most_drafts: int = 4, most_alternatives: int = 4, vocab: int = VOCAB) -> Speculation:
    return Speculation(
        lambda request: Branching(request, rightness, vocab), most_drafts, 8, 1.0, most_alternatives=most_alternatives
    )


def speculate(
    rightness: float, most_drafts: int = 4, most_sequences: int = 8, vocab: int = VOCAB, rate: float = 1.0
) -> Speculation:
    return Speculation(lambda request: Oracle(request, rightness, vocab), most_drafts, most_sequences, rate)


class Constant:
    """Guesses one token for ever."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return [self.token_id] * most

    def close(self, token_ids: list[int]) -> None:
        pass


def check_wishes(config: SchedulerConfig, wanted: list[Wish], speculation: Speculation) -> None:
    """Every request ends with the tokens that it has without speculation."""
    runner = FakeRunner(Scheduler(config, speculation), vocab=VOCAB)
    requests: list[Request] = []
    for number, wish in enumerate(wanted):
        family = wish.family(str(number), arrival=number)
        runner.add(family[0])
        requests += family
    runner.run(max_steps=5000)
    for request in requests:
        assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        check_tokens(request)
    assert is_idle(runner.scheduler)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    configs(),
    st.lists(wishes(), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.integers(1, 16),
    st.integers(1, 8),
)
def test_tokens_do_not_depend_on_drafts(
    config: SchedulerConfig, wanted: list[Wish], rightness: float, most_drafts: int, most_sequences: int
):
    speculation = speculate(rightness, most_drafts, most_sequences)
    check_wishes(config, wanted, speculation)
    assert all(map(int.__le__, speculation.num_accepted, speculation.num_drafted))
    if rightness == 0.0:
        assert sum(speculation.num_accepted) == 0


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    configs(),
    st.lists(wishes(), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.4, 0.7, 1.0]),
    st.integers(1, 6),
    st.integers(1, 8),
)
def test_tokens_do_not_depend_on_guesses_in_the_place_of_drafts(
    config: SchedulerConfig, wanted: list[Wish], rightness: float, most_drafts: int, most_alternatives: int
):
    speculation = branch(rightness, most_drafts, most_alternatives)
    check_wishes(config, wanted, speculation)
    tried, right = speculation.alternatives_tried_and_right
    assert right <= tried and (rightness or not right)


def test_a_guess_in_the_place_of_a_wrong_draft_brings_the_token_behind_it():
    """Drafts are never right, guesses in their places always: two tokens a step, and one row more in the next."""
    request = make_request("a", [1, 2, 3], max_tokens=41)
    drafter = Branching(request, 1.0, 50)
    drafter.propose = lambda token_ids, most: [50] * most
    speculation = Speculation(lambda request: drafter, 1, 8, 1.0, most_alternatives=3)
    runner, num_steps = run(request, speculation, vocab=50)
    assert request.output_token_ids == expected_output(request, 50, 64)
    assert 21 <= num_steps <= 23  # the prompt's, and one for two tokens, until there is no room for all guesses
    assert speculation.alternatives_tried_and_right[1] >= 18
    assert runner.num_forward_tokens <= 3 + 20 * (2 + 1 + 3)


class InterruptedAlternatives(Interruptions):
    """The same requests and what comes between, with guesses in the place of drafts."""

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return Scheduler(config, branch(0.6))


TestInterruptedAlternatives = InterruptedAlternatives.TestCase
TestInterruptedAlternatives.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class InterruptedDrafts(Interruptions):
    """The same requests, aborts, forks, policy updates and forgotten plans, with drafts of which some are right."""

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return Scheduler(config, speculate(0.8))


TestInterruptedDrafts = InterruptedDrafts.TestCase
TestInterruptedDrafts.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def run(
    request: Request, speculation: Speculation | None, vocab: int = VOCAB, **changes: object
) -> tuple[FakeRunner, int]:
    """A request alone; the number of its steps, too."""
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4, "num_blocks": 32}
    config = SchedulerConfig(**(values | changes))  # type: ignore[arg-type]
    runner = FakeRunner(Scheduler(config, speculation), vocab=vocab)
    runner.add(request)
    num_steps = 0
    while runner.scheduler.has_unfinished():
        runner.step()
        num_steps += 1
    return runner, num_steps


def test_right_drafts_save_steps_and_are_counted_by_their_place():
    request = make_request("a", [1, 2, 3], max_tokens=31)
    speculation = speculate(1.0, vocab=50)
    _, num_steps = run(request, speculation, vocab=50)
    assert request.output_token_ids == expected_output(request, 50, 64)
    assert num_steps < 16 and len(request.token_ids) == 34
    assert sum(speculation.num_accepted) == 31 - num_steps
    assert speculation.num_accepted == speculation.num_drafted
    assert speculation.num_drafted == sorted(speculation.num_drafted, reverse=True)


def test_wrong_drafts_are_given_up_and_tried_again_now_and_then():
    request = make_request("a", [1, 2, 3], max_tokens=60)
    speculation = speculate(0.0, vocab=50, rate=0.7)
    _, num_steps = run(request, speculation, vocab=50)
    assert request.output_token_ids == expected_output(request, 50, 64)
    assert num_steps == 60
    assert sum(speculation.num_accepted) == 0
    assert 10 < sum(speculation.num_drafted) < 30  # not 4 * 59


def test_a_full_batch_is_served_without_drafts():
    config = SchedulerConfig(8, 64, 64, 4, 64)
    runner = FakeRunner(Scheduler(config, speculate(1.0, most_sequences=3)), vocab=VOCAB)
    for name in "abcd":
        runner.add(make_request(name, [1, 2], max_tokens=8 if name == "a" else 20))
    lengths = {length for _ in range(8) for _, _, length in shape(runner.step_plan())[0:4]}
    assert lengths == {1, 2}  # 2 is the prompt
    assert max(length for _, _, length in shape(runner.step_plan())) > 1
    runner.run()


# case SD-04
@pytest.mark.parametrize("max_tokens", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["eos", "stop", "none"])
def test_an_accepted_run_ends_where_the_request_does(max_tokens: int, kind: str):
    plain = make_request("a", [1, 2, 3], max_tokens=8)
    tokens = expected_output(plain, 50, 64)
    assert len(set(tokens)) == 8
    ends = frozenset(tokens[2:3])
    fields = {} if kind == "none" else {"eos_token_ids" if kind == "eos" else "stop_token_ids": ends}
    results = []
    for speculation in (None, speculate(1.0, 8, vocab=50)):
        request = make_request("a", [1, 2, 3], max_tokens=max_tokens, **fields)
        runner, num_steps = run(request, speculation, vocab=50)
        assert num_steps == (2 if speculation is not None and max_tokens > 1 else request.num_output_tokens)
        results.append((request.output_token_ids, request.finish_reason, request.stop_reason, *request.arrays))
        assert is_idle(runner.scheduler)
    assert results[0] == results[1]
    stops = kind != "none" and max_tokens >= 3
    assert results[0][:2] == (
        tokens[: 3 if stops else max_tokens],
        FinishReason.STOP if stops else FinishReason.LENGTH,
    )


@pytest.mark.parametrize("max_model_len", [5, 6, 7, 8])
def test_no_draft_goes_beyond_the_longest_sequence(max_model_len: int):
    request = make_request("a", [1, 2, 3], max_tokens=max_model_len - 3)
    speculation = speculate(1.0, 16)
    run(request, speculation, max_model_len=max_model_len, num_blocks=2)
    assert request.output_token_ids == expected_output(request, VOCAB, max_model_len)
    assert request.finish_reason is FinishReason.LENGTH


def test_repetition_ends_a_sample_within_an_accepted_run():
    outputs = []
    for speculation in (None, Speculation(lambda request: Constant(0), 8, 8, rate=1.0)):
        params = SamplingParams(max_tokens=30, repetition_detection=RepetitionDetectionParams(1, 1, 5))
        request = Request("a", "a", [1, 2], params, seed=0, sample_index=0, max_tokens=30)
        run(request, speculation, vocab=1)
        outputs.append((request.output_token_ids, request.finish_reason))
    assert outputs[0] == outputs[1] == ([0] * 5, FinishReason.REPETITION)


def test_drafts_take_only_what_others_leave():
    # Two requests of which each needs the last free blocks sooner or later: the drafts of one never preempt the other.
    for num_blocks in range(6, 14):
        preempted = []
        for speculation in (None, speculate(0.5, 16)):
            config = SchedulerConfig(4, 12, 40, 2, max(num_blocks, 12))
            runner = FakeRunner(Scheduler(config, speculation), vocab=VOCAB)
            requests = [make_request(name, [1, 2, 3], max_tokens=9) for name in "ab"]
            for request in requests:
                runner.add(request)
            runner.run()
            preempted.append(sum(request.num_preemptions for request in requests))
            for request in requests:
                check_tokens(request)
        assert preempted[0] == 0 and preempted[1] == 0


def test_drafts_share_the_token_budget():
    config = SchedulerConfig(4, 5, 40, 4, 40)
    speculation = speculate(1.0, 16)
    runner = FakeRunner(Scheduler(config, speculation), vocab=VOCAB)
    for name in "ab":
        runner.add(make_request(name, [1, 2], max_tokens=10))
    plans = [shape(runner.step_plan()) for _ in range(2)]
    assert [length for _, _, length in plans[0]] == [2, 2]
    assert [length for _, _, length in plans[1]] == [4, 1]  # both have a token, and the first takes what is left
    runner.run()


def test_rejected_tokens_leave_no_block_and_no_hash_behind():
    config = SchedulerConfig(4, 64, 40, 2, 40)
    speculation = Speculation(lambda request: Constant(49), 8, 8, rate=1.0)
    runner = FakeRunner(Scheduler(config, speculation), vocab=49)
    request = make_request("a", [1, 2, 3], max_tokens=10)
    runner.add(request)
    runner.step()
    plan = runner.scheduler.schedule()
    assert [len(sequence.token_ids) for sequence in plan.sequences] == [9]
    assert len(runner.scheduler.kv.block_ids(request)) == 6
    runner.scheduler.check_integrity()
    runner.scheduler.update(plan, runner.execute(plan))
    assert request.num_output_tokens == 2 and request.num_computed_tokens == 4
    assert len(runner.scheduler.kv.block_ids(request)) == 2
    assert len(runner.scheduler.kv.pool.index) == 2
    runner.audit()
    runner.run()


def test_forced_tokens_are_not_guessed_and_what_looks_at_its_tokens_is():
    asked: set[str] = set()

    class Asked(Oracle):
        def propose(self, token_ids: list[int], most: int) -> list[int]:
            asked.add(self.request.request_id)
            return super().propose(token_ids, most)

    config = SchedulerConfig(4, 64, 40, 4, 40)
    runner = FakeRunner(Scheduler(config, Speculation(lambda request: Asked(request, 1.0), 4, 8)), vocab=VOCAB)
    penalised = SamplingParams(max_tokens=6, presence_penalty=1.0)
    for name, params in (("penalised", penalised), ("plain", SamplingParams(max_tokens=6))):
        runner.add(Request(name, name, [1, 2], params, seed=0, sample_index=0, max_tokens=6))
    forced = make_family("forced", [1, 2], max_tokens=6, forced=[0, 1, 2, 3, 4, 0])[0]
    runner.add(forced)
    runner.run()
    assert asked == {"plain", "penalised"}
    assert forced.output_token_ids == [0, 1, 2, 3, 4, 0]


def test_a_bad_draw_fails_only_where_it_would_without_drafts():
    def is_poisoned(at: int) -> Callable[..., bool]:
        return lambda draw: draw.position == at

    for at in range(3, 9):
        for rightness in (0.0, 1.0):
            speculation = speculate(rightness, 8, vocab=50)
            config = SchedulerConfig(4, 64, 64, 4, 32)
            runner = FakeRunner(Scheduler(config, speculation), vocab=50, poisoned=is_poisoned(at))
            request = make_request("a", [1, 2, 3], max_tokens=10)
            runner.add(request)
            runner.run()
            plain = make_request("a", [1, 2, 3], max_tokens=10)
            assert request.finish_reason is FinishReason.ERROR
            assert request.output_token_ids == expected_output(plain, 50, 64)[: at - 3]
            assert list(map(len, request.arrays)) == [at - 3] * 4


def test_a_draw_that_fails_behind_drafts_is_made_again_with_known_tokens():
    # What a guess brings about is no reason to end a request: here everything behind one fails, as in a user's function
    # that does not know such tokens.
    request = make_request("a", [1, 2, 3], max_tokens=12)
    speculation = speculate(1.0, 8, vocab=50)
    config = SchedulerConfig(4, 64, 64, 4, 32)
    runner = FakeRunner(Scheduler(config, speculation), 50, poisoned=lambda draw: bool(draw.draft_token_ids))
    runner.add(request)
    runner.run()
    assert request.output_token_ids == expected_output(request, 50, 64)
    assert request.finish_reason is FinishReason.LENGTH
    assert list(map(len, request.arrays)) == [12] * 4
    assert is_idle(runner.scheduler)


# case SD-02
@pytest.mark.parametrize("rightness", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("end", [0, 1, 4, 9, 11])
def test_a_complete_grammar_ends_a_sample_within_an_accepted_run(rightness: float, end: int):
    results = []
    for speculation in (None, speculate(rightness, 8, vocab=50)):
        request = make_request("a", [1, 2, 3], max_tokens=12)
        config = SchedulerConfig(4, 64, 64, 4, 32)
        runner = FakeRunner(Scheduler(config, speculation), 50, completing=lambda draw: draw.position == 3 + end)
        runner.add(request)
        outputs = runner.run()
        assert [token for _, new in outputs for token in new] == request.output_token_ids
        results.append((request.output_token_ids, request.finish_reason, request.stop_reason, *request.arrays))
        assert is_idle(runner.scheduler)
    assert results[0] == results[1]
    assert results[0][1] is FinishReason.STOP and len(results[0][0]) == end + 1


def test_drafters_hear_of_the_end_of_every_sample():
    made: list[Oracle] = []

    def make(request: Request) -> Drafter:
        made.append(Oracle(request, 0.5))
        return made[-1]

    config = SchedulerConfig(2, 64, 40, 4, 40)
    scheduler = Scheduler(config, Speculation(make, 4, 1))
    runner = FakeRunner(scheduler, vocab=VOCAB)
    family = make_family("a", [1, 2], max_tokens=6, n=3)
    runner.add(family[0])
    for _ in range(4):
        runner.step()
    scheduler.abort([family[1].request_id])
    runner.run()
    closed = {oracle.request.request_id: oracle.closed_with for oracle in made}
    assert closed == {request.request_id: request.token_ids for request in family}


@pytest.mark.parametrize("max_tokens", [3, 4])
def test_drafts_that_end_samples_count_as_right(max_tokens: int):
    # Where all samples are short, most right drafts are the last token of one.
    speculation = speculate(0.8, vocab=50, rate=0.7)
    runner = FakeRunner(Scheduler(SchedulerConfig(4, 64, 300, 16, 64), speculation), vocab=50)
    for number in range(300):
        runner.add(make_request(f"short{number}", [1, 2], max_tokens=max_tokens, seed=number))
        runner.run()
    assert sum(speculation.num_drafted) > 100
    lone = make_request("long", [3], max_tokens=100)
    before = sum(speculation.num_accepted)
    runner.add(lone)
    runner.run()
    assert sum(speculation.num_accepted) - before > 40


def test_a_request_alone_is_tried_again_every_24_steps():
    request = make_request("a", [1, 2, 3], max_tokens=150)
    speculation = speculate(0.0, vocab=50, rate=0.0)
    run(request, speculation, vocab=50, max_model_len=200, num_blocks=64)
    assert request.num_output_tokens == 150
    assert 5 <= sum(speculation.num_drafted) <= 6


def rows_of_steps(speculation: Speculation, seconds: Callable[[int], float], num_steps: int) -> list[int]:
    """A request alone, with the time of each step a function of its rows; the rows of every step that decodes."""
    runner = FakeRunner(Scheduler(SchedulerConfig(4, 64, 2000, 16, 200), speculation), vocab=50)
    runner.add(make_request("a", [1], max_tokens=1900))
    rows: list[int] = []
    for _ in range(num_steps):
        before = sum(len(request.token_ids) for request in runner.requests.values())
        rows.append(runner.step_plan().num_scheduled_tokens)
        num_tokens = sum(len(request.token_ids) for request in runner.requests.values()) - before
        speculation.took(1, rows[-1], num_tokens, seconds(rows[-1]))
    return rows[1:]


def watching(rightness: float) -> Speculation:
    return Speculation(lambda request: Oracle(request, rightness, 50), 4, 8, rate=1.0, watches_cost=True)


def test_drafts_stay_where_steps_with_them_are_faster_a_token():
    # All of 4 drafts are right: 5 tokens for the time of 2.
    speculation = watching(1.0)
    rows = rows_of_steps(speculation, lambda count: 1.0 if count == 1 else 2.0, 80)
    assert rows[:2] == [1] * 2 and rows[2:35] == [5] * 33 and rows[35:37] == [1, 5]  # a plain one now and then
    assert speculation.seconds_won_and_lost is not None
    won, lost = speculation.seconds_won_and_lost
    assert (won, lost) == (pytest.approx(3.0 * (rows.count(5) - 1)), 0.0)  # the first of a kind does not count


def test_drafts_stop_where_steps_with_them_are_slower_a_token_and_are_tried_again_now_and_then():
    # All of 4 drafts are right, and still: 5 tokens for the time of 6.
    speculation = watching(1.0)
    rows = rows_of_steps(speculation, lambda count: 0.01 if count == 1 else 0.06, 250)
    assert 1 < rows.count(5) < 8
    assert speculation.seconds_won_and_lost is not None
    won, lost = speculation.seconds_won_and_lost
    assert won == 0.0 and 0.0 < lost < 0.05 + 0.01 * 0.01 * len(rows)


class Knowing(Oracle):
    """Right with the chance that it tells."""

    asked = 0

    def guess(
        self, token_ids: list[int], most: int, least_chance: float, most_alternatives: int
    ) -> tuple[list[Guess], list[Guess]]:
        self.asked += 1
        proposed = enumerate(self.propose(token_ids, most))
        guesses = [Guess(token_id, self.rightness ** (place + 1), place) for place, token_id in proposed]
        return [guess for guess in guesses if guess.chance >= least_chance], []

    def saw(self, position: int, token_id: int, likely: list[int], shares: list[float]) -> None:
        raise AssertionError("the fake runner notes nothing")


def test_chances_that_a_drafter_tells_decide_how_many_drafts_there_are():
    for rightness, longest in ((0.9, 8), (0.5, 2), (0.21, 1)):
        request = make_request("a", [1, 2, 3], max_tokens=50)
        drafters: list[Knowing] = []

        def make(request: Request, rightness: float = rightness, drafters: list[Knowing] = drafters) -> Drafter:
            drafters.append(Knowing(request, rightness, 50))
            return drafters[-1]

        speculation = Speculation(make, 8, 8, rate=0.0)
        run(request, speculation, vocab=50)
        assert request.output_token_ids == expected_output(request, 50, 64)
        assert speculation.num_drafted[longest - 1] > 0 and not any(speculation.num_drafted[longest:])
        assert len(drafters) == 1 and drafters[0].closed_with == request.token_ids


def test_guesses_that_nobody_wants_are_asked_for_now_and_then():
    request = make_request("a", [1, 2, 3], max_tokens=60)
    drafter = Knowing(request, 0.1, 50)
    speculation = Speculation(lambda request: drafter, 4, 8)
    run(request, speculation, vocab=50)
    assert not any(speculation.num_drafted)
    assert 8 < drafter.asked < 20  # of 58 steps
