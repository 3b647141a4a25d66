"""The Triton noise: the reference's bits, and a race that follows the distribution it is given."""

# Triton's language is typed by its compiler: constexpr parameters take plain values, tensors have their methods.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import numpy as np
import pytest
import scipy.stats
import torch
import triton
import triton.language as tl

from rollout_kernels import reference
from rollout_kernels.gpu.noise import exponential, noise_bits, noise_key, race_scores

EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 2**31, 2**32 + 5]


@triton.jit
def exponential_kernel(bits, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, exponential(tl.load(bits + index).to(tl.uint32)))


@triton.jit
def race_kernel(weights, seeds, sample_indices, positions, winners, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """The winners of BLOCK races among TOKENS tokens, side by side."""
    draws = tl.arange(0, BLOCK)
    key = noise_key(tl.load(seeds + draws), tl.load(sample_indices + draws), tl.load(positions + draws))
    best = tl.full((BLOCK,), -1.0, tl.float32)
    winner = tl.full((BLOCK,), -1, tl.int32)
    for token in range(TOKENS):
        scores = race_scores(tl.load(weights + token), key, tl.full((BLOCK,), token, tl.int32))
        winner = tl.where(scores > best, token, winner)
        best = tl.maximum(best, scores)
    tl.store(winners + draws, winner)


def test_bits_equal_the_reference() -> None:
    generator = np.random.default_rng()
    for edge in EDGES:
        numbers = [edge, *generator.integers(-(2**63), 2**63, 2).tolist()]
        generator.shuffle(numbers)
        ids = torch.from_numpy(generator.integers(0, 2**31, 1030))  # one block, and a bit of the next
        expected = reference.noise_bits(*numbers, ids)
        assert torch.equal(noise_bits(*numbers, ids), expected), numbers
        assert torch.equal(noise_bits(*numbers, ids[5:6]), expected[5:6])
    assert noise_bits(1, 2, 3, torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_exponential_equals_float64_on_its_whole_range() -> None:
    generator = np.random.default_rng()
    edges = [0, 1, 2, 2**30 - 1, 2**30, 2**30 + 1, 2**31, 2**32 - 2, 2**32 - 1]
    spread = (2.0 ** generator.uniform(0, 32, 4000)).astype(np.int64)  # as many small ones as large ones
    bits = np.concatenate([edges, spread, generator.integers(0, 2**32, 4000)])
    bits = np.minimum(np.resize(bits, 8192), 2**32 - 1)
    out = torch.full((8192,), torch.nan)
    exponential_kernel[(1,)](torch.from_numpy(bits), out, BLOCK=8192)
    expected = -np.log1p(-(bits + 0.5) * 2.0**-32)
    assert np.abs(out.numpy() / expected - 1).max() < 1e-6


@pytest.mark.parametrize("varied", ["seed", "sample_index", "position"])
def test_the_race_follows_the_distribution(varied: str) -> None:
    draws, tokens = 32_768, 24
    generator = np.random.default_rng(3)
    probabilities = np.exp(generator.normal(size=tokens) * 1.5)
    probabilities[5] = 0.0
    weights = torch.from_numpy(probabilities / probabilities.max()).float()
    numbers = {name: torch.full((draws,), 11, dtype=torch.int64) for name in ("seed", "sample_index", "position")}
    numbers[varied] = torch.arange(draws)
    winners = torch.full((draws,), -1, dtype=torch.int32)
    race_kernel[(1,)](weights, *numbers.values(), winners, TOKENS=tokens, BLOCK=draws)
    observed = np.bincount(winners.numpy(), minlength=tokens)
    assert observed[5] == 0
    possible = np.arange(tokens) != 5
    expected = draws * probabilities[possible] / probabilities.sum()
    assert scipy.stats.chisquare(observed[possible], expected).pvalue > 1e-4
