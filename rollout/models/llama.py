"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): SmolLM2, Llama 2 and 3, and their relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from transformers import PretrainedConfig

from rollout.layers.attention import Attention
from rollout.layers.embedding import Embedding
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.norm import RMSNorm
from rollout.layers.recompute import run_layer
from rollout.layers.rotary import RopeConfig, RotaryEmbedding, parse_rope
from rollout.models.causal_lm import CausalLM, ModelShape
from rollout.worker.batch import ForwardBatch, LastRows


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What the architecture needs to know, read from a Hugging Face config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None = None  # tokens that a token sees, itself among them; None: all before it

    @classmethod
    def from_pretrained_config(cls, config: PretrainedConfig) -> LlamaConfig:
        """Raises `ValueError` where the config asks for something that this implementation does not do."""
        fields = config.to_dict()
        if fields.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act={fields['hidden_act']!r} is not supported: Llama models use 'silu'")
        rope_parameters = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
        heads = fields["num_attention_heads"]
        kv_heads = fields.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        return cls(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_hidden_layers=fields["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            rms_norm_eps=fields["rms_norm_eps"],
            max_position_embeddings=fields["max_position_embeddings"],
            rope=parse_rope(rope_parameters, fields.get("rope_theta") or 10000.0),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            attention_bias=bool(fields.get("attention_bias", False)),
            mlp_bias=bool(fields.get("mlp_bias", False)),
        )


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig, layer_index: int, dtype: torch.dtype, rotary: RotaryEmbedding) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
        )
        self.q_proj = Linear(hidden, self.num_heads * head_dim, dtype, bias)
        self.k_proj = Linear(hidden, self.num_kv_heads * head_dim, dtype, bias)
        self.v_proj = Linear(hidden, self.num_kv_heads * head_dim, dtype, bias)
        self.o_proj = Linear(self.num_heads * head_dim, hidden, dtype, bias, out_dtype=torch.float32)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.attention = Attention(layer_index, head_dim, window=config.sliding_window)
        self.rotary = (rotary,)  # shared by all layers; in a tuple, so that it is registered once, in LlamaModel

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch, only: LastRows | None
    ) -> torch.Tensor:
        q, k, v = self.rotary[0].project(self.qkv, x, positions, self.num_heads, self.num_kv_heads, batch.adapter_ids)
        return self.o_proj(self.attention(q, k, v, batch, only).flatten(1), batch.adapters_of(only))


class LlamaMLP(nn.Module):
    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, intermediate, dtype, bias)
        self.up_proj = Linear(hidden, intermediate, dtype, bias)
        self.down_proj = Linear(intermediate, hidden, dtype, bias, out_dtype=torch.float32)
        self.gate_up = MergedLinear(self.gate_proj, self.up_proj)

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        return self.down_proj(self.gate_up.silu_and_mul(x, adapter_ids), adapter_ids)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, layer_index: int, dtype: torch.dtype, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_index, dtype, rotary)
        self.mlp = LlamaMLP(config, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: ForwardBatch,
        only: LastRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: float32 [T, hidden], the last block's output, not yet added to `residual`. Returns the next such pair, of
        all rows or of `only` some."""
        normed, summed = self.input_layernorm(x, residual)
        attended = self.self_attn(normed, positions, batch, only)
        if only is not None:
            summed = summed[only.rows]
        normed, summed = self.post_attention_layernorm(attended, summed)
        return self.mlp(normed, batch.adapters_of(only)), summed


class LlamaModel(nn.Module):
    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, index, dtype, self.rotary) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids), None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            only = batch.last_rows if index == last else None
            x, residual = run_layer(layer, batch, x, residual, positions, batch, only)
        return self.norm(x, residual)[0]


class LlamaForCausalLM(CausalLM):
    """The whole model; its head is the embedding where the config ties them."""

    supports_lora = True
    supports_recompute = True

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = ModelShape(
            vocab_size=config.vocab_size,
            num_hidden_layers=config.num_hidden_layers,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
        )
        self.model = LlamaModel(config, dtype)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, dtype)
        self.tied_names = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}

    @classmethod
    def from_pretrained_config(cls, config: PretrainedConfig, dtype: torch.dtype) -> Self:
        return cls(LlamaConfig.from_pretrained_config(config), dtype)

    @property
    def output_weight(self) -> torch.Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.model(input_ids, positions, batch)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)
