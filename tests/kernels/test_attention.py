"""`paged_attention` and `varlen_attention` against float64, and what makes a sample a pure function: the same bits for
every block size, chunking, batch and thread count."""

import pytest
import torch

import rollout_kernels as rk
from tests.support.kernels import (
    BACKENDS,
    DTYPES,
    assert_close,
    assert_same_bits,
    nan_caches,
    num_threads,
    randn,
    rows_apart,
)

WINDOW_BACKENDS = ["reference"]
HEADS = [(9, 3, 64), (7, 1, 80), (4, 4, 16), (2, 1, 6)]


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention of the last len(q) positions of one sequence: out [T, Hq, D], lse [T, Hq]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    if window is not None:
        hidden |= torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q) - window)
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1).T


class Sequences:
    """Random sequences in a paged cache full of NaN, their blocks scattered."""

    def __init__(self, lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype, block_size: int) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.block_size, self.lengths, self.scale = block_size, lengths, head_dim**-0.5
        self.q = [randn(n, num_heads, head_dim, dtype=dtype, seed=10 + i, scale=2.0) for i, n in enumerate(lengths)]
        self.k = [randn(n, num_kv_heads, head_dim, dtype=dtype, seed=20 + i, scale=2.0) for i, n in enumerate(lengths)]
        self.v = [randn(n, num_kv_heads, head_dim, dtype=dtype, seed=30 + i) for i, n in enumerate(lengths)]
        blocks = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).int().split(blocks)
        self.tables = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
        for table, ids in zip(self.tables, order, strict=True):
            table[: len(ids)] = ids
        self.cache = nan_caches(sum(blocks), block_size, num_kv_heads, head_dim, dtype)
        tiles = -(-block_size // 16)
        for i, n in enumerate(lengths):
            position = torch.arange(n)
            in_block = position % block_size
            tile = self.tables[i, position // block_size].long() * tiles + in_block // 16
            rk.write_kv(self.k[i], self.v[i], self.cache, tile * 16 + in_block % 16)

    def attend(
        self, queries: list[tuple[int, int, int]], window: int | None = None, soft_cap: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse for (sequence, first position, end position) items, in one call."""
        q = torch.cat([self.q[s][first:end] for s, first, end in queries])
        starts = torch.tensor([0, *(end - first for _, first, end in queries)]).cumsum(0).int()
        sequences = torch.tensor([s for s, _, _ in queries])
        seq_lens = torch.tensor([end for _, _, end in queries], dtype=torch.int32)
        result = rk.paged_attention(
            *(rows_apart(q), self.cache, self.tables[sequences], starts, seq_lens, self.block_size, self.scale, True),
            *(window, soft_cap),
        )
        return result[0], result[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [16, 4, 20])
def test_attention_equals_float64(
    backend: str, dtype: torch.dtype, heads: tuple[int, int, int], block_size: int
) -> None:
    lengths = [1, 16, 37, 70] if backend == "reference" else [1, 15, 16, 17, 70, 200]
    sequences = Sequences(lengths, heads, dtype, block_size)
    with rk.use_backend(backend):
        out, lse = sequences.attend([(i, 0, n) for i, n in enumerate(lengths)])
    assert out.dtype == dtype
    row = 0
    for q, k, v in zip(sequences.q, sequences.k, sequences.v, strict=True):
        expected, expected_lse = exact_attention(q, k, v, sequences.scale)
        assert_close(out[row : row + len(q)], expected, 1e-2 if dtype == torch.bfloat16 else 1e-5)
        assert_close(lse[row : row + len(q)], expected_lse, 3e-3 if dtype == torch.bfloat16 else 1e-5)
        row += len(q)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS[:2])
def test_prefill_chunks_and_decode_agree_bit_for_bit(
    backend: str, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    lengths = [90, 33] if backend == "cpu" else [35, 18]
    long, short = lengths
    sequences = Sequences(lengths, heads, dtype, 16)
    with rk.use_backend(backend):
        whole = sequences.attend([(0, 0, long)])[0]
        other = sequences.attend([(1, 0, short)])[0]
        for count in (1, 2):
            with num_threads(count):
                decodes = torch.cat([sequences.attend([(0, i, i + 1)])[0] for i in range(long)])
                assert_same_bits(decodes, whole)
                both = sequences.attend([(1, 0, 7), (0, 0, 13), (1, 7, short), (0, 13, long)])[0]
                assert_same_bits(both, torch.cat((other[:7], whole[:13], other[7:], whole[13:])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_the_block_size_changes_no_bit(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    expected = Sequences([150], heads, dtype, 16).attend([(0, 0, 150)])
    for block_size in (1, 5, 8, 24, 32, 64):
        result = Sequences([150], heads, dtype, block_size).attend([(0, 0, 150)])
        assert_same_bits(result[0], expected[0])
        assert_same_bits(result[1], expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_attention_equals_the_paged_one_bit_for_bit(backend: str, dtype: torch.dtype) -> None:
    lengths = [40, 1, 70, 16] if backend == "cpu" else [20, 1, 17]
    sequences = Sequences(lengths, (9, 3, 64), dtype, 24)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    with rk.use_backend(backend):
        paged = sequences.attend([(i, 0, n) for i, n in enumerate(lengths)])[0]
        q, k, v = (rows_apart(torch.cat(parts)) for parts in (sequences.q, sequences.k, sequences.v))
        packed = rk.varlen_attention(q, k, v, starts, sequences.scale)
    assert_same_bits(packed, paged)


@pytest.mark.parametrize("backend", WINDOW_BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [(1, None), (16, None), (50, 3.0), (None, 2.0), (1000, None)])
def test_windows_and_soft_caps_equal_float64(
    backend: str, dtype: torch.dtype, options: tuple[int | None, float | None]
) -> None:
    lengths = [1, 16, 37] if backend == "reference" else [1, 16, 17, 70, 200]
    sequences = Sequences(lengths, (4, 2, 24), dtype, 16)
    with rk.use_backend(backend):
        out, lse = sequences.attend([(i, n // 3, n) for i, n in enumerate(lengths)], *options)
    row = 0
    for q, k, v in zip(sequences.q, sequences.k, sequences.v, strict=True):
        q = q[len(q) // 3 :]
        expected, expected_lse = exact_attention(q, k, v, sequences.scale, *options)
        assert_close(out[row : row + len(q)], expected, 1e-2 if dtype == torch.bfloat16 else 1e-5)
        assert_close(lse[row : row + len(q)], expected_lse, 3e-3 if dtype == torch.bfloat16 else 1e-5)
        row += len(q)


def test_wrong_arguments_are_named() -> None:
    cache = nan_caches(2, 16, 2, 16, torch.float32)
    table, starts, lens = torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    with pytest.raises(ValueError, match="multiple of the 2 key-value heads"):
        rk.paged_attention(randn(1, 3, 16), cache, table, starts, lens, 16, 1.0)
    with pytest.raises(TypeError, match=r"block_tables is torch.int64"):
        rk.paged_attention(randn(1, 4, 16), cache, table.long(), starts, lens, 16, 1.0)
    with pytest.raises(ValueError, match="query_start has shape"):
        rk.paged_attention(randn(1, 4, 16), cache, table, starts[:1], lens, 16, 1.0)
    arguments = (randn(1, 4, 16), cache, table, starts, lens, 16, 1.0)
    with pytest.raises(ValueError, match="window=0 is not valid: it must be an integer of at least 1"):
        rk.paged_attention(*arguments, window=0)
    with pytest.raises(ValueError, match=r"soft_cap=-1.0 is not valid: it must be a finite number above 0"):
        rk.paged_attention(*arguments, soft_cap=-1.0)
    with pytest.raises(ValueError, match="query_start must go from 0 to the number of tokens, 3"):
        rk.varlen_attention(randn(3, 4, 16), randn(3, 2, 16), randn(3, 2, 16), torch.tensor([0, 2]).int(), 1.0)
    with pytest.raises(ValueError, match="k has shape"):
        rk.varlen_attention(randn(3, 4, 16), randn(2, 2, 16), randn(2, 2, 16), torch.tensor([0, 3]).int(), 1.0)
