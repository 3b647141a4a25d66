"""Forward and backward of a policy-gradient loss: this project's model beside transformers', tokens per second.

    .venv/bin/python scripts/bench/training_step.py [MODEL] [--dtypes bfloat16 float32] [--shapes 16x256 4x1024 64x100]

Both models hold the same weights and meet the same random tokens: `16x256` is 16 sequences of 256 tokens, all of one
length, so that the peer's padded batch wastes nothing. The peer is `AutoModelForCausalLM` with torch's scaled dot
product attention and `cross_entropy` for the log-probabilities; ours is packed, with `linear_token_logprobs`. The loss
is -mean(advantage * logprob) over every token but the first of each sequence. The two take turns in one process (a
machine's speed drifts); the table shows the medians of their turns.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollout.commands.doctor import cpu_info
from rollout.models.causal_lm import CausalLM
from rollout.models.loader import build_model, load_weights, materialize, read_config
from rollout.models.pretrained import SMOLLM2, resolve_model
from rollout.worker.batch import ForwardBatch
from rollout_kernels import linear_token_logprobs

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    print(
        f"{cpu_info().get('model name', 'unknown processor')}, {args.threads} threads; medians of {args.turns} turns.\n"
    )
    print("| tokens | dtype | rollout, tokens/s | transformers, tokens/s | ratio | loss, both |")
    print("|---|---|---:|---:|---:|---:|")
    for name in args.dtypes:
        ours = load_ours(folder, DTYPES[name])
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[name], attn_implementation="sdpa")
        for sequences, length in args.shapes:
            print(compare(ours, peer, (sequences, length), name, args), flush=True)
        del ours, peer
        gc.collect()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="forward and backward beside transformers")
    parser.add_argument("model", nargs="?", default=SMOLLM2, help=f"a folder or a known name (default: {SMOLLM2})")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--shapes", nargs="+", type=shape, default=[(16, 256), (4, 1024), (64, 100)], metavar="SxL")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="turns of each model; one more warms up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor time of all threads leaves out waiting for a core"
    )
    return parser.parse_args()


def shape(text: str) -> tuple[int, int]:
    """`16x256` as (sequences, length)."""
    sequences, _, length = text.partition("x")
    if not (sequences.isdigit() and length.isdigit() and int(sequences) and int(length) > 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 16x256")
    return int(sequences), int(length)


def load_ours(folder: Path, dtype: torch.dtype) -> CausalLM:
    model = build_model(read_config(folder), dtype)
    materialize(model, lambda size, kind: torch.empty(size, dtype=kind), torch.device("cpu"))
    load_weights(model, folder)
    return model.requires_grad_(True)


def compare(ours: CausalLM, peer: torch.nn.Module, size: tuple[int, int], dtype: str, args: argparse.Namespace) -> str:
    """One row of the table."""
    sequences, length = size
    clock = CLOCKS[args.clock]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ours.shape.vocab_size, (sequences, length), generator=generator)
    advantages = torch.randn(sequences, 1, generator=generator).expand(-1, length - 1)
    runs = {"rollout": (ours, our_step), "transformers": (peer, peer_step)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    losses = {}
    for turn in range(args.turns + 1):
        for name, (model, step) in runs.items():
            start = clock()
            losses[name] = step(model, ids, advantages)
            if turn:  # the first is for the caches
                seconds[name].append(clock() - start)
            model.zero_grad(set_to_none=True)
    rates = {name: ids.numel() / statistics.median(values) for name, values in seconds.items()}
    return (
        f"| {sequences} x {length} | {dtype} | {rates['rollout']:,.0f} | {rates['transformers']:,.0f} "
        f"| {rates['rollout'] / rates['transformers']:.2f} | {losses['rollout']:.5f}, {losses['transformers']:.5f} |"
    )


def our_step(model: CausalLM, ids: torch.Tensor, advantages: torch.Tensor) -> float:
    sequences, length = ids.shape
    query_start = torch.arange(0, ids.numel() + 1, length)
    positions = torch.arange(length).repeat(sequences)
    hidden = model(ids.flatten(), positions, ForwardBatch.packed(query_start))  # [S * L, H]
    predicting = hidden.unflatten(0, (sequences, length))[:, :-1].flatten(0, 1)
    logprobs, _ = linear_token_logprobs(predicting, model.output_weight, ids[:, 1:].flatten())
    return _backward(logprobs, advantages)


def peer_step(model: Callable, ids: torch.Tensor, advantages: torch.Tensor) -> float:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [S, L - 1, V]
    logprobs = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return _backward(logprobs, advantages)


def _backward(logprobs: torch.Tensor, advantages: torch.Tensor) -> float:
    loss = -(advantages.flatten() * logprobs).mean()
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    main()
