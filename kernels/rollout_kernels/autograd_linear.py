"""Matrix products and log-probabilities with gradients, registered with `torch.library` (see `autograd`).

The products of the backward pass are torch's own, in the model's dtype with float32 accumulation, autocast or not. A
result that is not wanted is an empty tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch

from rollout_kernels import checks
from rollout_kernels.dispatch import backend_for
from rollout_kernels.library import Gradients, define, nothing, optional
from rollout_kernels.reference.reduce import accumulation_dtype


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    checks.linear(x, weight, bias, out_dtype)
    return backend_for(x, backend).linear(x, weight, bias, out_dtype)


def _linear_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, _, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    x, weight = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    grads = linear_backward(grad, x, weight, ctx.bias_dtype or x.dtype, *wanted)
    return *map(optional, grads, wanted), None, None


def _products_of_linear(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_dtype: torch.dtype,
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad [T, N] -> gradients of x [T, K], weight [N, K] and bias [N]."""
    low = grad.to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        grad_x = low @ weight if x_wanted else nothing(x)
        grad_weight = low.t() @ x if weight_wanted else nothing(x)
    if not bias_wanted:
        return grad_x, grad_weight, nothing(x, bias_dtype)
    return grad_x, grad_weight, grad.sum(0, dtype=accumulation_dtype(grad.dtype)).to(bias_dtype)


def _products_of_linear_fake(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_dtype: torch.dtype,
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape) if x_wanted else nothing(x),
        x.new_empty(weight.shape) if weight_wanted else nothing(x),
        x.new_empty(weight.shape[0] if bias_wanted else 0, dtype=bias_dtype),
    )


linear = define(
    "linear(Tensor x, Tensor weight, Tensor? bias, ScalarType out_dtype, str backend) -> Tensor",
    _linear,
    _linear_fake,
    _linear_setup,
    _linear_backward,
)
linear_backward = define(
    "linear_backward(Tensor grad, Tensor x, Tensor weight, ScalarType bias_dtype, bool x_wanted, bool weight_wanted, "
    "bool bias_wanted) -> (Tensor, Tensor, Tensor)",
    _products_of_linear,
    _products_of_linear_fake,
)


def fused(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor over contiguous parts that lie one after another in one storage; None where they do not."""
    first = parts[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous() or part.untyped_storage().data_ptr() != storage:
            return None
        end += part.numel() * part.element_size()
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _merged_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """Every output is one dot product in one order, so both ways give the same bits."""
    kernels = backend_for(x, backend)
    for weight, bias in zip(weights, biases or [None] * len(weights), strict=True):
        checks.linear(x, weight, bias, out_dtype)
    weight, bias = fused(weights), fused(biases) if biases else None
    if weight is not None and (bias is not None) == bool(biases):
        return kernels.linear(x, weight, bias, out_dtype)
    pairs = zip(weights, biases or [None] * len(weights), strict=True)
    return torch.cat([kernels.linear(x, weight, bias, out_dtype) for weight, bias in pairs], dim=1)


def _merged_linear_fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], sum(weight.shape[0] for weight in weights)), dtype=out_dtype)


def _merged_linear_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weights, biases, _, _ = inputs
    ctx.save_for_backward(x, *weights)
    ctx.bias_dtype = biases[0].dtype if biases else x.dtype


def _merged_linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    x_wanted, weights_wanted, biases_wanted, _, _ = ctx.needs_input_grad
    wanted = (x_wanted, any(weights_wanted), any(biases_wanted))
    grad_x, grad_weight, grad_bias = merged_linear_backward(grad, x, weights, ctx.bias_dtype, *wanted)
    sizes = [weight.shape[0] for weight in weights]

    def parts(whole: torch.Tensor, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        if not any(wanted):
            return [None] * len(wanted)
        return [*map(optional, whole.split(sizes), wanted)]

    return optional(grad_x, x_wanted), parts(grad_weight, weights_wanted), parts(grad_bias, biases_wanted), None, None


def _products_of_merged_linear(
    grad: torch.Tensor,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias_dtype: torch.dtype,
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = fused(weights)
    weight = torch.cat(list(weights)) if weight is None else weight
    return _products_of_linear(grad, x, weight, bias_dtype, x_wanted, weight_wanted, bias_wanted)


def _products_of_merged_linear_fake(
    grad: torch.Tensor,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias_dtype: torch.dtype,
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = sum(weight.shape[0] for weight in weights)
    return (
        x.new_empty(x.shape) if x_wanted else nothing(x),
        x.new_empty((rows, x.shape[1])) if weight_wanted else nothing(x),
        x.new_empty(rows if bias_wanted else 0, dtype=bias_dtype),
    )


merged_linear = define(
    "merged_linear(Tensor x, Tensor[] weights, Tensor[] biases, ScalarType out_dtype, str backend) -> Tensor",
    _merged_linear,
    _merged_linear_fake,
    _merged_linear_setup,
    _merged_linear_backward,
)
merged_linear_backward = define(
    "merged_linear_backward(Tensor grad, Tensor x, Tensor[] weights, ScalarType bias_dtype, bool x_wanted, "
    "bool weight_wanted, bool bias_wanted) -> (Tensor, Tensor, Tensor)",
    _products_of_merged_linear,
    _products_of_merged_linear_fake,
)


def _token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None,
    temperature: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = temperature if temperatures is None else temperatures
    checks.token_logprobs(logits, token_ids, kind)
    return backend_for(logits, backend).token_logprobs(logits, token_ids, kind)


def _token_logprobs_fake(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None,
    temperature: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.new_empty(logits.shape[0]), logits.new_empty(logits.shape[0])


def _token_logprobs_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, token_ids, temperatures, ctx.temperature, ctx.backend = inputs
    ctx.save_for_backward(logits, token_ids, temperatures)
    ctx.mark_non_differentiable(output[1])


def _token_logprobs_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> Gradients:
    logits, token_ids, temperatures = ctx.saved_tensors
    grad_logits = token_logprobs_backward(grad, logits, token_ids, temperatures, ctx.temperature, ctx.backend)
    return grad_logits, None, None, None, None


def _gradient_of_token_logprobs(
    grad: torch.Tensor,
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None,
    temperature: float,
    backend: str,
) -> torch.Tensor:
    kind = temperature if temperatures is None else temperatures
    kernels = backend_for(logits, backend)
    return kernels.token_logprobs_backward(logits, token_ids, kind, grad.contiguous(), logits.dtype)


def _gradient_of_token_logprobs_fake(
    grad: torch.Tensor,
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None,
    temperature: float,
    backend: str,
) -> torch.Tensor:
    return logits.new_empty(logits.shape)


token_logprobs = define(
    "token_logprobs(Tensor logits, Tensor token_ids, Tensor? temperatures, float temperature, str backend) "
    "-> (Tensor, Tensor)",
    _token_logprobs,
    _token_logprobs_fake,
    _token_logprobs_setup,
    _token_logprobs_backward,
)
token_logprobs_backward = define(
    "token_logprobs_backward(Tensor grad, Tensor logits, Tensor token_ids, Tensor? temperatures, float temperature, "
    "str backend) -> Tensor",
    _gradient_of_token_logprobs,
    _gradient_of_token_logprobs_fake,
)


def _part(temperature: float, temperatures: torch.Tensor | None, rows: slice) -> float | torch.Tensor:
    return temperature if temperatures is None else temperatures[rows]


def _linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None,
    temperature: float,
    chunk: int,
    num_kept: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a chunk of rows at a time. Those of the first `num_kept` rows are returned too, for the backward."""
    checks.linear(hidden, weight, None, hidden.dtype)
    kernels, wide = backend_for(hidden, backend), accumulation_dtype(hidden.dtype)
    logprobs = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
    entropy = torch.empty_like(logprobs)
    kept = torch.empty((num_kept, weight.shape[0]), dtype=wide, device=hidden.device)
    for rows in _chunks(hidden.shape[0], chunk, num_kept):
        logits = kernels.linear(hidden[rows], weight, None, wide)
        kind = _part(temperature, temperatures, rows)
        logprobs[rows], entropy[rows] = kernels.token_logprobs(logits, token_ids[rows], kind)
        if rows.stop <= num_kept:
            kept[rows] = logits
    return logprobs, entropy, kept


def _chunks(num_rows: int, chunk: int, num_kept: int) -> list[slice]:
    """Up to `chunk` rows each; none has rows on both sides of `num_kept`."""
    starts = [*range(0, num_kept, chunk), *range(num_kept, num_rows, chunk)]
    return [slice(start, end) for start, end in itertools.pairwise([*starts, num_rows])]


def _linear_token_logprobs_fake(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None,
    temperature: float,
    chunk: int,
    num_kept: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, wide = hidden.shape[0], accumulation_dtype(hidden.dtype)
    shapes = ((num_rows,), (num_rows,), (num_kept, weight.shape[0]))
    one, other, kept = (hidden.new_empty(shape, dtype=wide) for shape in shapes)
    return one, other, kept


def _linear_token_logprobs_setup(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    hidden, weight, token_ids, temperatures, ctx.temperature, ctx.chunk, _, ctx.backend = inputs
    ctx.save_for_backward(hidden, weight, token_ids, temperatures, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _linear_token_logprobs_backward(
    ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None, _: torch.Tensor | None
) -> Gradients:
    wanted = list(ctx.needs_input_grad[:2])
    if grad is None and grad_entropy is None:
        return (None,) * 8
    if grad is None:
        grad = torch.zeros_like(cast(torch.Tensor, grad_entropy))
    grads = linear_token_logprobs_backward(
        grad, grad_entropy, *ctx.saved_tensors, ctx.temperature, ctx.chunk, *wanted, ctx.backend
    )
    return *map(optional, grads, wanted), None, None, None, None, None, None


def _gradient_of_entropy(grad: torch.Tensor, logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """Gradient [T, V] of logits with respect to the entropy of their softmax at `temperature`, given that of the
    entropy [T]: -p (log p + entropy) / temperature."""
    scale = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    probabilities = torch.softmax(logits / scale, dim=1)
    parts = torch.special.entr(probabilities)  # -p log p, zero where p is
    entropy = parts.sum(dim=1, keepdim=True)
    return parts.sub_(probabilities.mul_(entropy)).mul_(grad[:, None] / scale)


def _products_of_linear_token_logprobs(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None,
    kept: torch.Tensor,
    temperature: float,
    chunk: int,
    hidden_wanted: bool,
    weight_wanted: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of hidden [T, H] and weight [V, H]; the weight's is summed over the chunks in the wide dtype."""
    kernels, wide, grad = backend_for(hidden, backend), accumulation_dtype(hidden.dtype), grad.contiguous()
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if hidden_wanted else nothing(hidden)
    grad_weight = None
    for rows in _chunks(hidden.shape[0], chunk, kept.shape[0]):
        logits = kept[rows] if rows.stop <= kept.shape[0] else kernels.linear(hidden[rows], weight, None, wide)
        kind = _part(temperature, temperatures, rows)
        if grad_entropy is None:
            grad_logits = kernels.token_logprobs_backward(logits, token_ids[rows], kind, grad[rows], hidden.dtype)
        else:
            grad_logits = kernels.token_logprobs_backward(logits, token_ids[rows], kind, grad[rows], wide)
            grad_logits = (grad_logits + _gradient_of_entropy(grad_entropy[rows], logits, kind)).to(hidden.dtype)
        del logits
        with torch.autocast(hidden.device.type, enabled=False):
            if hidden_wanted:
                grad_hidden[rows] = grad_logits @ weight
            if weight_wanted:
                part = grad_logits.t() @ hidden[rows]
                grad_weight = part if grad_weight is None else grad_weight.to(wide).add_(part)
    if not weight_wanted:
        return grad_hidden, nothing(hidden)
    return grad_hidden, torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)


def _products_of_linear_token_logprobs_fake(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor | None,
    kept: torch.Tensor,
    temperature: float,
    chunk: int,
    hidden_wanted: bool,
    weight_wanted: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        hidden.new_empty(hidden.shape) if hidden_wanted else nothing(hidden),
        hidden.new_empty(weight.shape) if weight_wanted else nothing(hidden),
    )


linear_token_logprobs = define(
    "linear_token_logprobs(Tensor hidden, Tensor weight, Tensor token_ids, Tensor? temperatures, float temperature, "
    "int chunk, int num_kept, str backend) -> (Tensor, Tensor, Tensor)",
    _linear_token_logprobs,
    _linear_token_logprobs_fake,
    _linear_token_logprobs_setup,
    _linear_token_logprobs_backward,
)
linear_token_logprobs_backward = define(
    "linear_token_logprobs_backward(Tensor grad, Tensor? grad_entropy, Tensor hidden, Tensor weight, "
    "Tensor token_ids, Tensor? temperatures, Tensor kept, float temperature, int chunk, bool hidden_wanted, "
    "bool weight_wanted, str backend) -> (Tensor, Tensor)",
    _products_of_linear_token_logprobs,
    _products_of_linear_token_logprobs_fake,
)
