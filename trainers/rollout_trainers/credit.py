"""From scored samples to advantages: penalties, the KL in the reward, baselines or a critic, scales, whitening."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout_trainers.advantages import group_advantages, rewards_to_go, whiten
from rollout_trainers.gae import generalized_advantages
from rollout_trainers.loss_config import LossSection
from rollout_trainers.losses import kl_estimate
from rollout_trainers.ranks import Ranks
from rollout_trainers.shaping import overlong_penalty
from rollout_trainers.types import Sample


def punish_overlong(samples: Sequence[Sample], max_tokens: int, section: LossSection) -> None:
    """Fills the samples' penalties."""
    for sample in samples:
        sample.penalty = overlong_penalty(
            sample.num_tokens, max_tokens, section.overlong_buffer, section.overlong_penalty
        )


def assign_advantages(
    samples: Sequence[Sample], group_size: int, section: LossSection, ranks: Ranks | None = None
) -> None:
    """Fills the advantages of samples whose groups of `group_size` stand one after the other.

    They need `reward` and `penalty`, `reference_logprobs` where the KL is in the reward, and with a critic its
    `values`; it also gets `returns`. Where all tokens of a sample have the same advantage, `token_advantages` stays
    None. With several `ranks`, each of which has whole groups, they are compared with the samples of all.
    """
    ranks = ranks or Ranks()
    if ranks.most(len(samples)) == 0:
        return
    rewards = np.array([sample.reward + sample.penalty for sample in samples], dtype=np.float64)
    costs = None
    if section.uses_kl and section.kl_placement != "loss":
        costs = [section.kl_coefficient * _kl_by_token(sample, section) for sample in samples]
        if section.kl_placement == "reward":
            rewards -= [part.sum() for part in costs]
    costs_to_go = costs if section.kl_placement == "reward_to_go" else None
    if section.uses_critic:
        _assign_by_critic(samples, rewards, costs_to_go, section)
    else:
        _assign_by_baseline(samples, rewards, costs_to_go, group_size, section, ranks)
    if section.whiten:
        advantages, own = ranks.gather_all([_token_advantages(sample) for sample in samples])
        _set_token_advantages(samples, whiten(advantages)[own])


def _assign_by_baseline(
    samples: Sequence[Sample],
    rewards: np.ndarray,
    costs_to_go: Sequence[np.ndarray] | None,
    group_size: int,
    section: LossSection,
    ranks: Ranks,
) -> None:
    everyones, own = ranks.gather_all(rewards.tolist())
    advantages, _ = group_advantages(np.array(everyones), group_size, section.advantage_scale, section.baseline)
    advantages = advantages[own]
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage, sample.token_advantages = float(advantage), None
    if costs_to_go is not None:
        pairs = zip(advantages, costs_to_go, strict=True)
        _set_token_advantages(samples, [np.float64(value) - rewards_to_go(part) for value, part in pairs])


def _assign_by_critic(
    samples: Sequence[Sample], rewards: np.ndarray, costs_to_go: Sequence[np.ndarray] | None, section: LossSection
) -> None:
    """The reward of a sample comes with its last token, and what an environment gave for a turn with the turn's."""
    advantages = []
    for index, sample in enumerate(samples):
        if sample.values is None:
            raise ValueError("a sample has no values: what the critic expected is not known")
        by_token = rewards_by_token(sample, float(rewards[index]))
        if costs_to_go is not None:
            by_token -= costs_to_go[index]
        estimate, returns = generalized_advantages(by_token, sample.values, section.discount, section.gae_lambda)
        sample.returns = returns.astype(np.float32)
        advantages.append(estimate)
    _set_token_advantages(samples, advantages)


def rewards_by_token(sample: Sample, reward: float) -> np.ndarray:
    """Float64 [c], with the sum `reward`: what an environment gave for a turn stands at the turn's last token, and the
    rest of it at the sample's."""
    by_token = np.zeros(sample.num_tokens)
    if sample.episode is not None and sample.num_tokens:
        for end, part in zip(sample.episode.turn_ends, sample.episode.turn_rewards, strict=False):
            by_token[max(end, 1) - 1] += part
            reward -= part
    by_token[-1:] += reward
    return by_token


def _kl_by_token(sample: Sample, section: LossSection) -> np.ndarray:
    """Float64 [c]: estimates of the KL between the policy that sampled and the reference."""
    if sample.reference_logprobs is None:
        raise ValueError("a sample has no reference_logprobs: the KL in its reward is not known")
    pair = (sample.frozen_logprobs, sample.reference_logprobs)
    ours, reference = (torch.from_numpy(part.astype(np.float64)) for part in pair)
    return kl_estimate(ours, reference, section.kl_estimator).numpy()


def _token_advantages(sample: Sample) -> np.ndarray:
    if sample.token_advantages is not None:
        return sample.token_advantages
    return np.full(sample.num_tokens, sample.advantage, dtype=np.float64)


def _set_token_advantages(samples: Sequence[Sample], advantages: Sequence[np.ndarray]) -> None:
    for sample, part in zip(samples, advantages, strict=True):
        sample.token_advantages = part.astype(np.float32)
        sample.advantage = float(part.mean()) if part.size else 0.0
