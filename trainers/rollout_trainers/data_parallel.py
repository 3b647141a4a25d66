"""Several processes that train one policy, each with its share of a step's samples: whole weights on every rank.

Every loss is a share of the whole step's, since what it is divided by is counted over all ranks. So gradients are
summed, not averaged, and one process that has all samples would find the same (`docs/distributed_training.md`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rollout.errors import FingerprintMismatchError
from rollout.weights.receipt import Receipt
from rollout_trainers.config import OptimizerSection
from rollout_trainers.optimizer import MasterAdamW
from rollout_trainers.ranks import Ranks
from rollout_trainers.types import Sample


def gathered_samples(ranks: Ranks, samples: Sequence[Sample]) -> list[Sample]:
    """The samples of all ranks, rank after rank: of one round of sampling, in the order in which one process would have
    them. What travels has values as JSON has them in its columns, and no environments."""
    if ranks.size == 1:
        return list(samples)
    everyones, own = ranks.gather_all([_plain(sample) for sample in samples])
    everyones[own] = samples
    return everyones


def _plain(sample: Sample) -> Sample:
    example = replace(sample.example, columns=_as_json(sample.example.columns))
    episode = sample.episode and replace(sample.episode, environment=None)
    return replace(sample, example=example, logged=_as_json(sample.logged), episode=episode)


def _as_json(columns: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(columns, default=str))


def check_same_policy(ranks: Ranks, receipt: Receipt) -> None:
    """Raises `FingerprintMismatchError` where the engines of the ranks hold different weights."""
    held = ranks.gather((receipt.parameters_fingerprint, receipt.adapters))
    differing = [rank for rank, each in enumerate(held) if each != held[0]]
    if differing:
        weights, others = held[0][0], held[differing[0]][0]
        what = f"{others}, rank 0 {weights}" if others != weights else "another adapter than rank 0"
        raise FingerprintMismatchError(
            f"policy {receipt.policy_version} is not the same on all ranks: rank {differing[0]} holds {what}. Resume "
            "from the last checkpoint"
        )


class DataParallelAdamW(MasterAdamW):
    """`MasterAdamW` on each rank, with the sum of the gradients of all: so all make the same update.

    `is_averaged`: what wraps the model has every backward pass average the gradients over the ranks already.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: OptimizerSection,
        ranks: Ranks,
        is_averaged: bool = False,
    ) -> None:
        super().__init__(named_parameters, config)
        self._ranks = ranks
        self._is_averaged = is_averaged

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Adds the gradient of a micro-batch's loss."""
        super().backward(loss * self._ranks.size if self._is_averaged else loss, is_last)

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """One update of all ranks at learning rate `rate`, also where some of them have no gradient."""
        own = {name for name, master in self.masters.items() if master.grad is not None}
        wanted = set().union(*self._ranks.gather(own))
        masters = [master for name, master in self.masters.items() if name in wanted]
        for master in masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        if not self._is_averaged:
            self._ranks.add_up(master.grad for master in masters if master.grad is not None)
        return super().step(rate)

    def state_dict(self) -> dict[str, Any]:
        """On rank 0; the others have the same, and give an empty one."""
        return super().state_dict() if self._ranks.is_main else {"masters": {}, "moments": {}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rank 0's `state`, on all ranks."""
        with self._ranks.together():
            if self._ranks.is_main:
                super().load_state_dict(state)
        masters = {name: master.detach() for name, master in self.masters.items()}
        super().load_state_dict(_from_main(self._ranks, masters, state["moments"]))


def _from_main(ranks: Ranks, masters: dict[str, torch.Tensor], own: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's masters, in place, and moments: one tensor after the other."""
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name in ranks.from_main(list(own)):
        moments[name] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(masters[name]),
            "exp_avg_sq": torch.zeros_like(masters[name]),
        }
        for key, tensor in moments[name].items():
            if name in own:
                tensor.copy_(own[name][key])
            ranks.copy_from_main(tensor)
    for master in masters.values():
        ranks.copy_from_main(master)
    return {"masters": masters, "moments": moments}


def make_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerSection, ranks: Ranks
) -> MasterAdamW:
    """AdamW over parameters that every rank has whole."""
    if ranks.size == 1:
        return MasterAdamW(named_parameters, config)
    return DataParallelAdamW(named_parameters, config, ranks)
