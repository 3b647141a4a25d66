"""Policies that Hugging Face's accelerate wraps, as its own configuration says: DDP, or FSDP2."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from rollout_trainers.config import OptimizerSection
from rollout_trainers.data_parallel import DataParallelAdamW
from rollout_trainers.fsdp2 import Fsdp2AdamW
from rollout_trainers.optimizer import Optimizer
from rollout_trainers.ranks import Ranks


def prepare(model: nn.Module, device: torch.device, ranks: Ranks) -> nn.Module:
    """What accelerate makes of `model`, whose passes must go through it.

    Raises `ValueError` where accelerate sees other ranks than there are, is set up for DeepSpeed, or the model is not
    float32.
    """
    accelerator = Accelerator(cpu=device.type == "cpu")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError("distributed.kind='accelerate' is not valid with DeepSpeed: it must be 'zero1' to 'zero3'")
    if accelerator.num_processes != ranks.size:
        raise ValueError(
            f"distributed.kind='accelerate' is not valid: accelerate sees {accelerator.num_processes} processes of "
            f"{ranks.size}. Start them with torchrun"
        )
    rounded = [name for name, each in model.named_parameters() if each.dtype != torch.float32]
    if rounded:
        raise ValueError(
            f"distributed.kind='accelerate' is not valid with {rounded[0]} in {model.get_parameter(rounded[0]).dtype}: "
            "policy.model_dtype must be 'float32'; passes are rounded by accelerate's own mixed_precision"
        )
    return accelerator.prepare(model)


def make_optimizer(model: nn.Module, config: OptimizerSection, ranks: Ranks) -> Optimizer:
    """For the parameters of a model that `prepare` has wrapped."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    if isinstance(trained[0][1], DTensor):
        return Fsdp2AdamW(model, config, ranks)
    return DataParallelAdamW(trained, config, ranks, is_averaged=True)
