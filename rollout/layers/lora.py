"""The adapters of one projection, and the two small products that add one to a row (Hu et al., 2021, "LoRA")."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import rollout_kernels


@dataclass(slots=True, eq=False)
class LowRankWeights:
    """S adapters of one projection in memory of the engine, each of a rank up to R, filled up with zeros.

    The product of `a` stays float32, that of `b` is added in float32 to what the projection has rounded, and the sum is
    rounded once to the projection's output dtype. A projection that an adapter leaves alone has zeros there.
    """

    a: torch.Tensor  # [S, R, in_features], in the model's dtype
    b: torch.Tensor  # [S, out_features, R]
    scales: torch.Tensor  # float32 [S]
    is_used: bool = True  # False where no adapter in memory changes this projection: nothing is computed then

    def add_to(self, out: torch.Tensor, x: torch.Tensor, adapter_ids: torch.Tensor) -> None:
        """out [T, out_features] += scales[id] * b[id] (a[id] x), for x [T, in_features] and `adapter_ids` int32 [T].

        Rows with id -1 keep their bits. `out` may be a view of a fused projection.
        """
        if self.is_used:
            y = rollout_kernels.lora_shrink(x, self.a, adapter_ids)
            rollout_kernels.lora_expand(y, self.b, adapter_ids, out, self.scales)
