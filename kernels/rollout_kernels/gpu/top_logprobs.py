"""The largest log-probabilities of rows of logits, and those of given tokens: chunks first, then one program a row.

The first kernel sums each chunk as `sample` does, counts the rank, and takes the chunk's largest logits one after
another: as integers that hold a logit and its id, so that no two are equal and the largest is the next in order. The
second takes the largest of those in the same way. Both loops have as many steps as log-probabilities are wanted, so
above `MAX_SELECTED` torch sorts the rows instead, which is as exact: a stable sort has one result.
"""

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
from rollout_kernels.gpu.filters import order_key
from rollout_kernels.gpu.sizes import next_power_of_2
from rollout_kernels.gpu.softmax_row import (
    CHUNK,
    chunk_total,
    num_chunks,
    row_logprob,
    row_of_draw,
    row_total,
    without_bad_numbers,
)
from rollout_kernels.results import TopLogprobsResult

MAX_SELECTED = 64  # more than this many of a row are sorted

_CHUNK_WARPS = 8
_ROW_WARPS = 4
_LIST_BLOCK = 128  # chosen and sorted ids looked at side by side
_SORTED_LOGITS = 1 << 24  # sorted at once

_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_LEAST = tl.constexpr(-(2**63))  # below every key
_GREATEST = tl.constexpr(2**63 - 1)


@triton.jit(do_not_specialize=["num_rows", "vocab_size", "chunks", "num_selected"])
def _chunk_kernel(
    logits,
    row_stride,
    row_index,  # int64 [D], read where HAS_ROW_INDEX
    token_ids,  # int64 [D]
    maxima,  # float32 [D, chunks], NaN where the chunk holds NaN or +inf
    totals,  # int64 [D, chunks]
    above,  # int32 [D, chunks]: logits larger than the given token's
    keys,  # int64 [D, chunks, num_selected]: the largest of the chunk, in order
    num_rows,
    vocab_size,
    chunks,
    num_selected,
    HAS_ROW_INDEX: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (draw, chunk) looks at CHUNK logits."""
    program = tl.program_id(0)
    draw, chunk = (program // chunks).to(tl.int64), program % chunks
    row_number, _ = row_of_draw(row_index, draw, num_rows, HAS_ROW_INDEX)
    row = logits + row_number * row_stride
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x, bad = without_bad_numbers(tl.load(row + ids, mask=ids < vocab_size, other=-_INFINITY))
    maximum = tl.max(x, 0)
    slot = draw * chunks + chunk
    tl.store(maxima + slot, tl.where(bad != 0, _NAN, maximum))
    tl.store(totals + slot, chunk_total(x, maximum, tl.full((), 1.0, tl.float32)))
    token = tl.load(token_ids + draw)
    value = tl.load(row + token, mask=(token >= 0) & (token < vocab_size), other=_INFINITY)
    tl.store(above + slot, tl.sum((x > value).to(tl.int32), 0))
    key = (order_key(x).to(tl.int64) << 32) | (2147483647 - ids).to(tl.int64)
    key = tl.where(ids < vocab_size, key, _LEAST)
    last = tl.full((), _GREATEST, tl.int64)
    for place in range(num_selected):
        last = tl.max(tl.where(key < last, key, _LEAST), 0)
        tl.store(keys + slot * num_selected + place, last)


@triton.jit(do_not_specialize=["num_rows", "vocab_size", "chunks", "num_top", "num_chosen"])
def _row_kernel(
    logits,
    row_stride,
    row_index,
    token_ids,
    chosen_start,  # int32 [D + 1], read where HAS_CHOSEN
    chosen_ids,  # int32 [C]
    maxima,
    totals,
    above,
    keys,
    top_ids,  # int32 [D, num_top]; sorted already where SORTED
    top_logprobs,  # float32 [D, num_top]
    logprobs,  # float32 [D]
    ranks,  # int32 [D]
    chosen_logprobs,  # float32 [C]
    num_rows,
    vocab_size,
    chunks,
    num_top,
    num_chosen,
    HAS_ROW_INDEX: tl.constexpr,
    HAS_CHOSEN: tl.constexpr,
    SORTED: tl.constexpr,
    CHUNKS: tl.constexpr,  # powers of two that the chunks of a row, and the keys of all of them, fit into
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program d puts the chunks of draw d together. What is out of range gives NaN, and rank 0."""
    draw = tl.program_id(0).to(tl.int64)
    row_number, good = row_of_draw(row_index, draw, num_rows, HAS_ROW_INDEX)
    row = logits + row_number * row_stride
    index = tl.arange(0, CHUNKS)
    slots, mask = draw * chunks + index, index < chunks
    values, bad = without_bad_numbers(tl.load(maxima + slots, mask=mask, other=-_INFINITY))
    maximum = tl.max(values, 0)
    good = good & (bad == 0) & (maximum > -_INFINITY)
    maximum = tl.where(good, maximum, 0.0)
    one = tl.full((), 1.0, tl.float32)
    sums = tl.load(totals + slots, mask=mask, other=0)
    total = tl.maximum(row_total(values, sums, maximum, one), 1)

    token = tl.load(token_ids + draw)
    there = good & (token >= 0) & (token < vocab_size)
    logprob = row_logprob(tl.load(row + token, mask=there, other=0.0), maximum, one, total)
    tl.store(logprobs + draw, tl.where(there, logprob, _NAN))
    rank = 1 + tl.sum(tl.load(above + slots, mask=mask, other=0), 0)
    tl.store(ranks + draw, tl.where(there, rank, 0))

    if SORTED:
        for start in range(0, num_top, BLOCK):
            places = start + tl.arange(0, BLOCK)
            own = draw * num_top + places
            ids = tl.load(top_ids + own, mask=places < num_top, other=0)
            found = row_logprob(tl.load(row + ids), maximum, one, total)
            tl.store(top_ids + own, tl.where(good, ids, places), mask=places < num_top)
            tl.store(top_logprobs + own, tl.where(good, found, _NAN), mask=places < num_top)
    else:
        width = chunks * num_top
        offsets = tl.arange(0, KEYS)
        key = tl.load(keys + draw * width + offsets, mask=offsets < width, other=_LEAST)
        last = tl.full((), _GREATEST, tl.int64)
        for place in range(num_top):
            last = tl.max(tl.where(key < last, key, _LEAST), 0)
            id = 2147483647 - (last & 0xFFFFFFFF).to(tl.int32)
            found = row_logprob(tl.load(row + id), maximum, one, total)
            tl.store(top_ids + draw * num_top + place, tl.where(good, id, place))
            tl.store(top_logprobs + draw * num_top + place, tl.where(good, found, _NAN))

    if HAS_CHOSEN:
        first = tl.maximum(tl.load(chosen_start + draw), 0)
        end = tl.minimum(tl.load(chosen_start + draw + 1), num_chosen)
        for start in range(first, end, BLOCK):
            places = start + tl.arange(0, BLOCK)
            ids = tl.load(chosen_ids + places, mask=places < end, other=-1)
            inside = (ids >= 0) & (ids < vocab_size) & good
            found = row_logprob(tl.load(row + ids, mask=inside, other=0.0), maximum, one, total)
            tl.store(chosen_logprobs + places, tl.where(inside, found, _NAN), mask=places < end)


def _sorted_ids(logits: torch.Tensor, row_index: torch.Tensor | None, draws: int, num_top: int) -> torch.Tensor:
    """Ids of the `num_top` largest of each draw's row, int32 [D, num_top], the lower id first among equals."""
    rows = torch.arange(draws, device=logits.device) if row_index is None else row_index
    step = max(_SORTED_LOGITS // logits.shape[1], 1)
    parts = []
    for start in range(0, draws, step):
        part = logits[rows[start : start + step].clamp(0, logits.shape[0] - 1)] + 0.0  # -0 becomes 0
        parts.append(part.sort(dim=1, descending=True, stable=True).indices[:, :num_top].int())
    return torch.cat(parts)


def top_logprobs(
    logits: torch.Tensor,
    num_top: int,
    token_ids: torch.Tensor,
    row_index: torch.Tensor | None,
    chosen: tuple[torch.Tensor, torch.Tensor] | None,
) -> TopLogprobsResult:
    """See `operations.top_logprobs`. Logits [R, V] have up to 262,144 columns.

    Arguments on the host are checked. On the device nothing is: there a row out of range gives what a row without a
    distribution does, a token id out of range what -1 does, and a chosen id out of range NaN.
    """
    if token_ids.is_cpu:
        checks.top_logprob_values(logits, token_ids, row_index, chosen)
    (num_rows, vocab_size), draws, device = logits.shape, token_ids.shape[0], logits.device
    start, ids = chosen or (None, None)
    num_chosen = 0 if ids is None else ids.shape[0]
    top = torch.full((draws, num_top), torch.nan, dtype=torch.float32, device=device)
    logprobs = torch.full((draws,), torch.nan, dtype=torch.float32, device=device)
    chosen_logprobs = torch.full((num_chosen,), torch.nan, dtype=torch.float32, device=device)
    ranks = torch.zeros(draws, dtype=torch.int32, device=device)
    if draws == 0 or num_rows == 0:
        none = torch.arange(num_top, dtype=torch.int32, device=device).repeat(draws, 1)
        return TopLogprobsResult(none, top, logprobs, ranks, chosen_logprobs)
    is_sorted = num_top > MAX_SELECTED
    num_selected = 0 if is_sorted else num_top
    if is_sorted:
        top_ids = _sorted_ids(logits, row_index, draws, num_top)
    else:
        top_ids = torch.empty((draws, num_top), dtype=torch.int32, device=device)
    chunks = num_chunks(vocab_size)
    maxima = torch.empty((draws, chunks), dtype=torch.float32, device=device)
    totals = torch.empty((draws, chunks), dtype=torch.int64, device=device)
    above = torch.empty((draws, chunks), dtype=torch.int32, device=device)
    keys = torch.empty((draws, chunks, max(num_selected, 1)), dtype=torch.int64, device=device)
    shared = (logits, logits.stride(0), token_ids if row_index is None else row_index, token_ids)
    _chunk_kernel[(draws * chunks,)](
        *(*shared, maxima, totals, above, keys, num_rows, vocab_size, chunks, num_selected),
        HAS_ROW_INDEX=row_index is not None,
        CHUNK=CHUNK,
        num_warps=_CHUNK_WARPS,
        **PINNED,
    )
    lists = (ranks, ranks) if start is None else (start, ids)
    _row_kernel[(draws,)](
        *(*shared, *lists, maxima, totals, above, keys, top_ids, top, logprobs, ranks, chosen_logprobs),
        *(num_rows, vocab_size, chunks, num_top, num_chosen),
        HAS_ROW_INDEX=row_index is not None,
        HAS_CHOSEN=start is not None,
        SORTED=is_sorted,
        **_row_constants(chunks, num_selected),
        num_warps=_ROW_WARPS,
        **PINNED,
    )
    return TopLogprobsResult(top_ids, top, logprobs, ranks, chosen_logprobs)


def _row_constants(chunks: int, num_selected: int) -> dict[str, int]:
    keys = next_power_of_2(chunks * num_selected)
    return {"CHUNKS": next_power_of_2(chunks), "KEYS": keys, "BLOCK": _LIST_BLOCK}


def ahead_of_time_cases() -> list[KernelCase]:
    """Vocabularies of SmolLM2, Llama 3 and Gemma; 5 and 20 of a row, the most that are selected, and a sorted row."""
    shared = {"logits": "*fp32", "row_stride": "i32", "row_index": "*i64", "token_ids": "*i64"}
    notes = {"maxima": "*fp32", "totals": "*i64", "above": "*i32", "keys": "*i64"}
    sizes = {"num_rows": "i32", "vocab_size": "i32", "chunks": "i32"}
    lists = {"chosen_start": "*i32", "chosen_ids": "*i32"}
    results = {"top_ids": "*i32", "top_logprobs": "*fp32", "logprobs": "*fp32", "ranks": "*i32"}
    results |= {"chosen_logprobs": "*fp32"}

    def case(name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int) -> KernelCase:
        aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
        constexpr = dict.fromkeys(constants, "constexpr")
        return KernelCase(name, kernel, signature | constexpr, constants, warps, 3, False, (*aligned, "row_stride"))

    chunk = shared | notes | sizes | {"num_selected": "i32"}
    constants = {"HAS_ROW_INDEX": True, "CHUNK": CHUNK}
    cases = [case("top_logprobs chunks", _chunk_kernel, chunk, constants, _CHUNK_WARPS)]
    row = shared | lists | notes | results | sizes | {"num_top": "i32", "num_chosen": "i32"}
    for vocab_size, selected in ((49_152, 5), (128_256, 20), (262_144, MAX_SELECTED), (128_256, 0)):
        own = {"HAS_ROW_INDEX": True, "HAS_CHOSEN": True, "SORTED": selected == 0}
        own |= _row_constants(num_chunks(vocab_size), selected)
        what = f"k={selected}" if selected else "sorted"
        cases.append(case(f"top_logprobs rows {what} V={vocab_size}", _row_kernel, row, own, _ROW_WARPS))
    return cases
