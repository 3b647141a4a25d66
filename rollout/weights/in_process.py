"""Tensors from a trainer in this process, by reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch

from rollout.weights.trainer_tensors import PolicyTensors, policy_tensors
from rollout.weights.transport import Transport


class InProcess(Transport):
    """By reference: a trainer's model, a state dict, or pairs. Shared memory is not copied, the rest is once."""

    def __init__(
        self, policy: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        self._policy = policy_tensors(policy) if isinstance(policy, torch.nn.Module) else policy

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = self._policy.items() if isinstance(self._policy, Mapping) else self._policy
        return iter(cast(Iterable[tuple[str, torch.Tensor]], pairs))

    def close(self) -> None:
        """Lets the other ranks of a sharded model end, where this one has failed."""
        if isinstance(self._policy, PolicyTensors):
            self._policy.close()
