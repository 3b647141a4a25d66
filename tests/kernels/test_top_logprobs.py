"""`top_logprobs` against a full sort in float64: order, ties, ranks, chosen ids, rows without a distribution."""

import numpy as np
import pytest
import torch

import rollout_kernels as rk
from tests.support.kernels import BACKENDS, assert_same_bits, draw_arguments, num_threads, randn, rows_apart
from tests.support.sampling import banned_ids
from tests.support.top_logprobs import check_against_sort


def with_ties(rows: int, vocab_size: int, levels: int) -> torch.Tensor:
    logits = torch.randint(0, levels, (rows, vocab_size), generator=torch.Generator().manual_seed(levels)).float()
    logits[:, vocab_size // 2] = -0.0  # equal to 0.0
    return logits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 33, 131, 4099])
def test_the_largest_in_order_and_ranks_of_given_tokens(backend: str, vocab_size: int) -> None:
    rows = torch.tensor([2, 0, 1, 2, 2])
    tokens = torch.tensor([0, vocab_size - 1, vocab_size // 2, -1, 1 % vocab_size])
    lists = banned_ids([], [0], list(range(min(vocab_size, 40))), [vocab_size - 1, 0, 0], [])
    for seed, scale in ((vocab_size, 0.01), (vocab_size + 1, 3.0)):
        logits = randn(3, vocab_size, seed=seed, scale=scale)
        for num_top in sorted({0, 1, min(5, vocab_size), min(64, vocab_size), vocab_size - 1, vocab_size}):
            with rk.use_backend(backend):
                result = rk.top_logprobs(rows_apart(logits), num_top, tokens, rows, lists)
            check_against_sort(logits, result, num_top, tokens, rows, lists)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("levels", [1, 2, 9])
def test_equal_logits_come_in_the_order_of_their_ids_and_share_a_rank(backend: str, levels: int) -> None:
    logits, tokens = with_ties(4, 3000, levels), torch.tensor([1500, 0, 2999, 17])
    for num_top in (1, 20, 2900, 3000):
        with rk.use_backend(backend):
            result = rk.top_logprobs(logits, num_top, tokens)
        check_against_sort(logits, result, num_top, tokens)
    if levels == 1:
        assert result.ranks.tolist() == [1] * 4
        assert result.top_ids[0].tolist() == list(range(3000))


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_minus_infinity_come_last_with_logprob_minus_infinity(backend: str) -> None:
    logits = randn(3, 2500, seed=3, scale=2.0)
    logits[0, 7:] = -torch.inf
    logits[1, ::2] = -torch.inf
    logits[2, :2499] = -torch.inf
    tokens = torch.tensor([2000, 4, 0])
    for num_top in (5, 10, 2500):
        with rk.use_backend(backend):
            result = rk.top_logprobs(logits, num_top, tokens, None, banned_ids([9], [1], [2499, 2]))
        check_against_sort(logits, result, num_top, tokens, None, banned_ids([9], [1], [2499, 2]))
        assert (result.logprobs == -torch.inf).all()
        assert result.ranks.tolist() == [8, 1251, 2]
    assert result.top_logprobs[2, 0] == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_distribution_say_so_and_leave_neighbours_alone(backend: str) -> None:
    """case SP-05"""
    clean = randn(5, 200, seed=4)
    poisoned = clean.clone()
    poisoned[0, 199], poisoned[2, 5], poisoned[4] = torch.nan, torch.inf, -torch.inf
    tokens, lists = torch.tensor([3, 4, 5, 6, 7]), banned_ids([1], [2], [3, 4], [], [5])
    with rk.use_backend(backend):
        result, expected = rk.top_logprobs(poisoned, 4, tokens, None, lists), rk.top_logprobs(clean, 4, tokens)
    bad, good = [0, 2, 4], [1, 3]
    assert result.top_ids[bad].tolist() == [[0, 1, 2, 3]] * 3
    assert result.ranks[bad].tolist() == [0] * 3
    assert result.top_logprobs[bad].isnan().all()
    assert result.logprobs[bad].isnan().all()
    assert result.chosen_logprobs.isnan().tolist() == [True, False, True, True, True]
    for name in ("top_ids", "top_logprobs", "logprobs", "ranks"):
        assert_same_bits(getattr(result, name)[good], getattr(expected, name)[good])


def test_a_large_vocabulary() -> None:
    logits, tokens = randn(2, 49_152, seed=5, scale=3.0), torch.tensor([40_000, 11])
    for num_top in (1, 5, 20, 300, 49_152):
        result = rk.top_logprobs(logits, num_top, tokens)
        check_against_sort(logits, result, num_top, tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_are_bit_for_bit_those_of_sample_whatever_stands_beside(backend: str) -> None:
    logits = randn(24, 1003, seed=6, scale=2.0)
    with rk.use_backend(backend):
        drawn = rk.sample(logits, **draw_arguments(24, temperature=0.7, top_k=40))
        tokens = drawn.token_ids
        lists = (torch.arange(25, dtype=torch.int32), tokens.int())
        whole = rk.top_logprobs(logits, 1003, tokens, None, lists)
        assert_same_bits(whole.logprobs, drawn.raw_logprobs)
        assert_same_bits(whole.chosen_logprobs, drawn.raw_logprobs)
        assert_same_bits(whole.top_logprobs.gather(1, whole.ranks.long()[:, None] - 1)[:, 0], drawn.raw_logprobs)
        for threads in (1, 2):
            with num_threads(threads):
                for rows in ([5], [23, 0, 5, 5], list(range(24))):
                    part = torch.tensor(rows)
                    few = rk.top_logprobs(logits, 6, tokens[part], part)
                    assert_same_bits(few.top_ids, whole.top_ids[part, :6])
                    assert_same_bits(few.top_logprobs, whole.top_logprobs[part, :6])
                    assert_same_bits(few.logprobs, whole.logprobs[part])
                    assert_same_bits(few.ranks, whole.ranks[part])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_top": 10}, "num_top=10 is not valid: it must be an integer from 0 to 9"),
        ({"num_top": -1}, "num_top=-1"),
        ({"num_top": True}, "num_top=True"),
        ({"token_ids": torch.tensor([0, 9])}, r"token_ids\[1\]=9 is not valid: it must be -1 \(none\) to 8"),
        ({"token_ids": torch.tensor([-2, 0])}, r"token_ids\[0\]=-2"),
        ({"token_ids": torch.tensor([0, 1, 2])}, r"row_index\[2\]=2 is not valid: it must be a row of the logits"),
        ({"row_index": torch.tensor([0, 2])}, r"row_index\[1\]=2"),
        ({"row_index": torch.tensor([-1, 0])}, r"row_index\[0\]=-1"),
        ({"chosen": banned_ids([0], [9])}, "chosen of draw 1 is not valid: it must be ascending offsets, and token"),
        ({"chosen": banned_ids([-1], [0])}, "chosen of draw 0 is not valid"),
        ({"chosen": (torch.tensor([0, 3, 2]).int(), torch.tensor([1, 2]).int())}, "chosen of draw"),
        ({"chosen": (torch.tensor([0, 1, 1]).int(), torch.tensor([1, 2]).int())}, "chosen offsets must go from 0 to"),
    ],
)
def test_values_out_of_range_are_named(backend: str, given: dict, message: str) -> None:
    arguments: dict = {"num_top": 2, "token_ids": torch.tensor([0, 1])}
    with rk.use_backend(backend), pytest.raises(ValueError, match=message):
        rk.top_logprobs(randn(2, 9), **arguments | given)


def test_wrong_dtypes_and_gradients_are_refused() -> None:
    tokens = torch.tensor([0, 1])
    with pytest.raises(TypeError, match=r"logits is torch\.bfloat16"):
        rk.top_logprobs(randn(2, 9, dtype=torch.bfloat16), 1, tokens)
    with pytest.raises(TypeError, match=r"token_ids is torch\.int32"):
        rk.top_logprobs(randn(2, 9), 1, tokens.int())
    with pytest.raises(TypeError, match=r"row_index is torch\.int32"):
        rk.top_logprobs(randn(2, 9), 1, tokens, tokens.int())
    with pytest.raises(TypeError, match=r"chosen is torch\.int64"):
        rk.top_logprobs(randn(2, 9), 1, tokens, None, (torch.arange(3), tokens))
    with pytest.raises(ValueError, match="top_logprobs has no gradient"):
        rk.top_logprobs(randn(2, 9).requires_grad_(), 1, tokens)
    empty = rk.top_logprobs(randn(2, 9), 3, tokens[:0])
    assert empty.top_ids.shape == (0, 3)
    assert np.prod(empty.chosen_logprobs.shape) == 0
