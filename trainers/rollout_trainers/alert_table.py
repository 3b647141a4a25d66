"""Alerts as a table, for `docs/dashboards.md`."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_trainers.alerts_config import AlertsSection

# For each rule its limit in the recipe, and what it means.
LIMITS: Mapping[str, tuple[str | None, str]] = {
    "not_finite": (None, "a metric is not a finite number"),
    "grad_spike": ("grad_spike", "a gradient's norm is so many times the median of the steps before"),
    "entropy_collapse": ("entropy_floor", "entropy is below, in nats a token: the samples become the same"),
    "entropy_growth": ("entropy_growth", "entropy is so many times that of the first steps: noise"),
    "length_growth": ("length_growth", "completions are so many times as long as in the first steps"),
    "length_collapse": ("length_shrink", "completions are so many times shorter than in the first steps"),
    "truncation": ("truncation", "the share of completions that are cut off has risen by so much, or is above 90 %"),
    "mismatch": (
        "mismatch",
        "logprobs of sampler and trainer differ by so much on average, with `algorithm.recompute_logprobs`; five times "
        "as much for stale samples. Where they must be the same, `mismatch_exact` limits the largest difference",
    ),
    "acceptance_drop": ("acceptance", "of the best share of accepted drafts so far, so much is left"),
    "clip_ratio": ("clip_ratio", "so many of the tokens are clipped, and teach nothing"),
    "kl_runaway": ("kl", "KL to the reference, in nats a token"),
    "policy_jump": (
        "ppo_kl",
        "one step moves the policy by so many nats a token; only with several optimiser steps a step, since the number "
        "compares the later ones with the policy that has sampled",
    ),
    "no_learning_signal": ("no_learning_signal", "in so many groups all rewards are equal"),
    "reward_hacking": (
        "held_out_drop",
        "held-out accuracy fell by so much from its best, by more than chance, while the training reward rose",
    ),
    "kv_thrash": ("preemptions", "so many requests are preempted for each sample of a step"),
    "stale_samples": ("staleness", "samples are so many policy versions behind"),
    "environment_errors": ("environment_errors", "so many of the episodes end by an error of their environment"),
    "environment_timeouts": ("environment_timeouts", "so many of the episodes are out of time"),
}


def alerts_as_markdown() -> str:
    """The table of `docs/dashboards.md`."""
    defaults = AlertsSection()
    rows = []
    for name, (limit, meaning) in LIMITS.items():
        value = "-" if limit is None else f"`{limit}: {getattr(defaults, limit):g}`"
        rows.append(f"| `{name}` | {value} | {meaning} |")
    return "\n".join(["| alert | limit | told when |", "|---|---|---|", *rows])
