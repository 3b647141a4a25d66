"""Histograms of a step: numpy's counts, whatever the values; ratios of micro-batches that add up."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_trainers.histograms import (
    NUM_RATIO_BINS,
    Histogram,
    count_ratios,
    ratio_histogram,
    rebin,
    step_histograms,
)
from rollout_trainers.metrics import LearnStatistics, merge_statistics
from tests.support.samples import make_sample

VALUES = st.lists(
    st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(-50, 50).map(float), st.floats(0, 1)),
    max_size=60,
)


@given(VALUES)
def test_every_finite_value_is_counted_between_the_edges(values: list[float]):
    histogram = Histogram.of(np.array(values, np.float64))
    finite = [value for value in values if abs(value) < 1e30]
    if not finite:
        assert histogram is None
        return
    assert histogram is not None
    assert sum(histogram.counts) == len(finite)
    assert len(histogram.counts) <= 33 and histogram.width > 0
    slack = 1e-6 * histogram.width + 1e-12 * max(map(abs, finite))
    assert histogram.edges[0] <= min(finite) + slack and max(finite) <= histogram.edges[-1] + slack
    assert histogram == Histogram.from_plain(json.loads(json.dumps(histogram.plain())))


def test_counts_are_numpys():
    values = np.random.default_rng(0).normal(size=1000)
    histogram = Histogram.of(values)
    assert histogram is not None
    expected, edges = np.histogram(values, bins=32)
    assert histogram.counts == tuple(expected)
    assert histogram.edges == pytest.approx(edges)


def test_whole_numbers_stand_in_the_middle_of_their_bins():
    histogram = Histogram.of(np.array([3.0, 3.0, 5.0]))
    assert histogram is not None
    assert (histogram.low, histogram.width, histogram.counts) == (2.5, 1.0, (2, 0, 1))
    wide = Histogram.of(np.arange(100.0))
    assert wide is not None
    assert wide.width == 4.0 and wide.counts == (4,) * 25
    assert Histogram.of(np.array([1.0] * 7)) == Histogram(0.5, 1.0, (7,))
    equal = Histogram.of(np.array([0.3] * 7))
    assert equal is not None
    assert equal.counts == (7,) and equal.edges == pytest.approx([0.2995, 0.3005])
    assert Histogram.of(np.zeros(0)) is None


@given(VALUES, st.floats(-10, 10), st.floats(0.01, 5))
def test_other_bins_that_cover_all_have_all_counts(values: list[float], low: float, width: float):
    histogram = Histogram.of(np.array([value for value in values if -40 <= value <= 40], np.float64))
    if histogram is None:
        return
    num = int((60 + abs(low)) / width) + 60
    assert sum(rebin(histogram, low - 60, width, 2 * num)) == pytest.approx(sum(histogram.counts))
    assert rebin(histogram, histogram.low, histogram.width, len(histogram.counts)) == pytest.approx(histogram.counts)


def test_a_bin_that_two_share_is_divided():
    assert rebin(Histogram(0.0, 1.0, (8, 4)), -0.5, 1.0, 3) == [4.0, 6.0, 2.0]


def test_ratios_of_micro_batches_add_up_and_one_is_the_middle_of_its_bin():
    new = torch.tensor([-1.0, -2.0, -0.5, -3.0, -2.0])
    old = torch.tensor([-1.0, -2.0, -0.7, -1.0, -9.0])
    counts = count_ratios((new - old)[:2]) + count_ratios((new - old)[2:])
    assert np.array_equal(counts, count_ratios(new - old))
    ratios = np.exp(new.double().numpy() - old.double().numpy())
    edges = -0.025 + 0.05 * np.arange(NUM_RATIO_BINS + 1)
    edges[-1] = np.inf  # the last bin takes what is above
    assert np.array_equal(counts, np.histogram(ratios, edges)[0])
    assert count_ratios(torch.zeros(4))[20] == 4  # [0.975, 1.025)
    histogram = ratio_histogram(count_ratios(torch.zeros(4)))
    assert histogram is not None
    assert histogram.edges == pytest.approx([0.975, 1.025]) and histogram.counts == (4,)
    assert ratio_histogram(np.zeros(NUM_RATIO_BINS, np.int64)) is None
    odd = count_ratios(torch.tensor([math.nan, math.inf, -math.inf]))
    assert odd[-1] == 2 and odd[0] == 1


def test_ratios_of_ranks_add_up_and_each_rank_keeps_its_own():
    first, second = LearnStatistics(), LearnStatistics()
    first.ratios += count_ratios(torch.zeros(3))
    second.ratios += count_ratios(torch.tensor([0.0, 1.0]))
    merged = merge_statistics([first, second])
    assert np.array_equal(merged.ratios, count_ratios(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])))
    assert (first.ratios.sum(), second.ratios.sum()) == (3, 2)


def test_a_step_has_those_of_which_it_has_values():
    samples = [
        make_sample([1], [1, 2, 3, 4, 5], reward=1.0, advantage=0.5),
        make_sample([1], [1, 2, 3], reward=0.0, advantage=-0.5),
    ]
    found = step_histograms(samples, np.zeros(NUM_RATIO_BINS, np.int64))
    assert set(found) == {"histogram/length", "histogram/reward", "histogram/advantage", "histogram/entropy"}
    assert found["histogram/length"].counts == (1, 0, 1)
    assert sum(found["histogram/entropy"].counts) == 8
    samples[0].importance = np.array([1.0, 1.0, 0.5, 0.0, 2.0], np.float32)
    found = step_histograms(samples, count_ratios(torch.zeros(8)))
    assert sum(found["histogram/importance"].counts) == 5 and found["histogram/ratio"].counts == (8,)
