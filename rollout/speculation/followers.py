"""What has followed single tokens and pairs of them, in all samples of any prompt: weak guesses, nearly everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_MOST_TOKENS = 32  # remembered of what follows a context; the rare ones go
_LEAST_REST = 0.02  # of the probability, that is worth giving away
_PAIR = 2**32


@dataclass(slots=True)
class _Seen:
    """What has followed one context."""

    total: float = 0.0
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, likely: Sequence[int], shares: Sequence[float]) -> None:
        weights = self.weights
        self.total += 1.0
        for token_id, share in zip(likely, shares, strict=True):
            weights[token_id] = weights.get(token_id, 0.0) + share
        if len(weights) > 2 * _MOST_TOKENS:
            kept = sorted(weights, key=weights.__getitem__, reverse=True)[:_MOST_TOKENS]
            self.weights = {token_id: weights[token_id] for token_id in kept}

    def fade(self) -> None:
        """Counts for half from now on, and forgets what has hardly been seen."""
        self.total /= 2
        self.weights = {token_id: weight / 2 for token_id, weight in self.weights.items() if weight >= 1.5}


class Followers:
    """Counts, in bounded memory: when there are too many contexts, all that is known counts for half, and what has been
    seen once is forgotten."""

    def __init__(self, most_contexts: int) -> None:
        """Of each length at most `most_contexts`; with 0 nothing is remembered."""
        self._most_contexts = most_contexts
        self._after_one: dict[int, _Seen] = {}
        self._after_two: dict[int, _Seen] = {}

    def add(self, before: int, last: int, likely: Sequence[int], shares: Sequence[float]) -> None:
        """These tokens could follow `before`, `last`, with these probabilities; or one has, with 1."""
        if not self._most_contexts:
            return
        for contexts, key in ((self._after_one, last), (self._after_two, before * _PAIR + last)):
            seen = contexts.get(key)
            if seen is None:
                if len(contexts) >= self._most_contexts:
                    _fade(contexts)
                seen = contexts[key] = _Seen()
            seen.add(likely, shares)

    def add_to(self, likely: dict[int, float], rest: float, before: int, last: int) -> None:
        """Adds `rest` of the probability of what comes next to estimates: n / (n + 1) of it goes to what has followed
        these two tokens, in n places, and of what is left as much to what has followed the last one alone."""
        for seen in (self._after_two.get(before * _PAIR + last), self._after_one.get(last)):
            if seen is None or rest < _LEAST_REST:
                continue
            rest /= seen.total + 1.0
            for token_id, weight in seen.weights.items():
                likely[token_id] = likely.get(token_id, 0.0) + weight * rest


def _fade(contexts: dict[int, _Seen]) -> None:
    """Makes room: at least a quarter of the contexts go, of those that were seen oftener the oldest."""
    num_before = len(contexts)
    for seen in contexts.values():
        seen.fade()
    for key in [key for key, seen in contexts.items() if not seen.weights]:
        del contexts[key]
    num_left = 3 * num_before // 4
    for key in list(contexts)[: len(contexts) - num_left]:
        del contexts[key]
