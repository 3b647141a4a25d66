"""The policy that a recipe asks for."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rollout import LLM
from rollout.models.loader import read_config, resolve_dtype
from rollout.models.pretrained import resolve_model
from rollout.platform.platform import platform_for
from rollout_trainers.config import RunConfig
from rollout_trainers.lora import add_adapter, hand_over
from rollout_trainers.own_model import load_own_model
from rollout_trainers.policy import Policy, SharedPolicy
from rollout_trainers.producer import derive_seed
from rollout_trainers.transformers_policy import TransformersPolicy

_DROPOUT = ("dropout", "drop", "pdrop", "dropout_prob", "dropout_rate", "dropout_p", "layerdrop")  # how fields end


def make_policy(config: RunConfig, engine: LLM) -> Policy:
    """The policy of `config`, which begins with the weights that `engine` has.

    Raises `ValueError` for what cannot be trained so: an architecture, a device, module names.
    """
    section, temperature, keeps = config.policy, config.sampling.temperature, config.loss.uses_kl
    device = platform_for(engine.config.device).device
    if section.offload and device.type == "cpu":
        raise ValueError("policy.offload=True is not valid: the engine runs on the CPU, whose memory is the host's")
    if section.kind == "shared":
        ahead = config.asynchrony.samples_ahead  # the engine samples while the weights change: it has its own
        model = load_own_model(resolve_model(config.model), engine.config.dtype, device) if ahead else None
        return SharedPolicy(model or engine.shared_model(), temperature, keeps, section.gradient_checkpointing)
    dtype = engine.config.dtype if section.model_dtype == "auto" else section.model_dtype
    model = load_causal_lm(resolve_model(config.model), dtype, device)
    if not section.uses_lora:
        return TransformersPolicy(model, temperature, keeps, section.gradient_checkpointing)
    adapted = add_adapter(model, section.lora, derive_seed(config.seed, "lora"))
    sends_adapter = section.sent_adapter is not None
    if sends_adapter:
        hand_over(engine, adapted)
    return TransformersPolicy(adapted, temperature, keeps, section.gradient_checkpointing, sends_adapter)


def load_causal_lm(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """The causal language model in `folder`, by transformers, in `dtype` ("auto": the checkpoint's) and without
    dropout: what is learned from was sampled without any."""
    model_config = read_config(folder)
    _remove_dropout(model_config)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=model_config, dtype=resolve_dtype(dtype, model_config), local_files_only=True
    )
    return model.to(device)  # type: ignore[arg-type]  # its decorator hides that this is a method


def _remove_dropout(model_config: PretrainedConfig) -> None:
    for name, value in vars(model_config).items():
        if isinstance(value, PretrainedConfig):
            _remove_dropout(value)
        elif isinstance(value, float) and name.endswith(_DROPOUT):
            setattr(model_config, name, 0.0)
