"""Matrix products with named parameters, and projections of one input fused into one product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import rollout_kernels
from rollout.layers.lora import LowRankWeights

Int8Weight = rollout_kernels.Int8Weight
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def uses_copy(int8: Int8Weight | None) -> bool:
    """Whether a product reads the weight's int8 copy: where the engine has one, and it is the engine that computes.

    The engine computes in inference mode. Everybody else who runs the model, a trainer with gradients or without, gets
    the weight itself: only the engine knows whether the copy is up to date.
    """
    return int8 is not None and torch.is_inference_mode_enabled()


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    int8: Int8Weight | None,
) -> torch.Tensor:
    """x [T, K] @ weight [N, K]^T (+ bias [N]) -> [T, N], or with the weight's int8 copy (see `uses_copy`)."""
    if int8 is not None and uses_copy(int8):
        return rollout_kernels.linear_int8(x, int8, bias, out_dtype)
    return rollout_kernels.linear(x, weight, bias, out_dtype)


class Linear(nn.Module):
    """`x @ weight.T + bias` with float32 accumulation. weight: [out_features, in_features], as in the checkpoint.

    `out_dtype` is what the product is rounded to; None means the dtype of `x`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.out_dtype = out_dtype
        self.int8: Int8Weight | None = None  # the engine's copy of the weight, where it quantises
        self.lora: LowRankWeights | None = None  # the engine's adapters, where it has memory for them
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)
        bias_tensor = torch.empty(out_features, dtype=dtype) if bias else None
        self.bias = nn.Parameter(bias_tensor, requires_grad=False) if bias_tensor is not None else None

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features], each row with its adapter (int32 [T], -1: none)."""
        out = multiply(x, self.weight, self.bias, self.out_dtype, self.int8)
        if adapter_ids is not None:
            self.add_adapters(out, x, adapter_ids)
        return out

    def add_adapters(self, out: torch.Tensor, x: torch.Tensor, adapter_ids: torch.Tensor) -> None:
        """Adds each row's adapter to `out`, the product of `x`, in place."""
        assert self.lora is not None, "rows name adapters, and the engine has no memory for any"
        self.lora.add_to(out, x, adapter_ids)


class MergedLinear(nn.Module):
    """Several projections of one input as one product; their parameters are views of one fused storage.

    The parts keep their names in the tree of modules, so a trainer or a checkpoint sees `q_proj.weight` and the kernel
    sees one matrix. With gradients `merged_linear` hands each part its piece of the gradient; the forward is the same
    product, so it has the same bits.
    """

    def __init__(self, *parts: Linear) -> None:
        super().__init__()
        self.parts = parts  # a tuple, so that the parts are not registered a second time under other names
        self.fused_weight: torch.Tensor | None = None
        self.fused_bias: torch.Tensor | None = None
        self.int8: Int8Weight | None = None  # the engine's copy of the fused weight, where it quantises

    def materialize(self, allocate: Allocate) -> None:
        """Gives the parts new storage from `allocate`: one contiguous block, part after part."""
        self.fused_weight = self._fuse("weight", allocate)
        self.fused_bias = self._fuse("bias", allocate) if self.parts[0].bias is not None else None

    def _fuse(self, name: str, allocate: Allocate) -> torch.Tensor:
        pieces = [part.get_parameter(name) for part in self.parts]
        rows = sum(piece.shape[0] for piece in pieces)
        fused = allocate((rows, *pieces[0].shape[1:]), pieces[0].dtype)
        first = 0
        for part, piece in zip(self.parts, pieces, strict=True):
            part.register_parameter(name, nn.Parameter(fused[first : first + piece.shape[0]], requires_grad=False))
            first += piece.shape[0]
        return fused

    @property
    def is_one_product(self) -> bool:
        """Whether the parts, and what follows them, are computed together: in inference with storage of their own, not
        under a compiler, not in int8."""
        if self.fused_weight is None or uses_copy(self.int8):
            return False
        return not torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def silu_and_mul(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """For the two parts gate and up: silu(gate(x)) * up(x), [T, in_features] -> [T, out_features of one]."""
        if adapter_ids is not None or not self.is_one_product:
            return rollout_kernels.silu_and_mul(self(x, adapter_ids))
        assert self.fused_weight is not None
        return rollout_kernels.linear_silu_and_mul(x, self.fused_weight, self.fused_bias)

    def forward_rotated(
        self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, rotated_columns: int
    ) -> torch.Tensor:
        """As `forward` where `is_one_product`, with the first columns rotated as heads (see `RotaryEmbedding`)."""
        assert self.fused_weight is not None
        return rollout_kernels.linear_rotary(x, self.fused_weight, self.fused_bias, positions, cos_sin, rotated_columns)

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in_features] -> [T, sum of the parts' out_features], each row with its adapter."""
        out = self._product(x)
        if adapter_ids is not None:
            widths = [part.weight.shape[0] for part in self.parts]
            for part, columns in zip(self.parts, out.split(widths, dim=-1), strict=True):
                part.add_adapters(columns, x, adapter_ids)
        return out

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused_weight is None or torch.is_grad_enabled():
            weights = [part.weight for part in self.parts]
            biases = [part.bias for part in self.parts if part.bias is not None]
            return rollout_kernels.merged_linear(x, weights, biases)
        return multiply(x, self.fused_weight, self.fused_bias, None, self.int8)
