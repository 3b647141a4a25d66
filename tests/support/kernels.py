"""What the kernel tests share: threads, bit comparison, caches full of NaN, arguments of `sample`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import rollout_kernels as rk
from rollout_kernels.kv_cache import QUANTISED_MAXIMUM

BACKENDS = ("cpu", "reference")
DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {
    torch.bfloat16: 2**-8,
    torch.float32: 2e-6,
    torch.float64: 1e-12,
}  # relative, of one rounding or a short sum


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """torch's (hence the kernels') thread count inside a `with` block."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def rows_apart(x: torch.Tensor, gap: int = 5) -> torch.Tensor:
    """The same values with `gap` NaNs between the rows (first dimension)."""
    flat = x.reshape(x.shape[0], -1)
    wide = torch.full((x.shape[0], flat.shape[1] + gap), torch.nan, dtype=x.dtype)
    wide[:, : flat.shape[1]] = flat
    return wide[:, : flat.shape[1]].unflatten(1, x.shape[1:]) if x.dim() > 2 else wide[:, : flat.shape[1]]


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """|actual - expected| <= tolerance * (|expected| + typical size of expected), everywhere."""
    assert actual.shape == expected.shape
    expected = expected.double()
    allowed = tolerance * (expected.abs() + expected.square().mean().sqrt() + 1e-30)
    worst = ((actual.double() - expected).abs() / allowed).max().item() if expected.numel() else 0.0
    assert worst <= 1.0, f"error is {worst:.2f} times the tolerance"


def nan_caches(num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype) -> rk.KVCache:
    """A cache in which every slot holds NaN; where it is quantised, by way of its scales."""
    keys, values = (
        torch.full(shape, torch.nan).to(dtype) if dtype.is_floating_point else torch.full(shape, 99, dtype=dtype)
        for shape in rk.kv_cache_shapes(num_blocks, block_size, heads, head_dim, dtype)
    )
    if dtype not in QUANTISED_MAXIMUM:
        return rk.KVCache(keys, values)
    shape = rk.kv_scale_shape(num_blocks, block_size, heads)
    return rk.KVCache(keys, values, torch.full(shape, torch.nan), torch.full(shape, torch.nan))


def draw_arguments(draws: int, **values: float | int | torch.Tensor) -> dict[str, Any]:
    """Arguments of `sample` for that many draws: defaults are temperature 1, no filters, positions 0, 1, 2, ..."""
    dtypes = {
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
        "seed": torch.int64,
        "sample_index": torch.int64,
        "position": torch.int64,
    }
    defaults: dict[str, float | int | torch.Tensor] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 1234,
        "sample_index": 0,
        "position": torch.arange(draws),
    }
    merged = defaults | values
    assert merged.keys() == dtypes.keys()
    return {
        name: value.to(dtypes[name])
        if isinstance(value, torch.Tensor)
        else torch.full((draws,), value, dtype=dtypes[name])
        for name, value in merged.items()
    }
