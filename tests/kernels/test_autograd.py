"""Gradients: gradcheck in float64, float32 and bfloat16 against float64, and forwards with the bits of inference."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch.autograd import gradcheck

import rollout_kernels as rk
from tests.support.kernels import BACKENDS, assert_close, assert_same_bits, draw_arguments, num_threads, randn

TABLE = torch.cat([f(torch.arange(64.0)[:, None] * 0.3 ** torch.arange(40)) for f in (torch.cos, torch.sin)], dim=-1)


def leaf(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return randn(*shape, dtype=torch.float64, seed=seed, scale=scale).requires_grad_()


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_linear_gradcheck() -> None:
    assert gradcheck(rk.linear, (leaf(4, 7, seed=1), leaf(5, 7, seed=2), leaf(5, seed=3)))
    assert gradcheck(rk.linear, (leaf(4, 7, seed=1), leaf(5, 7, seed=2)))


def test_rms_norm_gradcheck() -> None:
    x, weight, residual = leaf(3, 9, seed=1), leaf(9, seed=2), leaf(3, 9, seed=3)
    assert gradcheck(lambda x, w, r: rk.rms_norm(x, w, 1e-3, r), (x, weight, residual))
    assert gradcheck(lambda x, w: rk.rms_norm(x, w, 1e-3), (x, weight))
    assert gradcheck(lambda x, w, r: rk.rms_norm(x, w, 1e-3, r)[0], (x, weight, residual))
    assert gradcheck(lambda x, r: rk.rms_norm(x, weight.detach(), 1e-3, r)[1], (x, residual))


def test_rotary_gradcheck() -> None:
    positions = torch.tensor([0, 5, 63])
    table = torch.cat((TABLE[:, :5], TABLE[:, 40:45]), dim=-1).double()
    q, k = leaf(3, 4, 10, seed=1), leaf(3, 2, 10, seed=2)
    assert gradcheck(lambda q, k: rk.rotary_embedding(q, k, positions, table), (q, k))


def test_silu_and_mul_gradcheck() -> None:
    assert gradcheck(rk.silu_and_mul, (leaf(4, 12, seed=1, scale=2.0),))


def test_varlen_attention_gradcheck() -> None:
    q, k, v = leaf(9, 4, 6, seed=1), leaf(9, 2, 6, seed=2), leaf(9, 2, 6, seed=3)
    assert gradcheck(lambda q, k, v: rk.varlen_attention(q, k, v, starts(5, 1, 3), 0.4), (q, k, v))


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (3, None), (None, 0.7), (2, 1.5), (9, None)])
def test_varlen_attention_gradcheck_under_windows_and_soft_caps(window: int | None, soft_cap: float | None) -> None:
    q, k, v = leaf(9, 4, 6, seed=1), leaf(9, 2, 6, seed=2), leaf(9, 2, 6, seed=3)
    assert gradcheck(lambda q, k, v: rk.varlen_attention(q, k, v, starts(5, 1, 3), 0.4, window, soft_cap), (q, k, v))


def test_token_logprobs_gradcheck() -> None:
    ids = torch.tensor([0, 10, 3])
    assert gradcheck(lambda x: rk.token_logprobs(x, ids, 0.5), (leaf(3, 11, seed=1),))


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("num_kept", [0, 1, 4, 100])
def test_linear_token_logprobs_gradcheck(chunk: int, num_kept: int) -> None:
    ids, temperature = torch.tensor([0, 10, 3, 3, 7]), torch.tensor([0.5, 1.0, 2.0, 1.0, 1.0])
    hidden, weight = leaf(5, 4, seed=1), leaf(11, 4, seed=2)
    arguments = (ids, temperature, chunk, num_kept * 4 * 11)
    assert gradcheck(lambda h, w: rk.linear_token_logprobs(h, w, *arguments), (hidden, weight))  # entropies, too
    assert gradcheck(lambda h, w: rk.linear_token_logprobs(h, w, *arguments)[1], (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_entropy_has_the_gradient_of_the_distribution_whose_entropy_it_is(dtype: torch.dtype) -> None:
    """case TR-06: the tempered one."""
    hidden, weight = randn(6, 8, dtype=dtype, seed=1), randn(31, 8, dtype=dtype, seed=2)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    rk.linear_token_logprobs(hidden, weight, torch.arange(6), 0.7)[1].sum().backward()
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = (wide[0] @ wide[1].t() / 0.7).log_softmax(1)
    (-(expected.exp() * expected).sum()).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, theirs in zip(leaves, wide, strict=True):
        torch.testing.assert_close(cast(torch.Tensor, ours.grad).double(), theirs.grad, rtol=tolerance, atol=tolerance)


def test_a_gradient_of_the_entropy_changes_no_bit_of_that_of_the_logprobs() -> None:
    def gradient(with_entropy: bool) -> torch.Tensor:
        hidden, weight = randn(6, 8, seed=1).requires_grad_(), randn(31, 8, seed=2)
        logprobs, entropy = rk.linear_token_logprobs(hidden, weight, torch.arange(6), 0.7)
        (logprobs.sum() + 0.0 * entropy.sum() if with_entropy else logprobs.sum()).backward()
        assert hidden.grad is not None
        return hidden.grad

    assert_same_bits(gradient(True), gradient(False))


def gradients(
    run: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], inputs: list[torch.Tensor], grad_seed: int = 77
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and gradients of the inputs for fixed random gradients of the outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = run(*leaves)
    outputs = [out for out in (result if isinstance(result, tuple) else (result,)) if out.requires_grad]
    grads = [randn(*out.shape, seed=grad_seed + i).bfloat16().to(out.dtype) for i, out in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)
    collected = []
    for x in leaves:
        assert x.grad is not None
        assert x.grad.dtype == x.dtype
        collected.append(x.grad)
    return [out.detach() for out in outputs], collected


IDS = torch.randint(0, 131, (70,), generator=torch.Generator().manual_seed(0))
QUERY_START = starts(40, 1, 29)


def rotary(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    table = TABLE.double() if q.dtype == torch.float64 else TABLE
    return rk.rotary_embedding(q, k, torch.arange(70) % 64, table)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return rk.varlen_attention(q, k, v, QUERY_START, 0.3)


def capped_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return rk.varlen_attention(q, k, v, QUERY_START, 0.3, window=13, soft_cap=2.0)


# name -> (function, shapes of its inputs)
OPERATIONS: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
    "linear": (rk.linear, [(70, 63), (131, 63), (131,)]),
    "linear to float32": (lambda x, w: rk.linear(x, w, out_dtype=_wide(x)), [(70, 63), (131, 63)]),
    "rms_norm": (lambda x, w, r: rk.rms_norm(x, w, 1e-5, r), [(70, 63), (63,), (70, 63)]),
    "first rms_norm": (lambda x, w: rk.rms_norm(x, w, 1e-5), [(70, 80), (80,)]),
    "rotary": (rotary, [(70, 7, 80), (70, 1, 80)]),
    "silu_and_mul": (rk.silu_and_mul, [(70, 150)]),
    "attention": (attention, [(70, 7, 80), (70, 1, 80), (70, 1, 80)]),
    "grouped attention": (attention, [(70, 9, 16), (70, 3, 16), (70, 3, 16)]),
    "attention under a window and a cap": (capped_attention, [(70, 4, 20), (70, 2, 20), (70, 2, 20)]),
    "linear_token_logprobs": (
        lambda h, w: rk.linear_token_logprobs(h, w, IDS, 0.8, chunk=32)[0],
        [(70, 63), (131, 63)],
    ),
}


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _inputs(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs of unit scale; the residual stream of `rms_norm` is wide."""
    shapes = OPERATIONS[name][1]
    tensors = [randn(*shape, dtype=dtype, seed=i, scale=0.5) for i, shape in enumerate(shapes)]
    if name == "rms_norm":
        tensors[2] = tensors[2].to(_wide(tensors[2]))
    return tensors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_float64(backend: str, name: str, dtype: torch.dtype) -> None:
    run = OPERATIONS[name][0]
    inputs = _inputs(name, dtype)
    _, expected = gradients(run, [x.double() for x in inputs])
    with rk.use_backend(backend):
        _, actual = gradients(run, inputs)
    for result, exact in zip(actual, expected, strict=True):
        # In bfloat16 the backward of attention starts from outputs that were rounded.
        assert_close(result, exact, 1e-5 if dtype == torch.float32 else 4e-2 if "attention" in name else 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_has_the_bits_of_inference(backend: str, name: str, dtype: torch.dtype) -> None:
    run, inputs = OPERATIONS[name][0], _inputs(name, dtype)
    with rk.use_backend(backend):
        outputs, _ = gradients(run, inputs)
        with torch.no_grad():
            plain = run(*(x.clone() for x in inputs))
    for out, expected in zip(outputs, plain if isinstance(plain, tuple) else (plain,), strict=True):
        assert_same_bits(out, expected)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "linear" not in name])
def test_gradients_do_not_depend_on_the_number_of_threads(name: str) -> None:
    """Of our own kernels, that is: the matrix products of a linear's backward pass are torch's."""
    results = []
    for count in (1, 2):
        with num_threads(count):
            results.append(gradients(OPERATIONS[name][0], _inputs(name, torch.bfloat16))[1])
    for one, two in zip(*results, strict=True):
        assert_same_bits(two, one)


@pytest.mark.parametrize("lengths", [(300,), (64, 65, 47, 48, 49), (1, 2, 100)])
def test_long_attention_gradients_equal_float64(lengths: tuple[int, ...]) -> None:
    total = sum(lengths)
    inputs = [randn(total, heads, 64, seed=heads + i) for i, heads in enumerate((6, 2, 2))]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rk.varlen_attention(q, k, v, starts(*lengths), 0.125)

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            queries, keys, values = (x.transpose(0, 1) for x in part)
            out = torch.nn.functional.scaled_dot_product_attention(
                queries, keys.repeat_interleave(3, 0), values.repeat_interleave(3, 0), is_causal=True, scale=0.125
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)

    expected_out, expected = gradients(exact, [x.double() for x in inputs])
    out, actual = gradients(run, inputs)
    assert_close(out[0], expected_out[0], 1e-5)
    for result, wanted in zip(actual, expected, strict=True):
        assert_close(result, wanted, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap"), [(2, None), (50, None), (64, 3.0), (131, 0.7), (None, 3.0)])
def test_long_attention_gradients_under_windows_and_soft_caps_equal_float64(
    window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    """Against torch's own gradients of the dense formula."""
    lengths = (201, 64, 3)
    total = sum(lengths)
    inputs = [randn(total, heads, 40, dtype=dtype, seed=heads + i) for i, heads in enumerate((6, 2, 2))]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rk.varlen_attention(q, k, v, starts(*lengths), 0.25, window, soft_cap)

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        behind = torch.arange(total)[:, None] - torch.arange(total)  # of a query, how far the key is
        seen = (sequence[:, None] == sequence) & (behind >= 0) & (behind < (total if window is None else window))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(3, 1)) * 0.25
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", probabilities, v.repeat_interleave(3, 1))

    expected_out, expected = gradients(exact, [x.double() for x in inputs])
    out, actual = gradients(run, inputs)
    assert_close(out[0], expected_out[0], 1e-5 if dtype == torch.float32 else 1e-2)
    for result, wanted in zip(actual, expected, strict=True):
        assert_close(result, wanted, 1e-5 if dtype == torch.float32 else 6e-2)


@pytest.mark.parametrize("head_dim", [20, 64, 80])
@pytest.mark.parametrize("lengths", [(150,), (64, 65, 47), (1, 2, 100, 3)])
def test_bfloat16_attention_gradients_are_within_a_rounding_of_float64(lengths: tuple[int, ...], head_dim: int) -> None:
    """The root mean square of the error is at most 2^-8 of that of the gradient; rounding the results alone is 2^-9."""
    inputs = [randn(sum(lengths), heads, head_dim, dtype=torch.bfloat16, seed=heads) for heads in (6, 2, 2)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rk.varlen_attention(q, k, v, starts(*lengths), head_dim**-0.5)

    _, expected = gradients(run, [x.double() for x in inputs])
    _, actual = gradients(run, inputs)
    for result, exact in zip(actual, expected, strict=True):
        error = (result.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert error < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_gradients_of_a_sequence_do_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    """Even beside a sequence that is not a number anywhere."""
    lengths = (37, 100, 65)
    inputs = [randn(sum(lengths), heads, 24, dtype=dtype, seed=heads) for heads in (4, 2, 2)]
    for x in inputs:
        x[:37] = torch.nan
    _, together = gradients(lambda q, k, v: rk.varlen_attention(q, k, v, starts(*lengths), 0.2), inputs)
    grad = randn(sum(lengths), 4, 24, seed=77).bfloat16().to(dtype)  # what `gradients` hands back
    alone = [x[37:137].clone().requires_grad_() for x in inputs]
    rk.varlen_attention(alone[0], alone[1], alone[2], starts(100), 0.2).backward(grad[37:137])
    for tensor, beside in zip(alone, together, strict=True):
        assert tensor.grad is not None
        assert beside[:37].isnan().all()
        assert_same_bits(tensor.grad, beside[37:137])


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_takes_views_of_a_fused_projection(backend: str) -> None:
    """q, k and v with rows apart give the same output, and gradients flow back into the fused tensor."""
    sizes = [8 * 16, 2 * 16, 2 * 16]

    def fused(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(1, (-1, 16)) for part in qkv.split(sizes, dim=1))
        assert not q.is_contiguous()
        return rk.varlen_attention(q, k, v, QUERY_START, 0.3)

    def separate(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(1, (-1, 16)).contiguous() for part in qkv.split(sizes, dim=1))
        return rk.varlen_attention(q, k, v, QUERY_START, 0.3)

    with rk.use_backend(backend):
        (out,), (grad,) = gradients(fused, [randn(70, sum(sizes), seed=1)])
        (expected_out,), (expected_grad,) = gradients(separate, [randn(70, sum(sizes), seed=1)])
    assert_same_bits(out, expected_out)
    assert_same_bits(grad, expected_grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_of_the_trainer_are_those_of_the_sampler(backend: str) -> None:
    """case TR-06, at the level of kernels"""
    hidden, weight = randn(20, 64, dtype=torch.bfloat16, seed=1), randn(131, 64, dtype=torch.bfloat16, seed=2)
    for temperature in (1.0, 0.7):
        with rk.use_backend(backend):
            logits = rk.linear(hidden, weight, out_dtype=torch.float32)
            drawn = rk.sample(logits, **draw_arguments(20, temperature=temperature))
            for chunk in (1, 7, 512):
                logprobs, entropy = rk.linear_token_logprobs(
                    hidden.clone().requires_grad_(), weight, drawn.token_ids, temperature, chunk
                )
                assert_same_bits(logprobs.detach(), drawn.sampled_logprobs)
                assert_same_bits(entropy.detach(), drawn.entropy)
                assert logprobs.requires_grad


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    hidden, weight = randn(6, 8, seed=1), randn(11, 8, seed=2)
    ids = torch.arange(6)
    rk.linear_token_logprobs(hidden, weight.requires_grad_(), ids)[0].sum().backward()
    assert hidden.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        assert not rk.linear(hidden, weight).requires_grad
    assert rk.linear_token_logprobs(hidden[:0], weight, ids[:0])[0].shape == (0,)
    with pytest.raises(ValueError, match="chunk=0 is not valid"):
        rk.linear_token_logprobs(hidden, weight, ids, chunk=0)
    with pytest.raises(ValueError, match="kept_bytes=-1 is not valid"):
        rk.linear_token_logprobs(hidden, weight, ids, kept_bytes=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeping_logits_changes_no_bit_of_the_gradients(dtype: torch.dtype) -> None:
    ids = torch.arange(50)

    def gradients_with(kept_bytes: int) -> list[torch.Tensor]:
        hidden, weight = randn(50, 24, dtype=dtype, seed=1), randn(300, 24, dtype=dtype, seed=2)
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        rk.linear_token_logprobs(hidden, weight, ids, 0.7, 16, kept_bytes)[0].sum().backward()
        return [cast(torch.Tensor, leaf.grad) for leaf in leaves]

    for one, other in zip(gradients_with(0), gradients_with(32 * 4 * 300), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("num_kept", "forward", "backward"),
    [
        (0, [16, 16, 16, 2], [16, 16, 16, 2]),
        (32, [16, 16, 16, 2], [16, 2]),
        (20, [16, 4, 16, 14], [16, 14]),
        (99, [16, 16, 16, 2], []),
    ],
)
def test_logits_are_made_in_chunks_and_again_where_they_were_not_kept(
    monkeypatch: pytest.MonkeyPatch, num_kept: int, forward: list[int], backward: list[int]
) -> None:
    from rollout_kernels.dispatch import backend_for

    hidden, weight = randn(50, 8, seed=1).requires_grad_(), randn(300, 8, seed=2)
    backend, rows = backend_for(hidden), []
    original = backend.linear
    monkeypatch.setattr(backend, "linear", lambda x, *rest: rows.append(x.shape[0]) or original(x, *rest))
    kept_bytes = num_kept * 4 * 300
    logprobs, _ = rk.linear_token_logprobs(hidden, weight, torch.arange(50), chunk=16, kept_bytes=kept_bytes)
    assert rows == forward
    logprobs.sum().backward()
    assert rows == forward + backward
    rows.clear()
    with torch.no_grad():
        rk.linear_token_logprobs(hidden, weight, torch.arange(50), chunk=16, kept_bytes=kept_bytes)
    assert rows == [16, 16, 16, 2]
