"""Every metric that a run logs: its unit, what it means, and which of its values a run's summary keeps.

The trackers, the report and `docs/dashboards.md` have it from here. `<…>` in a name stands for one that differs: a
reward function, a phase, a cause. Where TRL or verl have a name for a thing, it is theirs.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from rollout_trainers.checks import as_number

_PLACE = re.compile(r"<[^>]*>")
_MISSPELT = 0.85  # similarity of two names, by difflib, from which on one is a slip of the other


@dataclass(frozen=True, slots=True)
class Metric:
    """`summary`: what W&B shows of a whole run, of min, max, mean and last, with commas between."""

    name: str
    unit: str
    meaning: str
    summary: str = "last"

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric's, or one of those that it stands for."""
        parts = [re.escape(part) for part in _PLACE.split(self.name)]
        return re.fullmatch("[^/]+".join(parts), name) is not None


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics that belong together, and when they are logged."""

    title: str
    when: str
    metrics: tuple[Metric, ...]


_SHARE, _NATS, _TOKENS, _COUNT, _SECONDS = "share", "nats a token", "tokens", "count", "seconds"

CATALOG: tuple[MetricGroup, ...] = (
    MetricGroup(
        "Rewards",
        "each step",
        (
            Metric("reward", "reward", "mean over the step's samples of the sum of their rewards", "last,max,mean"),
            Metric("reward_std", "reward", "mean over the groups of the standard deviation of their rewards", "mean"),
            Metric("frac_reward_zero_std", _SHARE, "groups whose rewards are all equal", "mean,last"),
            Metric("rewards/<function>/mean", "reward", "mean of one reward function's values", "last,max,mean"),
            Metric("rewards/<function>/std", "reward", "their standard deviation"),
            Metric("overlong_penalty/mean", "reward", "mean of what `loss.overlong_buffer` takes away"),
        ),
    ),
    MetricGroup(
        "Held-out evaluation",
        "each evaluation",
        (
            Metric("eval/accuracy", _SHARE, "prompts whose reward reaches `evaluation.success_threshold`", "last,max"),
            Metric("eval/accuracy_low", _SHARE, "lower end of its Wilson interval, 95 %"),
            Metric("eval/accuracy_high", _SHARE, "upper end"),
            Metric("eval/reward", "reward", "mean reward", "last,max"),
            Metric("eval/mean_length", _TOKENS, "mean length of the completions"),
            Metric("eval/<set>/<metric>", "", "the same of a further held-out set, by its name", "last,max"),
        ),
    ),
    MetricGroup(
        "Completions",
        "each step",
        (
            Metric("completions/mean_length", _TOKENS, "mean number of the policy's tokens in a sample", "last,mean"),
            Metric("completions/min_length", _TOKENS, "fewest", "min"),
            Metric("completions/max_length", _TOKENS, "most", "max"),
            Metric("completions/clipped_ratio", _SHARE, "samples that a limit has cut off", "last,max"),
            Metric("completions/mean_terminated_length", _TOKENS, "mean length of those that ended by themselves"),
            Metric("completions/min_terminated_length", _TOKENS, "fewest of those", "min"),
            Metric("completions/max_terminated_length", _TOKENS, "most of those", "max"),
            Metric("entropy", _NATS, "mean entropy of what was sampled from", "last,min"),
        ),
    ),
    MetricGroup(
        "Policy update",
        "each step",
        (
            Metric("loss", "", "loss of the step's last optimiser step"),
            Metric("grad_norm", "", "largest gradient norm of the step, before clipping", "max,mean"),
            Metric("learning_rate", "", "of the policy"),
            Metric("clip_ratio/low_mean", _SHARE, "tokens clipped below", "mean,max"),
            Metric("clip_ratio/low_min", _SHARE, "the same, smallest of the optimiser steps"),
            Metric("clip_ratio/high_mean", _SHARE, "tokens clipped above", "mean,max"),
            Metric("clip_ratio/high_max", _SHARE, "the same, largest of the optimiser steps", "max"),
            Metric("clip_ratio/region_mean", _SHARE, "tokens clipped at all", "mean,max"),
            Metric("clip_ratio/dual_mean", _SHARE, "tokens that `loss.dual_clip` bounds", "mean,max"),
            Metric("ppo_kl", _NATS, "mean of old less new logprob while the step learns", "mean,max"),
            Metric("kl", _NATS, "KL to the reference (k3), with `loss.kl_coefficient`", "last,max"),
            Metric("objective/kl", "nats a sample", "KL to the reference of whole samples (k1)", "last,max"),
            Metric("objective/kl_coef", "", "coefficient of the KL, as it stands"),
        ),
    ),
    MetricGroup(
        "Sampler and trainer",
        "each step in which tokens were compared; from `rollout_corr/k3_kl` on with `algorithm.recompute_logprobs`",
        (
            Metric("sampling/logp_difference/num_tokens", _TOKENS, "how many were compared before the first update"),
            Metric("sampling/logp_difference/max", "nats", "largest difference of a token's two logprobs", "max"),
            Metric("sampling/logp_difference/mean", "nats", "mean difference", "mean,max"),
            Metric("rollout_corr/kl", _NATS, "KL of sampler and trainer (k1)", "mean,max"),
            Metric("rollout_corr/k3_kl", _NATS, "the same by k3", "mean,max"),
            Metric("sampling/importance_sampling_ratio/min", "ratio", "smallest importance weight", "min"),
            Metric("sampling/importance_sampling_ratio/mean", "ratio", "mean importance weight", "mean"),
            Metric("sampling/importance_sampling_ratio/max", "ratio", "largest importance weight", "max"),
            Metric("rollout_corr/training_ppl", "perplexity", "of the samples under the trainer"),
            Metric("rollout_corr/rollout_ppl", "perplexity", "of the samples under the sampler"),
            Metric("rollout_corr/log_ppl_diff", "nats", "mean difference of the two log perplexities"),
            Metric("rollout_corr/log_ppl_abs_diff", "nats", "mean size of the difference"),
            Metric("rollout_corr/log_ppl_diff_max", "nats", "largest difference", "max"),
            Metric("rollout_corr/log_ppl_diff_min", "nats", "smallest difference", "min"),
            Metric("rollout_corr/ppl_ratio", "ratio", "mean ratio of the two perplexities"),
            Metric("rollout_corr/chi2_token", "", "mean squared ratio of a token, less 1", "max"),
            Metric("rollout_corr/chi2_seq", "", "mean squared ratio of a sequence, less 1", "max"),
            Metric("rollout_corr/rollout_is_mean", "ratio", "mean importance weight"),
            Metric("rollout_corr/rollout_is_min", "ratio", "smallest", "min"),
            Metric("rollout_corr/rollout_is_max", "ratio", "largest", "max"),
            Metric("rollout_corr/rollout_is_std", "ratio", "standard deviation of the weights"),
            Metric("rollout_corr/rollout_is_eff_sample_size", _SHARE, "effective sample size by the weights", "min"),
            Metric("rollout_corr/rollout_is_ratio_fraction_high", _SHARE, "tokens whose ratio is above the cap"),
            Metric("rollout_corr/rollout_is_ratio_fraction_low", _SHARE, "tokens whose ratio is below its inverse"),
            Metric("rollout_corr/rollout_rs_masked_fraction", _SHARE, "tokens that the correction leaves out", "max"),
            Metric("diagnosis/<cause>", _NATS, "mean size of what each cause explains, where a diagnosis ran"),
        ),
    ),
    MetricGroup(
        "Critic",
        "each step of PPO",
        (
            Metric("critic/vf_loss", "", "loss of the critic's last optimiser step"),
            Metric("critic/vf_clipfrac", _SHARE, "values that `critic.value_clip` holds", "mean,max"),
            Metric("critic/vpred_mean", "reward", "mean of what it says while it learns"),
            Metric("critic/vf_explained_var", _SHARE, "of the returns' variance, that it explains", "last,max"),
            Metric("critic/grad_norm", "", "largest gradient norm of the step, before clipping", "max,mean"),
            Metric("critic/lr", "", "learning rate of the critic"),
            Metric("critic/values/mean", "reward", "what it expects before the step's updates"),
            Metric("critic/values/max", "reward", "largest"),
            Metric("critic/values/min", "reward", "smallest"),
            Metric("critic/returns/mean", "reward", "what it should have said"),
            Metric("critic/returns/max", "reward", "largest"),
            Metric("critic/returns/min", "reward", "smallest"),
            Metric("critic/advantages/mean", "", "advantages of the tokens"),
            Metric("critic/advantages/max", "", "largest"),
            Metric("critic/advantages/min", "", "smallest"),
        ),
    ),
    MetricGroup(
        "Teacher",
        "each step of on-policy distillation, with the section `teacher`",
        (
            Metric("teacher/kl", _NATS, "KL of the policy that sampled to its teacher (k1)", "last,min"),
            Metric("teacher/sequence_kl", "nats a sample", "the same of whole samples", "last,min"),
            Metric("teacher/logprob", _NATS, "mean of the teacher's logprobs of what was sampled", "last,max"),
        ),
    ),
    MetricGroup(
        "Dynamic sampling",
        "each step, with `loss.dynamic_sampling`",
        (
            Metric("dynamic_sampling/rounds", _COUNT, "rounds of sampling", "mean,max"),
            Metric("dynamic_sampling/groups_sampled", _COUNT, "groups sampled", "mean"),
            Metric("dynamic_sampling/groups_dropped", _COUNT, "groups that taught nothing", "mean"),
            Metric("dynamic_filtering_pass_rate", _SHARE, "groups that were kept", "mean"),
        ),
    ),
    MetricGroup(
        "Asynchrony",
        "each step with the section `asynchrony` (`docs/asynchrony.md`): `idle_seconds` where it samples ahead, "
        "`over_sampling` where groups are kept between steps",
        (
            Metric("staleness/mean", "versions", "how far the policies that sampled the tokens are behind", "mean,max"),
            Metric("staleness/max", "versions", "the same of the oldest token", "max"),
            Metric("staleness/versions_per_sample", _COUNT, "mean number of policies that sampled one", "mean"),
            Metric("staleness/partial_ratio", _SHARE, "samples of several policies", "mean"),
            Metric("async/steps_waited/mean", "steps", "how long groups were left out of batches", "mean"),
            Metric("async/steps_waited/max", "steps", "longest", "max"),
            Metric("async/groups_waiting", _COUNT, "groups that have ended and wait"),
            Metric("async/groups_in_flight", _COUNT, "groups that are being sampled"),
            Metric("async/idle_seconds/trainer", _SECONDS, "the trainer waited for samples", "mean"),
            Metric("async/idle_seconds/sampler", _SECONDS, "the engine waited for the trainer", "mean"),
            Metric("over_sampling/trained_mean_length", _TOKENS, "mean length of all that was learned from so far"),
            Metric("over_sampling/begun_mean_length", _TOKENS, "mean length of all that was begun so far"),
            Metric("over_sampling/waiting_mean_length", _TOKENS, "mean length, by now, of what is on its way"),
            Metric("over_sampling/length_bias", _TOKENS, "trained less begun: below 0 where short ones come first"),
        ),
    ),
    MetricGroup(
        "Environments",
        "each step of episodes; `tools/…` with `ToolEnvironment`. Environments and reward functions add their own",
        (
            Metric("num_turns/mean", "turns", "mean number of the policy's turns", "last,mean"),
            Metric("num_turns/min", "turns", "fewest", "min"),
            Metric("num_turns/max", "turns", "most", "max"),
            Metric("environment/error_frequency", _SHARE, "episodes that an error has ended", "mean,max"),
            Metric("environment/timeout_frequency", _SHARE, "episodes that were out of time", "mean,max"),
            Metric("tools/call_frequency", "calls", "mean number of calls in an episode"),
            Metric("tools/failure_frequency", _SHARE, "calls that failed", "mean,max"),
        ),
    ),
    MetricGroup(
        "Speed",
        "each step",
        (
            Metric("timing_s/step", _SECONDS, "the whole step", "mean"),
            Metric("timing_s/gen", _SECONDS, "sampling", "mean"),
            Metric("timing_s/reward", _SECONDS, "scoring", "mean"),
            Metric("timing_s/sleep", _SECONDS, "giving the KV pool's memory back", "mean"),
            Metric("timing_s/train", _SECONDS, "learning", "mean"),
            Metric("timing_s/sync", _SECONDS, "the policy update", "mean"),
            Metric("timing_s/wake", _SECONDS, "waking the engine", "mean"),
            Metric("perf/throughput", "tokens a second", "prompt and completion tokens, over the whole step", "mean"),
            Metric("perf/gen_tokens_per_s", "tokens a second", "sampled tokens, over sampling", "mean"),
            Metric("perf/train_tokens_per_s", "tokens a second", "packed tokens, over learning", "mean"),
        ),
    ),
    MetricGroup(
        "Engine",
        "each step, after sampling; `…_total` count since the engine's start",
        (
            Metric("engine/num_requests_running", _COUNT, "requests running"),
            Metric("engine/num_requests_waiting", _COUNT, "requests waiting"),
            Metric("engine/kv_cache_blocks", _COUNT, "blocks of the KV pool"),
            Metric("engine/kv_cache_usage", _SHARE, "blocks in use now"),
            Metric("engine/kv_cache_usage_peak", _SHARE, "largest share in use so far", "max"),
            Metric("engine/kv_cache_waste", _SHARE, "slots of allocated blocks that held no token"),
            Metric("engine/prefix_cache_hit_rate", _SHARE, "prompt tokens that were in the prefix cache"),
            Metric("engine/num_preemptions_total", _COUNT, "requests preempted"),
            Metric("engine/num_errors_total", _COUNT, "requests that ended by an error"),
            Metric("engine/num_steps_total", _COUNT, "steps of the engine"),
            Metric("engine/generation_tokens_total", _TOKENS, "tokens sampled"),
            Metric("engine/computed_tokens_total", _TOKENS, "tokens computed, those of prompts included"),
            Metric("engine/step_seconds_total", _SECONDS, "time spent in the engine's steps"),
            Metric("engine/tokens_per_second", "tokens a second", "tokens sampled, over that time"),
            Metric("engine/policy_version", "version", "policy that the engine has sampled with"),
        ),
    ),
    MetricGroup(
        "Memory",
        "each step; phases are `sampling`, `sleeping`, `training` and `update` (`docs/memory.md`)",
        (
            Metric("perf/memory_peak_gb", "GiB", "largest peak so far", "max"),
            Metric("perf/sleep_released_gb", "GiB", "given back by the engine's sleep"),
            Metric("perf/update_copied_gb", "GiB", "copied by the policy update; 0 where memory is shared"),
            Metric("memory/<phase>_peak_bytes", "bytes", "peak of a phase", "max"),
            Metric("memory/<phase>_bytes", "bytes", "held at a phase's end"),
            Metric("memory/budget_bytes", "bytes", "`engine.memory_budget`"),
            Metric("memory/kv_pool_bytes", "bytes", "KV pool that the budget leaves"),
        ),
    ),
    MetricGroup(
        "Progress",
        "each step",
        (
            Metric("num_tokens", _TOKENS, "tokens sampled by the run so far"),
            Metric("policy_version", "version", "policy that the step has made"),
        ),
    ),
)


@cache
def describe(name: str) -> Metric | None:
    """The catalogue's entry of a metric; None for those that environments and reward functions have made up."""
    metrics = [metric for group in CATALOG for metric in group.metrics]
    exact = [metric for metric in metrics if metric.name == name]
    return next(iter([*exact, *(metric for metric in metrics if metric.matches(name))]), None)


def own_metric(name: object, value: Any) -> float:
    """The value of a metric that a reward function or an environment logs under a name of its own.

    Raises `ValueError` for a name that is no text or is one of the trainer's, and for what is no finite number.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"metric {name!r} is not valid: a metric's name must be text")
    if describe(name) is not None:
        raise ValueError(f"metric {name!r} is not valid: the trainer logs a metric of this name, choose another one")
    number = as_number(value)
    if not math.isfinite(number):
        raise ValueError(f"metric {name!r} has the value {value!r}: it must be a finite number")
    return number


def near_miss(name: str) -> str | None:
    """The catalogue's name that `name` is misspelt of; None for one of its own, and for one so far from all of them
    that an environment or a reward function may have made it up."""
    if describe(name) is not None:
        return None
    known = [metric.name for group in CATALOG for metric in group.metrics]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)), None)


def wandb_key(name: str) -> str:
    """The name in W&B. TRL's convention: a plain training metric stands under `train/`; those that have a section keep
    it, but for completions, rewards and clip ratios."""
    section = name.split("/", 1)[0]
    return f"train/{name}" if "/" not in name or section in ("completions", "rewards", "clip_ratio") else name


def catalog_as_markdown() -> str:
    """The tables of `docs/dashboards.md`."""
    parts = []
    for group in CATALOG:
        rows = [f"| `{metric.name}` | {metric.unit or '-'} | {metric.meaning} |" for metric in group.metrics]
        head = [f"### {group.title}", "", f"Logged {group.when}.", "", "| name | unit | meaning |", "|---|---|---|"]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts)
