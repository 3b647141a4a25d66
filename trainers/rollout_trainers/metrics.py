"""What a step's samples and updates say, under the names that the field uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollout.memory_phases import MemoryPhases
from rollout.memory_treaty import TreatyPlan
from rollout_trainers.advantages import group_statistics
from rollout_trainers.corrections import Mismatch
from rollout_trainers.histograms import NUM_RATIO_BINS
from rollout_trainers.loss_config import LossSection
from rollout_trainers.objective import MicroBatchLoss
from rollout_trainers.packing import PackedBatch
from rollout_trainers.types import Sample


@dataclass(slots=True)
class UpdateClips:
    """How many of an optimiser step's tokens were clipped, see `losses.ClipCounts`."""

    low: int = 0
    high: int = 0
    dual: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class LearnStatistics:
    """Filled while a step learns from its samples; sums are over all its optimiser steps."""

    loss: float = 0.0  # of the last optimiser step
    grad_norm: float = 0.0  # largest, before clipping
    learning_rate: float = 0.0
    num_updates: int = 0
    num_tokens: int = 0
    num_input_tokens: int = 0
    clips: list[UpdateClips] = field(default_factory=list)  # one an optimiser step
    kl_sum: float = 0.0
    drift_sum: float = 0.0  # old - new logprobs
    ratios: np.ndarray = field(default_factory=lambda: np.zeros(NUM_RATIO_BINS, np.int64))  # of the tokens, by bin
    mismatch: list[Mismatch] = field(default_factory=list)  # one a micro-batch, before the first update
    correction: dict[str, float] = field(default_factory=dict)  # where the old logprobs were recomputed
    further: dict[str, float] = field(
        default_factory=dict
    )  # of what moves beside the policy: a critic, a KL coefficient

    def begin_update(self) -> None:
        """An optimiser step begins."""
        self.loss = 0.0
        self.clips.append(UpdateClips())

    def add(self, batch: PackedBatch, micro: MicroBatchLoss) -> None:
        """Counts a micro-batch of the optimiser step that has begun last."""
        self.loss += float(micro.loss.detach())
        clips = self.clips[-1]
        clips.low += micro.clipped.low
        clips.high += micro.clipped.high
        clips.dual += micro.clipped.dual
        clips.num_tokens += batch.num_completion_tokens
        self.kl_sum += micro.kl_sum
        self.drift_sum += micro.drift_sum
        self.ratios += micro.ratios
        self.num_tokens += batch.num_completion_tokens
        self.num_input_tokens += batch.num_input_tokens

    def metrics(self, section: LossSection) -> dict[str, float]:
        """`clip_ratio/low_min` and `high_max` are over the optimiser steps, the others over their tokens."""
        tokens = max(1, self.num_tokens)
        low, high = sum(clips.low for clips in self.clips), sum(clips.high for clips in self.clips)
        result = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "clip_ratio/low_mean": low / tokens,
            "clip_ratio/low_min": min((clips.low / clips.num_tokens for clips in self.clips), default=0.0),
            "clip_ratio/high_mean": high / tokens,
            "clip_ratio/high_max": max((clips.high / clips.num_tokens for clips in self.clips), default=0.0),
            "clip_ratio/region_mean": (low + high) / tokens,
            "ppo_kl": self.drift_sum / tokens,
        }
        if section.dual_clip is not None:
            result["clip_ratio/dual_mean"] = sum(clips.dual for clips in self.clips) / tokens
        if section.uses_kl:
            result["kl"] = self.kl_sum / tokens
        return result | self.merged_mismatch().metrics() | self.correction | self.further

    def merged_mismatch(self) -> Mismatch:
        """Over all tokens that were compared so far."""
        return merge_mismatches(self.mismatch)


def merge_statistics(parts: Sequence[LearnStatistics]) -> LearnStatistics:
    """Those of one step on all ranks: sums over their micro-batches, and what is the same on all of them."""
    merged = replace(parts[0], clips=[replace(clips) for clips in parts[0].clips], mismatch=[*parts[0].mismatch])
    for part in parts[1:]:
        merged.loss += part.loss
        merged.num_tokens += part.num_tokens
        merged.num_input_tokens += part.num_input_tokens
        merged.kl_sum += part.kl_sum
        merged.drift_sum += part.drift_sum
        merged.ratios = merged.ratios + part.ratios  # not in place: it is the first part's
        merged.mismatch += part.mismatch
        for clips, more in zip(merged.clips, part.clips, strict=True):
            clips.low += more.low
            clips.high += more.high
            clips.dual += more.dual
            clips.num_tokens += more.num_tokens
    return merged


def merge_mismatches(parts: Sequence[Mismatch]) -> Mismatch:
    """The mismatch over all tokens of several micro-batches."""
    num = sum(part.num_tokens for part in parts)
    if num == 0:
        return Mismatch(0.0, 0.0, 0.0, 0)
    mean = sum(part.mean * part.num_tokens for part in parts) / num
    kl = sum(part.kl * part.num_tokens for part in parts) / num
    return Mismatch(max(part.max for part in parts), mean, kl, num)


def sample_metrics(samples: Sequence[Sample], group_size: int, section: LossSection) -> dict[str, float]:
    """Rewards, completion lengths and entropy of a step's samples, in groups of `group_size`."""
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sample.num_tokens for sample in samples])
    groups = group_statistics(rewards, group_size)
    terminated = lengths[[not sample.is_truncated for sample in samples]]
    entropy = np.concatenate([sample.entropy for sample in samples])
    result = {
        "reward": float(rewards.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": 1.0 - terminated.size / lengths.size,
    }
    if group_size > 1:
        result |= {"reward_std": float(groups.std.mean()), "frac_reward_zero_std": groups.frac_zero_std}
    if terminated.size:
        result["completions/mean_terminated_length"] = float(terminated.mean())
        result["completions/min_terminated_length"] = float(terminated.min())
        result["completions/max_terminated_length"] = float(terminated.max())
    if entropy.size:
        result["entropy"] = float(entropy.mean(dtype=np.float64))
    if section.overlong_buffer > 0:
        result["overlong_penalty/mean"] = float(np.mean([sample.penalty for sample in samples]))
    for name in dict.fromkeys(name for sample in samples for name in sample.rewards):
        values = np.array([sample.rewards[name] for sample in samples if name in sample.rewards])
        result[f"rewards/{name}/mean"] = float(values.mean())
        result[f"rewards/{name}/std"] = float(values.std(ddof=1)) if values.size > 1 else 0.0
    return result


def episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Turns and failures of the samples that an environment has answered, and what the environments have counted;
    empty where there are none.

    `tools/call_frequency` is calls an episode, and `tools/failure_frequency` the share of the calls that failed, as TRL
    has them; `num_turns/*` as verl.
    """
    notes = [sample.episode for sample in samples if sample.episode is not None]
    if not notes:
        return {}
    turns = [each.num_turns for each in notes]
    reasons = [sample.finish_reason for sample in samples if sample.episode is not None]
    result = {
        "num_turns/mean": float(np.mean(turns)),
        "num_turns/min": float(min(turns)),
        "num_turns/max": float(max(turns)),
        "environment/error_frequency": reasons.count("error") / len(notes),
        "environment/timeout_frequency": reasons.count("timeout") / len(notes),
    }
    for name in dict.fromkeys(name for each in notes for name in each.metrics):
        result[name] = float(np.mean([each.metrics[name] for each in notes if name in each.metrics]))
    if "tools/calls" in result:
        calls, failures = result.pop("tools/calls"), result.pop("tools/failures")
        result |= {"tools/call_frequency": calls, "tools/failure_frequency": failures / calls if calls else 0.0}
    return result


def speed_metrics(
    samples: Sequence[Sample], statistics: LearnStatistics, seconds: dict[str, float]
) -> dict[str, float]:
    """Tokens a second by phase."""
    sampled = sum(sample.num_tokens for sample in samples)
    everything = sum(len(sample.prompt_token_ids) + len(sample.completion_token_ids) for sample in samples)
    result = {
        "perf/throughput": everything / seconds["step"],
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
