"""Random heads and layers for tiny models, written as the published checkpoints are; and what they compute, slowly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu
from transformers import PreTrainedModel

from tests.support.oracle import load_reference


def make_medusa(
    folder: Path,
    *,
    num_heads: int = 3,
    num_layers: int = 1,
    hidden_size: int = 64,
    vocab_size: int = 131,
    own_output: bool = False,
    prefix: str = "",
    seed: int = 0,
    strength: float = 0.2,
) -> Path:
    """Medusa heads as FasterDecoding publishes them."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{prefix}{head}.{layer}.linear"
            tensors[f"{name}.weight"] = torch.randn(hidden_size, hidden_size, generator=generator) * strength
            tensors[f"{name}.bias"] = torch.randn(hidden_size, generator=generator) * strength
        if own_output:
            output = torch.randn(vocab_size, hidden_size, generator=generator) * 0.2
            tensors[f"{prefix}{head}.{num_layers}.weight"] = output
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": "tiny"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_eagle(folder: Path, *, vocab_size: int = 131, bias: bool = True, seed: int = 0, **fields: object) -> Path:
    """A layer as SafeAILab publishes it: for models of 64 hidden units, with 4 heads of 16 and 2 of keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    tensors = {f"layers.0.self_attn.{name}.weight": normal(*shape) for name, shape in sizes.items()}
    sizes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    tensors |= {f"layers.0.mlp.{name}.weight": normal(*shape) for name, shape in sizes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = 1 + normal(64) / 2
    tensors |= {"fc.weight": normal(64, 128), "embed_tokens.weight": normal(vocab_size, 64)}
    if bias:
        tensors["fc.bias"] = normal(64)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bias": bias,
    }
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def eagle_reference(
    tensors: dict[str, torch.Tensor], embedded: torch.Tensor, features: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """The published layer over a whole sequence: embedded[i] [T, 64] of the token after the one with features[i]
    [T, 64] -> guessed features [T, 64], without a cache and in plain torch."""

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ tensors[f"layers.0.{name}.weight"].to(x.dtype).T

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [heads, T, 16]
        frequencies = 10000.0 ** -(torch.arange(0, 16, 2, dtype=x.dtype) / 16)
        angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), frequencies).repeat(1, 2)
        turned = torch.cat([-x[..., 8:], x[..., :8]], dim=-1)
        return x * angles.cos() + turned * angles.sin()

    def split(x: torch.Tensor) -> torch.Tensor:  # [T, heads * 16] -> [heads, T, 16]
        return x.unflatten(-1, (-1, 16)).transpose(0, 1)

    x = torch.cat([embedded, features], dim=-1) @ tensors["fc.weight"].to(embedded.dtype).T
    x = x + tensors["fc.bias"].to(x.dtype) if "fc.bias" in tensors else x
    q, k = rotate(split(product("self_attn.q_proj", x))), rotate(split(product("self_attn.k_proj", x)))
    k, v = k.repeat_interleave(2, 0), split(product("self_attn.v_proj", x)).repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) / 4 + torch.full(2 * (len(x),), -torch.inf, dtype=x.dtype).triu(1)
    x = x + product("self_attn.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    norm = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    norm = norm * tensors["layers.0.post_attention_layernorm.weight"].to(x.dtype)
    return x + product("mlp.down_proj", silu(product("mlp.gate_proj", norm)) * product("mlp.up_proj", norm))


def medusa_reference(
    tensors: dict[str, torch.Tensor], features: torch.Tensor, head: int, num_layers: int
) -> torch.Tensor:
    """What a head gives to its output matrix: [T, hidden]."""
    for layer in range(num_layers):
        weight, bias = (tensors[f"{head}.{layer}.linear.{part}"].to(features.dtype) for part in ("weight", "bias"))
        features = features + silu(features @ weight.T + bias)
    return features


def target_features(folder: Path, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a model in `folder`, by transformers in float64: final hidden states [T, hidden], embeddings [T, hidden] of
    the tokens, and the output matrix [vocab, hidden]."""
    model = _reference(folder)
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False).last_hidden_state[0]
        return hidden, model.model.embed_tokens(ids)[0], model.lm_head.weight


@cache
def _reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder, torch.float64)
