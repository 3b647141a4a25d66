"""Early stopping and the best checkpoint: pure rules over the values of one metric."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_trainers.best import Best, BestWatch
from rollout_trainers.config import CheckpointSection, EvaluationSection, RunConfig
from rollout_trainers.early_stop import EarlyStop
from rollout_trainers.early_stop_config import EarlyStopSection, Mode


def stop_step(values: list[float], first_step: int = 1, **section: Any) -> int | None:
    """After which step a run ends whose metric `m` has these values, one a step."""
    stop = EarlyStop(EarlyStopSection(metric="m", **section))
    for step, value in enumerate(values, first_step):
        stop.observe(step, {"m": value})
        if stop.stopped is not None:
            return stop.stopped.step
    return None


def test_a_run_ends_once_nothing_has_got_better_for_a_while():
    assert stop_step([0.1, 0.3, 0.2, 0.3, 0.4], patience=2) == 4
    assert stop_step([0.1, 0.3, 0.2, 0.35, 0.2, 0.2], patience=3) is None
    assert stop_step([3.0, 2.0, 2.5, 2.0], mode="min", patience=2) == 4
    assert stop_step([0.1, 0.2, 0.3, 0.4], patience=1) is None


def test_what_is_better_by_no_more_than_min_delta_is_no_progress():
    assert stop_step([0.5, 0.59, 0.6], patience=2, min_delta=0.125) == 3
    assert stop_step([0.5, 0.59, 0.63], patience=2, min_delta=0.125) is None
    # Small steps add up: they are measured from the last value that counted.
    assert stop_step([1.0, 0.9, 0.8, 0.7, 0.6], mode="min", patience=3, min_delta=0.25) is None


def test_a_threshold_ends_the_run_at_once():
    assert stop_step([0.2, 0.8, 0.9], threshold=0.8) == 2
    assert stop_step([0.2, 0.1, 0.05], mode="min", threshold=0.1) == 2
    assert stop_step([0.2, 0.3], threshold=0.8) is None


def test_values_before_from_step_do_not_count():
    assert stop_step([0.9, 0.1, 0.1, 0.1, 0.1], patience=2, from_step=3) == 5
    assert stop_step([0.9, 0.1], threshold=0.5, from_step=2) is None


def test_numbers_that_are_not_finite_are_never_better():
    assert stop_step([math.nan, math.nan, math.nan], patience=2) == 2
    assert stop_step([0.1, math.inf, 0.2, 0.3], patience=2) is None
    assert stop_step([math.nan, 0.5], threshold=0.4) == 2


def test_steps_that_do_not_have_the_metric_do_not_count():
    stop = EarlyStop(EarlyStopSection(metric="m", patience=1))
    for step in range(5):
        stop.observe(step, {"other": 0.0})
    assert stop.stopped is None


def test_the_reason_names_the_metric_and_its_values():
    stop = EarlyStop(EarlyStopSection(metric="eval/accuracy", patience=2))
    for step, value in ((10, 0.5), (20, 0.25), (30, 0.5)):
        stop.observe(step, {"eval/accuracy": value})
    assert str(stop.stopped) == "stopped early after step 30: eval/accuracy has not got better than 0.5 in 2 values"
    stop = EarlyStop(EarlyStopSection(metric="kl", threshold=0.1))
    stop.observe(4, {"kl": 0.3})
    assert str(stop.stopped) == "stopped early after step 4: kl is 0.3, and 0.1 was to be reached"


def slow_stop(values: list[float], patience: int, min_delta: float, mode: Mode) -> int | None:
    """The same in another way: the places that count as progress first, and then the first long gap behind one."""
    sign = 1.0 if mode == "max" else -1.0
    progress, best = [-1], -math.inf
    for place, value in enumerate(values):
        if math.isfinite(value) and (best == -math.inf or sign * value - best > min_delta):
            progress, best = [*progress, place], sign * value
    for place, following in zip(progress, [*progress[1:], len(values) + patience], strict=True):
        if following - place > patience and place + patience < len(values):
            return place + patience + 1
    return None


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, math.nan, math.inf]), max_size=12),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.25]),
    st.sampled_from(["max", "min"]),
    st.integers(0, 12),
)
def test_early_stopping_is_what_it_says_also_across_a_break(
    values: list[float], patience: int, min_delta: float, mode: Mode, broken_at: int
):
    expected = slow_stop(values, patience, min_delta, mode)
    section = EarlyStopSection("m", mode, patience, min_delta)
    stop = EarlyStop(section)
    for step, value in enumerate(values, 1):
        if step == broken_at:
            state = json.loads(json.dumps(stop.state_dict()))
            stop = EarlyStop(section)
            stop.load_state_dict(state)
        stop.observe(step, {"m": value})
    assert (None if stop.stopped is None else stop.stopped.step) == expected


def test_under_another_section_it_begins_anew():
    stop = EarlyStop(EarlyStopSection(metric="m", patience=1))
    for step in (1, 2):
        stop.observe(step, {"m": 0.5})
    patient = EarlyStop(EarlyStopSection(metric="m", patience=5))
    patient.load_state_dict(stop.state_dict())
    assert patient.stopped is None
    assert patient.best is None
    same = EarlyStop(EarlyStopSection(metric="m", patience=1))
    same.load_state_dict(stop.state_dict())
    assert same.stopped == stop.stopped != None  # noqa: E711  # both, and not the absence of both


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patience": 2}, r"early_stop.metric=None .*where patience is given"),
        ({"metric": "m"}, r"early_stop.patience=None .*given, or threshold"),
        ({"metric": "m", "patience": 0}, r"early_stop.patience=0 .*at least 1"),
        ({"metric": "m", "patience": 1, "mode": "best"}, r"early_stop.mode='best' .*'max', 'min'"),
        ({"metric": "m", "patience": 1, "min_delta": -1.0}, r"early_stop.min_delta=-1.0"),
        ({"metric": "m", "threshold": math.nan}, r"early_stop.threshold=nan"),
        ({"metric": 3, "patience": 1}, r"early_stop.metric=3 .*the name of a metric"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        EarlyStopSection(**values)


def test_a_name_that_nobody_knows_is_told_once_with_the_nearest():
    stop = EarlyStop(EarlyStopSection(metric="bills", patience=1))
    told = [stop.missing({"tools/x": 1.0, "bill": 1.0}) for _ in range(6)]
    assert [text is not None for text in told] == [False, False, True, False, False, False]
    assert told[2] is not None and "early_stop.metric='bills'" in told[2] and "did you mean 'bill'?" in told[2]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("completions/mean_terminated_length", [{}, {}, {}, {}]),  # no sample may end by itself
        ("sampling/logp_difference/max", [{}, {}, {}, {}]),
        ("rewards/polite/mean", [{}, {}, {}, {}]),
        ("bill", [{}, {"bill": 1.0}, {}, {}, {}, {}]),
    ],
)
def test_metrics_may_be_absent_in_some_steps(name: str, steps: list[dict[str, float]]):
    RunConfig("m", early_stop=EarlyStopSection(metric=name, patience=1))
    stop = EarlyStop(EarlyStopSection(metric=name, patience=1))
    assert [stop.missing(step) for step in steps] == [None] * len(steps)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("entrpy", "entropy"),
        ("completions/mean_lenght", "completions/mean_length"),
        ("sampling/logp_diference/max", "sampling/logp_difference/max"),
    ],
)
def test_a_misspelt_metric_is_refused_before_the_run(name: str, near: str):
    with pytest.raises(ValueError, match=rf"early_stop.metric='{name}' .*did you mean '{near}'"):
        RunConfig("m", early_stop=EarlyStopSection(metric=name, patience=1))


def test_a_best_checkpoint_needs_evaluations_after_steps():
    best = CheckpointSection(best_metric="eval/accuracy", load_best=True)
    with pytest.raises(ValueError, match=r"evaluation.every=0 .*checkpoint.best_metric is 'eval/accuracy'"):
        RunConfig("m", checkpoint=best, evaluation=EvaluationSection(at_end=False))
    for evaluation in ({}, {"every": 1, "at_end": False}, {"at_steps": (3,), "at_end": False}):
        RunConfig("m", checkpoint=best, evaluation=EvaluationSection(**evaluation))


def test_the_best_is_the_first_of_the_best_values():
    values = [0.5, math.nan, 0.75, 0.75, 0.25, 0.25]
    expected: tuple[tuple[Mode, list[int]], ...] = (("max", [1, 3]), ("min", [1, 5]))
    for mode, better in expected:
        watch = BestWatch(CheckpointSection(best_metric="eval/accuracy", best_mode=mode))
        assert [step for step, value in enumerate(values, 1) if watch.observe(step, {"eval/accuracy": value})] == better
        assert watch.best == Best(better[-1], "eval/accuracy", values[better[-1] - 1])
        assert not watch.observe(9, {"eval/reward": 9.0})


def test_the_best_of_another_metric_is_forgotten():
    watch = BestWatch(CheckpointSection(best_metric="eval/accuracy"))
    watch.observe(3, {"eval/accuracy": 0.5})
    for section, kept in (
        (CheckpointSection(best_metric="eval/accuracy"), 3),
        (CheckpointSection(best_metric="eval/accuracy", best_mode="min"), None),
        (CheckpointSection(best_metric="eval/reward"), None),
        (CheckpointSection(), None),
    ):
        other = BestWatch(section)
        other.load_state_dict(json.loads(json.dumps(watch.state_dict())))
        assert other.step == kept
