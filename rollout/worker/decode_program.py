"""Decode steps without Python between the kernels: a step is recorded once for each number of rows, and then replayed.

Steps in which some row has a LoRA adapter are recorded apart from the others, which so pay nothing for it.

A step that draws from every row that it computes always makes the same kernel calls for the same number of rows; only
the values in its inputs differ. These lie in buffers that never move. What a recording sees is the model's ordinary
forward pass, so model code knows nothing of it.

Which rows belong to which sequence is one of these values. Every step is recorded as if it had as many sequences as
rows: those that are not there follow the others, and have no rows. So one recording serves one row from each of five
sequences as well as five rows (a known token and four drafts) of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import contains

import numpy as np
import torch
import torch.nn.modules.module as torch_module
from torch.utils.hooks import RemovableHandle

from rollout.core.schedule import ScheduledSequence
from rollout.models.causal_lm import CausalLM
from rollout.speculation.features import FeatureCache
from rollout.worker.batch import ForwardBatch, KVCaches, PagedContext
from rollout_kernels import can_record
from rollout_kernels.cpu.program import NotRecordableError, Program, Workspace, record
from rollout_kernels.cpu.times import KernelTimes

MOST_DECODE_ROWS = 17  # of a sequence: its last known token, and the most drafts that follow it


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: Program
    hidden: torch.Tensor  # [R, hidden] in the model's dtype; both are valid after a replay until the next one
    logits: torch.Tensor  # float32 [R, vocab]


class DecodePrograms:
    """Recorded decode steps of one model over one KV pool.

    A step has up to `max_rows` rows. `memory` (uint8) holds its activations and its logits. Where a step cannot be
    recorded (the model computes something with torch, a module has hooks, the memory is too small) `run` says so once
    and for all: `problem`. The rows' final hidden states go to `features`, where somebody wants them.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: KVCaches,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        memory: torch.Tensor,
        features: FeatureCache | None = None,
    ) -> None:
        self.problem: str | None = None
        self._features = features
        self._model = model
        self._kv_caches = kv_caches
        self._block_size = block_size
        self._slots_per_block = -(-block_size // 16) * 16
        self._workspace = Workspace(memory)
        self._recorded: dict[tuple[int, bool], _Recorded] = {}  # by number of rows, and whether some have adapters
        modules = list(model.modules())
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._has_hooks, self._handles_seen = False, -1
        self._attributes = [vars(module) for module in modules]
        self._rows = np.arange(max_rows + 1)
        self._input_ids = np.zeros(max_rows, np.int64)
        self._positions = np.zeros(max_rows, np.int64)
        self._slot_mapping = np.zeros(max_rows, np.int64)
        self._seq_lens = np.zeros(max_rows, np.int32)
        self._last_places = np.full(max_rows, -1, np.int32)
        self._has_other_places = False  # what these say now
        self._query_start = np.arange(max_rows + 1, dtype=np.int32)
        self._has_one_row_each = True  # what the starts of the queries say now
        self._adapter_ids = np.full(max_rows, -1, np.int32)
        self._block_tables = np.zeros((max_rows, max_blocks), np.int32)
        self._table_rows: list[list[int]] = [[] for _ in range(max_rows)]  # what the rows of the tables hold

    @property
    def max_rows(self) -> int:
        return len(self._input_ids)

    @property
    def recorded_sizes(self) -> list[int]:
        """Numbers of rows for which a step has been recorded."""
        return sorted({count for count, _ in self._recorded})

    def forget_adapter_steps(self) -> None:
        """The steps with adapters compute other projections from now on: they are recorded anew."""
        self._recorded = {key: recorded for key, recorded in self._recorded.items() if not key[1]}

    def run(self, sequences: Sequence[ScheduledSequence], times: KernelTimes | None = None) -> torch.Tensor | None:
        """Logits float32 [R, vocab] of all R scheduled tokens of the sequences, or None where nothing was computed.

        They are overwritten by the next call. The kernels' times are added to `times`.
        """
        lengths = [len(sequence.token_ids) for sequence in sequences]
        count = sum(lengths)
        if self.problem is not None or count > self.max_rows:
            return None
        if self._is_watched():
            return None
        if not can_record(self._kv_caches[0].keys):
            return None
        if count == len(sequences):
            self._fill(sequences)
        else:
            self._fill_several(sequences, lengths, count)
        key = count, bool(self._adapter_ids[:count].max(initial=-1) >= 0)
        recorded = self._recorded.get(key)
        if recorded is not None:
            if times is None:
                recorded.program.replay()
            else:
                times.replay(recorded.program)
        else:
            try:
                (hidden, logits), program = record(lambda: self._step(*key), self._workspace)
            except NotRecordableError as error:
                self.problem = str(error)
                return None
            recorded = self._recorded[key] = _Recorded(program, hidden, logits)
        if self._features is not None:
            self._features.write(torch.from_numpy(self._slot_mapping[:count]), recorded.hidden)
        return recorded.logits

    def _is_watched(self) -> bool:
        """Whether somebody watches or changes what modules do: a replay would not call them.

        Every hook has a handle, and handles are numbered: without a new one there is no new hook. To look at the hooks
        of all modules takes a fiftieth of a step of one sequence, which has emptied the processor's caches before.
        """
        if self._has_hooks or RemovableHandle.next_id != self._handles_seen:
            self._handles_seen = RemovableHandle.next_id
            self._has_hooks = any(self._hooks)
        return self._has_hooks or any(map(contains, self._attributes, repeat("forward")))

    def _fill(self, sequences: Sequence[ScheduledSequence]) -> None:
        """The inputs of a step with one row a sequence into the buffers that the recorded kernels read."""
        count = len(sequences)
        if not self._has_one_row_each:
            self._query_start[:] = self._rows
            self._has_one_row_each = True
        starts = [sequence.start for sequence in sequences]
        self._input_ids[:count] = [sequence.token_ids[0] for sequence in sequences]
        self._adapter_ids[:count] = [sequence.adapter_slot for sequence in sequences]
        self._positions[:count] = starts
        self._seq_lens[:count] = [start + 1 for start in starts]
        self._fill_tables(sequences)
        places = self._places(sequences, starts, self._rows[:count])
        self._slot_mapping[:count] = [
            sequence.block_ids[place // self._block_size] * self._slots_per_block + place % self._block_size
            for sequence, place in zip(sequences, places, strict=True)
        ]

    def _fill_several(self, sequences: Sequence[ScheduledSequence], lengths: Sequence[int], count: int) -> None:
        """The same for a step of `count` rows, of which sequence i has `lengths[i]`."""
        num_seqs = len(sequences)
        self._has_one_row_each = False
        query_start = self._query_start
        np.cumsum(lengths, out=query_start[1 : num_seqs + 1])
        query_start[num_seqs + 1 : count + 1] = count
        owner = np.repeat(self._rows[:num_seqs], lengths)
        starts = np.array([sequence.start for sequence in sequences])
        self._input_ids[:count] = [token_id for sequence in sequences for token_id in sequence.token_ids]
        self._adapter_ids[:count] = np.array([sequence.adapter_slot for sequence in sequences], np.int32)[owner]
        positions = self._positions[:count]
        np.add((starts - query_start[:num_seqs])[owner], self._rows[:count], out=positions)
        self._seq_lens[:num_seqs] = starts + lengths
        self._seq_lens[num_seqs:count] = 0
        self._fill_tables(sequences)
        places = np.asarray(self._places(sequences, positions, owner))
        blocks = self._block_tables[owner, places // self._block_size].astype(np.int64)
        np.add(blocks * self._slots_per_block, places % self._block_size, out=self._slot_mapping[:count])

    def _fill_tables(self, sequences: Sequence[ScheduledSequence]) -> None:
        for row, sequence in enumerate(sequences):
            block_ids = sequence.block_ids
            if self._table_rows[row] != block_ids:
                self._table_rows[row] = block_ids
                self._block_tables[row, : len(block_ids)] = block_ids

    def _places(
        self, sequences: Sequence[ScheduledSequence], positions: list[int] | np.ndarray, owner: np.ndarray
    ) -> list[int] | np.ndarray:
        """Where the KV of each row goes, as a place in its sequence's table: mostly its position. `owner`, int64 [R]:
        the sequence of each row."""
        last_places = [sequence.last_place for sequence in sequences]
        if max(last_places) < 0:
            if self._has_other_places:
                self._last_places[:] = -1
                self._has_other_places = False
            return positions
        self._has_other_places = True
        self._last_places[: len(sequences)] = last_places
        self._last_places[len(sequences) :] = -1
        of_rows = self._last_places[owner]
        return np.where(of_rows >= 0, of_rows, positions)

    def _step(self, count: int, has_adapters: bool) -> tuple[torch.Tensor, torch.Tensor]:
        paged = PagedContext(
            kv_caches=self._kv_caches,
            block_tables=torch.from_numpy(self._block_tables[:count]),
            seq_lens=torch.from_numpy(self._seq_lens[:count]),
            slot_mapping=torch.from_numpy(self._slot_mapping[:count]),
            block_size=self._block_size,
            last_places=torch.from_numpy(self._last_places[:count]),
        )
        adapter_ids = torch.from_numpy(self._adapter_ids[:count]) if has_adapters else None
        query_start = torch.from_numpy(self._query_start[: count + 1])
        batch = ForwardBatch(query_start=query_start, paged=paged, adapter_ids=adapter_ids)
        input_ids, positions = (torch.from_numpy(array[:count]) for array in (self._input_ids, self._positions))
        hidden = self._model(input_ids, positions, batch)
        return hidden, self._model.compute_logits(hidden)
