"""Memory for the features of computed tokens, beside the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.platform.platform import Memory, Platform
from rollout.speculation.features import FeatureCache, slots_per_block


@dataclass(frozen=True, slots=True)
class FeatureLayout:
    """A feature of `hidden_size` values for each slot of a pool of blocks."""

    hidden_size: int
    dtype: torch.dtype
    block_size: int
    covers_all_tokens: bool  # see `FeatureCache`

    @property
    def block_bytes(self) -> int:
        return slots_per_block(self.block_size) * self.hidden_size * self.dtype.itemsize

    def _shape(self, num_blocks: int, num_spare: int) -> tuple[int, int]:
        return num_blocks * slots_per_block(self.block_size) + num_spare, self.hidden_size

    def memory(self, num_blocks: int, platform: Platform) -> Memory:
        """For the features of so many blocks, on the device."""
        num_bytes = (num_blocks + 1) * self.block_bytes  # one more for the row that padding writes
        return platform.memory("features", num_bytes, huge_pages=False)

    def cache(self, num_blocks: int, memory: Memory, num_host_blocks: int, host: Memory | None) -> FeatureCache:
        """Features of the device's blocks in `memory`, and those of the swap pool's in what is left of `host`."""
        rows = memory.carve(self._shape(num_blocks, 1), self.dtype)
        host_rows = None if host is None else host.carve(self._shape(num_host_blocks, 0), self.dtype)
        return FeatureCache(rows, host_rows, self.block_size, self.covers_all_tokens)
