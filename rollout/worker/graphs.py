"""Decode steps on a device as graphs: captured once for each of a ladder of numbers of rows, and then replayed.

A step that draws from every row that it computes makes the same kernel calls for the same number of rows. It is padded
to the next size of the ladder: a padded row belongs to no sequence, so that it has no keys to attend to, and has slot
-1, which no kernel writes. Inputs lie in buffers that never move; which rows belong to which sequence is one of them,
so that there may be one row of each sequence or several of some. Rows know nothing of each other (contract 1), so
padding changes no bit of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout.core.schedule import ScheduledSequence
from rollout.models.causal_lm import CausalLM
from rollout.platform.platform import CapturedStep, StepCapture
from rollout.speculation.features import FeatureCache
from rollout.worker.batch import ForwardBatch, KVCaches, PagedContext
from rollout.worker.inputs import StepInputs, packed_offsets

_STRIDES = ((8, 1), (64, 8), (256, 16))  # up to so many rows, the sizes of the ladder are so far apart; then 32
_COLUMNS = 32  # block tables are sent in widths of multiples of this


def decode_ladder(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending; the last is `max_rows` itself. At most 7, 15 and then 31 rows are padding.

    >>> decode_ladder(20)
    (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
    """
    sizes: list[int] = []
    size = 0
    while size < max_rows:
        size += next((stride for limit, stride in _STRIDES if size < limit), 32)
        sizes.append(min(size, max_rows))
    return tuple(sizes)


def padded_size(ladder: Sequence[int], count: int) -> int | None:
    """The first size of the ladder that holds `count` rows; None where there is none."""
    return next((size for size in ladder if size >= count), None)


class StaticInputs:
    """The inputs of a decode step of up to N rows, at addresses that never change."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self._rows = np.arange(max_rows + 1)
        # Input id, position, slot, number of keys, adapter; then where the rows of each sequence begin.
        self._dtypes = (np.int64, np.int64, np.int64, np.int32, np.int32, np.int32)
        self._counts = (max_rows,) * 5 + (max_rows + 1,)
        self._starts, end = packed_offsets(
            [count * np.dtype(dtype).itemsize for count, dtype in zip(self._counts, self._dtypes, strict=True)]
        )
        self._packed = torch.zeros(end, dtype=torch.uint8, device=device)
        dtypes = (torch.int64, torch.int64, torch.int64, torch.int32, torch.int32, torch.int32)
        self.input_ids, self.positions, self.slot_mapping, self.seq_lens, self.adapter_ids, self.query_start = (
            self._packed[start : start + count * dtype.itemsize].view(dtype)
            for start, count, dtype in zip(self._starts, self._counts, dtypes, strict=True)
        )
        self.block_tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self._host = np.zeros(end, np.uint8)

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes + self.block_tables.nbytes

    def fill(self, sequences: Sequence[ScheduledSequence], block_size: int, inputs: StepInputs) -> None:
        """The first rows take the scheduled tokens of the sequences, one after another; the others become padding."""
        num_seqs = len(sequences)
        input_ids, positions, slot_mapping, seq_lens, adapter_ids, query_start = self._host_rows()
        lengths = [len(sequence.token_ids) for sequence in sequences]
        count = sum(lengths)
        starts = np.fromiter((sequence.start for sequence in sequences), np.int64, num_seqs)
        slots = np.fromiter((sequence.adapter_slot for sequence in sequences), np.int32, num_seqs)
        if count == num_seqs:
            owner = self._rows[:count]
            query_start[:count] = owner
            positions[:count], adapter_ids[:count] = starts, slots
        else:
            owner = np.repeat(self._rows[:num_seqs], lengths)
            query_start[0] = 0
            np.cumsum(lengths, out=query_start[1 : num_seqs + 1])
            positions[:count] = self._rows[:count] + (starts - query_start[:num_seqs])[owner]
            adapter_ids[:count] = slots[owner]
        query_start[num_seqs:] = count
        input_ids[:count] = [token_id for sequence in sequences for token_id in sequence.token_ids]
        seq_lens[:num_seqs] = starts + lengths
        tables = self._tables(sequences)
        slots_per_block = -(-block_size // 16) * 16
        blocks = tables[owner, positions[:count] // block_size].astype(np.int64)
        slot_mapping[:count] = blocks * slots_per_block + positions[:count] % block_size
        input_ids[count:], positions[count:], slot_mapping[count:], adapter_ids[count:] = 0, 0, -1, -1
        seq_lens[num_seqs:] = 0
        packed, sent_tables = inputs.send([self._host, tables])
        self._packed.copy_(packed)
        # What stands further right, and in the rows after the last sequence, belongs to earlier steps: nobody has so
        # many keys now.
        self.block_tables[:num_seqs, : tables.shape[1]].copy_(sent_tables)

    def _host_rows(self) -> list[np.ndarray]:
        return [
            self._host[start : start + count * np.dtype(dtype).itemsize].view(dtype)
            for start, count, dtype in zip(self._starts, self._counts, self._dtypes, strict=True)
        ]

    def _tables(self, sequences: Sequence[ScheduledSequence]) -> np.ndarray:
        """int32 [S, width]: the block tables as far as some sequence has blocks, rounded up."""
        width = max(len(sequence.block_ids) for sequence in sequences)
        width = min(-(-width // _COLUMNS) * _COLUMNS, self.block_tables.shape[1])
        tables = np.zeros((len(sequences), width), np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.block_ids)] = sequence.block_ids
        return tables


class DecodeGraphs:
    """Captured decode steps of one model over one KV pool. A size is captured when it is first needed."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: KVCaches,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        inputs: StepInputs,
        capture: StepCapture,
        device: torch.device,
        features: FeatureCache | None = None,
    ) -> None:
        """The rows' final hidden states go to `features`, where somebody wants them."""
        self._features = features
        self.ladder = decode_ladder(max_rows)
        self._model = model
        self._kv_caches = kv_caches
        self._block_size = block_size
        self._inputs = inputs
        self._capture = capture
        self._static = StaticInputs(max_rows, max_blocks, device)
        self._captured: dict[tuple[int, bool], CapturedStep] = {}  # by size, and whether some rows have adapters
        self._hooks = [
            hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    @property
    def num_bytes(self) -> int:
        """Device memory of the captured steps and of their inputs."""
        return self._capture.num_bytes + self._static.num_bytes

    @property
    def captured_sizes(self) -> list[int]:
        return sorted({size for size, _ in self._captured})

    def run(self, sequences: Sequence[ScheduledSequence]) -> torch.Tensor | None:
        """Logits float32 [R, vocab] of all R scheduled tokens of the sequences, overwritten by the next call.

        None, and nothing was computed, for more rows than the ladder holds, and where hooks watch the modules.
        """
        count = sum(len(sequence.token_ids) for sequence in sequences)
        size = padded_size(self.ladder, count)
        if size is None or any(self._hooks):
            return None
        self._static.fill(sequences, self._block_size, self._inputs)
        key = size, any(sequence.adapter_slot >= 0 for sequence in sequences)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture.capture(lambda: self._step(*key))
        captured.replay()
        return captured.output[:count]

    def release(self) -> None:
        """Forgets every captured step: the tensors that they read have moved, or their memory is wanted."""
        self._captured.clear()
        self._capture.reset()

    def _step(self, size: int, has_adapters: bool) -> torch.Tensor:
        static = self._static
        paged = PagedContext(
            kv_caches=self._kv_caches,
            block_tables=static.block_tables[:size],
            seq_lens=static.seq_lens[:size],
            slot_mapping=static.slot_mapping[:size],
            block_size=self._block_size,
        )
        adapter_ids = static.adapter_ids[:size] if has_adapters else None
        batch = ForwardBatch(query_start=static.query_start[: size + 1], paged=paged, adapter_ids=adapter_ids)
        hidden = self._model(static.input_ids[:size], static.positions[:size], batch)
        if self._features is not None:
            self._features.write(static.slot_mapping[:size], hidden)
        return self._model.compute_logits(hidden)
