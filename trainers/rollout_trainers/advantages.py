"""Advantages: how much better a sample is than what was to be expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_trainers.loss_config import AdvantageScale, Baseline

EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Float64 arrays over the groups of one step: mean and standard deviation of each group's rewards, [G].

    A group of one sample has a standard deviation of zero.
    """

    mean: np.ndarray
    std: np.ndarray

    @property
    def frac_zero_std(self) -> float:
        """Share of groups whose samples all have the same reward; compared within groups they teach nothing."""
        return float((self.std == 0.0).mean())


def group_advantages(
    rewards: np.ndarray,
    group_size: int,
    scale: AdvantageScale = "group_std",
    baseline: Baseline = "group_mean",
) -> tuple[np.ndarray, GroupStatistics]:
    """Advantages float32 [N] of `rewards` [N], whose groups of `group_size` samples stand one after the other.

    Each reward less its baseline: the "group_mean" (GRPO), the mean of the *other* samples of its group
    ("leave_one_out": independent of the sample, so that the gradient stays unbiased; Kool et al. 2019), the mean of
    all the step's rewards ("batch_mean"), or "none". Then divided by the group's standard deviation (GRPO), by that of
    all the step's rewards ("batch_std"), or by nothing (Dr.GRPO). Standard deviations are the sample's (n - 1), 0 of
    one reward. Raises `ValueError` if `rewards` does not divide into groups, a group of one sample is compared within
    itself, or a value is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    smallest = 2 if baseline in ("group_mean", "leave_one_out") or scale == "group_std" else 1
    if group_size < smallest or rewards.ndim != 1 or rewards.size == 0 or rewards.size % group_size:
        raise ValueError(f"{rewards.shape} rewards do not divide into groups of {group_size}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"reward of sample {int(np.argmin(np.isfinite(rewards)))} is not a finite number")
    statistics = group_statistics(rewards, group_size)
    centred = _centred(rewards.reshape(-1, group_size), statistics, baseline)
    if scale == "group_std":
        centred /= statistics.std[:, None] + EPSILON
    elif scale == "batch_std":
        centred /= _exact_std(rewards[None, :])[0] + EPSILON
    return centred.reshape(-1).astype(np.float32), statistics


def group_statistics(rewards: np.ndarray, group_size: int) -> GroupStatistics:
    """Of `rewards` [N], whose groups of `group_size` stand one after the other."""
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    return GroupStatistics(groups.mean(axis=1), _exact_std(groups))


def _centred(groups: np.ndarray, statistics: GroupStatistics, baseline: Baseline) -> np.ndarray:
    """Rewards [G, n] less their baseline: exactly zero where the rewards that it is the mean of are equal."""
    if baseline == "none":
        return groups.copy()
    if baseline == "batch_mean":
        return np.zeros_like(groups) if groups.max() == groups.min() else groups - groups.mean()
    centred = groups - statistics.mean[:, None]
    if baseline == "leave_one_out":
        centred *= groups.shape[1] / (groups.shape[1] - 1)
    centred[statistics.std == 0.0] = 0.0
    return centred


def _exact_std(groups: np.ndarray) -> np.ndarray:
    """Standard deviation of each row, exactly zero where the row's values are equal (rounding of the mean aside)."""
    if groups.shape[1] == 1:  # a group of one; or of a step whose budget let a single sample end
        return np.zeros(groups.shape[0])
    std = groups.std(axis=1, ddof=1)
    return np.where(groups.max(axis=1) == groups.min(axis=1), 0.0, std)


def rewards_to_go(per_token: np.ndarray) -> np.ndarray:
    """Float64 [c]: at each token the sum of `per_token` [c] from there to the end, not discounted."""
    return np.cumsum(per_token[::-1].astype(np.float64))[::-1]


def whiten(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Advantages of each sequence's tokens, float [c] each, moved and scaled to mean 0 and standard deviation 1 over
    all tokens: the global normalisation of REINFORCE++ (Hu 2025, arXiv 2501.03262). Float32; zeros where all are
    equal."""
    joined = np.concatenate([np.zeros(0), *(part.astype(np.float64) for part in advantages)])
    if joined.size == 0 or joined.max() == joined.min():
        return [np.zeros(part.shape, np.float32) for part in advantages]
    mean, scale = joined.mean(), joined.std() + EPSILON
    return [((part - mean) / scale).astype(np.float32) for part in advantages]
