"""Advantages: how much better a sample is than the other samples of its prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout_trainers.config import AdvantageScale

EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Float64 arrays over the groups of one step: mean and standard deviation of each group's rewards, [G]."""

    mean: np.ndarray
    std: np.ndarray

    @property
    def frac_zero_std(self) -> float:
        """Share of groups whose samples all have the same reward, and which therefore teach nothing."""
        return float((self.std == 0.0).mean())


def group_advantages(
    rewards: np.ndarray, group_size: int, scale: AdvantageScale = "group_std"
) -> tuple[np.ndarray, GroupStatistics]:
    """Advantages float32 [N] of `rewards` [N], whose groups of `group_size` samples stand one after the other.

    Each reward minus its group's mean, divided by the group's standard deviation (GRPO), by that of all the step's
    rewards ("batch_std"), or by nothing (Dr.GRPO). Standard deviations are the sample's (n - 1). Raises `ValueError`
    if `rewards` does not divide into groups or holds a value that is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if group_size < 2 or rewards.ndim != 1 or rewards.size == 0 or rewards.size % group_size:
        raise ValueError(f"{rewards.shape} rewards do not divide into groups of {group_size}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"reward of sample {int(np.argmin(np.isfinite(rewards)))} is not a finite number")
    groups = rewards.reshape(-1, group_size)  # [G, n]
    statistics = GroupStatistics(groups.mean(axis=1), _exact_std(groups))
    centred = groups - statistics.mean[:, None]
    centred[statistics.std == 0.0] = 0.0
    if scale == "group_std":
        centred /= statistics.std[:, None] + EPSILON
    elif scale == "batch_std":
        centred /= rewards.std(ddof=1) + EPSILON
    return centred.reshape(-1).astype(np.float32), statistics


def _exact_std(groups: np.ndarray) -> np.ndarray:
    """Standard deviation of each row, exactly zero where the row's values are equal (rounding of the mean aside)."""
    std = groups.std(axis=1, ddof=1)
    return np.where(groups.max(axis=1) == groups.min(axis=1), 0.0, std)
