"""How several engines in processes of their own share one machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from rollout.config import EngineConfig
from rollout.platform.cuda import unavailable_reason


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """The configuration of one of the engines, and what is added to the environment variables of its process."""

    config: EngineConfig
    environment: dict[str, str]


def replica_settings(config: EngineConfig) -> list[ReplicaSettings]:
    """Settings of each of `config.data_parallel_size` engines.

    On a CPU they share the cores and the memory; on CUDA each has a device. Raises `ValueError` where there are not
    enough of these.
    """
    count = config.data_parallel_size
    alone = replace(config, data_parallel_size=1)
    if config.device == "cpu" or unavailable_reason() is not None:  # without a device, "cuda" is refused by the workers
        threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // count)
        share = replace(alone, num_threads=threads, gpu_memory_utilization=config.gpu_memory_utilization / count)
        return [ReplicaSettings(share, {})] * count
    devices = visible_devices()
    if count > len(devices):
        raise ValueError(
            f"data_parallel_size={count} is not valid with device={config.device!r}: {len(devices)} CUDA devices are "
            "visible, and each engine needs one of its own"
        )
    return [ReplicaSettings(alone, {"CUDA_VISIBLE_DEVICES": device}) for device in devices[:count]]


def visible_devices() -> list[str]:
    """The CUDA devices of this process, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [str(number) for number in range(count)] if named is None else named.split(",")[:count]
