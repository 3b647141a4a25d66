"""How a process finds the others of its run: by the environment that `torchrun` gives it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from rollout.weights.gloo_threads import wait_for_gloo_at_exit
from rollout_trainers.config import RunConfig
from rollout_trainers.distributed_config import DistributedSection
from rollout_trainers.ranks import Ranks

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def joined(config: RunConfig, environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """The ranks of the run, for as long as the block lasts: one process alone where `distributed.kind` is "none".

    A process group that is there already is used, and stays. Raises `ValueError` where the configuration and the
    environment do not fit.
    """
    section = config.distributed
    num_processes = dist.get_world_size() if dist.is_initialized() else int(environment.get("WORLD_SIZE", "1"))
    if section.kind == "none":
        if num_processes > 1:
            raise ValueError(
                f"distributed.kind='none' is not valid in {num_processes} processes, each of which would train alone: "
                "it must be 'ddp', 'fsdp2', 'zero1', 'zero2', 'zero3' or 'accelerate'"
            )
        yield Ranks()
        return
    wait_for_gloo_at_exit()
    groups = config.algorithm.prompts_per_step
    if groups < num_processes:
        raise ValueError(
            f"algorithm.prompts_per_step={groups} is not valid: it must be at least {num_processes}, a group for each "
            "process"
        )
    if dist.is_initialized():
        yield Ranks(dist.group.WORLD)
        return
    missing = [name for name in _ENVIRONMENT if name not in environment]
    if missing:
        raise ValueError(
            f"distributed.kind={section.kind!r} is not valid without {missing[0]} in the environment: start it with "
            "torchrun --nproc-per-node N --no-python rollout train RECIPE"
        )
    _open_group(section, config.engine.device)
    try:
        yield Ranks(dist.group.WORLD)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_group(section: DistributedSection, device: str) -> None:
    """Objects and tensors of the host go over gloo, those of CUDA devices over NCCL."""
    timeout = timedelta(seconds=section.timeout)
    uses_cuda = device != "cpu" and torch.cuda.is_available()
    if uses_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if uses_cuda else "gloo"
    dist.init_process_group(backend, timeout=timeout)
