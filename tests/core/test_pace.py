"""Drafts by the clock: they stay where they win, and cost next to nothing where they lose."""

import random
from dataclasses import dataclass, field

import pytest

from rollout.core.pace import Pace


@dataclass
class Machine:
    """Steps of `num_sequences` that take `plain` seconds and `a_draft` more for each draft, which is right with
    `chance`; one in `slow_every` takes three times as long."""

    num_sequences: int
    a_draft: float
    chance: float
    plain: float = 0.01
    noise: float = 0.0
    slow_every: int = 0
    most_drafts: int = 4
    pace: Pace = field(default_factory=Pace)
    seconds: float = 0.0
    num_tokens: int = 0
    drafts: list[int] = field(default_factory=list)  # of each step

    def run(self, num_steps: int, seed: int = 0) -> None:
        numbers = random.Random(seed)
        n = self.num_sequences
        for step in range(num_steps):
            least = self.pace.least_chance(n)
            length, chance = 0, self.chance
            while length < self.most_drafts and chance >= least:
                length, chance = length + 1, chance * self.chance
            expected = n * sum(self.chance**place for place in range(1, length + 1))
            num_drafts = n * length if self.pace.allows(n, n * length, expected) else 0
            num_right = sum(self._num_right(length, numbers) for _ in range(n)) if num_drafts else 0
            seconds = (self.plain + self.a_draft * num_drafts) * max(0.2, 1 + self.noise * numbers.gauss(0, 1))
            if self.slow_every and step % self.slow_every == 1:
                seconds *= 3
            self.pace.took(n, n + num_drafts, n + num_right, seconds)
            self.seconds += seconds
            self.num_tokens += n + num_right
            self.drafts.append(num_drafts)

    def _num_right(self, length: int, numbers: random.Random) -> int:
        """Leading drafts of a sequence that are right."""
        return next((place for place in range(length) if numbers.random() >= self.chance), length)

    @property
    def speed(self) -> float:
        """Tokens a second, 1 where it is as without drafts."""
        usual = self.plain * (1 + 2 / self.slow_every if self.slow_every else 1)
        return self.num_tokens / self.num_sequences * usual / self.seconds


def test_the_first_steps_have_no_drafts_and_neither_has_one_now_and_then():
    machine = Machine(1, a_draft=0.0005, chance=0.9)
    machine.run(200)
    has_drafts = [count > 0 for count in machine.drafts]
    assert has_drafts[:38] == [False] * 3 + [True] * 33 + [False, True]  # the first of a kind does not count
    assert sum(has_drafts) > 180


@pytest.mark.parametrize("num_sequences", [1, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_drafts_stay_where_they_win(num_sequences: int, noise: float):
    machine = Machine(num_sequences, a_draft=0.0002, chance=0.8, noise=noise, slow_every=97)
    machine.run(400)
    assert machine.speed > 1.2
    assert machine.pace.seconds_won > 10 * machine.pace.seconds_lost


@pytest.mark.parametrize("num_sequences", [1, 4, 8])
@pytest.mark.parametrize("chance", [0.02, 0.3, 0.6])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_where_they_lose_hardly_anything_is_lost_on_trying(num_sequences: int, chance: float, noise: float):
    machine = Machine(num_sequences, a_draft=0.01, chance=chance, noise=noise, slow_every=97)
    machine.run(2000)
    assert machine.speed > 0.98
    assert machine.pace.seconds_lost < 0.02 * machine.seconds


def test_drafts_come_back_when_they_become_right():
    machine = Machine(1, a_draft=0.001, chance=0.01)
    machine.run(300)
    assert sum(count > 0 for count in machine.drafts[-100:]) < 20
    machine.chance = 0.8
    machine.run(300)
    assert sum(count > 0 for count in machine.drafts[-100:]) > 80


def test_drafts_end_when_they_become_wrong_though_their_rate_is_still_thought_to_be_high():
    machine = Machine(1, a_draft=0.004, chance=0.9)
    machine.run(300)
    pace, lost = machine.pace, machine.pace.seconds_lost
    num_drafting = 0
    for _ in range(1000):
        has_drafts = pace.allows(1, 4, 3.4)
        num_drafting += has_drafts
        pace.took(1, 5 if has_drafts else 1, 1, 0.026 if has_drafts else 0.01)
    # What was won before may be lost, and a hundredth of the time.
    assert pace.seconds_lost - lost < pace.seconds_won + 0.01 * 14
    assert num_drafting < 500


def test_a_draft_must_be_as_likely_as_what_its_time_would_bring_without_it():
    pace = Pace()
    assert pace.least_chance(4) == 0.5  # nobody knows
    for _ in range(3):
        pace.took(4, 4, 4, 0.010)
    assert pace.allows(4, 8, 6.0)
    pace.took(4, 12, 10, 1.0)  # the first of its kind: it is recorded
    assert pace.least_chance(4) == 0.5
    assert pace.allows(4, 8, 6.0)
    pace.took(4, 12, 10, 0.014)  # 0.5 ms a draft, in which 0.2 tokens come without it
    assert pace.least_chance(4) == pytest.approx(0.2)
    assert not pace.allows(4, 0, 0.0)
    assert pace.least_chance(1) == 0.5  # that is another kind of step ...
    for _ in range(3):
        pace.took(1, 1, 1, 0.008)
    assert pace.least_chance(1) == pytest.approx(0.5 / 8)  # ... in which a draft seems to cost as much


def test_won_and_lost_seconds_are_those_against_plain_steps():
    pace = Pace()
    for _ in range(3):
        pace.took(1, 1, 1, 0.010)
    pace.took(1, 5, 4, 0.015)
    assert pace.allows(1, 4, 3.0)
    pace.took(1, 5, 4, 0.015)
    assert (pace.seconds_won, pace.seconds_lost) == (pytest.approx(0.025), 0.0)
    assert pace.allows(1, 4, 3.0)
    pace.took(1, 5, 1, 0.013)
    assert (pace.seconds_won, pace.seconds_lost) == (pytest.approx(0.025), pytest.approx(0.003))


def test_plain_steps_that_took_long_by_chance_at_first_are_forgotten():
    pace = Pace()
    for seconds in (1.0, 1.0, 0.9, 0.01, 0.01):
        pace.took(1, 1, 1, seconds)
    pace.took(1, 5, 2, 1.0)
    assert pace.allows(1, 4, 1.0)
    pace.took(1, 5, 2, 0.014)
    assert pace.least_chance(1) == pytest.approx(0.1)
    assert pace.seconds_won == pytest.approx(0.006)


def test_costs_stay_finite_where_plain_steps_seemed_slow():
    pace = Pace()
    for _ in range(3):
        pace.took(1, 1, 1, 1.0)
    for _ in range(100):
        has_drafts = pace.allows(1, 4, 2.0)
        pace.took(1, 5 if has_drafts else 1, 1, 0.012 if has_drafts else 0.01)
    assert pace.seconds_won < 40
    assert 0.02 <= pace.least_chance(1) <= 0.1


@pytest.mark.parametrize("stall", [0.03, 0.3, 3.0])
def test_a_step_that_stalls_ends_drafts_for_a_moment_only(stall: float):
    # The machine did something else in the first step with drafts that counts, or in the first ones.
    for num_stalled in (1, 3):
        pace = Pace()
        num_drafting = 0
        for _ in range(4000):
            has_drafts = pace.allows(1, 4, 3.4)
            num_drafting += has_drafts
            seconds = 0.0105 if has_drafts else 0.01
            if has_drafts and 2 <= num_drafting < 2 + num_stalled:
                seconds += stall
            pace.took(1, 5 if has_drafts else 1, 4 if has_drafts else 1, seconds)
        assert num_drafting > 2000
