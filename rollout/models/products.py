"""Every matrix product of a model's forward pass, and the weight that it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.layers.linear import Linear, MergedLinear
from rollout.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """One product: `name` is the module's, or "lm_head"; `holder` computes it and may have an int8 copy."""

    name: str
    holder: Linear | MergedLinear | CausalLM

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features], fused where the projections are."""
        if isinstance(self.holder, CausalLM):
            return self.holder.output_weight
        if isinstance(self.holder, Linear):
            return self.holder.weight
        assert self.holder.fused_weight is not None, f"{self.name} has no storage yet"
        return self.holder.fused_weight


def matrix_products(model: CausalLM) -> list[MatrixProduct]:
    """The products of every token, in the modules' order, and last the head's, which drawn tokens alone need."""
    parts = {id(part) for module in model.modules() if isinstance(module, MergedLinear) for part in module.parts}
    head = model.output_weight
    products = [
        MatrixProduct(name, module)
        for name, module in model.named_modules()
        if isinstance(module, MergedLinear)
        or (isinstance(module, Linear) and id(module) not in parts and module.weight is not head)
    ]
    return [*products, MatrixProduct("lm_head", model)]
