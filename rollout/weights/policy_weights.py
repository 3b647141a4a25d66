"""Which of a trainer's parameters make up each weight of the policy, whatever the model is wrapped in.

    model.layers.0.mlp.up_proj.weight       one parameter
    model.layers.0.self_attn.q_proj.weight  under LoRA: base + scaling * B @ A for every active adapter
    lm_head.weight                          under `modules_to_save`: the active adapter's copy

Nothing here looks at the parameters' values, so that shards and placeholders are as good as tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from rollout.errors import AdapterTensorError, DuplicateTensorError, TensorKindError
from rollout.weights.gather import check_gatherable, is_sharded, whole_shape
from rollout.weights.names import canonical_name

if TYPE_CHECKING:
    from peft.tuners.lora import Embedding, Linear

    LoraLayer = Embedding | Linear

Whole = Callable[[torch.Tensor], torch.Tensor]  # from a parameter, perhaps a shard, to the whole tensor


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What one LoRA adapter adds: `scaling * up @ down`, transposed where the layer keeps its weight transposed."""

    up: torch.Tensor  # [out, rank]
    down: torch.Tensor  # [rank, in]
    scaling: float
    transposed: bool

    def add_to(self, merged: torch.Tensor, whole: Whole) -> None:
        """Adds to `merged` (float32, [out, in] or [in, out]) in place."""
        up, down = whole(self.up).float(), whole(self.down).float()
        (merged.T if self.transposed else merged).addmm_(up, down, alpha=self.scaling)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One weight under its Hugging Face name: a parameter of the trainer, and what adapters add to it."""

    name: str
    parameter: torch.Tensor
    deltas: tuple[Delta, ...] = ()

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Every parameter that is needed for the value."""
        return (self.parameter, *(factor for delta in self.deltas for factor in (delta.up, delta.down)))

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole weight."""
        return whole_shape(self.parameter)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have to gather something for it."""
        return any(is_sharded(parameter) for parameter in self.parameters)

    @torch.no_grad()
    def value(self, whole: Whole) -> torch.Tensor:
        """The weight in the parameter's dtype. A merged one is summed in float32 and rounded once, in new memory."""
        base = whole(self.parameter)
        if not self.deltas:
            return base
        merged = base.to(torch.float32, copy=True)
        for delta in self.deltas:
            delta.add_to(merged, whole)
        return merged.to(base.dtype)


def policy_weights(model: nn.Module) -> list[Weight]:
    """Every weight of the policy that `model` trains, in the model's order; parameters that are tied come once.

    Raises `AdapterTensorError` for adapters that are not plain LoRA on linear or embedding layers, `TensorKindError`
    for what is no plain floating-point weight and for wrappers that are not supported, `DuplicateTensorError` where two
    parameters have the same name.
    """
    _check_wrappers(model)
    layers, saved = _lora_layers(model), _unused_copies(model)
    bases = {f"{path}.base_layer.weight": layer for path, layer in layers.items()}
    weights: dict[str, Weight] = {}
    plain: set[int] = set()  # parameters that were taken as they are: tied names of theirs say nothing new
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = _live_name(path, layers, saved)
        if name is None:
            continue
        check_gatherable(path, parameter)
        deltas = _deltas(path, bases[path]) if path in bases else ()
        if name in weights and weights[name].parameter is not parameter:
            raise DuplicateTensorError(f"model holds two parameters that are both {name}; one of them is {path!r}")
        if name in weights or (not deltas and id(parameter) in plain):
            continue
        if not deltas:
            plain.add(id(parameter))
        weights[name] = Weight(name, parameter, deltas)
    if not weights:
        raise ValueError(f"model is not valid: {type(model).__name__} has no parameters")
    return list(weights.values())


def _check_wrappers(model: nn.Module) -> None:
    """Raises for wrappers whose parameters cannot be read one by one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise TensorKindError(
                "model holds FullyShardedDataParallel (FSDP1), which flattens its parameters: use fully_shard (FSDP2), "
                "or send model.named_parameters() inside FullyShardedDataParallel.summon_full_params(model)"
            )
    if "deepspeed" in sys.modules:  # a model cannot be DeepSpeed's otherwise, and importing it is slow
        from deepspeed.runtime.pipe.module import PipelineModule

        if any(isinstance(module, PipelineModule) for module in model.modules()):
            raise TensorKindError("model holds a DeepSpeed PipelineModule, of which each rank has other layers")


def _live_name(path: str, layers: Mapping[str, nn.Module], saved: tuple[str, ...]) -> str | None:
    """The Hugging Face name, or None for what is merged into other weights or is not in use."""
    if path.startswith(saved):
        return None
    try:
        return canonical_name(path.replace(".original_module.", "."))
    except AdapterTensorError as error:
        if any(path.startswith(f"{layer}.lora_") for layer in layers):
            return None
        raise AdapterTensorError(
            f"{path!r} belongs to an adapter that is not merged on the way (trainable tokens, IA3, VeRA, ...; LoRA of "
            "linear and embedding layers is): send copy.deepcopy(model).merge_and_unload(), or train without it"
        ) from error


def _lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Path -> layer that LoRA wraps and that can be merged here."""
    if "peft" not in sys.modules:  # peft is optional, and no model is PEFT's before somebody imports it
        return {}
    from peft.tuners.lora import Embedding, Linear

    return {path: module for path, module in model.named_modules() if isinstance(module, (Embedding, Linear))}


def _unused_copies(model: nn.Module) -> tuple[str, ...]:
    """Beginnings of the paths of `modules_to_save` copies that the forward pass does not use at present."""
    if "peft" not in sys.modules:
        return ()
    from peft.utils.other import ModulesToSaveWrapper

    return tuple(
        unused
        for path, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
        for unused in _unused_in(path, module.disable_adapters, module.active_adapters, list(module.modules_to_save))
    )


def _unused_in(path: str, disabled: bool, active: list[str], copies: list[str]) -> Iterator[str]:
    used = active[0] if active and active[0] in copies and not disabled else None
    if used is not None:
        yield f"{path}.original_module."
    yield from (f"{path}.modules_to_save.{copy}." for copy in copies if copy != used)


def _deltas(path: str, layer: LoraLayer) -> tuple[Delta, ...]:
    """What the active adapters add to the layer's base weight; nothing where they are merged already or disabled."""
    if layer.merged or layer.disable_adapters:
        return ()
    adapters = [adapter for adapter in layer.active_adapters if adapter in layer.scaling]
    if any(adapter in layer.lora_variant or layer.lora_bias.get(adapter) for adapter in adapters):
        raise AdapterTensorError(
            f"{path!r} has a LoRA bias or a variant (DoRA, ...): merge a copy with peft's merge_and_unload() first"
        )
    return tuple(_delta(layer, adapter) for adapter in adapters)


def _delta(layer: LoraLayer, adapter: str) -> Delta:
    if adapter in layer.lora_embedding_A:
        up, down, transposed = layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter], True
    else:
        up, down, transposed = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight, bool(layer.fan_in_fan_out)
    assert isinstance(up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    return Delta(up, down, float(layer.scaling[adapter]), transposed)
