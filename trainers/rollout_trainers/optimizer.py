"""AdamW with float32 master weights for parameters of any dtype, and learning-rate schedules.

The parameters may be the very tensors that the sampler reads. Gradients arrive in the parameter's dtype, one backward
pass at a time, and are summed here in float32; the master weights move in float32; the parameters receive them rounded
once. So updates smaller than a bfloat16 step are not lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from rollout.worker.slab import Slab, slab_bytes
from rollout_trainers.config import OptimizerSection


def learning_rate(step: int, num_steps: int, config: OptimizerSection) -> float:
    """Learning rate of 0-based optimiser step `step` of `num_steps`: a linear warm-up, then the schedule.

    "linear" and "cosine" fall from the full rate to `final_fraction` of it, which a step after the last would have.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * remaining)


_MOMENTS = {"exp_avg", "exp_avg_sq"}


def decay_groups(parameters: Iterable[torch.Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of a torch optimiser: weight decay is for matrices only (parameters of two or more dimensions)."""
    parameters = list(parameters)
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Optimizer(Protocol):
    """What the trainers ask of an optimiser: `MasterAdamW`, or one of a library that spreads the policy over ranks."""

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Adds the gradient of a micro-batch's loss. `is_last`: of those before `step()`."""
        ...

    def step(self, rate: float) -> float:
        """One update at learning rate `rate`, after which gradients are zero. Returns the gradient's global norm before
        it was clipped. Raises `FloatingPointError` if that is not finite."""
        ...

    def zero_grad(self) -> None:
        """Forgets the gradients summed so far."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Float32 `masters` by name, and `moments` (step, exp_avg, exp_avg_sq) by the same names."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave, and the parameters."""
        ...


class MasterAdamW:
    """AdamW over named parameters. Weight decay applies to matrices only (parameters of two or more dimensions).

    A float32 parameter is its own master. Call `backward()` on losses as often as needed, then `step()`.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerSection) -> None:
        self.config = config
        self.parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        if not self.parameters:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        self.masters = {name: _master_of(parameter) for name, parameter in self.parameters.items()}
        self.gradient_memory, buffers = _gradient_memory(self.masters)
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(_accumulate_into(self.masters[name], buffers.get(name)))
            elif name in buffers:
                parameter.register_post_accumulate_grad_hook(_keep_in(buffers[name]))
        self._adamw = torch.optim.AdamW(
            decay_groups(self.masters.values(), config.weight_decay),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Adds the gradient of a micro-batch's loss. `is_last`: of those before `step()`."""
        loss.backward()

    def zero_grad(self) -> None:
        """Forgets the gradients summed so far, and gives their memory back."""
        for master in self.masters.values():
            master.grad = None
        if self.gradient_memory is not None:
            self.gradient_memory.release()

    def offload(self) -> None:
        """Moves masters and moments to the host's memory, until `fetch`; what is a parameter itself stays."""
        self._move(_host_copy)

    def fetch(self) -> None:
        """Brings masters and moments back to where the parameters are, before the next `backward()`."""
        self._move(lambda tensor, device: tensor.to(device))

    @torch.no_grad()
    def _move(self, moved: Callable[[torch.Tensor, torch.device], torch.Tensor]) -> None:
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if master is not parameter:
                master.data = moved(master.data, parameter.device)
            state = self._adamw.state.get(master, {})
            for key in _MOMENTS & state.keys():
                state[key] = moved(state[key], parameter.device)

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """One update at learning rate `rate`. Returns the gradient's global norm before it was clipped.

        The gradients are forgotten. Raises `FloatingPointError`, with the weights unchanged, if the norm is not finite.
        """
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        if not gradients:
            raise ValueError("step() without a gradient: call backward() on a loss first")
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            self.zero_grad()
            raise FloatingPointError(f"the gradient's norm is {norm}: the update was not made")
        if norm > self.config.max_grad_norm:
            masters = list(self.masters.values())
            torch.nn.utils.clip_grads_with_norm_(masters, self.config.max_grad_norm, torch.tensor(norm))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.write_parameters()
        self.zero_grad()
        return norm

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Rounds the masters into the parameters, in place."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Masters by name, and AdamW's moments by the same names. The tensors are the optimiser's own, not copies."""
        moments = {
            name: {"step": state["step"], "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            for name, master in self.masters.items()
            if (state := self._adamw.state.get(master))
        }
        return {"masters": {name: master.detach() for name, master in self.masters.items()}, "moments": moments}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores masters and moments, and writes the parameters. Raises `ValueError` if the names differ."""
        if set(state["masters"]) != set(self.masters):
            differing = sorted(set(state["masters"]) ^ set(self.masters))
            raise ValueError(f"the checkpoint's optimiser has other parameters; first difference: {differing[0]!r}")
        for name, master in self.masters.items():
            saved = state["masters"][name]
            if saved.shape != master.shape:
                raise ValueError(f"{name} has shape {tuple(saved.shape)} in the checkpoint, not {tuple(master.shape)}")
            master.copy_(saved)
        self._adamw.state.clear()
        for name, moments in state["moments"].items():
            device = self.parameters[name].device
            self._adamw.state[self.masters[name]] = {key: value.to(device, copy=True) for key, value in moments.items()}
        self.write_parameters()
        self.zero_grad()


def _host_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """In memory that the `device` of the parameters can copy from by itself, where it is not the host's own."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=device.type == "cuda")
    return host.copy_(tensor)


def _master_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)


def _gradient_memory(masters: Mapping[str, torch.Tensor]) -> tuple[Slab | None, dict[str, torch.Tensor]]:
    """On a CPU: memory that gradients of the masters have there, and that costs next to nothing to give back and take
    again, and a buffer for each. None elsewhere, where torch's allocator keeps what it has, and for shards."""
    if any(type(master.detach()) is not torch.Tensor or not master.is_cpu for master in masters.values()):
        return None, {}
    slab = Slab("gradients", max(1, slab_bytes((master.shape, torch.float32) for master in masters.values())))
    return slab, {name: slab.carve(master.shape, torch.float32) for name, master in masters.items()}


def _accumulate_into(master: torch.Tensor, buffer: torch.Tensor | None) -> Callable[[torch.Tensor], None]:
    """A hook that moves a parameter's gradient into its master's float32 one, as soon as a backward pass made it."""

    def hook(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is not None:
            master.grad.add_(gradient)
        else:
            master.grad = gradient.to(torch.float32) if buffer is None else buffer.copy_(gradient)
        parameter.grad = None

    return hook


def _keep_in(buffer: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook that has a float32 parameter's gradient lie in `buffer`."""

    def hook(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient is not buffer:
            parameter.grad = buffer.copy_(gradient)

    return hook
