"""Presets fill choices, choices override presets, and combinations that make no sense are refused with the reason."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_trainers.config import RunConfig
from rollout_trainers.loss_config import CORRECTIONS, PRESETS, LossSection
from rollout_trainers.recipe import config_from_values

VALUES = {"model": "x"}


def test_the_default_is_grpo_with_tokens_that_count_the_same():
    section = RunConfig(model="x").loss
    assert (section.algorithm, section.ratio, section.surrogate) == ("grpo_token", "token", "clipped")
    assert (section.clip_low, section.clip_high, section.aggregation) == (0.2, 0.2, "token_mean")
    assert (section.baseline, section.advantage_scale, section.kl_coefficient) == ("group_mean", "group_std", 0.0)


@pytest.mark.parametrize("algorithm", PRESETS)
def test_a_preset_fills_its_choices_and_each_can_be_overridden(algorithm: Any):
    section = LossSection(algorithm)
    assert all(getattr(section, name) == value for name, value in PRESETS[algorithm].items())
    assert "preset" not in repr(section)  # nothing is left to fill
    assert LossSection(algorithm, drop_truncated=True).drop_truncated
    other = dataclasses.replace(section, entropy_coefficient=0.5)
    assert (other.entropy_coefficient, other.aggregation) == (0.5, section.aggregation)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_fills_its_choices_and_each_can_be_overridden(correction: Any):
    section = LossSection(correction=correction)
    assert all(getattr(section, name) == value for name, value in CORRECTIONS[correction].items())
    if section.importance_level != "none":
        assert LossSection(correction=correction, importance_cap=7.0).importance_cap == 7.0


def test_a_recipe_names_an_algorithm_and_overrides_choices():
    values = VALUES | {"algorithm": {"minibatches": 2}, "loss": {"algorithm": "dapo", "clip_high": 0.3}}
    loss = config_from_values(values, ["loss.overlong_buffer=0.5", "loss.dynamic_sampling=false"]).loss
    assert (loss.algorithm, loss.clip_low, loss.clip_high) == ("dapo", 0.2, 0.3)
    assert (loss.overlong_buffer, loss.dynamic_sampling) == (0.5, False)
    assert config_from_values(VALUES | {"algorithm": {"epochs": 2}, "loss": {"dual_clip": 3}}).loss.dual_clip == 3
    assert (
        config_from_values(VALUES | {"loss": {"kl_placement": "reward", "kl_coefficient": 1}}).loss.kl_estimator == "k1"
    )


def test_choices_that_recipes_name_in_the_section_algorithm_mean_the_same():
    values = VALUES | {"algorithm": {"group_size": 4, "epochs": 2, "clip_high": 0.3, "aggregation": "sequence_mean"}}
    config = config_from_values(values, ["algorithm.kl_coefficient=1e-3", "loss.algorithm=dr_grpo"])
    assert (config.algorithm.group_size, config.loss.clip_high) == (4, 0.3)
    assert (config.loss.aggregation, config.loss.kl_coefficient) == ("sequence_mean", 1e-3)
    with pytest.raises(ValueError, match=r"algorithm\.clip_low and loss\.clip_low are both given"):
        config_from_values(VALUES, ["algorithm.clip_low=0.1", "loss.clip_low=0.1"])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"algorithm": "po"}, "loss.algorithm='po' is not valid: it must be one of 'grpo_token', 'grpo', 'dr_grpo'"),
        ({"ratio": "word"}, "loss.ratio='word' is not valid: it must be one of 'token'"),
        ({"clip_low": -0.1}, "loss.clip_low=-0.1 is not valid: it must be a finite number of at least 0"),
        ({"whiten": 1}, "loss.whiten=1 is not valid: it must be true or false"),
        ({"dual_clip": 1.0}, "loss.dual_clip=1.0 is not valid: it must be a finite number above 1"),
        ({"algorithm": "cispo", "dual_clip": 3.0}, "None where surrogate is not 'clipped'"),
        ({"algorithm": "reinforce", "clip_high": 0.3}, "loss.clip_high=0.3 is not valid: it must be left out"),
        ({"algorithm": "cispo", "ratio": "gspo_token"}, "takes no gradient of the ratio"),
        ({"loss_normalizer": 5}, "loss.loss_normalizer=5 is not valid: it must be None where aggregation is not"),
        ({"algorithm": "dr_grpo", "loss_normalizer": 0}, "an integer of at least 1"),
        ({"baseline": "none"}, "which does not compare within groups"),
        ({"whiten": True}, "loss.advantage_scale='group_std' is not valid: it must be 'none' with whiten"),
        ({"algorithm": "reinforce_pp", "dynamic_sampling": True}, "where groups of equal rewards do teach something"),
        ({"max_sampling_rounds": 2}, "left out without dynamic_sampling"),
        ({"algorithm": "dapo", "max_sampling_rounds": 0}, "an integer of at least 1"),
        ({"overlong_penalty": 2.0}, "left out where overlong_buffer is 0"),
        ({"overlong_buffer": 1.5}, "a share, at most 1"),
        ({"clip_low": 1.0}, "loss.clip_low=1.0 is not valid: it must be below 1"),
        ({"algorithm": "cispo", "clip_low": 1.5}, "loss.clip_low=1.5 is not valid: it must be at most 1"),
        ({"kl_estimator": "k3"}, "loss.kl_estimator='k3' is not valid: it must be left out where kl_coefficient is 0"),
        ({"kl_placement": "reward"}, "loss.kl_placement='reward' is not valid: it must be left out where"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "the expected gradient of 'k1' is zero"),
        ({"kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k3"}, "a reward is not differentiated"),
        (
            {"algorithm": "gspo", "kl_placement": "reward_to_go", "kl_coefficient": 0.1},
            "loss.ratio='geometric_mean' is not valid: it must be 'token' or 'gspo_token'",
        ),
        ({"importance_cap": 0.5}, "loss.importance_cap=0.5 is not valid: it must be a finite number of at least 1"),
        ({"correction": "none", "importance_cap": 2.0}, "None where importance_level is 'none'"),
        ({"mask_high": 2.0}, "loss.mask_high=2.0 is not valid: it must be None where mask_level is 'none'"),
        ({"mask_low": 0.5}, "loss.mask_low=0.5 is not valid: it must be 0 where mask_level is 'none'"),
        ({"mask_level": "token"}, "loss.mask_level='token' is not valid"),
        ({"correction": "icepop", "mask_low": 1.5}, "at most 1, the ratio of two policies that are the same"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(choices: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=r"^loss\.") as raised:
        LossSection(**choices)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.algorithm=reinforce", "algorithm.epochs=2"], "with 2 optimiser steps on each step's samples"),
        (["loss.algorithm=rloo", "algorithm.group_size=1"], "algorithm.group_size=1 is not valid"),
        (["loss.algorithm=reinforce", "algorithm.group_size=1", "algorithm.prompts_per_step=1"], "at least 2 with"),
        (
            ["loss.correction=mis"],
            "loss.correction='mis' is not valid: it must be left out without algorithm.recompute",
        ),
        (["loss.importance_cap=3"], "loss.importance_cap=3.0 is not valid: it must be left out without"),
        (["loss.correction=none", "loss.importance_level=token"], "loss.correction='none' is not valid"),
    ],
)
def test_what_the_loss_asks_of_a_step_is_checked_before_it_runs(overrides: list[str], message: str):
    with pytest.raises(ValueError, match="is not valid") as raised:
        config_from_values(VALUES, overrides)
    assert message in str(raised.value)


def test_groups_of_one_are_enough_where_nothing_is_compared_within_them():
    assert config_from_values(VALUES, ["loss.algorithm=reinforce_pp", "algorithm.group_size=1"])
    assert config_from_values(VALUES, ["loss.correction=none"])
    assert config_from_values(VALUES, ["loss.correction=icepop", "algorithm.recompute_logprobs=true"])


def table_rows(first_cells: set[str]) -> dict[str, list[str]]:
    """The rows of docs/algorithms.md's tables whose first cell is one of these in backticks, maybe with a remark."""
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0].split("`")[1]: row for row in rows if "`" in row[0] and row[0].split("`")[1] in first_cells}


def test_the_documentation_has_every_preset_and_correction_as_it_is():
    presets = table_rows(set(PRESETS))
    assert list(presets) == list(PRESETS)
    for name, row in presets.items():
        written = [yaml.safe_load(part.strip().strip("`")) for part in row[1].split(",") if part]
        assert {key: value for part in written for key, value in part.items()} == PRESETS[name]  # type: ignore[index]
    corrections = table_rows(set(CORRECTIONS))
    assert set(corrections) == set(CORRECTIONS)
    for name, (_, level, cap, mask) in corrections.items():
        section = LossSection(correction=name)  # type: ignore[arg-type]
        assert level == section.importance_level.replace("none", "")
        assert cap == ("" if section.importance_cap is None else f"{section.importance_cap:g}")
        bounds = [bound for bound in (section.mask_low, section.mask_high) if bound]
        assert [float(number) for number in re.findall(r"[\d.]*\d", mask)] == bounds
