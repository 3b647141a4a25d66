"""The transport in one process, and the merged weights of PEFT models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rollout.errors import AdapterTensorError
from rollout.weights.in_process import InProcess, merged_tensors
from rollout.weights.names import canonical_name
from rollout.weights.transaction import PolicyUpdate
from tests.support.recording_engine import RecordingEngine, new_policy


class _Module(nn.Module):
    """Parameters under the engine's names."""

    def __init__(self, policy: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in policy.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(tensor))


@pytest.mark.parametrize("give", [_Module, dict, lambda policy: policy.items(), lambda policy: iter(policy.items())])
def test_a_module_a_mapping_and_pairs_all_load(give: Callable[[dict[str, torch.Tensor]], object]):
    engine = RecordingEngine()
    policy = new_policy(engine)
    with PolicyUpdate(engine) as update:
        loaded = update.load(InProcess(give(policy)))  # pyright: ignore[reportArgumentType]
    assert sorted(loaded) == sorted(policy)
    for name, tensor in engine.tensors.items():
        assert torch.equal(tensor, policy[name])


def test_a_module_over_the_engines_memory_moves_no_bytes():
    engine = RecordingEngine()
    with PolicyUpdate(engine) as update:
        update.load(InProcess(_Module(engine.tensors)))
    assert update.receipt.bytes_copied == 0
    assert update.receipt.bytes_shared == update.receipt.num_bytes


def _peft(config: LoraConfig | IA3Config, tie: bool = False, dtype: torch.dtype = torch.float32) -> PeftModel:
    torch.manual_seed(1)
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=32,
            tie_word_embeddings=tie,
        )
    )
    model = get_peft_model(base.type(dtype), config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter.data, std=0.3)
    assert isinstance(model, PeftModel)
    return model


LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj", "embed_tokens"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_tensors_are_those_of_peft_and_the_base_stays_bit_for_bit(dtype: torch.dtype):  # case WS-11
    model = _peft(LoraConfig(**LORA, modules_to_save=["lm_head"]), dtype=dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = {canonical_name(name): tensor.clone() for name, tensor in merged_tensors(model)}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    oracle = model.merge_and_unload().state_dict()
    changed = 0
    for name, tensor in oracle.items():
        torch.testing.assert_close(merged.pop(name), tensor, atol=1e-6 if dtype is torch.float32 else 0.02, rtol=0.01)
        changed += not torch.equal(tensor, before[_base_name(name, before)])
    assert changed == 6  # q_proj and down_proj of two layers, the embedding, the trained head
    assert [name for name in merged if name is not None] == []


def _base_name(name: str, names: dict[str, torch.Tensor]) -> str:
    stem, _, leaf = name.rpartition(".")
    candidates = (f"{stem}.{leaf}", f"{stem}.base_layer.{leaf}", f"{stem}.original_module.{leaf}")
    return next(f"base_model.model.{c}" for c in candidates if f"base_model.model.{c}" in names)


def test_two_active_adapters_are_summed_and_a_disabled_model_is_its_base():
    model = _peft(LoraConfig(**LORA))
    model.add_adapter("second", LoraConfig(**LORA))
    model.base_model.set_adapter(["default", "second"])  # pyright: ignore[reportCallIssue]
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert isinstance(layer, Linear)
    nn.init.normal_(layer.get_parameter("lora_B.second.weight"), std=0.3)
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    base = layer.get_parameter("base_layer.weight")
    expected = base + layer.get_delta_weight("default") + layer.get_delta_weight("second")
    torch.testing.assert_close(dict(merged_tensors(model))[name], expected.detach(), atol=1e-6, rtol=0)
    with model.disable_adapter():
        assert torch.equal(dict(merged_tensors(model))[name], base)


def test_an_already_merged_model_is_not_merged_twice():  # case WS-11
    model = _peft(LoraConfig(**LORA))
    once = {name: tensor.clone() for name, tensor in merged_tensors(model)}
    model.merge_adapter()
    for name, tensor in merged_tensors(model):
        torch.testing.assert_close(tensor, once[name], atol=1e-6, rtol=0)


def test_merging_makes_one_tensor_at_a_time():
    model = _peft(LoraConfig(**LORA))
    base = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    fresh = [name for name, tensor in merged_tensors(model) if tensor.data_ptr() != base[name]]
    assert len(fresh) == 5
    assert all(name.endswith("base_layer.weight") for name in fresh)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(**LORA, use_dora=True), "DoRA"),
        (LoraConfig(target_modules=["q_proj"], lora_bias=True), "LoRA bias"),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "ia3_l"),
    ],
)
def test_adapters_that_cannot_be_merged_here_raise(config: LoraConfig, message: str):
    model = _peft(config)
    with pytest.raises(AdapterTensorError, match=message):
        list(merged_tensors(model))
