"""Whether drafts pay, by the clock: what a step costs with and without them, and what they have won and lost so far.

A decode step of n sequences without drafts brings n tokens in `plain` seconds. Each draft costs some more seconds, its
share of guessing included, and brings a token with some chance. It pays where that chance is more than what the same
seconds bring without it. What was found wrong is tried again, but only for a hundredth of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_WEIGHT = 0.2  # of the last step in an average
_FIRST_STEPS = 2  # without drafts, before there are any; and again one ...
_STEPS_BETWEEN = 32  # ... after so many with them: machines are faster at one time than at another
_SHARE_TO_LOSE = 0.01  # of the seconds that decoding takes, what may be lost on trying
_MEMORY = 10.0  # seconds after which a win or a loss counts for a third
_KEPT = 0.999  # of what drafts seemed to cost, after each step without
_UNKNOWN_CHANCE = 0.5  # that a draft must have of being right while nobody knows what it costs
_LEAST_CHANCE = 0.02


@dataclass(slots=True)
class _Steps:
    """Averages over the steps of so many sequences, in seconds."""

    plain: float = 0.0
    num_plain: int = 0  # without drafts, since the last time that they were due
    num_drafting: int = 0  # with drafts, since then
    extra_seconds: float = 0.0  # of steps with drafts, beyond a plain one
    extra_rows: float = 0.0  # their drafts

    @property
    def seconds_a_draft(self) -> float | None:
        return max(self.extra_seconds, 0.0) / self.extra_rows if self.extra_rows else None


def _averaged(average: float, value: float) -> float:
    """The exponential average with one value more. What is much longer than usual (a step that is recorded, a machine
    that does something else) does not count for all that it is; where it came first, it does not count at all."""
    if value < average / 2 or not average:
        return value
    return average + _WEIGHT * (min(value, 2 * average) - average)


class Pace:
    """Decides for steps of each number of sequences on their own."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}
        self._balance = 0.0  # seconds won less seconds lost, lately
        self._seconds = 0.0  # that decoding took, lately
        self._has_asked = False  # for the step that comes
        self._sizes: set[int] = set()  # numbers of rows that there were
        self.seconds_won = 0.0  # since start, summed over the steps that were faster for their drafts
        self.seconds_lost = 0.0  # the same for those that were slower

    def least_chance(self, num_sequences: int) -> float:
        """How likely a draft must be right to be worth its row, in a step of so many sequences."""
        steps = self._steps.get(num_sequences)
        if steps is None or not steps.plain:
            return _UNKNOWN_CHANCE
        cost = steps.seconds_a_draft
        if cost is None:  # what it is in the most similar steps
            known = [(abs(count - num_sequences), other.seconds_a_draft) for count, other in self._steps.items()]
            cost = min((each for each in known if each[1] is not None), default=(0, None))[1]
        if cost is None:
            return _UNKNOWN_CHANCE
        return min(1.0, max(_LEAST_CHANCE, cost * num_sequences / steps.plain))

    def allows(self, num_sequences: int, num_drafts: int, num_right: float) -> bool:
        """Whether the next step, of so many sequences, should have `num_drafts`, if `num_right` of them are expected to
        be right. `took` must follow."""
        self._has_asked = False
        steps = self._steps.setdefault(num_sequences, _Steps())
        if steps.num_drafting >= _STEPS_BETWEEN:
            steps.num_drafting = 0
            steps.num_plain = _FIRST_STEPS - 1
        if steps.num_plain < _FIRST_STEPS or not num_drafts:
            return False
        may_lose = _SHARE_TO_LOSE * self._seconds + steps.plain
        won = num_right * steps.plain / num_sequences - num_drafts * (steps.seconds_a_draft or 0.0)
        self._has_asked = self._balance + min(won, 0.0) > -may_lose
        return self._has_asked

    def took(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A decode step of so many sequences has computed `num_rows`, and brought `num_tokens`.

        The first one with so many rows does not count: it may have been recorded, or captured, for those that follow.
        """
        if num_rows not in self._sizes:
            self._sizes.add(num_rows)
            return
        steps = self._steps.setdefault(num_sequences, _Steps())
        fading = math.exp(-seconds / _MEMORY)
        self._seconds = self._seconds * fading + seconds
        self._balance *= fading
        if not self._has_asked and num_rows == num_sequences:
            steps.plain = _averaged(steps.plain, seconds)
            steps.num_plain += 1
            steps.extra_seconds *= _KEPT
            return
        self._has_asked = False
        if not steps.plain:
            return
        # By chance a step may take any time, also the first of its kind: not all of it counts.
        usual = steps.plain + max(steps.extra_seconds, 0.0)
        won = num_tokens * steps.plain / num_sequences - min(seconds, 5 * usual)
        seconds = min(seconds, (2 if steps.extra_rows else 4) * usual)
        self._balance += won
        self.seconds_won += max(won, 0.0)
        self.seconds_lost += max(-won, 0.0)
        steps.num_drafting += 1
        if num_rows > num_sequences:
            weight = _WEIGHT if steps.extra_rows else 1.0
            steps.extra_seconds += weight * (seconds - steps.plain - steps.extra_seconds)
            steps.extra_rows += weight * (num_rows - num_sequences - steps.extra_rows)
