"""Tensors from a trainer in this process, by reference, and the merged weights of PEFT models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

import torch

from rollout.errors import AdapterTensorError, TensorKindError
from rollout.weights.names import canonical_name
from rollout.weights.transport import Transport

if TYPE_CHECKING:
    from peft.tuners.lora import Embedding, Linear


class InProcess(Transport):
    """By reference: a module's parameters, a state dict, or pairs. Shared memory is not copied, the rest is once."""

    def __init__(
        self, policy: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        self._policy = policy

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(self._policy, torch.nn.Module):
            return self._policy.named_parameters()
        pairs = self._policy.items() if isinstance(self._policy, Mapping) else self._policy
        return iter(cast(Iterable[tuple[str, torch.Tensor]], pairs))


def merged_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a PEFT model with its active LoRA adapters merged in, one tensor at a time.

    Each sum is made in float32 in new memory and rounded once to the base's dtype; the trainer's own tensors are never
    touched, so nothing has to be unmerged and the base does not drift. Trained `modules_to_save` come along. Raises
    `AdapterTensorError` for adapters that are not plain LoRA on linear or embedding layers.
    """
    from peft.tuners.lora import Embedding, Linear  # peft is optional

    layers = {path: module for path, module in model.named_modules() if isinstance(module, (Embedding, Linear))}
    weights = {f"{path}.base_layer.weight": module for path, module in layers.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights:
            yield name, _merged(name, weights[name], parameter)
        elif not _is_adapter_of(name, layers):
            yield name, parameter.detach()


def _is_adapter_of(name: str, layers: Mapping[str, torch.nn.Module]) -> bool:
    """Whether `name` is an adapter's key whose layer is merged anyway; any other adapter's key raises."""
    try:
        canonical_name(name)
    except AdapterTensorError:
        if any(name.startswith(f"{path}.lora_") for path in layers):
            return True
        raise
    return False


def _merged(name: str, layer: Embedding | Linear, base: torch.nn.Parameter) -> torch.Tensor:
    if layer.merged or layer.disable_adapters:
        return base.detach()
    if not base.is_floating_point():
        raise TensorKindError(f"{name!r} is {base.dtype}: LoRA over a quantised base cannot be merged here")
    adapters = [adapter for adapter in layer.active_adapters if adapter in layer.scaling]
    if any(adapter in layer.lora_variant or layer.lora_bias.get(adapter) for adapter in adapters):
        raise AdapterTensorError(
            f"{name!r} has a LoRA bias or a variant (DoRA, ...): merge a copy with peft's merge_and_unload() first"
        )
    with torch.no_grad():
        merged = base.detach().float()
        for adapter in adapters:
            merged = merged + layer.get_delta_weight(adapter).float()
        return merged.to(base.dtype)
