"""From scored samples to advantages: penalties, the KL in the reward, baselines, scales, whitening."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout_trainers.advantages import group_advantages, rewards_to_go, whiten
from rollout_trainers.loss_config import LossSection
from rollout_trainers.losses import kl_estimate
from rollout_trainers.shaping import overlong_penalty
from rollout_trainers.types import Sample


def punish_overlong(samples: Sequence[Sample], max_tokens: int, section: LossSection) -> None:
    """Fills the samples' penalties."""
    for sample in samples:
        sample.penalty = overlong_penalty(
            sample.num_tokens, max_tokens, section.overlong_buffer, section.overlong_penalty
        )


def assign_advantages(samples: Sequence[Sample], group_size: int, section: LossSection) -> None:
    """Fills the advantages of samples whose groups of `group_size` stand one after the other.

    They need `reward` and `penalty`, and `reference_logprobs` where the KL is in the reward. Where all tokens of a
    sample have the same advantage, `token_advantages` stays None.
    """
    if not samples:
        return
    rewards = np.array([sample.reward + sample.penalty for sample in samples], dtype=np.float64)
    costs = None
    if section.uses_kl and section.kl_placement != "loss":
        costs = [section.kl_coefficient * _kl_by_token(sample, section) for sample in samples]
        if section.kl_placement == "reward":
            rewards -= [part.sum() for part in costs]
    advantages, _ = group_advantages(rewards, group_size, section.advantage_scale, section.baseline)
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage, sample.token_advantages = float(advantage), None
    if costs is not None and section.kl_placement == "reward_to_go":
        _set_token_advantages(
            samples,
            [np.float64(value) - rewards_to_go(part) for value, part in zip(advantages, costs, strict=True)],
        )
    if section.whiten:
        _set_token_advantages(samples, whiten([_token_advantages(sample) for sample in samples]))


def _kl_by_token(sample: Sample, section: LossSection) -> np.ndarray:
    """Float64 [c]: estimates of the KL between the policy that sampled and the reference."""
    if sample.reference_logprobs is None:
        raise ValueError("a sample has no reference_logprobs: the KL in its reward is not known")
    old = sample.sampled_logprobs if sample.old_logprobs is None else sample.old_logprobs
    ours, reference = (torch.from_numpy(part.astype(np.float64)) for part in (old, sample.reference_logprobs))
    return kl_estimate(ours, reference, section.kl_estimator).numpy()


def _token_advantages(sample: Sample) -> np.ndarray:
    if sample.token_advantages is not None:
        return sample.token_advantages
    return np.full(sample.num_tokens, sample.advantage, dtype=np.float64)


def _set_token_advantages(samples: Sequence[Sample], advantages: Sequence[np.ndarray]) -> None:
    for sample, part in zip(samples, advantages, strict=True):
        sample.token_advantages = part.astype(np.float32)
        sample.advantage = float(part.mean()) if part.size else 0.0
