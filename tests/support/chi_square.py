"""Whether counts are those of a known distribution."""

from __future__ import annotations

import numpy as np
from scipy.stats import chi2

_LEAST_EXPECTED = 5.0  # in a cell; rarer outcomes are counted together


def chi_square(outcomes: np.ndarray, joint: np.ndarray) -> float:
    """The p-value of `outcomes`, int64 [N, K], under `joint`, float64 with K axes: how likely the outcomes of that
    distribution are to lie further off. 0 where there is an outcome that it does not have."""
    cells = np.ravel_multi_index(tuple(outcomes.T), joint.shape)
    counts = np.bincount(cells, minlength=joint.size).astype(np.float64)
    expected = joint.reshape(-1) * len(outcomes)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < _LEAST_EXPECTED
    counts, expected = (np.append(values[~rare], values[rare].sum()) for values in (counts, expected))
    if expected[-1] < _LEAST_EXPECTED:  # too rare together, too: with the last of the others
        counts[-2], expected[-2] = counts[-2] + counts[-1], expected[-2] + expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(counts) - 1))


def three_of_chain(rows: np.ndarray, num_before: int) -> np.ndarray:
    """The joint distribution float64 [V, V, V] of three tokens, behind `num_before` others that follow the pair (0, 0).

    Each depends on the two before it: `rows`, float64 [V, V, V], are the distributions after each pair."""
    pair = np.zeros(rows.shape[:2])
    pair[0, 0] = 1.0
    for _ in range(num_before):
        pair = np.einsum("ab,abc->bc", pair, rows)
    return np.einsum("ab,abx,bxy,xyz->xyz", pair, rows, rows, rows)
