"""Int8 copies of the weights, for the engine's matrix products.

The parameters stay as they are: updates load them, trainers share them, receipts name them. The copies follow from them
alone, so they are made anew after every load and are compared with the parameters wherever these are verified. Logprobs
of a quantised engine are those of the rounded weights and activations: a trainer that computes with the parameters gets
others, and has to correct for the difference (`rollout_trainers.corrections`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from rollout.models.causal_lm import CausalLM
from rollout.models.products import MatrixProduct, matrix_products
from rollout.platform.platform import Memory
from rollout.worker.slab import slab_bytes
from rollout_kernels import Int8Weight, int8_weight_shapes, quantize_weight

_ROWS = 1024  # of a weight, quantised at a time for a comparison; whole panels of the packed layout


class QuantizedWeights:
    """The int8 copies of one model, in memory of their own, on the weights' device. They hold nothing before the first
    `remake`; whoever asks for them takes memory that was given back into use again, all zeros."""

    def __init__(self, model: CausalLM, memory: Callable[[int], Memory]) -> None:
        """`memory` gives what so many bytes are carved from."""
        self._products = matrix_products(model)
        shapes = [int8_weight_shapes(*product.weight.shape) for product in self._products]
        sizes = [size for values, scales in shapes for size in ((values, torch.uint8), (scales, torch.float32))]
        self.slab = memory(slab_bytes(sizes))
        self._copies: dict[str, Int8Weight] = {}
        self._is_current = False
        for product, (values, scales) in zip(self._products, shapes, strict=True):
            copy = Int8Weight(
                self.slab.carve(values, torch.uint8), self.slab.carve(scales, torch.float32), product.weight.shape[1]
            )
            self._copies[product.name] = product.holder.int8 = copy

    @property
    def is_current(self) -> bool:
        """Whether the copies were made since they were last given up, and were made to the end."""
        return self._is_current

    def give_up(self) -> None:
        """The copies no longer count: their memory is released, or the weights are about to change."""
        self._is_current = False

    def remake(self) -> None:
        """Quantises every weight as it is now."""
        self._is_current = False
        self.slab.resume()
        for product in self._products:
            quantize_weight(product.weight.detach(), self._copies[product.name])
        self._is_current = True

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The copies' tensors, for fingerprints: "int8.lm_head.values", "int8.lm_head.scales", ..."""
        self.slab.resume()
        return {
            f"int8.{name}.{part}": tensor
            for name, copy in self._copies.items()
            for part, tensor in (("values", copy.values), ("scales", copy.scales))
        }

    def stale(self) -> list[str]:
        """Names of the tensors that are not what quantising the weights gives now, bit for bit."""
        self.slab.resume()
        return [name for product in self._products for name in self._stale_parts(product)]

    def _stale_parts(self, product: MatrixProduct) -> list[str]:
        copy, weight = self._copies[product.name], product.weight.detach()
        same = {"values": True, "scales": True}
        for first in range(0, weight.shape[0], _ROWS):
            fresh = quantize_weight(weight[first : first + _ROWS])
            panels = slice(first // 16, first // 16 + fresh.values.shape[0])
            same["values"] &= _same_bits(copy.values[panels], fresh.values)
            same["scales"] &= _same_bits(copy.scales[first : first + _ROWS], fresh.scales)
        return [f"int8.{product.name}.{part}" for part, is_same in same.items() if not is_same]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """On a CPU in this thread alone: handing out so little work costs torch more than the work."""
    if one.is_cpu:
        return np.array_equal(one.numpy().view(np.int32), other.numpy().view(np.int32))
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
