"""Losses as pure functions of tensors over the completion tokens of a packed micro-batch.

Every tensor is flat, one value per completion token: [C]. There is no padding, so there is nothing to mask; a token
that should not count is left out. A trainer that pads gives `kl_estimate` its mask.

A loss is a sum of per-token losses times per-token weights, and the weights are made from the denominators of the
*whole* optimiser step. So the sum over any split into micro-batches (or ranks) has the same value and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout_trainers.loss_config import Aggregation, KLEstimator, LossSection, RatioLevel


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
    """How many tokens the clipping touched: below and above its range, and by the dual clip.

    With a clipped surrogate those are the tokens whose gradient it cut, with a clipped weight those whose weight it
    changed.
    """

    low: int = 0
    high: int = 0
    dual: int = 0


def log_ratios(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, lengths: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """Logarithm [C] of what each token's advantage is multiplied by, differentiable with respect to `logprobs`.

    With d = new - old logprob: "token" is d; "sequence" the sum of d over the token's sequence, so that a sequence is
    one action; "geometric_mean" the mean (s_i of GSPO, arXiv 2507.18071); "gspo_token" has the mean's value and d's
    gradient (s_i,t of the same paper). `lengths` int64 [S] are the sequences' token counts, with sum C.
    """
    difference = logprobs - old_logprobs
    if level == "token":
        return difference
    if level == "sequence":
        return sequence_sums(difference, lengths).repeat_interleave(lengths)
    means = (sequence_sums(difference, lengths) / lengths.clamp(min=1)).repeat_interleave(lengths)
    if level == "geometric_mean":
        return means
    if level == "gspo_token":
        return means.detach() + (difference - difference.detach())
    raise ValueError(f"ratio={level!r} is not valid: 'token', 'sequence', 'geometric_mean' or 'gspo_token'")


def sequence_sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sums [S] of `values` [C] over each of the sequences that lie one after another, int64 `lengths` [S]."""
    if lengths.numel() == 0:
        return values
    return torch.stack([part.sum() for part in values.split(lengths.tolist())])


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    lengths: torch.Tensor,
    section: LossSection,
) -> tuple[torch.Tensor, ClipCounts]:
    """Per-token loss [C] by the section's surrogate and ratio, differentiable with respect to `logprobs`.

    Where new and old policy are the same, its gradient is that of `-advantages * logprobs`; with a ratio of a whole
    sequence, once the sequence is averaged. `lengths` int64 [S] are the sequences' token counts.
    """
    if section.surrogate == "log_probability":
        return -advantages * logprobs, ClipCounts()
    ratio = torch.exp(log_ratios(logprobs, old_logprobs, lengths, section.ratio))
    if section.surrogate == "clipped":
        return clipped_loss(ratio, advantages, section.clip_low, section.clip_high, section.dual_clip)
    if section.surrogate == "cispo":
        return clipped_weight_loss(logprobs, ratio, advantages, section.clip_low, section.clip_high)
    valid = "'clipped', 'cispo' or 'log_probability'"
    raise ValueError(f"surrogate={section.surrogate!r} is not valid: {valid}")


def clipped_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[torch.Tensor, ClipCounts]:
    """Per-token loss [C] of the clipped surrogate objective (Schulman et al. 2017), differentiable through `ratio`.

    The ratio of new to old probability is held within [1 - clip_low, 1 + clip_high] wherever leaving it would be
    rewarded. A negative advantage costs at most `dual_clip` times its size, however large the ratio (Ye et al. 2020).
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    with torch.no_grad():
        low = ((ratio < 1.0 - clip_low) & (advantages < 0)).sum()
        high = ((ratio > 1.0 + clip_high) & (advantages > 0)).sum()
    if dual_clip is None:
        return loss, ClipCounts(int(low), int(high))
    bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
    return torch.minimum(loss, bound), ClipCounts(int(low), int(high), int((loss > bound).sum()))


def clipped_weight_loss(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, ClipCounts]:
    """Per-token loss [C] of CISPO (arXiv 2506.13585): log-probabilities, weighed by the detached ratio held within
    [1 - clip_low, 1 + clip_high]. Its gradient is the weight's share of that of `-advantages * logprobs`."""
    ratio = ratio.detach()
    weights = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    counts = ClipCounts(int((ratio < 1.0 - clip_low).sum()), int((ratio > 1.0 + clip_high).sum()))
    return -advantages * weights * logprobs, counts


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, int]:
    """Per-token loss [C] of a critic, half the squared error, differentiable with respect to `values`; and how many
    tokens' gradient the clipping cut.

    A new value is held within `clip` of the old one wherever leaving it would make the error smaller (Schulman et al.
    2017, in their implementation); None: nowhere.
    """
    squared = (values - returns).square()
    if clip is None:
        return 0.5 * squared, 0
    moved = values - old_values
    held_squared = (old_values + moved.clamp(-clip, clip) - returns).square()
    is_cut = (moved.abs() > clip) & (held_squared > squared)  # what has not moved so far differs by rounding alone
    return 0.5 * torch.maximum(squared, held_squared), int(is_cut.sum())


def kl_estimate(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    estimator: KLEstimator,
    mask: torch.Tensor | None = None,
    old_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimates [C] of KL(policy || reference), for tokens drawn from the policy (Schulman 2020,
    Approximating KL divergence).

    With d = log policy - log reference: k1 = d (unbiased value, zero expected gradient), k2 = d^2 / 2 (the gradient of
    this KL), k3 = exp(-d) - 1 + d (unbiased and never negative; the gradient of the KL in the other direction),
    ratio_k3 = k3 times the policy's probability over that of the policy that drew the tokens (k3's value and the
    gradient of this KL). `old_logprobs` are the latter's, so that this holds after further updates, too; None: the
    tokens were drawn from the policy as it is.

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
        drift = logprobs - (logprobs.detach() if old_logprobs is None else old_logprobs)
        if mask is not None:
            drift = torch.where(mask, drift, 0.0)
        return torch.exp(drift) * k3
    raise ValueError(f"kl_estimator={estimator!r} is not valid: 'k1', 'k2', 'k3' or 'ratio_k3'")
