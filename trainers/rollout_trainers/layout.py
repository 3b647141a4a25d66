"""What a dashboard shows, and in which order: the workspace in W&B and the HTML report are both made of this."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PanelKind = Literal["lines", "area", "histogram", "table"]


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of metrics by their names (`*` stands for any part of one), the histogram of that name over the steps, or
    the table of samples. "area" stacks its metrics."""

    title: str
    metrics: tuple[str, ...]
    kind: PanelKind = "lines"

    def select(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that the panel shows, in its order."""
        names = list(dict.fromkeys(names))
        chosen = [name for pattern in self.metrics for name in names if fnmatch.fnmatchcase(name, pattern)]
        return list(dict.fromkeys(chosen))


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under a heading. Those of a section that is not `is_open` are folded at first."""

    name: str
    panels: tuple[Panel, ...]
    is_open: bool = False


LAYOUT: tuple[Section, ...] = (
    Section(
        "Reward and evaluation",
        (
            Panel("Reward", ("reward",)),
            Panel("Held-out accuracy", ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/*/accuracy")),
            Panel("Rewards by function", ("rewards/*/mean",)),
            Panel("Groups that teach nothing (share)", ("frac_reward_zero_std",)),
            Panel("Spread of rewards within groups", ("reward_std",)),
            Panel("Rewards of the samples", ("histogram/reward",), "histogram"),
        ),
        is_open=True,
    ),
    Section(
        "Completions",
        (
            Panel("Completion length (tokens)", ("completions/mean_length", "completions/max_length")),
            Panel("Completions cut off by a limit (share)", ("completions/clipped_ratio",)),
            Panel("Entropy (nats per token)", ("entropy",)),
            Panel("Lengths of the samples (tokens)", ("histogram/length",), "histogram"),
            Panel("Entropy of the samples' tokens (nats)", ("histogram/entropy",), "histogram"),
            Panel("Turns of an episode", ("num_turns/mean", "num_turns/max")),
            Panel("Episodes that failed, or were late (share)", ("environment/*_frequency",)),
            Panel("Calls of tools, and failures among them", ("tools/*",)),
        ),
        is_open=True,
    ),
    Section(
        "Samples",
        (Panel("Samples", ("completions",), "table"),),
        is_open=True,
    ),
    Section(
        "Policy update",
        (
            Panel("Gradient norm", ("grad_norm",)),
            Panel("Loss", ("loss",)),
            Panel("Clipped tokens (share)", ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/dual_mean")),
            Panel("KL to the policy that sampled (nats per token)", ("ppo_kl",)),
            Panel("KL to the reference (nats per token)", ("kl",)),
            Panel("Coefficient of the KL", ("objective/kl_coef",)),
            Panel("KL to the teacher (nats per token)", ("teacher/kl",)),
            Panel("Advantages of the samples", ("histogram/advantage",), "histogram"),
            Panel("Ratio of new to old policy, by token", ("histogram/ratio",), "histogram"),
            Panel("Learning rate", ("learning_rate",)),
        ),
        is_open=True,
    ),
    Section(
        "Sampler and trainer",
        (
            Panel("Sampler against trainer: largest |logprob difference|", ("sampling/logp_difference/max",)),
            Panel("Sampler against trainer: mean |logprob difference|", ("sampling/logp_difference/mean",)),
            Panel("Importance weights", ("sampling/importance_sampling_ratio/*",)),
            Panel("Importance weights of the samples' tokens", ("histogram/importance",), "histogram"),
            Panel("Tokens left out by the off-policy correction (share)", ("rollout_corr/rollout_rs_masked_fraction",)),
            Panel("Policy versions that samples are behind", ("staleness/mean", "staleness/max")),
            Panel("Samples of several policies (share)", ("staleness/partial_ratio",)),
        ),
    ),
    Section(
        "Critic",
        (
            Panel("Critic: share of the returns' variance explained", ("critic/vf_explained_var",)),
            Panel("Critic: loss", ("critic/vf_loss",)),
            Panel("Critic: clipped values (share)", ("critic/vf_clipfrac",)),
            Panel("Critic: values and returns", ("critic/values/mean", "critic/returns/mean")),
        ),
    ),
    Section(
        "Speed",
        (
            Panel(
                "Seconds a step, by phase",
                tuple(f"timing_s/{phase}" for phase in ("gen", "reward", "sleep", "train", "sync", "wake")),
                "area",
            ),
            Panel("Tokens per second", ("perf/gen_tokens_per_s", "perf/train_tokens_per_s", "perf/throughput")),
            Panel(
                "Groups sampled, and dropped by dynamic sampling",
                ("dynamic_sampling/groups_sampled", "dynamic_sampling/groups_dropped"),
            ),
            Panel(
                "Drafts and those accepted, so far", ("engine/draft_tokens_total", "engine/accepted_draft_tokens_total")
            ),
            Panel("Seconds that trainer and sampler wait", ("async/idle_seconds/*",)),
            Panel("Groups that wait, and that are being sampled", ("async/groups_waiting", "async/groups_in_flight")),
            Panel(
                "Mean length of what was learned from, and of what was begun (tokens)",
                ("over_sampling/trained_mean_length", "over_sampling/begun_mean_length"),
            ),
        ),
    ),
    Section(
        "Engine and memory",
        (
            Panel(
                "KV cache: slots that held nothing, prefix hits (shares)",
                ("engine/kv_cache_waste", "engine/prefix_cache_hit_rate"),
            ),
            Panel("KV cache: largest share in use so far", ("engine/kv_cache_usage_peak",)),
            Panel("Preemptions so far", ("engine/num_preemptions_total",)),
            Panel("Memory (GiB): given back by sleep, and peak", ("perf/sleep_released_gb", "perf/memory_peak_gb")),
        ),
    ),
)


def panels_of(section: Section, names: Iterable[str]) -> list[tuple[Panel, list[str]]]:
    """The section's panels for which something was logged, with the names that they show."""
    names = list(names)
    return [(panel, chosen) for panel in section.panels if (chosen := panel.select(names))]
