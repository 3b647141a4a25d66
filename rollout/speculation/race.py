"""Which of the likely tokens a sample will draw: known before the model is asked, since its noise is.

A draw is a race. The token x arrives at a time E(x) / p(x), where E(x) is exponential noise, a pure function of (seed,
sample index, position, x), and the first to arrive is drawn. So with an estimate q of p, the first by E(x) / q(x) is
right more often than the most likely one: both races are run with the same noise.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple

_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_ENOUGH = 0.04  # chance that one of the tokens that are left wins, below which none is looked at
_MOST_LOOKED_AT = 16


class Noise:
    """The exponential noise of a sample's draws, that of `rollout_kernels.sample` to some digits.

    None at temperature 0, where the most likely token is drawn.
    """

    __slots__ = ("_state", "is_greedy")

    def __init__(self, seed: int, sample_index: int, is_greedy: bool) -> None:
        state = _mix64((seed + _STEP) & _MASK64)
        self._state = _mix64(((state ^ (sample_index & _MASK64)) + _STEP) & _MASK64)
        self.is_greedy = is_greedy

    def at(self, position: int) -> tuple[int, int]:
        """The key of the draw of the token at `position`."""
        key = _mix64(((self._state ^ position) + _STEP) & _MASK64)
        return key & _MASK32, key >> 32


class Winner(NamedTuple):
    """Who was among the first of a race."""

    token_id: int
    share: float  # of the probability, as it was guessed
    time: float  # of arrival; 1 at temperature 0
    lead: (
        float  # log of how many times as long the second took; of all but the first: the first, so that it is negative
    )


def first_to_arrive(
    likely: Iterable[tuple[int, float]], mass: float, noise: Noise, position: int, count: int = 1
) -> list[Winner]:
    """The first `count`, or fewer, among tokens with their probabilities, of `mass` together. There must be one.

    The likely ones are looked at first, and no more once the others hardly have a chance.
    """
    order = sorted(likely, key=_probability, reverse=True)
    if noise.is_greedy:
        first = order[: count + 1]
        places = [(1.0 / share, share, token_id) for token_id, share in first]
        return _winners(places, count, is_timeless=True)
    key = noise.at(position)
    arrived: list[tuple[float, float, int]] = []  # the first ones so far: time, share, token
    last = math.inf  # when the last of those that are asked for has arrived
    for token_id, share in order[:_MOST_LOOKED_AT]:
        if mass * last < _ENOUGH:
            break
        mass -= share
        time = exponential(token_id, key) / share
        if len(arrived) <= count or time < arrived[-1][0]:
            insort(arrived, (time, share, token_id))
            del arrived[count + 1 :]
            if len(arrived) >= count:
                last = arrived[count - 1][0]
    return _winners(arrived, count)


def _winners(arrived: list[tuple[float, float, int]], count: int, is_timeless: bool = False) -> list[Winner]:
    """Of (time, share, token) in the order of their times; one more than `count` tells how far ahead the first was."""
    first = arrived[0][0]
    lead = math.log(arrived[1][0] / first) if len(arrived) > 1 else math.inf
    return [
        Winner(token_id, share, 1.0 if is_timeless else time, math.log(first / time) if place else lead)
        for place, (time, share, token_id) in enumerate(arrived[:count])
    ]


def _probability(entry: tuple[int, float]) -> float:
    return entry[1]


def exponential(token_id: int, key: tuple[int, int]) -> float:
    """The noise E of a token, from the bits that the kernels' `noise.h` defines."""
    h = (token_id * 0x9E3779B1 + key[0]) & _MASK32
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK32
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK32
    h = ((h ^ (h >> 16)) + key[1]) & _MASK32
    h = ((h ^ (h >> 17)) * 0xED5AD4BB) & _MASK32
    h = ((h ^ (h >> 11)) * 0xAC4C1B51) & _MASK32
    return -math.log1p(-((h ^ (h >> 15)) + 0.5) * 2.0**-32)


def _mix64(h: int) -> int:
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK64
    return h ^ (h >> 31)
