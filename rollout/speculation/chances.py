"""How likely guesses are right: what the race that made them looks like, checked against what came."""

from __future__ import annotations

import math

from rollout.speculation.race import Winner

_NUM_BINS = 16
_LEAST, _STEP = -4.5, 0.5  # where the bins begin, and how wide they are, in log odds
_PRIOR = 8.0  # guesses that the formula counts for
_MOST_COUNTED = 500.0  # guesses of a bin: older ones fade


class Chances:
    """Log odds by a formula, in bins; of each bin, the share that was right."""

    def __init__(self) -> None:
        self._num_seen = [_PRIOR] * _NUM_BINS
        self._num_right = [_PRIOR / (1.0 + math.exp(-(_LEAST + _STEP * (place + 0.5)))) for place in range(_NUM_BINS)]

    @staticmethod
    def bin_of(winner: Winner, mass: float) -> int:
        """Which bin a guess belongs to. `mass`: the probability of all tokens in the race together; the rest is with
        tokens that nobody has thought of. The factors are a logistic regression's, on samples of SmolLM2."""
        odds = 0.36 * min(winner.lead, 8.0) + 0.4 * math.log(winner.share) + 6.0 * (mass - 1.0)
        odds -= 0.1 * max(math.log(winner.time), -8.0) + 0.7
        return min(max(int((odds - _LEAST) / _STEP), 0), _NUM_BINS - 1)

    def of(self, place: int) -> float:
        """The chance of a guess in this bin."""
        return self._num_right[place] / self._num_seen[place]

    def saw(self, place: int, is_right: bool) -> None:
        """A guess of this bin has been looked at."""
        if self._num_seen[place] >= _MOST_COUNTED:
            self._num_seen[place] /= 2
            self._num_right[place] /= 2
        self._num_seen[place] += 1.0
        self._num_right[place] += is_right
