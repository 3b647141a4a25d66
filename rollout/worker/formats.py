"""Number formats of an engine: the elements of its KV cache, and which formats the kernels of a device compute with."""

from __future__ import annotations

import torch

from rollout.config import EngineConfig

_QUANTISED_KV = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantised_kv(config: EngineConfig) -> torch.dtype | None:
    """The elements of a quantised KV cache; None where keys and values keep the model's dtype."""
    return _QUANTISED_KV.get(config.kv_cache_dtype)


def check_formats(config: EngineConfig, dtype: torch.dtype, kernels: str) -> None:
    """Raises `ValueError` naming the field for a format that these kernels (a backend's name) do not compute with."""
    if kernels != "cpu":
        return
    if dtype is torch.float16:
        raise ValueError(
            "dtype='float16' is not supported by the CPU's kernels: give 'bfloat16' or 'float32', or a CUDA device, or "
            "kernels='reference', which is slow"
        )
    if quantised_kv(config) is torch.float8_e4m3fn:
        raise ValueError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} is not supported by the CPU's kernels: give 'auto' or 'int8', "
            "or a CUDA device, or kernels='reference', which is slow"
        )
