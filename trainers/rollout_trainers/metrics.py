"""What a step's samples and updates say, under the names that the field uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout.memory_phases import MemoryPhases
from rollout.memory_treaty import TreatyPlan
from rollout_trainers.advantages import GroupStatistics
from rollout_trainers.corrections import Mismatch
from rollout_trainers.types import Sample


@dataclass(slots=True)
class LearnStatistics:
    """Filled while a step learns from its samples; sums are over all its optimiser steps."""

    loss: float = 0.0  # of the last optimiser step
    grad_norm: float = 0.0  # largest, before clipping
    learning_rate: float = 0.0
    num_updates: int = 0
    num_tokens: int = 0
    num_input_tokens: int = 0
    clipped_low: int = 0
    clipped_high: int = 0
    kl_sum: float = 0.0
    mismatch: list[Mismatch] = field(default_factory=list)  # one a micro-batch, before the first update
    importance: dict[str, float] = field(default_factory=dict)

    def metrics(self, with_kl: bool) -> dict[str, float]:
        tokens = max(1, self.num_tokens)
        result = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "clip_ratio/low_mean": self.clipped_low / tokens,
            "clip_ratio/high_mean": self.clipped_high / tokens,
            "clip_ratio/region_mean": (self.clipped_low + self.clipped_high) / tokens,
        }
        if with_kl:
            result["kl"] = self.kl_sum / tokens
        return result | self.merged_mismatch().metrics() | self.importance

    def merged_mismatch(self) -> Mismatch:
        """Over all tokens that were compared so far."""
        return merge_mismatches(self.mismatch)


def merge_mismatches(parts: Sequence[Mismatch]) -> Mismatch:
    """The mismatch over all tokens of several micro-batches."""
    num = sum(part.num_tokens for part in parts)
    if num == 0:
        return Mismatch(0.0, 0.0, 0.0, 0)
    mean = sum(part.mean * part.num_tokens for part in parts) / num
    kl = sum(part.kl * part.num_tokens for part in parts) / num
    return Mismatch(max(part.max for part in parts), mean, kl, num)


def sample_metrics(samples: Sequence[Sample], groups: GroupStatistics) -> dict[str, float]:
    """Rewards, completion lengths and entropy of a step's samples."""
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.num_tokens for sample in samples])
    terminated = lengths[[not sample.is_truncated for sample in samples]]
    entropy = np.concatenate([sample.entropy for sample in samples])
    result = {
        "reward": float(rewards.mean()),
        "reward_std": float(groups.std.mean()),
        "frac_reward_zero_std": groups.frac_zero_std,
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": 1.0 - terminated.size / lengths.size,
    }
    if terminated.size:
        result["completions/mean_terminated_length"] = float(terminated.mean())
        result["completions/min_terminated_length"] = float(terminated.min())
        result["completions/max_terminated_length"] = float(terminated.max())
    if entropy.size:
        result["entropy"] = float(entropy.mean(dtype=np.float64))
    for name in samples[0].rewards:
        values = np.array([sample.rewards[name] for sample in samples])
        result[f"rewards/{name}/mean"] = float(values.mean())
        result[f"rewards/{name}/std"] = float(values.std(ddof=1))
    return result


def speed_metrics(
    samples: Sequence[Sample], statistics: LearnStatistics, seconds: dict[str, float]
) -> dict[str, float]:
    """Tokens a second by phase."""
    sampled = sum(sample.num_tokens for sample in samples)
    prompts = sum(len(sample.prompt_token_ids) for sample in samples)
    result = {
        "perf/throughput": (sampled + prompts) / seconds["step"],
        "perf/gen_tokens_per_s": sampled / seconds["gen"],
    }
    if statistics.num_input_tokens:
        result["perf/train_tokens_per_s"] = statistics.num_input_tokens / seconds["train"]
    return result


def memory_metrics(memory: MemoryPhases, plan: TreatyPlan | None) -> dict[str, float]:
    """`memory/<phase>_peak_bytes` and `memory/<phase>_bytes` (at its end) of the device that sampler and trainer share,
    and the largest peak so far; the budget and the KV pool that it leaves, where there is a treaty."""
    result: dict[str, float] = {}
    if plan is not None:
        result |= {"memory/budget_bytes": plan.budget, "memory/kv_pool_bytes": plan.kv_cache}
    for name, phase in memory.measured.items():
        result |= {f"memory/{name}_peak_bytes": phase.peak, f"memory/{name}_bytes": phase.resident}
    return result | {"perf/memory_peak_gb": memory.largest / 2**30}
