"""The Triton `sample` with adjusted rows, masks and forced tokens, in the interpreter, against a simple sampler."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rollout_kernels as rk
from rollout_kernels.dispatch import use_kernels
from rollout_kernels.gpu.sampling import sample
from tests.support.kernels import assert_same_bits, draw_arguments, randn, rows_apart
from tests.support.sampling import Source, banned_ids, check_draw, masks


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """`torch.empty` gives NaN, and the largest integers, instead of what lay in memory."""
    torch.use_deterministic_algorithms(True)
    try:
        with use_kernels(SimpleNamespace(name="triton", sample=sample)):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("vocab_size", "temperature", "filters"),
    [
        (131, 0.0, {}),
        (131, 1.0, {"top_p": 0.6}),
        (131, 1.0, {"top_k": 5}),
        (4500, 0.7, {}),
        (4500, 0.7, {"top_k": 20, "top_p": 0.95, "min_p": 0.02}),
    ],
)
def test_every_kind_of_draw_side_by_side(vocab_size: int, temperature: float, filters: dict) -> None:
    logits, rows = randn(1, vocab_size, seed=1, scale=2.5), randn(2, vocab_size, seed=2, scale=2.5)
    rows[:, ::5] = -torch.inf
    lists = [np.flatnonzero(np.random.default_rng(seed).random(vocab_size) < 0.5).tolist() for seed in range(2)]
    adjusted, allowed = torch.tensor([-1, 1, -1, 0, 1]), torch.tensor([-1, -1, 1, 0, 0])
    best = int(logits[0].argmax())
    bans, forced = [[], [], [best], [7, 8], []], torch.tensor([best, -1, -1, lists[0][3], lists[1][2]])
    arguments = draw_arguments(5, temperature=temperature, seed=torch.arange(5) * 77, **filters)
    given: dict = {
        "row_index": torch.zeros(5, dtype=torch.int64),
        "banned": banned_ids(*bans),
        "adjusted": (rows_apart(rows), adjusted),
        "allowed": (masks(*lists, vocab_size=vocab_size, beyond=True), allowed),
        "forced": forced,
    }
    result = rk.sample(logits, **arguments, **given)
    for draw in range(5):
        may = np.isin(np.arange(vocab_size), lists[allowed[draw]]) | bool(allowed[draw] < 0)
        may[bans[draw]] = False
        row = logits[0] if adjusted[draw] < 0 else rows[adjusted[draw]]
        source = Source(logits[0].numpy(), row.numpy(), may, temperature, filters, int(forced[draw]))
        check_draw(source, result, draw)
    with rk.use_backend("reference"):
        expected = rk.sample(logits, **arguments, **given)
    assert torch.equal(result.token_ids, expected.token_ids)
    alone = rk.sample(
        logits,
        **{name: value[3:4] for name, value in arguments.items()},
        row_index=given["row_index"][3:4],
        banned=banned_ids(bans[3]),
        adjusted=(rows, adjusted[3:4]),
        allowed=(given["allowed"][0], allowed[3:4]),
        forced=forced[3:4],
    )
    for name in rk.SampleResult.__slots__:
        assert_same_bits(getattr(alone, name), getattr(result, name)[3:4])


@pytest.mark.parametrize(("temperature", "filters"), [(0.0, {}), (0.7, {}), (0.7, {"top_k": 9, "top_p": 0.9})])
def test_arguments_that_change_nothing_change_no_bit(temperature: float, filters: dict) -> None:
    logits, none = randn(2, 300, seed=3, scale=3.0), torch.tensor([-1, -1])
    arguments = draw_arguments(2, temperature=temperature, seed=5, **filters)
    plain = rk.sample(logits, **arguments)
    everything = masks(list(range(300)), vocab_size=300)
    cases: list[dict] = [
        {"adjusted": (logits.flip(0), torch.tensor([1, 0])), "allowed": (everything, torch.tensor([0, 0]))},
        {"adjusted": (logits[:0], none), "allowed": (everything[:0], none), "forced": none},
        {"forced": plain.token_ids},
    ]
    for given in cases:
        result = rk.sample(logits, **arguments, **given)
        for name in rk.SampleResult.__slots__:
            assert_same_bits(getattr(result, name), getattr(plain, name))


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_rows_without_numbers_and_masks_that_leave_nothing_are_told_apart(filters: dict) -> None:
    logits, rows = randn(7, 70, seed=11), randn(5, 70, seed=12)
    rows[0, 69], rows[1, 5], rows[2], rows[3, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[4, 3] = torch.nan
    adjusted, allowed = torch.tensor([0, 1, 2, 3, 4, -1, 3]), torch.tensor([-1, -1, -1, -1, -1, 0, 1])
    given: dict = {"adjusted": (rows, adjusted), "allowed": (masks([], [5, 6], vocab_size=70), allowed)}
    bad, nothing = rk.STATUS_NOT_NUMBERS, rk.STATUS_NOTHING_LEFT
    for forced in (None, torch.full((7,), 5)):
        result = rk.sample(logits, **draw_arguments(7, temperature=0.9, **filters), **given, forced=forced)
        assert result.status.tolist() == [bad, bad, nothing, rk.STATUS_OK, bad, nothing, nothing]
        assert result.num_kept.tolist() == [0, 0, 0, 1, 0, 0, 0]
        assert result.token_ids.tolist() == [-1, -1, -1, 0 if forced is None else 5, -1, -1, -1]
        assert result.sampled_logprobs[3] == (0.0 if forced is None else -torch.inf)
        assert result.kept_mass.isnan().tolist() == [True, True, True, False, True, True, True]


def test_indices_out_of_range_are_named_on_the_host_and_draw_nothing_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, index = randn(3, 9), torch.tensor([0, 4, -2])
    arguments, mask = draw_arguments(3), masks([1], vocab_size=9)
    cases: list[tuple[dict, str]] = [
        ({"adjusted": (randn(2, 9), index)}, "adjusted of draw 1 has index 4"),
        ({"allowed": (mask, index)}, "allowed of draw 1 has index 4"),
        ({"forced": index + 5}, r"forced\[1\]=9"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            rk.sample(logits, **arguments, **given)
    monkeypatch.setattr("rollout_kernels.checks.draw_values", lambda *arguments: None)
    adjusted = rk.sample(logits, **arguments, adjusted=(logits, index))
    assert adjusted.status.tolist() == [rk.STATUS_OK, rk.STATUS_NOT_NUMBERS, rk.STATUS_NOT_NUMBERS]
    allowed = rk.sample(logits, **arguments, allowed=(mask, index))
    assert allowed.status.tolist() == [rk.STATUS_OK, rk.STATUS_NOTHING_LEFT, rk.STATUS_NOTHING_LEFT]
    forced = rk.sample(logits, **arguments, forced=torch.tensor([0, 9, -2]))
    assert forced.status.tolist() == [rk.STATUS_OK, rk.STATUS_NOT_NUMBERS, rk.STATUS_NOT_NUMBERS]
    assert forced.token_ids.tolist() == [0, -1, -1]
