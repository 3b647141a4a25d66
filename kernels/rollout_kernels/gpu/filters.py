"""Top-k, top-p and min-p of one row, for the sampling kernel: device functions, run by one program a draw.

Every filter keeps a prefix of the tokens in the order (logit descending, id ascending). The end of a prefix is found
without sorting: logits become integers of the same order (`order_key`), and bisection looks for the smallest key above
which less than a target lies, of tokens (top-k) or of weight (top-p). Weights are integers (`softmax_row`), so the sums
that bisection compares are exact and monotone. Each step draws both ends in to keys that occur, so that the number of
steps follows the logarithm of the number of tokens, not that of the range of the keys.

Few passes go over the row. One pass collects the *candidates*, the tokens that a cheap bound does not rule out, into a
list of up to `CANDIDATES` (ids ascending); everything after it looks at the list. Where more tokens pass the bound,
bisection runs over the row until those between its two ends fit into the list, and goes on there.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.gpu.softmax_row import exp_nonpositive, fixed, gaps

CANDIDATES = 4096  # capacity of a draw's list
GROUP = 64  # neighbouring logits of which the first kernel notes the maximum, for top-k's bound

LOWEST_KEY = tl.constexpr(-(2**31) + (1 << 23))  # that of the most negative finite float32; that of -inf is one below
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def order_key(x):
    """Integers (int32) in the order of float32 values; -0 and 0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of_key(key):
    """The float32 value that has this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def load_allowed(row, masked, ids, size, HAS_MASK: tl.constexpr):
    """Logits of the ids, -inf past the end and where the draw's bit mask `masked` (int32 words) is set."""
    mask = ids < size
    x = tl.load(row + ids, mask=mask, other=-_INFINITY)
    if HAS_MASK:
        words = tl.load(masked + ids // 32, mask=mask, other=0)
        x = tl.where(((words >> (ids % 32)) & 1) != 0, -_INFINITY, x)
    return x


@triton.jit
def collect(
    row,
    masked,
    size,
    maxima,  # float32 [chunks] of this draw: the chunks' largest allowed logits
    maximum,
    inverse,
    low,  # keys from `low` to `high` pass
    high,
    floor,  # weights e below this do not
    list_logits,  # float32 [CANDIDATES] of this draw
    list_ids,  # int32 [CANDIDATES]
    HAS_MASK: tl.constexpr,
    CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Fills the list with the tokens that pass, ids ascending, as far as it goes. Returns how many there are."""
    tl.debug_barrier()  # others may still be reading what the list holds
    count = tl.full((), 0, tl.int32)
    for start in range(0, size, CHUNK):
        best = tl.load(maxima + start // CHUNK)
        if order_key(best) >= low:
            ids = start + tl.arange(0, CHUNK)
            x = load_allowed(row, masked, ids, size, HAS_MASK)
            key = order_key(x)
            passes = (key >= low) & (key <= high) & (exp_nonpositive(gaps(x, maximum, inverse)) >= floor)
            kept = passes.to(tl.int32)
            place = count + tl.cumsum(kept, 0) - kept
            mask = passes & (place < CANDIDATES)
            tl.store(list_logits + place, x, mask=mask)
            tl.store(list_ids + place, ids, mask=mask)
            count += tl.sum(kept, 0)
    tl.debug_barrier()
    return count


@triton.jit
def load_listed(values, offsets, count, row, masked, HAS_MASK: tl.constexpr, LISTED: tl.constexpr):
    """Logits from the list (`values`), or from the row where not LISTED; -inf past `count`."""
    if LISTED:
        return tl.load(values + offsets, mask=offsets < count, other=-_INFINITY)
    return load_allowed(row, masked, offsets, count, HAS_MASK)


@triton.jit
def weight_between(
    row,
    masked,
    list_logits,
    count,  # of the list, or the size of the row
    maximum,
    inverse,
    low,  # int32 keys: low <= middle + 1, middle <= high
    middle,
    high,
    WEIGHTED: tl.constexpr,  # sums weights; otherwise tokens
    LISTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What lies above `middle`, up to `high`: (sum of the weights, number of tokens, smallest key), all int64.

    And the largest key from `low` to `middle` (int64; `low` - 1 where there is none).
    """
    total = tl.zeros((BLOCK,), tl.int64)
    tokens = tl.zeros((BLOCK,), tl.int32)
    smallest = tl.full((BLOCK,), 2147483647, tl.int32)
    largest = tl.zeros((BLOCK,), tl.int32) + (low - 1)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = load_listed(list_logits, offsets, count, row, masked, HAS_MASK, LISTED)
        key = order_key(x)
        inside = (key > middle) & (key <= high)
        tokens += inside.to(tl.int32)
        smallest = tl.minimum(smallest, tl.where(inside, key, 2147483647))
        largest = tl.maximum(largest, tl.where(key <= middle, key, low - 1))
        if WEIGHTED:
            total += tl.where(inside, fixed(exp_nonpositive(gaps(x, maximum, inverse))), 0)
    number = tl.sum(tokens, 0).to(tl.int64)
    if WEIGHTED:
        weight = tl.sum(total, 0)
    else:
        weight = number
    return weight, number, tl.min(smallest, 0).to(tl.int64), tl.max(largest, 0).to(tl.int64)


@triton.jit
def bisect(
    row,
    masked,
    list_logits,
    count,
    maximum,
    inverse,
    low,
    high,
    above,  # weight above `high`
    target,
    between,  # number of tokens with keys from `low` to `high`
    enough,  # stops as soon as no more than this many are left between
    WEIGHTED: tl.constexpr,
    LISTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Narrows [low, high] (int64) around the smallest key above which less than `target` (float64) lies.

    That key, or one above which the same tokens lie, is in [low, high] before and after. Returns low, high, the weight
    above high, and `between`.
    """
    while (low < high) & (between > enough):
        middle = (low + high) >> 1
        weight, tokens, smallest, largest = weight_between(
            row, masked, list_logits, count, maximum, inverse,
            low.to(tl.int32), middle.to(tl.int32), high.to(tl.int32), WEIGHTED, LISTED, HAS_MASK, BLOCK,
        )  # fmt: skip
        if (above + weight).to(tl.float64) < target:
            high = tl.maximum(largest, low)
            above += weight
            between -= tokens
        else:
            low = smallest
            between = tokens
    return low, high, above, between


@triton.jit
def find_cut(
    row,
    masked,
    size,
    maxima,
    maximum,
    inverse,
    list_logits,
    list_ids,
    count,  # of the candidates, all of which the list holds where there are no more than CANDIDATES
    low,
    target,
    WEIGHTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """(the smallest key of a token above which less than `target` lies, int32; the weight above it, int64).

    Where all tokens from `low` on together are less than the target, the key is `low`.
    """
    high = order_key(maximum).to(tl.int64)
    low = low.to(tl.int64)
    above = tl.full((), 0, tl.int64)
    between = count.to(tl.int64)
    listed = count
    if count > CANDIDATES:
        _, between, _, _ = weight_between(
            row, masked, list_logits, size, maximum, inverse,
            low.to(tl.int32), (low - 1).to(tl.int32), high.to(tl.int32), False, False, HAS_MASK, ROW_BLOCK,
        )  # fmt: skip
        low, high, above, between = bisect(
            row, masked, list_logits, size, maximum, inverse, low, high, above, target, between, CANDIDATES,
            WEIGHTED, False, HAS_MASK, ROW_BLOCK,
        )  # fmt: skip
        found = collect(
            row, masked, size, maxima, maximum, inverse, low.to(tl.int32), high.to(tl.int32), -1.0,
            list_logits, list_ids, HAS_MASK, CHUNK, CANDIDATES,
        )  # fmt: skip
        listed = tl.minimum(found, CANDIDATES)
    low, high, above, between = bisect(
        row, masked, list_logits, listed, maximum, inverse, low, high, above, target, between, 0,
        WEIGHTED, True, HAS_MASK, LIST_BLOCK,
    )  # fmt: skip
    return high.to(tl.int32), above


@triton.jit
def top_k_bound(group_maxima, groups, k, GROUPS: tl.constexpr):
    """A key (int32) that the k-th largest logit of the row reaches: the k-th largest maximum of its groups.

    `LOWEST_KEY` where fewer than k groups have a logit above -inf.
    """
    index = tl.arange(0, GROUPS)
    key = order_key(tl.load(group_maxima + index, mask=index < groups, other=-_INFINITY)).to(tl.int64)
    low = tl.full((), LOWEST_KEY, tl.int64)
    if tl.sum((key >= LOWEST_KEY).to(tl.int32), 0) >= k:
        high = tl.max(key, 0)
        while low < high:
            middle = (low + high) >> 1
            inside = key > middle
            if tl.sum(inside.to(tl.int32), 0) < k:
                high = tl.maximum(tl.max(tl.where(inside, low, key), 0), low)
            else:
                low = tl.min(tl.where(inside, key, high), 0)
    return low.to(tl.int32)


@triton.jit
def last_kept_tie(
    row,
    masked,
    list_logits,
    list_ids,
    count,
    cut,  # int32 key
    ties,  # int64: how many tokens with this very key are kept
    LISTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The id (int32) of the `ties`-th token with key `cut`; the largest int32 where there are fewer."""
    seen = tl.full((), 0, tl.int64)
    last = tl.full((), 2147483647, tl.int32)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = load_listed(list_logits, offsets, count, row, masked, HAS_MASK, LISTED)
        tie = ((order_key(x) == cut) & (offsets < count)).to(tl.int32)
        place = seen + tl.cumsum(tie, 0).to(tl.int64)
        ids = offsets
        if LISTED:
            ids = tl.load(list_ids + offsets, mask=offsets < count, other=0)
        last = tl.minimum(last, tl.min(tl.where((tie != 0) & (place == ties), ids, 2147483647), 0))
        seen += tl.sum(tie, 0).to(tl.int64)
    return last
