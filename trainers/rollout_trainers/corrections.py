"""The difference between the logprobs of the sampler and the trainer: measured, and corrected where there is one.

With a shared policy (the trainer computes on the sampler's own kernels and tensors) the difference is exactly zero
before the first update of a step. Where the trainer runs another implementation it is not, and the samples then come
from a slightly different distribution than the one whose gradient is taken; truncated importance weights account for
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mismatch:
    """|trainer - sampler| of the logprobs of `num_tokens` sampled tokens, and the mean `kl` of sampler - trainer, an
    estimate of the KL between the two. Where no token was compared, it says nothing but that."""

    max: float
    mean: float
    kl: float
    num_tokens: int

    def metrics(self) -> dict[str, float]:
        """Under the field's names; nothing but the count, 0, where there was nothing to compare."""
        if self.num_tokens == 0:
            return {"sampling/logp_difference/num_tokens": 0}
        return {
            "sampling/logp_difference/num_tokens": self.num_tokens,
            "sampling/logp_difference/max": self.max,
            "sampling/logp_difference/mean": self.mean,
            "rollout_corr/kl": self.kl,
        }


def measure_mismatch(trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> Mismatch:
    """Compares float32 logprobs [C] of the same tokens under the trainer and under the sampler."""
    if trainer_logprobs.numel() == 0:
        return Mismatch(0.0, 0.0, 0.0, 0)
    difference = sampler_logprobs.double() - trainer_logprobs.detach().double()
    absolute = difference.abs()
    return Mismatch(float(absolute.max()), float(absolute.mean()), float(difference.mean()), absolute.numel())


def importance_weights(trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """Weights float32 [C], without gradient: trainer over sampler probability of each token, at most `cap`."""
    ratio = torch.exp(trainer_logprobs.detach().double() - sampler_logprobs.double())
    return ratio.clamp(max=cap).to(torch.float32)


def importance_metrics(weights: torch.Tensor) -> dict[str, float]:
    """Smallest, mean and largest importance weight of float32 [C]; empty where there are no tokens."""
    if weights.numel() == 0:
        return {}
    return {
        "sampling/importance_sampling_ratio/min": float(weights.min()),
        "sampling/importance_sampling_ratio/mean": float(weights.double().mean()),
        "sampling/importance_sampling_ratio/max": float(weights.max()),
    }
