"""A module of the engine's own kind with weights of its own, for a trainer that learns while the engine samples."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout.models.causal_lm import CausalLM
from rollout.models.loader import build_model, load_weights, materialize, read_config, resolve_dtype


def load_own_model(folder: Path, dtype: str, device: torch.device) -> CausalLM:
    """The model in `folder`, in memory that no engine reads. It runs on the sampler's kernels, so that with equal
    weights its logprobs are the sampler's, bit for bit.

    `dtype` is "auto" (the checkpoint's), "bfloat16" or "float32". Raises `ValueError` as loading an engine does.
    """
    config = read_config(folder)
    model = build_model(config, resolve_dtype(dtype, config))
    materialize(model, lambda shape, kind: torch.zeros(shape, dtype=kind, device=device), device)
    load_weights(model, folder)
    return model
