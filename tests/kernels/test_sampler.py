"""`sample`: kept sets, masses and logprobs against a simple sampler; greedy; bans; rows that are not numbers."""

import numpy as np
import pytest
import torch

import rollout_kernels as rk
from tests.support.kernels import BACKENDS, assert_same_bits, draw_arguments, num_threads, randn
from tests.support.sampling import FILTERS, banned_ids, check_against_simple


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("vocab_size", [1, 17, 131])
def test_kept_set_mass_and_logprobs(backend: str, filters: dict, temperature: float, vocab_size: int) -> None:
    for seed in range(3):
        logits = randn(1, vocab_size, seed=seed, scale=2.5)
        draws = 60
        arguments = draw_arguments(draws, temperature=temperature, seed=seed, **filters)
        with rk.use_backend(backend):
            result = rk.sample(logits, **arguments, row_index=torch.zeros(draws, dtype=torch.int64))
        check_against_simple(logits, result, temperature, filters)


@pytest.mark.parametrize("scale", [0.001, 1.0, 4.0])
@pytest.mark.parametrize(
    "filters",
    [
        *FILTERS[1:],
        {"top_k": 1},
        {"top_k": 1000},
        {"top_k": 20_000},
        {"top_p": 0.999},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"min_p": 1e-6},
    ],
)
def test_kept_set_of_a_large_vocabulary(filters: dict, scale: float) -> None:
    logits = randn(1, 30_011, seed=3, scale=scale)
    arguments = draw_arguments(20, temperature=0.9, **filters)
    with rk.use_backend("cpu"):
        result = rk.sample(logits, **arguments, row_index=torch.zeros(20, dtype=torch.int64))
    check_against_simple(logits, result, 0.9, filters)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("levels", [1, 2, 7])
def test_kept_set_with_many_equal_logits(backend: str, filters: dict, levels: int) -> None:
    """top-k keeps the ties of the k-th largest; top-p takes equal tokens in the order of their ids."""
    logits = torch.randint(0, levels, (1, 500), generator=torch.Generator().manual_seed(levels)).float()
    logits[0, 3] = -0.0  # equal to 0.0
    with rk.use_backend(backend):
        result = rk.sample(logits, **draw_arguments(80, **filters), row_index=torch.zeros(80, dtype=torch.int64))
    check_against_simple(logits, result, 1.0, filters)


def test_top_p_takes_the_lowest_ids_among_equals() -> None:
    logits = torch.zeros(1, 200)
    arguments = draw_arguments(500, top_p=0.104)  # 21 of 200 equal tokens
    result = rk.sample(logits, **arguments, row_index=torch.zeros(500, dtype=torch.int64))
    assert set(result.token_ids.tolist()) == set(range(21))


@pytest.mark.parametrize("filters", FILTERS)
def test_both_backends_draw_the_same_tokens(filters: dict) -> None:
    logits = randn(40, 1000, seed=8, scale=2.0)
    arguments = draw_arguments(40, temperature=0.8, seed=torch.arange(40) * 7919, **filters)
    with rk.use_backend("cpu"):
        fast = rk.sample(logits, **arguments)
    with rk.use_backend("reference"):
        slow = rk.sample(logits, **arguments)
    assert torch.equal(fast.token_ids, slow.token_ids)
    assert len(set(fast.token_ids.tolist())) > 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draw_does_not_depend_on_its_neighbours_or_threads(backend: str) -> None:
    rows = 40 if backend == "cpu" else 12
    logits = randn(rows, 517, seed=2, scale=3.0)
    mixed = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 2.0]).repeat(rows // 4),
        "top_k": torch.tensor([0, 9, 50]).repeat(rows)[:rows],
        "top_p": torch.tensor([1.0, 0.8]).repeat(rows)[:rows],
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.02, 0.0]).repeat(rows)[:rows],
        "seed": torch.arange(rows) * 12345,
        "sample_index": torch.arange(rows) % 5,
    }
    arguments = draw_arguments(rows, **mixed)
    with rk.use_backend(backend):
        whole = rk.sample(logits, **arguments)
        for count in (1, 2):
            with num_threads(count):
                for part in (slice(0, rows), slice(3, 4), slice(5, 12)):
                    result = rk.sample(logits[part], **{name: value[part] for name, value in arguments.items()})
                    for name in rk.SampleResult.__slots__:
                        assert_same_bits(getattr(result, name), getattr(whole, name)[part])
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
        shuffled = rk.sample(logits, **{name: value[order] for name, value in arguments.items()}, row_index=order)
        assert_same_bits(shuffled.token_ids, whole.token_ids[order])
        assert_same_bits(shuffled.sampled_logprobs, whole.sampled_logprobs[order])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_without_filters_the_logprob_is_that_of_token_logprobs(backend: str, temperature: float) -> None:
    logits = randn(30, 1003, seed=5, scale=2.0)
    for off in ({}, {"top_k": -1}, {"top_k": 1003}, {"top_k": 5000}):
        with rk.use_backend(backend):
            result = rk.sample(logits, **draw_arguments(30, temperature=temperature, **off))
            assert_same_bits(result.sampled_logprobs, rk.token_logprobs(logits, result.token_ids, temperature))
            assert_same_bits(result.raw_logprobs, rk.token_logprobs(logits, result.token_ids))
            entropy = rk.token_logprobs_and_entropy(logits, result.token_ids, temperature)[1]
            assert_same_bits(result.entropy, entropy)
        assert (result.kept_mass == 1.0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [5, 16, 131, 4099])
def test_greedy_takes_the_lowest_id_among_the_largest(backend: str, vocab_size: int) -> None:
    logits = randn(6, vocab_size, seed=1)
    best = logits.amax() + 1
    expected = [0, vocab_size - 1, vocab_size // 2, 1, 2, 3]
    for row, token in enumerate(expected):
        logits[row, token:] = torch.where(torch.arange(token, vocab_size) % 2 == token % 2, best, logits[row, token:])
    with rk.use_backend(backend):
        result = rk.sample(logits, **draw_arguments(6, temperature=0.0, top_k=3, top_p=0.5))
    assert result.token_ids.tolist() == expected
    assert (result.sampled_logprobs == 0.0).all()
    raw = logits.double().log_softmax(-1)
    torch.testing.assert_close(result.raw_logprobs.double(), raw[range(6), expected], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.kept_mass, result.raw_logprobs.exp(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(result.entropy.double(), -(raw.exp() * raw).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_temperatures(backend: str) -> None:
    """Tiny temperatures give the argmax and finite numbers, huge ones the uniform distribution (case SP-01)."""
    logits = randn(7, 300, seed=4, scale=20.0)
    logits[:, 17] = logits.amax() + 0.5
    temperatures = torch.tensor([0.0, 1e-45, 1e-38, 1e-12, 1e-4, 1e-2, 1e6])
    with rk.use_backend(backend):
        result = rk.sample(logits, **draw_arguments(7, temperature=temperatures, top_p=0.999))
    assert (result.status == rk.STATUS_OK).all()
    assert (result.token_ids[:6] == 17).all()
    for name in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy"):
        assert getattr(result, name).isfinite().all(), name
    assert (result.sampled_logprobs[:6] == 0.0).all()
    assert (result.kept_mass[1:6] == 1.0).all()
    assert abs(result.entropy[6].item() - np.log(300)) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_minus_infinity_are_never_drawn(backend: str) -> None:
    logits = randn(50, 100, seed=3)
    logits[:, 10:] = -torch.inf
    logits[0] = -torch.inf
    logits[0, 99] = -3e38
    for filters in FILTERS:
        with rk.use_backend(backend):
            result = rk.sample(logits, **draw_arguments(50, temperature=1.3, **filters))
        assert result.token_ids[0] == 99
        assert (result.token_ids[1:] < 10).all()
        assert result.entropy.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_rows_that_are_not_numbers_draw_nothing_and_leave_neighbours_alone(backend: str, temperature: float) -> None:
    """case SP-05"""
    clean = randn(8, 131, seed=6)
    poisoned = clean.clone()
    poisoned[0] = torch.nan
    poisoned[2, 130] = torch.nan
    poisoned[4, 7] = torch.inf
    poisoned[6] = -torch.inf
    poisoned[7, 3], poisoned[7, 5] = torch.nan, -torch.inf
    bad, good = [0, 2, 4, 6, 7], [1, 3, 5]
    arguments = draw_arguments(8, temperature=temperature, top_p=0.9)
    with rk.use_backend(backend):
        result, expected = rk.sample(poisoned, **arguments), rk.sample(clean, **arguments)
    assert result.token_ids[bad].tolist() == [-1] * 5
    assert result.status[bad].tolist() == [rk.STATUS_NOT_NUMBERS] * 3 + [rk.STATUS_NOTHING_LEFT, rk.STATUS_NOT_NUMBERS]
    assert result.sampled_logprobs[bad].isnan().all()
    for name in rk.SampleResult.__slots__:
        assert_same_bits(getattr(result, name)[good], getattr(expected, name)[good])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filters", FILTERS)
def test_banned_ids_have_probability_zero(backend: str, filters: dict) -> None:
    logits, draws, temperature = randn(1, 60, seed=9, scale=2.0), 200, 0.8
    best = int(logits[0].argmax())
    allowed = logits.clone()
    allowed[0, [best, 5]] = -torch.inf
    arguments = draw_arguments(draws, temperature=temperature, **filters)
    rows = torch.zeros(draws, dtype=torch.int64)
    with rk.use_backend(backend):
        result = rk.sample(logits, **arguments, row_index=rows, banned=banned_ids(*[[best, 5]] * draws))
        masked = rk.sample(allowed, **arguments, row_index=rows)
    assert_same_bits(result.token_ids, masked.token_ids)
    torch.testing.assert_close(result.sampled_logprobs, masked.sampled_logprobs, rtol=1e-6, atol=1e-6)
    raw, tempered = logits[0].double().log_softmax(-1), (logits[0].double() / temperature).log_softmax(-1)
    torch.testing.assert_close(result.raw_logprobs.double(), raw[result.token_ids], rtol=1e-6, atol=2e-6)
    total = result.sampled_logprobs.double() + result.kept_mass.double().log()  # the tempered logprob, bans or not
    torch.testing.assert_close(total, tempered[result.token_ids], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropy.double()[0], -(tempered.exp() * tempered).sum(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bans_are_per_draw_and_a_draw_with_nothing_left_says_so(backend: str) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    with rk.use_backend(backend):
        result = rk.sample(
            logits,
            **draw_arguments(4, temperature=0.0),
            row_index=torch.zeros(4, dtype=torch.int64),
            banned=banned_ids([], [0], [1, 0], [0, 1, 2]),
        )
    assert result.token_ids.tolist() == [0, 1, 2, -1]
    assert result.status.tolist() == [rk.STATUS_OK] * 3 + [rk.STATUS_NOTHING_LEFT]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -1.0, r"temperature\[1\]=-1.0 is not valid: it must be a finite number"),
        ("temperature", torch.nan, r"temperature\[1\]=nan"),
        ("temperature", torch.inf, r"temperature\[1\]=inf"),
        ("top_k", -2, r"top_k\[1\]=-2"),
        ("top_p", 0.0, r"top_p\[1\]=0.0 is not valid: it must be above 0"),
        ("top_p", torch.nan, r"top_p\[1\]=nan"),
        ("min_p", 1.5, r"min_p\[1\]=1.5"),
        ("row_index", 2, r"row_index\[1\]=2 is not valid: it must be a row of the logits"),
    ],
)
def test_values_out_of_range_are_named(backend: str, name: str, value: float, message: str) -> None:
    arguments: dict = draw_arguments(2) | {"row_index": torch.tensor([0, 1])}
    arguments[name][1] = value
    with rk.use_backend(backend), pytest.raises(ValueError, match=message):
        rk.sample(randn(2, 9), **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_bans_and_shapes_are_named(backend: str) -> None:
    with rk.use_backend(backend):
        with pytest.raises(ValueError, match="banned of draw 1 is not valid"):
            rk.sample(randn(2, 9), **draw_arguments(2), banned=banned_ids([8], [9]))
        with pytest.raises(ValueError, match="banned offsets end at 2, but there are 1 ids"):
            rk.sample(randn(1, 9), **draw_arguments(1), banned=(torch.tensor([0, 2]).int(), torch.tensor([1]).int()))
        with pytest.raises(ValueError, match="row_index of draw 2 is not valid"):
            rk.sample(randn(2, 9), **draw_arguments(3))
        with pytest.raises(TypeError, match=r"logits is torch\.bfloat16"):
            rk.sample(randn(2, 9, dtype=torch.bfloat16), **draw_arguments(2))
        with pytest.raises(TypeError, match=r"top_k is torch\.int64"):
            wrong = draw_arguments(2)
            wrong["top_k"] = wrong["top_k"].long()
            rk.sample(randn(2, 9), **wrong)
        assert rk.sample(randn(2, 9)[:0], **draw_arguments(0)).token_ids.shape == (0,)
