"""`rollout generate MODEL --prompt …`: samples as text, or as JSON lines with token ids and logprobs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.commands.engine_options import add_engine_arguments, engine_options

if TYPE_CHECKING:
    from rollout.outputs import CompletionOutput, RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's folder, or smollm2-135m-instruct")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompts-file", type=Path, metavar="FILE", help="one prompt a line")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message for the chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before each prompt (with --chat)")
    parser.add_argument("--json", action="store_true", help="one JSON line a prompt, with token ids and logprobs")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=128, metavar="N")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N")
    group.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 takes the most likely token")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--seed", type=int, metavar="SEED", help="makes the samples replayable")
    group.add_argument("-n", "--n", type=int, default=1, metavar="N", help="samples a prompt")
    group.add_argument("--stop", action="append", metavar="TEXT", help="may be given several times")
    group.add_argument("--ignore-eos", action="store_true")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generates and prints, prompts in the order given."""
    prompts = _prompts(args)
    from rollout.llm import LLM
    from rollout.sampling_params import SamplingParams

    params = SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
    llm = LLM(args.model, **engine_options(args))
    show_progress = sys.stderr.isatty()
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        conversations = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(conversations, params, use_tqdm=show_progress)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=show_progress)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(json.dumps(_as_json(prompt, output)) if args.json else _as_text(prompt, output, len(prompts)), flush=True)
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompts_file is not None:
        prompts += [line for line in args.prompts_file.read_text().splitlines() if line.strip()]
    if not prompts:
        raise ValueError("there is no prompt: give --prompt TEXT or --prompts-file FILE")
    if args.system and not args.chat:
        raise ValueError("--system needs --chat")
    return prompts


def _as_text(prompt: str, output: RequestOutput, num_prompts: int) -> str:
    """The samples' text, under a line that says which one wherever there are several."""
    parts = [f"=== {prompt}"] if num_prompts > 1 else []
    for sample in output.outputs:
        if len(output.outputs) > 1:
            parts.append(f"--- sample {sample.sample_index} (seed {sample.seed}, {sample.finish_reason})")
        parts.append(sample.text)
    return "\n".join(parts)


def _as_json(prompt: str, output: RequestOutput) -> dict[str, object]:
    return {
        "request_id": output.request_id,
        "prompt": prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "policy_version": output.policy_version,
        "outputs": [_sample_as_json(sample) for sample in output.outputs],
    }


def _sample_as_json(sample: CompletionOutput) -> dict[str, object]:
    return {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "seed": sample.seed,
        "sample_index": sample.sample_index,
        "raw_logprobs": sample.raw_logprobs.tolist(),
        "sampled_logprobs": sample.sampled_logprobs.tolist(),
        "kept_mass": sample.kept_mass.tolist(),
        "entropy": sample.entropy.tolist(),
    }
