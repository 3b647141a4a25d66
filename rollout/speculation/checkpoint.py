"""Folders of drafters' weights: a `config.json` beside tensors, named as the published checkpoints have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout.models.loader import materialize, num_parameter_bytes, read_tensors
from rollout.speculation.model_drafter import DrafterHost

_FILES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
)


def read_drafter_config(folder: Path) -> dict[str, Any]:
    """The fields of `config.json`. Raises `ValueError` where there is none, or it cannot be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model={str(folder)!r} is not valid: there is no config.json in it")
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:  # neither JSON nor UTF-8
        raise ValueError(f"model={str(folder)!r} is not valid: its config.json is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"model={str(folder)!r} is not valid: its config.json is no object")
    return fields


def drafter_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the folder's one file of weights. Raises `ValueError` where there is none that can be read."""
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"model={str(folder)!r} is not valid: it holds none of {', '.join(_FILES)}")
    yield from read_tensors(path)


def resolve_drafter(model: str) -> Path:
    """The folder. Raises `ValueError` where it is none."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ValueError(f"model={model!r} is not valid: it must be the folder of the drafter's weights")
    return folder


def take_memory(module: nn.Module, host: DrafterHost) -> None:
    """Gives a drafter's module, which is on the meta device, memory of its own: owner "drafter" of the ledger."""
    slab = host.platform.memory("drafter", num_parameter_bytes(module))
    materialize(module, slab.carve, host.platform.device)
    host.ledger.register("drafter", slab)


@torch.no_grad()
def load_drafter(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    on_tensor: Callable[[str], None] | None = None,
) -> None:
    """Copies the tensors into the module's parameters, casting to their dtype.

    Raises `ValueError` naming the tensor that has no place, has another shape, holds integers, or is missing.
    """
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        if name not in parameters:
            raise ValueError(f"tensor {name!r} in {str(folder)!r} has no place in {type(module).__name__}")
        wanted = parameters[name].shape
        if tensor.shape != wanted:
            raise ValueError(
                f"tensor {name!r} in {str(folder)!r} has shape {tuple(tensor.shape)}, the model needs {tuple(wanted)}"
            )
        if not tensor.is_floating_point():
            raise ValueError(
                f"tensor {name!r} in {str(folder)!r} is {tensor.dtype}: quantised weights are not supported"
            )
        parameters[name].copy_(tensor)
        if on_tensor is not None:
            on_tensor(name)
    missing = sorted(parameters.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{str(folder)!r} lacks {len(missing)} tensors: {', '.join(missing[:8])}")
