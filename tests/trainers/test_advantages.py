"""Advantages of groups of rewards, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_trainers.advantages import EPSILON, group_advantages, rewards_to_go, whiten

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


def test_a_single_reward_is_no_better_than_itself():
    """A step whose budget let one sample end has no standard deviation."""
    advantages, _ = group_advantages(np.array([0.7]), 1, "batch_std", "batch_mean")
    assert advantages.tolist() == [0.0]


def test_batch_std_divides_every_group_by_the_same_number():
    advantages, _ = group_advantages(REWARDS, 4, "batch_std")
    np.testing.assert_allclose(advantages[0], 0.5 / (REWARDS.std(ddof=1) + EPSILON), rtol=1e-6)


@pytest.mark.parametrize("rewards", [[1.0, 2.0, 3.0], [], [1.0, float("nan")], [float("inf"), 0.0]])
def test_rewards_that_do_not_fit_are_refused(rewards: list[float]):
    with pytest.raises(ValueError, match=r"rewards do not divide|not a finite number"):
        group_advantages(np.array(rewards), 2)


def test_leave_one_out_is_the_mean_of_the_other_samples():
    rewards = np.array([1.0, 0.0, 0.25, 0.5, 0.5, 0.5])
    advantages, _ = group_advantages(rewards, 3, "none", "leave_one_out")
    expected = [1 - 0.25 / 2, 0 - 1.25 / 2, 0.25 - 1.0 / 2, 0, 0, 0]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


def test_batch_baselines_compare_groups_and_take_groups_of_one():
    advantages, groups = group_advantages(REWARDS, 1, "none", "batch_mean")
    np.testing.assert_allclose(advantages, REWARDS - REWARDS.mean(), rtol=1e-6)
    assert groups.frac_zero_std == 1.0
    scaled, _ = group_advantages(REWARDS, 2, "batch_std", "batch_mean")
    np.testing.assert_allclose(scaled, (REWARDS - REWARDS.mean()) / (REWARDS.std(ddof=1) + EPSILON), rtol=1e-6)
    assert (group_advantages(np.full(6, 0.1), 1, "none", "batch_mean")[0] == 0.0).all()
    np.testing.assert_array_equal(group_advantages(REWARDS, 4, "none", "none")[0], REWARDS.astype(np.float32))
    with pytest.raises(ValueError, match="do not divide into groups of 1"):
        group_advantages(REWARDS, 1, "none", "leave_one_out")


def test_rewards_to_go_sum_from_each_token_to_the_end():
    np.testing.assert_array_equal(rewards_to_go(np.array([1.0, 2.0, 4.0])), [7.0, 6.0, 4.0])
    assert rewards_to_go(np.zeros(0)).shape == (0,)


def test_whitening_gives_all_tokens_mean_0_and_deviation_1_and_equal_ones_nothing():
    parts = [np.array([1.0, 2.0]), np.zeros(0), np.array([5.0, -4.0, 1.0])]
    white = whiten(parts)
    assert [part.shape for part in white] == [(2,), (0,), (3,)]
    joined = np.concatenate(white)
    np.testing.assert_allclose([joined.mean(), joined.std()], [0.0, 1.0], atol=1e-4)
    assert np.argsort(joined).tolist() == np.argsort(np.concatenate(parts)).tolist()
    assert all((part == 0.0).all() for part in whiten([np.full(2, 0.1), np.full(3, 0.1)]))
