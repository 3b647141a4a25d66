"""Drawing tokens: a kernel over the chunks of every row, then one program a draw.

The first kernel reads the logits once. Of its chunk it notes the maximum, the sums of the model's own and of the
tempered distribution, and the winner of the race e / E among the chunk's tokens (the greedy token at temperature 0).
The second puts the chunks together; where a draw has filters it finds the tokens that they keep (`filters.py`), from
the row that still lies in the second-level cache, and races among those. Nothing is sorted, and nothing waits for the
host.
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
from rollout_kernels.gpu.aot import KernelCase
from rollout_kernels.gpu.filters import (
    CANDIDATES,
    GROUP,
    LOWEST_KEY,
    collect,
    find_cut,
    last_kept_tie,
    load_listed,
    order_key,
    top_k_bound,
    value_of_key,
    weight_between,
)
from rollout_kernels.gpu.noise import noise_key, race_scores
from rollout_kernels.gpu.sizes import ceil_div, next_power_of_2
from rollout_kernels.gpu.softmax_row import (
    CHUNK,
    LARGEST_ID,
    chunk_scale,
    chunk_sums,
    exp_nonpositive,
    fixed,
    gaps,
    inverse_temperature,
    num_chunks,
    row_entropy,
    row_logprob,
    row_total,
    row_weighted,
    without_bad_numbers,
)
from rollout_kernels.results import STATUS_NOT_NUMBERS, STATUS_NOTHING_LEFT, STATUS_OK, SampleArguments, SampleResult

_CHUNK_WARPS = 16
_DRAW_WARPS = {False: 16, True: 8}  # with bans or without: numbers with which nothing spills
_ROW_BLOCK = 2048  # logits that the program of a draw looks at side by side
_LIST_BLOCK = 1024  # and candidates
_BAN_BLOCK = 128

_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_ONE = tl.constexpr(float(1 << 44))
_OK = tl.constexpr(STATUS_OK)
_NOT_NUMBERS = tl.constexpr(STATUS_NOT_NUMBERS)
_NOTHING_LEFT = tl.constexpr(STATUS_NOTHING_LEFT)


@triton.jit
def _ban_kernel(banned_start, banned_ids, banned_words, num_ids, vocab_size, words_a_draw, BLOCK: tl.constexpr):
    """Program d sets the bits of draw d's banned ids; in whatever order atomics come, the same bits are set."""
    draw = tl.program_id(0).to(tl.int64)
    first = tl.maximum(tl.load(banned_start + draw), 0)
    end = tl.minimum(tl.load(banned_start + draw + 1), num_ids)
    for start in range(first, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = tl.load(banned_ids + offsets, mask=offsets < end, other=-1)
        mask = (ids >= 0) & (ids < vocab_size)
        word = banned_words + draw * words_a_draw + ids // 32
        tl.atomic_or(word, tl.full((BLOCK,), 1, tl.int32) << (ids % 32), mask=mask, sem="relaxed")


@triton.jit
def _row_of_draw(row_index, draw, num_rows, HAS_ROW_INDEX: tl.constexpr):
    """(the row of the logits that a draw uses, int64; whether there is such a row). Row 0 stands in for no row."""
    row = draw
    if HAS_ROW_INDEX:
        row = tl.load(row_index + draw)
    inside = (row >= 0) & (row < num_rows)
    return tl.where(inside, row, 0), inside


@triton.jit(do_not_specialize=["num_rows", "vocab_size", "chunks", "plane"])
def _chunk_kernel(
    logits,
    row_stride,
    row_index,  # int64 [D], read where HAS_ROW_INDEX
    banned_words,  # int32 [D, words], read where HAS_BANNED
    words_a_draw,
    temperatures,
    top_k,
    seed,
    sample_index,
    position,
    peaks,  # float32 [3, D, chunks]: the largest logit (NaN for NaN and +inf), the largest allowed one, the best score
    winners,  # int32 [D, chunks]: the token with the best score
    sums,  # int64 [5, D, chunks]: total and weighted at temperature 1, both tempered, total of the allowed
    group_maxima,  # float32 [D, chunks * CHUNK / GROUP], written where the draw has top-k
    num_rows,
    vocab_size,
    chunks,
    plane,  # D * chunks
    HAS_ROW_INDEX: tl.constexpr,
    HAS_BANNED: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program (draw, chunk) looks at CHUNK logits."""
    program = tl.program_id(0)
    draw, chunk = (program // chunks).to(tl.int64), program % chunks
    row, _ = _row_of_draw(row_index, draw, num_rows, HAS_ROW_INDEX)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=-_INFINITY)
    x, bad = without_bad_numbers(x)
    maximum = tl.max(x, 0)
    temperature = tl.load(temperatures + draw)
    greedy = (temperature > 0.0) == 0
    inverse = inverse_temperature(tl.where(greedy, 1.0, temperature))
    slot = draw * chunks + chunk
    planes = plane.to(tl.int64)
    tl.store(peaks + slot, tl.where(bad != 0, _NAN, maximum))

    total, weighted = chunk_sums(x, maximum, inverse)
    tl.store(sums + 2 * planes + slot, total)
    tl.store(sums + 3 * planes + slot, weighted)
    raw_total, raw_weighted = total, weighted
    if inverse != 1.0:
        raw_total, raw_weighted = chunk_sums(x, maximum, tl.full((), 1.0, tl.float32))
    tl.store(sums + slot, raw_total)
    tl.store(sums + planes + slot, raw_weighted)

    if HAS_BANNED:
        words = tl.load(banned_words + draw * words_a_draw + ids // 32, mask=ids < vocab_size, other=0)
        x = tl.where(((words >> (ids % 32)) & 1) != 0, -_INFINITY, x)
        maximum = tl.max(x, 0)
    tl.store(peaks + planes + slot, maximum)
    if greedy:
        tl.store(winners + slot, tl.min(tl.where(x == maximum, ids, LARGEST_ID), 0))
    else:
        weights = exp_nonpositive(gaps(x, maximum, inverse))
        if HAS_BANNED:
            tl.store(sums + 4 * planes + slot, tl.sum(fixed(weights), 0))
        key = noise_key(tl.load(seed + draw), tl.load(sample_index + draw), tl.load(position + draw))
        scores = race_scores(weights, key, ids)
        best = tl.max(scores, 0)
        tl.store(peaks + 2 * planes + slot, best)
        tl.store(winners + slot, tl.min(tl.where(scores == best, ids, LARGEST_ID), 0))
    k = tl.load(top_k + draw)
    if (k > 0) & (k < vocab_size):
        groups: tl.constexpr = CHUNK // GROUP
        best_of_group = tl.max(tl.reshape(x, (groups, GROUP)), 1)
        tl.store(group_maxima + slot * groups + tl.arange(0, groups), best_of_group)


@triton.jit
def _race(
    row,
    banned,
    list_logits,
    list_ids,
    count,
    maximum,
    inverse,
    cut,  # int32: keys above it are kept, and those equal to it up to id `last_tie`
    last_tie,
    min_p,
    key,  # of the noise
    LISTED: tl.constexpr,
    HAS_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(winner, int32; sum of the kept weights, int64; number of kept tokens, int32)."""
    best = tl.full((BLOCK,), -1.0, tl.float32)
    best_ids = tl.full((BLOCK,), LARGEST_ID, tl.int32)
    total = tl.zeros((BLOCK,), tl.int64)
    tokens = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = offsets
        if LISTED:
            ids = tl.load(list_ids + offsets, mask=offsets < count, other=0)
        x = load_listed(list_logits, offsets, count, row, banned, HAS_BANNED, LISTED)
        weights = exp_nonpositive(gaps(x, maximum, inverse))
        order = order_key(x)
        kept = (order > cut) | ((order == cut) & (ids <= last_tie))
        kept = kept & (weights >= min_p) & (x > -_INFINITY)
        scores = tl.where(kept, race_scores(weights, key, ids), -1.0)
        better = scores > best
        best_ids = tl.where(better, ids, best_ids)
        best = tl.where(better, scores, best)
        total += tl.where(kept, fixed(weights), 0)
        tokens += kept.to(tl.int32)
    winner = tl.min(tl.where(best == tl.max(best, 0), best_ids, LARGEST_ID), 0)
    return winner, tl.sum(total, 0), tl.sum(tokens, 0)


@triton.jit
def _filtered(
    row,
    banned,
    vocab_size,
    maxima,
    maximum,
    inverse,
    total,
    group_maxima,
    groups,
    list_logits,
    list_ids,
    k,  # 0: off
    top_p,
    min_p,
    key,
    HAS_BANNED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One draw with filters: what `_race` returns."""
    cut = tl.full((), LOWEST_KEY, tl.int32)
    # Tokens below this weight together weigh less than what top-p drops, so none of them is kept.
    dropped = (1.0 - top_p.to(tl.float64)) * (total.to(tl.float64) / _ONE) / vocab_size * 0.999
    floor = tl.maximum(tl.maximum(dropped.to(tl.float32), min_p), 1e-37)  # 1e-38 would be a float64
    if k > 0:
        cut = top_k_bound(group_maxima, groups, k, GROUPS)
        floor = tl.full((), -1.0, tl.float32)
    count = collect(
        row, banned, vocab_size, maxima, maximum, inverse, cut, order_key(maximum), floor, list_logits, list_ids,
        HAS_BANNED, CHUNK, CANDIDATES,
    )  # fmt: skip
    if k > 0:
        cut, _ = find_cut(
            row, banned, vocab_size, maxima, maximum, inverse, list_logits, list_ids, count, cut, k.to(tl.float64),
            False, HAS_BANNED, CHUNK, ROW_BLOCK, LIST_BLOCK, CANDIDATES,
        )  # fmt: skip
        if count <= CANDIDATES:
            total, _, _, _ = weight_between(
                row, banned, list_logits, count, maximum, inverse, cut, cut - 1, order_key(maximum),
                True, True, HAS_BANNED, LIST_BLOCK,
            )  # fmt: skip
        else:
            total, _, _, _ = weight_between(
                row, banned, list_logits, vocab_size, maximum, inverse, cut, cut - 1, order_key(maximum),
                True, False, HAS_BANNED, ROW_BLOCK,
            )  # fmt: skip
    last_tie = tl.full((), LARGEST_ID, tl.int32)
    if top_p < 1.0:
        target = top_p.to(tl.float64) * total.to(tl.float64)
        cut, above = find_cut(
            row, banned, vocab_size, maxima, maximum, inverse, list_logits, list_ids, count, cut, target,
            True, HAS_BANNED, CHUNK, ROW_BLOCK, LIST_BLOCK, CANDIDATES,
        )  # fmt: skip
        weight = fixed(exp_nonpositive(gaps(value_of_key(cut), maximum, inverse)))
        if weight > 0:
            ties = tl.ceil((target - above.to(tl.float64)) / weight.to(tl.float64)).to(tl.int64)
            if count <= CANDIDATES:
                last_tie = last_kept_tie(
                    row, banned, list_logits, list_ids, count, cut, ties, True, HAS_BANNED, LIST_BLOCK
                )
            else:
                last_tie = last_kept_tie(
                    row, banned, list_logits, list_ids, vocab_size, cut, ties, False, HAS_BANNED, ROW_BLOCK
                )
    if count <= CANDIDATES:
        winner, kept_total, tokens = _race(
            row, banned, list_logits, list_ids, count, maximum, inverse, cut, last_tie, min_p, key,
            True, HAS_BANNED, LIST_BLOCK,
        )  # fmt: skip
    else:
        winner, kept_total, tokens = _race(
            row, banned, list_logits, list_ids, vocab_size, maximum, inverse, cut, last_tie, min_p, key,
            False, HAS_BANNED, ROW_BLOCK,
        )  # fmt: skip
    return winner, kept_total, tokens


@triton.jit(do_not_specialize=["num_rows", "num_draws", "vocab_size", "chunks"])
def _draw_kernel(
    logits,
    row_stride,
    row_index,
    banned_words,
    words_a_draw,
    temperatures,
    top_k,
    top_ps,
    min_ps,
    seed,
    sample_index,
    position,
    peaks,
    winners,
    sums,
    group_maxima,
    list_logits,  # float32 [D, CANDIDATES], scratch
    list_ids,  # int32 [D, CANDIDATES]
    token_ids,
    results,  # float32 [4, D]: raw and sampled logprobs, kept mass, entropy
    status,
    num_rows,
    num_draws,
    vocab_size,
    chunks,
    HAS_ROW_INDEX: tl.constexpr,
    HAS_BANNED: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,  # powers of two that the chunks and the groups of a row fit into
    GROUPS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Program d finishes draw d. A draw whose numbers are out of range draws nothing: `STATUS_NOT_NUMBERS`."""
    draw = tl.program_id(0).to(tl.int64)
    planes = num_draws.to(tl.int64) * chunks
    row_number, good = _row_of_draw(row_index, draw, num_rows, HAS_ROW_INDEX)
    row = logits + row_number * row_stride
    banned = banned_words
    if HAS_BANNED:
        banned = banned_words + draw * words_a_draw
    index = tl.arange(0, CHUNKS)
    slots, mask = draw * chunks + index, index < chunks
    raw_maxima, bad = without_bad_numbers(tl.load(peaks + slots, mask=mask, other=-_INFINITY))
    maxima = tl.load(peaks + planes + slots, mask=mask, other=-_INFINITY)
    raw_maximum, maximum = tl.max(raw_maxima, 0), tl.max(maxima, 0)
    temperature, top_p, min_p = tl.load(temperatures + draw), tl.load(top_ps + draw), tl.load(min_ps + draw)
    good = good & (bad == 0) & (temperature >= 0.0) & (temperature < _INFINITY)
    good = good & (top_p > 0.0) & (top_p <= 1.0) & (min_p >= 0.0) & (min_p <= 1.0)

    token = tl.full((), -1, tl.int32)
    raw_logprob = tl.full((), _NAN, tl.float32)
    sampled_logprob = tl.full((), _NAN, tl.float32)
    kept_mass = tl.full((), _NAN, tl.float32)
    entropy = tl.full((), _NAN, tl.float32)
    state = tl.where(good, tl.where(maximum == -_INFINITY, _NOTHING_LEFT, _OK), _NOT_NUMBERS)
    if state == _OK:
        raw_totals = tl.load(sums + slots, mask=mask, other=0)
        raw_total = row_total(raw_maxima, raw_totals, raw_maximum, tl.full((), 1.0, tl.float32))
        if temperature == 0.0:
            own = tl.load(winners + slots, mask=mask, other=LARGEST_ID)
            token = tl.min(tl.where(maxima == maximum, own, LARGEST_ID), 0)
            raw_logprob = row_logprob(tl.load(row + token), raw_maximum, tl.full((), 1.0, tl.float32), raw_total)
            sampled_logprob = tl.full((), 0.0, tl.float32)
            kept_mass = tl.exp(raw_logprob.to(tl.float64)).to(tl.float32)
            weighted = tl.load(sums + planes + slots, mask=mask, other=0)
            spread = row_weighted(raw_maxima, raw_totals, weighted, raw_maximum, tl.full((), 1.0, tl.float32))
            entropy = row_entropy(raw_total, spread)
        else:
            inverse = inverse_temperature(temperature)
            totals = tl.load(sums + 2 * planes + slots, mask=mask, other=0)
            weighted = tl.load(sums + 3 * planes + slots, mask=mask, other=0)
            tempered_total = row_total(raw_maxima, totals, raw_maximum, inverse)
            entropy = row_entropy(tempered_total, row_weighted(raw_maxima, totals, weighted, raw_maximum, inverse))
            kept_total = tempered_total
            if HAS_BANNED:
                allowed = tl.load(sums + 4 * planes + slots, mask=mask, other=0)
                kept_total = row_total(maxima, allowed, maximum, inverse)
            k = tl.load(top_k + draw)
            k = tl.where((k > 0) & (k < vocab_size), k, 0)
            tokens = vocab_size
            if (k > 0) | (top_p < 1.0) | (min_p > 0.0):
                key = noise_key(tl.load(seed + draw), tl.load(sample_index + draw), tl.load(position + draw))
                token, filtered_total, tokens = _filtered(
                    row, banned, vocab_size, peaks + planes + draw * chunks, maximum, inverse, kept_total,
                    group_maxima + draw * chunks * (CHUNK // GROUP), chunks * (CHUNK // GROUP),
                    list_logits + draw * CANDIDATES, list_ids + draw * CANDIDATES, k, top_p, min_p, key,
                    HAS_BANNED, CHUNK, ROW_BLOCK, LIST_BLOCK, CANDIDATES, GROUPS,
                )  # fmt: skip
                if tokens < vocab_size:
                    kept_total = filtered_total
            else:
                scale, _ = chunk_scale(maxima, maximum, inverse)
                scores = tl.load(peaks + 2 * planes + slots, mask=mask, other=0.0).to(tl.float64) * scale
                own = tl.load(winners + slots, mask=mask, other=LARGEST_ID)
                token = tl.min(tl.where(scores == tl.max(scores, 0), own, LARGEST_ID), 0)
            x = tl.load(row + token)
            raw_logprob = row_logprob(x, raw_maximum, tl.full((), 1.0, tl.float32), raw_total)
            sampled_logprob = row_logprob(x, maximum, inverse, kept_total)
            shift, _ = chunk_scale(maximum, raw_maximum, inverse)
            mass = shift * kept_total.to(tl.float64) / tempered_total.to(tl.float64)
            kept_mass = tl.minimum(mass, 1.0).to(tl.float32)
    tl.store(token_ids + draw, token.to(tl.int64))
    tl.store(results + draw, raw_logprob)
    tl.store(results + num_draws + draw, sampled_logprob)
    tl.store(results + 2 * num_draws + draw, kept_mass)
    tl.store(results + 3 * num_draws + draw, entropy)
    tl.store(status + draw, state.to(tl.uint8))


def _banned_words(arguments: SampleArguments, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """A bit for each banned id, int32 [D, words]."""
    if arguments.banned is None:
        return None
    start, ids = arguments.banned
    draws, words = start.shape[0] - 1, ceil_div(vocab_size, 32)
    mask = torch.zeros((draws, words), dtype=torch.int32, device=device)
    if ids.shape[0]:
        _ban_kernel[(draws,)](
            *(start, ids, mask, ids.shape[0], vocab_size, words),
            BLOCK=_BAN_BLOCK,
            num_warps=_BAN_BLOCK // 32,
        )
    return mask


def _row_constants(vocab_size: int) -> dict[str, int]:
    """The constexpr parameters of `_draw_kernel` that hang on the vocabulary, and the sizes of its list."""
    chunks = next_power_of_2(num_chunks(vocab_size))
    return {
        "CHUNKS": chunks,
        "GROUPS": chunks * (CHUNK // GROUP),
        "ROW_BLOCK": _ROW_BLOCK,
        "LIST_BLOCK": _LIST_BLOCK,
        "CANDIDATES": CANDIDATES,
    }


def sample(logits: torch.Tensor, arguments: SampleArguments) -> SampleResult:
    """Draws from logits float32 [R, V], up to 262,144 columns; see `operations.sample`.

    Arguments on the host are checked. On the device nothing is: there a draw whose temperature, top_p, min_p or row is
    out of range draws nothing (`STATUS_NOT_NUMBERS`), and banned ids outside the vocabulary do nothing.
    """
    draws, device = arguments.temperature.shape[0], logits.device
    num_rows, vocab_size = logits.shape
    if arguments.temperature.is_cpu:
        checks.draw_values(arguments, num_rows, vocab_size)
    results = torch.empty((4, draws), dtype=torch.float32, device=device)
    token_ids = torch.empty(draws, dtype=torch.int64, device=device)
    status = torch.empty(draws, dtype=torch.uint8, device=device)
    if draws == 0 or num_rows == 0:
        return _nothing_drawn(token_ids, results, status)
    chunks = num_chunks(vocab_size)
    peaks = torch.empty((3, draws, chunks), dtype=torch.float32, device=device)
    winners = torch.empty((draws, chunks), dtype=torch.int32, device=device)
    sums = torch.empty((5, draws, chunks), dtype=torch.int64, device=device)
    group_maxima = torch.empty((draws, chunks * (CHUNK // GROUP)), dtype=torch.float32, device=device)
    list_logits = torch.empty((draws, CANDIDATES), dtype=torch.float32, device=device)
    list_ids = torch.empty((draws, CANDIDATES), dtype=torch.int32, device=device)
    words = _banned_words(arguments, vocab_size, device)
    words_a_draw = 0 if words is None else words.shape[1]
    constants = {"HAS_ROW_INDEX": arguments.row_index is not None, "HAS_BANNED": words is not None}
    constants |= {"CHUNK": CHUNK, "GROUP": GROUP}
    shared = (
        *(logits, logits.stride(0), token_ids if arguments.row_index is None else arguments.row_index),
        *(winners if words is None else words, words_a_draw, arguments.temperature, arguments.top_k),
    )
    numbers = (arguments.seed, arguments.sample_index, arguments.position)
    _chunk_kernel[(draws * chunks,)](
        *(*shared, *numbers, peaks, winners, sums, group_maxima, num_rows, vocab_size, chunks, draws * chunks),
        **constants,
        num_warps=_CHUNK_WARPS,
    )
    _draw_kernel[(draws,)](
        *(*shared, arguments.top_p, arguments.min_p, *numbers, peaks, winners, sums, group_maxima),
        *(list_logits, list_ids, token_ids, results, status, num_rows, draws, vocab_size, chunks),
        **constants,
        **_row_constants(vocab_size),
        num_warps=_DRAW_WARPS[words is not None],
    )
    return SampleResult(token_ids, *results.unbind(), status)


def _nothing_drawn(token_ids: torch.Tensor, results: torch.Tensor, status: torch.Tensor) -> SampleResult:
    """No draws, or draws from logits without rows."""
    token_ids.fill_(-1)
    results.fill_(torch.nan)
    status.fill_(STATUS_NOT_NUMBERS)
    return SampleResult(token_ids, *results.unbind(), status)


def ahead_of_time_cases() -> list[KernelCase]:
    """Vocabularies of SmolLM2, Llama 3 and Gemma; with and without banned ids."""
    logits = {
        "logits": "*fp32",
        "row_stride": "i32",
        "row_index": "*i64",
        "banned_words": "*i32",
        "words_a_draw": "i32",
    }
    heat = {"temperatures": "*fp32", "top_k": "*i32"}
    filters = {"top_ps": "*fp32", "min_ps": "*fp32"}
    numbers = {"seed": "*i64", "sample_index": "*i64", "position": "*i64"}
    notes = {"peaks": "*fp32", "winners": "*i32", "sums": "*i64", "group_maxima": "*fp32"}
    results = {"list_logits": "*fp32", "list_ids": "*i32", "token_ids": "*i64", "results": "*fp32", "status": "*u8"}
    chunk = logits | heat | numbers | notes
    chunk |= {"num_rows": "i32", "vocab_size": "i32", "chunks": "i32", "plane": "i32"}
    draw = logits | heat | filters | numbers | notes | results
    draw |= {"num_rows": "i32", "num_draws": "i32", "vocab_size": "i32", "chunks": "i32"}

    def case(name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int) -> KernelCase:
        aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
        constexpr = dict.fromkeys(constants, "constexpr")
        return KernelCase(name, kernel, signature | constexpr, constants, warps, 3, False, (*aligned, "row_stride"))

    cases = []
    for banned in (False, True):
        constants = {"HAS_ROW_INDEX": True, "HAS_BANNED": banned, "CHUNK": CHUNK, "GROUP": GROUP}
        bans = " with bans" if banned else ""
        cases.append(case(f"sample chunks{bans}", _chunk_kernel, chunk, constants, _CHUNK_WARPS))
        for vocab_size in (128_256,) if banned else (49_152, 128_256, 262_144):
            name, own = f"sample draws{bans} V={vocab_size}", constants | _row_constants(vocab_size)
            cases.append(case(name, _draw_kernel, draw, own, _DRAW_WARPS[banned]))
    ban = {"banned_start": "*i32", "banned_ids": "*i32", "banned_words": "*i32"}
    ban |= {"num_ids": "i32", "vocab_size": "i32", "words_a_draw": "i32", "BLOCK": "constexpr"}
    pointers = ("banned_start", "banned_ids", "banned_words")
    warps = _BAN_BLOCK // 32
    cases.append(KernelCase("sample bans", _ban_kernel, ban, {"BLOCK": _BAN_BLOCK}, warps, 3, False, pointers))
    return cases
