"""Decode steps of a ladder of sizes: padding, buffers that never move, captures that are made once and forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from rollout.core.schedule import ScheduledSequence
from rollout.models.causal_lm import CausalLM, ModelShape
from rollout.platform.cpu import DirectStep, ImmediateCopies
from rollout.worker.batch import ForwardBatch
from rollout.worker.graphs import DecodeGraphs, StaticInputs, decode_ladder, padded_size
from rollout.worker.inputs import StagedInputs

CPU = torch.device("cpu")
BLOCK = 4  # tokens in a block; its tile has 16 slots


class EchoModel(CausalLM):
    """Its logits are the inputs themselves, row by row, so that a test sees what the kernels would read."""

    shape = ModelShape(8, 1, 1, 16, 4096)

    def __init__(self) -> None:
        super().__init__()
        self.watched = nn.Identity()
        self.batch_sizes: list[int] = []

    @classmethod
    def from_pretrained_config(cls, config: object, dtype: torch.dtype) -> EchoModel:
        return cls()

    @property
    def output_weight(self) -> torch.Tensor:
        raise AssertionError("not used")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        paged = batch.paged
        assert paged is not None and paged.block_size == BLOCK
        self.batch_sizes.append(len(input_ids))
        count = len(input_ids)
        assert batch.query_start.shape == (count + 1,) and batch.query_start[0] == 0
        owner = torch.searchsorted(batch.query_start, torch.arange(count), right=True) - 1  # `count`: of no sequence
        tables, keys = (torch.cat([of, of.new_zeros(1, *of.shape[1:])]) for of in (paged.block_tables, paged.seq_lens))
        last_block = tables[owner].gather(1, (positions // BLOCK)[:, None])[:, 0]
        adapters = torch.full_like(positions, -7) if batch.adapter_ids is None else batch.adapter_ids
        columns = [input_ids, positions, keys[owner], paged.slot_mapping, last_block, adapters]
        return torch.stack([column.float() for column in columns], dim=1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class CountingCapture:
    """Direct execution that counts captures, as CUDA graphs would be made."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_captures = 0

    def capture(self, step: Callable[[], torch.Tensor]) -> DirectStep:
        self.num_captures += 1
        self.num_bytes += 1000
        return DirectStep(step)

    def reset(self) -> None:
        self.num_bytes = 0


def sequences_of(
    count: int, longest: int = 60, num_adapters: int = 0, lengths: list[int] | None = None
) -> list[ScheduledSequence]:
    """One token each, or `lengths[i]` tokens."""
    made = []
    for index, length in enumerate([1] * count if lengths is None else lengths):
        start = random.randrange(longest - length + 1)
        blocks = [random.randrange(50) for _ in range((start + length - 1) // BLOCK + 1)]
        slot = random.randrange(num_adapters + 1) - 1
        token_ids = [random.randrange(1000) for _ in range(length)]
        made.append(ScheduledSequence(f"r{index}", start, token_ids, blocks, adapter_slot=slot))
    return made


def expected_rows(sequences: list[ScheduledSequence]) -> list[list[float]]:
    """With -7 for the adapter of every row where no row has one: the model is told of none."""
    some = any(s.adapter_slot >= 0 for s in sequences)
    return [
        [
            *(token_id, position, s.start + len(s.token_ids)),
            s.block_ids[position // BLOCK] * 16 + position % BLOCK,
            s.block_ids[position // BLOCK],
            s.adapter_slot if some else -7,
        ]
        for s in sequences
        for position, token_id in enumerate(s.token_ids, s.start)
    ]


def graphs_for(model: EchoModel, max_num_seqs: int, capture: CountingCapture) -> DecodeGraphs:
    inputs = StagedInputs(ImmediateCopies(), capacity=64)
    return DecodeGraphs(model, [], BLOCK, max_num_seqs, 16, inputs, capture, CPU)


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 20, 64, 65, 256, 1000])
def test_the_ladder_ends_at_the_largest_batch_and_pads_little(most: int) -> None:
    ladder = decode_ladder(most)
    assert ladder[0] == 1 and ladder[-1] == most and list(ladder) == sorted(set(ladder))
    for count in range(1, most + 1):
        size = padded_size(ladder, count)
        assert size is not None and 0 <= size - count < (
            1 if count <= 8 else 8 if count <= 64 else 16 if count <= 256 else 32
        )
    assert padded_size(ladder, most + 1) is None


def test_ladders_are_short() -> None:
    assert decode_ladder(20) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
    assert len(decode_ladder(256)) == 27


def test_every_row_reads_its_own_inputs_whatever_the_batch_before_held() -> None:
    model, capture = EchoModel(), CountingCapture()
    graphs = graphs_for(model, 20, capture)
    for count in (3, 20, 1, 9, 12, 20, 2):
        sequences = sequences_of(count)
        logits = graphs.run(sequences)
        assert logits is not None and logits.tolist() == expected_rows(sequences)
    assert graphs.captured_sizes == [1, 2, 3, 16, 20] and capture.num_captures == 5


def test_several_rows_of_a_sequence_go_through_the_captures_of_one_row_each() -> None:
    model, capture = EchoModel(), CountingCapture()
    graphs = graphs_for(model, 20, capture)
    for lengths in ([5], [1] * 5, [3, 1, 1], [1, 17], [20], [1] * 20, [2, 4, 3, 1, 1], [1] * 9, [5]):
        sequences = sequences_of(len(lengths), num_adapters=3, lengths=lengths)
        sequences[0] = replace(sequences[0], adapter_slot=2)
        logits = graphs.run(sequences)
        assert logits is not None and logits.tolist() == expected_rows(sequences)
    assert graphs.captured_sizes == [5, 16, 20] and capture.num_captures == 3
    assert graphs.run(sequences_of(2, lengths=[17, 4])) is None


def test_padded_rows_have_no_slot_and_no_keys() -> None:
    model, capture = EchoModel(), CountingCapture()
    graphs = graphs_for(model, 20, capture)
    graphs.run(sequences_of(20))
    graphs.run(sequences_of(16))
    graphs.run(sequences_of(9))
    assert model.batch_sizes[-1] == 16
    rows = graphs._captured[16, False].output[9:].tolist()
    assert [row[:4] for row in rows] == [[0, 0, 0, -1]] * 7


def test_steps_with_adapters_are_captured_apart_and_padded_rows_have_none() -> None:
    model, capture = EchoModel(), CountingCapture()
    graphs = graphs_for(model, 20, capture)
    for count, num_adapters in ((9, 3), (12, 0), (9, 3), (11, 2), (12, 0)):
        sequences = sequences_of(count, num_adapters=num_adapters)
        sequences[0] = replace(sequences[0], adapter_slot=num_adapters - 1)
        logits = graphs.run(sequences)
        assert logits is not None and logits.tolist() == expected_rows(sequences)
    assert graphs.captured_sizes == [16] and capture.num_captures == 2
    assert [row[5] for row in graphs._captured[16, True].output[11:].tolist()] == [-1] * 5


def test_inputs_never_move_between_replays() -> None:
    static = StaticInputs(20, 16, CPU)
    inputs = StagedInputs(ImmediateCopies())
    rows = (static.input_ids, static.positions, static.slot_mapping, static.seq_lens, static.adapter_ids)
    tensors = (*rows, static.query_start, static.block_tables)
    before = [tensor.data_ptr() for tensor in tensors]
    for count in (20, 3):
        static.fill(sequences_of(count), BLOCK, inputs)
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert all(pointer % 16 == 0 for pointer in before)
    assert static.num_bytes == sum(tensor.nbytes for tensor in tensors)


def test_a_release_forgets_captures_and_their_memory_and_the_next_step_captures_again() -> None:
    model, capture = EchoModel(), CountingCapture()
    graphs = graphs_for(model, 8, capture)
    idle = graphs.num_bytes
    graphs.run(sequences_of(4))
    graphs.run(sequences_of(5))
    assert graphs.num_bytes == idle + 2000
    graphs.release()
    assert graphs.num_bytes == idle and graphs.captured_sizes == []
    sequences = sequences_of(4)
    logits = graphs.run(sequences)
    assert logits is not None and logits.tolist() == expected_rows(sequences) and capture.num_captures == 3


def test_more_sequences_than_the_ladder_holds_and_watched_modules_are_left_to_the_model() -> None:
    model = EchoModel()
    graphs = graphs_for(model, 4, CountingCapture())
    assert graphs.run(sequences_of(5)) is None
    handle = model.watched.register_forward_hook(lambda *_: None)
    assert graphs.run(sequences_of(2)) is None and model.batch_sizes == []
    handle.remove()
    assert graphs.run(sequences_of(2)) is not None
