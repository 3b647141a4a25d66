"""vLLM's CPU build on workloads, set up for this machine: every core, bf16, prefix caching on.

    $PEERS/vllm/bin/python peer_vllm.py MODEL_DIR workloads/*.json

Two passes, the prefix cache emptied before each, the second counts. Requests go without seeds of their own: with them
vLLM 0.32 on a CPU is more than ten times slower, or dies. `logprobs=0` asks for the sampled token's logprob.
"""

from __future__ import annotations

import os
from typing import Any

from measure import parse_arguments, print_line, run_workloads, seconds_since_process_start

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))),
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    args = parse_arguments("vLLM's CPU build")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    llm = LLM(model=args.model, dtype="bfloat16", max_model_len=4096, max_num_seqs=256)
    if args.startup:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        print_line("vllm", "startup", 1, seconds_since_process_start())

    def run_pass(requests: list[dict[str, Any]]) -> int:
        llm.reset_prefix_cache()
        outputs = llm.generate(
            [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests],
            [
                SamplingParams(
                    temperature=request["temperature"], max_tokens=request["max_tokens"], ignore_eos=True, logprobs=0
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    run_workloads("vllm", args.workloads, run_pass, passes=2)


if __name__ == "__main__":
    main()
