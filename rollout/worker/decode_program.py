"""Decode steps without Python between the kernels: a step is recorded once for each batch size, and then replayed.

Steps in which some row has a LoRA adapter are recorded apart from the others, which so pay nothing for it.

A step in which every sequence computes one token and draws from it always makes the same kernel calls for the same
number of sequences; only the values in its inputs differ. These lie in buffers that never move. What a recording sees
is the model's ordinary forward pass, so model code knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.modules.module as torch_module

from rollout.core.schedule import ScheduledSequence
from rollout.models.causal_lm import CausalLM
from rollout.worker.batch import ForwardBatch, KVCaches, PagedContext
from rollout_kernels import can_record
from rollout_kernels.cpu.program import NotRecordableError, Program, Workspace, record
from rollout_kernels.cpu.times import KernelTimes


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: Program
    logits: torch.Tensor  # float32 [S, vocab], valid after a replay until the next one


class DecodePrograms:
    """Recorded decode steps of one model over one KV pool.

    `memory` (uint8) holds the activations of a step and its logits. Where a step cannot be recorded (the model computes
    something with torch, a module has hooks, the memory is too small) `run` says so once and for all: `problem`.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: KVCaches,
        block_size: int,
        max_num_seqs: int,
        max_blocks: int,
        memory: torch.Tensor,
    ) -> None:
        self.problem: str | None = None
        self._model = model
        self._kv_caches = kv_caches
        self._block_size = block_size
        self._slots_per_block = -(-block_size // 16) * 16
        self._workspace = Workspace(memory)
        self._recorded: dict[tuple[int, bool], _Recorded] = {}  # by number of sequences, and whether some have adapters
        modules = list(model.modules())
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._attributes = [vars(module) for module in modules]
        self._rows = np.arange(max_num_seqs)
        self._input_ids = np.zeros(max_num_seqs, np.int64)
        self._positions = np.zeros(max_num_seqs, np.int64)
        self._slot_mapping = np.zeros(max_num_seqs, np.int64)
        self._seq_lens = np.zeros(max_num_seqs, np.int32)
        self._query_start = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._adapter_ids = np.full(max_num_seqs, -1, np.int32)
        self._block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._table_rows: list[list[int]] = [[] for _ in range(max_num_seqs)]  # what the rows of the tables hold

    @property
    def max_num_seqs(self) -> int:
        return len(self._rows)

    @property
    def recorded_sizes(self) -> list[int]:
        """Numbers of sequences for which a step has been recorded."""
        return sorted({count for count, _ in self._recorded})

    def forget_adapter_steps(self) -> None:
        """The steps with adapters compute other projections from now on: they are recorded anew."""
        self._recorded = {key: recorded for key, recorded in self._recorded.items() if not key[1]}

    def run(self, sequences: Sequence[ScheduledSequence], times: KernelTimes | None = None) -> torch.Tensor | None:
        """Logits float32 [S, vocab] of S sequences with one scheduled token each, or None where nothing was computed.

        They are overwritten by the next call. The kernels' times are added to `times`.
        """
        count = len(sequences)
        if self.problem is not None or count > self.max_num_seqs:
            return None
        if any(self._hooks) or any("forward" in attributes for attributes in self._attributes):
            return None  # somebody watches or changes what modules do: a replay would not call them
        if not can_record(self._kv_caches[0].keys):
            return None
        self._fill(sequences)
        key = count, bool(self._adapter_ids[:count].max(initial=-1) >= 0)
        recorded = self._recorded.get(key)
        if recorded is not None:
            if times is None:
                recorded.program.replay()
            else:
                times.replay(recorded.program)
            return recorded.logits
        try:
            logits, program = record(lambda: self._step(*key), self._workspace)
        except NotRecordableError as error:
            self.problem = str(error)
            return None
        self._recorded[key] = _Recorded(program, logits)
        return logits

    def _fill(self, sequences: Sequence[ScheduledSequence]) -> None:
        """The inputs of this step into the buffers that the recorded kernels read."""
        count = len(sequences)
        self._input_ids[:count] = [sequence.token_ids[0] for sequence in sequences]
        self._adapter_ids[:count] = [sequence.adapter_slot for sequence in sequences]
        positions = self._positions[:count]
        positions[:] = [sequence.start for sequence in sequences]
        np.add(positions, 1, out=self._seq_lens[:count], casting="unsafe")
        for row, sequence in enumerate(sequences):
            block_ids = sequence.block_ids
            if self._table_rows[row] != block_ids:
                self._table_rows[row] = block_ids
                self._block_tables[row, : len(block_ids)] = block_ids
        blocks = self._block_tables[self._rows[:count], positions // self._block_size].astype(np.int64)
        np.add(blocks * self._slots_per_block, positions % self._block_size, out=self._slot_mapping[:count])

    def _step(self, count: int, has_adapters: bool) -> torch.Tensor:
        paged = PagedContext(
            kv_caches=self._kv_caches,
            block_tables=torch.from_numpy(self._block_tables[:count]),
            seq_lens=torch.from_numpy(self._seq_lens[:count]),
            slot_mapping=torch.from_numpy(self._slot_mapping[:count]),
            block_size=self._block_size,
        )
        adapter_ids = torch.from_numpy(self._adapter_ids[:count]) if has_adapters else None
        query_start = torch.from_numpy(self._query_start[: count + 1])
        batch = ForwardBatch(query_start=query_start, paged=paged, adapter_ids=adapter_ids)
        input_ids, positions = (torch.from_numpy(array[:count]) for array in (self._input_ids, self._positions))
        return self._model.compute_logits(self._model(input_ids, positions, batch))
