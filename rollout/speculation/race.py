"""Which of the likely tokens a sample will draw: known before the model is asked, since its noise is.

A draw is a race. The token x arrives at a time E(x) / p(x), where E(x) is exponential noise, a pure function of (seed,
sample index, position, x), and the first to arrive is drawn. So with an estimate q of p, the first by E(x) / q(x) is
right more often than the most likely one: both races are run with the same noise.
"""

from __future__ import annotations

import math
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
    """Who won a race."""

    token_id: int
    share: float  # of the probability, as it was guessed
    time: float  # of arrival; 1 at temperature 0
    lead: float  # log of how many times as long the second took


def first_to_arrive(likely: Iterable[tuple[int, float]], mass: float, noise: Noise, position: int) -> Winner:
    """The winner among tokens with their probabilities, of `mass` together. At least one must be given.

    The likely ones are looked at first, and no more once the others hardly have a chance.
    """
    order = sorted(likely, key=_probability, reverse=True)
    if noise.is_greedy:
        (token_id, share), *others = order[:2]
        return Winner(token_id, share, 1.0, math.log(share / others[0][1]) if others else math.inf)
    key = noise.at(position)
    best, second = math.inf, math.inf
    winner = order[0]
    for entry in order[:_MOST_LOOKED_AT]:
        if mass * best < _ENOUGH:
            break
        token_id, share = entry
        mass -= share
        time = exponential(token_id, key) / share
        if time < best:
            best, second, winner = time, best, entry
        elif time < second:
            second = time
    return Winner(*winner, best, math.log(second / best) if second < math.inf else math.inf)


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
