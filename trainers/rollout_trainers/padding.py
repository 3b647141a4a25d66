"""Micro-batches for models that want their sequences beside one another, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout_trainers.packing import PackedBatch, pack
from rollout_trainers.types import Sample


@dataclass(frozen=True, slots=True)
class PaddedTokens:
    """The sequences of a packed batch. `input_ids`, `attention_mask`: int64 [S, width]; the mask is 1 on tokens, and
    follows from their counts, never from their values. `rows`: int64 [C], which places of the flattened batch predict
    the packed batch's targets."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    rows: torch.Tensor


def pad(batch: PackedBatch) -> PaddedTokens:
    """Lays a packed batch out again: every sequence gets a copy of the prompt that it shared. The state after the
    prompt, from which the first token of all of them is predicted, is taken from the first copy."""
    starts = batch.query_start.long()
    lengths = starts.diff()
    width = int(lengths.max())
    mask = torch.arange(width, device=starts.device)[None, :] < lengths[:, None]
    input_ids = torch.zeros(mask.shape, dtype=torch.int64, device=starts.device)
    input_ids[mask] = batch.input_ids[batch.gather]
    places = batch.first[batch.rows]
    sequences = torch.searchsorted(starts, places, right=True) - 1
    return PaddedTokens(input_ids, mask.long(), sequences * width + places - starts[sequences])


def plan_padded_micro_batches(samples: Sequence[Sample], token_budget: int) -> list[list[int]]:
    """Indices of the samples of each micro-batch, the longest first, so that few places are padding: at most
    `token_budget` places in all.

    A sample longer than the budget gets a batch of its own; one without completion tokens is in no batch.
    """
    widths = [
        len(sample.prompt_token_ids) + len(sample.completion_token_ids) - 1 if sample.num_tokens else 0
        for sample in samples
    ]
    batches: list[list[int]] = []
    for index in sorted(range(len(samples)), key=lambda index: -widths[index]):
        if widths[index] == 0:
            continue
        if not batches or (len(batches[-1]) + 1) * widths[batches[-1][0]] > token_budget:
            batches.append([])
        batches[-1].append(index)
    return batches


def padded_micro_batches(samples: Sequence[Sample], token_budget: int) -> list[PackedBatch]:
    """All samples with a completion token, in micro-batches which, padded, have at most `token_budget` places."""
    return [pack(samples, indices) for indices in plan_padded_micro_batches(samples, token_budget)]
