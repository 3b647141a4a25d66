"""Packed micro-batches laid out side by side: what is padding follows from counts, whatever the token values are."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_trainers.packing import pack
from rollout_trainers.padding import pad, padded_micro_batches, plan_padded_micro_batches
from rollout_trainers.types import Sample
from tests.support.samples import make_sample

PAD = EOS = 0  # what places of padding hold may be a token that was sampled

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=6)
samples_of = st.lists(st.builds(make_sample, st.sampled_from([[3], [1, 0, 2], [0, 0]]), tokens), min_size=1, max_size=6)


# case TR-01
def test_every_sequence_has_its_prompt_and_padding_where_nothing_was_sampled():
    samples = [make_sample([5, 6], [7, EOS, 8]), make_sample([5, 6], [EOS]), make_sample([4], [EOS, EOS])]
    padded = pad(pack(samples, range(3)))
    assert padded.input_ids.tolist() == [[5, 6, 7, EOS], [5, 6, PAD, PAD], [4, EOS, PAD, PAD]]
    assert padded.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert padded.rows.tolist() == [1, 2, 3, 1, 8, 9]  # the first token of both is predicted from one copy's state
    assert padded.input_ids.dtype == padded.attention_mask.dtype == padded.rows.dtype == torch.int64


# case TR-01
@given(samples_of)
def test_each_target_is_predicted_from_all_tokens_before_it(samples: list[Sample]):
    batch = pack(samples, range(len(samples)))
    padded = pad(batch)
    width = padded.input_ids.shape[1]
    found = []
    for place in padded.rows.tolist():
        sequence, column = divmod(place, width)
        assert padded.attention_mask[sequence, : column + 1].all()
        found.append(padded.input_ids[sequence, : column + 1].tolist())
    assert found == [
        [*sample.prompt_token_ids, *sample.completion_token_ids[:count]]
        for sample in samples
        for count in range(len(sample.completion_token_ids))
    ]
    assert int(padded.attention_mask.sum()) == int(batch.query_start[-1])


def test_tokens_that_an_environment_gave_are_inputs_and_predict_nothing_of_their_own():
    sample = make_sample([5], [6, 7, 8, 9])
    sample.loss_mask = np.array([True, False, False, True])
    sample.sampled_logprobs = sample.sampled_logprobs[:2]
    padded = pad(pack([sample], [0]))
    assert padded.input_ids.tolist() == [[5, 6, 7, 8]]
    assert padded.rows.tolist() == [0, 3]


@given(samples_of, st.integers(1, 40))
def test_micro_batches_hold_every_sample_once_and_their_places_within_the_budget(samples: list[Sample], budget: int):
    plan = plan_padded_micro_batches(samples, budget)
    assert sorted(index for indices in plan for index in indices) == list(range(len(samples)))
    for indices, batch in zip(plan, padded_micro_batches(samples, budget), strict=True):
        assert batch.sample_indices == tuple(indices)
        assert pad(batch).input_ids.numel() <= budget or len(indices) == 1


def test_samples_without_a_token_are_in_no_micro_batch():
    samples = [make_sample([5, 6], []), make_sample([5, 6], [7])]
    assert plan_padded_micro_batches(samples, 100) == [[1]]
