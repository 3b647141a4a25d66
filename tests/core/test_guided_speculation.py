"""What a grammar says before a step: which guesses it forbids, and which text has to come, so that it is guessed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rollout.core.scheduler import Scheduler, SchedulerConfig
from rollout.core.speculation import Drafter, Speculation
from rollout.request import FinishReason, Request
from rollout.sampling_options import StructuredOutputsParams
from rollout.sampling_params import SamplingParams
from tests.support.core_requests import is_idle, make_request
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_runner import FakeRunner, expected_output, next_token

VOCAB = 50
CONFIG = SchedulerConfig(4, 64, 64, 4, 64, num_draft_blocks=64)


@dataclass
class Grammar:
    """Forbids ids from `VOCAB` on, and knows the text behind every `every`-th token: `length` tokens of it."""

    every: int = 1000
    length: int = 3
    is_right: bool = True
    asked: list[str] = field(default_factory=list)

    def next_tokens(self, request: Request) -> list[int]:
        self.asked.append(request.request_id)
        if request.num_output_tokens % self.every:
            return []
        prefix = list(request.token_ids)
        for _ in range(self.length):
            right = next_token(tuple(prefix), request.seed, request.sample_index, VOCAB)
            prefix.append(right if self.is_right else (right + 1) % VOCAB)
        return prefix[request.num_tokens :]

    def num_allowed(self, request: Request, draft_token_ids: list[int]) -> int:
        self.asked.append(request.request_id)
        return next((i for i, token_id in enumerate(draft_token_ids) if token_id >= VOCAB), len(draft_token_ids))


class Mixed:
    """Its first two guesses are right, the third is one that a grammar forbids."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_asked = 0

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        self.num_asked += 1
        prefix = list(token_ids)
        for _ in range(2):
            prefix.append(next_token(tuple(prefix), self.request.seed, self.request.sample_index, VOCAB))
        return [*prefix[len(token_ids) :], VOCAB, VOCAB, VOCAB][:most]

    def close(self, token_ids: list[int]) -> None:
        pass


def with_grammar(name: str, max_tokens: int = 30) -> Request:
    params = SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(regex="a*"))
    return Request(name, name, [1, 2, 3], params, seed=0, sample_index=0, max_tokens=max_tokens)


def run(request: Request, speculation: Speculation, rightness: float | None = None) -> tuple[FakeRunner, list[int]]:
    """The request alone; the number of guesses of every step that decodes. `rightness` is that of a drafter with
    weights."""
    runner = FakeRunner(Scheduler(CONFIG, speculation), VOCAB)
    if rightness is not None:
        runner.drafter = FakeDrafter(runner.scheduler, runner.requests, VOCAB, rightness)
    runner.add(request)
    lengths = [runner.step_plan().num_scheduled_tokens - 1 for _ in range(60) if runner.scheduler.has_unfinished()]
    assert request.output_token_ids == expected_output(request, VOCAB, 64)
    assert request.finish_reason is FinishReason.LENGTH and is_idle(runner.scheduler)
    return runner, lengths[1:]


def test_guesses_that_a_grammar_forbids_are_not_computed() -> None:
    for guide, expected in ((None, 5), (Grammar(), 2)):
        speculation = Speculation(Mixed, 5, 8, rate=1.0, guide=guide)
        _, lengths = run(with_grammar("a"), speculation)
        assert lengths[0] == expected
        assert (speculation.num_accepted == speculation.num_drafted) == (guide is not None)


def test_a_drafter_with_weights_is_cut_too() -> None:
    speculation = Speculation(None, 5, 8, rate=1.0, guide=Grammar())
    run(with_grammar("a"), speculation, rightness=0.5)  # what is not right is forbidden
    assert speculation.num_accepted == speculation.num_drafted and sum(speculation.num_drafted) > 5


def test_requests_without_a_grammar_are_not_looked_at() -> None:
    guide = Grammar()
    runner, _ = run(with_grammar("a"), Speculation(Mixed, 5, 8, rate=1.0, guide=guide))
    assert set(guide.asked) == {"a"}
    guide.asked.clear()
    run(make_request("b", [1, 2, 3], max_tokens=30), Speculation(Mixed, 5, 8, rate=1.0, guide=guide))
    assert guide.asked == []
    assert is_idle(runner.scheduler)


@pytest.mark.parametrize("has_weights", [False, True])
def test_the_text_that_has_to_come_is_guessed_before_a_drafter_is_asked(has_weights: bool) -> None:
    made: list[Mixed] = []

    def make(request: Request) -> Drafter:
        made.append(Mixed(request))
        return made[-1]

    guide = Grammar(every=1, length=4)
    speculation = Speculation(None if has_weights else make, 5, 8, rate=1.0, guide=guide)
    runner, lengths = run(with_grammar("a", 31), speculation, 0.0 if has_weights else None)
    assert lengths[:-1] == [4] * 5 and speculation.num_accepted == speculation.num_drafted
    assert [drafter.num_asked for drafter in made] == [0] * (not has_weights)
    if has_weights:
        assert isinstance(runner.drafter, FakeDrafter) and runner.drafter.plans == []


def test_a_text_is_never_longer_than_the_drafts_of_a_step_nor_than_its_request() -> None:
    speculation = Speculation(Mixed, 3, 8, rate=1.0, guide=Grammar(every=1, length=20))
    _, lengths = run(with_grammar("a", 30), speculation)
    assert max(lengths) == 3 and sum(length + 1 for length in lengths) == 29


def test_a_text_that_comes_in_other_tokens_is_guessed_no_more_and_the_drafter_is() -> None:
    speculation = Speculation(Mixed, 5, 8, rate=1.0, guide=Grammar(every=1, length=4, is_right=False))
    _, lengths = run(with_grammar("a", 60), speculation)
    assert 4 in lengths[:1] and lengths[-5:-1] == [2] * 4  # of the drafter, whose rate has not suffered


def test_texts_and_guesses_take_turns() -> None:
    speculation = Speculation(Mixed, 5, 8, rate=1.0, guide=Grammar(every=4, length=3))
    _, lengths = run(with_grammar("a", 49), speculation)
    assert lengths[:6] == [2, 3, 3, 3, 3, 3]
