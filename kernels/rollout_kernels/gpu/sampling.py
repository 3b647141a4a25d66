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
from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.filters import (
    CANDIDATES,
    GROUP,
    LOWEST_KEY,
    collect,
    find_cut,
    last_kept_tie,
    load_allowed,
    load_listed,
    order_key,
    top_k_bound,
    value_of_key,
    weight_between,
)
from rollout_kernels.gpu.noise import noise_key, race_scores
from rollout_kernels.gpu.numerics import row_stride
from rollout_kernels.gpu.sizes import ceil_div, next_power_of_2
from rollout_kernels.gpu.softmax_row import (
    CHUNK,
    LARGEST_ID,
    chunk_scale,
    chunk_sums,
    chunk_total,
    exp_nonpositive,
    fixed,
    gaps,
    inverse_temperature,
    num_chunks,
    row_entropy,
    row_logprob,
    row_of_draw,
    row_total,
    row_weighted,
    without_bad_numbers,
)
from rollout_kernels.results import STATUS_NOT_NUMBERS, STATUS_NOTHING_LEFT, STATUS_OK, SampleArguments, SampleResult

_CHUNK_WARPS = {False: 16, True: 32}  # without masks and with them: numbers with which nothing spills
_DRAW_WARPS = {False: 16, True: 8}  # likewise
_ROW_BLOCK = 2048  # logits that the program of a draw looks at side by side
_LIST_BLOCK = 1024  # and candidates
_BAN_BLOCK = 128
_WORD_BLOCK = 512

_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_ONE = tl.constexpr(float(1 << 44))
_OK = tl.constexpr(STATUS_OK)
_NOT_NUMBERS = tl.constexpr(STATUS_NOT_NUMBERS)
_NOTHING_LEFT = tl.constexpr(STATUS_NOTHING_LEFT)


@triton.jit
def _allowed_kernel(allowed, row_stride, index, num_rows, masked_words, words_a_draw, BLOCK: tl.constexpr):
    """Program d sets the bits of what draw d may not take. An index out of range leaves it nothing."""
    draw = tl.program_id(0).to(tl.int64)
    row = tl.load(index + draw)
    inside = (row >= 0) & (row < num_rows)
    otherwise = tl.where(row == -1, -1, 0)
    for start in range(0, words_a_draw, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        may = tl.load(allowed + row * row_stride + offsets, mask=(offsets < words_a_draw) & inside, other=0)
        may = tl.where(inside, may, otherwise)
        tl.store(masked_words + draw * words_a_draw + offsets, ~may, mask=offsets < words_a_draw)


@triton.jit
def _ban_kernel(banned_start, banned_ids, masked_words, num_ids, vocab_size, words_a_draw, BLOCK: tl.constexpr):
    """Program d sets the bits of draw d's banned ids; in whatever order atomics come, the same bits are set."""
    draw = tl.program_id(0).to(tl.int64)
    first = tl.maximum(tl.load(banned_start + draw), 0)
    end = tl.minimum(tl.load(banned_start + draw + 1), num_ids)
    for start in range(first, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = tl.load(banned_ids + offsets, mask=offsets < end, other=-1)
        mask = (ids >= 0) & (ids < vocab_size)
        word = masked_words + draw * words_a_draw + ids // 32
        tl.atomic_or(word, tl.full((BLOCK,), 1, tl.int32) << (ids % 32), mask=mask, sem="relaxed")


@triton.jit
def _source_of_draw(adjusted_index, draw, num_adjusted, HAS_ADJUSTED: tl.constexpr):
    """(the adjusted row that a draw uses, int64, -1 for its row of the logits; whether there is such a row)."""
    source = tl.full((), -1, tl.int64)
    if HAS_ADJUSTED:
        source = tl.load(adjusted_index + draw)
    inside = (source >= -1) & (source < num_adjusted)
    return tl.where(inside, source, -1), inside


@triton.jit
def _numbers(x):
    """(x with -inf for NaN and +inf; how many of these there were; how many numbers are above -inf), counts int32."""
    bad = (x < _INFINITY) == 0
    x = tl.where(bad, -_INFINITY, x)
    counts = tl.sum((x > -_INFINITY).to(tl.int32) + (bad.to(tl.int32) << 16), 0)
    return x, counts >> 16, counts & 0xFFFF


@triton.jit(do_not_specialize=["num_rows", "num_adjusted", "vocab_size", "chunks", "plane"])
def _chunk_kernel(
    logits,
    row_stride,
    row_index,  # int64 [D], read where HAS_ROW_INDEX
    adjusted,  # float32 [A, V], read where HAS_ADJUSTED
    adjusted_stride,
    adjusted_index,  # int64 [D], likewise
    num_adjusted,
    masked_words,  # int32 [D, words], read where HAS_MASK: a bit for each token that must not be drawn
    words_a_draw,
    temperatures,
    top_k,
    seed,
    sample_index,
    position,
    # float32 [4, D, chunks]: the largest logit and the largest one of the row drawn from (NaN for NaN and +inf), the
    # largest one that masks leave, the best score
    peaks,
    winners,  # int32 [2, D, chunks]: the token with the best score, how many tokens masks leave
    # int64 [4, D, chunks]: total of the logits at temperature 1; total and weighted of the row drawn from, tempered;
    # total of what masks leave of it
    sums,
    group_maxima,  # float32 [D, chunks * CHUNK / GROUP], written where the draw has top-k
    num_rows,
    vocab_size,
    chunks,
    plane,  # D * chunks
    HAS_ROW_INDEX: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program (draw, chunk) looks at CHUNK logits."""
    program = tl.program_id(0)
    draw, chunk = (program // chunks).to(tl.int64), program % chunks
    row, _ = row_of_draw(row_index, draw, num_rows, HAS_ROW_INDEX)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=-_INFINITY)
    x, bad, alive = _numbers(x)
    maximum = tl.max(x, 0)
    temperature = tl.load(temperatures + draw)
    greedy = (temperature > 0.0) == 0
    inverse = inverse_temperature(tl.where(greedy, 1.0, temperature))
    slot = draw * chunks + chunk
    planes = plane.to(tl.int64)
    tl.store(peaks + slot, tl.where(bad != 0, _NAN, maximum))

    if HAS_ADJUSTED:
        tl.store(sums + slot, chunk_total(x, maximum, tl.full((), 1.0, tl.float32)))
        source, _ = _source_of_draw(adjusted_index, draw, num_adjusted, HAS_ADJUSTED)
        if source >= 0:
            x = tl.load(adjusted + source * adjusted_stride + ids, mask=ids < vocab_size, other=-_INFINITY)
            x, bad, alive = _numbers(x)
            maximum = tl.max(x, 0)
        tl.store(peaks + planes + slot, tl.where(bad != 0, _NAN, maximum))
    total, weighted = chunk_sums(x, maximum, inverse)
    tl.store(sums + planes + slot, total)
    tl.store(sums + 2 * planes + slot, weighted)
    if not HAS_ADJUSTED:
        if inverse != 1.0:
            total = chunk_total(x, maximum, tl.full((), 1.0, tl.float32))
        tl.store(sums + slot, total)

    if HAS_MASK:
        words = tl.load(masked_words + draw * words_a_draw + ids // 32, mask=ids < vocab_size, other=0)
        x = tl.where(((words >> (ids % 32)) & 1) != 0, -_INFINITY, x)
        maximum = tl.max(x, 0)
        alive = tl.sum((x != -_INFINITY).to(tl.int32), 0)
    tl.store(peaks + 2 * planes + slot, maximum)
    tl.store(winners + planes + slot, alive)
    if greedy:
        tl.store(winners + slot, tl.min(tl.where(x == maximum, ids, LARGEST_ID), 0))
    else:
        weights = exp_nonpositive(gaps(x, maximum, inverse))
        if HAS_MASK:
            tl.store(sums + 3 * planes + slot, tl.sum(fixed(weights), 0))
        key = noise_key(tl.load(seed + draw), tl.load(sample_index + draw), tl.load(position + draw))
        scores = race_scores(weights, key, ids)
        best = tl.max(scores, 0)
        tl.store(peaks + 3 * planes + slot, best)
        tl.store(winners + slot, tl.min(tl.where(scores == best, ids, LARGEST_ID), 0))
    k = tl.load(top_k + draw)
    if (k > 0) & (k < vocab_size):
        groups: tl.constexpr = CHUNK // GROUP
        best_of_group = tl.max(tl.reshape(x, (groups, GROUP)), 1)
        tl.store(group_maxima + slot * groups + tl.arange(0, groups), best_of_group)


@triton.jit
def _race(
    row,
    masked,
    list_logits,
    list_ids,
    count,
    maximum,
    inverse,
    cut,  # int32: keys above it are kept, and those equal to it up to id `last_tie`
    last_tie,
    min_p,
    key,  # of the noise
    forced,  # int32
    LISTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(winner; sum of the kept weights, int64; number of kept tokens; whether `forced` is one), the others int32."""
    best = tl.full((BLOCK,), -1.0, tl.float32)
    best_ids = tl.full((BLOCK,), LARGEST_ID, tl.int32)
    total = tl.zeros((BLOCK,), tl.int64)
    tokens = tl.zeros((BLOCK,), tl.int32)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        ids = offsets
        if LISTED:
            ids = tl.load(list_ids + offsets, mask=offsets < count, other=0)
        x = load_listed(list_logits, offsets, count, row, masked, HAS_MASK, LISTED)
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
        if HAS_FORCED:
            found += (kept & (ids == forced)).to(tl.int32)
    winner = tl.min(tl.where(best == tl.max(best, 0), best_ids, LARGEST_ID), 0)
    return winner, tl.sum(total, 0), tl.sum(tokens, 0), tl.sum(found, 0)


@triton.jit
def _filtered(
    row,
    masked,
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
    forced,
    HAS_MASK: tl.constexpr,
    HAS_FORCED: tl.constexpr,
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
        row, masked, vocab_size, maxima, maximum, inverse, cut, order_key(maximum), floor, list_logits, list_ids,
        HAS_MASK, CHUNK, CANDIDATES,
    )  # fmt: skip
    if k > 0:
        cut, _ = find_cut(
            row, masked, vocab_size, maxima, maximum, inverse, list_logits, list_ids, count, cut, k.to(tl.float64),
            False, HAS_MASK, CHUNK, ROW_BLOCK, LIST_BLOCK, CANDIDATES,
        )  # fmt: skip
        if count <= CANDIDATES:
            total, _, _, _ = weight_between(
                row, masked, list_logits, count, maximum, inverse, cut, cut - 1, order_key(maximum),
                True, True, HAS_MASK, LIST_BLOCK,
            )  # fmt: skip
        else:
            total, _, _, _ = weight_between(
                row, masked, list_logits, vocab_size, maximum, inverse, cut, cut - 1, order_key(maximum),
                True, False, HAS_MASK, ROW_BLOCK,
            )  # fmt: skip
    last_tie = tl.full((), LARGEST_ID, tl.int32)
    if top_p < 1.0:
        target = top_p.to(tl.float64) * total.to(tl.float64)
        cut, above = find_cut(
            row, masked, vocab_size, maxima, maximum, inverse, list_logits, list_ids, count, cut, target,
            True, HAS_MASK, CHUNK, ROW_BLOCK, LIST_BLOCK, CANDIDATES,
        )  # fmt: skip
        weight = fixed(exp_nonpositive(gaps(value_of_key(cut), maximum, inverse)))
        if weight > 0:
            ties = tl.ceil((target - above.to(tl.float64)) / weight.to(tl.float64)).to(tl.int64)
            if count <= CANDIDATES:
                last_tie = last_kept_tie(
                    row, masked, list_logits, list_ids, count, cut, ties, True, HAS_MASK, LIST_BLOCK
                )
            else:
                last_tie = last_kept_tie(
                    row, masked, list_logits, list_ids, vocab_size, cut, ties, False, HAS_MASK, ROW_BLOCK
                )
    if count <= CANDIDATES:
        winner, kept_total, tokens, found = _race(
            row, masked, list_logits, list_ids, count, maximum, inverse, cut, last_tie, min_p, key, forced,
            True, HAS_MASK, HAS_FORCED, LIST_BLOCK,
        )  # fmt: skip
    else:
        winner, kept_total, tokens, found = _race(
            row, masked, list_logits, list_ids, vocab_size, maximum, inverse, cut, last_tie, min_p, key, forced,
            False, HAS_MASK, HAS_FORCED, ROW_BLOCK,
        )  # fmt: skip
    return winner, kept_total, tokens, found


@triton.jit(do_not_specialize=["num_rows", "num_adjusted", "num_draws", "vocab_size", "chunks"])
def _draw_kernel(
    logits,
    row_stride,
    row_index,
    adjusted,
    adjusted_stride,
    adjusted_index,
    num_adjusted,
    masked_words,
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
    forced_ids,  # int64 [D], read where HAS_FORCED
    token_ids,
    results,  # float32 [4, D]: raw and sampled logprobs, kept mass, entropy
    status,
    num_kept,
    num_rows,
    num_draws,
    vocab_size,
    chunks,
    HAS_ROW_INDEX: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_FORCED: tl.constexpr,
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
    row_number, good = row_of_draw(row_index, draw, num_rows, HAS_ROW_INDEX)
    logits_row = logits + row_number * row_stride
    row = logits_row
    if HAS_ADJUSTED:
        source, there = _source_of_draw(adjusted_index, draw, num_adjusted, HAS_ADJUSTED)
        good = good & there
        if source >= 0:
            row = adjusted + source * adjusted_stride
    masked = masked_words
    if HAS_MASK:
        masked = masked_words + draw * words_a_draw
    forced = tl.full((), -1, tl.int32)
    if HAS_FORCED:
        given = tl.load(forced_ids + draw)
        good = good & (given >= -1) & (given < vocab_size)
        forced = given.to(tl.int32)
    index = tl.arange(0, CHUNKS)
    slots, mask = draw * chunks + index, index < chunks
    raw_maxima, bad = without_bad_numbers(tl.load(peaks + slots, mask=mask, other=-_INFINITY))
    raw_maximum = tl.max(raw_maxima, 0)
    row_maxima, row_maximum = raw_maxima, raw_maximum
    if HAS_ADJUSTED:
        row_maxima, bad_row = without_bad_numbers(tl.load(peaks + planes + slots, mask=mask, other=-_INFINITY))
        row_maximum = tl.max(row_maxima, 0)
        bad = bad | bad_row
    maxima = tl.load(peaks + 2 * planes + slots, mask=mask, other=-_INFINITY)
    maximum = tl.max(maxima, 0)
    temperature, top_p, min_p = tl.load(temperatures + draw), tl.load(top_ps + draw), tl.load(min_ps + draw)
    good = good & (bad == 0) & (temperature >= 0.0) & (temperature < _INFINITY)
    good = good & (top_p > 0.0) & (top_p <= 1.0) & (min_p >= 0.0) & (min_p <= 1.0)
    nothing_left = (maximum == -_INFINITY) | (raw_maximum == -_INFINITY)

    token = tl.full((), -1, tl.int32)
    kept = tl.full((), 0, tl.int32)  # tokens that filters and masks leave
    raw_logprob = tl.full((), _NAN, tl.float32)
    sampled_logprob = tl.full((), _NAN, tl.float32)
    kept_mass = tl.full((), _NAN, tl.float32)
    entropy = tl.full((), _NAN, tl.float32)
    state = tl.where(good, tl.where(nothing_left, _NOTHING_LEFT, _OK), _NOT_NUMBERS)
    if state == _OK:
        raw_total = row_total(
            raw_maxima, tl.load(sums + slots, mask=mask, other=0), raw_maximum, tl.full((), 1.0, tl.float32)
        )
        inverse = inverse_temperature(tl.where(temperature == 0.0, 1.0, temperature))
        totals = tl.load(sums + planes + slots, mask=mask, other=0)
        weighted = tl.load(sums + 2 * planes + slots, mask=mask, other=0)
        tempered_total = row_total(row_maxima, totals, row_maximum, inverse)
        entropy = row_entropy(tempered_total, row_weighted(row_maxima, totals, weighted, row_maximum, inverse))
        if temperature == 0.0:
            own = tl.load(winners + slots, mask=mask, other=LARGEST_ID)
            best = tl.min(tl.where(maxima == maximum, own, LARGEST_ID), 0)
            token = tl.where(forced >= 0, forced, best)
            kept = tl.full((), 1, tl.int32)
            sampled_logprob = tl.where(token == best, 0.0, -_INFINITY)
            own_logprob = row_logprob(tl.load(row + best), row_maximum, inverse, tempered_total)
            kept_mass = tl.exp(own_logprob.to(tl.float64)).to(tl.float32)
        else:
            kept_total = tempered_total
            if HAS_MASK:
                allowed = tl.load(sums + 3 * planes + slots, mask=mask, other=0)
                kept_total = row_total(maxima, allowed, maximum, inverse)
            k = tl.load(top_k + draw)
            k = tl.where((k > 0) & (k < vocab_size), k, 0)
            found = tl.full((), 1, tl.int32)  # whether the token is one of those
            if (k > 0) | (top_p < 1.0) | (min_p > 0.0):
                key = noise_key(tl.load(seed + draw), tl.load(sample_index + draw), tl.load(position + draw))
                token, filtered_total, kept, found = _filtered(
                    row, masked, vocab_size, peaks + 2 * planes + draw * chunks, maximum, inverse, kept_total,
                    group_maxima + draw * chunks * (CHUNK // GROUP), chunks * (CHUNK // GROUP),
                    list_logits + draw * CANDIDATES, list_ids + draw * CANDIDATES, k, top_p, min_p, key, forced,
                    HAS_MASK, HAS_FORCED, CHUNK, ROW_BLOCK, LIST_BLOCK, CANDIDATES, GROUPS,
                )  # fmt: skip
                if kept < vocab_size:
                    kept_total = filtered_total
            else:
                scale, _ = chunk_scale(maxima, maximum, inverse)
                scores = tl.load(peaks + 3 * planes + slots, mask=mask, other=0.0).to(tl.float64) * scale
                own = tl.load(winners + slots, mask=mask, other=LARGEST_ID)
                token = tl.min(tl.where(scores == tl.max(scores, 0), own, LARGEST_ID), 0)
                kept = tl.sum(tl.load(winners + planes + slots, mask=mask, other=0), 0)
                if HAS_FORCED:
                    value = load_allowed(row, masked, tl.maximum(forced, 0), vocab_size, HAS_MASK)
                    found = (value > -_INFINITY).to(tl.int32)
            sampled_logprob = row_logprob(tl.load(row + token), maximum, inverse, kept_total)
            if forced >= 0:
                token = forced
                logprob = row_logprob(tl.load(row + token), maximum, inverse, kept_total)
                sampled_logprob = tl.where(found != 0, logprob, -_INFINITY)
            shift, _ = chunk_scale(maximum, row_maximum, inverse)
            mass = shift * kept_total.to(tl.float64) / tempered_total.to(tl.float64)
            kept_mass = tl.minimum(mass, 1.0).to(tl.float32)
        x = tl.load(logits_row + token)
        raw_logprob = row_logprob(x, raw_maximum, tl.full((), 1.0, tl.float32), raw_total)
    tl.store(token_ids + draw, token.to(tl.int64))
    tl.store(results + draw, raw_logprob)
    tl.store(results + num_draws + draw, sampled_logprob)
    tl.store(results + 2 * num_draws + draw, kept_mass)
    tl.store(results + 3 * num_draws + draw, entropy)
    tl.store(status + draw, state.to(tl.uint8))
    tl.store(num_kept + draw, kept)


def _masked_words(arguments: SampleArguments, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """A bit for each id that a draw must not take, int32 [D, words]; None where every draw may take all."""
    if arguments.banned is None and arguments.allowed is None:
        return None
    draws, words = arguments.temperature.shape[0], ceil_div(vocab_size, 32)
    if arguments.allowed is None:
        mask = torch.zeros((draws, words), dtype=torch.int32, device=device)
    else:
        rows, index = arguments.allowed
        mask = torch.empty((draws, words), dtype=torch.int32, device=device)
        _allowed_kernel[(draws,)](
            *(rows, row_stride(rows), index, rows.shape[0], mask, words),
            BLOCK=_WORD_BLOCK,
            num_warps=_WORD_BLOCK // 128,
            **PINNED,
        )
    if arguments.banned is not None and arguments.banned[1].shape[0]:
        start, ids = arguments.banned
        _ban_kernel[(draws,)](
            *(start, ids, mask, ids.shape[0], vocab_size, words),
            BLOCK=_BAN_BLOCK,
            num_warps=_BAN_BLOCK // 32,
            **PINNED,
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

    Arguments on the host are checked. On the device nothing is: there a draw whose temperature, top_p, min_p, row,
    adjusted row or forced token is out of range draws nothing (`STATUS_NOT_NUMBERS`), and neither does one whose mask
    is (`STATUS_NOTHING_LEFT`); banned ids outside the vocabulary do nothing.
    """
    draws, device = arguments.temperature.shape[0], logits.device
    num_rows, vocab_size = logits.shape
    if arguments.temperature.is_cpu:
        checks.draw_values(arguments, num_rows, vocab_size)
    results = torch.empty((4, draws), dtype=torch.float32, device=device)
    token_ids = torch.empty(draws, dtype=torch.int64, device=device)
    status = torch.empty(draws, dtype=torch.uint8, device=device)
    num_kept = torch.empty(draws, dtype=torch.int32, device=device)
    if draws == 0 or num_rows == 0:
        return _nothing_drawn(token_ids, results, status, num_kept)
    chunks = num_chunks(vocab_size)
    peaks = torch.empty((4, draws, chunks), dtype=torch.float32, device=device)
    winners = torch.empty((2, draws, chunks), dtype=torch.int32, device=device)
    sums = torch.empty((4, draws, chunks), dtype=torch.int64, device=device)
    group_maxima = torch.empty((draws, chunks * (CHUNK // GROUP)), dtype=torch.float32, device=device)
    list_logits = torch.empty((draws, CANDIDATES), dtype=torch.float32, device=device)
    list_ids = torch.empty((draws, CANDIDATES), dtype=torch.int32, device=device)
    words = _masked_words(arguments, vocab_size, device)
    words_a_draw = 0 if words is None else words.shape[1]
    adjusted, adjusted_index = arguments.adjusted or (logits, token_ids)
    constants = {"HAS_ROW_INDEX": arguments.row_index is not None, "HAS_ADJUSTED": arguments.adjusted is not None}
    constants |= {"HAS_MASK": words is not None, "CHUNK": CHUNK, "GROUP": GROUP}
    shared = (
        *(logits, logits.stride(0), token_ids if arguments.row_index is None else arguments.row_index),
        *(adjusted, row_stride(adjusted), adjusted_index, adjusted.shape[0]),
        *(winners if words is None else words, words_a_draw, arguments.temperature, arguments.top_k),
    )
    numbers = (arguments.seed, arguments.sample_index, arguments.position)
    _chunk_kernel[(draws * chunks,)](
        *(*shared, *numbers, peaks, winners, sums, group_maxima, num_rows, vocab_size, chunks, draws * chunks),
        **constants,
        num_warps=_CHUNK_WARPS[words is not None],
        **PINNED,
    )
    forced = token_ids if arguments.forced is None else arguments.forced
    _draw_kernel[(draws,)](
        *(*shared, arguments.top_p, arguments.min_p, *numbers, peaks, winners, sums, group_maxima),
        *(list_logits, list_ids, forced, token_ids, results, status, num_kept, num_rows, draws, vocab_size, chunks),
        **constants,
        HAS_FORCED=arguments.forced is not None,
        **_row_constants(vocab_size),
        num_warps=_DRAW_WARPS[words is not None],
        **PINNED,
    )
    return SampleResult(token_ids, *results.unbind(), status, num_kept)


def _nothing_drawn(
    token_ids: torch.Tensor, results: torch.Tensor, status: torch.Tensor, num_kept: torch.Tensor
) -> SampleResult:
    """No draws, or draws from logits without rows."""
    token_ids.fill_(-1)
    results.fill_(torch.nan)
    status.fill_(STATUS_NOT_NUMBERS)
    return SampleResult(token_ids, *results.unbind(), status, num_kept.zero_())


def ahead_of_time_cases() -> list[KernelCase]:
    """Vocabularies of SmolLM2, Llama 3 and Gemma; with and without masks, adjusted rows and forced tokens."""
    logits = {"logits": "*fp32", "row_stride": "i32", "row_index": "*i64"}
    logits |= {"adjusted": "*fp32", "adjusted_stride": "i32", "adjusted_index": "*i64", "num_adjusted": "i32"}
    logits |= {"masked_words": "*i32", "words_a_draw": "i32"}
    heat = {"temperatures": "*fp32", "top_k": "*i32"}
    filters = {"top_ps": "*fp32", "min_ps": "*fp32"}
    numbers = {"seed": "*i64", "sample_index": "*i64", "position": "*i64"}
    notes = {"peaks": "*fp32", "winners": "*i32", "sums": "*i64", "group_maxima": "*fp32"}
    results = {"list_logits": "*fp32", "list_ids": "*i32", "forced_ids": "*i64", "token_ids": "*i64"}
    results |= {"results": "*fp32", "status": "*u8", "num_kept": "*i32"}
    chunk = logits | heat | numbers | notes
    chunk |= {"num_rows": "i32", "vocab_size": "i32", "chunks": "i32", "plane": "i32"}
    draw = logits | heat | filters | numbers | notes | results
    draw |= {"num_rows": "i32", "num_draws": "i32", "vocab_size": "i32", "chunks": "i32"}

    def case(name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int) -> KernelCase:
        strides = ("row_stride", "adjusted_stride") if "adjusted_stride" in signature else ()
        aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
        constexpr = dict.fromkeys(constants, "constexpr")
        return KernelCase(name, kernel, signature | constexpr, constants, warps, 3, False, (*aligned, *strides))

    cases = []
    for masked, more in ((False, False), (True, False), (False, True), (True, True)):
        constants = {"HAS_ROW_INDEX": True, "HAS_ADJUSTED": more, "HAS_MASK": masked}
        sizes = {"CHUNK": CHUNK, "GROUP": GROUP}
        suffix = (" with masks" if masked else "") + (" adjusted" if more else "")
        cases.append(case(f"sample chunks{suffix}", _chunk_kernel, chunk, constants | sizes, _CHUNK_WARPS[masked]))
        for vocab_size in (128_256,) if masked or more else (49_152, 128_256, 262_144):
            name = f"sample draws{suffix}{' forced' if more else ''} V={vocab_size}"
            own = constants | {"HAS_FORCED": more} | sizes | _row_constants(vocab_size)
            cases.append(case(name, _draw_kernel, draw, own, _DRAW_WARPS[masked]))
    ban = {"banned_start": "*i32", "banned_ids": "*i32", "masked_words": "*i32"}
    ban |= {"num_ids": "i32", "vocab_size": "i32", "words_a_draw": "i32"}
    cases.append(case("sample bans", _ban_kernel, ban, {"BLOCK": _BAN_BLOCK}, _BAN_BLOCK // 32))
    allowed = {"allowed": "*i32", "row_stride": "i32", "index": "*i64", "num_rows": "i32"}
    allowed |= {"masked_words": "*i32", "words_a_draw": "i32"}
    cases.append(case("sample masks", _allowed_kernel, allowed, {"BLOCK": _WORD_BLOCK}, _WORD_BLOCK // 128))
    return cases
