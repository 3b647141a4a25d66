"""From a folder on disk to a model in memory: finds the shards, maps the names, checks that nothing is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from rollout.layers.linear import Allocate, MergedLinear
from rollout.layers.rotary import RotaryEmbedding
from rollout.models.causal_lm import CausalLM
from rollout.models.registry import ModelRegistry
from rollout.weights.names import canonical_name

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ALIGNMENT = 64  # bytes; a cache line, and a vector register


def read_config(folder: Path) -> PretrainedConfig:
    """The model's config. Raises `ValueError` naming the folder where it holds none that can be read."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"model={str(folder)!r} is not valid: there is no config.json in it")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(f"model={str(folder)!r} is not valid: its config.json cannot be read: {error}") from error


def resolve_dtype(requested: str, config: PretrainedConfig) -> torch.dtype:
    """ "auto" is the checkpoint's own dtype where that is bfloat16 or float32, else bfloat16 (float16 checkpoints)."""
    if requested != "auto":
        return _DTYPES[requested]
    stored = config.dtype if config.dtype is not None else torch.float32
    name = str(stored).removeprefix("torch.")
    return torch.float32 if name == "float32" else torch.bfloat16


def build_model(config: PretrainedConfig, dtype: torch.dtype) -> CausalLM:
    """The module on the meta device: names and shapes, no memory. `materialize` gives it storage."""
    model_class = ModelRegistry.resolve(config)
    with torch.device("meta"):
        return model_class.from_pretrained_config(config, dtype)


def num_parameter_bytes(model: nn.Module) -> int:
    """Storage that `materialize` will ask for, each tensor rounded up to the alignment."""
    sizes = (parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return sum((size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT for size in sizes)


def materialize(model: nn.Module, allocate: Allocate, device: torch.device) -> None:
    """Gives every parameter storage from `allocate`, fused where layers want it so, and computes the buffers."""
    for module in model.modules():
        if isinstance(module, MergedLinear):
            module.materialize(allocate)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                storage = allocate(tuple(parameter.shape), parameter.dtype)
                module.register_parameter(name, nn.Parameter(storage, requires_grad=False))
        if isinstance(module, RotaryEmbedding):
            module.materialize(device)


def iterate_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, one at a time: safetensors, single or sharded, else PyTorch `.bin` shards.

    Raises `ValueError` where there is no checkpoint, or an index names a shard that is missing.
    """
    shards = _find_shards(folder)
    for shard in shards:
        yield from read_tensors(shard)


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a file, safetensors or PyTorch's. Raises `ValueError` naming a file that cannot be read, or that
    holds anything else than tensors by name."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # not a dict
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is no whole file of safetensors: {error}") from error
        return
    try:
        held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{str(path)!r} cannot be read as a PyTorch file of tensors: {reason}") from error
    if not isinstance(held, Mapping):
        raise ValueError(f"{str(path)!r} holds a {type(held).__name__}, not tensors by name")
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{str(path)!r} holds a {type(tensor).__name__} by the name {name!r}, not a tensor")
        yield name, tensor


def _find_shards(folder: Path) -> list[Path]:
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = folder / f"{stem}{suffix}.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise ValueError(f"{index} names shards that are not there: {', '.join(missing)}")
            return [folder / name for name in names]
        if (folder / f"{stem}{suffix}").is_file():
            return [folder / f"{stem}{suffix}"]
    raise ValueError(
        f"model={str(folder)!r} is not valid: no model.safetensors or pytorch_model.bin, single or sharded"
    )


def load_weights(model: CausalLM, folder: Path, on_tensor: Callable[[str], None] | None = None) -> None:
    """Copies a checkpoint into a materialised model, casting to its dtype.

    Raises `ValueError` for an unknown name, a wrong shape, a tied head that differs from its embedding, and for
    parameters that the checkpoint does not cover.
    """
    parameters = dict(model.named_parameters())
    tied = model.tied_names
    loaded: set[str] = set()
    tied_copies: list[tuple[str, torch.Tensor]] = []
    for raw_name, tensor in iterate_checkpoint(folder):
        name = canonical_name(raw_name)
        if name is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(
                f"checkpoint tensor {raw_name!r} is {tensor.dtype}: quantised checkpoints are not supported yet"
            )
        if name in loaded:
            raise ValueError(f"checkpoint tensor {raw_name!r} is there twice, the second time for {name!r}")
        if name in tied:
            tied_copies.append((name, tensor))
            continue
        if name not in parameters:
            raise ValueError(f"checkpoint tensor {raw_name!r} has no place in {type(model).__name__}")
        parameter = parameters[name]
        if parameter.shape != tensor.shape:
            raise ValueError(
                f"checkpoint tensor {raw_name!r} has shape {tuple(tensor.shape)}, "
                f"the model needs {tuple(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(tensor)
        loaded.add(name)
        if on_tensor is not None:
            on_tensor(name)
    missing = sorted(set(parameters) - loaded)
    if missing:
        raise ValueError(f"the checkpoint in {str(folder)!r} lacks {len(missing)} tensors: {', '.join(missing[:8])}")
    for name, tensor in tied_copies:
        target = parameters[tied[name]]
        if target.shape != tensor.shape or not torch.equal(target, tensor.to(target.dtype)):
            raise ValueError(f"the config ties {name!r} to {tied[name]!r}, but the checkpoint holds different values")
