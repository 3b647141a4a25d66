"""What LoRA adapters cost in a decode step, and what an update of one takes.

    .venv/bin/python scripts/bench/lora.py [MODEL] [--rows 32] [--rank 16] [--threads 1] [--clock processor]

Three engines take turns: without memory for adapters, with it and no adapter in the batch, and with an adapter of all
linear layers on every row. The median and the fastest step of each count. The processor's clock is that of one thread:
it is for busy machines, with one thread. Prints one JSON line a variant.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rollout import LLM, SamplingParams
from rollout.models.pretrained import SMOLLM2
from rollout.weights.receipt import Receipt

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.thread_time}
NUM_STEPS, ROUNDS = 40, 3


def main() -> None:
    args = parse_arguments()
    options: dict[str, Any] = {"kv_cache_memory": "512MiB", "num_threads": args.threads}
    plain = LLM(args.model, **options)
    llm = LLM(args.model, enable_lora=True, max_lora_rank=args.rank, **options)
    receipts = [push(llm, args.rank, seed) for seed in range(3)]
    variants: dict[str, tuple[LLM, str | None]] = {
        "no memory for adapters": (plain, None),
        "no adapter in the batch": (llm, None),
        f"rank {args.rank} on all linear layers": (llm, "policy"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, (engine, adapter) in variants.items():
            seconds[name] += steps(engine, adapter, args.rows, CLOCKS[args.clock])
    base = statistics.median(seconds["no memory for adapters"])
    for name, values in seconds.items():
        median = statistics.median(values)
        line = {"variant": name, "rows": args.rows, "median ms": round(median * 1e3, 2)}
        line |= {"fastest ms": round(min(values) * 1e3, 2), "of the first": round(median / base, 3)}
        print(json.dumps(line), flush=True)
    last = min(receipts, key=lambda receipt: receipt.seconds)
    print(json.dumps({"update ms": round(last.seconds * 1e3, 1), "bytes": last.bytes_copied, "of": last.num_bytes}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--rows", type=int, default=32, help="sequences that decode together (default: 32)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="processor")
    return parser.parse_args()


def push(llm: LLM, rank: int, seed: int) -> Receipt:
    """An update of the adapter "policy" alone, with random values."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in llm.engine.parameters().items():
        if name.endswith("_proj.weight"):
            module, (rows, columns) = name.removesuffix(".weight"), parameter.shape
            tensors[f"{module}.lora_A.weight"] = 0.02 * torch.randn(rank, columns, generator=generator)
            tensors[f"{module}.lora_B.weight"] = 0.02 * torch.randn(rows, rank, generator=generator)
    with llm.policy_update() as update:
        update.load_adapter("policy", tensors, {"r": rank, "lora_alpha": 2 * rank})
    return update.receipt


def steps(llm: LLM, adapter: str | None, rows: int, clock: Callable[[], float]) -> list[float]:
    """Seconds of each decode step of `rows` sequences; prefill and the step that is recorded are left out."""
    params = SamplingParams(max_tokens=NUM_STEPS + 2, seed=0, ignore_eos=True)
    llm.enqueue([[5 + row] * 16 for row in range(rows)], params, lora_request=adapter)
    seconds: list[float] = []
    while llm.num_unfinished:
        started = clock()
        llm.step()
        seconds.append(clock() - started)
    return seconds[2:]


if __name__ == "__main__":
    main()
