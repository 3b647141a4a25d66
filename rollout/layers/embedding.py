"""Token embedding: rows of a table, widened to the float32 residual stream."""

from __future__ import annotations

import torch
from torch import nn

import rollout_kernels


class Embedding(nn.Module):
    """weight: [vocab_size, hidden]. Tied models read the same tensor as their output head."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: int64 [T] -> float32 [T, hidden]."""
        return rollout_kernels.embedding(input_ids, self.weight)
