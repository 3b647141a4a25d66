"""The final hidden states of computed tokens, kept beside their KV: what Medusa heads and EAGLE guess from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.core.schedule import SchedulePlan


@dataclass(slots=True)
class FeatureCache:
    """One row a slot of the engine's KV pool, at the places that the engine's block tables name.

    So prefix hits, forks and preemption by recomputation need nothing more: where there is a token's KV, there is its
    feature. `rows`: [num_slots + 1, hidden] in the model's dtype, of which the last takes what padded rows (slot -1)
    write. `host_rows` [num_host_slots, hidden] belongs to the swap pool. With `covers_all_tokens` every computed token
    has its feature, otherwise only those from whose row something was drawn.
    """

    rows: torch.Tensor
    host_rows: torch.Tensor | None
    block_size: int
    covers_all_tokens: bool

    @property
    def slots_per_block(self) -> int:
        return slots_per_block(self.block_size)

    def write(self, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        """hidden [R, hidden] to slots int64 [R]; -1 is nobody's."""
        self.rows.index_copy_(0, slots.remainder(len(self.rows)), hidden)

    def read(self, block_ids: Sequence[Sequence[int]], positions: Sequence[np.ndarray]) -> torch.Tensor:
        """Features [sum of lengths, hidden] of the tokens at `positions[i]` of the sequence with table `block_ids[i]`,
        one sequence after the other."""
        slots = [
            np.asarray(table, np.int64)[places // self.block_size] * self.slots_per_block + places % self.block_size
            for table, places in zip(block_ids, positions, strict=True)
        ]
        return self.rows[torch.from_numpy(np.concatenate(slots)).to(self.rows.device)]

    def move(self, plan: SchedulePlan) -> None:
        """Does with the features what the plan does with KV blocks: swap out, swap in, copy."""
        if not (plan.swap_out or plan.swap_in or plan.block_copies):
            return
        blocks = self.rows[:-1].view(-1, self.slots_per_block, self.rows.shape[1])
        if self.host_rows is not None:
            on_host = self.host_rows.view(-1, self.slots_per_block, self.rows.shape[1])
            _copy(blocks, on_host, plan.swap_out)
            _copy(on_host, blocks, plan.swap_in)
        _copy(blocks, blocks, plan.block_copies)


def slots_per_block(block_size: int) -> int:
    """Slots that a block takes in the pool: whole tiles of 16."""
    return -(-block_size // 16) * 16


def _copy(sources: torch.Tensor, destinations: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """One after the other: a destination may be a later pair's source."""
    for source, destination in pairs:
        destinations[destination].copy_(sources[source])
