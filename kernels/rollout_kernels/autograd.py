"""Gradients of the operations. Each forward calls the very kernel that inference calls, so its bits are the same.

`backend` is the object that `dispatch.backend_for` returned: the backward pass uses the same one. Matrix products of
the backward pass run in the model dtype with float32 accumulation inside; everything else is computed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rollout_kernels.dispatch import Backend
from rollout_kernels.kv_cache import KVCache, kv_cache_shapes
from rollout_kernels.reference.reduce import accumulation_dtype

_POOL_BLOCK = 16  # tokens in a block of the scratch KV pool


class Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return backend.linear(x, weight, bias, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        _, x_wanted, weight_wanted, bias_wanted, _ = ctx.needs_input_grad
        low = grad.to(x.dtype)
        grad_x = low @ weight if x_wanted else None
        grad_weight = low.t() @ x if weight_wanted else None
        grad_bias = grad.sum(0, dtype=accumulation_dtype(grad.dtype)).to(ctx.bias_dtype) if bias_wanted else None
        return None, grad_x, grad_weight, grad_bias, None


class RmsNorm(Function):
    """(normed, total). Where the total would be x itself (a wide x, no residual) it returns normed alone."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        normed, total = backend.rms_norm(x, weight, eps, residual, out_dtype)
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.eps, ctx.x_dtype = backend, eps, x.dtype
        if residual is None and x.dtype == total.dtype:
            ctx.save_for_backward(x, weight)
            return normed
        ctx.save_for_backward(total, weight)
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        _, x_wanted, weight_wanted, _, residual_wanted, _ = ctx.needs_input_grad
        grad = grads[0]
        grad_total = grads[1] if len(grads) > 1 else None
        if grad is None:  # only the residual stream was used
            grad_x = grad_total.to(ctx.x_dtype) if x_wanted and grad_total is not None else None
            return None, grad_x, None, None, grad_total if residual_wanted else None, None
        grad_x, grad_residual, grad_weight = ctx.backend.rms_norm_backward(
            grad.contiguous(),
            None if grad_total is None else grad_total.contiguous(),
            total,
            weight,
            ctx.eps,
            ctx.x_dtype if x_wanted else None,
            residual_wanted,
            weight_wanted,
        )
        return None, grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None, grad_residual, None


class Rotary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(positions, cos_sin)
        ctx.backend = backend
        rotated = tuple(x.clone(memory_format=torch.contiguous_format) for x in (q, k))
        backend.rotate_(*rotated, positions, cos_sin, 1.0)
        return rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        positions, cos_sin = ctx.saved_tensors
        rotated = tuple(grad.clone(memory_format=torch.contiguous_format) for grad in grads)
        ctx.backend.rotate_(*rotated, positions, cos_sin, -1.0)
        return None, *rotated, None, None


class SiluAndMul(Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.backend = backend
        return backend.silu_and_mul(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.backend.silu_and_mul_backward(grads[0].contiguous(), ctx.saved_tensors[0])


def packed_attention(
    backend: Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention over packed sequences by way of a scratch KV pool, as the engine computes it."""
    starts = query_start.to(torch.int64)
    lengths = starts[1:] - starts[:-1]
    blocks = (lengths + _POOL_BLOCK - 1) // _POOL_BLOCK
    first_block = blocks.cumsum(0) - blocks
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)
    position = torch.arange(q.shape[0], device=q.device) - starts[sequence]
    shapes = kv_cache_shapes(int(blocks.sum()), _POOL_BLOCK, k.shape[1], k.shape[2], k.dtype, backend.kv_layout)
    cache = KVCache(*(torch.empty(shape, dtype=k.dtype, device=k.device) for shape in shapes))
    backend.write_kv(k, v, cache, first_block[sequence] * _POOL_BLOCK + position)
    width = max(int(blocks.max()) if len(blocks) else 0, 1)
    block_tables = (first_block[:, None] + torch.arange(width, device=q.device)).to(torch.int32)
    return backend.paged_attention(
        *(q, cache, block_tables, query_start, lengths.to(torch.int32), _POOL_BLOCK, scale, return_lse),
        *(None, None),  # neither a window nor a soft cap
    )


class VarlenAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_start: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        out, lse = packed_attention(backend, q, k, v, query_start, scale, True)
        ctx.save_for_backward(q, k, v, out, lse, query_start)
        ctx.backend, ctx.scale = backend, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, query_start = ctx.saved_tensors
        grad_q, grad_k, grad_v = ctx.backend.attention_backward(
            grads[0].contiguous(), q, k, v, out, lse, query_start, ctx.scale
        )
        return None, grad_q, grad_k, grad_v, None, None


class TokenLogprobs(Function):
    """(logprobs, entropy) of given tokens from logits; the entropy has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(logits, token_ids)
        ctx.backend, ctx.temperature = backend, temperature
        logprobs, entropy = backend.token_logprobs(logits, token_ids, temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, token_ids = ctx.saved_tensors
        grad = ctx.backend.token_logprobs_backward(
            logits, token_ids, ctx.temperature, grads[0].contiguous(), logits.dtype
        )
        return None, grad, None, None


def _part(temperature: float | torch.Tensor, rows: slice) -> float | torch.Tensor:
    return temperature[rows] if isinstance(temperature, torch.Tensor) else temperature


class LinearTokenLogprobs(Function):
    """Logits of a chunk of rows at a time, forward, and once more backward; the entropy has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: float | torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = accumulation_dtype(hidden.dtype)
        logprobs, entropy = torch.empty((2, hidden.shape[0]), dtype=wide, device=hidden.device).unbind()
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = backend.linear(hidden[rows], weight, None, wide)
            logprobs[rows], entropy[rows] = backend.token_logprobs(logits, token_ids[rows], _part(temperature, rows))
        ctx.save_for_backward(hidden, weight, token_ids)
        ctx.backend, ctx.temperature, ctx.chunk = backend, temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, token_ids = ctx.saved_tensors
        grad, wide = grads[0].contiguous(), accumulation_dtype(hidden.dtype)
        _, hidden_wanted, weight_wanted, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if hidden_wanted else None
        grad_weight = None
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = ctx.backend.linear(hidden[rows], weight, None, wide)
            grad_logits = ctx.backend.token_logprobs_backward(
                logits, token_ids[rows], _part(ctx.temperature, rows), grad[rows], hidden.dtype
            )
            del logits
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if weight_wanted:
                part = grad_logits.t() @ hidden[rows]
                grad_weight = part if grad_weight is None else grad_weight.to(wide).add_(part)
        if weight_wanted and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return None, grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
