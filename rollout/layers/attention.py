"""Causal attention over the paged KV cache, or over packed sequences when a trainer runs the model."""

from __future__ import annotations

import torch
from torch import nn

import rollout_kernels
from rollout.layers.gather import take_rows
from rollout.worker.batch import ForwardBatch, LastRows, SharedRows


class Attention(nn.Module):
    """Writes this step's keys and values, then attends to everything the block tables name.

    Without KV caches in the batch the sequences are packed whole, and the same kernel runs over a scratch cache: a
    trainer gets the sampler's bits, and gradients.
    """

    def __init__(
        self,
        layer_index: int,
        head_dim: int,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """`scale` (None: head_dim^-0.5) multiplies the scores; a token sees itself and the `window - 1` before it; with
        `soft_cap` a score s becomes soft_cap * tanh(s / soft_cap)."""
        super().__init__()
        self.layer_index = layer_index
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.soft_cap = soft_cap

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, only: LastRows | None = None
    ) -> torch.Tensor:
        """q: [T, Hq, D]; k, v: [T, Hkv, D] -> [T, Hq, D], or [R, Hq, D] with `only` R rows of the queries."""
        paged = batch.paged
        if paged is None:
            return self._packed(q, k, v, batch.query_start, batch.shared)
        cache = paged.kv_caches[self.layer_index]
        rollout_kernels.write_kv(k, v, cache, paged.slot_mapping)
        query_start = batch.query_start
        if only is not None:
            q, query_start = q[only.rows], only.query_start
        out = rollout_kernels.paged_attention(
            *(q, cache, paged.block_tables, query_start, paged.seq_lens, paged.block_size, self.scale),
            last_places=paged.last_places,
            window=self.window,
            soft_cap=self.soft_cap,
        )
        assert isinstance(out, torch.Tensor)  # a pair only where the log-sum-exp is asked for
        return out

    def _packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, shared: SharedRows | None
    ) -> torch.Tensor:
        """Rows that sequences share are laid out for each of them, for the attention alone."""
        if shared is not None:
            q, k, v = (take_rows(rows, shared.gather) for rows in (q, k, v))
        out = rollout_kernels.varlen_attention(q, k, v, query_start, self.scale, self.window, self.soft_cap)
        return out if shared is None else take_rows(out, shared.first)
