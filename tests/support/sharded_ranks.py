"""Ranks whose policy lies spread over them: what `tests/trainers/test_sharded.py` runs on both."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist
from accelerate import DistributedType, PartialState

from rollout_trainers import transformers_policy
from tests.support.data_parallel_ranks import failing_after, outcome, train, write

TRANSFORMERS = ("policy.kind=transformers", "algorithm.recompute_logprobs=true")
PLAIN = ("algorithm.minibatches=2", "optimizer.weight_decay=0.1")
KL = ("loss.kl_coefficient=0.1",)
LORA = ("policy.lora.rank=4", "policy.lora.initialization=gaussian", "loss.kl_coefficient=0.1")

# Overrides by case, beside the kind; one process runs the same without it.
TORCH = {"fsdp2": PLAIN, "fsdp2-kl": KL, "fsdp2-lora": LORA, "accelerate": PLAIN}
ZERO = {"zero1": PLAIN, "zero2": KL, "zero3": PLAIN, "zero3-kl": KL, "zero3-lora": LORA}
ACCELERATE_FSDP2 = {"accelerate": (*PLAIN, *KL), "accelerate-lora": (*LORA, "policy.lora.send=adapter")}
FSDP2_OF_ACCELERATE = {  # what `accelerate config` would write
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
}
REFUSED = {
    "shared": ("distributed.kind=fsdp2",),
    "critic": (*TRANSFORMERS, "distributed.kind=zero2", "loss.algorithm=ppo"),
    "bfloat16": (*TRANSFORMERS, "distributed.kind=accelerate", "policy.model_dtype=bfloat16"),
}


def torch_kinds(folder: Path) -> None:
    dist.init_process_group("gloo")
    train_cases(TORCH, folder)
    resumes(folder, "fsdp2")
    found: dict[str, str] = {}
    for name, options in REFUSED.items():
        found[name] = outcome(lambda chosen=options: train(folder / "model", folder / "refused", *chosen))
    os.environ |= FSDP2_OF_ACCELERATE  # of which accelerate makes DDP on a CPU
    options = (*TRANSFORMERS, "distributed.kind=accelerate")
    found["accelerate's FSDP2"] = outcome(lambda: train(folder / "model", folder / "refused", *options))
    (folder / f"refused.rank{dist.get_rank()}.json").write_text(json.dumps(found))


def accelerate_fsdp2(folder: Path) -> None:
    """With the environment `FSDP2_OF_ACCELERATE`. Accelerate shards on devices alone: it is told that this is one."""
    dist.init_process_group("gloo")
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    train_cases(ACCELERATE_FSDP2, folder)


def zero(folder: Path) -> None:
    dist.init_process_group("gloo")
    train_cases(ZERO, folder)
    resumes(folder, "zero3")
    resumes(folder, "zero1")


def train_cases(cases: dict[str, tuple[str, ...]], folder: Path) -> None:
    # A few rows have logits at a time: the ranks, which have other numbers of tokens, need other numbers of parts.
    transformers_policy._LOGIT_BYTES = 4 * 16 * 1024
    for case, options in cases.items():
        kind = case.partition("-")[0]
        train(folder / "model", folder / case, *TRANSFORMERS, *options, f"distributed.kind={kind}")


def resumes(folder: Path, kind: str) -> None:
    """Three steps without a break, and with one after the second, from which it goes on."""
    options = (*TRANSFORMERS, *KL, f"distributed.kind={kind}", "steps=3", "checkpoint.every=2")
    train(folder / "model", folder / f"{kind}-unbroken", *options)
    broken = folder / f"{kind}-broken"
    error = outcome(lambda: train(folder / "model", broken, *options, reward=failing_after(3)))
    write(broken, {"error": error})
    train(folder / "model", broken, *options, "resume=true")
