"""The differentiable operations, registered with `torch.library`: forward, shapes of the results, backward formula.

Each forward calls the very kernel that inference calls, so its bits are the same. `backend` is the setting of
`rollout_kernels.dispatch` in force when the operation was called (or traced by a compiler); the backward pass is handed
the same one, whatever is in force there, in whatever thread. Matrix products of the backward pass run in the model
dtype with float32 accumulation inside, autocast or not; everything else is computed in float32. A result that nobody
wants is an empty tensor. The matrix products are in `autograd_linear`.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout_kernels import checks
from rollout_kernels.dispatch import Backend, backend_for
from rollout_kernels.kv_cache import KVCache, kv_cache_shapes
from rollout_kernels.library import Gradients, define, nothing, optional
from rollout_kernels.reference.reduce import accumulation_dtype

_POOL_BLOCK = 16  # tokens in a block of the scratch KV pool


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype, backend: str) -> torch.Tensor:
    """The norm of a wide x without a residual: the total is x itself, which no operation may return."""
    checks.rms_norm(x, weight, None, out_dtype)
    return backend_for(x, backend).rms_norm(x, weight, eps, None, out_dtype)[0]


def _normalise_fake(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


def _normalise_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps, _, ctx.backend = inputs
    ctx.save_for_backward(x, weight)


def _normalise_backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    x, weight = ctx.saved_tensors
    x_wanted, weight_wanted = ctx.needs_input_grad[:2]
    grad_x, _, grad_weight = rms_norm_backward(
        grad, None, x, weight, ctx.eps, x.dtype, x_wanted, False, weight_wanted, ctx.backend
    )
    return optional(grad_x, x_wanted), optional(grad_weight, weight_wanted), None, None, None


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.rms_norm(x, weight, residual, out_dtype)
    return backend_for(x, backend).rms_norm(x, weight, eps, residual, out_dtype)


def _rms_norm_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty(x.shape, dtype=accumulation_dtype(x.dtype))


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, ctx.eps, _, _, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(output[1], weight)


def _rms_norm_backward(ctx: Any, grad: torch.Tensor | None, grad_total: torch.Tensor | None) -> Gradients:
    total, weight = ctx.saved_tensors
    x_wanted, weight_wanted, _, residual_wanted, _, _ = ctx.needs_input_grad
    if grad is None:  # only the residual stream was used
        grad_x = grad_total.to(ctx.x_dtype) if x_wanted and grad_total is not None else None
        return grad_x, None, None, grad_total if residual_wanted else None, None, None
    grad_x, grad_residual, grad_weight = rms_norm_backward(
        grad, grad_total, total, weight, ctx.eps, ctx.x_dtype, x_wanted, residual_wanted, weight_wanted, ctx.backend
    )
    return (
        optional(grad_x, x_wanted),
        optional(grad_weight, weight_wanted),
        None,
        optional(grad_residual, residual_wanted),
        None,
        None,
    )


def _gradients_of_rms_norm(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x_dtype: torch.dtype,
    x_wanted: bool,
    residual_wanted: bool,
    weight_wanted: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = backend_for(total, backend).rms_norm_backward(
        grad.contiguous(),
        None if grad_total is None else grad_total.contiguous(),
        total.contiguous(),
        weight,
        eps,
        x_dtype if x_wanted else None,
        residual_wanted,
        weight_wanted,
    )
    dtypes = (x_dtype, total.dtype, weight.dtype)
    results = [
        nothing(total, dtype) if grad is None else grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)
    ]
    return results[0], results[1], results[2]


def _gradients_of_rms_norm_fake(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x_dtype: torch.dtype,
    x_wanted: bool,
    residual_wanted: bool,
    weight_wanted: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        total.new_empty(total.shape, dtype=x_dtype) if x_wanted else nothing(total, x_dtype),
        total.new_empty(total.shape) if residual_wanted else nothing(total),
        weight.new_empty(weight.shape) if weight_wanted else nothing(weight),
    )


normalise = define(
    "normalise(Tensor x, Tensor weight, float eps, ScalarType out_dtype, str backend) -> Tensor",
    _normalise,
    _normalise_fake,
    _normalise_setup,
    _normalise_backward,
)
rms_norm = define(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual, ScalarType out_dtype, str backend) "
    "-> (Tensor, Tensor)",
    _rms_norm,
    _rms_norm_fake,
    _rms_norm_setup,
    _rms_norm_backward,
)
rms_norm_backward = define(
    "rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor weight, float eps, ScalarType x_dtype, "
    "bool x_wanted, bool residual_wanted, bool weight_wanted, str backend) -> (Tensor, Tensor, Tensor)",
    _gradients_of_rms_norm,
    _gradients_of_rms_norm_fake,
)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, direction: float, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated, as copies; direction -1 rotates back."""
    checks.rotary(q, k, positions, cos_sin)
    rotated_q, rotated_k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    backend_for(q, backend).rotate_(rotated_q, rotated_k, positions, cos_sin, direction)
    return rotated_q, rotated_k


def _rotate_fake(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, direction: float, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotate_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, positions, cos_sin, ctx.direction, ctx.backend = inputs
    ctx.save_for_backward(positions, cos_sin)


def _rotate_backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> Gradients:
    grads = rotate(grad_q.contiguous(), grad_k.contiguous(), *ctx.saved_tensors, -ctx.direction, ctx.backend)
    return *grads, None, None, None, None


rotate = define(
    "rotate(Tensor q, Tensor k, Tensor positions, Tensor cos_sin, float direction, str backend) -> (Tensor, Tensor)",
    _rotate,
    _rotate_fake,
    _rotate_setup,
    _rotate_backward,
)


def _silu_and_mul(x: torch.Tensor, backend: str) -> torch.Tensor:
    checks.silu_and_mul(x)
    return backend_for(x, backend).silu_and_mul(x)


def _silu_and_mul_fake(x: torch.Tensor, backend: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _silu_and_mul_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.backend = inputs
    ctx.save_for_backward(x)


def _silu_and_mul_backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    return silu_and_mul_backward(grad, ctx.saved_tensors[0], ctx.backend), None


def _gradient_of_silu_and_mul(grad: torch.Tensor, x: torch.Tensor, backend: str) -> torch.Tensor:
    return backend_for(x, backend).silu_and_mul_backward(grad.contiguous(), x)


def _gradient_of_silu_and_mul_fake(grad: torch.Tensor, x: torch.Tensor, backend: str) -> torch.Tensor:
    return x.new_empty(x.shape)


silu_and_mul = define(
    "silu_and_mul(Tensor x, str backend) -> Tensor",
    _silu_and_mul,
    _silu_and_mul_fake,
    _silu_and_mul_setup,
    _silu_and_mul_backward,
)
silu_and_mul_backward = define(
    "silu_and_mul_backward(Tensor grad, Tensor x, str backend) -> Tensor",
    _gradient_of_silu_and_mul,
    _gradient_of_silu_and_mul_fake,
)


def packed_attention(
    backend: Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    return_lse: bool,
    window: int | None,
    soft_cap: float | None,
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
        *(window, soft_cap),
    )


def _varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.packed_kv(k, v)
    checks.query_heads(q, k.shape[1])
    checks.query_start(query_start, q.shape[0])
    out, lse = packed_attention(backend_for(q, backend), q, k, v, query_start, scale, True, window, soft_cap)
    assert lse is not None  # it was asked for
    return out, lse


def _varlen_attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))


def _varlen_attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, query_start, *ctx.options = inputs  # the scale, the window, the soft cap, the backend
    ctx.save_for_backward(q, k, v, *output, query_start)
    ctx.mark_non_differentiable(output[1])


def _varlen_attention_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> Gradients:
    return *attention_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5


def _gradients_of_attention(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return backend_for(q, backend).attention_backward(
        grad.contiguous(), q, k, v, out, lse, query_start, scale, window, soft_cap
    )


def _gradients_of_attention_fake(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


varlen_attention = define(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor query_start, float scale, int? window, float? soft_cap, "
    "str backend) -> (Tensor, Tensor)",
    _varlen_attention,
    _varlen_attention_fake,
    _varlen_attention_setup,
    _varlen_attention_backward,
)
attention_backward = define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor query_start, "
    "float scale, int? window, float? soft_cap, str backend) -> (Tensor, Tensor, Tensor)",
    _gradients_of_attention,
    _gradients_of_attention_fake,
)
