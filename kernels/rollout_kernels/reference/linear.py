"""out = x @ weight^T + bias."""

from __future__ import annotations

import torch

from rollout_kernels.reference.reduce import accumulation_dtype, row_sum

_WEIGHT_ROWS = 1024  # of which products are held at a time


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    wide = accumulation_dtype(x.dtype)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    for start in range(0, weight.shape[0], _WEIGHT_ROWS):
        part = slice(start, start + _WEIGHT_ROWS)
        weight_rows = weight[part].to(wide)
        for row in range(x.shape[0]):
            value = row_sum(weight_rows * x[row].to(wide))
            out[row, part] = (value if bias is None else value + bias[part].to(wide)).to(out_dtype)
    return out
