"""What samples are credited with: penalties for length, the KL in the reward, baselines and whitening."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_trainers.credit import assign_advantages, punish_overlong, rewards_by_token
from rollout_trainers.loss_config import LossSection
from rollout_trainers.packing import pack
from rollout_trainers.shaping import overlong_penalty
from rollout_trainers.types import EpisodeNotes, Sample
from tests.support.samples import make_sample


def two_samples(kl: list[list[float]], rewards: tuple[float, float] = (1.0, 0.0)) -> list[Sample]:
    """A group of two whose k1 estimates are `kl`."""
    made = [make_sample([1], [3] * len(row), reward=reward) for row, reward in zip(kl, rewards, strict=True)]
    for sample, row in zip(made, kl, strict=True):
        sample.reference_logprobs = (sample.sampled_logprobs - np.array(row)).astype(np.float32)
    return made


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (16, 0.0), (17, -0.5), (18, -1.0), (20, -2.0), (21, -2.0)]
)
def test_the_soft_punishment_falls_linearly_over_the_buffer(num_tokens: int, expected: float):
    assert overlong_penalty(num_tokens, 20, 0.2, 2.0) == pytest.approx(expected)


def test_the_soft_punishment_of_the_paper():
    """Equation 13, with 16,384 expected tokens and a cache of 4,096."""
    longest, cache = 20480, 4096
    for length in (1, 16384, 16385, 18000, 20480):
        expected = 0.0 if length <= longest - cache else ((longest - cache) - length) / cache
        assert overlong_penalty(length, longest, 0.2, 1.0) == pytest.approx(expected)
    assert overlong_penalty(20480, 20480, 0.0, 1.0) == 0.0


def test_penalties_count_in_the_advantages_and_not_in_the_reward():
    samples = [make_sample([1], [3] * length, reward=1.0) for length in (5, 10)]
    section = LossSection("dapo", overlong_buffer=0.5, advantage_scale="none")
    punish_overlong(samples, 10, section)
    assign_advantages(samples, 2, section)
    assert [sample.penalty for sample in samples] == [0.0, -1.0]
    assert [sample.advantage for sample in samples] == [0.5, -0.5]
    assert [sample.reward for sample in samples] == [1.0, 1.0]


def test_the_kl_of_a_sequence_is_taken_from_its_reward_before_the_baseline():
    samples = two_samples([[0.1, 0.3], [0.5]])
    assign_advantages(samples, 2, LossSection("rloo", kl_coefficient=0.5))
    expected = (1.0 - 0.5 * 0.4) - (0.0 - 0.5 * 0.5)
    np.testing.assert_allclose([sample.advantage for sample in samples], [expected, -expected], rtol=1e-6)
    assert samples[0].token_advantages is None


def test_the_kl_to_go_makes_advantages_by_token():
    samples = two_samples([[0.1, 0.3], [0.5]])
    section = LossSection(kl_coefficient=0.5, kl_placement="reward_to_go", advantage_scale="none")
    assign_advantages(samples, 2, section)
    batch = pack(samples, [0, 1])
    np.testing.assert_allclose(batch.advantages, [0.5 - 0.2, 0.5 - 0.15, -0.5 - 0.25], rtol=1e-5)
    assert samples[0].advantage == pytest.approx(0.325)


def test_recomputed_logprobs_are_those_that_the_kl_is_of():
    samples = two_samples([[0.0, 0.0], [0.0]])
    for sample in samples:
        sample.old_logprobs = sample.sampled_logprobs + np.float32(1.0)
    assign_advantages(samples, 2, LossSection("rloo", kl_coefficient=0.5))
    assert samples[0].advantage == pytest.approx((1.0 - 1.0) - (0.0 - 0.5), rel=1e-5)


def test_whitening_is_over_tokens_so_that_long_samples_count_more():
    samples = [make_sample([1], [3] * 3, reward=1.0), make_sample([2], [3], reward=0.0), make_sample([2], [])]
    assign_advantages(samples, 1, LossSection("reinforce_pp"))
    values = np.array([1.0, 1.0, 1.0, 0.0])
    expected = (values - 0.75) / (values.std() + 1e-4)
    np.testing.assert_allclose(pack(samples, [0, 1]).advantages, expected, rtol=1e-5)
    assert [sample.has_advantage for sample in samples] == [True, True, False]


def test_no_samples_have_no_advantages_and_a_missing_reference_is_an_error():
    assign_advantages([], 8, LossSection())
    samples = [make_sample([1], [3]), make_sample([1], [3])]
    with pytest.raises(ValueError, match="no reference_logprobs"):
        assign_advantages(samples, 2, LossSection("rloo", kl_coefficient=0.5))


def test_with_a_critic_an_environments_rewards_come_with_the_last_token_of_their_turns():
    sample = make_sample([1], [2, 3, 4, 5, 6], reward=2.0)
    sample.episode = EpisodeNotes([], [0.5, 0.25], [2, 4, 5], None)  # the third turn was not answered
    assert rewards_by_token(sample, 2.0).tolist() == [0, 0.5, 0, 0.25, 1.25]
    assert rewards_by_token(make_sample([1], [2, 3]), 2.0).tolist() == [0, 2.0]
    assert rewards_by_token(make_sample([1], []), 2.0).tolist() == []
    section = LossSection(algorithm="ppo", discount=1.0, gae_lambda=1.0, whiten=False)
    sample.values = np.full(5, 0.1, np.float32)
    assign_advantages([sample], 1, section)
    assert sample.returns is not None  # what is still to come, at each token
    np.testing.assert_allclose(sample.returns, [2.0, 2.0, 1.5, 1.5, 1.25], atol=1e-6)
