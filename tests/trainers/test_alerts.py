"""Alerts: silent on a run that went well, told once with numbers and cause on one that does not, and never an error."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_trainers.alert_rules import RULES, RunFacts
from rollout_trainers.alerts import Alert, AlertWatch
from rollout_trainers.alerts_config import AlertsSection
from rollout_trainers.recipe import config_from_values

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "tests" / "support" / "data" / "quickstart_metrics.jsonl"  # of a real run, 60 steps
FACTS = RunFacts(max_tokens=24, samples_per_step=64, updates_per_step=1, exact_logprobs=True, rounded_engine=False)
RECOMPUTED = replace(FACTS, exact_logprobs=False)
HEALTHY = {
    "reward": 0.5,
    "rewards/right/mean": 0.4,
    "rewards/polite/mean": 0.1,
    "entropy": 1.0,
    "grad_norm": 1.0,
    "loss": 0.01,
    "frac_reward_zero_std": 0.25,
    "completions/mean_length": 16.0,
    "completions/mean_terminated_length": 14.0,
    "completions/clipped_ratio": 0.1,
    "clip_ratio/region_mean": 0.01,
    "ppo_kl": 0.01,
    "kl": 0.05,
    "sampling/logp_difference/max": 0.0,
    "sampling/logp_difference/mean": 0.0,
}


def records() -> list[dict[str, float]]:
    return [json.loads(line) for line in QUICKSTART.read_text(encoding="utf-8").splitlines()]


def tell(
    rows: Sequence[Mapping[str, float | None]],
    facts: RunFacts = FACTS,
    section: AlertsSection | None = None,
) -> list[Alert]:
    """All that a watch says of rows that are steps 1, 2, ..."""
    watch = AlertWatch(section or AlertsSection(), facts)
    return [alert for step, row in enumerate(rows, 1) for alert in watch.observe(step, row)]


def course(change: Callable[[int], Mapping[str, float]], steps: int = 20) -> list[dict[str, float]]:
    """Healthy steps (from 1 on), each with its change."""
    return [{**HEALTHY, **change(step)} for step in range(1, steps + 1)]


def evaluation(accuracy: float, half: float) -> dict[str, float]:
    return {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - half, "eval/accuracy_high": accuracy + half}


def test_a_quickstart_that_went_well_is_silent():
    watch = AlertWatch(AlertsSection(), FACTS)
    for record in records():
        assert watch.observe(int(record["step"]), record) == []
    assert watch.active == ()


# name of the rule, what goes wrong from step 11 on, facts, and words that the text must have
WRONG: list[tuple[str, Mapping[str, float | None], RunFacts, tuple[str, ...]]] = [
    ("not_finite", {"loss": math.nan}, FACTS, ("Not finite: loss", "last checkpoint")),
    ("not_finite", {"grad_norm": None}, FACTS, ("Not finite: grad_norm",)),
    ("not_finite", {"tools/bill": math.inf}, FACTS, ("tools/bill", "reward functions")),
    ("grad_spike", {"grad_norm": 30.0}, FACTS, ("norm is 30, 30 times the median", "max_grad_norm")),
    ("entropy_collapse", {"entropy": 0.01, "reward": 0.1}, FACTS, ("0.01 nats", "25%", "fell to 0.1", "clip_high")),
    ("entropy_growth", {"entropy": 3.0}, FACTS, ("3 nats a token, 3 times", "noise")),
    ("length_growth", {"completions/mean_length": 40.0}, FACTS, ("40 tokens", "2.5 times", "not risen", "10%")),
    ("length_collapse", {"completions/mean_length": 2.0, "reward": 0.7}, FACTS, ("2.0 tokens", "+0.2", "samples")),
    (
        "truncation",
        {
            "completions/clipped_ratio": 0.6,
            "completions/mean_terminated_length": 6.0,
            "completions/mean_length": 16.8,  # 0.6 * 24 + 0.4 * 6
        },
        FACTS,
        ("60% of", "10% in the first steps", "unlearned to stop", "loss.drop_truncated"),
    ),
    (
        "truncation",
        {"completions/clipped_ratio": 0.6, "completions/mean_length": 20.0},  # 0.6 * 24 + 0.4 * 14
        FACTS,
        ("more room than sampling.max_tokens (24)",),
    ),
    (
        "truncation",
        {"completions/clipped_ratio": 0.6, "completions/mean_length": 14.0},  # those cut off: 14, too
        replace(FACTS, max_model_len=40),
        ("Those cut off have 14 tokens", "engine.max_model_len (40)"),
    ),
    ("mismatch", {"sampling/logp_difference/max": 0.3}, FACTS, ("0.3 nats", "0.001", "fault", "docs/diagnose.md")),
    (
        "mismatch",
        {"sampling/logp_difference/max": 0.3, "diagnosis/stale_KV": 0.2, "diagnosis/precision": 0.01},
        FACTS,
        ("names stale KV (0.2 nats",),
    ),
    ("mismatch", {"sampling/logp_difference/mean": 0.05}, RECOMPUTED, ("mean of 0.05", "Precision")),
    (
        "mismatch",
        {"sampling/logp_difference/mean": 0.05},
        replace(RECOMPUTED, rounded_engine=True),
        ("int8",),
    ),
    ("clip_ratio", {"clip_ratio/region_mean": 0.95}, FACTS, ("95% of the tokens", "histogram")),
    ("clip_ratio", {"clip_ratio/region_mean": 0.95}, replace(FACTS, updates_per_step=8), ("The 8 optimiser steps",)),
    ("kl_runaway", {"kl": 3.0, "reward": 0.9}, FACTS, ("3 nats a token", "+0.4", "loss.kl_target")),
    ("policy_jump", {"ppo_kl": -0.8}, FACTS, ("0.8 nats a token", "1 optimiser steps")),
    ("policy_jump", {"ppo_kl": -0.8}, replace(FACTS, samples_ahead=True), ("0.8 nats a token", "`staleness/mean`")),
    ("no_learning_signal", {"frac_reward_zero_std": 1.0, "reward": 1.0}, FACTS, ("100% of the groups", "solved")),
    ("no_learning_signal", {"frac_reward_zero_std": 1.0, "reward": 0.0}, FACTS, ("worst reward",)),
    ("no_learning_signal", {"frac_reward_zero_std": 1.0}, FACTS, ("too hard or too easy", "dynamic_sampling")),
    ("stale_samples", {"staleness/mean": 6.0, "staleness/max": 8.0}, RECOMPUTED, ("6 policy versions",)),
    (
        "environment_errors",
        {"environment/error_frequency": 0.5, "environment/timeout_frequency": 0.125},
        FACTS,
        ("50% of the episodes", "12% are out of time"),
    ),
    ("environment_timeouts", {"environment/timeout_frequency": 0.5}, FACTS, ("50% of the episodes", "step_timeout")),
]


@pytest.mark.parametrize(("name", "wrong", "facts", "words"), WRONG, ids=lambda value: str(value)[:24])
def test_what_goes_wrong_is_told_once_with_its_numbers_and_its_cause(
    name: str, wrong: Mapping[str, float], facts: RunFacts, words: tuple[str, ...]
):
    alerts = tell(course(lambda step: wrong if step > 10 else {}), facts, AlertsSection(window=1))
    (alert,) = [alert for alert in alerts if alert.name == name]
    assert alert.step == 11
    assert alert.level == ("ERROR" if name == "not_finite" else "WARN")
    for each in words:
        assert each in alert.text
    page = re.search(r"See (docs/\S+\.md)\.$", alert.text)
    assert page is not None
    assert page[1] == "docs/asynchrony.md" or (ROOT / page[1]).is_file() or page[1] == "docs/dashboards.md"
    assert "\n" not in alert.text and ".." not in alert.text


def test_a_run_whose_completions_are_cut_off_from_the_start_is_told():
    cut = {"completions/clipped_ratio": 1.0, "completions/mean_length": 24.0}
    rows = [{**HEALTHY, **cut} for _ in range(10)]
    for row in rows:
        del row["completions/mean_terminated_length"]  # none has ended by itself
    (alert,) = tell(rows)
    assert (alert.name, alert.step, alert.title) == ("truncation", 5, "Nearly all completions are cut off")
    assert "100% of the completions" in alert.text and "sampling.max_tokens (24)" in alert.text
    (alert,) = tell([{**row, "completions/mean_length": 11.0} for row in rows], replace(FACTS, max_model_len=32))
    assert "11 tokens on average" in alert.text and "engine.max_model_len (32)" in alert.text
    assert tell([{**row, "completions/clipped_ratio": 0.7} for row in rows]) == []


def test_every_rule_is_tried_here():
    others = {"acceptance_drop", "reward_hacking", "kv_thrash"}  # in the tests below
    assert {name for name, *_ in WRONG} | others == set(RULES)


def test_an_alert_is_over_when_its_number_is_well_back_and_may_then_come_again():
    def entropy(step: int) -> dict[str, float]:
        low, near, fine = 0.01, 0.022, 0.5
        return {"entropy": low if 10 < step <= 20 or step > 40 else near if 20 < step <= 30 else fine}

    alerts = tell(course(entropy, 60))
    assert [(alert.name, alert.level) for alert in alerts] == [
        ("entropy_collapse", "WARN"),
        ("entropy_collapse", "INFO"),
        ("entropy_collapse", "WARN"),
    ]
    first, over, again = alerts
    assert 10 < first.step <= 15 and 30 < over.step <= 35 and 40 < again.step <= 45  # 0.022 is above the limit: no end
    assert f"told in step {first.step} is over: entropy is" in over.text


def test_preemptions_are_counted_step_by_step():
    # 10 a step, then 100: a counter since the engine's start, which is made anew at step 15 and counts from 0
    counts = [10 * step if step <= 8 else 80 + 100 * (step - 8) for step in range(1, 15)]
    counts += [100 * (step - 14) for step in range(15, 20)]
    rows = [{**HEALTHY, "engine/num_preemptions_total": count, "engine/kv_cache_usage_peak": 1.0} for count in counts]
    (alert,) = tell(rows)
    assert (alert.name, alert.step) == ("kv_thrash", 10)  # (10 + 10 + 10 + 100 + 100) / 5 = 46 > 32
    assert "46 requests a step" in alert.text and "100%" in alert.text and "engine.kv_cache_memory" in alert.text


@pytest.mark.parametrize(("entropy", "cause"), [(1.0, "does not follow the policy"), (2.9, "harder to guess")])
def test_acceptance_is_of_each_step_and_compared_with_the_best(entropy: float, cause: str):
    rows, drafted, accepted = [], 0, 0
    for step in range(1, 21):
        drafted, accepted = drafted + 1000, accepted + (700 if step <= 10 else 200)
        rows.append({**HEALTHY, "engine/draft_tokens_total": drafted, "engine/accepted_draft_tokens_total": accepted})
        rows[-1]["entropy"] = 1.0 if step <= 10 else entropy
    (alert,) = tell(rows, section=AlertsSection(entropy_growth=None))
    assert alert.name == "acceptance_drop"
    assert alert.step == 14  # (700 + 4 * 200) / 5 = 300 of 1000, below half of 700
    assert "30% of the drafts" in alert.text and "70% at best" in alert.text and cause in alert.text


def rewards_and_evaluations(last: float, half: float, reward: float) -> list[dict[str, float]]:
    """70 % held out, then `last`, with a training reward that goes from 0.5 to `reward` by politeness alone."""
    before = [*course(lambda step: {}, 10), evaluation(0.7, half)]
    later = course(lambda step: {"reward": reward, "rewards/polite/mean": reward - 0.4}, 10)
    return [*before, *later, evaluation(last, half)]


def test_a_reward_that_rises_while_held_out_accuracy_falls_is_told_with_the_reward_that_rose():
    (alert,) = tell(rewards_and_evaluations(0.5, 0.08, 0.8))
    assert (alert.name, alert.step) == ("reward_hacking", 22)
    for words in ("from 70.0% (step 11) to 50.0% (step 22)", "rose by 0.3", "Of the rewards polite rose most (+0.3)"):
        assert words in alert.text


@pytest.mark.parametrize(
    ("last", "half", "reward"),
    [(0.5, 0.08, 0.4), (0.65, 0.08, 0.8), (0.5, 0.25, 0.8), (0.8, 0.02, 0.9)],
    ids=["the training reward fell too", "within chance", "few questions", "both rise"],
)
def test_a_fall_that_may_be_chance_or_is_no_hacking_is_not_told(last: float, half: float, reward: float):
    assert [
        alert for alert in tell(rewards_and_evaluations(last, half, reward)) if alert.name == "reward_hacking"
    ] == []


def test_stale_samples_excuse_some_of_a_mismatch_and_are_named_as_its_cause():
    stale = {"staleness/mean": 1.0, "staleness/max": 2.0, "sampling/logp_difference/max": 2.0}
    small = course(lambda step: {**stale, "sampling/logp_difference/mean": 0.05})
    assert tell(small) == []
    (alert,) = tell(course(lambda step: {**stale, "sampling/logp_difference/mean": 0.2}))
    assert alert.name == "mismatch" and "1 policy versions behind" in alert.text
    clipped = tell(course(lambda step: {**stale, "clip_ratio/region_mean": 0.9}))
    assert "1 policy versions behind" in clipped[0].text


def test_equal_rewards_are_no_matter_where_a_teacher_says_what_to_learn():
    rows = course(lambda step: {"frac_reward_zero_std": 1.0, "reward": 0.0})
    assert [alert.name for alert in tell(rows)] == ["no_learning_signal"]
    assert tell(rows, replace(FACTS, learns_from_rewards=False)) == []
    config = config_from_values({"model": "any", "teacher": {"model": "another"}})
    assert not RunFacts.of(config).learns_from_rewards


def test_without_a_limit_or_without_alerts_nothing_is_told():
    rows = course(lambda step: {"entropy": 0.001 if step > 10 else 1.0})
    assert [alert.name for alert in tell(rows)] == ["entropy_collapse"]
    assert tell(rows, section=AlertsSection(entropy_floor=None)) == []
    assert tell(rows, section=AlertsSection(enabled=False)) == []


def test_a_resumed_run_knows_what_it_has_told():
    rows = course(lambda step: {"entropy": 0.01 if step > 10 else 1.0})
    whole, resumed = AlertWatch(AlertsSection(), FACTS), AlertWatch(AlertsSection(), FACTS)
    told = [alert for step, row in enumerate(rows, 1) for alert in whole.observe(step, row)]
    assert [alert.name for alert in told] == ["entropy_collapse"]
    resumed.replay({"step": step, **row} for step, row in enumerate(rows[:15], 1))
    assert [alert for step, row in enumerate(rows[15:], 16) for alert in resumed.observe(step, row)] == []
    assert resumed.active == whole.active == ("entropy_collapse",)


NUMBERS = st.one_of(
    st.none(), st.integers(-3, 10**9), st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1), st.just(0.0)
)
NAMES = sorted(
    {*HEALTHY, "engine/num_preemptions_total", "engine/draft_tokens_total", "engine/accepted_draft_tokens_total"}
    | {"staleness/mean", "staleness/max", "environment/error_frequency", "diagnosis/precision", "other"}
    | {"eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "engine/kv_cache_usage_peak"}
)


@given(
    st.lists(st.dictionaries(st.sampled_from(NAMES), NUMBERS), max_size=30),
    st.sampled_from([FACTS, RECOMPUTED]),
    st.integers(1, 4),
)
def test_whatever_is_logged_nothing_is_raised_and_nothing_repeated(
    rows: list[dict[str, float | None]], facts: RunFacts, window: int
):
    alerts = tell(rows, facts, AlertsSection(window=window))
    for name in RULES:
        levels = ["INFO" if alert.level == "INFO" else "WARN" for alert in alerts if alert.name == name]
        assert levels == ["WARN", "INFO"] * (len(levels) // 2) + ["WARN"] * (len(levels) % 2)  # told, over, told, ...


@pytest.mark.parametrize(
    "override",
    [
        "alerts.window=0",
        "alerts.enabled=3",
        "alerts.kl=0",
        "alerts.kl=many",
        "alerts.truncation=2",
        "alerts.grad_spike=1",
        "alerts.length_shrink=0.5",
    ],
)
def test_wrong_limits_are_refused_by_name(override: str):
    with pytest.raises(ValueError, match=override.partition("=")[0].replace(".", r"\.")):
        config_from_values({"model": "any"}, [override])


def test_limits_come_from_the_recipe_and_every_one_can_be_left_out():
    limits = [field.name for field in fields(AlertsSection) if field.name not in ("enabled", "window")]
    config = config_from_values({"model": "any", "alerts": dict.fromkeys(limits)}, ["alerts.window=3"])
    assert config.alerts.window == 3
    assert [getattr(config.alerts, name) for name in limits] == [None] * len(limits)
    assert tell(course(lambda step: {"entropy": 0.0, "kl": 9.0, "grad_norm": 99.0 * step}), section=config.alerts) == []


def test_what_rules_know_of_a_run_is_its_recipes():
    config = config_from_values(
        {"model": "any", "engine": {"quantization": "int8"}, "algorithm": {"recompute_logprobs": True, "epochs": 2}}
    )
    assert RunFacts.of(config) == RunFacts(64, 64, 2, exact_logprobs=False, rounded_engine=True)
