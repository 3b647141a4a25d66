"""PEFT models with strong random LoRA adapters over a tiny checkpoint: what the engine is held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rollout import LoRARequest

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_model(folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, **config: Any) -> PeftModel:
    """The checkpoint in `folder` with an adapter of rank 4 on every linear layer, unless `config` says otherwise."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    options = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, **config}
    model = get_peft_model(base, LoraConfig(**options)).eval()
    randomise(model, seed)
    return model


def randomise(model: torch.nn.Module, seed: int) -> None:
    """New values for every tensor of every adapter, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def config_of(model: PeftModel) -> LoraConfig:
    """The configuration of the adapter that `peft_model` gave the model."""
    config = model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    return config


def saved(model: PeftModel, folder: Path, name: str, number: int) -> LoRARequest:
    """The adapter as a folder that PEFT has written, and the request that names it."""
    model.save_pretrained(str(folder / name))
    return LoRARequest(name, number, str(folder / name))
