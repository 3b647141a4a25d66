"""Rows of the embedding table, widened to float32."""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.sizes import ceil_div, next_power_of_2

_NUM_WARPS = 4


@triton.jit
def _embedding_kernel(
    ids,
    weight,
    out,
    weight_stride,  # elements from one row of the table to the next
    vocab_size,
    size,
    BLOCK: tl.constexpr,
):
    """Program (t, c) copies columns c * BLOCK … of the row that token t names; an id outside the table gives zeros."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token) + tl.zeros((BLOCK,), tl.int64)  # a value a column: the interpreter spreads no booleans
    mask = columns < size
    inside = mask & (row >= 0) & (row < vocab_size)
    values = tl.load(weight + row * weight_stride + columns, mask=inside, other=0.0)
    tl.store(out + token * size + columns, values.to(tl.float32), mask=mask)


def _block(size: int) -> int:
    return min(next_power_of_2(size), 1024)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """token_ids int64 [T], weight [V, H] -> float32 [T, H]. An id outside the table gives zeros."""
    rows, size = token_ids.shape[0], weight.shape[1]
    out = torch.empty((rows, size), dtype=torch.float32, device=weight.device)
    if out.numel():
        block = _block(size)
        _embedding_kernel[(rows, ceil_div(size, block))](
            *(token_ids, weight, out, weight.stride(0), weight.shape[0], size),
            BLOCK=block,
            num_warps=_NUM_WARPS,
            **PINNED,
        )
    return out


def ahead_of_time_cases() -> list[KernelCase]:
    """SmolLM2-135M in bfloat16, a 1B Llama in bfloat16 and float16, and float32."""
    sizes = {"weight_stride": "i64", "vocab_size": "i32", "size": "i32"}
    return [
        KernelCase(
            name=f"embedding {dtype} H={size}",
            kernel=_embedding_kernel,
            signature={"ids": "*i64", "weight": f"*{dtype}", "out": "*fp32", **sizes, "BLOCK": "constexpr"},
            constants={"BLOCK": _block(size)},
            num_warps=_NUM_WARPS,
            num_stages=3,
            divisible_by_16=("ids", "weight", "out", "weight_stride", "size"),
        )
        for dtype, size in (("bf16", 576), ("bf16", 2048), ("fp16", 2048), ("fp32", 576))
    ]
