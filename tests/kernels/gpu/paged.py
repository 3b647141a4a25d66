"""Random sequences in a paged cache of layout "plain" that holds NaN everywhere else, and exact attention over them."""

from __future__ import annotations

import torch

from rollout_kernels.gpu.attention import paged_attention
from rollout_kernels.kv_cache import QUANTISED_MAXIMUM, KVCache
from tests.support.kernels import randn, rows_apart

QUANTISED = tuple(QUANTISED_MAXIMUM)


def nan_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
    """A cache of which every slot is NaN; a quantised one has scales of NaN and elements of the largest magnitude."""
    shape = (num_blocks * -(-block_size // 16), num_kv_heads, 16, head_dim)
    if dtype not in QUANTISED:
        return KVCache(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    parts = [torch.full(shape, 0x7E, dtype=torch.uint8).view(dtype) for _ in range(2)]
    return KVCache(parts[0], parts[1], *(torch.full(shape[:3], torch.nan) for _ in range(2)))


def slots_of(table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slots int64 of the positions of a sequence with this block table."""
    in_block = positions % block_size
    tile = table[positions // block_size].long() * -(-block_size // 16) + in_block // 16
    return tile * 16 + in_block % 16


def quantised_by_torch(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales of tokens [T, H, D], by torch's own rounding."""
    scale = x.float().abs().amax(-1) / QUANTISED_MAXIMUM[dtype]
    ratio = torch.where(scale[..., None] > 0, x.float() / scale[..., None], 0.0)
    return (ratio.round() if dtype is torch.int8 else ratio).to(dtype), scale


def fill(cache: KVCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes tokens to slots by torch alone."""
    tile, lane = slots // 16, slots % 16
    for x, elements, scales in ((k, cache.keys, cache.key_scales), (v, cache.values, cache.value_scales)):
        if scales is None:
            elements[tile, :, lane] = x
        else:
            quantised, scale = quantised_by_torch(x, elements.dtype)
            elements.view(torch.uint8)[tile, :, lane] = quantised.view(torch.uint8)
            scales[tile, :, lane] = scale


def dequantised(cache: KVCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values float64 [len(slots), Hkv, D] that the cache stands for."""
    parts = []
    for elements, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        rows = elements[slots // 16, :, slots % 16].double()
        parts.append(rows if scales is None else rows * scales[slots // 16, :, slots % 16, None].double())
    return parts[0], parts[1]


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, soft_cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention of the last len(q) positions of one sequence: out [T, Hq, D], lse [T, Hq]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    distance = (torch.arange(len(q)) + len(k) - len(q))[:, None] - torch.arange(len(k))[None, :]
    hidden = (distance < 0) | (distance >= (len(k) + 1 if window is None else window))
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1).T


class Sequences:
    """Random sequences in a paged cache, their blocks scattered; `attend` runs the Triton kernel on parts of them."""

    def __init__(
        self,
        lengths: list[int],
        heads: tuple[int, int, int],
        dtype: torch.dtype = torch.bfloat16,
        block_size: int = 16,
        cache_dtype: torch.dtype | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        seed: int = 0,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.lengths, self.block_size, self.scale = lengths, block_size, head_dim**-0.5
        self.window, self.soft_cap = window, soft_cap
        self.q, k, v = (
            [randn(n, count, head_dim, dtype=dtype, seed=100 * seed + 10 * part + i, scale=size) for i, n in
             enumerate(lengths)]
            for part, (count, size) in enumerate(((num_heads, 2.0), (num_kv_heads, 2.0), (num_kv_heads, 1.0)))
        )  # fmt: skip
        blocks = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed)).int().split(blocks)
        self.tables = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
        self.cache = nan_cache(sum(blocks), block_size, num_kv_heads, head_dim, cache_dtype or dtype)
        self.slots = []
        for table, ids, n in zip(self.tables, order, lengths, strict=True):
            table[: len(ids)] = ids
            self.slots.append(slots_of(table, torch.arange(n), block_size))
        fill(self.cache, torch.cat(k), torch.cat(v), torch.cat(self.slots))

    def attend(
        self, queries: list[tuple[int, int, int]], padding: int = 0, empty_slots: int = 0, width: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse for (sequence, first position, end position) items in one call.

        `padding` rows of NaN follow the queries, `empty_slots` sequences without queries and keys the others; tables
        are `width` blocks wide.
        """
        q = torch.cat([self.q[s][first:end] for s, first, end in queries])
        q = torch.cat((q, torch.full((padding, *q.shape[1:]), torch.nan, dtype=q.dtype)))
        counts = [end - first for _, first, end in queries] + [0] * empty_slots
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        tables = self.tables[torch.tensor([s for s, _, _ in queries])]
        wide = torch.full((len(counts), width or tables.shape[1]), -1, dtype=torch.int32)
        wide[: len(queries), : tables.shape[1]] = tables
        seq_lens = torch.tensor([end for _, _, end in queries] + [0] * empty_slots, dtype=torch.int32)
        out, lse = paged_attention(
            rows_apart(q), self.cache, wide, starts, seq_lens, self.block_size, self.scale, True, self.window,
            self.soft_cap,
        )  # fmt: skip
        assert lse is not None
        return out, lse

    def whole(self) -> list[tuple[int, int, int]]:
        """Items that name every position of every sequence."""
        return [(i, 0, n) for i, n in enumerate(self.lengths)]

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `attend(whole())` should give, in float64, over the values that the cache stands for."""
        results = [
            exact_attention(q, *dequantised(self.cache, slots), self.scale, self.window, self.soft_cap)
            for q, slots in zip(self.q, self.slots, strict=True)
        ]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])
