"""What speculation brings: the same samples with and without it, one after the other in one process.

    .venv/bin/python scripts/bench/speculation.py [MODEL] [--rows 4] [--repeat 2] [--epoch-prompts 4]

`copy`: "repeat this text", greedy, one request at a time, as in editing. `epochs`: the second pass over prompts that
were sampled before, with other seeds, as a trainer does it; `tail` has one sample a prompt in flight, `group` four.
Prints one JSON line for each: tokens, seconds of generation with and without (the best of `--repeat` passes), their
ratio, the share of drafts that were right, tokens a sequence got in a step that had drafts for it (a) beside what the
formula (1 - a^(k+1)) / (1 - a) makes of that share, and how many outputs differ (none may).
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
    "The lighthouse at the end of the pier had been dark since 1987. Nobody in the village knew who paid for its upkeep, "
    "yet its windows were clean and its door was freshly painted every spring.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n",
    "Boil the potatoes in salted water for twenty minutes. Drain them, add butter, warm milk and a pinch of nutmeg, and "
    "mash until smooth. Season with salt and white pepper, and serve at once.",
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
        llm = _make(args.model, method, args.rows)
        _compare(f"copy, {method}", plain, llm, copies, [greedy], 1, args.repeat)
    prompts = [_chat(question) for question in QUESTIONS[: args.epoch_prompts]]
    for temperature in (1.0, 0.6):
        for name, num_samples in (("tail", 1), ("group", 4)):
            llm = _make(args.model, "suffix", args.rows)
            first = SamplingParams(n=8, temperature=temperature, max_tokens=128, seed=1)
            llm.generate(prompts, first)
            second = [
                SamplingParams(n=num_samples, temperature=temperature, max_tokens=128, seed=2 + number)
                for number in range(4 // num_samples)
            ]
            _compare(f"epochs, {name}, T={temperature}", plain, llm, prompts, second, 1, args.repeat)


def _compare(
    name: str,
    plain: LLM,
    llm: LLM,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    at_once: int,
    repeat: int,
) -> None:
    """Every pass of both engines does the same, one after the other. A later pass of `llm` has seen its own samples
    already, which would be cheating where the seeds are the same: its first pass counts, of a text's copies the best."""
    (wanted, slow), (outputs, fast), metrics = _run(plain, prompts, params), (None, None), None
    for number in range(repeat):
        if number:
            slow = min(slow, _run(plain, prompts, params)[1])
        if outputs is None:
            before = llm.get_metrics()
            outputs, fast = _run(llm, prompts, params)
            metrics = {key: value - before[key] for key, value in llm.get_metrics().items()}
    assert outputs is not None and fast is not None and metrics is not None
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    differ = sum(
        a.token_ids != b.token_ids or not np.array_equal(a.raw_logprobs, b.raw_logprobs)
        for one, other in zip(outputs, wanted, strict=True)
        for a, b in zip(one.outputs, other.outputs, strict=True)
    )
    drafted, accepted = metrics["draft_tokens_total"], metrics["accepted_draft_tokens_total"]
    by_place = [value for key, value in metrics.items() if key.startswith("draft_tokens_total_at_")]
    line = {
        "workload": name,
        "tokens": num_tokens,
        "tokens_per_second": round(num_tokens / fast, 1),
        "without": round(num_tokens / slow, 1),
        "ratio": round(slow / fast, 3),
        "accepted": round(accepted / max(1, drafted), 3),
        "tokens_per_drafting_step": round(1 + accepted / max(1, by_place[0]), 2),
        "steps": int(metrics["num_steps_total"]),
        "differ": differ,
    }
    print(json.dumps(line), flush=True)


def _run(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> tuple[list[RequestOutput], float]:
    """One request after the other; seconds of all."""
    llm.reset_prefix_cache()
    outputs: list[RequestOutput] = []
    started = time.perf_counter()
    for asked in params:
        for prompt in prompts:
            outputs += llm.generate([prompt], asked, use_tqdm=False)
    return outputs, time.perf_counter() - started


def _make(model: str, method: str, rows: int) -> LLM:
    config = METHODS[method] | {"num_speculative_tokens": rows}
    return LLM(model, max_model_len=1024, kv_cache_memory="512MiB", show_progress=False, speculative_config=config)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--rows", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--epoch-prompts", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
