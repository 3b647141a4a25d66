"""The difference between the logprobs of the sampler and the trainer: measured, and corrected where there is one.

With a shared policy (the trainer computes on the sampler's own kernels and tensors) the difference is exactly zero
before the first update of a step. Where the trainer runs another implementation it is not, and the samples then come
from a slightly different distribution than the one whose gradient is taken. Importance weights account for it: the
trainer's probability over the sampler's, of a token or of a whole sequence, bounded or masked.

- "tis": token weights, at most a cap (Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL
  training); "sequence_tis": the same with the weight of the sequence.
- "mis": sequence weights, and sequences above a cap are left out (Liu et al. 2025, When speed kills stability).
- "icepop": token weights, and tokens outside of a range are left out (Ling team 2025, Every step evolves, arXiv
  2510.18855).
- "geometric_mask": "tis", and sequences whose tokens' weights have a geometric mean outside of a narrow range are left
  out (Liu et al. 2025, the same).

What is left out still counts in what the loss is divided by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout_trainers.loss_config import LossSection


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


@dataclass(frozen=True, slots=True)
class Importance:
    """What a sampled sequence of c tokens counts.

    `ratios` float64 [c]: trainer over sampler probability, of each token or of the sequence, as they are (ones where
    the section corrects by none). `kept` bool [c]: what the mask leaves. `weights` float32 [c]: the ratios, at most the
    cap, and zero where the mask has left a token out.
    """

    ratios: np.ndarray
    kept: np.ndarray
    weights: np.ndarray


def importance_weights(trainer_logprobs: np.ndarray, sampler_logprobs: np.ndarray, section: LossSection) -> Importance:
    """The `Importance` of one sequence, from its tokens' logprobs float32 [c] under trainer and sampler."""
    difference = trainer_logprobs.astype(np.float64) - sampler_logprobs.astype(np.float64)
    ratios = np.exp(_at_level(difference, section.importance_level))
    low = section.mask_low
    high = np.inf if section.mask_high is None else section.mask_high
    masked_by = np.exp(_at_level(difference, section.mask_level))
    kept = (masked_by >= low) & (masked_by <= high)
    weights = ratios if section.importance_cap is None else np.minimum(ratios, section.importance_cap)
    return Importance(ratios, kept, np.where(kept, weights, 0.0).astype(np.float32))


def _at_level(difference: np.ndarray, level: str) -> np.ndarray:
    """Log ratios [c] of a sequence's tokens, from the differences of their logprobs."""
    if level == "token":
        return difference
    if level == "sequence":
        return np.full_like(difference, difference.sum())
    if level == "geometric_mean":
        return np.full_like(difference, difference.mean() if difference.size else 0.0)
    return np.zeros_like(difference)


def correction_metrics(
    sequences: Sequence[tuple[np.ndarray, np.ndarray, Importance]], cap: float | None
) -> dict[str, float]:
    """How far trainer and sampler are apart, and what the correction did, over the `sequences` of a step: logprobs
    float32 [c] under trainer and sampler, and their importance, with c of at least 1.

    `rollout_corr/*` as verl names them: perplexities and their differences are means over sequences; `chi2_*` the mean
    of the squared ratio, less one; `rollout_is_*` of the weights; `rollout_rs_masked_fraction` of the tokens that were
    left out; `ratio_fraction_high` of those whose ratio is above the `cap` (`_low`: below its inverse). Empty where
    there are no sequences.
    """
    if not sequences:
        return {}
    pairs = [(trainer.astype(np.float64), sampler.astype(np.float64)) for trainer, sampler, _ in sequences]
    weights = np.concatenate([importance.weights for _, _, importance in sequences]).astype(np.float64)
    ratios = np.concatenate([importance.ratios for _, _, importance in sequences])
    kept = np.concatenate([importance.kept for _, _, importance in sequences])
    difference = np.concatenate([trainer - sampler for trainer, sampler in pairs])
    of_trainer = np.array([-trainer.mean() for trainer, _ in pairs])  # log perplexities [S]
    of_sampler = np.array([-sampler.mean() for _, sampler in pairs])
    totals = np.array([(trainer - sampler).sum() for trainer, sampler in pairs])
    gap = of_trainer - of_sampler
    result = {
        "sampling/importance_sampling_ratio/min": weights.min(),
        "sampling/importance_sampling_ratio/mean": weights.mean(),
        "sampling/importance_sampling_ratio/max": weights.max(),
        "rollout_corr/k3_kl": (np.expm1(difference) - difference).mean(),
        "rollout_corr/training_ppl": np.exp(of_trainer).mean(),
        "rollout_corr/rollout_ppl": np.exp(of_sampler).mean(),
        "rollout_corr/log_ppl_diff": gap.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(gap).mean(),
        "rollout_corr/log_ppl_diff_max": gap.max(),
        "rollout_corr/log_ppl_diff_min": gap.min(),
        "rollout_corr/ppl_ratio": np.exp(gap).mean(),
        "rollout_corr/chi2_token": np.expm1(2.0 * difference).mean(),
        "rollout_corr/chi2_seq": np.expm1(2.0 * totals).mean(),
        "rollout_corr/rollout_is_mean": weights.mean(),
        "rollout_corr/rollout_is_min": weights.min(),
        "rollout_corr/rollout_is_max": weights.max(),
        "rollout_corr/rollout_is_std": weights.std(),
        "rollout_corr/rollout_rs_masked_fraction": 1.0 - kept.mean(),
    }
    if weights.any():
        result["rollout_corr/rollout_is_eff_sample_size"] = weights.mean() ** 2 / np.square(weights).mean()
    if cap is not None:
        result["rollout_corr/rollout_is_ratio_fraction_high"] = (ratios > cap).mean()
        result["rollout_corr/rollout_is_ratio_fraction_low"] = (ratios < 1.0 / cap).mean()
    return {name: float(value) for name, value in result.items()}
