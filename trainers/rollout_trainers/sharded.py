"""Which library spreads a policy over the ranks. It averages gradients over them, where the trainer wants their sum: so
losses are multiplied by the number of ranks. Checkpoints hold whole tensors by name in the file of rank 0, as those of
one process do, so that a run may go on with another kind.
"""

from __future__ import annotations

import torch

from rollout_trainers.config import RunConfig
from rollout_trainers.optimizer import Optimizer
from rollout_trainers.packing import PackedBatch
from rollout_trainers.ranks import Ranks
from rollout_trainers.transformers_policy import TransformersPolicy


def shard_policy(policy: TransformersPolicy, config: RunConfig, ranks: Ranks) -> Optimizer:
    """Spreads the policy over the ranks as `config.distributed` says, and returns its optimiser. Collective.

    The libraries are imported here. Raises `ValueError` where one is missing, or cannot take the model.
    """
    return _KINDS[config.distributed.kind](policy, config, ranks)


def _fsdp2(policy: TransformersPolicy, config: RunConfig, ranks: Ranks) -> Optimizer:
    from rollout_trainers.fsdp2 import Fsdp2AdamW, shard

    dtype = policy.causal_lm.dtype
    policy.model.float()
    shard(policy.model, policy.causal_lm, dtype)
    policy.wrap(policy.model, ranks.is_main, ranks.most)
    return Fsdp2AdamW(policy.model, config.optimizer, ranks)


def _deepspeed(policy: TransformersPolicy, config: RunConfig, ranks: Ranks) -> Optimizer:
    from rollout_trainers.deepspeed_zero import ZeroAdamW

    def pass_over_nothing() -> torch.Tensor:
        return policy.logprobs(PackedBatch.filler())[0].sum()

    optimizer = ZeroAdamW(policy.model, policy.causal_lm.dtype, config, ranks, pass_over_nothing)
    policy.wrap(optimizer.engine, ranks.is_main, ranks.most)
    return optimizer


def _accelerate(policy: TransformersPolicy, config: RunConfig, ranks: Ranks) -> Optimizer:
    try:
        from rollout_trainers.accelerated import make_optimizer, prepare
    except ImportError as error:
        raise ValueError("distributed.kind='accelerate' needs accelerate: pip install 'rollout-rl[train]'") from error

    entry, at_once = prepare(policy.model, policy.device, ranks)
    policy.wrap(entry, ranks.is_main, ranks.most, at_once)
    return make_optimizer(policy.model, config.optimizer, ranks)


_KINDS = {
    "accelerate": _accelerate,
    "fsdp2": _fsdp2,
    "zero1": _deepspeed,
    "zero2": _deepspeed,
    "zero3": _deepspeed,
}
