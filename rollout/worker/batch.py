"""The context of one forward pass: ragged token tensors, handed to the model as an explicit argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout_kernels import KVCache

KVCaches = list[KVCache]  # one a layer


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Where the KV of each sequence lives."""

    kv_caches: KVCaches
    block_tables: torch.Tensor  # int32 [S, max_blocks]
    seq_lens: torch.Tensor  # int32 [S], keys of each sequence including this step's
    slot_mapping: torch.Tensor  # int64 [T], where each token's KV is written
    block_size: int
    # int32 [S]: where the last key of a sequence stands in its block table, -1 for its own place. None: all there
    last_places: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows that several sequences begin with (the prompt of a group of samples), given to the model once.

    Laid out one after the other the sequences have E rows; the model computes T different ones.
    """

    gather: torch.Tensor  # int64 [E], the model's row at each place of the layout
    first: torch.Tensor  # int64 [T], the first place of each of the model's rows in the layout


@dataclass(frozen=True, slots=True)
class LastRows:
    """The rows whose hidden states are wanted at the end: of each sequence the last ones, or none, in order."""

    rows: torch.Tensor  # int64 [R]
    query_start: torch.Tensor  # int32 [S + 1], where each sequence's wanted rows begin among the R


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """S sequences with T tokens in all, one after another. `query_start`: int32 [S + 1], first token of each.

    With `shared` set the model gets fewer rows, and `query_start` counts those of the layout that `shared` describes.
    With `last_rows` set only these rows matter after the last layer's keys and values are written: a model may compute
    no more than them there, and return hidden states [R, hidden] in place of [T, hidden]. `adapter_ids`, int32 [T], has
    the slot of each row's LoRA adapter, -1 for none; None where no row has one. `recompute` asks for layers that keep
    no activations for the gradient, and run again in the backward pass.
    """

    query_start: torch.Tensor
    paged: PagedContext | None = None
    shared: SharedRows | None = None
    last_rows: LastRows | None = None
    adapter_ids: torch.Tensor | None = None
    recompute: bool = False

    def adapters_of(self, only: LastRows | None) -> torch.Tensor | None:
        """The adapters of all rows, or of `only` some."""
        if only is None or self.adapter_ids is None:
            return self.adapter_ids
        return self.adapter_ids[only.rows]

    @classmethod
    def packed(
        cls, query_start: torch.Tensor, shared: SharedRows | None = None, recompute: bool = False
    ) -> ForwardBatch:
        """Whole sequences without a KV cache: what a trainer runs, with or without gradients, and without adapters."""
        return cls(query_start=query_start.to(torch.int32), shared=shared, recompute=recompute)
