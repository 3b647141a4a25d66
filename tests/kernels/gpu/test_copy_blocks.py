"""The Triton `copy_blocks`: pairs take effect in order, in every tensor of a pool, and nothing else changes."""

from __future__ import annotations

import random

import pytest
import torch

from rollout_kernels import reference
from rollout_kernels.gpu import copy_blocks as module
from rollout_kernels.gpu.copy_blocks import copy_blocks, independent_runs
from tests.support.kernels import assert_same_bits, randn

Pairs = list[tuple[int, int]]


def pool(num_tiles: int, seed: int) -> list[torch.Tensor]:
    """Keys and values of two layers, plain and quantised, and scales: tensors of different sizes and dtypes."""
    plain = [randn(num_tiles, 3, 16, 80, dtype=torch.bfloat16, seed=seed + i) for i in range(2)]
    narrow = [(randn(num_tiles, 3, 16, 64, seed=seed + 2) * 40).to(torch.int8)]
    narrow.append(randn(num_tiles, 3, 16, 64, seed=seed + 3).to(torch.float8_e4m3fn))
    return [*plain, *narrow, randn(num_tiles, 3, 16, seed=seed + 4)]


def copied_in_order(sources: list[torch.Tensor], destinations: list[torch.Tensor], pairs: Pairs, tiles: int) -> None:
    """Tile by tile and pair after pair, in bytes."""
    for source, destination in zip(sources, destinations, strict=True):
        for first, second in pairs:
            for tile in range(tiles):
                destination.view(torch.uint8)[second * tiles + tile] = source.view(torch.uint8)[
                    first * tiles + tile
                ].clone()


@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 5)],
        [(0, 1), (0, 2), (4, 3)],
        [(0, 1), (1, 2), (2, 3)],  # a chain
        [(0, 1), (2, 0), (1, 2)],  # two blocks change places
        [(0, 3), (1, 3), (3, 3)],
    ],
)
def test_pairs_take_effect_in_order_within_a_pool(tiles: int, pairs: Pairs) -> None:
    tensors = pool(6 * tiles + 1, seed=1)
    expected = [tensor.clone() for tensor in tensors]
    copied_in_order(expected, expected, pairs, tiles)
    copy_blocks(tensors, tensors, pairs, tiles)
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_between_pools_of_different_sizes() -> None:
    sources, destinations = pool(8, seed=1), pool(14, seed=10)
    expected = [tensor.clone() for tensor in destinations]
    pairs = [(0, 6), (3, 0), (1, 1), (2, 6)]
    copied_in_order(sources, expected, pairs, 2)
    copy_blocks(sources, destinations, pairs, 2)
    for tensor, wanted in zip(destinations, expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_the_transfer_between_devices_copies_the_same() -> None:
    """What runs from GPU to host and back; both are the host here."""
    sources, destinations = pool(8, seed=1), pool(13, seed=10)
    expected = [tensor.clone() for tensor in destinations]
    pairs = [(0, 5), (3, 0), (1, 1), (2, 5)]
    copied_in_order(sources, expected, pairs, 2)
    module._copy_between_devices(sources, destinations, pairs, 2)
    for tensor, wanted in zip(destinations, expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_a_pool_that_is_not_cut_into_words_of_16_bytes() -> None:
    tensors = [torch.arange(7 * 5, dtype=torch.int16).view(7, 5), randn(7 * 4 + 1, seed=1)[1:].view(7, 4)]
    expected = [tensor.clone() for tensor in tensors]
    copied_in_order(expected, expected, [(0, 6), (6, 2)], 1)
    copy_blocks(tensors, tensors, [(0, 6), (6, 2)], 1)
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_nothing_to_copy() -> None:
    tensors = pool(2, seed=1)
    before = [tensor.clone() for tensor in tensors]
    copy_blocks(tensors, tensors, [], 1)
    copy_blocks([], [], [(0, 1)], 1)
    for tensor, wanted in zip(tensors, before, strict=True):
        assert_same_bits(tensor, wanted)


@pytest.mark.parametrize("same_pool", [True, False])
def test_runs_may_be_copied_in_any_order(same_pool: bool) -> None:
    rng = random.Random(3)
    for _ in range(200):
        pairs = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randrange(1, 8))]
        runs = independent_runs(pairs, same_pool)
        assert [pair for run in runs for pair in run] == pairs
        source = torch.arange(6)
        in_order, shuffled = (source, source) if same_pool else (source.clone(), source.clone())
        in_order, shuffled = in_order.clone(), shuffled.clone()
        for first, second in pairs:
            in_order[second] = in_order[first] if same_pool else source[first]
        for run in runs:
            for first, second in rng.sample(run, len(run)):
                shuffled[second] = shuffled[first] if same_pool else source[first]
        assert torch.equal(in_order, shuffled)


def test_the_reference_agrees() -> None:
    ours, theirs = pool(6, seed=1), pool(6, seed=1)
    for pairs in ([(0, 1), (1, 2)], [(5, 0)]):
        copy_blocks(ours, ours, pairs, 1)
        reference.copy_blocks(theirs, theirs, pairs, 1)
    for tensor, wanted in zip(ours, theirs, strict=True):
        assert_same_bits(tensor, wanted)
