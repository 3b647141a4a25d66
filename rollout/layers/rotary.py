"""Rotary position embedding (Su et al., 2021) and the scalings of its frequencies that Llama models use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

import rollout_kernels
from rollout.layers.linear import MergedLinear


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`kind` is "default", "linear" or "llama3"; the other scaling fields are those of the model's config."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def parse_rope(parameters: dict[str, object], theta: float) -> RopeConfig:
    """Reads `rope_scaling` / `rope_parameters` of a model's config.

    Raises `ValueError` for a kind of scaling that is not supported.
    """
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope scaling {kind!r} is not supported yet: 'default', 'linear' and 'llama3' are")

    def number(name: str, default: float) -> float:
        value = parameters.get(name, default)
        if not isinstance(value, (int, float)):
            raise ValueError(f"rope scaling {name}={value!r} is not valid: it must be a number")
        return value

    partial = number("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial!r} is not supported yet: only 1.0 is")
    return RopeConfig(
        theta=float(number("rope_theta", theta)),
        kind=kind,
        factor=float(number("factor", 1.0)),
        low_freq_factor=float(number("low_freq_factor", 1.0)),
        high_freq_factor=float(number("high_freq_factor", 4.0)),
        original_max_position=int(number("original_max_position_embeddings", 8192)),
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]. "llama3" is the piecewise interpolation of Llama 3.1's model card."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        smooth = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
        scaled = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
        return torch.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)
    return frequencies


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions. `cos_sin`: float32 [max_position, head_dim], cosines first."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        super().__init__()
        self.rope, self.head_dim, self.max_position = rope, head_dim, max_position
        self.cos_sin: torch.Tensor
        self.register_buffer("cos_sin", torch.empty(max_position, head_dim), persistent=False)

    def materialize(self, device: torch.device) -> None:
        """Computes the table from the configuration; nothing of it comes from a checkpoint."""
        positions = torch.arange(self.max_position, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(self.rope, self.head_dim))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)

    def project(
        self,
        projection: MergedLinear,
        x: torch.Tensor,
        positions: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        adapter_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D] of x [T, hidden], q and k rotated; in inference by the product itself.

        Where rows have adapters (int32 [T], -1: none) the rotation follows on its own, with the same bits.
        """
        queries, keys = num_heads * self.head_dim, num_kv_heads * self.head_dim
        together = projection.is_one_product and adapter_ids is None
        if together:
            qkv = projection.forward_rotated(x, positions, self.cos_sin, queries + keys)
        else:
            qkv = projection(x, adapter_ids)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split((queries, keys, keys), dim=-1))
        if not together:
            q, k = self(q, k, positions)
        return q, k, v

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q: [T, Hq, D], k: [T, Hkv, D], positions: int64 [T] -> rotated (q, k)."""
        return rollout_kernels.rotary_embedding(q, k, positions, self.cos_sin)
