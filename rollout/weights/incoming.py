"""One tensor on its way into the engine: which of the engine's tensors it is for, and whether it fits."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from rollout.errors import TensorKindError, TensorShapeError, UnknownTensorError
from rollout.weights.names import canonical_name

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_GATHER = "update.load(policy_tensors(model)) of rollout.weights.trainer_tensors does, on every rank together"


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A tensor that fits. `name` is its Hugging Face name, `target` the engine's tensor: another name where tied."""

    name: str
    target: str
    source: torch.Tensor
    destination: torch.Tensor

    @property
    def is_shared(self) -> bool:
        """The source is the engine's own memory."""
        return _same_memory(self.source, self.destination)

    def same_source(self, other: Incoming) -> bool:
        """Both come from one and the same memory."""
        return _same_memory(self.source, other.source)

    def cast(self) -> torch.Tensor:
        """The source in the engine's dtype and on its device; the source itself where it has them."""
        return self.source.detach().to(device=self.destination.device, dtype=self.destination.dtype)


def match(
    name: str,
    source: torch.Tensor,
    parameters: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    storages: frozenset[int],
) -> Incoming | None:
    """Finds the engine's tensor for `source` and checks that it fits; None for a tensor that is rightly left out.

    `storages` are the addresses of the engine's own storages. Raises `AdapterTensorError`, `UnknownTensorError`,
    `TensorKindError` or `TensorShapeError`, each naming the tensor.
    """
    canonical = canonical_name(name)
    if canonical is None:
        return None
    target = tied.get(canonical, canonical)
    if target not in parameters:
        raise UnknownTensorError(_unknown(name, canonical, [*parameters, *tied]))
    destination = parameters[target]
    check_kind(name, source)
    _check_shape(name, canonical, source.shape, destination.shape)
    item = Incoming(canonical, target, source, destination)
    if not item.is_shared and source.untyped_storage().data_ptr() in storages:
        raise TensorKindError(
            f"{name!r} lies in the engine's own memory, but it is not the engine's {target}: "
            "copying it could read what this update has already overwritten"
        )
    return item


def check_layout(
    shapes: Mapping[str, torch.Size], parameters: Mapping[str, torch.Tensor], tied: Mapping[str, str]
) -> None:
    """Checks names and shapes of tensors that are still to come. Raises `UnknownTensorError` or `TensorShapeError`."""
    for name, shape in shapes.items():
        target = tied.get(name, name)
        if target not in parameters:
            raise UnknownTensorError(_unknown(name, name, [*parameters, *tied]))
        _check_shape(name, name, shape, parameters[target].shape)


def _unknown(name: str, canonical: str, known: list[str]) -> str:
    shown = repr(name) if name == canonical else f"{name!r} (read as {canonical!r})"
    close = difflib.get_close_matches(canonical, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; the model has {len(known)} parameters, e.g. {known[:1]}"
    return f"{shown} is not a parameter of the engine's model{hint}"


def check_kind(name: str, source: object) -> None:
    """Raises `TensorKindError` unless `source` is a whole dense tensor of floating-point values."""
    if not isinstance(source, torch.Tensor):
        raise TensorKindError(f"{name!r} is a {type(source).__name__}, not a torch tensor")
    if isinstance(source, DTensor):
        raise TensorKindError(f"{name!r} is a DTensor, sharded over ranks: gather it first ({_GATHER})")
    if source.is_meta or source.layout is not torch.strided:
        raise TensorKindError(f"{name!r} has no dense storage (device {source.device}, layout {source.layout})")
    if source.dtype not in _DTYPES:
        raise TensorKindError(
            f"{name!r} is {source.dtype}: plain floating-point weights are needed, dequantise it first"
        )


def _check_shape(name: str, canonical: str, source: torch.Size, destination: torch.Size) -> None:
    if source == destination:
        return
    shown = repr(name) if name == canonical else f"{name!r} ({canonical})"
    hint = ""
    if source.numel() == 0:
        hint = f": an empty placeholder of a sharded parameter, gather it first ({_GATHER})"
    raise TensorShapeError(f"{shown} has shape {tuple(source)}, the engine's parameter has {tuple(destination)}{hint}")


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.device == other.device
        and one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
