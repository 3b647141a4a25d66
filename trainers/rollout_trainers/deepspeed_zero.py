"""Policies under DeepSpeed's ZeRO, stages 1 to 3: the moments, the gradients too, the weights too lie spread over the
ranks. DeepSpeed makes the step, with clipping by the global norm; the rate is the recipe's.

What a checkpoint restores goes in by DeepSpeed's own accessors, and by steps at a rate of zero over a gradient of
zeros: the first makes the moments, which there are none of before a step; the second rounds the restored float32
weights into those that passes compute with.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rollout.weights.gather import whole_shape
from rollout_trainers.config import RunConfig
from rollout_trainers.fsdp2 import check_names
from rollout_trainers.optimizer import decay_groups
from rollout_trainers.ranks import Ranks

_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


class ZeroAdamW:
    """AdamW in `engine`, DeepSpeed's engine around `model`, whose passes must go through it.

    `make_pass` gives a loss whose gradient is zero, from a pass of all ranks. Raises `ValueError` where DeepSpeed is
    not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        config: RunConfig,
        ranks: Ranks,
        make_pass: Callable[[], torch.Tensor],
    ) -> None:
        try:
            import deepspeed
        except ImportError as error:
            raise ValueError(
                f"distributed.kind={config.distributed.kind!r} needs DeepSpeed: pip install 'rollout-rl[deepspeed]'"
            ) from error
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        section = config.optimizer
        self._ranks = ranks
        self._make_pass = make_pass
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._num_steps = 0
        self._stage = _STAGES[config.distributed.kind]
        optimizer = torch.optim.AdamW(
            decay_groups(self._parameters.values(), section.weight_decay),
            lr=section.learning_rate,
            betas=(section.beta1, section.beta2),
            eps=section.epsilon,
        )
        deepspeed.init_distributed(torch.distributed.get_backend(), verbose=False)
        self.engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=_settings(config, dtype))[0]

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Adds the gradient of a micro-batch's loss. DeepSpeed divides it by the number of ranks."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss * self._ranks.size)

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def step(self, rate: float) -> float:
        """One update of all ranks at learning rate `rate`. Returns the gradient's global norm before it was clipped.

        Raises `FloatingPointError` on all ranks if it is not finite; the weights are then lost.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        self._num_steps += 1
        if self._num_steps == 1 and self._stage < 3:
            _link_moments(self.engine.optimizer)
        norm = float(self.engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm}, and the weights are lost: resume from a checkpoint"
            )
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Whole float32 weights and moments by name, in the host's memory, on rank 0; empty ones on the others.
        Collective."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        masters: dict[str, torch.Tensor] = {}
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            found = {"weight": safe_get_full_fp32_param(parameter)}
            for key in ("exp_avg", "exp_avg_sq") if self._num_steps else ():
                found[key] = safe_get_full_optimizer_state(parameter, key)
            if self._ranks.is_main:
                kept = {key: value.cpu().clone() for key, value in found.items() if value is not None}
                masters[name] = kept.pop("weight")
                if kept:
                    moments[name] = {"step": torch.tensor(float(self._num_steps)), **kept}
        return {"masters": masters, "moments": moments}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rank 0's `state`, on all ranks. Raises `ValueError` if it is of other parameters."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        ranks = self._ranks
        with ranks.together():
            if ranks.is_main:
                check_names(state, self._parameters)
        own = state["moments"]
        steps = ranks.from_main({float(each["step"]) for each in own.values()}) or {0.0}
        self._step_of_nothing()
        for name, parameter in self._parameters.items():
            safe_set_full_fp32_param(parameter, self._from_main(state["masters"].get(name), parameter))
        self._step_of_nothing()
        for name, parameter in self._parameters.items():
            for key in ("exp_avg", "exp_avg_sq"):
                value = self._from_main(own.get(name, {}).get(key), parameter)
                safe_set_full_optimizer_state(parameter, value, key)
        self._num_steps = int(max(steps))
        for each in self.engine.optimizer.optimizer.state.values():
            each["step"].fill_(self._num_steps)

    def _step_of_nothing(self) -> None:
        with torch.enable_grad():
            loss = self._make_pass()
            self.backward(loss, is_last=True)
        self.step(0.0)

    def _from_main(self, value: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor:
        """Rank 0's value of a parameter's shape, float32; zeros where it has none."""
        buffer = torch.zeros(whole_shape(parameter), dtype=torch.float32, device=parameter.device)
        if value is not None:
            buffer.copy_(value)
        self._ranks.copy_from_main(buffer)
        return buffer


def _link_moments(optimizer: Any) -> None:
    """Has DeepSpeed's accessors find the moments of all parameter groups. DeepSpeed (0.19.8) does it itself in stages 1
    and 2 after the first group's step, when the other groups have none yet, and then never again."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    groups = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
    for parameters, flat in groups:
        lazy_init_hp_params_optimizer_state(parameters, flat, optimizer.optimizer.state)


def _settings(config: RunConfig, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    stage = _STAGES[config.distributed.kind]
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = config.distributed.persistent_elements
    return {
        "train_micro_batch_size_per_gpu": 1,  # which it asks for, and does not use: micro-batches are the trainer's
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
