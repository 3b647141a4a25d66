"""Notices that somebody has put other tensors or modules in the place of those that the engine computes with."""

from __future__ import annotations

import torch
from torch import nn

from rollout.weights.names import DRAFTER_PREFIX


class Placement:
    """Where a model's parameters lie and which modules it is made of, as the engine has set it up; and a drafter's.

    The engine's kernels read the memory that it gave to the parameters: fused projections, recorded decode steps and
    captured graphs know it by address. A parameter with other memory (`parameter.data = ...`, a new `nn.Parameter`,
    `module.to(...)`) or another module would be read by some steps and not by others.
    """

    def __init__(self, model: nn.Module, drafter: nn.Module | None = None) -> None:
        self._entries: list[tuple[str, dict[str, nn.Parameter | None], str, torch.Tensor]] = []
        named = list(model.named_modules())
        if drafter is not None:
            named += drafter.named_modules(prefix=DRAFTER_PREFIX[:-1])
        self._children = [module._modules for _, module in named]
        for prefix, module in named:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    # An alias keeps the memory, and follows it where a device moves it in sleep.
                    self._entries.append((name, module._parameters, key, parameter.detach()))
        self._structure = self._module_ids()

    def _module_ids(self) -> tuple[int, ...]:
        return tuple(id(child) for children in self._children for child in children.values())

    def problem(self) -> str | None:
        """What was replaced, in words; None where everything is in its place. Some 50 microseconds for 270 tensors."""
        if self._module_ids() != self._structure:
            return "modules of the engine's model were added, removed or replaced"
        for name, holder, key, alias in self._entries:
            parameter = holder.get(key)
            if parameter is None or parameter.data_ptr() != alias.data_ptr():
                return (
                    f"the parameter {name} no longer lies in the engine's memory (it was replaced, or given other "
                    "`.data`): change it in place, e.g. with copy_"
                )
        return None
