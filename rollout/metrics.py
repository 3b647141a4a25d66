"""Gauges and counters of an engine, as one flat dictionary of numbers."""

from __future__ import annotations

from rollout.engine.core import EngineCore


def engine_metrics(engine: EngineCore) -> dict[str, float]:
    """`*_total` count since start; `tokens_per_second` is over the time spent in steps; shares are from 0 to 1.

    `kv_cache_usage` is of now, `kv_cache_usage_peak` the largest after any step. `kv_cache_waste` is the share of
    allocated KV slots that held no token, over all steps.
    """
    stats, counters = engine.scheduler.stats(), engine.counters
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
        "generation_tokens_total": counters.num_generated_tokens,
        "computed_tokens_total": counters.num_computed_tokens,
        "step_seconds_total": counters.step_seconds,
        "tokens_per_second": counters.num_generated_tokens / max(counters.step_seconds, 1e-9),
        "policy_version": engine.policy_version,
    }
