"""Guessing what a sample draws, from estimated probabilities and its own noise."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rollout_kernels
from rollout.speculation.chances import Chances
from rollout.speculation.followers import Followers
from rollout.speculation.race import Noise, Winner, exponential, first_to_arrive
from rollout_kernels.reference.noise import noise_bits

VOCAB = 40


def drawn(probabilities: np.ndarray, seed: int, sample_index: int, position: int, temperature: float = 1.0) -> int:
    """What the sampling kernel draws."""
    logits = torch.from_numpy(np.log(probabilities)[None].astype(np.float32))
    return int(
        rollout_kernels.sample(
            logits,
            temperature=torch.tensor([temperature]),
            top_k=torch.tensor([0], dtype=torch.int32),
            top_p=torch.tensor([1.0]),
            min_p=torch.tensor([0.0]),
            seed=torch.tensor([seed]),
            sample_index=torch.tensor([sample_index]),
            position=torch.tensor([position]),
        ).token_ids[0]
    )


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 2**17))
def test_the_noise_is_that_of_the_kernels(seed: int, sample_index: int, position: int, token_id: int) -> None:
    bits = noise_bits(seed, sample_index, position, torch.tensor([token_id]))
    key = Noise(seed, sample_index, False).at(position)
    assert exponential(token_id, key) == pytest.approx(-math.log1p(-(int(bits[0]) + 0.5) * 2.0**-32), rel=1e-12)


def test_who_knows_the_probabilities_knows_the_token() -> None:
    generator, noise, num_right, trials = np.random.default_rng(0), Noise(77, 3, False), 0, 1000
    for position in range(trials):
        probabilities = generator.dirichlet(np.full(14, 0.4)) + 1e-4
        probabilities /= probabilities.sum()
        (winner,) = first_to_arrive(enumerate(probabilities.tolist()), 1.0, noise, position)
        num_right += winner.token_id == drawn(probabilities, 77, 3, position)
    assert num_right >= 0.96 * trials  # the others are not looked at, being unlikely to win


def test_the_likely_are_right_as_often_as_two_races_with_one_noise_can_be() -> None:
    """The share of right guesses with estimates q of p is the sum over x of 1 / sum over y of max(p_y/p_x, q_y/q_x)."""
    generator = np.random.default_rng(1)
    p, q = (generator.dirichlet(np.full(12, 0.8)) for _ in range(2))
    bound = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(12))
    noise, trials = Noise(5, 2, False), 3000
    right = sum(
        first_to_arrive(enumerate(q.tolist()), 1.0, noise, position)[0].token_id == drawn(p, 5, 2, position)
        for position in range(trials)
    )
    assert abs(right / trials - bound) < 0.03 + 4 * math.sqrt(bound / trials)
    assert right / trials > 1.1 * float(p @ q)  # than by noise of its own


def test_without_temperature_the_most_likely_wins() -> None:
    greedy = Noise(1, 2, True)
    (winner,) = first_to_arrive([(4, 0.2), (7, 0.6), (9, 0.1)], 0.9, greedy, 3)
    assert winner == pytest.approx(Winner(7, 0.6, 1.0, math.log(3.0)))
    assert first_to_arrive([(4, 0.2)], 0.2, greedy, 3) == [Winner(4, 0.2, 1.0, math.inf)]


def test_chances_become_what_is_seen() -> None:
    chances, generator = Chances(), random.Random(0)
    sure, unsure = (
        Chances.bin_of(Winner(1, 0.9, 0.1, 6.0), 1.0),
        Chances.bin_of(Winner(1, 0.02, 3.0, 0.1), 0.4),
    )
    assert sure > unsure
    assert chances.of(sure) > 0.8 and chances.of(unsure) < 0.1
    for _ in range(3000):
        chances.saw(sure, generator.random() < 0.3)
    assert chances.of(sure) == pytest.approx(0.3, abs=0.08)
    assert chances.of(unsure) < 0.1


@given(st.lists(st.integers(0, 5), min_size=3, max_size=60))
def test_followers_are_counted_after_one_token_and_after_two(tokens: list[int]) -> None:
    followers = Followers(1000)
    for position in range(2, len(tokens)):
        followers.add(tokens[position - 2], tokens[position - 1], [tokens[position]], [1.0])
    before, last = tokens[-2:]
    pairs = [tokens[i] for i in range(2, len(tokens)) if tokens[i - 2 : i] == [before, last]]
    singles = [tokens[i] for i in range(2, len(tokens)) if tokens[i - 1] == last]
    wanted: dict[int, float] = {}
    for token_id in set(singles):
        after_two = pairs.count(token_id) / (len(pairs) + 1)
        after_one = singles.count(token_id) / (len(singles) + 1) / (len(pairs) + 1)
        wanted[token_id] = after_two + (after_one if 1 / (len(pairs) + 1) >= 0.02 else 0.0)
    likely: dict[int, float] = {}
    followers.add_to(likely, 1.0, before, last)
    assert likely == pytest.approx(wanted)
    assert sum(likely.values()) <= 1.0


def test_followers_have_bounds() -> None:
    followers = Followers(100)
    generator = random.Random(0)
    for _ in range(20_000):
        followers.add(generator.randrange(1000), 7, [7 + generator.randrange(500)], [1.0])
        followers.add(3, generator.randrange(1000), [7, 8], [0.5, 0.3])
    assert len(followers._after_one) <= 100 and len(followers._after_two) <= 100
    assert all(len(seen.weights) <= 64 for seen in followers._after_one.values())
    nothing = Followers(0)
    nothing.add(1, 2, [3], [1.0])
    likely: dict[int, float] = {}
    nothing.add_to(likely, 1.0, 1, 2)
    assert likely == {}


def test_followers_that_are_seen_often_stay() -> None:
    followers = Followers(64)
    for number in range(1000):
        followers.add(1, 2, [3], [1.0])
        followers.add(1, 1000 + number, [number], [1.0])
    likely: dict[int, float] = {}
    followers.add_to(likely, 1.0, 1, 2)
    assert likely[3] > 0.9
