"""`sample` with adjusted rows, masks and forced tokens, and what it says was kept, against a simple sampler."""

import numpy as np
import pytest
import scipy.stats
import torch

import rollout_kernels as rk
from tests.support.kernels import BACKENDS, assert_same_bits, draw_arguments, num_threads, randn, rows_apart
from tests.support.sampling import FILTERS, Source, banned_ids, check_draw, log_softmax, masks, simple_kept

SIZES = [1, 32, 131]
FEW_FILTERS = [FILTERS[0], FILTERS[1], FILTERS[2], FILTERS[7]]
HEATS = [0.0, 0.6, 1.0]


def with_holes(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """The rows with a fifth of their values at -inf, never all."""
    holes = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    holes[:, rows.shape[1] // 2] = False
    return rows.masked_fill(holes, -torch.inf)


def random_ids(vocab_size: int, seed: int) -> list[int]:
    """About half of the ids, in ascending order, at least one."""
    ids = np.flatnonzero(np.random.default_rng(seed).random(vocab_size) < 0.5).tolist()
    return ids or [vocab_size - 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_an_adjusted_row_takes_the_place_of_the_logits_but_for_raw_logprobs(
    backend: str, filters: dict, vocab_size: int
) -> None:
    logits = randn(2, vocab_size, seed=1, scale=2.5)
    rows = with_holes(randn(3, vocab_size, seed=2, scale=2.5), 3)
    index, row_index = torch.tensor([2, -1, 0, 1, -1, 2]), torch.tensor([0, 0, 1, 1, 1, 0])
    may = np.ones(vocab_size, dtype=bool)
    for temperature in HEATS:
        arguments = draw_arguments(6, temperature=temperature, seed=vocab_size, **filters)
        with rk.use_backend(backend):
            result = rk.sample(logits, **arguments, row_index=row_index, adjusted=(rows_apart(rows), index))
        for draw in range(6):
            own = logits[row_index[draw]].numpy()
            row = own if index[draw] < 0 else rows[index[draw]].numpy()
            check_draw(Source(own, row, may, temperature, filters), result, draw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_masks_take_mass_away_with_bans_and_adjusted_rows_or_without(
    backend: str, filters: dict, vocab_size: int
) -> None:
    logits, rows = randn(1, vocab_size, seed=4, scale=2.5), randn(1, vocab_size, seed=5, scale=2.5)
    lists = [random_ids(vocab_size, seed) for seed in range(2)]
    allowed = masks(*lists, vocab_size=vocab_size, beyond=True)
    bans = [[], [0], [], [0, vocab_size // 2], [], [vocab_size // 2]]
    if vocab_size == 1:
        bans = [[]] * 6
    mask_index, row_index = torch.tensor([0, -1, 1, 1, -1, 0]), torch.tensor([-1, -1, 0, -1, 0, 0])
    for temperature in HEATS:
        arguments = draw_arguments(6, temperature=temperature, seed=vocab_size, **filters)
        with rk.use_backend(backend):
            result = rk.sample(
                logits,
                **arguments,
                row_index=torch.zeros(6, dtype=torch.int64),
                banned=banned_ids(*bans),
                allowed=(allowed, mask_index),
                adjusted=(rows, row_index),
            )
        for draw in range(6):
            may = np.isin(np.arange(vocab_size), lists[mask_index[draw]]) | bool(mask_index[draw] < 0)
            may[bans[draw]] = False
            row = logits if row_index[draw] < 0 else rows
            check_draw(Source(logits[0].numpy(), row[0].numpy(), may, temperature, filters), result, draw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filters", FEW_FILTERS)
@pytest.mark.parametrize("temperature", HEATS)
def test_a_forced_token_is_reported_as_if_it_had_been_drawn(backend: str, filters: dict, temperature: float) -> None:
    """Every token of the vocabulary: -inf where filters or masks leave it out. case: teacher forcing"""
    vocab_size = 45
    logits, rows = randn(1, vocab_size, seed=6, scale=2.0), with_holes(randn(1, vocab_size, seed=7, scale=2.0), 1)
    ids = random_ids(vocab_size, 3)
    every = torch.arange(vocab_size)
    may = np.isin(np.arange(vocab_size), ids)
    where = torch.zeros(vocab_size, dtype=torch.int64)
    for adjusted, allowed in [(None, None), ((rows, where), (masks(ids, vocab_size=vocab_size), where))]:
        arguments = draw_arguments(vocab_size, temperature=temperature, position=5, **filters)
        given: dict = {"row_index": where, "adjusted": adjusted, "allowed": allowed}
        with rk.use_backend(backend):
            forced = rk.sample(logits, **arguments, **given, forced=every)
            drawn = rk.sample(logits, **arguments, **given)
            unforced = rk.sample(logits, **arguments, **given, forced=torch.full_like(every, -1))
        token = int(drawn.token_ids[0])
        for name in rk.SampleResult.__slots__:
            assert_same_bits(getattr(unforced, name), getattr(drawn, name))
            assert_same_bits(getattr(forced, name)[token], getattr(drawn, name)[0])
        for id in range(vocab_size):
            row = logits if adjusted is None else rows
            all_may = np.ones(vocab_size, dtype=bool) if allowed is None else may
            check_draw(Source(logits[0].numpy(), row[0].numpy(), all_may, temperature, filters, id), forced, id)
        assert forced.raw_logprobs.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adjusted_copy_of_the_logits_and_a_mask_of_everything_change_no_bit(backend: str) -> None:
    rows = 16
    logits = randn(rows, 523, seed=8, scale=3.0)
    everything = masks(list(range(523)), vocab_size=523)
    for temperature in (*HEATS, 1e-40):
        for filters in FEW_FILTERS:
            arguments = draw_arguments(rows, temperature=temperature, seed=torch.arange(rows), **filters)
            with rk.use_backend(backend):
                plain = rk.sample(logits, **arguments)
                copied = rk.sample(logits, **arguments, adjusted=(logits.flip(0), torch.arange(rows).flip(0)))
                masked = rk.sample(logits, **arguments, allowed=(everything, torch.zeros(rows, dtype=torch.int64)))
            for name in rk.SampleResult.__slots__:
                assert_same_bits(getattr(copied, name), getattr(plain, name))
                if backend == "cpu" or name in ("token_ids", "num_kept", "status", "raw_logprobs", "entropy"):
                    assert_same_bits(getattr(masked, name), getattr(plain, name))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("levels", [1, 3])
def test_the_kept_tokens_come_first_by_logit_and_id_among_ties(backend: str, levels: int) -> None:
    row = torch.randint(0, levels, (1, 500), generator=torch.Generator().manual_seed(levels)).float()
    row[0, 3], row[0, 400:] = -0.0, -torch.inf
    order = np.lexsort((np.arange(500), -row[0].numpy()))
    for filters in [*FILTERS, {"top_k": 450}, {"top_p": 0.999}]:
        arguments = draw_arguments(60, **filters)
        with rk.use_backend(backend):
            result = rk.sample(row, **arguments, row_index=torch.zeros(60, dtype=torch.int64))
        kept = simple_kept(row[0].numpy(), 1.0, **filters)
        assert (result.num_kept == int(kept.sum())).all()
        assert set(order[: kept.sum()]) == set(np.flatnonzero(kept))
        assert set(result.token_ids.tolist()) <= set(order[: kept.sum()].tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_large_vocabulary_with_everything_at_once(temperature: float) -> None:
    vocab_size = 49_152
    logits, rows = randn(2, vocab_size, seed=9, scale=3.0), with_holes(randn(2, vocab_size, seed=10, scale=3.0), 2)
    ids = random_ids(vocab_size, 5)
    may = np.isin(np.arange(vocab_size), ids)
    may[[7, 40_000]] = False
    for filters in ({}, {"top_p": 0.9}, {"top_k": 2000, "top_p": 0.98, "min_p": 1e-4}):
        result = rk.sample(
            logits,
            **draw_arguments(2, temperature=temperature, **filters),
            adjusted=(rows, torch.tensor([1, 0])),
            allowed=(masks(ids, vocab_size=vocab_size), torch.zeros(2, dtype=torch.int64)),
            banned=banned_ids([7, 40_000], [40_000, 7]),
            forced=torch.tensor([-1, int(ids[100])]),
        )
        for draw, forced in ((0, -1), (1, int(ids[100]))):
            source = Source(logits[draw].numpy(), rows[1 - draw].numpy(), may, temperature, filters, forced)
            check_draw(source, result, draw)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", HEATS)
def test_rows_without_numbers_and_masks_that_leave_nothing_are_told_apart(backend: str, temperature: float) -> None:
    """case SP-05"""
    logits, rows = randn(8, 70, seed=11), randn(6, 70, seed=12)
    rows[0, 69], rows[1, 5], rows[2] = torch.nan, torch.inf, -torch.inf
    rows[3, 1:] = -torch.inf
    logits[4, 3] = torch.nan
    # a draw each: NaN, +inf, nothing in the row, one token, logits that are not numbers under a good row, nothing
    # allowed, everything allowed is -inf, a good one
    adjusted = torch.tensor([0, 1, 2, 3, 4, -1, 3, -1])
    allowed = torch.tensor([-1, -1, -1, -1, -1, 0, 1, 1])
    given: dict = {"adjusted": (rows, adjusted), "allowed": (masks([], [5, 6], vocab_size=70), allowed)}
    bad, good = rk.STATUS_NOT_NUMBERS, rk.STATUS_NOTHING_LEFT
    expected = [bad, bad, good, rk.STATUS_OK, bad, good, good, rk.STATUS_OK]
    for forced in (None, torch.full((8,), 5)):
        with rk.use_backend(backend):
            result = rk.sample(logits, **draw_arguments(8, temperature=temperature, top_p=0.9), **given, forced=forced)
        assert result.status.tolist() == expected
        failed = result.status != rk.STATUS_OK
        assert (result.token_ids[failed] == -1).all()
        assert (result.num_kept[failed] == 0).all()
        for name in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy"):
            assert getattr(result, name)[failed].isnan().all()
        assert result.num_kept[3] == 1
        if forced is None:
            assert result.token_ids[3] == 0
            assert result.token_ids[7] in (5, 6)
        else:
            assert result.token_ids[~failed].tolist() == [5, 5]
            assert result.sampled_logprobs[3] == -torch.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draw_alone_has_the_bits_that_it_has_in_a_batch(backend: str) -> None:
    draws = 30
    logits, rows = randn(draws, 517, seed=13, scale=3.0), randn(7, 517, seed=14, scale=3.0)
    lists = masks(*(random_ids(517, seed) for seed in range(4)), vocab_size=517)
    numbers = torch.arange(draws)
    arguments = draw_arguments(
        draws,
        temperature=torch.tensor([0.0, 0.7, 1.0, 2.0]).repeat(draws)[:draws],
        top_k=torch.tensor([0, 9, 50]).repeat(draws)[:draws],
        top_p=torch.tensor([1.0, 0.8]).repeat(draws)[:draws],
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.02, 0.0]).repeat(draws)[:draws],
        seed=numbers * 991,
    )
    adjusted, allowed = (rows, numbers % 8 - 1), (lists, numbers % 5 - 1)
    forced = torch.where(numbers % 6 == 1, numbers * 3, -1)
    with rk.use_backend(backend):
        whole = rk.sample(logits, **arguments, adjusted=adjusted, allowed=allowed, forced=forced)
        for threads in (1, 2):
            with num_threads(threads):
                for part in [slice(0, draws), slice(4, 5), slice(13, 14), slice(20, 26)]:
                    result = rk.sample(
                        logits[part],
                        **{name: value[part] for name, value in arguments.items()},
                        adjusted=(rows, adjusted[1][part]),
                        allowed=(lists, allowed[1][part]),
                        forced=forced[part],
                    )
                    for name in rk.SampleResult.__slots__:
                        assert_same_bits(getattr(result, name), getattr(whole, name)[part])


def test_draws_follow_the_adjusted_and_masked_distribution() -> None:
    draws, vocab_size, temperature = 20_000, 24, 0.8
    logits, rows = randn(1, vocab_size, seed=15), randn(1, vocab_size, seed=16, scale=1.2)
    ids, where = random_ids(vocab_size, 8), torch.zeros(draws, dtype=torch.int64)
    result = rk.sample(
        logits,
        **draw_arguments(draws, temperature=temperature),
        row_index=where,
        adjusted=(rows, where),
        allowed=(masks(ids, vocab_size=vocab_size), where),
    )
    probabilities = np.exp(log_softmax(rows[0, ids].double().numpy() / temperature))
    observed = np.bincount(result.token_ids.numpy(), minlength=vocab_size)
    assert observed.sum() == observed[ids].sum()
    assert scipy.stats.chisquare(observed[ids], probabilities * draws).pvalue > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("adjusted", 2, "adjusted of draw 1 has index 2: it must be -1 or the index of a row of the adjusted logits"),
        ("adjusted", -2, "adjusted of draw 1 has index -2"),
        ("allowed", 1, "allowed of draw 1 has index 1: it must be -1 or the index of a row of the masks"),
        ("allowed", -(2**40), "allowed of draw 1 has index -1099511627776"),
        ("forced", 9, r"forced\[1\]=9 is not valid: it must be -1 or a token id of the vocabulary"),
        ("forced", -2, r"forced\[1\]=-2"),
    ],
)
def test_indices_out_of_range_are_named(backend: str, name: str, value: int, message: str) -> None:
    index = torch.tensor([0, value])
    given = {
        "adjusted": (randn(2, 9), index),
        "allowed": (masks([1], vocab_size=9), index),
        "forced": index,
    }[name]
    with rk.use_backend(backend), pytest.raises(ValueError, match=message):
        rk.sample(randn(2, 9), **draw_arguments(2), **{name: given})


def test_wrong_shapes_and_dtypes_are_named() -> None:
    index = torch.zeros(2, dtype=torch.int64)
    mask = masks([1], vocab_size=40)
    for given, error, message in [
        ({"adjusted": (randn(1, 39), index)}, ValueError, r"adjusted has shape \(1, 39\): it must be \[rows, 40\]"),
        ({"adjusted": (randn(1, 40).double(), index)}, TypeError, r"adjusted is torch\.float64"),
        ({"adjusted": (randn(1, 40), index[:1])}, ValueError, r"adjusted index has shape \(1,\)"),
        ({"allowed": (mask[:, :1], index)}, ValueError, r"allowed has shape \(1, 1\): it must be \[rows, 2\]"),
        ({"allowed": (mask.long(), index)}, TypeError, r"allowed is torch\.int64"),
        ({"allowed": (mask, index.int())}, TypeError, r"allowed index is torch\.int32"),
        ({"allowed": (mask.repeat(2, 2)[:, ::2], index)}, ValueError, "its last dimension must be contiguous"),
        ({"forced": index.int()}, TypeError, r"forced is torch\.int32"),
        ({"forced": index[:1]}, ValueError, r"forced has shape \(1,\): it must be \[2\]"),
    ]:
        with pytest.raises(error, match=message):
            rk.sample(randn(2, 40), **draw_arguments(2), **given)
