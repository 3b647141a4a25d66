"""Reading adapters: every way gives the same tensors and scales, and what cannot be applied is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer, LoraModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from rollout.errors import AdapterTensorError, DuplicateTensorError, TensorKindError, TensorShapeError
from rollout.lora.adapter import Adapter, from_pairs, from_peft_model, read_folder
from tests.support.adapters import ALL_LINEAR, config_of, peft_model
from tests.support.tiny import make_tiny_llama

Q = "model.layers.0.self_attn.q_proj"
CONFIG = {"r": 2, "lora_alpha": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def halves(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    pairs = {f"{Q}.lora_A.weight": torch.ones(2, 64), f"{Q}.lora_B.weight": torch.ones(64, 2)}
    return pairs | {f"{Q}.{key.replace('__', '.')}": tensor for key, tensor in changes.items()}


def assert_same(one: Adapter, other: Adapter) -> None:
    assert one.modules.keys() == other.modules.keys()
    for name, part in one.modules.items():
        assert torch.equal(part.a, other.modules[name].a) and torch.equal(part.b, other.modules[name].b), name
        assert part.scale == other.modules[name].scale, name


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True, "r": 3, "target_modules": ["q_proj", "v_proj"]},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\..*down_proj": 6}, "alpha_pattern": {"self_attn.o_proj": 20}},
        {"layers_to_transform": [1]},
    ],
)
def test_model_folder_and_pairs_give_one_adapter_with_the_models_own_scales(
    config: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    # case WS-08
    model = peft_model(folder, 1, **config)
    model.save_pretrained(str(tmp_path))
    adapter = from_peft_model(model)
    assert_same(adapter, read_folder(tmp_path))
    assert_same(adapter, from_pairs(get_peft_model_state_dict(model), config_of(model)))
    named = [(f"module._orig_mod.{name}", tensor) for name, tensor in model.named_parameters() if ".lora_" in name]
    assert_same(adapter, from_pairs(named, config_of(model).to_dict()))
    assert_same(adapter, from_peft_model(nn.Sequential(model)))
    for name, part in adapter.modules.items():
        layer = model.base_model.get_submodule(f"model.{name}")
        assert isinstance(layer, LoraLayer) and part.scale == layer.scaling["default"]


def test_one_of_several_adapters_of_a_model_can_be_named(folder: Path) -> None:
    model = peft_model(folder, 1)
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=2, target_modules=["k_proj"]))
    assert {part.rank for part in from_peft_model(model).modules.values()} == {4}
    assert len(from_peft_model(model, "other").modules) == 2
    with pytest.raises(AdapterTensorError, match=r"adapter='x' is not valid: the model has \['default', 'other'\]"):
        from_peft_model(model, "x")
    assert isinstance(model.base_model, LoraModel)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(AdapterTensorError, match="2 adapters are active"):
        from_peft_model(model)
    with model.disable_adapter(), pytest.raises(AdapterTensorError, match="is switched off"):
        from_peft_model(model, "default")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"bias": "lora_only"}, "bias='lora_only' is not supported: it must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported: it changes the base weights"),
        ({"peft_type": "VERA"}, "peft_type='VERA' is not supported: it must be 'LORA'"),
        ({"r": None}, "r=None is not valid: the configuration needs a number"),
        ({"r": 0}, "rank 0: it must be at least 1"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices=\[3\] is not supported"),
    ],
)
def test_a_configuration_that_computes_something_else_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterTensorError, match=message):
        from_pairs(halves(), CONFIG | config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", "adapters of embeddings are not supported"),
        (f"{Q}.lora_magnitude_vector.default.weight", "DoRA is not supported"),
        (f"{Q}.lora_B.default.bias", "adapters with biases are not supported"),
        ("lm_head.modules_to_save.default.weight", "modules_to_save are whole weights"),
        (f"base_model.model.{Q}.base_layer.weight", "it is no LoRA weight; give the PEFT model itself"),
    ],
)
def test_keys_that_are_not_applied_are_refused_by_name(name: str, message: str) -> None:
    # case WS-08
    with pytest.raises(AdapterTensorError, match=message) as error:
        from_pairs({**halves(), name: torch.ones(2, 2)}, CONFIG)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ({f"{Q}.lora_A.weight": torch.ones(2, 64)}, AdapterTensorError, f"lora_B of {Q} is missing"),
        ({f"{Q}.lora_B.weight": torch.ones(64, 2)}, AdapterTensorError, f"lora_A of {Q} is missing"),
        ({}, AdapterTensorError, "the adapter has no tensors"),
        (halves(lora_A__weight=torch.ones(0)), TensorShapeError, r"lora_A of .* has shape \(0,\)"),
        (halves(lora_A__weight=torch.ones(3, 64)), TensorShapeError, r"\(3, 64\) and lora_B \(64, 2\)"),
        (halves(lora_A__weight=torch.ones(2, 64).int()), TensorKindError, "is torch.int32"),
        (halves(lora_A__weight=torch.ones(2, 64, device="meta")), TensorKindError, "has no dense storage"),
        (halves(lora_A__default__weight=torch.ones(2, 64)), DuplicateTensorError, "was given twice"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(
    pairs: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    # case WS-10
    with pytest.raises(error, match=message):
        from_pairs(pairs, CONFIG)


def test_a_rank_that_is_not_the_configurations_is_refused() -> None:
    with pytest.raises(TensorShapeError, match=r"has shape \(2, 64\), the configuration has rank 8"):
        from_pairs(halves(), {"r": 8, "lora_alpha": 8})


def test_a_folder_says_what_is_missing_or_broken(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora_path=.* there is no adapter_config.json in it"):
        read_folder(tmp_path / "nowhere")
    model = peft_model(folder, 1)
    model.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    file.unlink()
    with pytest.raises(ValueError, match=r"there is no adapter_model.safetensors in it"):
        read_folder(tmp_path)
    del tensors[next(name for name in tensors if "lora_B" in name)]
    save_file(tensors, file)
    with pytest.raises(AdapterTensorError, match="is missing: its lora_A came alone"):
        read_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config.json is no JSON"):
        read_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4}))
    with pytest.raises(AdapterTensorError, match="lora_alpha=None is not valid"):
        read_folder(tmp_path)


def test_models_without_plain_lora_are_refused(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(AdapterTensorError, match="LlamaForCausalLM holds no PEFT model"):
        from_peft_model(base)
    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with pytest.raises(AdapterTensorError, match="is IA3Config, not LoRA"):
        from_peft_model(get_peft_model(base, ia3))
    with pytest.raises(AdapterTensorError, match="embed_tokens is a Embedding layer of PEFT"):
        from_peft_model(peft_model(folder, 1, target_modules=[*ALL_LINEAR, "embed_tokens"]))
    with pytest.raises(AdapterTensorError, match="use_dora=True is not supported"):
        from_peft_model(peft_model(folder, 1, use_dora=True))
