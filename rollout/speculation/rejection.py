"""Verification by rejection: guesses are kept or replaced so that what comes out has the target's distribution.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Chen et al., "Accelerating Large
Language Model Decoding with Speculative Sampling" (2023).

At each guessed position p is the distribution that the target draws from there (tempered, masked, filtered: what the
sampling kernel has kept), and q the one that the guess g was drawn from; a guess from tokens alone was certain, so
that q is 1 at it. The guess stands with the chance min(1, p(g) / q(g)). Otherwise a token is drawn from the normalised
(p - q)+, which never is the guess, and what was guessed behind it is dropped. Behind guesses that all stand the next
token is drawn from p, as without guesses.

All noise here is a function of (seed, sample index, position), as everywhere, but not that of draws without rejection,
which is the drafters': they may draw guesses with it, choose them by it, and even guess or not as it falls.
What remains to them: whether a guess that was drawn from q is offered must not depend on what it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

import rollout_kernels
from rollout.core.schedule import Draw, ScheduledSequence
from rollout.sampling.adjust import Adjustment
from rollout.sampling.sampler import sample_rows
from rollout.sampling.top_logprobs import masked_rows
from rollout.worker.inputs import StepInputs, fetch

# Added to a position: noise that no drafter knows, since no sequence is so long.
_KEEPING = 1 << 40
_REPLACING = 2 << 40
_DRAWING = 3 << 40
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class NoiseNumbers:
    """What noise is a function of: int64 [N] each, one value a draw."""

    seed: torch.Tensor
    sample_index: torch.Tensor
    position: torch.Tensor

    def __getitem__(self, index: torch.Tensor) -> NoiseNumbers:
        return NoiseNumbers(self.seed[index], self.sample_index[index], self.position[index])


def distribution_of(x: torch.Tensor, temperature: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
    """What the sampling kernel draws from, float32 [R, vocab].

    `x` float32 [R, vocab] are the rows that it got, -inf where a token may not come; `temperature` float32 [R], 0 is
    greedy; `num_kept` int32 [R] is what it says that filters have left: the first ones in the order (value descending,
    id ascending). It must have drawn from every row.
    """
    kept = _kept(x, num_kept.long())
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
    tempered = (x - x.amax(1, keepdim=True)) / heat
    return tempered.masked_fill_(~kept, -torch.inf).softmax(1)


def _kept(x: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
    """bool [R, vocab]; `num_kept` int64 [R]."""
    kept = x > -torch.inf
    cut = (num_kept < kept.sum(1)).nonzero()[:, 0]
    if len(cut):
        values, count = x[cut], num_kept[cut]
        last = values.topk(int(count.max())).values.gather(1, count[:, None] - 1)
        above, equal = values > last, values == last
        kept[cut] = above | (equal & (equal.cumsum(1) <= (count - above.sum(1))[:, None]))
    return kept


def keeps(logprobs: torch.Tensor, drawn_with: torch.Tensor, numbers: NoiseNumbers) -> torch.Tensor:
    """Which guesses stand, bool [G].

    `logprobs` float32 [G]: of the guesses under the target's distribution, -inf where it does not have them.
    `drawn_with` float32 [G]: the probability that they were drawn with.
    """
    chance = (logprobs - drawn_with.clamp(min=_TINY).log()).clamp(max=0.0)  # as a logarithm
    outcomes = torch.stack([chance, (-torch.expm1(chance)).log()], 1)
    return _draw(outcomes, numbers, _KEEPING) == 0


def replacements(
    target: torch.Tensor, drafter: torch.Tensor, guesses: torch.Tensor, numbers: NoiseNumbers
) -> torch.Tensor:
    """Tokens in place of guesses that do not stand, int64 [R], and are others.

    `target` and `drafter` are distributions float32 [R, vocab], `guesses` int64 [R].
    """
    more = (target - drafter).clamp_(min=0.0).scatter_(1, guesses[:, None], 0.0)
    # Where both distributions are the same but for rounding, nothing may be left: any token is right, the guess too.
    rest = torch.where(more.any(1, keepdim=True), more, target)
    return _draw(rest.log(), numbers, _REPLACING)


def _draw(logits: torch.Tensor, numbers: NoiseNumbers, kind: int) -> torch.Tensor:
    """One token id from softmax(row) of each row, float32 [N, V], with a kind of noise of its own; -1 where the row is
    not one of numbers."""
    count, device = len(logits), logits.device
    ones = torch.ones(count, device=device)
    return rollout_kernels.sample(
        logits,
        temperature=ones,
        top_k=torch.zeros(count, dtype=torch.int32, device=device),
        top_p=ones,
        min_p=torch.zeros(count, device=device),
        seed=numbers.seed.contiguous(),
        sample_index=numbers.sample_index.contiguous(),
        position=numbers.position + kind,
    ).token_ids


@dataclass(frozen=True, slots=True)
class _Guess:
    index: int  # of the draw that verifies it
    draw: Draw
    token_id: int


@dataclass(frozen=True, slots=True)
class RejectionSampler:
    """In the place of `sample_rows`, for plans that may have guesses.

    `distributions` says what the guesses of this step were drawn from: request id -> float32 [k, vocab], on the
    device. Guesses of requests that it does not name, or of all where it says None, were certain.
    """

    distributions: Callable[[], Mapping[str, torch.Tensor] | None]

    def sample(
        self,
        sequences: Sequence[ScheduledSequence],
        draws: Sequence[Draw],
        logits: torch.Tensor,
        rows: Sequence[int],
        inputs: StepInputs,
        adjustment: Adjustment | None = None,
    ) -> rollout_kernels.SampleResult:
        """One token for each of `draws`, from row `rows[i]` of `logits` (float32 [R, vocab]), as it was adjusted: the
        guess that it verifies, or what comes instead. All numbers are those of the target's distribution.

        Behind a guess that does not stand the draws of a sequence mean nothing.
        """
        guesses = _guesses(sequences, draws)
        proposed = [msgspec.structs.replace(draw, position=draw.position + _DRAWING) for draw in draws]
        for guess in guesses:
            proposed[guess.index] = msgspec.structs.replace(guess.draw, forced_token_id=guess.token_id)
        sampled = sample_rows(logits, proposed, rows, inputs, adjustment)
        wrong = self._first_wrong(guesses, sampled, inputs) if guesses else []
        if wrong:
            self._replace(wrong, sampled, logits, rows, inputs, adjustment)
        return sampled

    def _first_wrong(
        self, guesses: Sequence[_Guess], sampled: rollout_kernels.SampleResult, inputs: StepInputs
    ) -> list[_Guess]:
        """The first guess of each sequence that does not stand, if its draw has a distribution at all."""
        drawn_with = self._drawn_with(guesses, inputs)
        index, numbers = _send(guesses, inputs)
        stand = keeps(sampled.sampled_logprobs[index], drawn_with, numbers)
        standing, status = fetch([stand, sampled.status[index]])
        first: dict[int, int] = {}  # sequence -> its first guess that does not
        for place in np.flatnonzero(~standing).tolist():
            first.setdefault(guesses[place].draw.sequence_index, place)
        return [guesses[place] for place in first.values() if status[place] == rollout_kernels.STATUS_OK]

    def _drawn_with(self, guesses: Sequence[_Guess], inputs: StepInputs) -> torch.Tensor:
        """The probability of each guess under what it was drawn from, float32 [G]."""
        distributions = self.distributions() or {}
        rows = [guess.draw.row for guess in guesses]
        row, token_id = inputs.send([np.array(rows, np.int64), np.array([guess.token_id for guess in guesses])])
        probabilities = torch.ones(len(guesses), device=row.device)
        end = 0
        for request_id, some in itertools.groupby(guesses, lambda guess: guess.draw.request_id):
            start, end = end, end + len(list(some))
            if request_id in distributions:
                probabilities[start:end] = distributions[request_id][row[start:end], token_id[start:end]]
        return probabilities

    def _replace(
        self,
        wrong: Sequence[_Guess],
        sampled: rollout_kernels.SampleResult,
        logits: torch.Tensor,
        rows: Sequence[int],
        inputs: StepInputs,
        adjustment: Adjustment | None,
    ) -> None:
        """Draws what comes in place of wrong guesses, and puts it with its numbers into the result."""
        places = [guess.index for guess in wrong]
        of_wrong = np.array([rows[place] for place in places], np.int64)
        x = masked_rows(logits, [guess.draw for guess in wrong], places, of_wrong, adjustment, inputs)
        index, numbers = _send(wrong, inputs)
        temperatures = np.array([guess.draw.params.temperature for guess in wrong], np.float32)
        temperature, guessed = inputs.send([temperatures, np.array([guess.token_id for guess in wrong], np.int64)])
        target = distribution_of(x, temperature, sampled.num_kept[index])
        token_ids = replacements(target, self._drafters(wrong, guessed, target), guessed, numbers)
        drawn = [
            msgspec.structs.replace(guess.draw, forced_token_id=token_id)
            for guess, token_id in zip(wrong, token_ids.tolist(), strict=True)
        ]
        again = sample_rows(logits, drawn, of_wrong.tolist(), inputs, _part(adjustment, places))
        (index,) = inputs.send([np.array(places, np.int64)])
        for mine, theirs in (
            (sampled.token_ids, again.token_ids),
            (sampled.raw_logprobs, again.raw_logprobs),
            (sampled.sampled_logprobs, again.sampled_logprobs),
        ):
            mine[index] = theirs

    def _drafters(self, guesses: Sequence[_Guess], token_ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What guesses of `token_ids`, int64 [R], were drawn from: float32 [R, vocab]."""
        distributions = self.distributions() or {}
        drafters = torch.zeros_like(like).scatter_(1, token_ids[:, None], 1.0)
        for row, guess in zip(drafters, guesses, strict=True):
            if guess.draw.request_id in distributions:
                row.copy_(distributions[guess.draw.request_id][guess.draw.row])
        return drafters


def _guesses(sequences: Sequence[ScheduledSequence], draws: Sequence[Draw]) -> list[_Guess]:
    """The guesses among the scheduled tokens: what is there behind a row that a token is freely drawn from."""
    guesses: list[_Guess] = []
    for index, draw in enumerate(draws):
        if draw.row >= 0 and draw.forced_token_id < 0:
            token_ids = sequences[draw.sequence_index].token_ids
            if draw.row + 1 < len(token_ids):
                guesses.append(_Guess(index, draw, token_ids[draw.row + 1]))
    return guesses


def _send(guesses: Sequence[_Guess], inputs: StepInputs) -> tuple[torch.Tensor, NoiseNumbers]:
    """The indices of the guesses' draws, int64 [G], and what their noise is a function of."""
    draws = [guess.draw for guess in guesses]
    index, seed, sample_index, position = inputs.send(
        [
            np.array([guess.index for guess in guesses], np.int64),
            np.array([draw.seed for draw in draws], np.int64),
            np.array([draw.sample_index for draw in draws], np.int64),
            np.array([draw.position for draw in draws], np.int64),
        ]
    )
    return index, NoiseNumbers(seed, sample_index, position)


def _part(adjustment: Adjustment | None, places: Sequence[int]) -> Adjustment | None:
    """That of some of its draws."""
    if adjustment is None:
        return None
    return Adjustment(
        rows=adjustment.rows,
        row_index=None if adjustment.row_index is None else adjustment.row_index[places],
        masks=adjustment.masks,
        mask_index=None if adjustment.mask_index is None else adjustment.mask_index[places],
    )
