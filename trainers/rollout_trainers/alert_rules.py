"""The rules of alerts, one function each: a number from a run's history, and what it means.

A rule gives None where the history does not tell yet, or where its limit is None. The causes that a text names are
those that the other metrics of the same steps support; where they support none, it says what to look at.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollout_trainers.alert_history import ACCEPTANCE, PREEMPTIONS, EvaluationPoint, History
from rollout_trainers.alerts_config import AlertsSection
from rollout_trainers.config import RunConfig

_ALGORITHMS, _DIAGNOSE, _DASHBOARDS = "docs/algorithms.md", "docs/diagnose.md", "docs/dashboards.md"
_FEWEST_GRADIENTS = 8  # norms before one is called a spike
_MOSTLY_CUT = 0.9  # share of completions that are cut off, from which on no rise is needed
_LAG = 5.0  # times the limit of a mismatch that samples of earlier policies may have: they do differ


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What rules know of a run beside its metrics. `exact_logprobs`: the trainer's must be the sampler's.
    `learns_from_rewards`: not from a teacher alone."""

    max_tokens: int
    samples_per_step: int
    updates_per_step: int
    exact_logprobs: bool
    rounded_engine: bool
    learns_from_rewards: bool = True
    samples_ahead: bool = False  # of the trainer, so that a step's may be of an older policy
    max_model_len: int | None = None  # where the recipe gives it

    @classmethod
    def of(cls, config: RunConfig) -> RunFacts:
        algorithm, engine = config.algorithm, config.engine
        return cls(
            max_tokens=config.sampling.max_tokens,
            samples_per_step=algorithm.group_size * algorithm.prompts_per_step,
            updates_per_step=algorithm.minibatches * algorithm.epochs,
            exact_logprobs=not algorithm.recompute_logprobs,
            rounded_engine=engine.quantization is not None or engine.kv_cache_dtype != "auto",
            learns_from_rewards=config.teacher.uses_rewards,
            samples_ahead=config.asynchrony.samples_ahead,
            max_model_len=engine.max_model_len,
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What a rule finds: `badness` is above 1 past the limit, `now` says the number and the limit, without a full
    stop; `page` is where more is written."""

    badness: float
    title: str
    now: str
    cause: str = ""
    page: str = _DASHBOARDS
    is_fatal: bool = False


Rule = Callable[[History, AlertsSection, RunFacts], Reading | None]


def not_finite(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """A number that is not finite: a loss or a gradient above all."""
    if not history.last:
        return None
    bad = [name for name, value in history.last.items() if value is None or not math.isfinite(value)]
    title = "Numbers are not finite"
    if not bad:
        return Reading(0.0, title, "all numbers are finite")
    cause = (
        "The weights are damaged from here on: go back to the last checkpoint, with a lower learning rate or "
        "optimizer.max_grad_norm."
        if {"loss", "grad_norm"} & set(bad)
        else "Look first at what the environment and the reward functions have logged."
    )
    return Reading(math.inf, title, f"not finite: {', '.join(sorted(bad)[:8])}", cause, is_fatal=True)


def grad_spike(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """One gradient against the median of those before. Steps that learn nothing have none."""
    norms = [norm for norm in history.recent("grad_norm", 64) if norm > 0]
    if section.grad_spike is None or len(norms) <= _FEWEST_GRADIENTS:
        return None
    norm, median = norms[-1], statistics.median(norms[:-1])
    factor = norm / median
    now = f"the gradient's norm is {norm:.3g}, {factor:.3g} times the median of the steps before ({median:.3g})"
    cause = "It was clipped to optimizer.max_grad_norm."
    mismatch = history.last.get("sampling/logp_difference/max")
    if mismatch is not None and mismatch > 1.0:
        cause += (
            f" Logprobs of sampler and trainer differ by up to {mismatch:.3g} in this step: single tokens with a "
            "large ratio can do that."
        )
    return Reading(factor / section.grad_spike, "Gradient spike", now, cause)


def entropy_collapse(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """The policy says always the same."""
    mean, first = history.mean("entropy"), history.first_mean("entropy")
    if section.entropy_floor is None or mean is None or first is None:
        return None
    now = f"entropy is {mean:.3g} nats a token (limit {section.entropy_floor:g}; {first:.3g} in the first steps)"
    equal = history.mean("frac_reward_zero_std")
    cause = "The samples of a prompt become the same, and nothing is left to compare"
    if equal is not None:
        cause += f": the rewards of {equal:.0%} of the groups are all equal"
    reward, best = history.mean("reward"), max(history.recent("reward", 64), default=0.0)
    if reward is not None and reward < 0.5 * best:
        cause += f". The reward fell to {reward:.3g} (it was up to {best:.3g}): it has settled on a bad answer"
    cause += (
        ". What keeps entropy: a lower learning rate, loss.clip_high above clip_low (DAPO), "
        "loss.entropy_coefficient, loss.kl_coefficient."
    )
    return Reading(_below(mean, section.entropy_floor), "Entropy has collapsed", now, cause, _ALGORITHMS)


def entropy_growth(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """The policy goes to noise."""
    mean, first = history.mean("entropy"), history.first_mean("entropy")
    if section.entropy_growth is None or mean is None or first is None or first <= 0:
        return None
    now = f"entropy is {mean:.3g} nats a token, {mean / first:.3g} times that of the first steps ({first:.3g})"
    cause = "The policy becomes noise: a learning rate that is too high, or loss.entropy_coefficient."
    return Reading(mean / first / section.entropy_growth, "Entropy grows", now, cause, _ALGORITHMS)


def length_growth(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """Completions get longer and longer."""
    lengths = _lengths(history)
    if section.length_growth is None or lengths is None:
        return None
    mean, first = lengths
    now = f"completions have {mean:.0f} tokens on average, {mean / first:.3g} times as many as at first ({first:.0f})"
    rise = _change(history, "reward")
    cause = "The reward rises with them." if rise > 0 else f"The reward has not risen meanwhile ({rise:+.3g})."
    cut = history.mean("completions/clipped_ratio")
    if cut is not None and cut > 0:
        cause += f" {cut:.0%} are cut off at {facts.max_tokens}."
    cause += " A mean over each sequence favours long wrong answers (loss.aggregation); loss.overlong_buffer costs."
    return Reading(mean / first / section.length_growth, "Completions get longer", now, cause, _ALGORITHMS)


def length_collapse(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """Completions get shorter and shorter."""
    lengths = _lengths(history)
    if section.length_shrink is None or lengths is None:
        return None
    mean, first = lengths
    factor = first / max(mean, 1e-9)
    now = f"completions have {mean:.1f} tokens on average, of {first:.1f} in the first steps"
    rise = _change(history, "reward")
    cause = (
        f"The reward rises meanwhile ({rise:+.3g}): look in the table of samples whether they still answer."
        if rise > 0
        else f"The reward has not risen meanwhile ({rise:+.3g}): they stop before they answer."
    )
    return Reading(factor / section.length_shrink, "Completions get short", now, cause)


def truncation(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """More and more completions are cut off, or nearly all from the first steps on."""
    cut, first = history.mean("completions/clipped_ratio"), history.first_mean("completions/clipped_ratio")
    if section.truncation is None or cut is None or first is None:
        return None
    now = f"{cut:.0%} of the completions are cut off at a limit, of {first:.0%} in the first steps"
    rise = max(0.0, cut - first)
    badness, title = rise / section.truncation, "More completions are cut off"
    if cut / _MOSTLY_CUT > badness:
        badness, title = cut / _MOSTLY_CUT, "Nearly all completions are cut off"
    ended = history.mean("completions/mean_terminated_length")
    short = _mean_cut_length(history)
    if short is not None and short < facts.max_tokens - 0.5:
        context = "" if facts.max_model_len is None else f" ({facts.max_model_len})"
        cause = (
            f"Those cut off have {short:.0f} tokens on average, and sampling.max_tokens is {facts.max_tokens}: "
            f"prompt and completion fill engine.max_model_len{context}."
        )
    elif ended is not None and ended < facts.max_tokens / 2 and cut < _MOSTLY_CUT:
        cause = f"Those that end have {ended:.0f} of {facts.max_tokens} tokens: the others have unlearned to stop."
    else:
        cause = f"They need more room than sampling.max_tokens ({facts.max_tokens})."
    cause += " A cut-off answer gets the reward of a wrong one: loss.drop_truncated leaves them out."
    return Reading(badness, title, now, cause, _ALGORITHMS)


def _mean_cut_length(history: History) -> float | None:
    """Mean length, in the last step, of the completions that were cut off. None where there are none, and of episodes,
    whose turns are limited one by one."""
    row = history.last
    cut, mean = row.get("completions/clipped_ratio"), row.get("completions/mean_length")
    if not cut or mean is None or "num_turns/mean" in row:
        return None
    ended = row.get("completions/mean_terminated_length")
    if ended is None and cut < 1:
        return None
    return (mean - (1 - cut) * (ended or 0.0)) / cut


def mismatch(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """The trainer's logprobs are not the sampler's."""
    stale = history.last.get("staleness/max")
    if facts.exact_logprobs and not stale:
        limit, number = section.mismatch_exact, history.last.get("sampling/logp_difference/max")
        words = "the largest difference of the logprobs of sampler and trainer is"
    else:
        limit, number = section.mismatch, history.mean("sampling/logp_difference/mean")
        if limit is not None and stale:
            limit *= _LAG
        words = "logprobs of sampler and trainer differ by a mean of"
    if limit is None or number is None or math.isnan(number):
        return None
    now = f"{words} {number:.3g} nats (limit {limit:g})"
    return Reading(number / limit, "Sampler and trainer differ", now, _cause_of_mismatch(history, facts), _DIAGNOSE)


def _cause_of_mismatch(history: History, facts: RunFacts) -> str:
    stale = history.mean("staleness/mean")
    parts = {
        name.removeprefix("diagnosis/").replace("_", " "): value
        for name, value in history.last.items()
        if name.startswith("diagnosis/") and value
    }
    if parts:
        name = max(parts, key=lambda each: parts[each] or 0.0)
        return f"The diagnosis of this step names {name} ({parts[name]:.3g} nats a token)."
    if stale:
        return f"The samples are {stale:.2g} policy versions behind on average, which is part of it."
    if facts.rounded_engine:
        return "The engine samples from weights or KV in int8, whose rounding is part of it."
    if facts.exact_logprobs:
        return "They are computed by the same kernels here, so this is a fault: `LLM.diagnose` says which."
    return "Precision, wrong weights, temperature or re-tokenisation: `LLM.diagnose` says which."


def acceptance_drop(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """Drafts are accepted less often than they were."""
    mean, best = history.mean(ACCEPTANCE), history.best_acceptance
    if section.acceptance is None or mean is None or best <= 0:
        return None
    now = f"{mean:.0%} of the drafts are accepted, of {best:.0%} at best"
    entropy, first = history.mean("entropy"), history.first_mean("entropy")
    if entropy is not None and first is not None and entropy > 1.2 * first:
        cause = f"Entropy rose from {first:.3g} to {entropy:.3g} nats a token: the policy is harder to guess."
    else:
        cause = "Entropy has not risen: the drafter does not follow the policy. Update its weights with the policy's."
    badness = _below(mean, section.acceptance * best)
    return Reading(badness, "Fewer drafts are accepted", now, cause, "docs/speculation.md")


def clip_ratio(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """The loss clips most tokens, which then teach nothing."""
    clipped = history.mean("clip_ratio/region_mean")
    if section.clip_ratio is None or clipped is None:
        return None
    now = f"{clipped:.0%} of the tokens are clipped and teach nothing"
    differ = history.mean("sampling/logp_difference/mean") or 0.0
    stale = history.mean("staleness/mean") or 0.0
    if stale > 0:
        cause = f"The samples are {stale:.2g} policy versions behind: lower the bound on staleness."
    elif differ > 0.01:
        cause = (
            f"Before the first update the logprobs of sampler and trainer differ by {differ:.3g} nats already: the "
            "ratio is off by their mismatch, and not by what was learned."
        )
    elif facts.updates_per_step > 1:
        cause = (
            f"The {facts.updates_per_step} optimiser steps on the same samples move the policy too far: a lower "
            "learning rate, fewer algorithm.epochs or algorithm.minibatches."
        )
    else:
        cause = "With one optimiser step for its samples the ratio should be 1: look at the histogram of ratios."
    return Reading(clipped / section.clip_ratio, "Most tokens are clipped", now, cause, _ALGORITHMS)


def kl_runaway(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """The policy has gone far from its reference."""
    kl = history.mean("kl")
    if section.kl is None or kl is None:
        return None
    now = f"the KL to the reference is {kl:.3g} nats a token (limit {section.kl:g})"
    rise = _change(history, "reward")
    cause = f"The reward changed by {rise:+.3g} since the first steps. "
    cause += "A higher loss.kl_coefficient or a loss.kl_target holds it; read the samples for text that is none."
    return Reading(kl / section.kl, "KL runs away", now, cause, _ALGORITHMS)


def policy_jump(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """One step moves the policy too far."""
    kl = history.mean("ppo_kl")
    if section.ppo_kl is None or kl is None:
        return None
    now = f"a step moves the policy by {abs(kl):.3g} nats a token (limit {section.ppo_kl:g})"
    cause = f"It makes {facts.updates_per_step} optimiser steps: a lower learning rate, or fewer of them."
    if facts.samples_ahead:
        cause += " What its samples are older than the policy counts as well (`staleness/mean`)."
    return Reading(abs(kl) / section.ppo_kl, "The policy jumps", now, cause, _ALGORITHMS)


def no_learning_signal(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """All samples of every group have the same reward."""
    share, reward = history.mean("frac_reward_zero_std"), history.mean("reward")
    if section.no_learning_signal is None or share is None or reward is None or not facts.learns_from_rewards:
        return None
    now = f"the rewards of {share:.0%} of the groups are all equal, at a mean of {reward:.3g}"
    rewards = history.recent("reward", 64)
    low, high = min(rewards), max(rewards)
    accuracy = history.evaluations[-1].accuracy if history.evaluations else None
    if high > low and reward >= high - 0.1 * (high - low):
        cause = "This is the best reward so far: the task is solved, or too easy."
    elif high > low and reward <= low + 0.1 * (high - low):
        cause = "This is the worst reward so far: the policy has settled on wrong answers."
    else:
        cause = "The task is too hard or too easy for this policy, or the reward does not tell answers apart."
    if accuracy is not None:
        cause += f" Held-out accuracy was {accuracy:.0%}."
    cause += " loss.dynamic_sampling looks for prompts that teach something."
    return Reading(share / section.no_learning_signal, "Nothing to learn from", now, cause, _ALGORITHMS)


def reward_hacking(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """The training reward rises while held-out accuracy falls, by more than chance explains."""
    points = history.evaluations
    if section.held_out_drop is None or len(points) < 2 or not points[-1].rewards:
        return None
    best, last = max(points[:-1], key=lambda point: point.accuracy), points[-1]
    drop = best.accuracy - last.accuracy
    now = (
        f"held-out accuracy fell from {best.accuracy:.1%} (step {best.step}) to {last.accuracy:.1%} (step {last.step})"
    )
    rises = _rises(history, best, last)
    rise = rises.pop("reward", 0.0)
    if rise <= 0 or last.high >= best.accuracy or last.accuracy >= best.low:
        return Reading(0.0, "Reward up, held-out down", now)
    cause = f"The training reward rose by {rise:.3g} meanwhile: what is rewarded is not what is asked for."
    if len(rises) > 1:
        name = max(rises, key=lambda each: rises[each])
        cause += f" Of the rewards {name} rose most ({rises[name]:+.3g})."
    cause += " Read the best samples of the last steps; keep an earlier checkpoint."
    return Reading(drop / section.held_out_drop, "Reward up, held-out down", now, cause)


def _rises(history: History, best: EvaluationPoint, last: EvaluationPoint) -> dict[str, float]:
    """By how much each training reward is higher at the last evaluation than at the best. What an evaluation before
    the first step has not seen is compared with the first steps."""
    rises = {}
    for name, value in last.rewards.items():
        before = best.rewards.get(name, history.first_mean(name))
        if before is not None:
            rises[name.removeprefix("rewards/").removesuffix("/mean")] = value - before
    return rises


def kv_thrash(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """The KV pool is too small for what runs at once."""
    preempted = history.mean(PREEMPTIONS)
    if section.preemptions is None or preempted is None:
        return None
    share = preempted / facts.samples_per_step
    now = f"{preempted:.0f} requests a step are preempted, for {facts.samples_per_step} samples"
    cause = "Their KV is computed again."
    peak = history.last.get("engine/kv_cache_usage_peak")
    if peak is not None:
        cause += f" The KV pool was in use up to {peak:.0%}."
    cause += " A larger engine.kv_cache_memory (or memory_budget), or a smaller engine.max_num_seqs."
    return Reading(share / section.preemptions, "The KV pool is too small", now, cause, "docs/memory.md")


def stale_samples(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """Samples come from policies that are long gone."""
    stale = history.mean("staleness/mean")
    if section.staleness is None or stale is None:
        return None
    now = f"samples are {stale:.3g} policy versions behind on average (limit {section.staleness:g})"
    cause = "Sampling takes longer than learning: fewer samples in flight, or a lower bound on staleness."
    return Reading(stale / section.staleness, "Stale samples", now, cause, "docs/asynchrony.md")


def environment_errors(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """Environments fail."""
    share = history.mean("environment/error_frequency")
    if section.environment_errors is None or share is None:
        return None
    now = f"{share:.0%} of the episodes end by an error of their environment"
    late = history.mean("environment/timeout_frequency")
    cause = "" if not late else f"A further {late:.0%} are out of time."
    return Reading(share / section.environment_errors, "Environments fail", now, cause, "docs/environments.md")


def environment_timeouts(history: History, section: AlertsSection, facts: RunFacts) -> Reading | None:
    """Episodes do not end in time."""
    share = history.mean("environment/timeout_frequency")
    if section.environment_timeouts is None or share is None:
        return None
    now = f"{share:.0%} of the episodes are out of time"
    cause = (
        "They end with what they have: a faster environment, a higher environment.step_timeout or episode_timeout, or "
        "fewer at once (environment.max_concurrent)."
    )
    return Reading(share / section.environment_timeouts, "Episodes are out of time", now, cause, "docs/environments.md")


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        not_finite,
        grad_spike,
        entropy_collapse,
        entropy_growth,
        length_growth,
        length_collapse,
        truncation,
        mismatch,
        acceptance_drop,
        clip_ratio,
        kl_runaway,
        policy_jump,
        no_learning_signal,
        reward_hacking,
        kv_thrash,
        stale_samples,
        environment_errors,
        environment_timeouts,
    )
}


def _below(value: float, limit: float) -> float:
    """Badness of a number that should not fall below its limit."""
    return limit / value if value > 0 else math.inf


def _lengths(history: History) -> tuple[float, float] | None:
    """Mean completion lengths of the last and the first steps."""
    mean, first = history.mean("completions/mean_length"), history.first_mean("completions/mean_length")
    return None if mean is None or first is None or first <= 0 else (mean, first)


def _change(history: History, name: str) -> float:
    mean, first = history.mean(name), history.first_mean(name)
    return 0.0 if mean is None or first is None else mean - first
