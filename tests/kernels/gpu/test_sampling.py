"""The Triton `sample`, in the interpreter: kept sets, masses and logprobs against a sampler that sorts, and the
reference's tokens."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rollout_kernels as rk
from rollout_kernels.dispatch import use_kernels
from rollout_kernels.gpu.filters import CANDIDATES
from rollout_kernels.gpu.logprobs import token_logprobs
from rollout_kernels.gpu.sampling import sample
from tests.support.kernels import assert_same_bits, draw_arguments, randn, rows_apart
from tests.support.sampling import FILTERS, banned_ids, check_against_simple

KERNELS = SimpleNamespace(name="triton", sample=sample, token_logprobs=token_logprobs)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """`torch.empty` gives NaN, and the largest integers, instead of what lay in memory."""
    torch.use_deterministic_algorithms(True)
    try:
        with use_kernels(KERNELS):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def mixed_arguments(draws: int) -> dict:
    """Every combination that a batch can mix, each draw with a seed of its own."""
    return draw_arguments(
        draws,
        temperature=torch.tensor([0.7, 1.0, 0.0, 2.0, 1.0]).repeat(draws)[:draws],
        top_k=torch.tensor([0, 9, 50, 0]).repeat(draws)[:draws],
        top_p=torch.tensor([1.0, 0.8, 1.0]).repeat(draws)[:draws],
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.02, 0.0, 0.0, 0.1]).repeat(draws)[:draws],
        seed=torch.arange(draws) * 12345,
        sample_index=torch.arange(draws) % 5,
    )


def from_one_row(logits: torch.Tensor, draws: int, **values: float | torch.Tensor) -> rk.SampleResult:
    return rk.sample(logits, **draw_arguments(draws, **values), row_index=torch.zeros(draws, dtype=torch.int64))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("vocab_size", "temperature"), [(1, 1.0), (131, 0.6), (4500, 1.7)])
def test_kept_set_mass_and_logprobs(filters: dict, vocab_size: int, temperature: float) -> None:
    logits = randn(1, vocab_size, seed=vocab_size, scale=2.5)
    check_against_simple(logits, from_one_row(logits, 3, temperature=temperature, **filters), temperature, filters)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 100},
        {"top_k": 1 + CANDIDATES},
        {"top_k": 6000, "top_p": 0.9},
        {"top_p": 0.97},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"min_p": 1e-6},
        {"top_p": 0.999, "min_p": 1e-6},
    ],
)
@pytest.mark.parametrize("scale", [0.001, 4.0])
def test_more_candidates_than_the_list_holds(filters: dict, scale: float) -> None:
    """Flat rows keep thousands of tokens, so that bisection runs over the row itself."""
    logits = randn(1, 9001, seed=3, scale=scale)
    check_against_simple(logits, from_one_row(logits, 2, temperature=0.9, **filters), 0.9, filters)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.2}])
@pytest.mark.parametrize("levels", [1, 2, 7])
def test_kept_set_with_many_equal_logits(filters: dict, levels: int) -> None:
    logits = torch.randint(0, levels, (1, 500), generator=torch.Generator().manual_seed(levels)).float()
    logits[0, 3] = -0.0  # equal to 0.0
    check_against_simple(logits, from_one_row(logits, 3, **filters), 1.0, filters)


@pytest.mark.parametrize(("vocab_size", "kept"), [(200, 21), (6000, 5401)])
def test_top_p_takes_the_lowest_ids_among_equals(vocab_size: int, kept: int) -> None:
    top_p = 0.104 if vocab_size == 200 else 0.9001
    result = from_one_row(torch.zeros(1, vocab_size), 4, top_p=top_p)
    assert (result.token_ids < kept).all()
    np.testing.assert_allclose(result.kept_mass.numpy(), kept / vocab_size, rtol=1e-6)
    np.testing.assert_allclose(result.sampled_logprobs.numpy(), -np.log(kept), rtol=1e-6)


@pytest.mark.parametrize("filters", FILTERS)
def test_the_tokens_are_the_reference_s(filters: dict) -> None:
    """Seeded where there are filters: about once in 5000 draws a threshold falls within the rounding of the masses."""
    draws = 7
    logits = randn(draws, 1000, seed=7, scale=2.0) if filters else torch.randn(draws, 1000) * 2.0
    arguments = draw_arguments(draws, temperature=0.8, seed=torch.arange(draws) * 7919, **filters)
    result = rk.sample(logits, **arguments)
    with rk.use_backend("reference"):
        expected = rk.sample(logits, **arguments)
    # A float32 race can differ from one in float64 where two scores are within 1e-6 of each other: once in a million.
    assert torch.equal(result.token_ids, expected.token_ids)
    torch.testing.assert_close(result.kept_mass, expected.kept_mass, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(result.sampled_logprobs, expected.sampled_logprobs, rtol=2e-6, atol=4e-6)
    assert len(set(result.token_ids.tolist())) > 2


def test_a_draw_does_not_depend_on_its_neighbours_or_its_place_in_memory() -> None:
    rows = 12
    logits, arguments = randn(rows, 517, seed=2, scale=3.0), mixed_arguments(rows)
    whole = rk.sample(logits, **arguments)
    order = torch.randperm(rows)
    shuffled = rk.sample(rows_apart(logits), **{k: v[order] for k, v in arguments.items()}, row_index=order)
    bans = banned_ids(*[[] if row % 4 else [row, 516] for row in range(rows)])
    beside_bans = rk.sample(logits, **arguments, banned=bans)
    for name in rk.SampleResult.__slots__:
        assert_same_bits(getattr(shuffled, name), getattr(whole, name)[order])
        free = [row for row in range(rows) if row % 4]
        assert_same_bits(getattr(beside_bans, name)[free], getattr(whole, name)[free])
    for row in (0, 1, 7):
        part = slice(row, row + 1)
        alone = rk.sample(logits[part], **{k: v[part] for k, v in arguments.items()})
        for name in rk.SampleResult.__slots__:
            assert_same_bits(getattr(alone, name), getattr(whole, name)[part])


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_without_filters_the_logprob_is_that_of_token_logprobs(temperature: float) -> None:
    logits = randn(2, 4100, seed=5, scale=2.0)
    for off in ({}, {"top_k": -1}, {"top_k": 4100}, {"top_k": 50_000}):
        result = rk.sample(logits, **draw_arguments(2, temperature=temperature, **off))
        logprobs, entropy = rk.token_logprobs_and_entropy(logits, result.token_ids, temperature)
        assert_same_bits(result.sampled_logprobs, logprobs)
        assert_same_bits(result.entropy, entropy)
        assert_same_bits(result.raw_logprobs, rk.token_logprobs(logits, result.token_ids))
        assert (result.kept_mass == 1.0).all()


@pytest.mark.parametrize("vocab_size", [5, 131, 4099])
def test_greedy_takes_the_lowest_id_among_the_largest(vocab_size: int) -> None:
    expected = [0, vocab_size - 1, vocab_size // 2, 1]
    logits = randn(4, vocab_size, seed=1)
    best = logits.amax() + 1
    for row, token in enumerate(expected):
        logits[row, token:] = torch.where(torch.arange(token, vocab_size) % 2 == token % 2, best, logits[row, token:])
    result = rk.sample(logits, **draw_arguments(4, temperature=0.0, top_k=3, top_p=0.5))
    assert result.token_ids.tolist() == expected
    assert (result.sampled_logprobs == 0.0).all()
    raw = logits.double().log_softmax(-1)
    torch.testing.assert_close(result.raw_logprobs.double(), raw[range(4), expected], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.kept_mass, result.raw_logprobs.exp(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(result.entropy.double(), -(raw.exp() * raw).sum(-1), rtol=1e-5, atol=1e-5)


def test_extreme_temperatures() -> None:
    logits = randn(7, 300, seed=4, scale=20.0)
    logits[:, 17] = logits.amax() + 0.5
    temperatures = torch.tensor([0.0, 1e-45, 1e-38, 1e-12, 1e-4, 1e-2, 1e6])
    result = rk.sample(logits, **draw_arguments(7, temperature=temperatures, top_p=0.999))
    assert (result.status == rk.STATUS_OK).all()
    assert (result.token_ids[:6] == 17).all()
    for name in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy"):
        assert getattr(result, name).isfinite().all(), name
    assert (result.sampled_logprobs[:6] == 0.0).all()
    assert (result.kept_mass[1:6] == 1.0).all()
    assert abs(result.entropy[6].item() - np.log(300)) < 1e-4


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05}])
def test_logits_of_minus_infinity_are_never_drawn(filters: dict) -> None:
    logits = randn(6, 100, seed=3)
    logits[:, 10:] = -torch.inf
    logits[0] = -torch.inf
    logits[0, 99] = -3e38
    result = rk.sample(logits, **draw_arguments(6, temperature=1.3, **filters))
    assert result.token_ids[0] == 99
    assert (result.token_ids[1:] < 10).all()
    assert result.entropy.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_rows_that_are_not_numbers_draw_nothing_and_leave_neighbours_alone(temperature: float, filters: dict) -> None:
    clean = randn(7, 131, seed=6)
    poisoned = clean.clone()
    poisoned[0] = torch.nan
    poisoned[2, 130] = torch.nan
    poisoned[4, 7] = torch.inf
    poisoned[6] = -torch.inf
    bad, good = [0, 2, 4, 6], [1, 3, 5]
    arguments = draw_arguments(7, temperature=temperature, **filters)
    result, expected = rk.sample(poisoned, **arguments), rk.sample(clean, **arguments)
    assert result.token_ids[bad].tolist() == [-1] * 4
    assert result.status[bad].tolist() == [rk.STATUS_NOT_NUMBERS] * 3 + [rk.STATUS_NOTHING_LEFT]
    assert result.sampled_logprobs[bad].isnan().all()
    for name in rk.SampleResult.__slots__:
        assert_same_bits(getattr(result, name)[good], getattr(expected, name)[good])


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_k": 40, "top_p": 0.97, "min_p": 0.005}])
def test_banned_ids_have_probability_zero(filters: dict) -> None:
    logits, draws, temperature = randn(1, 60, seed=9, scale=2.0), 8, 0.8
    best = int(logits[0].argmax())
    allowed = logits.clone()
    allowed[0, [best, 5]] = -torch.inf
    arguments = draw_arguments(draws, temperature=temperature, **filters)
    rows = torch.zeros(draws, dtype=torch.int64)
    result = rk.sample(logits, **arguments, row_index=rows, banned=banned_ids(*[[best, 5]] * draws))
    masked = rk.sample(allowed, **arguments, row_index=rows)
    assert_same_bits(result.token_ids, masked.token_ids)
    torch.testing.assert_close(result.sampled_logprobs, masked.sampled_logprobs, rtol=1e-6, atol=1e-6)
    raw, tempered = logits[0].double().log_softmax(-1), (logits[0].double() / temperature).log_softmax(-1)
    torch.testing.assert_close(result.raw_logprobs.double(), raw[result.token_ids], rtol=1e-6, atol=2e-6)
    total = result.sampled_logprobs.double() + result.kept_mass.double().log()  # the tempered logprob, bans or not
    torch.testing.assert_close(total, tempered[result.token_ids], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropy.double()[0], -(tempered.exp() * tempered).sum(), rtol=1e-5, atol=0.0)


def test_bans_are_per_draw_and_a_draw_with_nothing_left_says_so() -> None:
    rows, bans = torch.zeros(4, dtype=torch.int64), banned_ids([], [0], [1, 0], [0, 1, 2])
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    result = rk.sample(logits, **draw_arguments(4, temperature=0.0), row_index=rows, banned=bans)
    assert result.token_ids.tolist() == [0, 1, 2, -1]
    assert result.status.tolist() == [rk.STATUS_OK] * 3 + [rk.STATUS_NOTHING_LEFT]


def test_a_ban_list_longer_than_a_block() -> None:
    """Bits of one word are set by several threads; what is left is what is drawn."""
    left = [3, 40, 299]
    bans = banned_ids([token for token in range(300) if token not in left])
    result = rk.sample(torch.zeros(1, 300), **draw_arguments(1, temperature=1.0), banned=bans)
    assert int(result.token_ids) in left
    assert abs(result.kept_mass.item() - 0.01) < 1e-8
    assert abs(result.sampled_logprobs.item() + np.log(3)) < 1e-6


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -1.0, r"temperature\[1\]=-1.0 is not valid: it must be a finite number"),
        ("temperature", torch.nan, r"temperature\[1\]=nan"),
        ("top_k", -2, r"top_k\[1\]=-2"),
        ("top_p", 0.0, r"top_p\[1\]=0.0 is not valid: it must be above 0"),
        ("min_p", 1.5, r"min_p\[1\]=1.5"),
        ("row_index", 2, r"row_index\[1\]=2 is not valid: it must be a row of the logits"),
    ],
)
def test_values_out_of_range_on_the_host_are_named(name: str, value: float, message: str) -> None:
    arguments: dict = draw_arguments(2) | {"row_index": torch.tensor([0, 1])}
    arguments[name][1] = value
    with pytest.raises(ValueError, match=message):
        rk.sample(randn(2, 9), **arguments)


def test_bad_bans_and_sizes_on_the_host_are_named() -> None:
    with pytest.raises(ValueError, match="banned of draw 1 is not valid"):
        rk.sample(randn(2, 9), **draw_arguments(2), banned=banned_ids([8], [9]))
    descending = (torch.tensor([0, 2, 1]).int(), torch.tensor([1, 2]).int())
    with pytest.raises(ValueError, match="banned of draw 1 is not valid"):
        rk.sample(randn(2, 9), **draw_arguments(2), banned=descending)
    with pytest.raises(ValueError, match="row_index of draw 2 is not valid"):
        rk.sample(randn(2, 9), **draw_arguments(3))
    with pytest.raises(ValueError, match="logits has 262145 columns"):
        rk.sample(torch.zeros(1, 262_145), **draw_arguments(1))
    assert rk.sample(randn(2, 9)[:0], **draw_arguments(0)).token_ids.shape == (0,)


def test_values_out_of_range_on_the_device_draw_nothing_and_leave_neighbours_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, rows = randn(2, 9, seed=1), torch.tensor([0, 1, 0, 1, 0, 2, -1])
    good = draw_arguments(7, top_p=0.9)
    expected = rk.sample(logits, **good, row_index=rows.clamp(0, 1))
    monkeypatch.setattr("rollout_kernels.checks.draw_values", lambda *arguments: None)
    bad = {name: value.clone() for name, value in good.items()}
    bad["temperature"][1], bad["temperature"][2] = torch.nan, -1.0
    bad["top_p"][3], bad["min_p"][4] = 0.0, 2.0
    result = rk.sample(logits, **bad, row_index=rows)
    assert result.token_ids[1:].tolist() == [-1] * 6
    assert (result.status[1:] == rk.STATUS_NOT_NUMBERS).all()
    for name in rk.SampleResult.__slots__:
        assert_same_bits(getattr(result, name)[:1], getattr(expected, name)[:1])
    outside = banned_ids([9, -1, 2**31 - 1])
    unmoved = rk.sample(logits[:1], **{name: value[:1] for name, value in good.items()}, banned=outside)
    assert_same_bits(unmoved.token_ids, expected.token_ids[:1])
