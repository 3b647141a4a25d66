"""Losses as pure functions of tensors over the completion tokens of a packed micro-batch.

Every tensor is flat, one value per completion token: [C]. There is no padding, so there is nothing to mask; a token
that should not count is left out. A trainer that pads gives `kl_estimate` its mask.

A loss is a sum of per-token losses times per-token weights, and the weights are made from the denominators of the
*whole* optimiser step. So the sum over any split into micro-batches (or ranks) has the same value and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout_trainers.config import Aggregation, KLEstimator


@dataclass(frozen=True, slots=True)
class Denominators:
    """What an optimiser step divides by: counted over all its samples, on all ranks, before the first micro-batch."""

    num_tokens: int
    num_sequences: int
    normalizer: int  # the constant length of the "constant" aggregation

    def __post_init__(self) -> None:
        if self.num_sequences < 1 or self.num_tokens < 0 or self.normalizer < 1:
            raise ValueError(f"{self} is not valid: at least one sequence and a normalizer of at least 1")


def token_weights(lengths: torch.Tensor, denominators: Denominators, aggregation: Aggregation) -> torch.Tensor:
    """Weights float32 [C] of the completion tokens of sequences with the given lengths (int64 [S], sum C).

    "token_mean": every token of the step counts the same. "sequence_mean": every sequence counts the same, and a
    token counts as its share of its sequence (a sequence without tokens counts as a zero). "constant": the sum over a
    sequence divided by a constant length, so that long sequences are not discounted (Dr.GRPO).
    """
    lengths = lengths.to(torch.float64)
    if aggregation == "token_mean":
        per_sequence = torch.full_like(lengths, 1.0 / max(denominators.num_tokens, 1))
    elif aggregation == "sequence_mean":
        per_sequence = 1.0 / (denominators.num_sequences * lengths.clamp(min=1))
    elif aggregation == "constant":
        per_sequence = torch.full_like(lengths, 1.0 / (denominators.num_sequences * denominators.normalizer))
    else:
        raise ValueError(f"aggregation={aggregation!r} is not valid: 'token_mean', 'sequence_mean' or 'constant'")
    return per_sequence.repeat_interleave(lengths.to(torch.int64)).to(torch.float32)


@dataclass(frozen=True, slots=True)
class ClipCounts:
    """How many tokens the clipping cut the gradient of, below and above."""

    low: int
    high: int


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, ClipCounts]:
    """Per-token loss float32 [C] of the clipped surrogate objective, differentiable with respect to `logprobs`.

    The ratio of new to old probability is held within [1 - clip_low, 1 + clip_high] wherever leaving it would be
    rewarded. At ratio 1 the loss is `-advantages` and its gradient that of the plain policy gradient.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    with torch.no_grad():
        low = ((ratio < 1.0 - clip_low) & (advantages < 0)).sum()
        high = ((ratio > 1.0 + clip_high) & (advantages > 0)).sum()
    return loss, ClipCounts(int(low), int(high))


def kl_estimate(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    estimator: KLEstimator,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimates [C] of KL(policy || reference), for tokens drawn from the policy.

    With d = log policy - log reference: k1 = d (unbiased value, zero expected gradient), k2 = d^2 / 2 (the gradient of
    this KL), k3 = exp(-d) - 1 + d (unbiased and never negative; the gradient of the KL in the other direction),
    ratio_k3 = k3 times the policy's probability over its own detached one (k3's value and the gradient of this KL).

    `mask` (bool, of the same shape) is for trainers that pad, whose tensors may have any shape (see
    `packing.completion_mask`): where it is false the estimate is exactly 0 and has no gradient, whatever the logprobs.
    """
    difference = logprobs - reference_logprobs
    if mask is not None:
        difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, reference_logprobs, 0.0)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    k3 = torch.expm1(-difference) + difference
    if estimator == "k3":
        return k3
    if estimator == "ratio_k3":
        own = logprobs if mask is None else torch.where(mask, logprobs, 0.0)
        return torch.exp(own - own.detach()) * k3
    raise ValueError(f"kl_estimator={estimator!r} is not valid: 'k1', 'k2', 'k3' or 'ratio_k3'")
