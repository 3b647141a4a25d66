"""Padding-free micro-batches: sequences one after the other, shared prompts once, and which rows predict what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from rollout_trainers.types import Sample


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences of one micro-batch, flat. A prompt that several of them begin with is there once.

    The last completion token of a sequence is predicted but is never an input, so a sequence of p prompt and c
    completion tokens has p + c - 1 rows. Which rows predict completion tokens follows from those counts alone, so
    that token values (an EOS in the middle, a pad id equal to EOS) cannot change it. Where a sample's `loss_mask` says
    that tokens were given, these are inputs and are not predicted: "completion tokens" below are the policy's own.

    `input_ids`, `positions`: int64 [T], the rows that the model computes. Attention sees the sequences laid out one
    after the other: `query_start`: int32 [S + 1] in that layout, `gather`: int64 [E], the row at each of its places,
    `first`: int64 [T], the first place of each row. `rows`: int64 [C], the row whose hidden state predicts completion
    token `targets` int64 [C]. `lengths`: int64 [S], completion tokens of each sequence. `sampler_logprobs`,
    `old_logprobs` (the ratio's denominator: the sampler's, unless the trainer recomputed them), `advantages`:
    float32 [C]. `reference_logprobs`, `importance`, `values` and `returns` (a critic's, before the step's updates, and
    what they should have been): float32 [C], where the samples have them. `sample_indices`: positions in the list that
    was packed. `oldest_versions` int64 [S]: the oldest policy that has sampled some token of each sequence.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    gather: torch.Tensor
    first: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    lengths: torch.Tensor
    sampler_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    sample_indices: tuple[int, ...]
    oldest_versions: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    importance: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    @classmethod
    def filler(cls) -> PackedBatch:
        """One token of input and none to predict: a pass over it takes part in the ranks' collectives, and gives a
        gradient of zeros."""
        integers, floats = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        return cls(
            input_ids=torch.zeros(1, dtype=torch.int64),
            positions=torch.zeros(1, dtype=torch.int64),
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            gather=torch.zeros(1, dtype=torch.int64),
            first=torch.zeros(1, dtype=torch.int64),
            rows=integers,
            targets=integers,
            lengths=integers,
            sampler_logprobs=floats,
            old_logprobs=floats,
            advantages=floats,
            sample_indices=(),
            oldest_versions=integers,
            reference_logprobs=floats,
            importance=floats,
        )

    def to(self, device: torch.device) -> PackedBatch:
        """With all tensors on `device`; itself where they are there."""
        if self.input_ids.device == device:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)

    @property
    def num_input_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_completion_tokens(self) -> int:
        return self.targets.numel()


def plan_micro_batches(samples: Sequence[Sample], token_budget: int) -> list[list[int]]:
    """Indices of the samples of each micro-batch, in order, filled up to `token_budget` rows.

    A prompt that is in the batch already costs nothing. A sample longer than the budget gets a batch of its own; one
    without completion tokens, from which nothing can be learned, is in no batch.
    """
    batches: list[list[int]] = []
    prompts: set[tuple[int, ...]] = set()
    used = 0
    for index, sample in enumerate(samples):
        if sample.num_tokens == 0:
            continue
        prompt = tuple(sample.prompt_token_ids)
        own = len(sample.completion_token_ids) - 1
        rows = own + (0 if prompt in prompts else len(prompt))
        if not batches or used + rows > token_budget:
            batches.append([])
            prompts, used = set(), 0
            rows = own + len(prompt)
        batches[-1].append(index)
        prompts.add(prompt)
        used += rows
    return batches


@dataclass(slots=True)
class _Layout:
    """The growing lists of a packed batch."""

    input_ids: list[int] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    gather: list[np.ndarray] = field(default_factory=list)
    first: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    prompts: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)  # rows of the prompts that are there

    def add(self, sample: Sample) -> None:
        prompt = tuple(sample.prompt_token_ids)
        place, num_prompt, num_inputs = self.starts[-1], len(prompt), len(sample.completion_token_ids) - 1
        if prompt not in self.prompts:
            self.prompts[prompt] = self._new_rows(list(prompt), 0, place)
        new = self._new_rows(sample.completion_token_ids[:-1], num_prompt, place + num_prompt)
        self.gather += [self.prompts[prompt], new]
        predicting = np.concatenate([self.prompts[prompt][-1:], new])
        self.rows.append(predicting if sample.loss_mask is None else predicting[sample.loss_mask])
        self.starts.append(place + num_prompt + num_inputs)

    def _new_rows(self, token_ids: list[int], position: int, place: int) -> np.ndarray:
        """Appends rows for tokens from `position` of their sequence on, which stand from `place` on in the layout."""
        rows = np.arange(len(self.input_ids), len(self.input_ids) + len(token_ids))
        self.input_ids += token_ids
        self.positions.append(np.arange(position, position + len(token_ids)))
        self.first.append(np.arange(place, place + len(token_ids)))
        return rows


def pack(samples: Sequence[Sample], indices: Sequence[int]) -> PackedBatch:
    """Packs `samples[i] for i in indices`, each of at least one completion token and one prompt token.

    Raises `ValueError` for others, and where arrays and mask do not fit the tokens.
    """
    layout = _Layout()
    for index in indices:
        sample = samples[index]
        _check_fits(index, sample)
        layout.add(sample)
    chosen = [samples[index] for index in indices]
    lengths = torch.tensor([sample.num_tokens for sample in chosen], dtype=torch.int64)
    return PackedBatch(
        input_ids=torch.tensor(layout.input_ids, dtype=torch.int64),
        positions=_joined(layout.positions),
        query_start=torch.tensor(layout.starts, dtype=torch.int32),
        gather=_joined(layout.gather),
        first=_joined(layout.first),
        rows=_joined(layout.rows),
        targets=torch.tensor([token for sample in chosen for token in sample.policy_token_ids], dtype=torch.int64),
        lengths=lengths,
        sampler_logprobs=_joined([sample.sampled_logprobs for sample in chosen]),
        old_logprobs=_joined([sample.frozen_logprobs for sample in chosen]),
        advantages=_joined([_advantages(sample) for sample in chosen]),
        sample_indices=tuple(indices),
        oldest_versions=torch.tensor([sample.oldest_version for sample in chosen], dtype=torch.int64),
        reference_logprobs=_joined_where_there([sample.reference_logprobs for sample in chosen]),
        importance=_joined_where_there([sample.importance for sample in chosen]),
        values=_joined_where_there([sample.values for sample in chosen]),
        returns=_joined_where_there([sample.returns for sample in chosen]),
    )


def _check_fits(index: int, sample: Sample) -> None:
    mask, num_completion = sample.loss_mask, len(sample.completion_token_ids)
    if mask is not None and (mask.dtype != np.bool_ or mask.shape != (num_completion,)):
        raise ValueError(
            f"sample {index} has a loss_mask {mask.dtype}{list(mask.shape)}: it must be bool [{num_completion}], one a "
            "completion token"
        )
    num_tokens = sample.num_tokens
    if not sample.prompt_token_ids or num_tokens == 0:
        raise ValueError(f"sample {index} has {len(sample.prompt_token_ids)} prompt and {num_tokens} completion tokens")
    if len(sample.sampled_logprobs) != num_tokens:
        raise ValueError(f"sample {index} has {len(sample.sampled_logprobs)} logprobs for its {num_tokens} tokens")


def _joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _joined_where_there(parts: Sequence[np.ndarray | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    return _joined(there) if len(there) == len(parts) else None


def _advantages(sample: Sample) -> np.ndarray:
    if sample.token_advantages is not None:
        return sample.token_advantages
    return np.full(sample.num_tokens, sample.advantage, dtype=np.float32)


def pack_micro_batches(samples: Sequence[Sample], token_budget: int) -> list[PackedBatch]:
    """All samples with a completion token, in micro-batches of at most `token_budget` rows."""
    return [pack(samples, indices) for indices in plan_micro_batches(samples, token_budget)]


def completion_mask(samples: Sequence[Sample], width: int | None = None) -> torch.Tensor:
    """Mask bool [N, width] over right-padded completions, for trainers that pad: true on each sample's own tokens,
    those that the policy sampled.

    It follows from the engine's token counts, never from token values, so a pad id that equals EOS is no matter.
    `width` of None is the longest completion's. Raises `ValueError` if a completion is longer than `width`.
    """
    lengths = torch.tensor([len(sample.completion_token_ids) for sample in samples], dtype=torch.int64)
    width = int(lengths.max()) if width is None else width
    if width < int(lengths.max()):
        raise ValueError(f"width={width} is not valid: the longest completion has {int(lengths.max())} tokens")
    mask = torch.arange(width)[None, :] < lengths[:, None]
    for row, sample in zip(mask, samples, strict=True):
        if sample.loss_mask is not None:
            row[: len(sample.loss_mask)] = torch.from_numpy(sample.loss_mask)
    return mask
