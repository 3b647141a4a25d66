"""Gauges and counters of an engine, as one flat dictionary of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import TypeVar

from rollout.core.schedule import SchedulePlan, SchedulerStats
from rollout.request import FinishReason, Request


@dataclass(slots=True)
class EngineCounters:
    """Sums since the engine started."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0  # tokens whose KV was computed: prompts, outputs, and both again after preemption
    num_errors: int = 0  # requests whose logits were not numbers
    step_seconds: float = 0.0
    peak_blocks_in_use: int = 0
    waste_numerator: int = 0  # sum over steps of KV slots allocated but unused
    waste_denominator: int = 0  # sum over steps of KV slots allocated

    def stepped(
        self, plan: SchedulePlan, updates: Sequence[tuple[Request, list[int]]], seconds: float, stats: SchedulerStats
    ) -> None:
        """Counts a step, and what it gave to which requests. `stats` are those after it."""
        self.num_steps += 1
        self.step_seconds += seconds
        self.num_generated_tokens += sum(len(token_ids) for _, token_ids in updates)
        self.num_computed_tokens += plan.num_scheduled_tokens
        self.num_errors += sum(request.finish_reason is FinishReason.ERROR for request, _ in updates)
        self.peak_blocks_in_use = max(self.peak_blocks_in_use, stats.num_blocks - stats.num_free_blocks)
        self.waste_numerator += stats.num_slots_allocated - stats.num_slots_used
        self.waste_denominator += stats.num_slots_allocated


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What one engine counts, at one moment."""

    stats: SchedulerStats
    counters: EngineCounters
    policy_version: int
    # Drafted and accepted tokens, by place; alternatives tried, and those that were right. Empty: no speculation.
    drafts: list[list[int]] = field(default_factory=list)
    draft_seconds: tuple[float, float] | None = None  # won and lost by steps with drafts, where the clock is watched


_Counts = TypeVar("_Counts", SchedulerStats, EngineCounters)


def _sum(parts: Sequence[_Counts]) -> _Counts:
    """Field by field: all of them are counts."""
    return type(parts[0])(*map(sum, zip(*map(astuple, parts), strict=True)))


def engine_metrics(snapshots: Sequence[EngineSnapshot]) -> dict[str, float]:
    """The metrics of an engine, or of its replicas together: counts add up, shares are of all together.

    `*_total` count since start; `tokens_per_second` is over the time spent in steps; shares are from 0 to 1.

    `kv_cache_usage` is of now, `kv_cache_usage_peak` the largest after any step. `kv_cache_waste` is the share of
    allocated KV slots that held no token, over all steps.

    Where there is speculation, drafts are counted too: those computed, and those that were right, all together and at
    each place among the drafts of a sequence's step, from 1 on. `speculation_seconds_won_total` and `_lost_total` add
    up by how much steps with drafts were faster, or slower, than their tokens would have come without; they are not
    there with `only_if_faster=False`.
    Of a drafter with KV of its own: the known tokens that it has computed to catch up, and its pool now.
    """
    stats, counters = _sum([s.stats for s in snapshots]), _sum([s.counters for s in snapshots])
    num_generated = counters.num_generated_tokens + stats.num_beam_tokens
    in_use = stats.num_blocks - stats.num_free_blocks
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_blocks": stats.num_blocks,
        "kv_cache_usage": in_use / stats.num_blocks,
        "kv_cache_usage_peak": counters.peak_blocks_in_use / stats.num_blocks,
        "kv_cache_waste": counters.waste_numerator / max(1, counters.waste_denominator),
        "prefix_cache_hit_rate": stats.prefix_cache_hits / max(1, stats.prefix_cache_queries),
        "num_preemptions_total": stats.num_preemptions,
        "num_errors_total": counters.num_errors,
        "num_steps_total": counters.num_steps,
        "generation_tokens_total": num_generated,
        "computed_tokens_total": counters.num_computed_tokens,
        "step_seconds_total": counters.step_seconds,
        # Replicas step at the same time.
        "tokens_per_second": len(snapshots) * num_generated / max(counters.step_seconds, 1e-9),
        "policy_version": min(snapshot.policy_version for snapshot in snapshots),
        **_draft_metrics([snapshot for snapshot in snapshots if snapshot.drafts]),
        **_drafter_metrics(stats),
    }


def _drafter_metrics(stats: SchedulerStats) -> dict[str, float]:
    """Of drafters with KV of their own."""
    if not stats.num_draft_blocks:
        return {}
    return {
        "drafter_computed_tokens_total": stats.num_drafter_tokens,
        "drafter_kv_cache_blocks": stats.num_draft_blocks,
        "drafter_kv_cache_usage": 1 - stats.num_free_draft_blocks / stats.num_draft_blocks,
    }


def _draft_metrics(snapshots: Sequence[EngineSnapshot]) -> dict[str, float]:
    """Of engines that speculate."""
    if not snapshots:
        return {}
    metrics: dict[str, float] = {}
    drafts = [snapshot.drafts for snapshot in snapshots]
    *by_names, alternatives = zip(*drafts, strict=True)
    tried, right = zip(*alternatives, strict=True)
    metrics |= {"alternative_tokens_total": sum(tried), "accepted_alternative_tokens_total": sum(right)}
    for name, columns in zip(("draft_tokens", "accepted_draft_tokens"), by_names, strict=True):
        by_place = [sum(counts) for counts in zip(*columns, strict=True)]
        metrics[f"{name}_total"] = sum(by_place)
        metrics |= {f"{name}_total_at_{place}": count for place, count in enumerate(by_place, start=1)}
    timed = [snapshot.draft_seconds for snapshot in snapshots if snapshot.draft_seconds is not None]
    if timed:
        won, lost = zip(*timed, strict=True)
        metrics |= {"speculation_seconds_won_total": sum(won), "speculation_seconds_lost_total": sum(lost)}
    return metrics
