"""Low-rank adapters (Hu et al., 2021, "LoRA"), one for each token: shrink to the rank, expand and add."""

from __future__ import annotations

import torch

from rollout_kernels.errors import adapter_error
from rollout_kernels.reference.reduce import accumulation_dtype, row_sum


def _check_ids(adapter_ids: torch.Tensor, num_adapters: int) -> None:
    outside = ((adapter_ids < -1) | (adapter_ids >= num_adapters)).nonzero()
    if outside.numel():
        raise adapter_error(adapter_ids, int(outside[0]), num_adapters)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, adapter_ids: torch.Tensor) -> torch.Tensor:
    """x [T, K], a [A, R, K], adapter_ids int32 [T] -> [T, R] in the accumulation dtype; zeros where the id is -1."""
    _check_ids(adapter_ids, a.shape[0])
    wide = accumulation_dtype(x.dtype)
    out = torch.zeros((x.shape[0], a.shape[1]), dtype=wide, device=x.device)
    for row, adapter in enumerate(adapter_ids.tolist()):
        if adapter >= 0:
            out[row] = row_sum(a[adapter].to(wide) * x[row].to(wide))
    return out


def lora_expand(
    y: torch.Tensor, b: torch.Tensor, adapter_ids: torch.Tensor, out: torch.Tensor, scales: torch.Tensor
) -> None:
    """out [T, N] += scales[id] * (y [T, R] @ b[id] [N, R]^T), in place; rows whose id is -1 stay as they are."""
    _check_ids(adapter_ids, b.shape[0])
    wide = accumulation_dtype(y.dtype)
    for row, adapter in enumerate(adapter_ids.tolist()):
        if adapter >= 0:
            product = row_sum(b[adapter].to(wide) * y[row])
            out[row] = (out[row].to(wide) + product * scales[adapter].to(wide)).to(out.dtype)
