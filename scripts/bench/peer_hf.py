"""transformers' `generate` on workloads: static batches of 16, padded on the left, each run to its longest member.

    $PEERS/hf/bin/python peer_hf.py MODEL_DIR workloads/*.json

Counts only the tokens that the requests asked for. One pass: there is nothing to warm up that would matter.
"""

from __future__ import annotations

from typing import Any

import torch
from measure import parse_arguments, print_line, run_workloads, seconds_since_process_start
from transformers import AutoModelForCausalLM

BATCH_SIZE = 16
PAD = 2


def main() -> None:
    args = parse_arguments("transformers' generate")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()

    def run_batch(requests: list[dict[str, Any]]) -> int:
        longest = max(len(request["prompt_token_ids"]) for request in requests)
        padding = [longest - len(request["prompt_token_ids"]) for request in requests]
        rows = [[PAD] * pad + request["prompt_token_ids"] for pad, request in zip(padding, requests, strict=True)]
        masks = [[0] * pad + [1] * (longest - pad) for pad in padding]
        steps = max(request["max_tokens"] for request in requests)
        with torch.inference_mode():
            model.generate(
                input_ids=torch.tensor(rows),
                attention_mask=torch.tensor(masks),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=steps,
                max_new_tokens=steps,
                pad_token_id=PAD,
            )
        return sum(request["max_tokens"] for request in requests)

    def run_pass(requests: list[dict[str, Any]]) -> int:
        return sum(run_batch(requests[first : first + BATCH_SIZE]) for first in range(0, len(requests), BATCH_SIZE))

    if args.startup:
        run_batch([{"prompt_token_ids": [1, 2, 3], "max_tokens": 1}])
        print_line("transformers", "startup", 1, seconds_since_process_start())
    run_workloads("transformers", args.workloads, run_pass, passes=1)


if __name__ == "__main__":
    main()
