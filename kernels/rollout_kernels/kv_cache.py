"""The paged KV cache of one layer: what it holds, its shapes, and its quantised forms.

A cache is made of tiles of 16 slots, slot = tile * 16 + offset; a block of `block_size` tokens is as many whole tiles
as it needs. Within a tile each backend has its own layout:

- "tiled" (CPU, reference). With two values of the contracted dimension side by side (elements of two bytes or one) the
  keys of a tile are [Hkv, Dp/2, 16, 2] and its values [Hkv, 8, Dp, 2]; otherwise (float32, float64) [Hkv, Dp, 16] and
  [Hkv, 16, Dp]. Dp is the head dimension rounded up to a multiple of 16; the surplus is zero.
- "plain" (GPU). Keys and values are [Hkv, 16, D].

A quantised cache (int8 or float8_e4m3fn) has a float32 scale for each token and head, amax(|x|) / 127 or / 448, and an
element stands for its value times that scale. A token of zeros has the scale zero.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

TILE = 16
QUANTISED_MAXIMUM = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # dtype -> the largest magnitude an element takes

KVLayout = Literal["tiled", "plain"]
Shape = tuple[int, ...]


class KVCache(NamedTuple):
    """Keys and values of one layer, and their scales [tiles, Hkv, 16] float32 where they are quantised."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The two or four tensors of which the cache is made; the first dimension of each counts tiles."""
        return tuple(tensor for tensor in self if tensor is not None)


def _num_tiles(num_blocks: int, block_size: int) -> int:
    return num_blocks * (-(-block_size // TILE))


def tile_shapes(head_dim: int, dtype: torch.dtype, layout: KVLayout) -> tuple[Shape, Shape]:
    """Shapes of one head of a key tile and of a value tile. Raises `ValueError` for an unknown layout."""
    if layout == "plain":
        return (TILE, head_dim), (TILE, head_dim)
    if layout != "tiled":
        raise ValueError(f"layout={layout!r} is not valid: it must be 'tiled' or 'plain'")
    padded = -(-head_dim // TILE) * TILE
    if dtype.itemsize <= 2:
        return (padded // 2, TILE, 2), (TILE // 2, padded, 2)
    return (padded, TILE), (TILE, padded)


def kv_cache_shapes(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    layout: KVLayout = "tiled",
) -> tuple[Shape, Shape]:
    """Shapes of the keys and of the values of one layer's cache."""
    keys, values = tile_shapes(head_dim, dtype, layout)
    leading = (_num_tiles(num_blocks, block_size), num_kv_heads)
    return leading + keys, leading + values


def kv_scale_shape(num_blocks: int, block_size: int, num_kv_heads: int) -> Shape:
    """Shape of each of the two scales of a quantised cache."""
    return _num_tiles(num_blocks, block_size), num_kv_heads, TILE
