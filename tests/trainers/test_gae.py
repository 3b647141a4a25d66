"""Generalised advantages, against the sums of the paper written out, and in the corners where they have other names."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_trainers.credit import assign_advantages
from rollout_trainers.gae import generalized_advantages
from rollout_trainers.loss_config import LossSection
from tests.support.samples import make_sample


def paper(rewards: np.ndarray, values: np.ndarray, discount: float, gae_lambda: float) -> list[float]:
    """Equation 14 of arXiv 1506.02438: (1 - lambda) times the sum of all k-step advantages, weighed by lambda^(k - 1).

    From the end of the sequence on every k-step advantage is the same; their weights add up to lambda^(k - 1).
    """
    count = len(rewards)
    result = []
    for token in range(count):
        left = count - token
        total = 0.0
        for k in range(1, left + 1):
            gained = sum(discount**step * rewards[token + step] for step in range(k))
            expected = discount**k * values[token + k] if token + k < count else 0.0
            weight = (1 - gae_lambda) * gae_lambda ** (k - 1) if k < left else gae_lambda ** (k - 1)
            total += weight * (gained + expected - values[token])
        result.append(total)
    return result


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (1.0, 0.0), (0.0, 0.5)])
def test_advantages_are_those_of_the_paper_and_returns_add_the_values(count: int, discount: float, gae_lambda: float):
    generator = np.random.default_rng(count)
    rewards, values = generator.normal(size=count), generator.normal(size=count)
    advantages, returns = generalized_advantages(rewards, values, discount, gae_lambda)
    np.testing.assert_allclose(advantages, paper(rewards, values, discount, gae_lambda), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(returns, advantages + values, rtol=0, atol=0)


def test_with_lambda_1_the_returns_are_the_rewards_to_go_and_with_0_they_are_one_step_ahead():
    rewards, values = np.array([0.0, -1.0, 2.0]), np.array([0.5, 0.25, 4.0])
    np.testing.assert_allclose(generalized_advantages(rewards, values, 1.0, 1.0)[1], [1.0, 1.0, 2.0])
    np.testing.assert_allclose(generalized_advantages(rewards, values, 1.0, 0.0)[1], [0.25, 3.0, 2.0])


def test_the_reward_comes_with_the_last_token_and_the_kl_with_each():
    samples = [make_sample([1], [3] * count, reward=reward) for count, reward in ((3, 1.0), (0, 5.0), (1, -1.0))]
    for sample in samples:
        sample.values = np.full(sample.num_tokens, 0.5, np.float32)
        sample.reference_logprobs = sample.sampled_logprobs - np.float32(0.25)
        sample.penalty = -0.5
    section = LossSection("ppo", kl_coefficient=0.2, gae_lambda=1.0, whiten=False)
    assign_advantages(samples, 1, section)
    paid = 0.2 * 0.25
    returns = [0.5 - 3 * paid, 0.5 - 2 * paid, 0.5 - paid]
    whole, nothing, single = samples
    assert whole.returns is not None and whole.token_advantages is not None and single.returns is not None
    np.testing.assert_allclose(whole.returns, returns, rtol=1e-5)
    np.testing.assert_allclose(whole.token_advantages, np.array(returns) - 0.5, atol=1e-6)
    np.testing.assert_allclose(single.returns, [-1.5 - paid], rtol=1e-5)
    assert nothing.returns is not None and nothing.returns.size == 0


def test_whitening_changes_the_advantages_and_not_the_returns():
    made = [[make_sample([1], [3] * count, reward=float(count)) for count in (2, 5)] for _ in range(2)]
    for samples, whiten in zip(made, (False, True), strict=True):
        for sample in samples:
            sample.values = np.linspace(0, 1, sample.num_tokens, dtype=np.float32)
        assign_advantages(samples, 1, LossSection("ppo", whiten=whiten))
    plain, white = (
        np.concatenate([sample.token_advantages for sample in samples if sample.token_advantages is not None])
        for samples in made
    )
    np.testing.assert_allclose(white, (plain - plain.mean()) / plain.std(), rtol=1e-3)
    for one, other in zip(*made, strict=True):
        assert one.returns is not None and other.returns is not None
        np.testing.assert_array_equal(one.returns, other.returns)


def test_a_sample_without_values_is_an_error():
    with pytest.raises(ValueError, match="has no values"):
        assign_advantages([make_sample([1], [3])], 1, LossSection("ppo"))
