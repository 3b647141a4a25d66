"""When a run is told that something goes wrong: the limits of `alerts.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rollout_trainers.checks import check_flag, check_integer, check_real, fail

_SHARES = (
    "truncation",
    "no_learning_signal",
    "clip_ratio",
    "acceptance",
    "held_out_drop",
    "environment_errors",
    "environment_timeouts",
)


@dataclass(frozen=True, slots=True)
class AlertsSection:
    """Limits, each of one alert (`docs/dashboards.md`); None turns an alert off, and `enabled` all of them.

    What is judged is a mean of the last `window` steps, so that no alert comes before that many, but for numbers that
    are not finite and for gradients. An alert is told once, and again only after its number has come back from the
    limit by a fifth of it.

    - `entropy_floor`: the policy's entropy in nats a token is below. `entropy_growth`: it is that many times what it
      was in the first steps.
    - `length_growth`, `length_shrink`: completions are that many times as long, or as short, as in the first steps.
    - `truncation`: the share of completions that the limit cuts off has risen by that much; nine in ten are told
      without a rise.
    - `mismatch`: mean |logprob difference| of sampler and trainer in nats a token, where the recipe recomputes
      logprobs. Where it does not they must be the same, and `mismatch_exact` limits the largest difference.
    - `acceptance`: the share of drafts that are accepted is below that share of the best so far.
    - `clip_ratio`: the share of tokens that the loss clips.
    - `kl`: nats a token to the reference. `ppo_kl`: nats a token that one step moves the policy by, which is known
      where it makes several optimiser steps.
    - `grad_spike`: a gradient's norm is that many times the median of the steps before.
    - `no_learning_signal`: the share of groups whose rewards are all equal.
    - `held_out_drop`: held-out accuracy has fallen by that much while the training reward rose.
    - `preemptions`: preempted requests a step, as a share of its samples.
    - `staleness`: policy versions that samples are behind.
    - `environment_errors`: the share of episodes that an error of their environment has ended;
      `environment_timeouts`: of those that were out of time.
    """

    enabled: bool = True
    window: int = 5
    entropy_floor: float | None = 0.02
    entropy_growth: float | None = 2.0
    length_growth: float | None = 2.0
    length_shrink: float | None = 4.0
    truncation: float | None = 0.25
    mismatch: float | None = 0.02
    mismatch_exact: float | None = 1e-3
    acceptance: float | None = 0.5
    clip_ratio: float | None = 0.8
    kl: float | None = 1.0
    ppo_kl: float | None = 0.5
    grad_spike: float | None = 10.0
    no_learning_signal: float | None = 0.99
    held_out_drop: float | None = 0.05
    preemptions: float | None = 0.5
    staleness: float | None = 4.0
    environment_errors: float | None = 0.25
    environment_timeouts: float | None = 0.25

    def __post_init__(self) -> None:
        check_flag("alerts", "enabled", self.enabled)
        check_integer("alerts", "window", self.window, 1)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("enabled", "window") or value is None:
                continue
            check_real("alerts", field.name, value, 0.0, open_low=True)
            if field.name in _SHARES and value > 1:
                fail("alerts", field.name, value, "a share, above 0 and at most 1")
        for name in ("entropy_growth", "length_growth", "length_shrink", "grad_spike"):
            value = getattr(self, name)
            if value is not None and value <= 1:
                fail("alerts", name, value, "a factor above 1")
