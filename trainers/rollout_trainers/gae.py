"""Generalised advantage estimation (Schulman et al. 2016, High-dimensional continuous control using generalized
advantage estimation, arXiv 1506.02438): advantages of single tokens, from what a critic expects at each of them."""

from __future__ import annotations

import numpy as np


def generalized_advantages(
    rewards: np.ndarray, values: np.ndarray, discount: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns, float64 [c], of one sequence of c tokens with `rewards` and `values` [c].

    `values[t]` is what the critic expects before token t is drawn. With
    delta_t = rewards[t] + discount * values[t + 1] - values[t], the advantage of token t is the sum of
    (discount * gae_lambda)^k delta_(t + k). Returns are advantages plus values: what the critic should have said.

    A sequence is over after its last token, whether the model or the length limit has ended it: nothing is expected
    from there on. With `gae_lambda` of 1 the returns are the rewards to go.
    """
    rewards, values = rewards.astype(np.float64), values.astype(np.float64)
    advantages = np.empty_like(values)
    following = 0.0  # the advantage of the token after, and what was expected there
    expected = 0.0
    for place in range(len(values) - 1, -1, -1):
        delta = rewards[place] + discount * expected - values[place]
        following = delta + discount * gae_lambda * following
        advantages[place] = following
        expected = values[place]
    return advantages, advantages + values
