"""Draws follow the filtered distribution: chi-square over positions, seeds and sample indices."""

import numpy as np
import pytest
import scipy.stats
import torch

import rollout_kernels as rk
from tests.support.kernels import draw_arguments, randn

DRAWS = 20_000
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
]


def expected_distribution(
    logits: np.ndarray, temperature: float = 1.0, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    p = np.exp(logits / temperature)
    p /= p.sum()
    if top_k:
        p = np.where(p >= np.sort(p)[-int(top_k)], p, 0.0)
        p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0.0
    p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


def chi_square(tokens: torch.Tensor, probabilities: np.ndarray) -> float:
    observed = np.bincount(tokens.numpy(), minlength=len(probabilities)).astype(float)
    possible = probabilities > 0
    assert observed[~possible].sum() == 0
    if possible.sum() == 1:
        return 1.0
    return float(scipy.stats.chisquare(observed[possible], probabilities[possible] * len(tokens)).pvalue)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("varied", ["position", "seed", "sample_index"])
def test_draws_follow_the_distribution(case: dict, varied: str) -> None:
    logits = randn(1, 24, seed=1, scale=1.2)
    numbers = {"position": 3, "seed": 99, "sample_index": 0, varied: torch.arange(DRAWS)}
    with rk.use_backend("cpu"):
        result = rk.sample(
            logits, **draw_arguments(DRAWS, **case, **numbers), row_index=torch.zeros(DRAWS, dtype=torch.int64)
        )
    assert chi_square(result.token_ids, expected_distribution(logits[0].double().numpy(), **case)) > 1e-4


def test_the_reference_draws_from_the_distribution() -> None:
    logits = randn(1, 12, seed=2)
    case = {"temperature": 0.9, "top_p": 0.9}
    with rk.use_backend("reference"):
        result = rk.sample(logits, **draw_arguments(3000, **case), row_index=torch.zeros(3000, dtype=torch.int64))
    assert chi_square(result.token_ids, expected_distribution(logits[0].double().numpy(), **case)) > 1e-4


def test_draws_at_neighbouring_positions_are_independent() -> None:
    logits = torch.zeros(1, 6)
    result = rk.sample(logits, **draw_arguments(DRAWS), row_index=torch.zeros(DRAWS, dtype=torch.int64))
    tokens = result.token_ids.numpy()
    for gap in (1, 2, 16):
        table = np.zeros((6, 6))
        np.add.at(table, (tokens[:-gap:2], tokens[gap::2][: len(tokens[:-gap:2])]), 1)
        expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
        statistic = ((table - expected) ** 2 / expected).sum()
        assert scipy.stats.chi2.sf(statistic, 25) > 1e-4


def test_rare_tokens_of_a_large_vocabulary_get_their_share() -> None:
    """Half of the mass lies on one token, the other half evenly on 5000."""
    logits = torch.zeros(1, 5001)
    logits[0, 2500] = np.log(5000)
    result = rk.sample(logits, **draw_arguments(DRAWS), row_index=torch.zeros(DRAWS, dtype=torch.int64))
    rare = result.token_ids[result.token_ids != 2500].numpy()
    assert scipy.stats.binomtest(len(rare), DRAWS, 0.5).pvalue > 1e-4
    blocks = np.bincount(np.minimum(rare, 4999) // 500, minlength=10)
    assert scipy.stats.chisquare(blocks).pvalue > 1e-4
