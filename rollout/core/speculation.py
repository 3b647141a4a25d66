"""Which sequences get how many draft tokens: as many as lately were right, and none where there is no room.

A draft is verified by the draw that it guesses: the token at a position is a pure function of the tokens before it, and
of the request's noise there. So a step may compute rows for several guessed tokens, and draw from every row; what was
drawn up to the first draft that differs is what would have been drawn one step at a time, and the rest is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollout.request import Request

_LEAST_CHANCE = 0.2  # that a draft is right, below which its row is not worth computing
_WEIGHT = 0.125  # of the last draft in the average of those that were right
_PROBE_EVERY = 24  # steps after which a sequence whose drafts were wrong is tried again
_FIRST_STEPS = 4  # of a kind, before two kinds are compared
_STEPS_BETWEEN_COMPARISONS = 128
_SHORTEST_REST, _LONGEST_REST = 32, 1024  # steps without drafts, where those with drafts were slower a token


class Drafter(Protocol):
    """Guesses the tokens of one sample."""

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` guesses of what follows `token_ids`, which has only grown since the last call."""
        ...

    def close(self, token_ids: list[int]) -> None:
        """The sample has ended with these tokens."""
        ...


@dataclass(slots=True)
class _Sample:
    """What is known of one request's drafts."""

    drafter: Drafter | None  # None where a drafter with weights guesses for all
    rate: float  # of the drafts that were looked at, the share that was right; exponential average
    num_skipped: int = 0  # steps without drafts since they seemed worth nothing


@dataclass(slots=True)
class _Pace:
    """What steps of so many sequences have cost lately, and what those with drafts have brought."""

    plain_seconds: float = 0.0  # of a step without drafts; averages, 0 where nothing is known
    seconds: float = 0.0  # of a step with drafts, since the last rest
    tokens: float = 0.0  # that it brought
    num_drafting: int = 0  # such steps since the last rest
    num_to_rest: int = _FIRST_STEPS  # steps that are still made without drafts
    rest: int = _SHORTEST_REST  # how many the next time

    def took(self, num_sequences: int, has_drafts: bool, num_tokens: int, seconds: float) -> None:
        if not has_drafts:
            self.plain_seconds = _averaged(self.plain_seconds, seconds)
            return
        self.seconds, self.tokens = _averaged(self.seconds, seconds), _averaged(self.tokens, num_tokens)
        self.num_drafting += 1
        if self.num_drafting < _FIRST_STEPS or not self.plain_seconds:
            return
        if self.tokens * self.plain_seconds < num_sequences * self.seconds:
            self._stop_for(self.rest)
            self.rest = min(2 * self.rest, _LONGEST_REST)
        elif self.num_drafting >= _STEPS_BETWEEN_COMPARISONS:
            self._stop_for(_FIRST_STEPS // 2)
            self.rest = _SHORTEST_REST

    def _stop_for(self, num_steps: int) -> None:
        self.num_to_rest, self.num_drafting, self.seconds, self.tokens = num_steps, 0, 0.0, 0.0


def _averaged(average: float, value: float) -> float:
    """The exponential average with one value more. What is much longer than usual (a step that is recorded, a machine
    that does something else) does not count for all that it is."""
    return value if not average else average + 0.2 * (min(value, 2 * average) - average)


class Speculation:
    """The drafters of running requests, how often they are right, and whether the steps are faster for it."""

    def __init__(
        self,
        make_drafter: Callable[[Request], Drafter] | None,
        most_drafts: int,
        most_sequences: int,
        rate: float = 0.7,
        *,
        watches_cost: bool = False,
    ) -> None:
        """`make_drafter` gives each request a drafter of its own; None where a drafter with weights guesses for all of
        them together, before the step (`rollout.core.draft_planner`).

        At most `most_drafts` a sequence, in steps in which at most `most_sequences` draw. `rate`, the share of right
        drafts that is expected at first, gives way to what is found. With `watches_cost` nothing is drafted in steps of
        as many sequences as have been slower a token for it, as `took` has told; it is tried again now and then."""
        self._make_drafter = make_drafter
        self.has_weights = make_drafter is None
        self.most_drafts = most_drafts
        self.most_sequences = most_sequences
        self._watches_cost = watches_cost
        self._samples: dict[str, _Sample] = {}
        self._paces: dict[int, _Pace] = {}  # by the number of sequences
        self._rate = rate  # that new requests begin with: the average over all
        self.num_drafted = [0] * most_drafts  # by place among a step's drafts, since start
        self.num_accepted = [0] * most_drafts

    @staticmethod
    def can_draft(request: Request) -> bool:
        """Whether its next tokens may be guessed. Not before it has one, since its siblings draw that too; and not
        where a draw depends on the tokens before it in other ways than through the model, or is forced."""
        if request.sample_state is not None or request.beam_options is not None:
            return False
        return request.num_output_tokens >= max(1, len(request.forced_token_ids))

    def is_worth_it(self, num_sequences: int) -> bool:
        """Whether a step with so many draws should have drafts."""
        if num_sequences > self.most_sequences:
            return False
        pace = self._paces.setdefault(num_sequences, _Pace())
        if self._watches_cost and pace.num_to_rest:
            pace.num_to_rest -= 1
            return False
        return True

    def took(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step in which so many sequences decoded has computed `num_rows`, and brought `num_tokens`."""
        if num_sequences in self._paces:
            self._paces[num_sequences].took(num_sequences, num_rows > num_sequences, num_tokens, seconds)

    def drafts(self, request: Request, most: int) -> list[int]:
        """At most `most` guesses of a request's next tokens, by its own drafter."""
        sample = self._sample(request)
        length = self._length(sample)
        if not length or sample.drafter is None:
            return []
        return sample.drafter.propose(request.token_ids, min(most, length))

    def length(self, request: Request) -> int:
        """How many guesses of a request's next tokens a drafter with weights should make. Asked once a step."""
        return self._length(self._sample(request))

    def _sample(self, request: Request) -> _Sample:
        sample = self._samples.get(request.request_id)
        if sample is None:
            sample = self._samples[request.request_id] = _Sample(self._new_drafter(request), self._rate)
        return sample

    def _new_drafter(self, request: Request) -> Drafter | None:
        return None if self._make_drafter is None else self._make_drafter(request)

    def _length(self, sample: _Sample) -> int:
        """How many drafts are worth their rows, if the chances of all are the same."""
        length, chance = 0, sample.rate
        while length < self.most_drafts and chance >= _LEAST_CHANCE:
            length, chance = length + 1, chance * sample.rate
        if length == 0:
            sample.num_skipped += 1
            if sample.num_skipped % _PROBE_EVERY == 0:
                return 1
        return length

    def verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """A step has told how many of a request's drafts, the leading ones, were right."""
        for place in range(num_drafted):
            self.num_drafted[place] += 1
        for place in range(num_accepted):
            self.num_accepted[place] += 1
        sample = self._samples.get(request.request_id)
        if sample is None:  # it has ended with one of them, and nobody has looked at the others
            return
        for is_right in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafted):
            sample.rate += _WEIGHT * (is_right - sample.rate)
            self._rate += _WEIGHT / 16 * (is_right - self._rate)

    def ended(self, request: Request) -> None:
        """The request has ended. What it has sampled may help to guess others."""
        sample = self._samples.pop(request.request_id, None)
        drafter = None if sample is None else sample.drafter
        if sample is None and self.can_draft(request):
            drafter = self._new_drafter(request)
        if drafter is not None:
            drafter.close(request.token_ids)
