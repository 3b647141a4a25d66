"""Rotary position embedding (Su et al., 2021, "RoFormer"), half-split style, in place, q and k in one launch."""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.numerics import round_to
from rollout_kernels.gpu.sizes import ceil_div, next_power_of_2


@triton.jit
def _rotary_kernel(
    q,  # [T, Hq, D], heads side by side
    k,  # [T, Hkv, D]
    positions,  # [T] int64
    cos_sin,  # [max_positions, D] float32
    q_stride,
    k_stride,
    num_q_heads,
    num_k_heads,
    half,  # D / 2
    max_positions,
    direction,  # 1.0, or -1.0 to rotate back
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (t, c) rotates HEADS heads of token t: the first programs queries, the rest keys."""
    token = tl.program_id(0).to(tl.int64)
    q_programs = tl.cdiv(num_q_heads, HEADS)
    if tl.program_id(1) < q_programs:
        row = q + token * q_stride
        first_head = tl.program_id(1) * HEADS
        num_heads = num_q_heads
    else:
        row = k + token * k_stride
        first_head = (tl.program_id(1) - q_programs) * HEADS
        num_heads = num_k_heads
    heads = first_head + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF)[None, :]
    position = tl.load(positions + token)
    # A position outside the table, which only the device knows of, leaves its token as it is.
    table_mask = dims < tl.where((position >= 0) & (position < max_positions), half, 0)
    cosine = tl.load(cos_sin + position * 2 * half + dims, mask=table_mask, other=1.0)
    sine = tl.load(cos_sin + position * 2 * half + half + dims, mask=table_mask, other=0.0) * direction
    mask = (heads < num_heads) & table_mask
    at = row + heads * 2 * half + dims
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, round_to(low * cosine - high * sine, q.dtype.element_ty), mask=mask)
    tl.store(at + half, round_to(high * cosine + low * sine, q.dtype.element_ty), mask=mask)


def _blocks(head_dim: int) -> tuple[int, int, int]:
    """(heads of a program, columns of half a head, warps): about 1,024 pairs, 8 to a thread."""
    half = next_power_of_2(head_dim // 2)
    return max(1, 1024 // half), half, max(1, min(8, half // 8 * max(1, 1024 // half) // 32))


def rotate_(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, direction: float) -> None:
    """Rotates q [T, Hq, D] and k [T, Hkv, D] by their positions (int64 [T]); `direction` -1 rotates back.

    The device alone knows the positions: a token whose position is outside `cos_sin` [max_positions, D] stays as it is.
    """
    num_tokens, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    heads, half, num_warps = _blocks(head_dim)
    if num_tokens == 0:
        return
    _rotary_kernel[(num_tokens, ceil_div(q_heads, heads) + ceil_div(k_heads, heads))](
        *(q, k, positions, cos_sin, q.stride(0), k.stride(0), q_heads, k_heads, head_dim // 2, cos_sin.shape[0]),
        direction,
        HEADS=heads,
        HALF=half,
        num_warps=num_warps,
        **PINNED,
    )


def ahead_of_time_cases() -> list[KernelCase]:
    cases = []
    for dtype, head_dim in (("bf16", 64), ("bf16", 128), ("fp16", 128), ("bf16", 256), ("bf16", 80), ("fp32", 64)):
        heads, half, num_warps = _blocks(head_dim)
        aligned = ("half",) if head_dim % 32 == 0 else ()
        cases.append(
            KernelCase(
                name=f"rotary {dtype} D={head_dim}",
                kernel=_rotary_kernel,
                signature={
                    "q": f"*{dtype}",
                    "k": f"*{dtype}",
                    "positions": "*i64",
                    "cos_sin": "*fp32",
                    **dict.fromkeys(("q_stride", "k_stride", "num_q_heads", "num_k_heads"), "i32"),
                    "half": "i32",
                    "max_positions": "i32",
                    "direction": "fp32",
                    "HEADS": "constexpr",
                    "HALF": "constexpr",
                },
                constants={"HEADS": heads, "HALF": half},
                num_warps=num_warps,
                num_stages=3,
                divisible_by_16=("q", "k", "positions", "cos_sin", "q_stride", "k_stride", *aligned),
            )
        )
    return cases
