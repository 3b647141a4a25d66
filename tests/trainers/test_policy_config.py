"""The section `policy` of recipes: what is refused, and by which name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rollout_trainers.config import RunConfig
from rollout_trainers.recipe import config_from_values

RECOMPUTE = {"model": "x", "algorithm": {"recompute_logprobs": True}}


def test_by_default_the_engines_own_module_is_trained_whole():
    policy = RunConfig(model="x").policy
    assert (policy.kind, policy.is_exact, policy.uses_lora) == ("shared", True, False)
    assert not policy.gradient_checkpointing
    assert not policy.offload


def test_a_recipe_names_lora_with_all_that_it_needs():
    lora = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}}
    policy = config_from_values({**RECOMPUTE, "policy": {"kind": "transformers", "lora": lora}}).policy
    assert policy.uses_lora
    assert not policy.is_exact
    assert (policy.lora.alpha, policy.lora.target_modules) == (8.0, ["q_proj", "v_proj"])
    overridden = config_from_values(
        RECOMPUTE, ["policy.kind=transformers", "policy.lora.rank=2", "policy.lora.use_rslora=true"]
    )
    assert overridden.policy.lora.use_rslora


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"kind": "peft"}, "policy.kind='peft'"),
        ({"kind": "shared", "model_dtype": "float32"}, "policy.model_dtype='float32'"),
        ({"kind": "shared", "lora": {"rank": 8}}, "policy.lora.rank=8"),
        ({"kind": "transformers", "model_dtype": "float16"}, "policy.model_dtype='float16'"),
        ({"kind": "transformers", "lora": {"alpha": 8}}, "policy.lora.alpha=8.0"),
        ({"kind": "transformers", "lora": {"rank_pattern": {"q_proj": 8}}}, "policy.lora.rank_pattern={'q_proj': 8}"),
        ({"kind": "transformers", "lora": {"rank": -1}}, "policy.lora.rank=-1"),
        ({"kind": "transformers", "lora": {"rank": 4, "alpha": 0}}, "policy.lora.alpha=0"),
        ({"kind": "transformers", "lora": {"rank": 4, "dropout": 1.0}}, "policy.lora.dropout=1.0"),
        ({"kind": "transformers", "lora": {"rank": 4, "target_modules": []}}, "policy.lora.target_modules=[]"),
        ({"kind": "transformers", "lora": {"rank": 4, "target_modules": "q_proj"}}, "policy.lora.target_modules"),
        ({"kind": "transformers", "lora": {"rank": 4, "exclude_modules": "q_proj"}}, "policy.lora.exclude_modules"),
        ({"kind": "transformers", "lora": {"rank": 4, "layers_to_transform": 3}}, "policy.lora.layers_to_transform=3"),
        ({"kind": "transformers", "lora": {"rank": 4, "rank_pattern": {"q_proj": 0}}}, "policy.lora.rank_pattern=0"),
        ({"kind": "transformers", "lora": {"rank": 4, "rank_pattern": {"(": 2}}}, "policy.lora.rank_pattern has '('"),
        ({"kind": "transformers", "lora": {"rank": 4, "alpha_pattern": {"q": -1}}}, "policy.lora.alpha_pattern=-1"),
        ({"kind": "transformers", "lora": {"rank": 4, "initialization": "pissa"}}, "policy.lora.initialization"),
        ({"gradient_checkpointing": 1}, "policy.gradient_checkpointing=1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(policy: dict[str, Any], field: str):
    with pytest.raises(ValueError, match=re.escape(field)):
        config_from_values({**RECOMPUTE, "policy": policy})


def test_another_implementation_than_the_samplers_must_recompute_the_old_logprobs():
    with pytest.raises(ValueError, match=r"algorithm.recompute_logprobs=False.*'transformers'"):
        config_from_values({"model": "x", "policy": {"kind": "transformers"}})


@pytest.mark.parametrize("engine", [{"device": "cpu"}, {"sleep": False}])
def test_offloading_is_refused_where_it_would_free_nothing_for_anybody(engine: dict[str, Any]):
    with pytest.raises(ValueError, match=r"policy.offload=True"):
        config_from_values({"model": "x", "engine": engine, "policy": {"offload": True}})
