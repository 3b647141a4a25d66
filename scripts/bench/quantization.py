"""What int8 weights and int8 KV cost in accuracy, and what they bring in speed.

    .venv/bin/python scripts/bench/quantization.py [MODEL] [--sequences 16] [--passes 3]

Accuracy: the bfloat16 engine samples from the prompts of a workload; every engine then scores these samples, and the
distributions of all sampled positions are compared over the whole vocabulary. Speed: the engines take turns, pass by
pass, and the fastest of each counts. Prints one JSON line a variant and measure, then a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rollout import LLM, SamplingParams
from rollout.commands.bench import read_workload, run_pass
from rollout.models.pretrained import SMOLLM2

WORKLOADS = Path(__file__).parent / "workloads"
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8 weights": {"quantization": "int8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "both": {"quantization": "int8", "kv_cache_dtype": "int8"},
}

Sequence = tuple[int, list[int]]  # number of prompt tokens, and all tokens


def main() -> None:
    args = parse_arguments()
    options = {"dtype": "bfloat16", "max_model_len": 2048, "kv_cache_memory": "256MiB"}
    engines = {name: LLM(args.model, **options, **variant) for name, variant in VARIANTS.items()}
    sequences = sample(engines["bfloat16"], read_workload(WORKLOADS / "grpo_small.json"), args.sequences)
    lines = compare(engines, sequences)
    for line in lines.values():
        print(json.dumps(line), flush=True)
    for workload in [read_workload(WORKLOADS / f"{name}.json") for name in args.workloads]:
        for name, rate in speeds(engines, workload, args.passes).items():
            measured = {f"{workload['name']} tokens/s": round(rate, 1)}
            print(json.dumps({"variant": name, **measured}), flush=True)
            lines[name] |= measured
    print(table(list(lines.values())))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--sequences", type=int, default=16, help="samples to compare (default: 16)")
    parser.add_argument("--passes", type=int, default=3, help="of each engine over each workload (default: 3)")
    parser.add_argument("--workloads", nargs="*", default=["single", "grpo_small"])
    return parser.parse_args()


def sample(llm: LLM, workload: dict[str, Any], count: int) -> list[Sequence]:
    """Samples of the workload's first `count` requests."""
    requests = workload["requests"][:count]
    prompts = [request["prompt_token_ids"] for request in requests]
    params = [
        SamplingParams(max_tokens=request["max_tokens"], seed=index, ignore_eos=True)
        for index, request in enumerate(requests)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (len(prompt), prompt + output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)
    ]


@contextmanager
def kept_logits(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """Everything that the engine's model computes as logits inside a `with` block."""
    model = llm.collective_rpc(lambda worker: worker.model)[0]
    kept: list[torch.Tensor] = []
    compute = model.compute_logits

    def compute_and_keep(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        kept.append(logits.clone())
        return logits

    model.compute_logits = compute_and_keep
    try:
        yield kept
    finally:
        model.compute_logits = compute


def distributions(llm: LLM, sequence: Sequence) -> torch.Tensor:
    """The engine's log-probabilities before each sampled token of a sequence, float32 [sampled tokens, vocab]."""
    prompt_length, token_ids = sequence
    llm.reset_prefix_cache()
    with kept_logits(llm) as kept:
        llm.score(token_ids, use_tqdm=False)
    return torch.cat(kept)[prompt_length - 1 : len(token_ids) - 1].log_softmax(-1)


def compare(engines: dict[str, LLM], sequences: list[Sequence]) -> dict[str, dict[str, Any]]:
    """Variant -> KL(bfloat16 || variant) and differences of the sampled tokens' logprobs."""
    kl: dict[str, list[torch.Tensor]] = {name: [] for name in engines}
    differences: dict[str, list[torch.Tensor]] = {name: [] for name in engines}
    for sequence in sequences:
        exact = distributions(engines["bfloat16"], sequence)
        sampled = torch.tensor(sequence[1][sequence[0] :])[:, None]
        for name, llm in engines.items():
            other = distributions(llm, sequence)
            kl[name].append((exact.exp() * (exact - other)).sum(-1))
            differences[name].append((exact - other).gather(1, sampled)[:, 0].abs())
    return {name: accuracy(name, torch.cat(kl[name]), torch.cat(differences[name])) for name in engines}


def accuracy(name: str, kl: torch.Tensor, difference: torch.Tensor) -> dict[str, Any]:
    return {
        "variant": name,
        "tokens": len(kl),
        "mean KL": round(kl.mean().item(), 6),
        "median KL": round(kl.median().item(), 6),
        "largest KL": round(kl.max().item(), 4),
        "mean |logprob difference|": round(difference.mean().item(), 5),
        "largest |logprob difference|": round(difference.max().item(), 3),
    }


def speeds(engines: dict[str, LLM], workload: dict[str, Any], passes: int) -> dict[str, float]:
    """Variant -> tokens per second of its fastest pass; the first turn of each warms up and does not count."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(passes + 1):
        for name, llm in engines.items():
            tokens, seconds = run_pass(llm, workload)
            rates[name].append(tokens / seconds)
    return {name: max(values[1:]) for name, values in rates.items()}


def table(lines: list[dict[str, Any]]) -> str:
    columns = list(lines[0])
    rows = [columns, *([str(line[column]) for column in columns] for line in lines)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    main()
