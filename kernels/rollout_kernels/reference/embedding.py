"""Token embedding."""

from __future__ import annotations

import torch

from rollout_kernels.errors import token_error
from rollout_kernels.reference.reduce import accumulation_dtype


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    outside = (token_ids < 0) | (token_ids >= weight.shape[0])
    if outside.any():
        raise token_error(token_ids, int(outside.nonzero()[0]), weight.shape[0])
    return weight[token_ids].to(accumulation_dtype(weight.dtype))
