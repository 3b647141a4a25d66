"""Heads to begin with for a target, and folders of them that an engine loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from rollout.models.causal_lm import CausalLM
from rollout.models.loader import materialize, read_config
from rollout.speculation.checkpoint import load_drafter, read_drafter_config, resolve_drafter
from rollout.speculation.eagle import EagleConfig, EagleModel, layer_of_folder, read_eagle
from rollout.speculation.medusa import MedusaConfig, MedusaHeads, read_medusa
from rollout_trainers.checks import check_integer
from rollout_trainers.drafter import check_target

_FILE = "model.safetensors"
Module = TypeVar("Module", bound=nn.Module)


def fresh_medusa(target: CausalLM, num_heads: int = 3, num_layers: int = 1) -> MedusaHeads:
    """Heads that say what the target has said one place before: all zeros (Cai et al., 2024, begin so too). They use
    the target's output matrix. Raises `ValueError` for fewer than one head or layer."""
    check_target(target)
    check_integer("medusa", "num_heads", num_heads, 1)
    check_integer("medusa", "num_layers", num_layers, 1)
    vocab_size, hidden_size = target.output_weight.shape
    config = MedusaConfig(num_heads, num_layers, hidden_size, vocab_size, has_own_output=False)
    return _made(lambda dtype: MedusaHeads(config, dtype), target)


def fresh_eagle(target: CausalLM, folder: Path | str, seed: int = 0) -> EagleModel:
    """A layer of the size of one of the target's, whose checkpoint is in `folder`. Random weights; what the layer adds
    to `fc` begins small, and `fc` begins by passing the feature on. Raises `ValueError` for a folder without a
    configuration, or with that of another model."""
    check_target(target)
    check_integer("eagle", "seed", seed, 0)
    layer = replace(layer_of_folder(Path(folder).expanduser()), num_hidden_layers=1)
    if (layer.vocab_size, layer.hidden_size) != tuple(target.output_weight.shape):
        raise ValueError(
            f"folder={str(folder)!r} is not the target's: vocab_size={layer.vocab_size} and "
            f"hidden_size={layer.hidden_size}, and the target has {list(target.output_weight.shape)}"
        )
    eagle = _made(lambda dtype: EagleModel(EagleConfig(layer, has_bias=False), dtype), target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in eagle.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5 / 2)
        hidden = layer.hidden_size
        eagle.fc.weight[:, hidden:] += torch.eye(hidden, dtype=eagle.fc.weight.dtype)
    return eagle


def load_heads(folder: Path | str, target: CausalLM) -> MedusaHeads | EagleModel:
    """The heads in a folder, to be trained further. Raises `ValueError` where there are none, or not the target's."""
    check_target(target)
    folder = resolve_drafter(str(folder))
    if "medusa_num_heads" in read_drafter_config(folder):
        medusa, tensors = read_medusa(folder, target)
        module = _made(lambda dtype: MedusaHeads(medusa, dtype), target)
    else:
        eagle, tensors = read_eagle(folder, target)
        module = _made(lambda dtype: EagleModel(eagle, dtype), target)
    load_drafter(module, tensors, folder)
    return module


def save_heads(module: MedusaHeads | EagleModel, folder: Path | str, target_folder: Path | str) -> None:
    """Writes a folder that `speculative_config={"method": ..., "model": folder}` takes; `target_folder` is the
    target's, whose configuration EAGLE's layer shares. Raises `ValueError` for another module, or folder."""
    folder, target_folder = Path(folder).expanduser(), Path(target_folder).expanduser()
    if isinstance(module, MedusaHeads):
        config = module.config
        fields = {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "base_model_name_or_path": str(target_folder),
        }
    elif isinstance(module, EagleModel):
        fields = read_config(target_folder).to_dict()
        fields |= {"num_hidden_layers": 1, "bias": module.config.has_bias, "architectures": ["LlamaForCausalLM"]}
    else:
        raise ValueError(f"{type(module).__name__} is no drafter that can be saved: MedusaHeads and EagleModel are")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: parameter.detach().contiguous().clone() for name, parameter in module.named_parameters()}
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def _made(make: Callable[[torch.dtype], Module], target: CausalLM) -> Module:
    """The module in memory of its own, all zeros, in the target's dtype and on its device."""
    weight = target.output_weight
    with torch.device("meta"):
        module = make(weight.dtype)
    materialize(module, lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=weight.device), weight.device)
    return module
