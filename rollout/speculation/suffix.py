"""Suffix matching over all samples of a prompt: those that run, and those of earlier calls.

In the manner of suffix decoding (Oliaro et al., "SuffixDecoding", 2024): samples of one prompt resemble each other, and
those of the next epoch resemble these. Unlike there, a guess is not what mostly followed, but what this sample's own
noise makes of it (`race.py`). Nothing comes from weights, so that no policy update makes it stale, only less alike.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from rollout.core.speculation import Guess
from rollout.request import Request
from rollout.speculation.chances import Chances
from rollout.speculation.followers import Followers
from rollout.speculation.race import Noise, first_to_arrive

_CONTEXT = 2  # tokens that a place must have in common with the end of a sample, to be looked at
_LONGEST = 24  # tokens of which more in common count for nothing
_LEVELS = (2, 3, 4, 5, 6, 8, 12, 16, 24)  # numbers of tokens in common that are told apart
_LEVEL_OF = tuple(sum(level <= length for level in _LEVELS) - 1 for length in range(_LONGEST + 1))
_MOST_PLACES = 16  # looked at, the latest
_MOST_SAMPLES = 128  # finished ones that a prompt remembers
_MOST_INSTEAD = 4  # alternatives to a guess
_MOST_SALTS = 4  # of which is remembered what follows what in all prompts
_MOST_CONTEXTS = 2**14  # of which is remembered what follows them, for each salt
_SPREAD = 2**32  # a place is the number of its sample, times this, plus its position; a pair of tokens likewise
_NOTHING: tuple[int, list[int], list[float]] = (-1, [], [])


@dataclass(slots=True)
class Corpus:
    """What was sampled after one prompt. Each sample begins with the prompt's last tokens, and sample 0 is the prompt.

    `places` has, for each pair of neighbours, where the tokens that followed it stand; and `likely_at`, for some of
    these places, what else could have stood there: tokens and their probabilities.
    """

    samples: dict[int, array[int]] = field(default_factory=dict)
    places: dict[int, list[int]] = field(default_factory=dict)
    likely_at: dict[int, tuple[array[int], array[float]]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    next_number: int = 0
    num_tokens: int = 0

    def open(self, beginning: list[int]) -> int:
        """Another sample, which begins with these last tokens of the prompt; returns its number."""
        number = self.next_number
        self.next_number += 1
        self.samples[number] = array("q", beginning)
        self.num_tokens += len(beginning)
        self.running.add(number)
        return number

    def extend(self, number: int, token_ids: list[int]) -> None:
        """Adds a sample's next tokens."""
        sample, places = self.samples[number], self.places
        start = len(sample)
        sample.extend(token_ids)
        self.num_tokens += len(token_ids)
        for position in range(max(start, _CONTEXT), len(sample)):
            key = sample[position - 2] * _SPREAD + sample[position - 1]
            known = places.get(key)
            if known is None:
                places[key] = [number * _SPREAD + position]
            else:
                known.append(number * _SPREAD + position)
                if len(known) > 4 * _MOST_PLACES:
                    del known[: 2 * _MOST_PLACES]

    def close(self, number: int) -> None:
        """The sample has ended. The oldest of too many are forgotten."""
        self.running.discard(number)
        if len(self.samples) - len(self.running) > 2 * _MOST_SAMPLES:
            finished = [other for other in self.samples if other not in self.running and other]
            gone = finished[: len(finished) - _MOST_SAMPLES]
            for other in gone:
                self.num_tokens -= len(self.samples.pop(other))
            self.places = {key: kept for key, known in self.places.items() if (kept := self._left(known))}
            self.likely_at = {place: self.likely_at[place] for place in self._left(list(self.likely_at))}

    def _left(self, known: list[int]) -> list[int]:
        return [place for place in known if place // _SPREAD in self.samples]

    def likely(self, end: list[int]) -> tuple[dict[int, float], float]:
        """Estimated probabilities of what comes after `end`, from places that read like it, and how much is not given.

        For each length in common, the longest first, the tokens after n places with as much in common share n / (n + 1)
        of the probability that is still to be given away (Witten-Bell smoothing with one escape a level).
        """
        likely: dict[int, float] = {}
        known = self.places.get(end[-2] * _SPREAD + end[-1])
        if known is None:
            return likely, 1.0
        samples = self.samples
        counts = [0] * len(_LEVELS)
        followers: list[tuple[int, int, int]] = []  # place, token, level
        most = min(len(end), _LONGEST)
        for place in known[-_MOST_PLACES:]:
            other, position = samples[place // _SPREAD], place % _SPREAD
            length, limit = _CONTEXT, min(position, most)
            while length < limit and other[position - length - 1] == end[-length - 1]:
                length += 1
            level = _LEVEL_OF[length]
            counts[level] += 1
            followers.append((place, other[position], level))
        rest, num_places = 1.0, 0
        weights = [0.0] * len(_LEVELS)
        for level in reversed(range(len(_LEVELS))):
            num_places += counts[level]
            if num_places:
                rest /= num_places + 1
                weights[level] = rest
        for level in range(1, len(_LEVELS)):
            weights[level] += weights[level - 1]
        for place, token_id, level in followers:
            weight, distribution = weights[level], self.likely_at.get(place)
            if distribution is None:
                likely[token_id] = likely.get(token_id, 0.0) + weight
                continue
            for other_id, share in zip(*distribution, strict=True):
                likely[other_id] = likely.get(other_id, 0.0) + weight * share
        return likely, rest


class Corpora:
    """The corpora of the prompts asked lately. Those of running samples stay; of the others, the least recently used go
    when all together hold more than `most_tokens`."""

    def __init__(self, most_tokens: int, uses_noise: bool = True) -> None:
        """Without `uses_noise` the most likely token is guessed: for verification that draws with other noise."""
        self._most_tokens = most_tokens
        self._uses_noise = uses_noise
        self._corpora: OrderedDict[tuple[str | None, bytes], Corpus] = OrderedDict()
        self._followers: OrderedDict[str | None, Followers] = OrderedDict()
        self._chances = {is_greedy: (Chances(), Chances()) for is_greedy in (False, True)}
        self.num_tokens = 0  # of all of them, prompts included

    def drafter(self, request: Request) -> SuffixDrafter:
        """That of another sample of this prompt. Requests with different salts share nothing."""
        prompt_token_ids, salt = request.prompt_token_ids, request.cache_salt
        key = (salt, array("q", prompt_token_ids).tobytes())
        corpus = self._corpora.get(key)
        if corpus is None:
            corpus = self._corpora[key] = Corpus()
            prompt = corpus.open([])
            corpus.extend(prompt, prompt_token_ids)
            corpus.running.discard(prompt)
            self.num_tokens += corpus.num_tokens
        self._corpora.move_to_end(key)
        noise = Noise(request.seed, request.sample_index, request.params.is_greedy or not self._uses_noise)
        return SuffixDrafter(
            self, corpus, self._followers_of(salt), self._chances[noise.is_greedy], noise, prompt_token_ids
        )

    def _followers_of(self, salt: str | None) -> Followers:
        followers = self._followers.get(salt)
        if followers is None:
            followers = self._followers[salt] = Followers(min(self._most_tokens, _MOST_CONTEXTS))
            if len(self._followers) > _MOST_SALTS:
                self._followers.popitem(last=False)
        self._followers.move_to_end(salt)
        return followers

    def make_room(self) -> None:
        """Forgets prompts of which nothing runs."""
        excess = self.num_tokens - self._most_tokens
        unused: list[tuple[str | None, bytes]] = []
        for key, corpus in self._corpora.items():
            if excess <= 0:
                break
            if not corpus.running:
                unused.append(key)
                excess -= corpus.num_tokens
        for key in unused:
            self.num_tokens -= self._corpora.pop(key).num_tokens


class SuffixDrafter:
    """One sample of a corpus."""

    def __init__(
        self,
        corpora: Corpora,
        corpus: Corpus,
        followers: Followers,
        chances: tuple[Chances, Chances],
        noise: Noise,
        prompt_token_ids: list[int],
    ) -> None:
        self._corpora = corpora
        self._corpus = corpus
        self._followers = followers
        self._chances, self._chances_of_others = chances
        self._noise = noise
        beginning = prompt_token_ids[-_LONGEST:]
        self._number = corpus.open(beginning)
        self._num_seen = len(prompt_token_ids)
        self._offset = len(beginning) - self._num_seen  # of a token's place in the corpus from its position
        self._likely: dict[int, tuple[int, list[int], list[float]]] = {}  # position -> token drawn, and what could be
        # The last guesses, offered or not, by place, and what could come instead: token, bin of its chance.
        self._guesses: list[tuple[int, int, list[tuple[int, int]]]] = []
        corpora.num_tokens += len(beginning)

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` guesses of what follows `token_ids`, however unlikely."""
        return [guess.token_id for guess in self.guess(token_ids, most, 0.0)[0]]

    def guess(
        self, token_ids: list[int], most: int, least_chance: float, most_alternatives: int = 0
    ) -> tuple[list[Guess], list[Guess]]:
        """Up to `most` guesses of what follows `token_ids`, which has only grown since the last call, one behind the
        other; and up to `most_alternatives` in the place of one of them, the likeliest first. Each has the chance that
        it and all before it are right, which is at least `least_chance`."""
        self._catch_up(token_ids)
        end = token_ids[-_LONGEST:]
        drafts: list[Guess] = []
        alternatives: list[Guess] = []
        self._guesses = []
        before = 1.0  # chance that the drafts so far are right
        while len(drafts) < most and len(end) >= _CONTEXT:
            likely, rest = self._corpus.likely(end)
            self._followers.add_to(likely, rest, end[-2], end[-1])
            if not likely:
                break
            place, mass = len(drafts), sum(likely.values())
            # What does not come first is right once in five times at most.
            count = 1 + min(most_alternatives, _MOST_INSTEAD) if before > 5 * least_chance else 1
            winner, *others = first_to_arrive(likely.items(), mass, self._noise, len(token_ids) + place, count)
            kind = self._chances.bin_of(winner, mass)
            kinds = [(other.token_id, self._chances_of_others.bin_of(other, mass)) for other in others]
            self._guesses.append((winner.token_id, kind, kinds))
            chance = before * self._chances.of(kind)
            if chance < least_chance:
                break
            drafts.append(Guess(winner.token_id, chance, place))
            for token_id, other_kind in kinds:
                other_chance = before * self._chances_of_others.of(other_kind)
                if other_chance >= least_chance:
                    alternatives.append(Guess(token_id, other_chance, place))
            before = chance
            end.append(winner.token_id)
        alternatives.sort(key=_chance, reverse=True)
        return drafts, alternatives[:most_alternatives]

    def saw(self, position: int, token_id: int, likely: list[int], shares: list[float]) -> None:
        """`token_id` was drawn at `position` from a distribution of which these are the most likely tokens, and their
        probabilities. If it is none of them, it stands for all others."""
        if token_id not in likely:
            likely, shares = [*likely, token_id], [*shares, max(0.0, 1.0 - sum(shares))]
        self._likely[position] = (token_id, likely, shares)

    def close(self, token_ids: list[int]) -> None:
        """The sample has ended with these tokens, which others may go on to resemble."""
        self._catch_up(token_ids)
        before = self._corpus.num_tokens
        self._corpus.close(self._number)
        self._corpora.num_tokens += self._corpus.num_tokens - before
        self._corpora.make_room()

    def _catch_up(self, token_ids: list[int]) -> None:
        new = token_ids[self._num_seen :]
        if not new:
            return
        for token_id, (guess, kind, others) in zip(new, self._guesses, strict=False):
            self._chances.saw(kind, guess == token_id)
            for other, other_kind in others:
                self._chances_of_others.saw(other_kind, other == token_id)
            if guess != token_id:
                break
        self._guesses = []
        self._corpus.extend(self._number, new)
        self._corpora.num_tokens += len(new)
        for position in range(max(self._num_seen, _CONTEXT), len(token_ids)):
            before, last, token_id = token_ids[position - 2 : position + 1]
            drawn, likely, shares = self._likely.get(position, _NOTHING)
            if drawn != token_id:  # nothing is known of it, or what follows a wrong draft
                self._followers.add(before, last, (token_id,), (1.0,))
                continue
            self._followers.add(before, last, likely, shares)
            place = self._number * _SPREAD + position + self._offset
            self._corpus.likely_at[place] = (array("i", likely), array("f", shares))
        self._likely.clear()
        self._num_seen = len(token_ids)


def _chance(guess: Guess) -> float:
    return guess.chance
