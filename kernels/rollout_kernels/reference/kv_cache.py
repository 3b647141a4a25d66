"""The tiled KV cache: its layout, writing tokens into it, reading them back, copying blocks.

A tile is 16 slots. With two values of the contracted dimension side by side (bfloat16) the keys of a tile are
[H, Dp/2, 16, 2] and its values [H, 8, Dp, 2]; otherwise (float32, float64) [H, Dp, 16] and [H, 16, Dp]. Dp is the head
dimension rounded up to a multiple of 16; the surplus is zero.
"""

from __future__ import annotations

import torch

from rollout_kernels.errors import slot_error

TILE = 16


def kv_cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the key and the value cache of one layer."""
    num_tiles = num_blocks * (-(-block_size // TILE))
    padded = -(-head_dim // TILE) * TILE
    if dtype == torch.bfloat16:
        return (num_tiles, num_kv_heads, padded // 2, TILE, 2), (num_tiles, num_kv_heads, TILE // 2, padded, 2)
    return (num_tiles, num_kv_heads, padded, TILE), (num_tiles, num_kv_heads, TILE, padded)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    num_slots = k_cache.shape[0] * TILE
    outside = ((slot_mapping < 0) | (slot_mapping >= num_slots)).nonzero()
    if outside.numel():
        raise slot_error(slot_mapping, int(outside[0]), num_slots)
    tile, lane = slot_mapping // TILE, slot_mapping % TILE
    padded = -(-k.shape[2] // TILE) * TILE
    keys = torch.nn.functional.pad(k, (0, padded - k.shape[2]))  # [T, H, Dp]
    values = torch.nn.functional.pad(v, (0, padded - v.shape[2]))
    if k_cache.dim() == 5:
        k_cache[tile, :, :, lane, :] = keys.unflatten(-1, (padded // 2, 2))
        v_cache[tile, :, lane // 2, :, lane % 2] = values
    else:
        k_cache[tile, :, :, lane] = keys
        v_cache[tile, :, lane, :] = values


def read_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [len(slots), H, D] out of the cache."""
    tile, lane = slots // TILE, slots % TILE
    if k_cache.dim() == 5:
        keys = k_cache[tile, :, :, lane, :].flatten(-2)
        values = v_cache[tile, :, lane // 2, :, lane % 2]
    else:
        keys = k_cache[tile, :, :, lane]
        values = v_cache[tile, :, lane, :]
    return keys[..., :head_dim], values[..., :head_dim]


def sequence_slots(block_table: torch.Tensor, num_tokens: int, block_size: int) -> torch.Tensor:
    """Slots int64 [num_tokens] of positions 0, 1, 2, ... of a sequence with this block table (int32 [max_blocks])."""
    positions = torch.arange(num_tokens, device=block_table.device)
    tiles_per_block = -(-block_size // TILE)
    in_block = positions % block_size
    tile = block_table[positions // block_size].long() * tiles_per_block + in_block // TILE
    return tile * TILE + in_block % TILE


def copy_blocks(
    sources: list[torch.Tensor],
    destinations: list[torch.Tensor],
    pairs: list[tuple[int, int]],
    tiles_per_block: int,
) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        for source_block, target_block in pairs:
            first, target = source_block * tiles_per_block, target_block * tiles_per_block
            destination[target : target + tiles_per_block] = source[first : first + tiles_per_block].clone()
