"""`paged_attention` and `varlen_attention` against float64, and what makes a sample a pure function: the same bits for
every block size, chunking, batch and thread count."""

import pytest
import torch

import rollout_kernels as rk
from rollout_kernels.reference.kv_cache import read_kv, sequence_slots
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

    def __init__(
        self,
        lengths: list[int],
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
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
        self.cache = nan_caches(sum(blocks), block_size, num_kv_heads, head_dim, kv_dtype or dtype)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_without_queries_change_nothing(backend: str) -> None:
    """Recorded decode steps have as many sequences as rows: those that are not there follow, with nothing to do."""
    sequences = Sequences([40, 33], HEADS[0], torch.bfloat16, 16)
    queries = [(0, 30, 35), (1, 32, 33), (1, 17, 20)]
    with rk.use_backend(backend):
        expected = sequences.attend(queries)
        for empty in ([(0, 0, 0)] * 6, [(1, 9, 9), (0, 0, 0)]):
            for place in (0, 1, 3):
                found = sequences.attend([*queries[:place], *empty, *queries[place:]])
                assert_same_bits(found[0], expected[0])
                assert_same_bits(found[1], expected[1])


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


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [(1, None), (70, 2.0), (64, None), (None, 3.0)])
def test_windows_and_soft_caps_change_no_bit_with_chunks_or_neighbours(
    dtype: torch.dtype, options: tuple[int | None, float | None]
) -> None:
    lengths = [190, 33]
    sequences = Sequences(lengths, (6, 2, 64), dtype, 16)
    whole = sequences.attend([(0, 0, 190)], *options)[0]
    decodes = torch.cat([sequences.attend([(1, 32, 33), (0, i, i + 1)], *options)[0][1:] for i in range(0, 190, 9)])
    assert_same_bits(decodes, whole[::9])
    chunks = [sequences.attend([(0, a, b)], *options)[0] for a, b in ((0, 13), (13, 100), (100, 190))]
    assert_same_bits(torch.cat(chunks), whole)


def test_a_window_reads_no_block_that_it_leaves_behind() -> None:
    sequences = Sequences([200], (4, 2, 24), torch.bfloat16, 16)
    expected = sequences.attend([(0, 180, 200)], window=20)[0]
    sequences.tables[0, : (180 - 19) // 16] = 2**30
    assert_same_bits(sequences.attend([(0, 180, 200)], window=20)[0], expected)


# Sequences as paths through a tree: (parent, tokens of its own), the parents' blocks shared.
TREES = {
    "samples of a prompt": [(None, 200), *[(0, n) for n in (1, 5, 64, 100, 3, 130)]],
    "prompts behind a system prompt": [
        (None, 150),
        *[(0, 90), (0, 70), (0, 20)],
        *[(1, n) for n in (10, 80, 33)],
        *[(2, n) for n in (1, 2, 3, 4, 5)],
        *[(3, n) for n in (65, 9)],
    ],
    "nothing in common": [(None, n) for n in (7, 64, 65, 128, 200)],
    "one is the beginning of another": [(None, 64), (0, 64), (1, 64), (2, 1), (0, 1), (1, 30)],
    "many prompts of two samples": [*[(None, 60 + n) for n in range(13)], *[(n // 2, 3 + 2 * n) for n in range(26)]],
}


class Tree:
    """Sequences that share the blocks of their parents, in one cache; only whole blocks are shared."""

    def __init__(
        self, nodes: list[tuple[int | None, int]], heads: tuple[int, int, int], kv_dtype: torch.dtype | None, block: int
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.block, self.scale, self.num_heads, self.head_dim = block, head_dim**-0.5, num_heads, head_dim
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        fresh = iter(torch.randperm(400, generator=torch.Generator().manual_seed(3)).tolist())
        self.cache = nan_caches(400, block, num_kv_heads, head_dim, kv_dtype or torch.bfloat16)
        for parent, own in nodes:
            begin = 0 if parent is None else self.lengths[parent] // block * block
            shared = [] if parent is None else self.tables[parent][: begin // block]
            length = begin + own
            self.tables.append([*shared, *(next(fresh) for _ in range(-(-own // block)))])
            self.lengths.append(length)
            positions = torch.arange(begin, length)
            blocks = torch.tensor(self.tables[-1])[positions // block]
            slots = blocks * (-(-block // 16) * 16) + positions % block
            k, v = (randn(own, num_kv_heads, head_dim, dtype=torch.bfloat16, seed=length + i) for i in range(2))
            rk.write_kv(k, v, self.cache, slots)

    def attend(self, queries: list[tuple[int, int]], window: int | None = None) -> list[torch.Tensor]:
        """The outputs of (sequence, number of its last positions) items, computed in one call."""
        q = [
            randn(count, self.num_heads, self.head_dim, dtype=torch.bfloat16, seed=sequence)
            for sequence, count in queries
        ]
        starts = torch.tensor([0, *(count for _, count in queries)]).cumsum(0).int()
        width = max(len(self.tables[sequence]) for sequence, _ in queries)
        tables = torch.full((len(queries), width), -1, dtype=torch.int32)
        for row, (sequence, _) in zip(tables, queries, strict=True):
            row[: len(self.tables[sequence])] = torch.tensor(self.tables[sequence])
        lengths = torch.tensor([self.lengths[sequence] for sequence, _ in queries], dtype=torch.int32)
        arguments = (torch.cat(q), self.cache, tables, starts, lengths, self.block, self.scale)
        out = rk.paged_attention(*arguments, window=window)
        assert isinstance(out, torch.Tensor)
        return list(out.split([count for _, count in queries]))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 24), (10, 5, 24)])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_sequences_that_share_blocks_have_the_bits_of_each_alone(
    tree: str, heads: tuple[int, int, int], kv_dtype: torch.dtype | None
) -> None:
    for block in (16, 8, 24):
        sequences = Tree(TREES[tree], heads, kv_dtype, block)
        order = torch.randperm(len(TREES[tree]), generator=torch.Generator().manual_seed(block)).tolist()
        for window in (None, 90):
            for count in (1, 3):
                queries = [(sequence, min(count, TREES[tree][sequence][1])) for sequence in order]
                alone = [sequences.attend([query], window)[0] for query in queries]
                for threads in (1, 2):
                    with num_threads(threads):
                        for together, expected in zip(sequences.attend(queries, window), alone, strict=True):
                            assert_same_bits(together, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [16, 20])
def test_attention_over_a_quantised_cache_equals_float64(
    backend: str, dtype: torch.dtype, heads: tuple[int, int, int], block_size: int
) -> None:
    lengths = [1, 37] if backend == "reference" else [1, 16, 70, 200]
    sequences = Sequences(lengths, heads, dtype, block_size, torch.int8)
    with rk.use_backend(backend):
        out, lse = sequences.attend([(i, 0, n) for i, n in enumerate(lengths)])
    row = 0
    for i, (q, n) in enumerate(zip(sequences.q, lengths, strict=True)):
        k, v = read_kv(sequences.cache, sequence_slots(sequences.tables[i], n, block_size), heads[2])
        expected, expected_lse = exact_attention(q, k, v, sequences.scale)
        assert_close(out[row : row + n], expected, 1e-2 if dtype == torch.bfloat16 else 1e-5)
        assert_close(lse[row : row + n], expected_lse, 3e-3 if dtype == torch.bfloat16 else 1e-5)
        row += n


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_cache_gives_the_same_bits_in_chunks_and_decodes(dtype: torch.dtype) -> None:
    whole = Sequences([150], (9, 3, 64), dtype, 16, torch.int8).attend([(0, 0, 150)])[0]
    for block_size in (16, 20):
        sequences = Sequences([150], (9, 3, 64), dtype, block_size, torch.int8)
        decodes = torch.cat([sequences.attend([(0, i, i + 1)])[0] for i in range(0, 150, 7)])
        assert_same_bits(decodes, whole[::7])
        assert_same_bits(torch.cat([sequences.attend([(0, a, b)])[0] for a, b in ((0, 77), (77, 150))]), whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("block_size", [16, 8, 24])
def test_a_last_key_that_stands_elsewhere_changes_no_bit(
    backend: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, block_size: int
) -> None:
    """Guesses that exclude each other share a block table: each has the bits of a sequence of its own."""
    lengths = [130] if backend == "cpu" else [40]
    num_keys, heads = lengths[0], (9, 3, 64)
    sequences = Sequences(lengths, heads, dtype, block_size, kv_dtype)
    ends = (num_keys - 30, 64, 33, 17, num_keys - 9) if backend == "cpu" else (33, 17)
    places = [num_keys - 1 - i for i in range(len(ends))]
    slots_per_block = -(-block_size // 16) * 16
    k, v = (randn(1, heads[1], heads[2], dtype=dtype, seed=seed) for seed in (5, 6))

    def slots(positions: list[int]) -> torch.Tensor:
        position = torch.tensor(positions)
        return sequences.tables[0, position // block_size].long() * slots_per_block + position % block_size

    def attend(lens: list[int], last_places: list[int] | None) -> torch.Tensor:
        q = torch.cat([sequences.q[0][n - 1 : n] for n in lens])
        count = len(lens)
        out = rk.paged_attention(
            *(rows_apart(q), sequences.cache, sequences.tables[:1].expand(count, -1).contiguous()),
            *(torch.arange(count + 1).int(), torch.tensor(lens).int(), block_size, sequences.scale),
            last_places=None if last_places is None else torch.tensor(last_places).int(),
        )
        assert isinstance(out, torch.Tensor)
        return out

    with rk.use_backend(backend):
        plain = attend([ends[0], ends[1]], None)
        for place in places:
            rk.write_kv(k, v, sequences.cache, slots([place]))
        for threads in (1, 2):
            with num_threads(threads):
                mixed = attend([*ends, ends[0], ends[1]], [*places, -1, -1])
                assert_same_bits(mixed[len(ends) :], plain)
        for i, end in enumerate(ends):
            rk.write_kv(k, v, sequences.cache, slots([end - 1]))  # where it would stand if it came
            assert_same_bits(mixed[i : i + 1], attend([end], None))
            rk.write_kv(sequences.k[0][end - 1 : end], sequences.v[0][end - 1 : end], sequences.cache, slots([end - 1]))


def test_float8_caches_are_for_the_reference() -> None:
    lengths, heads = [33], (4, 2, 24)
    with rk.use_backend("reference"):
        sequences = Sequences(lengths, heads, torch.bfloat16, 16, torch.float8_e4m3fn)
        out = sequences.attend([(0, 0, 33)])[0]
    k, v = read_kv(sequences.cache, sequence_slots(sequences.tables[0], 33, 16), 24)
    assert_close(out, exact_attention(sequences.q[0], k, v, sequences.scale)[0], 1e-2)
    with pytest.raises(TypeError, match="float8_e4m3fn: the CPU kernels take bfloat16, float32 and int8"):
        sequences.attend([(0, 0, 33)])


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
    with pytest.raises(ValueError, match=r"scale=0.0 is not valid: it must be above 0"):
        rk.paged_attention(*arguments[:-1], 0.0)
    with pytest.raises(ValueError, match=r"soft_cap=-1.0 is not valid: it must be a finite number above 0"):
        rk.paged_attention(*arguments, soft_cap=-1.0)
    with pytest.raises(ValueError, match="query_start must go from 0 to the number of tokens, 3"):
        rk.varlen_attention(randn(3, 4, 16), randn(3, 2, 16), randn(3, 2, 16), torch.tensor([0, 2]).int(), 1.0)
    with pytest.raises(ValueError, match="k has shape"):
        rk.varlen_attention(randn(3, 4, 16), randn(2, 2, 16), randn(2, 2, 16), torch.tensor([0, 3]).int(), 1.0)
