"""What keys and values in 8 bits cost in accuracy: int8 and float8 (e4m3), simulated, since no CPU kernel has float8.

    .venv/bin/python scripts/bench/kv_formats.py [MODEL] [--prompts 4]

The model computes the prompts of a workload in float32, once as it is and once for each format, every layer's keys and
values rounded as the cache would round them: a scale for each token and head. Prints KL(float32 || rounded) over the
whole vocabulary, of every position.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout import LLM
from rollout.commands.bench import read_workload
from rollout.layers.attention import Attention
from rollout.models.causal_lm import CausalLM
from rollout.models.pretrained import SMOLLM2
from rollout.worker.batch import ForwardBatch
from rollout_kernels.kv_cache import QUANTISED_MAXIMUM

WORKLOAD = Path(__file__).parent / "workloads" / "grpo_small.json"


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, H, D] as a quantised cache has it."""
    scale = x.abs().amax(-1, keepdim=True) / QUANTISED_MAXIMUM[dtype]
    ratio = x / torch.where(scale == 0, 1.0, scale)
    return (ratio.round() if dtype is torch.int8 else ratio).to(dtype).to(x.dtype) * scale


@contextmanager
def cache_of(model: CausalLM, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside the block the model attends to rounded keys and values."""
    layers = [module for module in model.modules() if isinstance(module, Attention)] if dtype is not None else []

    def round_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        assert dtype is not None
        q, k, v, *rest = inputs
        return q, rounded(k, dtype), rounded(v, dtype), *rest

    hooks = [layer.register_forward_pre_hook(round_inputs) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def distributions(model: CausalLM, tokens: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    """Log-probabilities float64 [T, vocab]."""
    with cache_of(model, dtype):
        batch = ForwardBatch.packed(torch.tensor([0, len(tokens)]))
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), batch)
        return model.compute_logits(hidden).double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--prompts", type=int, default=4, help="of the workload (default: 4)")
    args = parser.parse_args()
    model = LLM(args.model, dtype="float32", max_model_len=2048, kv_cache_memory="64MiB").shared_model()
    every_prompt = [request["prompt_token_ids"] for request in read_workload(WORKLOAD)["requests"]]
    prompts = list(dict.fromkeys(map(tuple, every_prompt)))[: args.prompts]  # samples of a group share theirs
    kl: dict[torch.dtype, list[torch.Tensor]] = {dtype: [] for dtype in QUANTISED_MAXIMUM}
    for prompt in prompts:
        exact = distributions(model, prompt, None)
        for dtype, values in kl.items():
            values.append((exact.exp() * (exact - distributions(model, prompt, dtype))).sum(-1))
    for dtype, values in kl.items():
        every = torch.cat(values)
        print(f"{dtype}: {len(every)} tokens, mean KL {every.mean():.5f}, median {every.median():.5f}, "
              f"largest {every.max():.4f}")  # fmt: skip


if __name__ == "__main__":
    main()
