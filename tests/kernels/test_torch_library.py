"""The operations as torch sees them: `opcheck`, compilers, checkpointing, threads, autocast, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import rollout_kernels as rk
from rollout_kernels import autograd, autograd_linear, reference
from rollout_kernels.dispatch import backend_for
from tests.support.kernels import BACKENDS, assert_same_bits, randn, rows_apart

STARTS = torch.tensor([0, 5, 6, 9], dtype=torch.int32)
IDS = torch.tensor([0, 10, 3, 3, 7, 1, 2, 9, 5])
BF16, F32 = torch.bfloat16, torch.float32


def leaf(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return randn(*shape, dtype=dtype, seed=seed).requires_grad_()


def table(head_dim: int) -> torch.Tensor:
    angles = torch.arange(16.0)[:, None] * 0.3 ** torch.arange(head_dim // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def qkv(dtype: torch.dtype) -> list[torch.Tensor]:
    return [leaf(9, heads, 16, dtype=dtype, seed=heads + i) for i, heads in enumerate((4, 2, 2))]


def fused_parts(dtype: torch.dtype, rows: tuple[int, ...], depth: int) -> list[torch.Tensor]:
    """Leaves that are views of one storage, as `MergedLinear` has them."""
    storage = randn(sum(rows), depth, dtype=dtype, seed=8)
    return [part.detach().requires_grad_() for part in storage.split(rows)]


# name -> (operation, arguments before the backend) for a dtype
def cases(dtype: torch.dtype) -> dict[str, tuple[OpOverload, tuple[Any, ...]]]:
    x, weight, bias = leaf(9, 24, dtype=dtype, seed=1), leaf(11, 24, dtype=dtype, seed=2), leaf(11, dtype=dtype, seed=3)
    norm, wide = leaf(24, dtype=dtype, seed=4), leaf(9, 24, seed=5)
    q, k, v = qkv(dtype)
    temperatures = torch.linspace(0.5, 2, 9)
    positions = torch.arange(9)
    logits = leaf(9, 11, seed=6)
    return {
        "linear": (autograd_linear.linear, (x, weight, bias, dtype)),
        "linear to float32": (autograd_linear.linear, (x, weight, None, F32)),
        "merged_linear": (autograd_linear.merged_linear, (x, [weight, leaf(5, 24, dtype=dtype)], [], dtype)),
        "merged_linear, fused": (autograd_linear.merged_linear, (x, fused_parts(dtype, (7, 5), 24), [], dtype)),
        "normalise": (autograd.normalise, (wide, norm, 1e-5, dtype)),
        "rms_norm": (autograd.rms_norm, (x, norm, 1e-5, wide, dtype)),
        "rotate": (autograd.rotate, (q, k, positions, table(16), 1.0)),
        "silu_and_mul": (autograd.silu_and_mul, (x,)),
        "varlen_attention": (autograd.varlen_attention, (q, k, v, STARTS, 0.3, None, None)),
        "varlen_attention, window and cap": (autograd.varlen_attention, (q, k, v, STARTS, 0.3, 3, 2.0)),
        "token_logprobs": (autograd_linear.token_logprobs, (logits, IDS, temperatures, 1.0)),
        "linear_token_logprobs": (autograd_linear.linear_token_logprobs, (x, weight, IDS, None, 0.7, 4, 6)),
    }


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", cases(F32))
def test_opcheck(name: str, dtype: torch.dtype, backend: str) -> None:
    """Schemas, fakes, autograd registration, and eager against AOT dispatch, forward and backward."""
    operation, arguments = cases(dtype)[name]
    torch.library.opcheck(operation, (*arguments, backend), atol=1e-6, rtol=1e-6)


def test_opcheck_covers_every_differentiable_operation() -> None:
    covered = {operation.name() for operation, _ in cases(F32).values()}
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("rollout::")}
    assert defined == covered | {
        f"rollout::{name}_backward"
        for name in ("attention", "linear", "linear_token_logprobs", "merged_linear", "rms_norm", "silu_and_mul")
    } | {"rollout::token_logprobs_backward"}


def loss_of(
    x: torch.Tensor, weights: list[torch.Tensor], norm: torch.Tensor, head: torch.Tensor, shift: float = 0.0
) -> torch.Tensor:
    """A transformer block and a head on 9 tokens, by the public functions alone."""
    normed, residual = rk.rms_norm(x, norm, 1e-5)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in rk.merged_linear(normed, weights).split((64, 32, 32), dim=1))
    q, k = rk.rotary_embedding(q, k, torch.arange(9), table(16))
    attended = rk.varlen_attention(q, k, v, STARTS, 0.25).flatten(1)
    normed, residual = rk.rms_norm(attended.float(), norm, 1e-5, residual)
    hidden = rk.silu_and_mul(torch.cat([normed, normed + shift], dim=1))
    logprobs, _ = rk.linear_token_logprobs(hidden, head, IDS, 0.8)
    return logprobs.sum() + residual.square().mean() + rk.token_logprobs(rk.linear(hidden, head, None, F32), IDS).sum()


def block(dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    weights = fused_parts(dtype, (64, 32, 32), 64)
    return leaf(9, 64, seed=1), weights, leaf(64, dtype=dtype, seed=2), leaf(11, 64, dtype=dtype, seed=3)


def run(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The loss, and the gradients of everything."""
    x, weights, norm, head = block(dtype)
    loss = function(x, weights, norm, head)
    loss.backward()
    grads = [tensor.grad for tensor in (x, *weights, norm, head)]
    assert all(grad is not None and grad.isfinite().all() and grad.abs().max() > 0 for grad in grads)
    return [loss.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_compiled_graph_gives_the_same_loss_and_gradients(compiler: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    expected = run(loss_of, dtype)
    compiled = torch.compile(loss_of, fullgraph=True, backend=compiler)
    for result, wanted in zip(run(compiled, dtype), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-2 if dtype == BF16 else 1e-5, atol=1e-4)
    assert_same_bits(run(compiled, dtype)[0], expected[0])  # the forward's kernels are the very same


def test_a_graph_without_gradients_compiles_too() -> None:
    torch.compiler.reset()
    x, weights, norm, head = block(BF16)
    with torch.no_grad():
        expected = loss_of(x, weights, norm, head)
        assert_same_bits(torch.compile(loss_of, fullgraph=True, backend="eager")(x, weights, norm, head), expected)


def test_fake_tensors_and_export_learn_the_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(7, 24, dtype=BF16), torch.empty(11, 24, dtype=BF16)
        assert rk.linear(x, weight, None, F32).shape == (7, 11)
        assert rk.linear_token_logprobs(x, weight, torch.zeros(7, dtype=torch.int64))[0].shape == (7,)
        q, k, v = qkv(BF16)
        assert rk.varlen_attention(q, k, v, torch.empty(4, dtype=torch.int32), 0.3).shape == (9, 4, 16)

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rk.silu_and_mul(x)

    x = randn(6, 8, seed=1)
    exported = torch.export.export(Module(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("tokens", min=2)}})
    longer = randn(13, 8, seed=2)
    assert_same_bits(exported.module()(longer), rk.silu_and_mul(longer))


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backend that computed each call from now on, forward and backward."""
    calls: list[str] = []
    for backend, name in ((backend_for(randn(1)), "cpu"), (reference, "reference")):
        for function in ("silu_and_mul", "silu_and_mul_backward"):
            original = vars(type(backend)).get(function) or vars(backend)[function]
            bound = original.__get__(backend) if name == "cpu" else original

            def call(*args: Any, bound: Callable = bound, label: str = f"{name} {function}") -> Any:
                calls.append(label)
                return bound(*args)

            monkeypatch.setattr(backend, function, call)
    return calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_pass_uses_the_backend_of_the_forward(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of `use_backend`, inside of another one, and in a thread that knows of neither."""
    calls, other = recorded(monkeypatch), "reference" if backend == "cpu" else "cpu"
    x = leaf(3, 8)
    with rk.use_backend(backend):
        outputs = [rk.silu_and_mul(x).sum() for _ in range(3)]
    outputs[0].backward()
    with rk.use_backend(other):
        outputs[1].backward()
    thread = threading.Thread(target=outputs[2].backward)
    thread.start()
    thread.join()
    assert calls == [f"{backend} silu_and_mul"] * 3 + [f"{backend} silu_and_mul_backward"] * 3


def test_float64_is_the_reference_in_the_backward_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch)
    with rk.use_backend("cpu"):
        rk.silu_and_mul(leaf(3, 8, dtype=torch.float64)).sum().backward()
    assert calls == ["reference silu_and_mul", "reference silu_and_mul_backward"]


def test_checkpointing_gives_the_same_gradients_on_the_same_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(loss_of, BF16)
    again = run(lambda *args: checkpoint(loss_of, *args, use_reentrant=False), BF16)
    for result, wanted in zip(again, expected, strict=True):
        assert_same_bits(result, wanted)
    calls, x = recorded(monkeypatch), leaf(3, 8)
    with rk.use_backend("reference"):
        out = checkpoint(rk.silu_and_mul, x, use_reentrant=False, context_fn=rk.checkpoint_contexts)
    out.sum().backward()
    assert calls == ["reference silu_and_mul"] * 2 + ["reference silu_and_mul_backward"]


def test_a_tensor_that_is_used_twice_gets_the_sum() -> None:
    x = leaf(4, 8, seed=1)
    (rk.silu_and_mul(x) + 2 * rk.silu_and_mul(x)).sum().backward()
    once = leaf(4, 8, seed=1)
    rk.silu_and_mul(once).sum().backward()
    torch.testing.assert_close(x.grad, 3 * once.grad)  # type: ignore[operator]


@pytest.mark.parametrize("name", cases(F32))
def test_any_subset_of_the_gradients_may_be_wanted(name: str) -> None:
    """Each input alone gets the bits that it gets beside the others, and the others get none."""
    operation, arguments = cases(F32)[name]
    flat = [tensor for part in arguments for tensor in (part if isinstance(part, list) else [part])]
    leaves = [tensor for tensor in flat if isinstance(tensor, torch.Tensor) and tensor.requires_grad]

    def grads() -> list[torch.Tensor | None]:
        result = operation(*arguments, "auto")
        outputs = [out for out in (result if isinstance(result, tuple) else (result,)) if out.requires_grad]
        torch.autograd.backward(outputs, [randn(*out.shape, seed=i).to(out.dtype) for i, out in enumerate(outputs)])
        found = [tensor.grad for tensor in leaves]
        for tensor in leaves:
            tensor.grad = None
        return found

    together = grads()
    for chosen in leaves:
        for tensor in leaves:
            tensor.requires_grad_(tensor is chosen)
        for tensor, alone, beside in zip(leaves, grads(), together, strict=True):
            if tensor is chosen:
                assert alone is not None and beside is not None
                assert_same_bits(alone, beside)
            else:
                assert alone is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_apart_and_transposed_gradients_change_nothing(backend: str) -> None:
    x, weight, grad = randn(9, 24, dtype=BF16, seed=1), randn(12, 24, dtype=BF16, seed=2), randn(12, 9, dtype=BF16)
    found = []
    with rk.use_backend(backend):
        for inputs, output_grad in (
            ((x, weight), grad.t().contiguous()),
            ((rows_apart(x), rows_apart(weight)), grad.t()),
        ):
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            out = rk.silu_and_mul(rk.linear(leaves[0], leaves[1]).repeat(1, 2))
            out.backward(output_grad)
            found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for plain, apart in zip(*found, strict=True):
        assert_same_bits(apart, plain)


def test_merged_parts_have_the_bits_of_separate_ones() -> None:
    x = leaf(9, 24, dtype=BF16, seed=1)
    weights, biases = fused_parts(BF16, (8, 4, 4), 24), [leaf(n, dtype=BF16, seed=n) for n in (8, 4, 5)]
    biases[2] = leaf(4, dtype=BF16, seed=9)
    merged = rk.merged_linear(x, weights, biases)
    for part, weight, bias in zip(merged.split((8, 4, 4), dim=1), weights, biases, strict=True):
        assert_same_bits(part.detach(), rk.linear(x.detach(), weight.detach(), bias.detach()))
    apart = [weight.detach().clone().requires_grad_() for weight in weights]
    assert_same_bits(rk.merged_linear(x, apart, biases).detach(), merged.detach())
    merged.square().sum().backward()
    own = [weight.grad for weight in weights]
    assert all(grad is not None and grad.shape == weight.shape for grad, weight in zip(own, weights, strict=True))
    with pytest.raises(ValueError, match="3 weights and 2 biases"):
        rk.merged_linear(x, weights, biases[:2])
    with pytest.raises(ValueError, match=r"x has shape \(9, 24\): it must be \[T, 23\]"):
        rk.merged_linear(x, [weights[0], randn(3, 23, dtype=BF16)])


def test_merged_linear_gradcheck() -> None:
    x, double = leaf(4, 7, dtype=torch.float64, seed=1), torch.float64
    weights, biases = [leaf(n, 7, dtype=double, seed=n) for n in (3, 2)], [leaf(n, dtype=double) for n in (3, 2)]
    assert gradcheck(lambda x, *rest: rk.merged_linear(x, rest[:2], rest[2:]), (x, *weights, *biases))
    assert gradcheck(lambda x, *rest: rk.merged_linear(x, rest), (x, *fused_parts(double, (3, 2), 7)))


def test_autocast_changes_neither_outputs_nor_gradients() -> None:
    """Inside of autocast torch's own products would be in bfloat16, those of the backward pass too."""
    expected = run(loss_of, F32)
    with torch.autocast("cpu", dtype=BF16):
        for result, wanted in zip(run(loss_of, F32), expected, strict=True):
            assert_same_bits(result, wanted)


def test_second_derivatives_and_functional_gradients_are_refused_by_name() -> None:
    x = leaf(3, 8)
    (grad,) = torch.autograd.grad(rk.silu_and_mul(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rollout::silu_and_mul_backward has no gradient"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
        torch.func.grad(lambda x: rk.silu_and_mul(x).sum())(x.detach())


def test_vmap_computes_one_after_the_other() -> None:
    x = randn(2, 3, 8)
    assert_same_bits(torch.func.vmap(rk.silu_and_mul)(x), torch.stack([rk.silu_and_mul(part) for part in x]))
