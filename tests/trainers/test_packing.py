"""Packed micro-batches: which rows predict which tokens, whatever the token values are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_trainers import completion_mask
from rollout_trainers.packing import PackedBatch, pack, pack_micro_batches
from rollout_trainers.types import Sample
from tests.support.samples import make_sample

EOS = 2


# case TR-01
def test_a_packed_batch_predicts_exactly_the_engines_own_completion_tokens():
    samples = [
        make_sample([5, 6], [7, 8, EOS]),  # ends with EOS: the EOS is learned
        make_sample([5], [9, 9, 9, 9], finish_reason="length"),  # hits the length limit
        make_sample([5, EOS], [EOS, 4, EOS, 3], finish_reason="length"),  # EOS in the middle, through ignore_eos
        make_sample([5, 6, 7], [EOS]),  # nothing but EOS, which may be the pad id too
    ]
    batch = pack(samples, range(4))
    assert batch.targets.tolist() == [7, 8, EOS, 9, 9, 9, 9, EOS, 4, EOS, 3, EOS]
    assert batch.num_completion_tokens == sum(sample.num_tokens for sample in samples)
    assert batch.lengths.tolist() == [3, 4, 4, 1]
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 5, 9, 9, 9, 5, EOS, EOS, 4, EOS, 5, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.query_start.tolist() == [0, 4, 8, 13, 16]
    assert batch.query_start.dtype == torch.int32
    assert batch.rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 15]
    assert batch.gather.tolist() == batch.first.tolist() == list(range(16))


def test_a_prompt_that_several_samples_share_is_there_once_and_laid_out_for_each():
    samples = [
        make_sample([5, 6], [7, 8]),
        make_sample([3], [4]),
        make_sample([5, 6], [9]),
        make_sample([5, 6], [1, 2]),
    ]
    batch = pack(samples, range(4))
    assert batch.input_ids.tolist() == [5, 6, 7, 3, 1]
    assert batch.positions.tolist() == [0, 1, 2, 0, 2]
    assert batch.query_start.tolist() == [0, 3, 4, 6, 9]
    assert batch.input_ids[batch.gather].tolist() == [5, 6, 7, 3, 5, 6, 5, 6, 1]
    assert batch.gather[batch.first].tolist() == [0, 1, 2, 3, 4]
    assert batch.targets.tolist() == [7, 8, 4, 9, 1, 2]
    assert batch.input_ids[batch.rows].tolist() == [6, 7, 3, 6, 6, 1]


# case TR-01
def test_the_row_before_a_target_holds_the_token_before_it():
    samples = [make_sample([3, 4], [5, 6, 7]), make_sample([8], [9, 10])]
    batch = pack(samples, range(2))
    before = [4, 5, 6, 8, 9]
    assert batch.input_ids[batch.rows].tolist() == before


# case TR-01
def test_a_sample_without_tokens_is_in_no_batch_and_changes_nothing():
    with_empty = pack_micro_batches([make_sample([5], [6, 7]), make_sample([5], [])], 100)
    without = pack_micro_batches([make_sample([5], [6, 7])], 100)
    assert [batch.sample_indices for batch in with_empty] == [(0,)]
    assert torch.equal(with_empty[0].input_ids, without[0].input_ids)
    with pytest.raises(ValueError, match="sample 0 has 1 prompt and 0 completion tokens"):
        pack([make_sample([5], [])], [0])


# case TR-01
def test_the_mask_of_padded_completions_follows_true_lengths_and_grows_with_padding_only():
    samples = [make_sample([5], [7, 8, EOS]), make_sample([5], []), make_sample([5], [EOS, EOS, 4])]
    mask = completion_mask(samples)
    assert mask.tolist() == [[True, True, True], [False, False, False], [True, True, True]]
    wider = completion_mask(samples, width=6)
    assert torch.equal(wider[:, :3], mask)
    assert not wider[:, 3:].any()
    assert int(wider.sum()) == sum(sample.num_tokens for sample in samples)
    with pytest.raises(ValueError, match="longest completion has 3"):
        completion_mask(samples, width=2)


# case TR-01
def test_tokens_that_were_given_within_an_episode_are_read_and_not_predicted():
    sample = masked_sample([5, 6], [7, EOS, 8, 8, 9, EOS], [1, 1, 0, 0, 1, 1], advantage=0.5)
    plain = make_sample([5, 6], [7])
    assert (sample.num_tokens, sample.policy_token_ids) == (4, [7, EOS, 9, EOS])
    assert sample.policy_spans == [(0, 2), (4, 6)]
    batch = pack([sample, plain], range(2))
    assert batch.input_ids.tolist() == [5, 6, 7, EOS, 8, 8, 9]
    assert batch.targets.tolist() == [7, EOS, 9, EOS, 7]
    assert batch.rows.tolist() == [1, 2, 5, 6, 1]  # the row before each of them
    assert batch.lengths.tolist() == [4, 1] and batch.query_start.tolist() == [0, 7, 9]
    assert batch.advantages.tolist() == [0.5] * 4 + [0.0]
    assert batch.sampler_logprobs.tolist() == [*sample.sampled_logprobs.tolist(), *plain.sampled_logprobs.tolist()]
    assert completion_mask([sample, plain], 7).tolist() == [
        [True, True, False, False, True, True, False],
        [True] + [False] * 6,
    ]
    assert [len(each.sample_indices) for each in pack_micro_batches([sample, plain], 7)] == [2]
    assert [len(each.sample_indices) for each in pack_micro_batches([sample, sample], 11)] == [1, 1]  # 7 + 5 rows


def masked_sample(prompt: list[int], completion: list[int], mask: list[int], advantage: float = 0.0) -> Sample:
    sample = make_sample(prompt, completion, advantage=advantage)
    sample.loss_mask = np.array(mask, np.bool_)
    for name in ("sampled_logprobs", "raw_logprobs", "entropy"):
        setattr(sample, name, getattr(sample, name)[sample.loss_mask])
    return sample


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.array([True, True])}, r"loss_mask bool\[2\]: it must be bool \[3\]"),
        ({"loss_mask": np.array([1, 0, 1])}, r"loss_mask int64\[3\]"),
        ({"loss_mask": np.array([True, False, True])}, "3 logprobs for its 2 tokens"),
        ({"loss_mask": np.zeros(3, np.bool_)}, "0 completion tokens"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(change: dict[str, Any], message: str):
    sample = make_sample([5], [6, 7, 8])
    for name, value in change.items():
        setattr(sample, name, value)
    with pytest.raises(ValueError, match=message):
        pack([sample], [0])


def test_advantages_and_logprobs_stand_beside_their_tokens():
    first, second = make_sample([5], [6, 7], advantage=1.5), make_sample([5], [8], advantage=-2.0)
    batch = pack([first, second], [0, 1])
    assert batch.advantages.tolist() == [1.5, 1.5, -2.0]
    assert batch.old_logprobs.tolist() == [*first.sampled_logprobs.tolist(), *second.sampled_logprobs.tolist()]


def test_recomputed_logprobs_take_the_place_of_the_samplers_in_the_ratio():
    sample = make_sample([5], [6, 7])
    sample.old_logprobs = sample.sampled_logprobs - 1
    batch = pack([sample], [0])
    assert torch.equal(batch.old_logprobs, batch.sampler_logprobs - 1)


@given(
    st.lists(st.tuples(st.sampled_from([(1,), (2, 3), (4, 5, 6)]), st.integers(0, 9)), max_size=30),
    st.integers(1, 40),
)
def test_every_sample_is_in_one_batch_in_order_and_batches_keep_to_the_budget(
    drawn: list[tuple[tuple[int, ...], int]], budget: int
):
    samples = [make_sample(list(prompt), [7] * count) for prompt, count in drawn]
    batches = pack_micro_batches(samples, budget)
    chosen = [index for batch in batches for index in batch.sample_indices]
    assert chosen == [index for index, (_, count) in enumerate(drawn) if count]
    for batch in batches:
        assert len(batch.sample_indices) == 1 or batch.num_input_tokens <= budget
        together = [token for index in batch.sample_indices for token in samples[index].completion_token_ids]
        assert batch.targets.tolist() == together
        inputs = [
            token
            for index in batch.sample_indices
            for token in [*samples[index].prompt_token_ids, *samples[index].completion_token_ids[:-1]]
        ]
        assert batch.input_ids[batch.gather].tolist() == inputs
        assert torch.equal(batch.gather[batch.first], torch.arange(batch.num_input_tokens))


def test_a_batch_moves_to_a_device_with_all_that_it_has():
    batch = pack([make_sample([5, 6], [7, 8])], [0])
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    tensors = [name for name in PackedBatch.__slots__ if isinstance(getattr(batch, name), torch.Tensor)]
    assert len(tensors) > 10
    assert all(getattr(moved, name).is_meta for name in tensors)
    assert moved.sample_indices == batch.sample_indices
