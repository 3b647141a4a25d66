"""The Triton attention against float64, and what makes a sample a pure function: the same bits for every block size,
chunking, batch, padding, and way of dealing out the splits."""

from itertools import pairwise

import pytest
import torch

from rollout_kernels.gpu import attention
from rollout_kernels.gpu.attention import SPLIT, attention_blocks, paged_attention
from tests.kernels.gpu.paged import QUANTISED, Sequences
from tests.support.kernels import assert_close, assert_same_bits, randn

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
HEADS = [(3, 1, 64), (4, 1, 128), (7, 1, 80), (2, 2, 72), (5, 1, 96), (6, 1, 64), (8, 1, 32), (2, 1, 256), (1, 1, 7)]


@pytest.fixture(params=["one program a row", "splits dealt out"])
def dealing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the splits of a row folded by one program, and with each split computed by its own."""
    monkeypatch.setattr(attention, "_ENOUGH_PROGRAMS", 1 if request.param == "one program a row" else 1 << 20)
    return request.param


def assert_exact(sequences: Sequences, dtype: torch.dtype) -> None:
    """All positions of all sequences agree with float64, and so do the last positions on their own (decodes)."""
    expected, expected_lse = sequences.exact()
    out, lse = sequences.attend(sequences.whole())
    assert_close(out, expected, TOLERANCE[dtype])
    assert_close(lse, expected_lse, 2e-5 if dtype is torch.float32 else 1e-4)
    last = torch.tensor(sequences.lengths).cumsum(0) - 1
    decoded, decoded_lse = sequences.attend([(i, n - 1, n) for i, n in enumerate(sequences.lengths)])
    assert_same_bits(decoded, out[last])
    assert_same_bits(decoded_lse, lse[last])


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "-".join(map(str, heads)))
def test_attention_equals_float64_for_head_sizes_and_groups(heads: tuple[int, int, int]) -> None:
    assert_exact(Sequences([1, 19], heads), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_equals_float64_in_other_dtypes(dtype: torch.dtype) -> None:
    assert_exact(Sequences([5, 70], (2, 1, 40), dtype), dtype)


def test_decodes_around_the_ends_of_blocks_tiles_and_splits_equal_float64(dealing: str) -> None:
    lengths = [1, 15, 16, 17, 64, 65, SPLIT, SPLIT + 1]
    sequences = Sequences(lengths, (3, 1, 32))
    out, lse = sequences.attend([(i, n - 1, n) for i, n in enumerate(lengths)])
    expected, expected_lse = sequences.exact()
    last = torch.tensor(lengths).cumsum(0) - 1
    assert_close(out, expected[last], 1e-2)
    assert_close(lse, expected_lse[last], 1e-4)


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (20, 5.0), (64, None), (None, 2.0)])
def test_windows_and_soft_caps_equal_float64(window: int | None, soft_cap: float | None, dealing: str) -> None:
    sequences = Sequences([3, SPLIT + 10], (2, 1, 16), torch.float32, window=window, soft_cap=soft_cap)
    rows = [(0, 0, 3), (1, 0, 5), (1, 60, 65), (1, SPLIT - 2, SPLIT + 3)]
    out, lse = sequences.attend(rows)
    expected, expected_lse = sequences.exact()
    offsets = (0, 3)
    chosen = torch.cat([torch.arange(offsets[s] + first, offsets[s] + end) for s, first, end in rows])
    assert_close(out, expected[chosen], 3e-5)
    assert_close(lse, expected_lse[chosen], 3e-5)


@pytest.mark.parametrize("cache_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_quantised_cache_is_read_as_what_it_stands_for(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    sequences = Sequences([2, 70], (2, 1, 24), dtype, 16, cache_dtype)
    out, lse = sequences.attend(sequences.whole())
    expected, expected_lse = sequences.exact()
    assert_close(out, expected, 1e-5 if dtype is torch.float32 else 1e-2)
    assert_close(lse, expected_lse, 1e-4)


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, 90)])
def test_prefill_random_chunks_and_decodes_have_the_same_bits(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = SPLIT + 20, 17
    sequences = Sequences([long, short], (2, 1, 16), dtype, window=window)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_ENOUGH_PROGRAMS", 1)  # one program a row
        whole, lse = sequences.attend(sequences.whole())
        cuts = [0, *sorted({*torch.randint(1, long, (3,)).tolist()}), long]
        for first, end in pairwise(cuts):
            out, part_lse = sequences.attend([(1, 7, short), (0, first, end)])
            assert_same_bits(out, torch.cat((whole[long + 7 :], whole[first:end])))
            assert_same_bits(part_lse, torch.cat((lse[long + 7 :], lse[first:end])))
    for position in (0, 63, 64, SPLIT - 1, SPLIT, long - 1):  # splits dealt out
        out, part_lse = sequences.attend([(0, position, position + 1)])
        assert_same_bits(out, whole[position : position + 1])
        assert_same_bits(part_lse, lse[position : position + 1])


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_how_splits_are_dealt_out_changes_no_bit(
    cache_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 3 * SPLIT + 17
    sequences = Sequences([length], (2, 1, 16), cache_dtype=cache_dtype)
    rows = [(0, 3, 5), (0, SPLIT - 2, SPLIT + 2), (0, length - 1, length)]
    results = []
    for enough in (1, 14, 1 << 20):  # one program folds; some splits a program; a program for every split
        monkeypatch.setattr(attention, "_ENOUGH_PROGRAMS", enough)
        results.append(sequences.attend(rows))
    monkeypatch.setattr(attention, "_WORKSPACE_LIMIT", 0)
    results.append(sequences.attend(rows))
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])


@pytest.mark.parametrize("block_size", [1, 3, 8, 32, 48])
def test_the_block_size_changes_no_bit(block_size: int) -> None:
    rows = [(0, SPLIT - 1, SPLIT + 2), (0, SPLIT + 9, SPLIT + 10)]
    expected = Sequences([SPLIT + 10], (3, 1, 16)).attend(rows)
    result = Sequences([SPLIT + 10], (3, 1, 16), block_size=block_size).attend(rows)
    assert_same_bits(result[0], expected[0])
    assert_same_bits(result[1], expected[1])


def test_33_sequences_of_very_different_lengths_in_a_padded_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = [*torch.randint(1, 40, (28,), generator=generator).tolist(), 1, 100, SPLIT, SPLIT + 1, 600]
    sequences = Sequences(lengths, (3, 1, 16))
    decodes = [(i, n - 1, n) for i, n in enumerate(lengths)]
    plain, plain_lse = sequences.attend(decodes)
    expected, expected_lse = sequences.exact()
    last = torch.tensor(lengths).cumsum(0) - 1
    assert_close(plain, expected[last], 1e-2)
    assert_close(plain_lse, expected_lse[last], 1e-4)
    out, lse = sequences.attend(decodes, padding=7, empty_slots=5, width=40)
    assert_same_bits(out[:33], plain)
    assert_same_bits(lse[:33], plain_lse)
    assert out[33:].eq(0).all() and lse[33:].eq(-torch.inf).all()
    for i in (0, 29, 32):
        alone, alone_lse = sequences.attend([decodes[i]])
        assert_same_bits(alone[0], plain[i])
        assert_same_bits(alone_lse[0], plain_lse[i])


def test_an_empty_slot_with_a_query_gives_zeros_and_leaves_its_neighbours_alone(dealing: str) -> None:
    """A captured batch may keep one query in each slot: without keys it sees nothing, whatever is in its row."""
    sequences = Sequences([SPLIT + 5, 9], (3, 1, 16))
    expected, expected_lse = sequences.attend([(0, SPLIT + 4, SPLIT + 5), (1, 8, 9)])
    q = torch.full((4, 3, 16), torch.nan, dtype=torch.bfloat16)
    q[0], q[2] = sequences.q[0][-1], sequences.q[1][-1]
    tables = torch.full((4, sequences.tables.shape[1]), -1, dtype=torch.int32)
    tables[[0, 2]] = sequences.tables
    starts, lens = torch.arange(5).int(), torch.tensor([SPLIT + 5, 0, 9, 0]).int()
    out, lse = paged_attention(q, sequences.cache, tables, starts, lens, 16, sequences.scale, True)
    assert lse is not None
    assert_same_bits(out[[0, 2]], expected)
    assert_same_bits(lse[[0, 2]], expected_lse)
    assert out[[1, 3]].eq(0).all() and lse[[1, 3]].eq(-torch.inf).all()


def test_more_sequences_than_offsets_read_at_once() -> None:
    """270 sequences of one token, some of them without a query: each program finds its own."""
    sequences = Sequences([1] * 270, (1, 1, 16), torch.float32)
    asked = [i for i in range(270) if i % 7]
    starts = torch.tensor([0, *(int(i % 7 > 0) for i in range(270))]).cumsum(0).int()
    q = torch.cat([sequences.q[i] for i in asked])
    out, _ = paged_attention(q, sequences.cache, sequences.tables, starts, torch.ones(270).int(), 16, 1.0)
    values = torch.cat([sequences.cache.values[slots // 16, :, slots % 16] for slots in sequences.slots])
    assert torch.equal(out, values[asked])


def test_no_tokens_and_no_lse() -> None:
    sequences = Sequences([3], (2, 1, 16))
    empty = paged_attention(
        randn(0, 2, 16, dtype=torch.bfloat16),
        *(sequences.cache, sequences.tables, torch.zeros(2).int(), torch.zeros(1).int(), 16, 1.0),
    )
    assert empty[0].shape == (0, 2, 16) and empty[1] is None


def test_what_no_configuration_serves_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim=257 is not valid"):
        attention_blocks(257, 1, torch.bfloat16)
    with pytest.raises(ValueError, match="129 query heads share a key-value head"):
        attention_blocks(64, 129, torch.bfloat16)


def test_tiles_end_where_splits_end_and_hold_every_group() -> None:
    for head_dim in (6, 16, 64, 72, 80, 96, 128, 192, 256):
        for group in (1, 3, 8, 64, 128):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                blocks = attention_blocks(head_dim, group, dtype)
                assert SPLIT % blocks.block_n == 0
                assert blocks.block_m >= group and blocks.block_d >= head_dim
