"""Policies under torch's FSDP2: every rank holds a part of each weight, of its gradient and of its moments.

    shard(model, layers) ─► forward: gather a layer's weights, use them, forget them
                            backward: the same, and gradients are summed into each rank's own part

Shards are float32. Where the policy's dtype is bfloat16, passes compute with weights that are rounded when they are
gathered. The weights outside of layers (embeddings, the last norm, the head) stay gathered from the forward pass on,
until the backward pass is over: logits are made between the two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from rollout_trainers.config import OptimizerSection
from rollout_trainers.optimizer import decay_groups
from rollout_trainers.ranks import Ranks


def shard(model: nn.Module, causal_lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Spreads `model` (`causal_lm`, or PEFT's model around it) over the ranks of the default group, in place; passes
    compute in `dtype`. Each decoder layer is gathered by itself.

    Raises `ValueError` where the model has no list of decoder layers.
    """
    layers = getattr(causal_lm.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"distributed.kind='fsdp2' is not valid for {type(causal_lm).__name__}: its decoder has no `layers`"
        )
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision, reshard_after_forward=False)


class Fsdp2AdamW:
    """AdamW over the trained parameters of a model that `shard` has spread: each rank moves its own parts."""

    def __init__(self, model: nn.Module, config: OptimizerSection, ranks: Ranks) -> None:
        self.config = config
        self._ranks = ranks
        self._shards = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._adamw = torch.optim.AdamW(
            decay_groups(self._shards.values(), config.weight_decay),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Adds the gradient of a micro-batch's loss. FSDP2 divides it by the number of ranks."""
        (loss * self._ranks.size).backward()

    def zero_grad(self) -> None:
        self._adamw.zero_grad()

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """One update of all ranks at learning rate `rate`. Returns the gradient's global norm before it was clipped.

        Raises `FloatingPointError` on all ranks, with the weights unchanged, if it is not finite.
        """
        gradients = [shard.grad for shard in self._shards.values() if shard.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not math.isfinite(norm):
            self.zero_grad()
            raise FloatingPointError(f"the gradient's norm is {norm}: the update was not made")
        if norm > self.config.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(self.config.max_grad_norm / (norm + 1e-6))  # as torch's own clipping
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.zero_grad()
        return norm

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Whole weights and moments by name, in the host's memory, on rank 0; empty ones on the others. Collective."""
        masters: dict[str, torch.Tensor] = {}
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for name, shard in self._shards.items():
            state = self._adamw.state.get(shard, {})
            whole = {key: _whole(value) for key, value in state.items()}
            weight = _whole(shard.detach())
            if self._ranks.is_main:
                masters[name] = weight.cpu()
                if whole:
                    moments[name] = {key: value.cpu() for key, value in whole.items()}
        return {"masters": masters, "moments": moments}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rank 0's `state`, on all ranks. Raises `ValueError` if it is of other parameters."""
        ranks = self._ranks
        with ranks.together():
            if ranks.is_main:
                check_names(state, self._shards)
        self._adamw.state.clear()
        names = set(ranks.from_main(list(state["moments"])))
        for name, shard in self._shards.items():
            assert isinstance(shard, DTensor)
            shard.copy_(_spread(ranks, state["masters"].get(name), shard))
            if name in names:
                own = state["moments"].get(name, {})
                self._adamw.state[shard] = {
                    "step": torch.tensor(ranks.from_main(float(own.get("step", 0)))),
                    "exp_avg": _spread(ranks, own.get("exp_avg"), shard),
                    "exp_avg_sq": _spread(ranks, own.get("exp_avg_sq"), shard),
                }
        self.zero_grad()


def check_names(state: dict[str, Any], parameters: dict[str, nn.Parameter]) -> None:
    """Raises `ValueError` where the state of an optimiser is of other parameters."""
    if set(state["masters"]) != set(parameters):
        differing = sorted(set(state["masters"]) ^ set(parameters))
        raise ValueError(f"the checkpoint's optimiser has other parameters; first difference: {differing[0]!r}")


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _spread(ranks: Ranks, whole: torch.Tensor | None, like: DTensor) -> DTensor:
    """Rank 0's `whole` tensor, cut as `like` is."""
    if whole is None:
        whole = torch.empty(like.shape, dtype=like.dtype)
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)
