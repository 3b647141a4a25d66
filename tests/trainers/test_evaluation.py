"""Intervals and p-values against published and scipy's figures."""

from __future__ import annotations

import pytest
from scipy import stats

from rollout_trainers.evaluation import evaluate_rewards, mcnemar_p_value, wilson_interval


@pytest.mark.parametrize(("successes", "num"), [(0, 10), (10, 10), (3, 20), (57, 128), (1, 1)])
def test_wilson_interval_equals_scipys(successes: int, num: int):
    expected = stats.binomtest(successes, num).proportion_ci(method="wilson")
    assert wilson_interval(successes, num) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_interval_holds_the_share_itself():
    for num in range(1, 300):
        for successes in (0, 1, num - 1, num):
            low, high = wilson_interval(successes, num)
            assert 0 <= low <= successes / num <= high <= 1


def test_wilson_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one trial"):
        wilson_interval(0, 0)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (5, 0), (12, 3), (4, 4), (0, 7)])
def test_mcnemar_equals_the_exact_binomial_test(gained: int, lost: int):
    before = [False] * gained + [True] * lost + [True, False]
    after = [True] * gained + [False] * lost + [True, False]
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar_p_value(before, after) == pytest.approx(expected)


def test_an_evaluation_counts_rewards_at_the_threshold():
    result = evaluate_rewards([1.0, 0.5, 0.0, 1.0], [4, 2, 2, 4], threshold=1.0)
    assert (result.accuracy, result.mean_reward, result.mean_length, result.num) == (0.5, 0.625, 3.0, 4)
    assert result.successes == (True, False, False, True)
    assert str(result).startswith("50.0% (95 % CI 15.0% to 85.0%, n = 4)")
    assert result.metrics()["eval/accuracy"] == 0.5
