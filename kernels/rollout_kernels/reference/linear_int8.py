"""Quantisation of weights to int8, and out = x @ weight^T + bias with int8 weights and activations."""

from __future__ import annotations

import torch

from rollout_kernels.int8 import GROUP, PANEL, Int8Weight

_PANELS = 64  # of which the unpacked values are held at a time
_SMALLEST = 2.0**-100  # what is below counts as zero


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> (whole numbers within +-127 as float32, scales float32 [...]), one scale for the last dimension."""
    x = x.float()
    largest = x.abs().amax(-1)
    used = largest >= _SMALLEST
    finite = x.isfinite().all(-1)
    inverse = torch.where(used & finite, torch.full_like(largest, 127.0) / largest, torch.zeros_like(largest))
    values = torch.where(inverse[..., None] == 0, torch.zeros_like(x), (x * inverse[..., None]).round())
    scales = torch.where(used, largest / 127.0, torch.zeros_like(largest))
    return values, torch.where(finite, scales, torch.full_like(scales, torch.nan))


def _padded(x: torch.Tensor, rows: int, depth: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, depth - x.shape[1], 0, rows - x.shape[0]))


def quantize_weight(weight: torch.Tensor, into: Int8Weight) -> None:
    panels, steps = into.values.shape[:2]
    for first in range(0, panels, _PANELS):
        rows = slice(first * PANEL, (first + _PANELS) * PANEL)
        values, into.scales[rows] = _quantise(weight[rows])
        count = min(_PANELS, panels - first)
        packed = _padded(values, count * PANEL, steps * 4).view(count, PANEL, steps, 4).transpose(1, 2)
        into.values[first : first + count] = (packed + 128).to(torch.uint8)


def linear_int8(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    panels, steps = weight.values.shape[:2]
    columns, groups = weight.scales.shape[0], steps * 4 // GROUP
    values, scales = _quantise(_padded(x, x.shape[0], groups * GROUP).view(-1, groups, GROUP))
    out = torch.empty((x.shape[0], columns), dtype=out_dtype, device=x.device)
    for first in range(0, panels, _PANELS):
        part = slice(first * PANEL, (first + _PANELS) * PANEL)
        unpacked = weight.values[first : first + _PANELS].transpose(1, 2).reshape(-1, groups, GROUP).float() - 128
        total = torch.zeros((x.shape[0], unpacked.shape[0]), device=x.device)
        for group in range(groups):
            # Whole numbers below 2^24 are exact in float32, in whatever order they are summed.
            total += (values[:, group] @ unpacked[:, group].T) * scales[:, group, None]
        result = total[:, : columns - first * PANEL] * weight.scales[part]
        out[:, part] = (result if bias is None else result + bias[part].float()).to(out_dtype)
    return out
