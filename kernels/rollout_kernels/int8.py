"""Int8 weights: how they are packed, and what a product with them needs.

Every output channel n has one scale. The value of an element is `(values - 128) * scales[n]`. Sixteen channels lie
together, four neighbours along K of each side by side, as the CPU's dot-product instructions want them.

Activations are quantised as they come, with one scale for every `GROUP` neighbours along K. That these need scales of
their own, and weights do not, was measured on SmolLM2-135M, as KL to bfloat16: `docs/quantization.md`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP = 32  # neighbours along K that share a scale in a row of activations
PANEL = 16  # output channels that are packed together


class Int8Weight(NamedTuple):
    """A weight [N, K] in int8; `rollout_kernels.quantize_weight` makes it."""

    values: torch.Tensor  # uint8 [ceil(N / 16), K rounded up to 32, over 4, 16, 4], value + 128; 128 in what is padding
    scales: torch.Tensor  # float32 [N]
    in_features: int  # K


def int8_weight_shapes(rows: int, depth: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the values (uint8) and the scales (float32) of a weight [rows, depth]."""
    return (-(-rows // PANEL), -(-depth // GROUP) * GROUP // 4, PANEL, 4), (rows,)


def empty_int8_weight(rows: int, depth: int, device: torch.device) -> Int8Weight:
    """One of these shapes, of undefined values."""
    values, scales = int8_weight_shapes(rows, depth)
    return Int8Weight(torch.empty(values, dtype=torch.uint8, device=device), torch.empty(scales, device=device), depth)


def scratch_row_bytes(depth: int) -> int:
    """Bytes of a quantised row of activations in the CPU's kernel: values, a scale and a first sum for each group."""
    groups = -(-depth // GROUP)
    return -(-groups * (GROUP + 8) // 64) * 64
