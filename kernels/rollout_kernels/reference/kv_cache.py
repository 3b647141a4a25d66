"""The tiled KV cache: writing tokens into it, reading them back, copying blocks. `kv_cache.py` describes the layout."""

from __future__ import annotations

import torch

from rollout_kernels.errors import slot_error
from rollout_kernels.kv_cache import QUANTISED_MAXIMUM, TILE, KVCache


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    num_slots = cache.keys.shape[0] * TILE
    outside = ((slot_mapping < 0) | (slot_mapping >= num_slots)).nonzero()
    if outside.numel():
        raise slot_error(slot_mapping, int(outside[0]), num_slots)
    tile, lane = slot_mapping // TILE, slot_mapping % TILE
    if cache.key_scales is not None and cache.value_scales is not None:
        k, cache.key_scales[tile, :, lane] = quantise(k, cache.keys.dtype)
        v, cache.value_scales[tile, :, lane] = quantise(v, cache.values.dtype)
    padding = (0, -k.shape[2] % TILE)
    keys = torch.nn.functional.pad(_indexable(k), padding)  # [T, H, Dp]
    values = torch.nn.functional.pad(_indexable(v), padding)
    k_cache, v_cache = _indexable(cache.keys), _indexable(cache.values)
    if k_cache.dim() == 5:
        k_cache[tile, :, :, lane, :] = keys.unflatten(-1, (-1, 2))
        v_cache[tile, :, lane // 2, :, lane % 2] = values
    else:
        k_cache[tile, :, :, lane] = keys
        v_cache[tile, :, lane, :] = values


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements [T, H, D] of `dtype`, scales float32 [T, H]) of x [T, H, D], rounded to nearest even, in float32."""
    limit = QUANTISED_MAXIMUM[dtype]
    x = x.float()
    scales = x.abs().amax(-1) / limit
    scaled = (x / torch.where(scales == 0, 1.0, scales)[..., None]).clamp(-limit, limit)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales


def read_kv(cache: KVCache, slots: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [len(slots), H, D] out of the cache: its own elements, or float32 where they are quantised."""
    tile, lane = slots // TILE, slots % TILE
    k_cache, v_cache = _indexable(cache.keys), _indexable(cache.values)
    if k_cache.dim() == 5:
        keys = k_cache[tile, :, :, lane, :].flatten(-2)
        values = v_cache[tile, :, lane // 2, :, lane % 2]
    else:
        keys = k_cache[tile, :, :, lane]
        values = v_cache[tile, :, lane, :]
    keys, values = keys[..., :head_dim].view(cache.keys.dtype), values[..., :head_dim].view(cache.values.dtype)
    if cache.key_scales is None or cache.value_scales is None:
        return keys, values
    key_scales, value_scales = cache.key_scales[tile, :, lane], cache.value_scales[tile, :, lane]
    return keys.float() * key_scales[..., None], values.float() * value_scales[..., None]


def _indexable(x: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that torch can pad and index: it knows little of float8."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


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
