"""Beam search: the KV blocks that beams share, and tokens per second beside two other ways.

    .venv/bin/python scripts/bench/beam_search.py [MODEL] [--widths 2 4 6] [--lengths short long] [--ways forks …]

Short: prompts of 20 tokens, outputs of 60; long: 160 and 340, as in the two traces of the PagedAttention paper (Kwon et
al., 2023). Ways: "forks" is `LLM.beam_search`; "generate" a loop of `LLM.generate` for one token with the logprobs of
the best, every beam a prompt, as vLLM has it; "transformers" `generate(num_beams=…)` in bfloat16. The ways take turns,
the fastest round counts. Tokens are counted on all beams. Prints one JSON line a length, width and way.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollout import LLM, BeamSearchParams, SamplingParams
from rollout.models.pretrained import SMOLLM2, resolve_model

LENGTHS = {"short": (20, 60), "long": (160, 340)}
PAGES = Path(__file__).resolve().parents[2] / "docs"
Search = Callable[[list[list[int]], int, int], float]  # prompts, width, output tokens -> share of blocks saved


def main() -> None:
    args = parse_arguments()
    llm = LLM(args.model, kv_cache_memory="1GiB", num_threads=args.threads, show_progress=False)
    torch.set_num_threads(args.threads)
    ways: dict[str, Search] = {}
    if "forks" in args.ways:
        ways["forks"] = lambda prompts, width, length: with_forks(llm, prompts, width, length)
    if "generate" in args.ways:
        ways["generate"] = lambda prompts, width, length: with_generate(llm, prompts, width, length)
    if "transformers" in args.ways:
        ways["transformers"] = with_transformers(args.model)
    for name in args.lengths:
        num_prompt, num_output = LENGTHS[name]
        prompts = make_prompts(llm, args.prompts, num_prompt)
        for width in args.widths:
            measure(ways, name, prompts, width, num_output, args.rounds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--lengths", choices=sorted(LENGTHS), nargs="+", default=["short", "long"])
    parser.add_argument("--ways", nargs="+", default=["forks", "generate", "transformers"])
    parser.add_argument("--prompts", type=int, default=4, help="searches at a time (default: 4)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def make_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """The beginnings of the pages in `docs/`, each cut to `length` tokens."""
    tokenizer = llm.get_tokenizer()
    pages = sorted(PAGES.glob("*.md"))[:count]
    return [tokenizer(page.read_text(encoding="utf-8")).input_ids[:length] for page in pages]


def measure(ways: dict[str, Search], name: str, prompts: list[list[int]], width: int, length: int, rounds: int) -> None:
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    saved: dict[str, float] = {}
    for _ in range(rounds):
        for way, search in ways.items():
            started = time.perf_counter()
            saved[way] = search(prompts, width, length)
            seconds[way].append(time.perf_counter() - started)
    for way in ways:
        line = {"length": name, "width": width, "way": way, "prompts": len(prompts)}
        line |= {"tokens per second": round(len(prompts) * width * length / min(seconds[way]), 1)}
        line |= {"kv blocks saved": round(saved[way], 3)}
        print(json.dumps(line), flush=True)


def with_forks(llm: LLM, prompts: list[list[int]], width: int, length: int) -> float:
    llm.reset_prefix_cache()
    outputs = llm.beam_search(prompts, BeamSearchParams(width, length, ignore_eos=True))
    return sum(output.kv_blocks_saved for output in outputs) / len(outputs)


def with_generate(llm: LLM, prompts: list[list[int]], width: int, length: int) -> float:
    """Every step: all beams are prompts, each for one token and its best; the cache alone knows what they share."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True, detokenize=False)
    beams = [[(prompt, 0.0)] for prompt in prompts]
    for _ in range(length):
        outputs = iter(llm.generate([tokens for group in beams for tokens, _ in group], params, use_tqdm=False))
        for index, group in enumerate(beams):
            grown: list[tuple[list[int], float]] = []
            for tokens, total in group:
                logprobs = next(outputs).outputs[0].logprobs
                assert logprobs is not None
                grown += [([*tokens, token_id], total + entry.logprob) for token_id, entry in logprobs[0].items()]
            beams[index] = sorted(grown, key=lambda beam: -beam[1])[:width]
    return 0.0


def with_transformers(name: str) -> Search:
    model = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.bfloat16)

    def search(prompts: list[list[int]], width: int, length: int) -> float:
        ids = torch.tensor(prompts)
        model.generate(  # type: ignore[operator]  # transformers types the method as a tensor or a module
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
        return 0.0

    return search


if __name__ == "__main__":
    main()
