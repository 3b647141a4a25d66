"""Layers that keep nothing for the backward pass but what they were given (Chen et al., 2016)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rollout.worker.batch import ForwardBatch


def run_layer(layer: nn.Module, batch: ForwardBatch, *arguments: Any) -> Any:
    """What `layer` makes of `arguments`. With `batch.recompute` it runs once more in the backward pass, by the same
    kernels on the same rows, so that gradients have the bits that they would have without."""
    if not (batch.recompute and torch.is_grad_enabled()):
        return layer(*arguments)
    return checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
