"""`rollout bench MODEL WORKLOAD.json …`: tokens per second, one JSON line a workload.

A workload file holds `{"name", "requests": [{"prompt_token_ids", "max_tokens", "temperature", "seed"}]}`. Each workload
runs `--passes` times with the prefix cache emptied before each; the last pass counts, since the first one warms up.
With `--speculative-config` each pass has seeds of its own: what was sampled before is not to be guessed, only what is
like it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.commands.engine_options import add_engine_arguments, engine_options

if TYPE_CHECKING:
    from rollout.commands.roofline import Roofline
    from rollout.llm import LLM


_SEEDS_BETWEEN_PASSES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's folder, or smollm2-135m-instruct")
    parser.add_argument("workloads", nargs="*", type=Path, metavar="WORKLOAD.json")
    parser.add_argument("--passes", type=int, default=2, metavar="N", help="the last one counts (default: 2)")
    parser.add_argument("--startup", action="store_true", help="print the seconds from process start to first token")
    parser.add_argument("--roofline", action="store_true", help="measure what the matrix products alone would allow")
    parser.add_argument("--profile", action="store_true", help="one more pass: where the time of a step goes")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures; every line is printed as soon as it is known."""
    if args.passes < 1:
        raise ValueError(f"--passes {args.passes} is not valid: it must be at least 1")
    if not args.workloads and not args.startup and not args.roofline:
        raise ValueError("there is nothing to measure: give workload files, --startup or --roofline")
    if args.profile and not args.workloads:
        raise ValueError("--profile needs workload files")
    workloads = [read_workload(path) for path in args.workloads]
    from rollout.llm import LLM

    llm = LLM(args.model, **engine_options(args))
    if args.startup:
        _print_line("startup", 1, _seconds_to_first_token(llm))
    roofline = _roofline(llm) if args.roofline else None
    for workload in workloads:
        passes = []
        for number in range(args.passes):
            before = _drafts(llm)
            passes.append(run_pass(llm, workload, number if llm.config.speculative_config is not None else 0))
        tokens, seconds = passes[-1]
        drafts = {name: int(count - before[name]) for name, count in _drafts(llm).items()}
        _print_line(workload["name"], tokens, seconds, drafts)
        if roofline is not None:
            ceiling = tokens / roofline.workload_seconds(workload, llm.config.max_num_seqs)
            print(f"  {tokens / seconds / ceiling:.0%} of the {ceiling:.1f} tokens/s that matrix products alone allow")
        if args.profile:
            with llm.profile() as profiles:
                run_pass(llm, workload)
            print(profiles[0].table(), flush=True)
    return 0


def _roofline(llm: LLM) -> Roofline:
    from rollout.commands.roofline import Roofline

    roofline = Roofline.measure(llm.engine.executor.worker.model)
    print(roofline.table(), flush=True)
    return roofline


def read_workload(path: Path) -> dict[str, Any]:
    """The workload in `path`. Raises `ValueError` where it is not one, and `OSError` where it cannot be read."""
    try:
        workload = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(workload, dict) or not isinstance(workload.get("name"), str) or not workload.get("requests"):
        raise ValueError(f"{path} is not a workload: it needs a name and a list of requests")
    for index, request in enumerate(workload["requests"]):
        if missing := {"prompt_token_ids", "max_tokens"} - set(request):
            raise ValueError(f"{path}: request {index} has no {', '.join(sorted(missing))}")
    return workload


def _drafts(llm: LLM) -> dict[str, float]:
    """How many tokens were guessed since start, and how many of them rightly; nothing without speculation."""
    if llm.config.speculative_config is None:
        return {}
    metrics = llm.get_metrics()
    return {name: metrics[f"{name}_total"] for name in ("draft_tokens", "accepted_draft_tokens")}


def run_pass(llm: LLM, workload: dict[str, Any], number: int = 0) -> tuple[int, float]:
    """One pass over a workload from an empty prefix cache: (tokens sampled, seconds). Of another number, with other
    seeds."""
    from rollout.sampling_params import SamplingParams

    ignore_eos = workload.get("ignore_eos", True)
    requests = workload["requests"]
    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
    params = [
        SamplingParams(
            temperature=request.get("temperature", 1.0),
            max_tokens=request["max_tokens"],
            seed=None if request.get("seed") is None else request["seed"] + _SEEDS_BETWEEN_PASSES * number,
            ignore_eos=ignore_eos,
        )
        for request in requests
    ]
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache could not be emptied before a pass")
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs), seconds


def _seconds_to_first_token(llm: LLM) -> float:
    from rollout.sampling_params import SamplingParams

    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    return seconds_since_process_start()


def seconds_since_process_start() -> float:
    """Seconds since the operating system started this process, to about 0.01 s; counts the interpreter's own start."""
    fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_ticks = int(fields_after_name[19])  # field 22, starttime, in clock ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def _print_line(workload: str, tokens: int, seconds: float, drafts: dict[str, int] | None = None) -> None:
    line = {
        "engine": "rollout",
        "workload": workload,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        **(drafts or {}),
    }
    print(json.dumps(line), flush=True)
