"""Parameters and modules that were put in the place of the engine's own are refused, whoever would read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rollout import LLM, SamplingParams
from rollout.errors import PolicyUpdateError, StaleWeightsError
from rollout.models.causal_lm import CausalLM
from tests.support.tiny import make_tiny_llama

PARAMS = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)


def give_other_data(model: CausalLM) -> None:
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    weight.data = weight.detach().clone() * 0.5


def give_other_data_to_a_part_of_a_fused_projection(model: CausalLM) -> None:
    weight = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    weight.data = weight.detach().clone()


def replace_a_parameter(model: CausalLM) -> None:
    module = model.get_submodule("model.layers.0.self_attn.o_proj")
    module.weight = nn.Parameter(torch.zeros_like(module.get_parameter("weight")), requires_grad=False)


def drop_a_layer(model: CausalLM) -> None:
    body = model.get_submodule("model")
    layers = body.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    body.layers = nn.ModuleList(list(layers)[:1])


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(
    "change",
    [give_other_data, give_other_data_to_a_part_of_a_fused_projection, replace_a_parameter, drop_a_layer],
)
def test_what_was_replaced_is_refused(change: Callable[[CausalLM], None], enforce_eager: bool, tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB", enforce_eager=enforce_eager)
    model = llm.shared_model()
    for _ in range(2):
        llm.generate([[1, 2, 3]], PARAMS)
    llm.enqueue([[4, 5, 6]], PARAMS)
    llm.step()
    change(model)
    words = "no longer lies in the engine's memory|were added, removed or replaced"
    with pytest.raises(StaleWeightsError, match=words):
        llm.step()
    with pytest.raises(StaleWeightsError, match=words):
        llm.generate([[1, 2, 3]], PARAMS)
    with pytest.raises(StaleWeightsError, match=words):
        llm.verify()
    with pytest.raises(PolicyUpdateError, match=words), llm.policy_update(version=1) as update:
        update.load(model.named_parameters())
    assert llm.policy_version == 0


def test_the_tensor_that_was_replaced_is_named_and_putting_it_back_repairs(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    model = llm.shared_model()
    expected = llm.generate([[1, 2, 3]], PARAMS)[0].outputs[0].token_ids
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    own = weight.data
    give_other_data(model)
    with pytest.raises(StaleWeightsError, match=r"model\.layers\.0\.mlp\.down_proj\.weight"):
        llm.generate([[1, 2, 3]], PARAMS)
    weight.data = own
    with llm.policy_update(version=1) as update:
        update.load(model.named_parameters())
    assert llm.generate([[1, 2, 3]], PARAMS)[0].outputs[0].token_ids == expected
