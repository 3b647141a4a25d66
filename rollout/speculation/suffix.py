"""Suffix matching over all samples of a prompt: those that run, and those of earlier calls.

In the manner of suffix decoding (Oliaro et al., "SuffixDecoding", 2024): samples of one prompt resemble each other, and
those of the next epoch resemble these. Nothing here comes from weights, so that no policy update makes it stale, only
less alike.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

_CONTEXT = 2  # tokens that a place must have in common with the end of a sample, to be looked at
_LONGEST = 24  # tokens of which more in common count for nothing
_MOST_PLACES = 24  # looked at, the latest
_LEAST_SHARE = 0.2  # of the places' weight, that has to agree on all guesses so far
_MOST_SAMPLES = 128  # finished ones that a prompt remembers
_SPREAD = 2**32  # a place is the number of its sample, times this, plus its position


@dataclass(slots=True)
class Corpus:
    """What was sampled after one prompt. Each sample begins with the prompt's last tokens, and sample 0 is the prompt.

    `places` has, for each pair of neighbours, where the tokens that followed it stand.
    """

    samples: dict[int, array[int]] = field(default_factory=dict)
    places: dict[tuple[int, int], list[int]] = field(default_factory=dict)
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
            key = (sample[position - 2], sample[position - 1])
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

    def _left(self, known: list[int]) -> list[int]:
        return [place for place in known if place // _SPREAD in self.samples]

    def propose(self, number: int, most: int) -> list[int]:
        """Up to `most` guesses of what follows a sample: what most places that read like its end go on with, a place
        counting the more the further back it does."""
        sample = self.samples[number]
        if len(sample) < _CONTEXT:
            return []
        known = self.places.get((sample[-2], sample[-1]), [])
        weighted: list[tuple[array[int], int, int]] = []  # sample, position, weight
        for place in reversed(known[-_MOST_PLACES:]):
            other, position = self.samples[place // _SPREAD], place % _SPREAD
            length = _CONTEXT
            limit = min(position, len(sample), _LONGEST)
            while length < limit and other[position - length - 1] == sample[-length - 1]:
                length += 1
            weighted.append((other, position, length * length))
        whole = sum(weight for _, _, weight in weighted)
        drafts: list[int] = []
        while weighted and len(drafts) < most:
            votes: dict[int, int] = {}
            for other, position, weight in weighted:
                token_id = _token(other, position, sample, drafts)
                if token_id is not None:
                    votes[token_id] = votes.get(token_id, 0) + weight
            if not votes:
                break
            best = max(votes, key=votes.__getitem__)  # of equals the latest
            if votes[best] < _LEAST_SHARE * whole:
                break
            weighted = [
                (other, position + 1, weight)
                for other, position, weight in weighted
                if _token(other, position, sample, drafts) == best
            ]
            drafts.append(best)
        return drafts


def _token(other: array[int], position: int, sample: array[int], drafts: list[int]) -> int | None:
    """What stands there; of the sample itself, beyond its end, its guesses."""
    if position < len(other):
        return other[position]
    if other is sample and position - len(other) < len(drafts):
        return drafts[position - len(other)]
    return None


class Corpora:
    """The corpora of the prompts asked lately. Those of running samples stay; of the others, the least recently used go
    when all together hold more than `most_tokens`."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._corpora: OrderedDict[tuple[str | None, bytes], Corpus] = OrderedDict()
        self.num_tokens = 0  # of all of them, prompts included

    def drafter(self, prompt_token_ids: list[int], cache_salt: str | None) -> SuffixDrafter:
        """That of another sample of this prompt. Requests with different salts share nothing."""
        key = (cache_salt, array("q", prompt_token_ids).tobytes())
        corpus = self._corpora.get(key)
        if corpus is None:
            corpus = self._corpora[key] = Corpus()
            prompt = corpus.open([])
            corpus.extend(prompt, prompt_token_ids)
            corpus.running.discard(prompt)
            self.num_tokens += corpus.num_tokens
        self._corpora.move_to_end(key)
        return SuffixDrafter(self, corpus, prompt_token_ids)

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

    def __init__(self, corpora: Corpora, corpus: Corpus, prompt_token_ids: list[int]) -> None:
        self._corpora = corpora
        self._corpus = corpus
        beginning = prompt_token_ids[-_LONGEST:]
        self._number = corpus.open(beginning)
        self._num_seen = len(prompt_token_ids)
        corpora.num_tokens += len(beginning)

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` guesses of what follows `token_ids`, which has only grown since the last call."""
        self._catch_up(token_ids)
        return self._corpus.propose(self._number, most)

    def close(self, token_ids: list[int]) -> None:
        """The sample has ended with these tokens, which others may go on to resemble."""
        self._catch_up(token_ids)
        before = self._corpus.num_tokens
        self._corpus.close(self._number)
        self._corpora.num_tokens += self._corpus.num_tokens - before
        self._corpora.make_room()

    def _catch_up(self, token_ids: list[int]) -> None:
        new = token_ids[self._num_seen :]
        if new:
            self._corpus.extend(self._number, new)
            self._corpora.num_tokens += len(new)
            self._num_seen = len(token_ids)
