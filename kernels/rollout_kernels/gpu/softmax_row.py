"""The softmax of a row of logits, as `sample` and `token_logprobs` both see it.

A row is cut into chunks of `CHUNK` logits, each summed by a program of its own against the chunk's own maximum. All
sums are sums of integers: a weight e in [0, 1] counts as floor(e * 2^44), so that 2^18 of them stay below 2^62.
Integers can be added in any order, hence no layout, number of warps, number of splits or neighbour can change a bit,
and the two operations agree exactly. Nothing here multiplies and then adds in floating point except by an explicit
`fma`, so that the compiler cannot contract the same expression in one kernel and not in another.

What is cut off is below 2^-26 of the sum even for 262,144 logits; `MAX_VOCAB` is where the integers would overflow.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from rollout_kernels.gpu.sizes import ceil_div

CHUNK = 4096
MAX_VOCAB = 1 << 18
LARGEST_ID = tl.constexpr(2**31 - 1)

_ONE = tl.constexpr(float(1 << 44))
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def row_of_draw(row_index, draw, num_rows, HAS_ROW_INDEX: tl.constexpr):
    """(the row of the logits that a draw uses, int64; whether there is such a row). Row 0 stands in for no row."""
    row = draw
    if HAS_ROW_INDEX:
        row = tl.load(row_index + draw)
    inside = (row >= 0) & (row < num_rows)
    return tl.where(inside, row, 0), inside


@triton.jit
def inverse_temperature(temperature):
    """1 / temperature in float32, bounded: below 1e-30 every gap between two logits is infinite for all purposes."""
    return tl.minimum(tl.div_rn(1.0, temperature), 1e30)


@triton.jit
def exp_nonpositive(t):
    """exp for t <= 0 in float32, within about 1 ulp; exactly 1 at 0 and exactly 0 below -87.3.

    t = n ln 2 + r with |r| <= ln(2)/2; a polynomial of degree 6 in r, whose exponent grows by n.
    """
    magic: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves an integer in the low bits
    shifted = tl.fma(t, 1.44269504088896341, magic)
    n = shifted - magic
    r = tl.fma(n, -0.693359375, t)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.full(t.shape, 1.9875691500e-4, tl.float32)
    p = tl.fma(p, r, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r, 1.0)
    p = tl.fma(p, r, 1.0)
    scaled = p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return tl.where(t >= -87.3, scaled.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def gaps(x, maximum, inverse):
    """(x - maximum) * inverse, not below -200, for x <= maximum (or all of them -inf)."""
    anchor = tl.where(maximum == -_INFINITY, 0.0, maximum)
    return tl.maximum((x - anchor) * inverse, -200.0)


@triton.jit
def fixed(values):
    """Float32 values of absolute value up to 1 as integers (int64), in units of 2^-44."""
    return (values * _ONE).to(tl.int64)


@triton.jit
def without_bad_numbers(x):
    """(x with -inf for NaN and +inf, whether there were any: int32 scalar)."""
    bad = (x < _INFINITY) == 0
    return tl.where(bad, -_INFINITY, x), tl.max(bad.to(tl.int32), 0)


@triton.jit
def chunk_sums(x, maximum, inverse):
    """Sums of e and of e * t over a chunk, t the gaps and e = exp(t): two int64 scalars."""
    t = gaps(x, maximum, inverse)
    e = exp_nonpositive(t)
    return tl.sum(fixed(e), 0), tl.sum(fixed(e * t), 0)


@triton.jit
def chunk_total(x, maximum, inverse):
    """The first of `chunk_sums`."""
    return tl.sum(fixed(exp_nonpositive(gaps(x, maximum, inverse))), 0)


@triton.jit
def chunk_scale(maxima, maximum, inverse):
    """(exp(d), d) in float64: what a chunk's weights count for in its row, d = (its maximum - the row's) * inverse."""
    d = (maxima.to(tl.float64) - maximum.to(tl.float64)) * inverse.to(tl.float64)
    d = tl.maximum(d, -200.0)
    return tl.exp(d), d


@triton.jit
def row_total(maxima, totals, maximum, inverse):
    """The row's sum of e against its maximum, int64 in units of 2^-44, from those of its chunks."""
    scale, _ = chunk_scale(maxima, maximum, inverse)
    return tl.sum((totals.to(tl.float64) * scale).to(tl.int64), 0)


@triton.jit
def row_weighted(maxima, totals, weighted, maximum, inverse):
    """The row's sum of e * t, as `row_total`."""
    scale, d = chunk_scale(maxima, maximum, inverse)
    own = (weighted.to(tl.float64) * scale).to(tl.int64)
    shifted = (totals.to(tl.float64) * scale * d).to(tl.int64)
    return tl.sum(own + shifted, 0)


@triton.jit
def row_logprob(x, maximum, inverse, total):
    """Log-probability (float32) of a token with logit x in a row with that maximum and sum of e."""
    t = (x.to(tl.float64) - maximum.to(tl.float64)) * inverse.to(tl.float64)
    return (t - tl.log(total.to(tl.float64) / _ONE)).to(tl.float32)


@triton.jit
def row_entropy(total, weighted):
    """Entropy in nats (float32)."""
    mean = weighted.to(tl.float64) / total.to(tl.float64)
    return tl.maximum(tl.log(total.to(tl.float64) / _ONE) - mean, 0.0).to(tl.float32)


def num_chunks(vocab_size: int) -> int:
    """Raises `ValueError` for a vocabulary whose sums could overflow."""
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"logits has {vocab_size} columns: the Triton kernels take up to {MAX_VOCAB}")
    return ceil_div(vocab_size, CHUNK)
