"""Beam search over log-probabilities: which beams go on, what has finished, and when to stop. Integers and floats only.

    every beam has its most likely tokens ─► the best continuations of all beams ─┬─ those that end ─► finished
                                                                                  └─ the best others ─► the next beams

The search is that of transformers' `generate(num_beams=…)`. A score is the sum of the logprobs of the generated tokens,
an EOS at the end included, divided by their number to the power of the length penalty: the prompt has no part in it.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """What makes a request a beam search.

    `early_stopping`: True ends the search as soon as `width` sequences have finished; False once the best beam, scored
    at its present length, is no better than the worst of `width` finished sequences; "never" once it could not become
    better at any length that it may reach.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that the search returns. `token_ids` and `logprobs` are of its output, EOS included.

    `finish_reason` is one of `FinishReason`'s values; `stop_token_id` is the EOS that ended it.
    """

    token_ids: list[int]
    logprobs: list[float]
    cum_logprob: float
    score: float
    finish_reason: str
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class BeamResult:
    """What has come of a search: at most `width` hypotheses, best first.

    `kv_blocks_saved`: the share of KV blocks that the beams would have needed besides if they shared none; the mean
    over all steps with several beams.
    """

    hypotheses: list[Hypothesis]
    kv_blocks_saved: float = 0.0


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that goes on, at one of the search's `width` places.

    `parent` is the place of the beam that it continues by one token, which is its own place for one child of each.
    """

    place: int
    parent: int
    token_ids: list[int]  # prompt and output
    logprobs: list[float]  # of the output
    cum_logprob: float


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A beam with one more token."""

    beam: Beam
    token_id: int
    logprob: float
    cum_logprob: float


@dataclass(slots=True)
class BeamSearch:
    """One search. `beams` are best first; each gets its candidates by `take`, and then all go on by `advance`."""

    options: BeamOptions
    prompt_token_ids: list[int]
    max_tokens: int
    end_token_ids: AbstractSet[int]
    beams: list[Beam] = field(default_factory=list)
    finished: list[Hypothesis] = field(default_factory=list)  # the best `width` of them, best first
    # place -> its (token id, logprob) pairs, most likely first
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.beams:
            self.beams = [Beam(0, 0, list(self.prompt_token_ids), [], 0.0)]

    @property
    def num_output_tokens(self) -> int:
        """Of every beam: they are of one length."""
        return len(self.beams[0].logprobs)

    @property
    def has_begun(self) -> bool:
        return bool(self.candidates) or self.num_output_tokens > 0

    @property
    def is_ready(self) -> bool:
        """Whether every beam has its candidates."""
        return len(self.candidates) == len(self.beams)

    def take(self, place: int, token_ids: list[int], logprobs: list[float]) -> None:
        """The most likely next tokens of the beam at `place`: `num_candidates` of them, or the whole vocabulary."""
        self.candidates[place] = list(zip(token_ids, logprobs, strict=True))

    def advance(self) -> bool:
        """Makes `beams` the next ones; False where the search has ended, with its sequences in `finished`."""
        assert self.is_ready, "a beam has no candidates"
        width = self.options.width
        best = self._best_continuations()
        length = self.num_output_tokens + 1
        is_last = length == self.max_tokens
        ended = [c for c in best[:width] if is_last or c.token_id in self.end_token_ids]
        going_on = [] if is_last else [c for c in best if c.token_id not in self.end_token_ids][:width]
        self._finish([self._hypothesis(continuation) for continuation in ended])
        if not going_on or self._may_stop(going_on[0].cum_logprob, length):
            return False
        self.beams, self.candidates = self._placed(going_on), {}
        return True

    def _best_continuations(self) -> list[_Continuation]:
        """Enough of the best that `width` of them go on, whatever end tokens are among them; ties by beam, then id."""
        every = [
            _Continuation(beam, token_id, logprob, beam.cum_logprob + logprob)
            for beam in self.beams
            for token_id, logprob in self.candidates[beam.place]
            if logprob > -float("inf")
        ]
        every.sort(key=lambda continuation: -continuation.cum_logprob)
        return every[: num_candidates(self.options.width, len(self.end_token_ids))]

    def _hypothesis(self, continuation: _Continuation) -> Hypothesis:
        beam, token_id = continuation.beam, continuation.token_id
        ends = token_id in self.end_token_ids
        token_ids = [*beam.token_ids[len(self.prompt_token_ids) :], token_id]
        return Hypothesis(
            token_ids=token_ids,
            logprobs=[*beam.logprobs, continuation.logprob],
            cum_logprob=continuation.cum_logprob,
            score=self._score(continuation.cum_logprob, len(token_ids)),
            finish_reason="stop" if ends else "length",
            stop_token_id=token_id if ends else None,
        )

    def _score(self, cum_logprob: float, num_tokens: int) -> float:
        return cum_logprob / num_tokens**self.options.length_penalty

    def _finish(self, hypotheses: list[Hypothesis]) -> None:
        ranked = sorted([*self.finished, *hypotheses], key=lambda hypothesis: -hypothesis.score)
        self.finished = ranked[: self.options.width]

    def _may_stop(self, best_cum_logprob: float, length: int) -> bool:
        options = self.options
        if len(self.finished) < options.width:
            return False
        if options.early_stopping is True:
            return True
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self.max_tokens
        return self._score(best_cum_logprob, length) <= self.finished[-1].score

    def _placed(self, continuations: list[_Continuation]) -> list[Beam]:
        """The first child of a parent stays at its place, where its KV lies; the others get places that are free."""
        parents = {continuation.beam.place for continuation in continuations}
        free = iter(sorted(set(range(self.options.width)) - parents))
        beams: list[Beam] = []
        for continuation in continuations:
            beam = continuation.beam
            stays = beam.place in parents
            parents.discard(beam.place)
            beams.append(
                Beam(
                    place=beam.place if stays else next(free),
                    parent=beam.place,
                    token_ids=[*beam.token_ids, continuation.token_id],
                    logprobs=[*beam.logprobs, continuation.logprob],
                    cum_logprob=continuation.cum_logprob,
                )
            )
        return beams

    def give_up(self, reason: str) -> None:
        """Ends the search before its time: its beams, as far as they have come, are among its hypotheses."""
        length = self.num_output_tokens
        if length:
            num_prompt = len(self.prompt_token_ids)
            self._finish(
                [
                    Hypothesis(
                        token_ids=beam.token_ids[num_prompt:],
                        logprobs=beam.logprobs,
                        cum_logprob=beam.cum_logprob,
                        score=self._score(beam.cum_logprob, length),
                        finish_reason=reason,
                    )
                    for beam in self.beams
                ]
            )


def num_candidates(width: int, num_end_tokens: int) -> int:
    """How many of a beam's most likely tokens are looked at: `width` of them go on even if all end tokens, of every
    beam, are among the best."""
    return width * max(2, 1 + num_end_tokens)
