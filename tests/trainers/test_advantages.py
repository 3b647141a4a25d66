"""Advantages of groups of rewards, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_trainers.advantages import EPSILON, group_advantages

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.1, 0.1, 0.1, 0.1])


def test_group_std_centres_and_scales_each_group():
    advantages, groups = group_advantages(REWARDS, 4)
    scale = np.std([1, 0, 0, 1], ddof=1) + EPSILON
    expected = np.array([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]) / scale
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    np.testing.assert_allclose(groups.mean, [0.5, 0.1])
    assert groups.frac_zero_std == 0.5


def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero():
    for scale in ("group_std", "batch_std", "none"):
        advantages, _ = group_advantages(REWARDS, 4, scale)  # type: ignore[arg-type]
        assert (advantages[4:] == 0.0).all()


def test_unscaled_advantages_are_differences_to_the_group_mean():
    advantages, _ = group_advantages(REWARDS, 4, "none")
    np.testing.assert_array_equal(advantages[:4], np.array([0.5, -0.5, -0.5, 0.5], np.float32))


def test_batch_std_divides_every_group_by_the_same_number():
    advantages, _ = group_advantages(REWARDS, 4, "batch_std")
    np.testing.assert_allclose(advantages[0], 0.5 / (REWARDS.std(ddof=1) + EPSILON), rtol=1e-6)


@pytest.mark.parametrize("rewards", [[1.0, 2.0, 3.0], [], [1.0, float("nan")], [float("inf"), 0.0]])
def test_rewards_that_do_not_fit_are_refused(rewards: list[float]):
    with pytest.raises(ValueError, match=r"rewards do not divide|not a finite number"):
        group_advantages(np.array(rewards), 2)
