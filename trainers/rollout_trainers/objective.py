"""The losses of a micro-batch, put together from the pure functions of `losses`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollout_trainers.histograms import count_ratios
from rollout_trainers.loss_config import LossSection
from rollout_trainers.losses import ClipCounts, Denominators, kl_estimate, policy_loss, token_weights, value_loss
from rollout_trainers.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """A micro-batch's share of the loss of its optimiser step (scalar with gradient), and what it was made of: sums
    over the batch's tokens."""

    loss: torch.Tensor
    clipped: ClipCounts
    kl_sum: float  # k3 estimates of the KL to the reference
    drift_sum: float  # old - new logprobs: an estimate of the KL between the policy that sampled and the new one
    ratios: np.ndarray  # int64: how many of the tokens' ratios, new to old, are in each of `histograms.py`'s bins


def micro_batch_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch,
    denominators: Denominators,
    section: LossSection,
) -> MicroBatchLoss:
    """The loss that `section` describes, given the new policy's `logprobs` and `entropy` [C] of the batch's tokens.

    Per token: the policy loss, times its importance weight where the batch has weights; plus the KL to the reference,
    where that is in the loss; less the entropy bonus.
    """
    losses, clipped = policy_loss(logprobs, batch.old_logprobs, batch.advantages, batch.lengths, section)
    if batch.importance is not None:
        losses = losses * batch.importance
    kl_sum = 0.0
    if batch.reference_logprobs is not None:
        reference = batch.reference_logprobs
        kl_sum = float(kl_estimate(logprobs.detach(), reference, "k3").double().sum())
        if section.uses_kl and section.kl_placement == "loss":
            kl = kl_estimate(logprobs, reference, section.kl_estimator, old_logprobs=batch.old_logprobs)
            losses = losses + section.kl_coefficient * kl
    if section.entropy_coefficient > 0:
        losses = losses - section.entropy_coefficient * entropy
    drift = batch.old_logprobs - logprobs.detach()
    drift_sum = float(drift.double().sum())
    weights = token_weights(batch.lengths, denominators, section.aggregation)
    return MicroBatchLoss((losses * weights).sum(), clipped, kl_sum, drift_sum, count_ratios(-drift))


@dataclass(frozen=True, slots=True)
class CriticLoss:
    """A micro-batch's share of the critic's loss (scalar with gradient), and how many tokens the clipping touched."""

    loss: torch.Tensor
    num_clipped: int


def critic_loss(
    values: torch.Tensor, batch: PackedBatch, denominators: Denominators, section: LossSection, clip: float | None
) -> CriticLoss:
    """The loss of a critic that says `values` [C] where its batch has `values` (before the step's updates) and
    `returns`. Tokens count as they do in the policy's loss."""
    if batch.values is None or batch.returns is None:
        raise ValueError("a sample has no values and returns: there is nothing that a critic could learn")
    losses, num_clipped = value_loss(values, batch.values, batch.returns, clip)
    return CriticLoss((losses * token_weights(batch.lengths, denominators, section.aggregation)).sum(), num_clipped)
