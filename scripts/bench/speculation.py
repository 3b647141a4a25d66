"""What speculation brings: the same samples with and without it, one after the other in one process.

    .venv/bin/python scripts/bench/speculation.py [MODEL] [--drafts 4] [--epoch-prompts 4]

`copy`: "repeat this text", greedy, one request at a time, as in editing. `epochs`: the second pass over prompts that
were sampled before, with other seeds, as a trainer does it; `tail` has one sample a prompt in flight, `group` four.
Prints one JSON line for each: tokens, tokens a second with and without and their ratio, drafts a sequence in the steps
that had any, how often the first of them was right (a), the tokens that such a step brought, beside what the formula
(1 - a^(k+1)) / (1 - a) makes of it, and how many samples differ (none may).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout import LLM, RequestOutput, SamplingParams
from rollout.models.pretrained import SMOLLM2

TEXTS = (
    "The lighthouse at the end of the pier had been dark since 1987. Nobody in the village knew who paid for its "
    "upkeep, yet its windows were clean and its door was freshly painted every spring.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)",
    "Boil the potatoes in salted water for twenty minutes. Drain them, add butter, warm milk and a pinch of nutmeg, "
    "and mash until smooth. Season with salt and white pepper, and serve at once.",
    "Meeting moved to Thursday, 14:30, room 2.041. Please bring the signed forms, the list of participants and last "
    "year's budget. Parking is available behind the building; the gate closes at 18:00.",
)
QUESTIONS = (
    "What is 17 times 6? Think step by step.",
    "A train leaves at 9:40 and arrives at 12:05. How long does it travel? Think step by step.",
    "Name the planets of the solar system in order, with one fact about each.",
    "Anna has 12 apples and gives a third of them to Ben. How many are left? Think step by step.",
)
METHODS: dict[str, dict[str, Any]] = {"ngram": {"method": "ngram"}, "suffix": {"method": "suffix"}}


def main() -> None:
    args = parse_arguments()
    plain = LLM(args.model, max_model_len=1024, kv_cache_memory="512MiB", show_progress=False)
    copies = [_chat(f"Repeat the following text exactly, word by word, and write nothing else:\n\n{t}") for t in TEXTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=100)
    for method in METHODS:
        llm = _make(args.model, method, args.drafts)
        _compare(f"copy, {method}", plain, llm, copies, [greedy])
    prompts = [_chat(question) for question in QUESTIONS[: args.epoch_prompts]]
    for temperature in (1.0, 0.6):
        for name, num_samples in (("tail", 1), ("group", 4)):
            llm = _make(args.model, "suffix", args.drafts)
            first = SamplingParams(n=8, temperature=temperature, max_tokens=128, seed=1)
            llm.generate(prompts, first)
            second = [
                SamplingParams(n=num_samples, temperature=temperature, max_tokens=128, seed=2 + number)
                for number in range(4 // num_samples)
            ]
            _compare(f"epochs, {name}, T={temperature}", plain, llm, prompts, second)


def _compare(name: str, plain: LLM, llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> None:
    """One request after the other, each without and then with speculation: so that a slow moment of the machine counts
    for both."""
    outputs: dict[str, list[RequestOutput]] = {"without": [], "with": []}
    seconds = {"without": 0.0, "with": 0.0}
    before = llm.get_metrics()
    for asked in params:
        for prompt in prompts:
            for kind, engine in (("without", plain), ("with", llm)):
                started = time.perf_counter()
                outputs[kind] += engine.generate([prompt], asked, use_tqdm=False)
                seconds[kind] += time.perf_counter() - started
    metrics = {key: value - before[key] for key, value in llm.get_metrics().items()}
    pairs = [
        (a, b)
        for one, other in zip(outputs["with"], outputs["without"], strict=True)
        for a, b in zip(one.outputs, other.outputs, strict=True)
    ]
    num_tokens = sum(len(sample.token_ids) for sample, _ in pairs)
    drafted, accepted = metrics["draft_tokens_total"], metrics["accepted_draft_tokens_total"]
    num_drafting = max(1, metrics["draft_tokens_total_at_1"])
    share = metrics["accepted_draft_tokens_total_at_1"] / num_drafting
    length = drafted / num_drafting
    line = {
        "workload": name,
        "tokens": num_tokens,
        "tokens_per_second": round(num_tokens / seconds["with"], 1),
        "without": round(num_tokens / seconds["without"], 1),
        "ratio": round(seconds["without"] / seconds["with"], 3),
        "steps": int(metrics["num_steps_total"]),
        "drafts_a_step": round(length, 2),
        "right_at_first": round(share, 3),
        "tokens_a_step": round(1 + accepted / num_drafting, 2),
        "formula": round((1 - share ** (length + 1)) / max(1e-9, 1 - share), 2),
        "differ": sum(
            a.token_ids != b.token_ids or not np.array_equal(a.raw_logprobs, b.raw_logprobs) for a, b in pairs
        ),
    }
    print(json.dumps(line), flush=True)


def _make(model: str, method: str, drafts: int) -> LLM:
    config = METHODS[method] | {"num_speculative_tokens": drafts}
    return LLM(model, max_model_len=1024, kv_cache_memory="512MiB", show_progress=False, speculative_config=config)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--drafts", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--epoch-prompts", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
