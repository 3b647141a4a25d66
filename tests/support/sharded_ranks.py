"""Ranks whose policy lies spread over them: what `tests/trainers/test_sharded.py` runs on both."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.support.data_parallel_ranks import failing_after, outcome, train, write

TRANSFORMERS = ("policy.kind=transformers", "algorithm.recompute_logprobs=true")
PLAIN = ("algorithm.minibatches=2", "optimizer.weight_decay=0.1")
KL = ("loss.kl_coefficient=0.1",)
LORA = ("policy.lora.rank=4", "policy.lora.initialization=gaussian", "loss.kl_coefficient=0.1")

# Overrides by case, beside the kind; one process runs the same without it.
FSDP2 = {"plain": PLAIN, "kl": KL, "lora": LORA}
ZERO = {"zero1": PLAIN, "zero2": KL, "zero3": PLAIN, "zero3-kl": KL, "zero3-lora": LORA}


def fsdp2(folder: Path) -> None:
    dist.init_process_group("gloo")
    for case, options in FSDP2.items():
        train(folder / "model", folder / case, *TRANSFORMERS, *options, "distributed.kind=fsdp2")
    resumes(folder, "fsdp2")


def zero(folder: Path) -> None:
    dist.init_process_group("gloo")
    for case, options in ZERO.items():
        kind = case.partition("-")[0]
        train(folder / "model", folder / case, *TRANSFORMERS, *options, f"distributed.kind={kind}")
    resumes(folder, "zero3")
    resumes(folder, "zero1")


def resumes(folder: Path, kind: str) -> None:
    """Three steps without a break, and with one after the second, from which it goes on."""
    options = (*TRANSFORMERS, *KL, f"distributed.kind={kind}", "steps=3", "checkpoint.every=2")
    train(folder / "model", folder / f"{kind}-unbroken", *options)
    broken = folder / f"{kind}-broken"
    error = outcome(lambda: train(folder / "model", broken, *options, reward=failing_after(3)))
    write(broken, {"error": error})
    train(folder / "model", broken, *options, "resume=true")
