"""Policies that Hugging Face's accelerate wraps, as its own configuration says: DDP, or FSDP2."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.distributed.tensor import DTensor

from rollout_trainers.config import OptimizerSection
from rollout_trainers.data_parallel import DataParallelAdamW
from rollout_trainers.fsdp2 import Fsdp2AdamW
from rollout_trainers.optimizer import Optimizer
from rollout_trainers.ranks import Ranks

_DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.NO)  # the last: of one process


def prepare(model: nn.Module, device: torch.device, ranks: Ranks) -> tuple[nn.Module, bool]:
    """What accelerate makes of `model`, whose passes must go through it, and whether logits must be made in them: under
    FSDP2 the head is in one group with the last norm (whose gradient would be looked for where the head's is), and with
    mixed precision accelerate has replaced the model's forward method.

    Raises `ValueError` where accelerate sees other ranks than there are, is set up for something else than DDP or FSDP2
    (or makes DDP of it, as on a CPU), or the model is not float32.
    """
    accelerator = Accelerator(cpu=device.type == "cpu")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError("distributed.kind='accelerate' is not valid with DeepSpeed: it must be 'zero1' to 'zero3'")
    if accelerator.num_processes != ranks.size:
        raise ValueError(
            f"distributed.kind='accelerate' is not valid: accelerate sees {accelerator.num_processes} processes of "
            f"{ranks.size}. Start them with torchrun"
        )
    if accelerator.distributed_type not in _DDP and not accelerator.is_fsdp2:
        raise ValueError(
            f"distributed.kind='accelerate' is not valid where accelerate is set up for "
            f"{accelerator.distributed_type.value}: it must be DDP, or FSDP with fsdp_version 2"
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and not accelerator.is_fsdp2:
        raise ValueError(
            f"distributed.kind='accelerate' is not valid with FSDP here, of which accelerate makes "
            f"{accelerator.distributed_type.value}: it must be 'fsdp2', torch's own, which a CPU has, too"
        )
    rounded = [name for name, each in model.named_parameters() if each.dtype != torch.float32]
    if rounded:
        raise ValueError(
            f"distributed.kind='accelerate' is not valid with {rounded[0]} in {model.get_parameter(rounded[0]).dtype}: "
            "policy.model_dtype must be 'float32'; passes are rounded by accelerate's own mixed_precision"
        )
    if accelerator.is_fsdp2:  # which it prepares together with an optimiser alone: one that nobody uses
        handle = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.0)
        return accelerator.prepare(model, handle)[0], True
    return accelerator.prepare(model), accelerator.mixed_precision != "no"


def make_optimizer(model: nn.Module, config: OptimizerSection, ranks: Ranks) -> Optimizer:
    """For the parameters of a model that `prepare` has wrapped."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    if isinstance(trained[0][1], DTensor):
        return Fsdp2AdamW(model, config, ranks)
    return DataParallelAdamW(trained, config, ranks, is_averaged=True)
