"""What a recipe may say of asynchrony: choices without an effect, or that cannot hold, are refused by name."""

from __future__ import annotations

import pytest

from rollout_trainers.asynchrony_config import AsynchronySection
from rollout_trainers.recipe import config_from_values


def section(*overrides: str) -> AsynchronySection:
    return config_from_values({"model": "a/model"}, [f"asynchrony.{each}" for each in overrides]).asynchrony


def test_by_default_sampler_and_trainer_take_turns():
    plain = section()
    assert not plain.is_active
    assert plain.staleness_bound == 0


@pytest.mark.parametrize(
    ("overrides", "bound", "spare", "held"),
    [
        (["mode=one_step_off"], 1, 0, "recompute"),
        (["mode=one_step_off", "over_sampling=0.5"], 2, 3, "recompute"),
        (["mode=in_flight"], 1, None, "keep"),
        (["mode=in_flight", "max_staleness=3", "over_sampling=0", "held_cache=recompute"], 3, 0, "recompute"),
        (["over_sampling=0.1"], 1, 1, "recompute"),
        (["step_tokens=100", "max_staleness=4"], 4, 0, "recompute"),
        (["step_seconds=2"], 1, 0, "recompute"),
    ],
)
def test_what_is_left_open_follows_from_the_rest(overrides: list[str], bound: int, spare: int | None, held: str):
    values = {"model": "a/model", "engine": {"sleep": "mode=" not in overrides[0]}}
    made = config_from_values(values, [f"asynchrony.{each}" for each in overrides]).asynchrony
    assert made.is_active
    assert (made.staleness_bound, made.num_spare(6), made.held_cache_mode) == (bound, spare, held)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mode=later"], r"asynchrony\.mode='later'"),
        (["max_staleness=1"], r"asynchrony\.max_staleness=1 .* must be 0 "),
        (["mode=one_step_off", "max_staleness=2"], r"asynchrony\.max_staleness=2 .* must be 1 "),
        (["mode=one_step_off", "max_staleness=1", "over_sampling=0.5"], r"max_staleness=1 .* at least 2"),
        (["mode=in_flight", "max_staleness=0"], r"max_staleness=0 .* at least 1"),
        (["over_sampling=-1"], r"asynchrony\.over_sampling=-1"),
        (["over_sampling=1.5"], r"over_sampling=1\.5 .* at most 1 with a max_staleness of 1"),
        (["mode=one_step_off", "over_sampling=2"], r"over_sampling=2\.0 .* at most 1 with a max_staleness of 2"),
        (["mode=in_flight", "step_tokens=9"], r"asynchrony\.step_tokens=9 .* left out in flight"),
        (["step_tokens=0"], r"asynchrony\.step_tokens=0"),
        (["step_seconds=0"], r"asynchrony\.step_seconds=0"),
        (["held_cache=keep"], r"asynchrony\.held_cache='keep' .* left out where no sample goes on"),
        (["held_cache=drop", "over_sampling=1"], r"asynchrony\.held_cache='drop'"),
    ],
)
def test_what_cannot_hold_is_refused_by_name(overrides: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        section(*overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["asynchrony.mode=in_flight"], r"engine\.sleep=True .* false with asynchrony\.mode 'in_flight'"),
        (["asynchrony.mode=one_step_off"], r"engine\.sleep=True"),
        (
            ["asynchrony.over_sampling=1", "asynchrony.held_cache=keep"],
            r"held_cache='keep' .* engine\.sleep",
        ),
        (["asynchrony.step_tokens=9", "distributed.kind=ddp"], r"asynchrony\.step_tokens=9 .* distributed\.kind 'ddp'"),
        (
            ["asynchrony.step_seconds=9", "distributed.kind=ddp"],
            r"asynchrony\.step_seconds=9\.0 .* as many groups in every step",
        ),
        (
            [
                *("asynchrony.over_sampling=1", "distributed.kind=zero3", "policy.kind=transformers"),
                "algorithm.recompute_logprobs=true",
            ],
            r"asynchrony\.over_sampling=1\.0 .* distributed\.kind 'zero3'.* use 'ddp'",
        ),
        (["asynchrony.over_sampling=1", "engine.memory_budget=1GiB"], r"engine\.memory_budget='1GiB' .* asynchrony"),
        (
            ["asynchrony.over_sampling=1", "loss.algorithm=reinforce"],
            r"surrogate='log_probability' .* asynchrony",
        ),
    ],
)
def test_other_sections_are_refused_where_they_do_not_fit(overrides: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        config_from_values({"model": "a/model"}, overrides)


def test_reinforce_may_be_behind_where_importance_weights_correct_it():
    overrides = ["asynchrony.over_sampling=1", "loss.algorithm=reinforce", "algorithm.recompute_logprobs=true"]
    assert config_from_values({"model": "a/model"}, overrides).asynchrony.is_active
