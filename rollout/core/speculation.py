"""Which sequences get how many draft tokens: as many as lately were right, and none where there is no room.

A draft is verified by the draw that it guesses: the token at a position is a pure function of the tokens before it, and
of the request's noise there. So a step may compute rows for several guessed tokens, and draw from every row; what was
drawn up to the first draft that differs is what would have been drawn one step at a time, and the rest is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from rollout.core.pace import Pace
from rollout.request import Request

_LEAST_CHANCE = 0.2  # that a draft is right, below which its row is not computed where nobody watches the clock
_WEIGHT = 0.125  # of the last draft in the average of those that were right
_FIRST_TEXT_RATE = 0.9  # how often a text that has to come is expected to come in its usual tokens, at first
_PATIENCE = 8  # steps in a row for which guesses were made in vain, before they are made in every eighth step only
_PROBE_EVERY = 24  # steps after which a sequence whose drafts were wrong is tried again


class Drafter(Protocol):
    """Guesses the tokens of one sample."""

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` guesses of what follows `token_ids`, which has only grown since the last call."""
        ...

    def close(self, token_ids: list[int]) -> None:
        """The sample has ended with these tokens."""
        ...


class Guess(NamedTuple):
    """A guessed token, and the chance that it and the drafts before it, `place` of them, are right."""

    token_id: int
    chance: float
    place: int


@runtime_checkable
class DrafterWithChances(Drafter, Protocol):
    """One that can tell how likely its guesses are right."""

    def guess(
        self, token_ids: list[int], most: int, least_chance: float, most_alternatives: int
    ) -> tuple[list[Guess], list[Guess]]:
        """Up to `most` guesses of what follows `token_ids`, which has only grown since the last call, one behind the
        other; and up to `most_alternatives` that could come in the place of one of them, the likeliest first. No chance
        is less than `least_chance`."""
        ...

    def saw(self, position: int, token_id: int, likely: list[int], shares: list[float]) -> None:
        """`token_id` was drawn at `position`, behind known tokens or drafts, from a distribution of which these are the
        most likely tokens, and their probabilities."""
        ...


class Guide(Protocol):
    """Knows what the grammars of requests (`structured_outputs`) allow, before anything is drawn."""

    def next_tokens(self, request: Request) -> list[int]:
        """Likely tokens of the text that has to come next, where there is only one; none where there are several."""
        ...

    def num_allowed(self, request: Request, draft_token_ids: list[int]) -> int:
        """How many of the first guesses of a request's next tokens may come, none of them ending it."""
        ...


@dataclass(slots=True)
class _Sample:
    """What is known of one request's drafts."""

    drafter: Drafter | None  # None where a drafter with weights guesses for all
    rate: float  # of the drafts that were looked at, the share that was right; exponential average
    guesser: DrafterWithChances | None  # the drafter, where it tells chances
    length: int = 0  # how many it should have in the step that comes
    guesses: list[Guess] = field(default_factory=list)  # that its guesser has made for that step
    alternatives: list[Guess] = field(default_factory=list)  # to these
    num_skipped: int = 0  # steps without drafts since they seemed worth nothing
    text: list[int] = field(default_factory=list)  # tokens that its grammar lets come in that step: its drafts, if any
    text_rate: float = _FIRST_TEXT_RATE  # of these, the share that was right


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
        guide: Guide | None = None,
        most_alternatives: int = 0,
    ) -> None:
        """`make_drafter` gives each request a drafter of its own; None where a drafter with weights guesses for all of
        them together, before the step (`rollout.core.draft_planner`).

        At most `most_drafts` a sequence, in steps in which at most `most_sequences` draw. `rate`, the share of right
        drafts that is expected at first, gives way to what is found. With `watches_cost` nothing is drafted in steps of
        as many sequences as have been slower a token for it, as `took` has told; it is tried again now and then.
        With a `guide` no guess is computed that a grammar forbids, and the text that it prescribes is guessed.
        A step computes up to `most_alternatives` guesses in the place of a sequence's drafts."""
        self._make_drafter = make_drafter
        self.has_weights = make_drafter is None
        self._guide = guide
        self.most_drafts = most_drafts
        self.most_sequences = most_sequences
        self.most_alternatives = most_alternatives
        self._pace = Pace() if watches_cost else None
        self._least_chance = _LEAST_CHANCE
        self._num_refused = 0  # steps in a row in which guesses were asked for and not wanted
        self._samples: dict[str, _Sample] = {}
        self._rate = rate  # that new requests begin with: the average over all
        self.num_drafted = [0] * most_drafts  # by place among a step's drafts, since start
        self.num_accepted = [0] * most_drafts
        self.alternatives_tried_and_right = [0, 0]

    @staticmethod
    def can_draft(request: Request) -> bool:
        """Whether its next tokens may be guessed. Not before it has one, since its siblings draw that too; and not
        where they are forced, or several beams' at once."""
        return request.beam_options is None and request.num_output_tokens >= max(1, len(request.forced_token_ids))

    def is_worth_it(self, num_sequences: int, candidates: Sequence[Request]) -> bool:
        """Whether a step with so many draws should have drafts for `candidates`, which are among those that draw."""
        if num_sequences > self.most_sequences:
            return False
        if self._pace is not None:
            self._least_chance = self._pace.least_chance(num_sequences)
        if self._num_refused % _PATIENCE and self._num_refused >= _PATIENCE and self._guesses_cost(candidates):
            self._num_refused += 1
            return False
        num_drafts, num_right = 0, 0.0
        for request in candidates:
            sample = self._sample(request)
            num_right += self._foresee(request, sample)
            num_drafts += sample.length + len(sample.alternatives)
        allowed = num_drafts > 0 if self._pace is None else self._pace.allows(num_sequences, num_drafts, num_right)
        self._num_refused = 0 if allowed else self._num_refused + 1
        return allowed

    def _guesses_cost(self, candidates: Sequence[Request]) -> bool:
        """Whether to ask how many drafts they should have takes time by itself."""
        return any(self._sample(request).guesser is not None for request in candidates)

    def took(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step in which so many sequences decoded has computed `num_rows`, and brought `num_tokens`."""
        if self._pace is not None and num_sequences <= self.most_sequences:
            self._pace.took(num_sequences, num_rows, num_tokens, seconds)

    @property
    def seconds_won_and_lost(self) -> tuple[float, float] | None:
        """Since start: by steps with drafts that were faster than without, and by those that were slower. None where
        nobody watches the clock."""
        return None if self._pace is None else (self._pace.seconds_won, self._pace.seconds_lost)

    def drafts(self, request: Request, most: int) -> list[int]:
        """At most `most` guesses of a request's next tokens, by its grammar or its own drafter, in a step that
        `is_worth_it`."""
        sample = self._sample(request)
        if sample.text:
            return sample.text[:most]
        if not sample.length or sample.drafter is None:
            return []
        if sample.guesser is not None:
            return self.allowed(request, [guess.token_id for guess in sample.guesses[:most]])
        return self.allowed(request, sample.drafter.propose(request.token_ids, min(most, sample.length)))

    def alternatives(self, request: Request, num_drafts: int, most: int) -> list[Guess]:
        """At most `most` guesses in the place of one of a request's drafts, of which there are `num_drafts`, or of the
        one behind them."""
        return [guess for guess in self._sample(request).alternatives if guess.place <= num_drafts][:most]

    def length(self, request: Request) -> int:
        """How many guesses of a request's next tokens a drafter with weights should make in a step that `is_worth_it`.
        None where its grammar makes them: `text`."""
        sample = self._sample(request)
        return 0 if sample.text else sample.length

    def text(self, request: Request) -> list[int]:
        """The guesses that its grammar makes for a step that `is_worth_it`."""
        return self._sample(request).text

    def allowed(self, request: Request, draft_token_ids: list[int]) -> list[int]:
        """The guesses up to the first that its grammar forbids: no row behind that one would be of use."""
        if self._guide is None or request.params.structured_outputs is None or not draft_token_ids:
            return draft_token_ids
        return draft_token_ids[: self._guide.num_allowed(request, draft_token_ids)]

    def _sample(self, request: Request) -> _Sample:
        sample = self._samples.get(request.request_id)
        if sample is None:
            drafter = self._new_drafter(request)
            guesser = drafter if isinstance(drafter, DrafterWithChances) else None
            sample = self._samples[request.request_id] = _Sample(drafter, self._rate, guesser)
        return sample

    def _new_drafter(self, request: Request) -> Drafter | None:
        return None if self._make_drafter is None else self._make_drafter(request)

    def _foresee(self, request: Request, sample: _Sample) -> float:
        """Settles how many drafts it should have in the step that comes, and what they are if that is known: the text
        that it has to go on with, or what its drafter is sure enough of. Returns how many are expected to be right."""
        sample.text, sample.guesses, sample.alternatives = [], [], []
        rate = sample.rate
        if self._guide is not None and request.params.structured_outputs is not None:
            length = self._length(sample.text_rate)
            sample.text = self._guide.next_tokens(request)[:length] if length else []
        if sample.text:
            rate, sample.length = sample.text_rate, len(sample.text)
        elif sample.guesser is not None:
            most_alternatives = self.most_alternatives if request.sample_state is None else 0
            sample.guesses, sample.alternatives = sample.guesser.guess(
                request.token_ids, self.most_drafts, self._least_chance, most_alternatives
            )
            sample.length = len(sample.guesses)
            return sum(guess.chance for guess in (*sample.guesses, *sample.alternatives))
        else:
            sample.length = self._next_length(sample)
        return sum(rate**place for place in range(1, sample.length + 1))

    def _length(self, rate: float) -> int:
        """How many drafts are worth their rows, if each is right so often."""
        length, chance = 0, rate
        while length < self.most_drafts and chance >= self._least_chance:
            length, chance = length + 1, chance * rate
        return length

    def _next_length(self, sample: _Sample) -> int:
        """How many of its drafter's guesses are worth their rows. Where none are, one is tried now and then."""
        length = self._length(sample.rate)
        if length == 0:
            sample.num_skipped += 1
            length = int(sample.num_skipped % _PROBE_EVERY == 0)
        return length

    def verified(
        self, request: Request, num_drafted: int, num_accepted: int, *, was_wrong: bool, is_text: bool
    ) -> None:
        """A step has told how many of a request's drafts, the leading ones, were right, and whether the next one was
        wrong: the request may have ended before that. `is_text`: its grammar made them."""
        for place in range(num_drafted):
            self.num_drafted[place] += 1
        for place in range(num_accepted):
            self.num_accepted[place] += 1
        sample = self._samples.get(request.request_id)
        for is_right in [1.0] * num_accepted + [0.0] * was_wrong:
            if not is_text:
                self._rate += _WEIGHT / 16 * (is_right - self._rate)
            if sample is None:  # it has ended with one of them
                continue
            if is_text:
                sample.text_rate += _WEIGHT * (is_right - sample.text_rate)
            else:
                sample.rate += _WEIGHT * (is_right - sample.rate)

    def tried_alternatives(self, num: int, was_right: bool) -> None:
        """A step has computed so many guesses in the place of a request's drafts; one of them was right, or none."""
        self.alternatives_tried_and_right[0] += num
        self.alternatives_tried_and_right[1] += was_right

    def saw(self, request: Request, position: int, token_id: int, likely: list[int], shares: list[float]) -> None:
        """Tells a request's drafter what else could have come."""
        if not request.is_finished and self.can_draft(request):
            guesser = self._sample(request).guesser
            if guesser is not None:
                guesser.saw(position, token_id, likely, shares)

    def ended(self, request: Request) -> None:
        """The request has ended. What it has sampled may help to guess others."""
        sample = self._samples.pop(request.request_id, None)
        drafter = None if sample is None else sample.drafter
        if sample is None and self.can_draft(request):
            drafter = self._new_drafter(request)
        if drafter is not None:
            drafter.close(request.token_ids)
