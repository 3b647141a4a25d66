"""The noise: C++ and reference agree bit for bit, and it looks like independent uniform bits."""

import numpy as np
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_kernels as rk

INT64 = st.integers(-(2**63), 2**63 - 1)


def bits(seed: int, sample_index: int, position: int, count: int, backend: str = "cpu") -> np.ndarray:
    with rk.use_backend(backend):
        return rk.noise_bits(seed, sample_index, position, torch.arange(count)).numpy()


@settings(max_examples=50, deadline=None)
@given(seed=INT64, sample_index=INT64, position=INT64, ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
def test_reference_equals_cpp(seed: int, sample_index: int, position: int, ids: list[int]) -> None:
    token_ids = torch.tensor(ids)
    with rk.use_backend("cpu"):
        expected = rk.noise_bits(seed, sample_index, position, token_ids)
    with rk.use_backend("reference"):
        assert torch.equal(rk.noise_bits(seed, sample_index, position, token_ids), expected)


def test_known_values_stay_as_they_are() -> None:
    """Replays of recorded rollouts depend on these."""
    assert bits(0, 0, 0, 4).tolist() == [3644287876, 2100553861, 3925046028, 1688069849]
    assert bits(2**63 - 1, 3, 1000, 4).tolist() == [2675526584, 902333067, 3276779788, 2227850256]


def test_each_of_the_three_numbers_matters_and_they_do_not_commute() -> None:
    streams = [tuple(bits(*key, 8)) for key in [(1, 2, 3), (2, 1, 3), (1, 3, 2), (3, 2, 1), (1, 2, 4), (2, 2, 3)]]
    assert len(set(streams)) == len(streams)


def test_every_byte_is_uniform() -> None:
    values = np.concatenate([bits(7, 0, position, 50_000) for position in range(4)]).astype(np.uint32)
    for byte in values.view(np.uint8).reshape(-1, 4).T:
        assert scipy.stats.chisquare(np.bincount(byte, minlength=256)).pvalue > 1e-4


def test_neighbours_in_every_direction_are_uncorrelated() -> None:
    """Bit by bit: ids, positions, sample indices and seeds that differ by one flip each bit half of the time."""
    count = 40_000
    base = bits(5, 6, 7, count + 1)
    pairs = {
        "id": (base[:-1], base[1:]),
        "position": (base[:-1], bits(5, 6, 8, count)),
        "sample index": (base[:-1], bits(5, 7, 7, count)),
        "seed": (base[:-1], bits(6, 6, 7, count)),
    }
    for name, (a, b) in pairs.items():
        flips = ((a ^ b)[:, None] >> np.arange(32)) & 1
        worst = np.abs(flips.mean(0) - 0.5).max() * 2 * np.sqrt(count)
        assert worst < 4.8, name  # in standard deviations, the largest of 32


def test_first_ids_over_positions_are_uniform() -> None:
    values = np.array([bits(11, 0, position, 2) for position in range(4000)])
    for column in values.T:
        assert scipy.stats.kstest(column / 2**32, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(values.T)[0, 1]) < 0.07
