"""What speculation brings: the same samples with and without it, in turns, in one process.

    .venv/bin/python scripts/bench/speculation.py [MODEL] [--workload copy single tail] [--temperature 1 0.6]
        [--config '{"method": "suffix"}' ...] [--rounds 3]

`copy`: "repeat this text", greedy, one request at a time, as in editing. The others are second epochs over prompts that
were sampled before with other seeds, as a trainer does it. `single`: one request in flight, of `workloads/single.json`.
`tail`: what is left of `workloads/grpo.json` once no more samples run than are drafted (`max_batch_for_speculation`);
only these steps are timed. `group`: four samples of a chat question in flight, which end as they like.

Every round samples with new seeds, first without and then with speculation, or the other way round; the numbers are of
the median round. One JSON line a workload and configuration: tokens of a round, tokens a second with and without and
the ratio, with the smallest and the largest; of steps with drafts: how many a sequence, how often the first was right
(a), the tokens that a sequence got, beside what the formula (1 - a^(k+1)) / (1 - a) makes of the drafts; guesses in the
place of drafts, and the tokens that they brought; and how many samples differ (none may). `--config` measures any
other method too, such as a draft model from a folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollout import LLM, CompletionOutput, RequestOutput, SamplingParams
from rollout.models.pretrained import SMOLLM2

WORKLOADS = Path(__file__).parent / "workloads"
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
CONFIGS = ({"method": "ngram"}, {"method": "suffix"})
NUM_SAMPLES = 8  # of a prompt, in a first epoch


@dataclass
class Pass:
    """What one engine did in one round."""

    seconds: float = 0.0
    num_tokens: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    samples: list[CompletionOutput] = field(default_factory=list)


@dataclass(frozen=True)
class Workload:
    """`first_epoch` shows an engine the prompts, with these seeds; `run` is one pass of a round, with that round's."""

    first_epoch: Callable[[LLM, float], None]
    run: Callable[[LLM, float, int], Pass]


def main() -> None:
    args = parse_arguments()
    plain = _engine(args.model, None)
    for name in args.workload:
        for temperature in [0.0] if name == "copy" else args.temperature:
            for config in args.config or CONFIGS:
                _compare(f"{name}, T={temperature:g}", MAKERS[name](), plain, args, config, temperature)


def _compare(
    name: str, workload: Workload, plain: LLM, args: argparse.Namespace, config: dict[str, Any], temperature: float
) -> None:
    llm = _engine(args.model, config)
    workload.first_epoch(llm, temperature)
    workload.run(plain, temperature, 0)  # warms it up
    rounds: list[tuple[Pass, Pass]] = []
    for number in range(1, args.rounds + 1):
        engines = (plain, llm) if number % 2 else (llm, plain)
        passes = [workload.run(engine, temperature, number) for engine in engines]
        rounds.append((passes[0], passes[1]) if number % 2 else (passes[1], passes[0]))
    ratios = [_speed(fast) / _speed(slow) for slow, fast in rounds]
    counters = {key: sum(fast.counters[key] for _, fast in rounds) for key in rounds[0][1].counters}
    drafted, accepted = counters["draft_tokens_total"], counters["accepted_draft_tokens_total"]
    right_instead = counters["accepted_alternative_tokens_total"]
    num_drafting = max(1.0, counters["draft_tokens_total_at_1"])
    share = counters["accepted_draft_tokens_total_at_1"] / num_drafting
    length = drafted / num_drafting
    line = {
        "workload": name,
        "config": config,
        "tokens": int(statistics.median(fast.num_tokens for _, fast in rounds)),
        "tokens_per_second": round(statistics.median(_speed(fast) for _, fast in rounds), 1),
        "without": round(statistics.median(_speed(slow) for slow, _ in rounds), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        "drafts_a_step": round(length, 2),
        "right_at_first": round(share, 3),
        "tokens_a_step": round(1 + (accepted + right_instead) / num_drafting, 2),
        "alternatives_a_step": round(counters["alternative_tokens_total"] / num_drafting, 2),
        "tokens_from_them": round(right_instead / num_drafting, 2),
        "formula": round((1 - share ** (length + 1)) / max(1e-9, 1 - share), 2),
        "differ": sum(
            a.token_ids != b.token_ids or not np.array_equal(a.raw_logprobs, b.raw_logprobs)
            for slow, fast in rounds
            for a, b in zip(slow.samples, fast.samples, strict=True)
        ),
    }
    print(json.dumps(line), flush=True)


def _speed(done: Pass) -> float:
    return done.num_tokens / done.seconds


def _run(
    llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams], *, most_running: int | None = None
) -> Pass:
    """Everything at once, timed from the step after which no more than `most_running` samples run (None: from the
    beginning)."""
    llm.reset_prefix_cache()
    done = Pass()
    ids = llm.enqueue(prompts, params)
    ended: list[RequestOutput] = []
    while most_running is not None and _num_unfinished(llm) > most_running:
        ended += llm.step()
    before = llm.get_metrics()
    started = time.perf_counter()
    ended += llm.wait_for_completion(use_tqdm=False)
    done.seconds = time.perf_counter() - started
    done.counters = {key: value - before[key] for key, value in llm.get_metrics().items()}
    done.num_tokens = int(done.counters["generation_tokens_total"])
    ended.sort(key=lambda output: ids.index(output.request_id))
    done.samples = [sample for output in ended for sample in output.outputs]
    return done


def _num_unfinished(llm: LLM) -> float:
    metrics = llm.get_metrics()
    return metrics["num_requests_running"] + metrics["num_requests_waiting"]


def _copy() -> Workload:
    prompts = [_chat(f"Repeat the following text exactly, word by word, and write nothing else:\n\n{t}") for t in TEXTS]

    def run(llm: LLM, temperature: float, number: int) -> Pass:
        return _one_by_one(llm, prompts, SamplingParams(temperature=temperature, max_tokens=100, seed=number))

    return Workload(lambda llm, temperature: None, run)


def _group() -> Workload:
    prompts = [_chat(question) for question in QUESTIONS]

    def params(temperature: float, n: int, seed: int) -> SamplingParams:
        return SamplingParams(n=n, temperature=temperature, max_tokens=128, seed=seed)

    def first_epoch(llm: LLM, temperature: float) -> None:
        llm.generate(prompts, params(temperature, NUM_SAMPLES, 900_000), use_tqdm=False)

    return Workload(
        first_epoch, lambda llm, temperature, number: _one_by_one(llm, prompts, params(temperature, 4, number))
    )


def _file(name: str, num_copies: int, most_running: int | None) -> Workload:
    """A workload file, each request `num_copies` times in the first epoch."""
    requests = json.loads((WORKLOADS / f"{name}.json").read_text())["requests"]
    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]

    def params(temperature: float, n: int, first_seed: int) -> list[SamplingParams]:
        lengths = [request["max_tokens"] for request in requests]
        return [
            SamplingParams(n=n, temperature=temperature, max_tokens=length, seed=first_seed + place, ignore_eos=True)
            for place, length in enumerate(lengths)
        ]

    def first_epoch(llm: LLM, temperature: float) -> None:
        llm.generate(prompts, params(temperature, num_copies, 900_000), use_tqdm=False)

    def run(llm: LLM, temperature: float, number: int) -> Pass:
        return _run(llm, prompts, params(temperature, 1, 1000 * number), most_running=most_running)

    return Workload(first_epoch, run)


MAKERS: dict[str, Callable[[], Workload]] = {
    "copy": _copy,
    "single": lambda: _file("single", NUM_SAMPLES, None),
    "tail": lambda: _file("grpo", 1, 8),
    "group": _group,
}


def _one_by_one(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> Pass:
    whole = Pass()
    for prompt in prompts:
        part = _run(llm, [prompt], [params])
        whole.seconds += part.seconds
        whole.num_tokens += part.num_tokens
        whole.samples += part.samples
        whole.counters = {key: whole.counters.get(key, 0.0) + value for key, value in part.counters.items()}
    return whole


def _engine(model: str, config: dict[str, Any] | None) -> LLM:
    return LLM(model, max_model_len=1024, kv_cache_memory="512MiB", show_progress=False, speculative_config=config)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--workload", nargs="+", choices=MAKERS, default=["copy", "single", "tail"])
    parser.add_argument("--temperature", nargs="+", type=float, default=[1.0, 0.6])
    parser.add_argument(
        "--config", nargs="+", type=json.loads, metavar="JSON", help="speculative_config; default: ngram and suffix"
    )
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
