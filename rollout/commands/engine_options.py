"""Engine options on the command line: one flag for each field of `EngineConfig` that a person sets by hand."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; one that is not given leaves the engine's own default."""
    group = parser.add_argument_group("engine")
    group.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer, if it is not in the model's folder")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"))
    group.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"))
    group.add_argument("--kernels", choices=("auto", "cpu", "triton", "reference"), help="which kernels to run")
    group.add_argument("--num-threads", type=int, metavar="N")
    group.add_argument("--max-model-len", type=int, metavar="TOKENS")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in flight at most")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS", help="token budget of a step")
    group.add_argument("--block-size", type=int, metavar="TOKENS")
    group.add_argument("--kv-cache-memory", metavar="SIZE", help="bytes, or text such as 4GiB")
    group.add_argument("--kv-cache-dtype", choices=("auto", "int8", "fp8"), help="keys and values in 8 bits")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE")
    group.add_argument(
        "--enforce-eager", action="store_const", const=True, help="run every step through Python; same results, slower"
    )
    group.add_argument("--quantization", choices=("int8",), help="matrix products with int8 copies of the weights")
    group.add_argument(
        "--speculative-config", metavar="JSON", help='guess tokens ahead, for speed alone: \'{"method": "suffix"}\''
    )
    group.add_argument("--no-prefix-caching", dest="enable_prefix_caching", action="store_const", const=False)


_FIELDS = (
    "tokenizer",
    "device",
    "dtype",
    "kernels",
    "num_threads",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory",
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "enforce_eager",
    "quantization",
    "enable_prefix_caching",
)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments for `LLM` of the flags that were given. Raises `ValueError` where one is not JSON."""
    options = {name: value for name in _FIELDS if (value := vars(args)[name]) is not None}
    if args.speculative_config is not None:
        try:
            options["speculative_config"] = json.loads(args.speculative_config)
        except json.JSONDecodeError as error:
            raise ValueError(f"--speculative-config {args.speculative_config} is not JSON: {error}") from None
    return options
