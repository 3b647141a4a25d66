"""What outputs cost beside generation: 1,000 samples of 1,000 tokens, of which only the forward passes are left out.

    .venv/bin/python scripts/bench/outputs.py [MODEL] [--samples 1000] [--tokens 1000] [--rate 785]

Everything runs as in `LLM.generate` (admission, plans, updates, stop rules, outputs with all arrays and the tokenizer's
text), but tokens come from a text instead of a model. `--rate`, tokens a second, is what the share of a generation is
counted with; the default is that of the workload `grpo` in `docs/benchmarks.md`. Prints one JSON line a variant:
microseconds of processor time a token for scheduling and for building outputs, the latter's share, and how often the
collector ran.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass

import numpy as np

from rollout import LLM, SamplingParams
from rollout.core.schedule import SchedulePlan, StepResult, TopLogprobs
from rollout.models.pretrained import SMOLLM2

TEXT = "Nobody knew why the lighthouse, which had been dark since 1987, shone again last Tuesday at dusk; but it did. "
SAMPLES_A_PROMPT = 8


@dataclass(slots=True)
class Recitation:
    """Stands for the forward pass: the tokens of a text, each sample from a place of its own."""

    text_ids: list[int]
    vocab_size: int
    seconds: float = 0.0

    def execute(self, plan: SchedulePlan) -> StepResult:
        started = time.process_time()
        length, draws = len(self.text_ids), plan.draws
        ids = [self.text_ids[(draw.position + 7 * draw.sample_index) % length] for draw in draws]
        values = np.linspace(-3.0, -0.1, len(draws), dtype=np.float32)
        result = StepResult(np.array(ids, np.int64), values, values, np.exp(values), -values)
        if draws and draws[0].params.wants_top_logprobs:
            result.top_logprobs = self._top(len(draws), draws[0].params.logprobs or 0)
        self.seconds += time.process_time() - started
        return result

    def _top(self, count: int, num_top: int) -> dict[int, TopLogprobs]:
        ids = (np.arange(count)[:, None] * 97 + np.arange(num_top)).astype(np.int32) % self.vocab_size
        logprobs = np.tile(np.linspace(-0.5, -5.0, num_top, dtype=np.float32), (count, 1))
        ranks = np.ones(count, np.int32)
        rows = TopLogprobs.of(ids, logprobs, ranks, np.empty((count, 0), np.float32))
        return {index: rows[index : index + 1] for index in range(count)}


def main() -> None:
    args = parse_arguments()
    # The pool has to hold what is in flight; nothing is ever written to it.
    llm = LLM(args.model, kv_cache_memory="8GiB", max_model_len=args.tokens + 128, show_progress=False)
    tokenizer = llm.get_tokenizer()
    text_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    recitation = Recitation(text_ids, llm.engine.vocab_size)
    llm.engine.executor.execute = recitation.execute  # type: ignore[method-assign]  # no forward passes here
    for logprobs in (None, 5):
        print(json.dumps(measure(llm, recitation, args, logprobs)), flush=True)


def measure(
    llm: LLM, recitation: Recitation, args: argparse.Namespace, logprobs: int | None
) -> dict[str, float | int | None]:
    """One pass over all samples."""
    params = SamplingParams(n=SAMPLES_A_PROMPT, max_tokens=args.tokens, ignore_eos=True, seed=1, logprobs=logprobs)
    prompts = [list(range(10 + index, 74 + index)) for index in range(args.samples // SAMPLES_A_PROMPT)]
    gc.collect()
    before = [generation["collections"] for generation in gc.get_stats()]
    fake_before, started = recitation.seconds, time.process_time()
    llm.enqueue(prompts, params)
    groups = list(llm._enqueued.values())
    llm._delivery.wait(groups, lambda _: None)
    grown = time.process_time()
    outputs = [group.output(llm.get_tokenizer()) for group in groups]
    built = time.process_time()
    collections = [now["collections"] - then for now, then in zip(gc.get_stats(), before, strict=True)]
    llm._enqueued.clear()
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    assert num_tokens == len(prompts) * SAMPLES_A_PROMPT * args.tokens
    host = grown - started - (recitation.seconds - fake_before)
    return {
        "logprobs": logprobs,
        "tokens": num_tokens,
        "scheduling_us": round(host / num_tokens * 1e6, 2),
        "outputs_us": round((built - grown) / num_tokens * 1e6, 3),
        "outputs_share_percent": round((built - grown) * args.rate / num_tokens * 100, 3),
        "collections_young": collections[0],
        "collections_middle": collections[1],
        "collections_full": collections[2],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=785.0, help="tokens a second of the generation")
    return parser.parse_args()


if __name__ == "__main__":
    main()
