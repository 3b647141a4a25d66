"""The 64-bit fingerprint of a tensor's bytes, equal bit for bit to `reference/fingerprint.py`, which defines it.

One warp hashes a chunk of 64 KiB, a lane of the hash to a thread; then every chunk's 64 numbers are folded, a chunk
to a thread; then the chunks' hashes, by one thread, since their order counts.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.sizes import ceil_div

_CHUNK = 1 << 16  # bytes
_CHUNKS = 32  # folded by a program: few, so that a model's thousands of chunks fill the device

CHUNK = tl.constexpr(_CHUNK)
STRIPE = tl.constexpr(256)  # bytes: a 64-bit word for each of 32 lanes
LANES = tl.constexpr(32)
AHEAD = tl.constexpr(8)  # stripes whose words a thread asks for at once
MULTIPLIER = tl.constexpr(0xD6E8FEB86659FD93)
FOLD = tl.constexpr(0xA0761D6478BD642F)
SEED = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _word_pointers(data, offsets, row_bytes, row_stride, CONTIGUOUS: tl.constexpr):
    """Addresses of the 64-bit words at these byte offsets of the rows laid end to end."""
    if not CONTIGUOUS:
        offsets = offsets // row_bytes * row_stride + offsets % row_bytes
    return (data + offsets).to(tl.pointer_type(tl.uint64))


@triton.jit
def _absorb(state, total, words):
    state ^= words
    state = ((state << 23) | (state >> 41)) * MULTIPLIER
    return state, total + state


@triton.jit
def _hash_chunks_kernel(
    data,  # bytes; its address, row_stride and row_bytes (unless CONTIGUOUS) are multiples of 8
    lanes_out,  # [2 * LANES, chunks] uint64: the states, then the sums
    row_bytes,
    row_stride,
    num_bytes,
    num_chunks,
    CONTIGUOUS: tl.constexpr,
):
    chunk = tl.program_id(0)
    start = chunk.to(tl.int64) * CHUNK
    size = tl.minimum(num_bytes - start, CHUNK).to(tl.int32)
    lanes = tl.arange(0, LANES)
    state = (lanes + 1).to(tl.uint64) * SEED
    total = state ^ state
    offsets = start + lanes * 8
    whole_groups = size // (AHEAD * STRIPE)
    for _ in range(whole_groups):
        for stripe in tl.static_range(AHEAD):
            pointers = _word_pointers(data, offsets + stripe * STRIPE, row_bytes, row_stride, CONTIGUOUS)
            state, total = _absorb(state, total, tl.load(pointers))
        offsets += AHEAD * STRIPE
    for _ in range(whole_groups * AHEAD, tl.cdiv(size, STRIPE)):
        whole = offsets + 8 <= num_bytes
        words = tl.load(_word_pointers(data, offsets, row_bytes, row_stride, CONTIGUOUS), mask=whole, other=0)
        if CONTIGUOUS:  # the last word may be cut short; where rows are apart, they are made of whole words
            for byte in tl.static_range(8):
                cut = (offsets + byte < num_bytes) & (offsets + 8 > num_bytes)
                words |= tl.load(data + offsets + byte, mask=cut, other=0).to(tl.uint64) << (8 * byte)
        state, total = _absorb(state, total, words)
        offsets += STRIPE
    at = lanes_out + lanes.to(tl.int64) * num_chunks + chunk
    tl.store(at, state)
    tl.store(at + LANES * num_chunks.to(tl.int64), total)


@triton.jit
def _fold(h, value):
    h = (h ^ value) * FOLD
    return h ^ (h >> 29)


@triton.jit
def _fold_chunks_kernel(
    lanes_in,  # [2 * LANES, chunks] uint64
    hashes,  # [chunks] uint64
    num_chunks,
    CHUNKS: tl.constexpr,
):
    chunks = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    mask = chunks < num_chunks
    h = tl.full((CHUNKS,), SEED, tl.uint64)
    at = lanes_in + chunks
    for _ in tl.range(2 * LANES):
        h = _fold(h, tl.load(at, mask=mask, other=0))
        at += num_chunks
    tl.store(hashes + chunks, h, mask=mask)


@triton.jit
def _fold_hashes_kernel(
    hashes,  # [chunks] uint64
    out,  # [1] uint64
    num_chunks,
    num_bytes,
):
    h = tl.full((1,), SEED, tl.uint64)
    one = tl.arange(0, 1)
    for chunk in range(num_chunks):
        h = _fold(h, tl.load(hashes + chunk + one))
    h = _fold(h, (num_bytes + one.to(tl.int64)).to(tl.uint64))
    tl.store(out + one, h ^ (h >> 32))


def _as_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int, bool]:
    """(bytes, bytes of a row, bytes from row to row, whether rows touch), copied where words would be split."""
    size = tensor.element_size()
    if tensor.dim() == 2 and not tensor.is_contiguous():
        row_bytes, row_stride = tensor.shape[1] * size, tensor.stride(0) * size
        if tensor.stride(1) == 1 and not (row_bytes | row_stride | tensor.data_ptr()) % 8:
            return tensor.view(torch.uint8), row_bytes, row_stride, False
    if not tensor.is_contiguous() or tensor.data_ptr() % 8:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    num_bytes = tensor.numel() * size
    return tensor.view(-1).view(torch.uint8), num_bytes, num_bytes, True


def fingerprint(tensor: torch.Tensor) -> int:
    """64 bits (0 to 2^64 - 1) of a tensor's bytes in logical order. Waits for the device."""
    num_bytes = tensor.numel() * tensor.element_size()
    num_chunks = ceil_div(num_bytes, _CHUNK)
    device = tensor.device
    hashes = torch.empty(max(num_chunks, 1), dtype=torch.uint64, device=device)
    out = torch.empty(1, dtype=torch.uint64, device=device)
    if num_chunks:
        data, row_bytes, row_stride, contiguous = _as_rows(tensor)
        lanes = torch.empty((64, num_chunks), dtype=torch.uint64, device=device)
        _hash_chunks_kernel[(num_chunks,)](
            *(data, lanes, row_bytes, row_stride, num_bytes, num_chunks),
            CONTIGUOUS=contiguous,
            num_warps=1,
            **PINNED,
        )
        _fold_chunks_kernel[(ceil_div(num_chunks, _CHUNKS),)](
            *(lanes, hashes, num_chunks),
            CHUNKS=_CHUNKS,
            num_warps=1,
            **PINNED,
        )
    _fold_hashes_kernel[(1,)](
        *(hashes, out, num_chunks, num_bytes),
        num_warps=1,
        **PINNED,
    )
    return int(out.item())


def copy_and_fingerprint(destination: torch.Tensor, source: torch.Tensor) -> int:
    """The copy and a second pass over what it wrote, which the device's memory bandwidth makes cheap."""
    destination.copy_(source)
    return fingerprint(destination if destination.dim() <= 2 else destination.flatten(1))


def ahead_of_time_cases() -> list[KernelCase]:
    """Whole tensors and views with rows apart, then the two folds."""
    sizes = {"row_bytes": "i64", "row_stride": "i64", "num_bytes": "i64", "num_chunks": "i32"}
    cases = [
        KernelCase(
            name=f"fingerprint of {'a whole tensor' if contiguous else 'rows apart'}",
            kernel=_hash_chunks_kernel,
            signature={"data": "*u8", "lanes_out": "*u64", **sizes, "CONTIGUOUS": "constexpr"},
            constants={"CONTIGUOUS": contiguous},
            num_warps=1,
            num_stages=3,
            divisible_by_16=("data", "lanes_out"),
        )
        for contiguous in (True, False)
    ]
    chunks = KernelCase(
        name="fingerprint, folding chunks",
        kernel=_fold_chunks_kernel,
        signature={"lanes_in": "*u64", "hashes": "*u64", "num_chunks": "i32", "CHUNKS": "constexpr"},
        constants={"CHUNKS": _CHUNKS},
        num_warps=1,
        num_stages=3,
        divisible_by_16=("lanes_in", "hashes"),
    )
    hashes = KernelCase(
        name="fingerprint, folding hashes",
        kernel=_fold_hashes_kernel,
        signature={"hashes": "*u64", "out": "*u64", "num_chunks": "i32", "num_bytes": "i64"},
        constants={},
        num_warps=1,
        num_stages=3,
        divisible_by_16=("hashes", "out"),
    )
    return [*cases, chunks, hashes]
