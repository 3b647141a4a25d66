"""Logits processors that worker processes can import."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout import LogitsBatch


@dataclass
class Favour:
    """Adds to the logit of one token, and ends in an error once an output has `limit` tokens."""

    token_id: int
    amount: float
    limit: int = 1000

    def __call__(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        if max(map(len, batch.output_token_ids)) >= self.limit:
            raise RuntimeError(f"{self.limit} tokens are enough")
        logits[:, self.token_id] += self.amount
        return logits
