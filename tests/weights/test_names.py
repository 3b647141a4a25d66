"""The name map against the real wrappers: DDP, FSDP, torch.compile, gradient checkpointing, PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rollout.errors import AdapterTensorError, UnknownTensorError
from rollout.weights.names import canonical_name, canonical_names


def _llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


NAMES = tuple(_llama().state_dict())


@pytest.fixture
def process_group(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    return model


def test_a_drafter_may_be_wrapped_by_itself_or_with_what_holds_it():
    for wrapped in ("drafter.{}", "drafter.module.{}", "module.drafter._orig_mod.module.{}"):
        assert canonical_name(wrapped.format("model.norm.weight")) == "drafter.model.norm.weight"
    assert canonical_name("drafter.0.0.linear.weight") == "drafter.0.0.linear.weight"


def test_plain_names_stay_as_they_are():
    assert canonical_names(NAMES) == {name: name for name in NAMES}


def _raw_names(model: nn.Module) -> list[str]:
    """Every parameter by the path of modules to it; state dicts of checkpoint wrappers hide theirs."""
    return [
        f"{path}.{name}" for path, module in model.named_modules() for name, _ in module.named_parameters(recurse=False)
    ]


def test_compiled_checkpointed_and_ddp_names_map_back(process_group: None):  # case WS-08
    wrapped = DistributedDataParallel(torch.compile(_checkpointed(_llama())))
    names = _raw_names(wrapped)
    assert all(name.startswith("module._orig_mod.") for name in names)
    assert sum("._checkpoint_wrapped_module." in name for name in names) == 18
    assert sorted(canonical_names(names).values()) == sorted(NAMES)
    assert tuple(canonical_names(wrapped.state_dict()).values()) == NAMES


def test_wrapped_inside_and_outside_named_parameters_map_back(process_group: None):  # case WS-08
    model = _checkpointed(_llama())
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[0] = cast(nn.Module, torch.compile(layers[0]))
    wrapped = torch.compile(DistributedDataParallel(model))
    names = [name for name, _ in wrapped.named_parameters()]
    assert sum("_orig_mod" in name.split(".")[1:] for name in names) == 9
    assert sorted(canonical_names(names).values()) == sorted(NAMES)


def test_peft_names_map_back_and_the_copies_put_aside_are_left_out():  # case WS-08
    model = get_peft_model(_llama(), LoraConfig(target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]))
    names = [name for name in model.state_dict() if "lora_" not in name]
    assert any(".base_layer." in name for name in names)
    assert canonical_name("base_model.model.lm_head.original_module.weight") is None
    assert "base_model.model.lm_head.modules_to_save.default.weight" in names
    mapped = canonical_names(names)
    assert sorted(mapped.values()) == sorted(NAMES)
    assert "base_model.model.lm_head.original_module.weight" in set(names) - set(mapped)


def test_compiled_peft_under_ddp_maps_back(process_group: None):  # case WS-08
    model = get_peft_model(_checkpointed(_llama()), LoraConfig(target_modules="all-linear", modules_to_save=["norm"]))
    wrapped = DistributedDataParallel(torch.compile(model))
    names = [name for name in wrapped.state_dict() if "lora_" not in name]
    assert sorted(canonical_names(names).values()) == sorted(NAMES)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules=["q_proj"], use_dora=True),
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    ],
)
def test_keys_of_real_adapters_raise(config: LoraConfig):  # case WS-08
    model = get_peft_model(_llama(), config)
    base = set(NAMES)
    for name in model.state_dict():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if plain not in base:
            with pytest.raises(AdapterTensorError, match="is a key of an adapter"):
                canonical_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight",
        "model.layers.1.mlp.up_proj.oft_R.default.weight",
        "model.embed_tokens.lora_embedding_A.default",
        "model.embed_tokens.token_adapter.trainable_tokens_delta.default",
    ],
)
def test_adapter_keys_raise_and_name_the_key(name: str):
    with pytest.raises(AdapterTensorError, match=name.replace(".", r"\.")):
        canonical_name(name)


def test_flattened_fsdp_parameters_say_how_to_gather_them():
    with pytest.raises(UnknownTensorError, match="summon_full_params"):
        canonical_name("_fsdp_wrapped_module.model.layers.0._flat_param")


def test_computed_buffers_of_old_checkpoints_are_left_out():
    assert canonical_name("model.layers.3.self_attn.rotary_emb.inv_freq") is None


def test_names_that_only_look_like_wrappers_are_kept():
    assert canonical_name("model.module.weight") == "model.module.weight"
    assert canonical_name("model.base_model.model.weight") == "model.base_model.model.weight"
    assert canonical_name("my_base_layer.weight") == "my_base_layer.weight"
    assert canonical_name("flora_proj.weight") == "flora_proj.weight"


_OUTSIDE = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.")
_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "modules_to_save.default")


@given(
    name=st.sampled_from(NAMES),
    outside=st.lists(st.sampled_from(_OUTSIDE), max_size=5),
    inside=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(_INSIDE)), max_size=5),
)
def test_any_combination_and_repetition_of_wrappers_maps_back(
    name: str, outside: list[str], inside: list[tuple[int, str]]
):
    segments = name.split(".")
    for place, wrapper in inside:
        segments.insert(min(place, len(name.split(".")) - 1), wrapper)
    assert canonical_name("".join(outside) + ".".join(segments)) == name
