"""Tiny random Llama checkpoints, written as a real Hugging Face folder in a fraction of a second.

The weights are strong enough that the next-token distributions differ from position to position and are far from
uniform; `near_uniform=True` gives the opposite, for tests that need many close candidates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


TINY_WINDOW = 12  # tokens, of models whose architecture has a sliding window


def make_tiny_llama(
    path: Path | str,
    *,
    vocab_size: int = 131,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 96,
    tie: bool = True,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    config_style: Literal["rope_parameters", "rope_scaling"] = "rope_parameters",
    tokenizer: bool = False,
    max_position_embeddings: int = 512,
    eos_token_id: int | list[int] | None = 2,
    near_uniform: bool = False,
    num_shards: int = 1,
    file_format: Literal["safetensors", "bin"] = "safetensors",
) -> Path:
    """Writes a random `LlamaForCausalLM` folder to `path` and returns it; the same arguments give the same bytes.

    `head_dim=None` is `hidden_size // num_heads`. `bias` puts biases on attention and MLP projections.
    `rope_scaling` is the dictionary of a config (`{"rope_type": "llama3", "factor": 8.0, ...}`); `config_style` says
    whether it is written as transformers 5 does (`rope_parameters`) or as older checkpoints have it. `num_shards > 1`
    writes shards with an index file. `tokenizer=True` adds a character-level tokenizer (`vocab_size >= 128`) with
    ChatML specials (ids 1 and 2) and a chat template.

    Raises `ValueError` where transformers would refuse the folder: `hidden_size` must be a multiple of `num_heads`,
    also when `head_dim` is given (7 heads: `hidden_size=56`).
    """
    if hidden_size % num_heads or num_heads % num_kv_heads:
        raise ValueError(f"transformers refuses {hidden_size=} {num_heads=} {num_kv_heads=}: each must divide the last")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    width = head_dim if head_dim is not None else hidden_size // num_heads
    rope: dict[str, Any] = {"rope_theta": rope_theta, "rope_type": "default", **(rope_scaling or {})}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": width,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "attention_bias": bias,
        "mlp_bias": bias,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
    }
    if config_style == "rope_parameters":
        config |= {"rope_parameters": rope, "dtype": _DTYPE_NAMES[dtype]}
    else:
        config |= {"rope_theta": rope_theta, "rope_scaling": rope_scaling, "torch_dtype": _DTYPE_NAMES[dtype]}
    tensors = tiny_llama_tensors(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        q_size=num_heads * width,
        kv_size=num_kv_heads * width,
        intermediate_size=intermediate_size,
        tie=tie,
        bias=bias,
        dtype=dtype,
        seed=seed,
        near_uniform=near_uniform,
    )
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": eos_token_id})
    _write_tensors(folder, tensors, num_shards, file_format)
    if tokenizer:
        write_tiny_tokenizer(folder, vocab_size)
    return folder


def make_tiny_model(path: Path | str, architecture: str, dtype: torch.dtype, seed: int = 0) -> Path:
    """A random checkpoint of any causal language model that transformers knows by this class name.

    All parameters are random, also biases and norms (which transformers would make 0 and 1), and strong enough that
    the next-token distributions differ from position to position.
    """
    import transformers

    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        architectures=[architecture],
    )
    if "sliding_window" in config.to_dict():  # the default is longer than any test's sequence
        config.sliding_window = TINY_WINDOW
    model = model_class(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        parameter.data.copy_(1 + 0.1 * values if is_norm else 0.2 * values)
    model.save_pretrained(path)
    return Path(path)


def tiny_llama_tensors(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    q_size: int,
    kv_size: int,
    intermediate_size: int,
    tie: bool,
    bias: bool,
    dtype: torch.dtype,
    seed: int,
    near_uniform: bool = False,
) -> dict[str, torch.Tensor]:
    """The state dict of `make_tiny_llama`, by Hugging Face name, in checkpoint order."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.02 if near_uniform else 0.2

    def normal(*shape: int, std: float = scale) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    tensors = {"model.embed_tokens.weight": normal(vocab_size, hidden_size)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = (1 + normal(hidden_size, std=0.1).float()).to(dtype)
        projections = {
            "self_attn.q_proj": (q_size, hidden_size),
            "self_attn.k_proj": (kv_size, hidden_size),
            "self_attn.v_proj": (kv_size, hidden_size),
            "self_attn.o_proj": (hidden_size, q_size),
            "mlp.gate_proj": (intermediate_size, hidden_size),
            "mlp.up_proj": (intermediate_size, hidden_size),
            "mlp.down_proj": (hidden_size, intermediate_size),
        }
        for name, shape in projections.items():
            tensors[f"{prefix}{name}.weight"] = normal(*shape)
            if bias:
                tensors[f"{prefix}{name}.bias"] = normal(shape[0])
        tensors[prefix + "post_attention_layernorm.weight"] = (1 + normal(hidden_size, std=0.1).float()).to(dtype)
    tensors["model.norm.weight"] = (1 + normal(hidden_size, std=0.1).float()).to(dtype)
    if not tie:
        tensors["lm_head.weight"] = normal(vocab_size, hidden_size)
    return tensors


def write_tiny_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of exactly `vocab_size` ids: 3 specials, as many bytes as fit, then two-letter merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<unk>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (not char.isascii(), char))
    alphabet = ["Ġ", "Ċ", *(char for char in alphabet if char not in "ĠĊ")]  # space and newline come first
    if vocab_size < 128:
        raise ValueError(f"vocab_size={vocab_size} is not valid with tokenizer=True: it must be at least 128")
    tokens = specials + alphabet[: vocab_size - len(specials)]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = [(first, second) for first in letters for second in letters][: vocab_size - len(tokens)]
    tokens += [first + second for first, second in pairs]
    tokens += [f"<extra_{i}>" for i in range(vocab_size - len(tokens))]

    vocab = {token: index for index, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=built,
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int, file_format: str) -> None:
    base, suffix = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}[file_format]

    def write(name: str, part: dict[str, torch.Tensor]) -> None:
        if file_format == "safetensors":
            save_file(part, folder / name, metadata={"format": "pt"})
        else:
            torch.save(part, folder / name)

    if num_shards == 1:
        write(f"{base}.{suffix}", tensors)
        return
    names, weight_map = list(tensors), {}
    for shard in range(num_shards):
        file_name = f"{base}-{shard + 1:05d}-of-{num_shards:05d}.{suffix}"
        members = names[shard::num_shards]
        write(file_name, {name: tensors[name] for name in members})
        weight_map |= dict.fromkeys(members, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: weight_map[name] for name in names}}
    _write_json(folder / f"{base}.{suffix}.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
