"""Makes Medusa heads or an EAGLE layer for a model, trains them on its own samples, and says how often they are right.

    .venv/bin/python scripts/train_drafter.py medusa heads/ [--model MODEL] [--steps 120] [--prompts FILE]

Samples answers to questions (those in FILE, one a line, or some hundred of its own), trains on them for `--steps` steps
of `--tokens` tokens, and writes the folder that `speculative_config={"method": ..., "model": "heads/"}` takes. Before
and after, it samples answers to questions that were held out, with the heads guessing, at temperatures 1 and 0.6, and
prints one JSON line for each: how often the guess at each place was right where all before it were, and the tokens
that a step with guesses brought.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rollout import LLM
from rollout.models.causal_lm import CausalLM
from rollout.models.pretrained import SMOLLM2, resolve_model
from rollout.speculation.eagle import EagleModel
from rollout.speculation.medusa import MedusaHeads
from rollout_trainers.config import OptimizerSection
from rollout_trainers.drafter import DrafterTrainer, DrafterTraining
from rollout_trainers.fresh_heads import fresh_eagle, fresh_medusa, load_heads, save_heads
from rollout_trainers.optimizer import learning_rate
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.types import Example, Sample

FORMS = (
    "Explain in a few sentences what {} is.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Why do people care about {}? Think step by step.",
)
THINGS = (
    "a lighthouse, the moon, gravity, bread, a violin, chess, the sea, a library, democracy, snow, a bicycle, coffee, "
    "a volcano, money, sleep, a garden, the internet, a bridge, football, honey, a train, a mirror, electricity, "
    "paper, a market, music, a river, the alphabet, glass, friendship, a clock, rice, the brain, a storm, a camera, "
    "cotton, a desert, the number zero, tea, a castle"
)
HELD_OUT = 4  # every so many-th thing


def main() -> None:
    args = parse_arguments()
    folder, heads_folder = resolve_model(args.model), Path(args.heads)
    llm = LLM(str(folder), max_model_len=512, kv_cache_memory="512MiB", show_progress=False)
    questions, held_out = read_questions(args.prompts)
    started = time.perf_counter()
    samples = sample(llm, questions, args.samples, 1.0, args.max_tokens, seed=1)
    num_tokens = sum(len(one.completion_token_ids) for one in samples)
    print(json.dumps({"samples": len(samples), "tokens": num_tokens, "seconds": since(started)}), flush=True)
    target: CausalLM = llm.collective_rpc(lambda worker: worker.model)[0]
    heads: MedusaHeads | EagleModel
    if (heads_folder / "config.json").is_file():
        heads = load_heads(heads_folder, target)
    else:
        heads = fresh_medusa(target, args.drafts) if args.method == "medusa" else fresh_eagle(target, folder)
        save_heads(heads, heads_folder, folder)
    measure("before", args, folder, held_out)
    train(heads, target, samples, args)
    save_heads(heads, heads_folder, folder)
    measure("after", args, folder, held_out)


def train(heads: MedusaHeads | EagleModel, target: CausalLM, samples: list[Sample], args: argparse.Namespace) -> None:
    optimizer = OptimizerSection(learning_rate=args.rate, warmup_steps=5, schedule="cosine", final_fraction=0.1)
    trainer = DrafterTrainer(heads, target, DrafterTraining(optimizer, tokens_per_step=args.tokens))
    started = time.perf_counter()
    for step in range(args.steps):
        metrics = trainer.learn(samples, learning_rate(step, args.steps, optimizer))
        if step % 20 == 0 or step == args.steps - 1:
            values = {name.removeprefix("drafter/"): round(value, 4) for name, value in metrics.items()}
            print(json.dumps({"step": step, "seconds": since(started)} | values), flush=True)


def measure(when: str, args: argparse.Namespace, folder: Path, held_out: list[str]) -> None:
    """How often the guesses are right on questions that nobody has trained on."""
    speculative = {
        "method": args.method,
        "model": args.heads,
        "num_speculative_tokens": args.drafts,
        "only_if_faster": False,
    }
    llm = LLM(
        str(folder),
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory="256MiB",
        show_progress=False,
        speculative_config=speculative,
    )
    for temperature in (1.0, 0.6):
        before = llm.get_metrics()
        sample(llm, held_out, 1, temperature, args.max_tokens, seed=2)
        metrics = {name: value - before[name] for name, value in llm.get_metrics().items()}
        places = [
            (f"draft_tokens_total_at_{n}", f"accepted_draft_tokens_total_at_{n}") for n in range(1, args.drafts + 1)
        ]
        right = [round(metrics[accepted] / max(1, metrics[drafted]), 3) for drafted, accepted in places]
        num_steps = max(1, metrics["draft_tokens_total_at_1"])
        line = {
            "when": when,
            "method": args.method,
            "temperature": temperature,
            "drafted": [int(metrics[drafted]) for drafted, _ in places],
            "right": right,
            "tokens_a_step": round(1 + metrics["accepted_draft_tokens_total"] / num_steps, 3),
        }
        print(json.dumps(line), flush=True)


def sample(llm: LLM, questions: list[str], num: int, temperature: float, max_tokens: int, seed: int) -> list[Sample]:
    producer = RolloutProducer(llm, temperature, max_tokens, seed)
    return producer.produce(1, [Example([{"role": "user", "content": question}]) for question in questions], num)


def read_questions(path: str | None) -> tuple[list[str], list[str]]:
    """Those to train on, and those that are held out."""
    if path is None:
        questions = [form.format(thing) for thing in THINGS.split(", ") for form in FORMS]
        size = len(FORMS) * HELD_OUT
        groups = [questions[start : start + size] for start in range(0, len(questions), size)]
        held_out = [question for group in groups for question in group[-len(FORMS) :]]
    else:
        questions = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        held_out = questions[::HELD_OUT]
    if not held_out:
        raise SystemExit(f"{path} holds no questions")
    return [question for question in questions if question not in set(held_out)], held_out


def since(started: float) -> float:
    return round(time.perf_counter() - started, 1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("method", choices=("medusa", "eagle"))
    parser.add_argument("heads", help="the folder of heads; those that are there already are trained further")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--prompts", help="a file with one question a line")
    parser.add_argument("--samples", type=int, default=2, help="answers to each question")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=256, help="that a step learns from")
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate at its highest")
    parser.add_argument("--drafts", type=int, default=2, help="num_speculative_tokens, and the number of fresh heads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
