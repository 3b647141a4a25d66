"""How the keys and values of one model lie in a pool of blocks, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import rollout_kernels
from rollout.worker.batch import KVCaches

Carve = Callable[[Sequence[int], torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """`kernels` is what the kernels call their layout. Keys and values that are `quantised` to a dtype have a scale for
    each token and head beside them."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    kernels: rollout_kernels.KVLayout
    quantised: torch.dtype | None = None

    def tensors(self, num_blocks: int) -> list[tuple[Sequence[int], torch.dtype]]:
        """Shapes and types of the fields of one layer's `KVCache`."""
        dtype = self.quantised or self.dtype
        keys, values = rollout_kernels.kv_cache_shapes(
            num_blocks, self.block_size, self.num_heads, self.head_dim, dtype, self.kernels
        )
        scales = rollout_kernels.kv_scale_shape(num_blocks, self.block_size, self.num_heads)
        return [(keys, dtype), (values, dtype), *([(scales, torch.float32)] * 2 if self.quantised is not None else [])]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""
        return self.num_layers * sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors(1))

    @property
    def padding(self) -> int:
        """Bytes of a pool that may be lost between the tensors of its layers."""
        return 64 * len(self.tensors(1)) * self.num_layers

    def pool_bytes(self, num_blocks: int) -> int:
        """Bytes of memory from which the caches of so many blocks can be carved."""
        return num_blocks * self.block_bytes + self.padding

    def caches(self, num_blocks: int, carve: Carve) -> KVCaches:
        """The caches of all layers, from memory that holds zeros."""
        tensors = self.tensors(num_blocks)
        return [
            rollout_kernels.KVCache(*(carve(shape, dtype) for shape, dtype in tensors)) for _ in range(self.num_layers)
        ]


def zeros_on(device: torch.device) -> Carve:
    """Tensors of their own, for pools that are used once."""
    return lambda shape, dtype: torch.zeros(tuple(shape), dtype=dtype, device=device)
