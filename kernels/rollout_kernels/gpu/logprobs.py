"""Log-probabilities of given tokens and their gradient: chunk by chunk of a row, then one small program a row."""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout_kernels import checks
from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.numerics import round_to
from rollout_kernels.gpu.sizes import next_power_of_2
from rollout_kernels.gpu.softmax_row import (
    CHUNK,
    chunk_sums,
    exp_nonpositive,
    gaps,
    inverse_temperature,
    num_chunks,
    row_entropy,
    row_logprob,
    row_total,
    row_weighted,
    without_bad_numbers,
)

_CHUNK_WARPS = 8
_ROW_WARPS = 1
_BACKWARD_WARPS = 8

_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_ONE = tl.constexpr(float(1 << 44))


@triton.jit
def _chunk_kernel(
    logits,
    row_stride,
    temperatures,  # float32 [R]
    maxima,  # float32 [R, chunks]: of each chunk, NaN where it holds NaN or +inf
    totals,  # int64 [R, chunks]
    weighted,  # int64 [R, chunks]
    vocab_size,
    chunks,
    CHUNK: tl.constexpr,
):
    """Program (row, chunk) sums CHUNK logits."""
    program = tl.program_id(0)
    row, chunk = (program // chunks).to(tl.int64), program % chunks
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=-_INFINITY)
    x, bad = without_bad_numbers(x)
    maximum = tl.max(x, 0)
    inverse = inverse_temperature(tl.load(temperatures + row))
    total, weight = chunk_sums(x, maximum, inverse)
    slot = row * chunks + chunk
    tl.store(maxima + slot, tl.where(bad != 0, _NAN, maximum))
    tl.store(totals + slot, total)
    tl.store(weighted + slot, weight)


@triton.jit
def _load_maxima(maxima, slots, mask):
    """(maxima with -inf for NaN, the row's maximum, whether the row has a distribution)."""
    values = tl.load(maxima + slots, mask=mask, other=-_INFINITY)
    values, bad = without_bad_numbers(values)
    maximum = tl.max(values, 0)
    return values, maximum, (bad == 0) & (maximum > -_INFINITY)


@triton.jit
def _row_kernel(
    logits,
    row_stride,
    token_ids,
    temperatures,
    maxima,
    totals,
    weighted,
    logprobs,  # float32 [R]
    entropy,  # float32 [R]
    vocab_size,
    chunks,
    CHUNKS: tl.constexpr,
):
    """Program r puts the chunks of row r together. A token id or a temperature out of range gives NaN."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, CHUNKS)
    slots, mask = row * chunks + index, index < chunks
    values, maximum, good = _load_maxima(maxima, slots, mask)
    heat = tl.load(temperatures + row)
    token_id = tl.load(token_ids + row)
    good = good & (heat > 0.0) & (heat < _INFINITY) & (token_id >= 0) & (token_id < vocab_size)
    logprob = tl.full((), _NAN, tl.float32)
    spread = tl.full((), _NAN, tl.float32)
    if good:
        inverse = inverse_temperature(heat)
        sums = tl.load(totals + slots, mask=mask, other=0)
        total = row_total(values, sums, maximum, inverse)
        own = tl.load(weighted + slots, mask=mask, other=0)
        x = tl.load(logits + row * row_stride + token_id)
        logprob = row_logprob(x, maximum, inverse, total)
        spread = row_entropy(total, row_weighted(values, sums, own, maximum, inverse))
    tl.store(logprobs + row, logprob)
    tl.store(entropy + row, spread)


@triton.jit
def _backward_kernel(
    logits,
    row_stride,
    token_ids,
    temperatures,
    maxima,
    totals,
    grad,  # float32 [R]
    out,  # [R, V], float32, bfloat16 or float16
    vocab_size,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (row, chunk) writes grad / temperature * (onehot - p) of CHUNK logits."""
    program = tl.program_id(0)
    row, chunk = (program // chunks).to(tl.int64), program % chunks
    index = tl.arange(0, CHUNKS)
    slots, mask = row * chunks + index, index < chunks
    values, maximum, good = _load_maxima(maxima, slots, mask)
    inverse = inverse_temperature(tl.load(temperatures + row))
    sums = tl.load(totals + slots, mask=mask, other=0)
    total = (row_total(values, sums, maximum, inverse).to(tl.float64) / _ONE).to(tl.float32)
    slope = tl.load(grad + row) * inverse
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=-_INFINITY)
    weight = exp_nonpositive(gaps(x, maximum, inverse))
    weight = tl.where(ids == tl.load(token_ids + row), weight - total, weight)
    slopes = tl.where(good, weight * (-slope / total), _NAN)
    tl.store(out + row * vocab_size + ids, round_to(slopes, out.dtype.element_ty), mask=ids < vocab_size)


def _one_a_row(temperature: float | torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The temperatures, float32 [R], on the device of the logits."""
    if isinstance(temperature, torch.Tensor):
        return temperature
    return torch.full((logits.shape[0],), temperature, dtype=torch.float32, device=logits.device)


def _chunk_statistics(
    logits: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maxima float32, totals int64, weighted int64), each [R, chunks]."""
    rows, chunks = logits.shape[0], num_chunks(logits.shape[1])
    maxima = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    totals, weighted = torch.empty((2, rows, chunks), dtype=torch.int64, device=logits.device).unbind()
    _chunk_kernel[(rows * chunks,)](
        *(logits, logits.stride(0), temperatures, maxima, totals, weighted, logits.shape[1], chunks),
        CHUNK=CHUNK,
        num_warps=_CHUNK_WARPS,
        **PINNED,
    )
    return maxima, totals, weighted


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropy), float32 [R], of logits float32 [R, V] with rows apart; see `operations.token_logprobs`.

    Values that lie on the host are checked; on the device a token id or a temperature out of range gives NaN.
    """
    checks.logprob_values(logits.shape[1], token_ids, temperature)
    rows, chunks = logits.shape[0], num_chunks(logits.shape[1])
    logprobs, entropy = torch.empty((2, rows), dtype=torch.float32, device=logits.device).unbind()
    if rows:
        temperatures = _one_a_row(temperature, logits)
        maxima, totals, weighted = _chunk_statistics(logits, temperatures)
        _row_kernel[(rows,)](
            *(logits, logits.stride(0), token_ids, temperatures, maxima, totals, weighted),
            *(logprobs, entropy, logits.shape[1], chunks),
            CHUNKS=next_power_of_2(chunks),
            num_warps=_ROW_WARPS,
            **PINNED,
        )
    return logprobs, entropy


def token_logprobs_backward(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float | torch.Tensor,
    grad: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """grad[r] * d logprob[r] / d logits[r], [R, V] in `out_dtype`; NaN in rows that have no distribution."""
    rows, vocab_size = logits.shape
    chunks = num_chunks(vocab_size)
    out = torch.empty((rows, vocab_size), dtype=out_dtype, device=logits.device)
    if rows:
        temperatures = _one_a_row(temperature, logits)
        maxima, totals, _ = _chunk_statistics(logits, temperatures)
        _backward_kernel[(rows * chunks,)](
            *(logits, logits.stride(0), token_ids, temperatures, maxima, totals, grad, out),
            *(vocab_size, chunks),
            CHUNKS=next_power_of_2(chunks),
            CHUNK=CHUNK,
            num_warps=_BACKWARD_WARPS,
            **PINNED,
        )
    return out


def ahead_of_time_cases() -> list[KernelCase]:
    """Vocabularies of SmolLM2 and Llama 3; gradients for bfloat16, float16 and float32 logits."""
    logits = {"logits": "*fp32", "row_stride": "i32"}
    heat, ids = {"temperatures": "*fp32"}, {"token_ids": "*i64"}
    sums = {"maxima": "*fp32", "totals": "*i64", "weighted": "*i64"}
    sizes = {"vocab_size": "i32", "chunks": "i32"}
    aligned = ("logits", "row_stride", "temperatures", "maxima", "totals", "vocab_size")

    def case(name: str, kernel: Any, signature: dict[str, str], constants: dict[str, int], warps: int, *pointers: str):
        constexpr = dict.fromkeys(constants, "constexpr")
        return KernelCase(name, kernel, signature | constexpr, constants, warps, 3, False, (*aligned, *pointers))

    chunk = {"CHUNK": CHUNK}
    cases = [
        case("token_logprobs chunks", _chunk_kernel, logits | heat | sums | sizes, chunk, _CHUNK_WARPS, "weighted")
    ]
    for vocab_size in (49_152, 128_256):
        chunks, name = {"CHUNKS": next_power_of_2(num_chunks(vocab_size))}, f"V={vocab_size}"
        results = {"logprobs": "*fp32", "entropy": "*fp32"}
        signature = logits | ids | heat | sums | results | sizes
        pointers = ("token_ids", "weighted", *results)
        cases.append(case(f"token_logprobs rows {name}", _row_kernel, signature, chunks, _ROW_WARPS, *pointers))
        for dtype in ("bf16", "fp16", "fp32"):
            backward = {"maxima": "*fp32", "totals": "*i64", "grad": "*fp32", "out": f"*{dtype}"}
            signature = logits | ids | heat | backward | sizes
            pointers, name = ("token_ids", "grad", "out"), f"token_logprobs_backward {dtype} V={vocab_size}"
            cases.append(case(name, _backward_kernel, signature, chunks | chunk, _BACKWARD_WARPS, *pointers))
    return cases
