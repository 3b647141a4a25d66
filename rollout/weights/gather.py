"""Whole tensors out of the shards that FSDP2 and ZeRO-3 leave on each rank, for a few parameters at a time.

    with gathered(parameters) as whole:       every rank together
        whole(parameters[0])                  the tensor as it was before sharding; valid inside the block

FSDP2 parameters (DTensors) that are cut along dimension 0 over the same ranks come in one all-gather where they are
small. Parameters of ZeRO-3 come through DeepSpeed's `GatheredParameters`. A parameter that is whole already is returned
as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rollout.errors import TensorKindError

SMALL_BYTES = 2 << 20  # a larger parameter gains nothing from company, in which it has to be copied out of the buffer


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether this rank holds only a part of the parameter, or a placeholder for it."""
    return isinstance(parameter, DTensor) or _is_zero3(parameter)


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape that `whole(parameter)` will have."""
    return torch.Size(parameter.ds_shape) if _is_zero3(parameter) else parameter.shape  # pyright: ignore[reportAttributeAccessIssue]


def gathered_bytes(parameter: torch.Tensor) -> int:
    """The memory that gathering the parameter takes: nothing where it is whole already."""
    return whole_shape(parameter).numel() * parameter.element_size() if is_sharded(parameter) else 0


def check_gatherable(name: str, parameter: torch.Tensor) -> None:
    """Raises `TensorKindError` for what cannot be gathered to a plain floating-point tensor."""
    local = parameter
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        if any(placement.is_partial() for placement in parameter.placements):
            raise TensorKindError(f"{name!r} is a DTensor with unreduced parts (placements {parameter.placements})")
    if is_traceable_wrapper_subclass(local):
        raise TensorKindError(f"{name!r} is a {type(local).__name__}: plain weights are needed, dequantise it first")
    if not parameter.is_floating_point():
        raise TensorKindError(
            f"{name!r} is {parameter.dtype}: a quantised base is not supported, load it in bfloat16 or float32"
        )
    if parameter.is_meta or local.is_meta:
        raise TensorKindError(f"{name!r} has no memory (device meta): it is offloaded by hooks, or not yet initialised")


def reshard(model: nn.Module) -> None:
    """Drops what FSDP2 keeps unsharded after a forward pass: it may be older than the shards, and less precise."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered(parameters: Sequence[torch.Tensor]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Gathers `parameters` and yields the function that gives the whole tensor of each of them.

    Collective: every rank that holds shards calls it with the same parameters in the same order.
    """
    distinct = list({id(parameter): parameter for parameter in parameters}.values())
    buckets: dict[int, _Bucket] = {}
    for shards in _together(distinct):
        bucket = _Bucket(shards)
        buckets.update((id(shard), bucket) for shard in shards)

    def whole(parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) in buckets:
            assert isinstance(parameter, DTensor)
            return buckets[id(parameter)].whole(parameter)
        if isinstance(parameter, DTensor):  # tensor parallel, hybrid sharding, ...: a collective of its own
            return _detached(parameter, parameter.device_mesh.device_type).full_tensor()
        return parameter.detach()

    with _zero3(distinct):
        yield whole


class _Bucket:
    """One all-gather for parameters cut along dimension 0 over the same ranks, as `torch.chunk` cuts.

    Each rank's row of the buffer holds its shard of every parameter in turn. Shards at the end may be short or empty:
    they are padded, and the padding falls behind the last row of the whole tensor.
    """

    def __init__(self, shards: Sequence[DTensor]) -> None:
        mesh = shards[0].device_mesh
        self._num_ranks = mesh.size()
        self._places: dict[int, tuple[int, int]] = {}  # id of the parameter -> where its shard begins, rows of a shard
        size = 0
        for shard in shards:
            rows = -(-shard.shape[0] // self._num_ranks)
            self._places[id(shard)] = (size, rows)
            size += rows * _row_elements(shard)
        self._buffer = torch.empty(self._num_ranks, size, dtype=shards[0].dtype, device=mesh.device_type)
        own = self._buffer[mesh.get_local_rank()]
        for shard in shards:
            local = _detached(shard).to_local()
            begin = self._places[id(shard)][0]
            own[begin : begin + local.numel()].view(local.shape).copy_(local)
        _all_gather(self._buffer.view(-1), own, mesh.get_group())

    def whole(self, shard: DTensor) -> torch.Tensor:
        """A view of the buffer where the parameter is alone in it, else a copy."""
        begin, rows = self._places[id(shard)]
        parts = self._buffer[:, begin : begin + rows * _row_elements(shard)]  # [ranks, elements of a shard]
        return parts.reshape(self._num_ranks * rows, *shard.shape[1:])[: shard.shape[0]]


def _together(parameters: Sequence[torch.Tensor]) -> list[list[DTensor]]:
    """The DTensors that share an all-gather, in the order given: small ones of the same ranks and dtype."""
    together: dict[object, list[DTensor]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.placements == (Shard(0),):
            is_small = gathered_bytes(parameter) <= SMALL_BYTES
            key = (parameter.device_mesh, parameter.dtype) if is_small else id(parameter)
            together.setdefault(key, []).append(parameter)
    return list(together.values())


def _detached(parameter: DTensor, device_type: str | None = None) -> DTensor:
    """Without gradients, on another kind of device where the shards are offloaded."""
    detached = parameter.detach() if device_type is None else parameter.detach().to(device_type)
    assert isinstance(detached, DTensor)
    return detached


def _row_elements(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel()


def _all_gather(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """`own` is this rank's part of `output`, in place."""
    try:
        from torch.distributed import all_gather_single
    except ImportError:  # its name before torch 2.13
        from torch.distributed import all_gather_into_tensor as all_gather_single
    all_gather_single(output, own, group=group)


def _is_zero3(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "ds_id")  # by which DeepSpeed itself knows its own


def _zero3(parameters: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """Gathers those parameters of ZeRO-3 that are not whole at the moment, and frees them again."""
    partitioned = [parameter for parameter in parameters if _is_zero3(parameter)]
    if not partitioned:
        return nullcontext()
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    absent = [p for p in partitioned if p.ds_status is not ZeroParamStatus.AVAILABLE]  # pyright: ignore[reportAttributeAccessIssue]
    return deepspeed.zero.GatheredParameters(absent) if absent else nullcontext()
