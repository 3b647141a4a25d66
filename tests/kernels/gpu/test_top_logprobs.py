"""The Triton `top_logprobs`, in the interpreter, against a full sort in float64."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import rollout_kernels as rk
from rollout_kernels.dispatch import use_kernels
from rollout_kernels.gpu.sampling import sample
from rollout_kernels.gpu.top_logprobs import MAX_SELECTED, top_logprobs
from tests.support.kernels import assert_same_bits, draw_arguments, randn, rows_apart
from tests.support.sampling import banned_ids
from tests.support.top_logprobs import check_against_sort

KERNELS = SimpleNamespace(name="triton", sample=sample, top_logprobs=top_logprobs)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """`torch.empty` gives NaN, and the largest integers, instead of what lay in memory."""
    torch.use_deterministic_algorithms(True)
    try:
        with use_kernels(KERNELS):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("vocab_size", [1, 131, 4500])
def test_the_largest_in_order_and_ranks_of_given_tokens(vocab_size: int) -> None:
    rows, tokens = torch.tensor([2, 0, 2]), torch.tensor([vocab_size - 1, vocab_size // 2, -1])
    lists = banned_ids([], list(range(min(vocab_size, 200))), [vocab_size - 1, 0])
    logits = randn(3, vocab_size, seed=vocab_size, scale=3.0)
    for num_top in sorted({0, 1, min(5, vocab_size), min(MAX_SELECTED + 1, vocab_size), vocab_size}):
        result = rk.top_logprobs(rows_apart(logits), num_top, tokens, rows, lists)
        check_against_sort(logits, result, num_top, tokens, rows, lists)


@pytest.mark.parametrize("num_top", [3, MAX_SELECTED + 6])
def test_ties_and_minus_infinity(num_top: int) -> None:
    logits = torch.randint(0, 3, (3, 5000), generator=torch.Generator().manual_seed(1)).float()
    logits[0, 2500], logits[1, 2:] = -0.0, -torch.inf
    logits[2] = -torch.inf
    logits[2, 4800] = -3e38
    tokens = torch.tensor([2500, 9, 4800])
    result = rk.top_logprobs(logits, num_top, tokens)
    check_against_sort(logits, result, num_top, tokens)


@pytest.mark.parametrize("num_top", [3, MAX_SELECTED + 6])
def test_rows_without_a_distribution_say_so_and_leave_neighbours_alone(num_top: int) -> None:
    clean = randn(5, 200, seed=4)
    poisoned = clean.clone()
    poisoned[0, 199], poisoned[2, 5], poisoned[4] = torch.nan, torch.inf, -torch.inf
    tokens, lists = torch.tensor([3, 4, 5, 6, 7]), banned_ids([1], [2], [3, 4], [], [5])
    result, expected = rk.top_logprobs(poisoned, num_top, tokens, None, lists), rk.top_logprobs(clean, num_top, tokens)
    bad, good = [0, 2, 4], [1, 3]
    assert result.top_ids[bad].tolist() == [list(range(num_top))] * 3
    assert result.ranks[bad].tolist() == [0] * 3
    assert result.top_logprobs[bad].isnan().all()
    assert result.logprobs[bad].isnan().all()
    assert result.chosen_logprobs.isnan().tolist() == [True, False, True, True, True]
    for name in ("top_ids", "top_logprobs", "logprobs", "ranks"):
        assert_same_bits(getattr(result, name)[good], getattr(expected, name)[good])


def test_logprobs_are_bit_for_bit_those_of_sample_whatever_stands_beside() -> None:
    logits = randn(6, 4100, seed=6, scale=2.0)
    drawn = rk.sample(logits, **draw_arguments(6, temperature=0.7))
    tokens = drawn.token_ids
    whole = rk.top_logprobs(logits, 70, tokens, None, (torch.arange(7, dtype=torch.int32), tokens.int()))
    assert_same_bits(whole.logprobs, drawn.raw_logprobs)
    assert_same_bits(whole.chosen_logprobs, drawn.raw_logprobs)
    few = rk.top_logprobs(logits, 3, tokens[[4, 1]], torch.tensor([4, 1]))
    assert_same_bits(few.top_ids, whole.top_ids[[4, 1], :3])
    assert_same_bits(few.top_logprobs, whole.top_logprobs[[4, 1], :3])
    assert_same_bits(few.ranks, whole.ranks[[4, 1]])


def test_values_out_of_range_are_named_on_the_host_and_nan_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens, rows = randn(2, 9, seed=1), torch.tensor([9, 0, -5, 1]), torch.tensor([0, 2, 1, 1])
    with pytest.raises(ValueError, match=r"token_ids\[0\]=9 is not valid"):
        rk.top_logprobs(logits, 2, tokens, rows)
    with pytest.raises(ValueError, match="logits has 262145 columns"):
        rk.top_logprobs(torch.zeros(1, 262_145), 1, tokens[1:2])
    monkeypatch.setattr("rollout_kernels.checks.top_logprob_values", lambda *arguments: None)
    result = rk.top_logprobs(logits, 2, tokens, rows, banned_ids([9, 0], [0], [-1], [1]))
    assert result.logprobs.isnan().tolist() == [True, True, True, False]
    assert result.ranks[:3].tolist() == [0, 0, 0]
    assert result.top_logprobs.isnan().all(1).tolist() == [False, True, False, False]
    assert result.chosen_logprobs.isnan().tolist() == [True, False, True, True, False]
    assert rk.top_logprobs(logits[:0], 2, tokens[:0]).top_ids.shape == (0, 2)
