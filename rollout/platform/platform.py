"""What the engine asks of a device: memory to carve tensors from, how much there is, how inputs get there, replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Memory(Protocol):
    """A stretch of memory that tensors are carved from, and that can be given back while they exist."""

    owner: str
    num_bytes: int

    @property
    def keeps_addresses(self) -> bool:
        """Whether tensors are where they were after `release` and `resume`."""
        ...

    def carve(self, shape: Sequence[int], dtype: torch.dtype, alignment: int = 64) -> torch.Tensor:
        """A contiguous tensor over the next free bytes, zeros until written. `ValueError` if it does not fit."""
        ...

    def release(self) -> None:
        """Gives the memory back. The tensors stay, but may not be read or written before `resume`."""
        ...

    def resume(self) -> int:
        """Takes memory into use again, all zeros; the bytes that this took at once. Nothing changes, and 0, where it
        was not released. Where it raises, the memory stays released."""
        ...

    def resident_bytes(self) -> int: ...


class Event(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Waits until the device has come past it."""
        ...


class Copies(Protocol):
    """How bytes get from the host to the device, beside the kernels where the device can."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the host, from which copies are fast."""
        ...

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the device."""
        ...

    def mark(self) -> Event:
        """The point after all kernels that were started so far."""
        ...

    def upload(self, host: torch.Tensor, device: torch.Tensor, after: Event) -> Event:
        """Copies once the device has come past `after`; kernels started from now on see the copy. Returns its end."""
        ...


class CapturedStep(Protocol):
    """A step that can be run again: the same kernels over the same memory."""

    @property
    def output(self) -> torch.Tensor:
        """What the step returned; written again by each `replay`."""
        ...

    def replay(self) -> None: ...


class StepCapture(Protocol):
    """Makes replays of steps."""

    @property
    def num_bytes(self) -> int:
        """Device memory that the captured steps hold."""
        ...

    def capture(self, step: Callable[[], torch.Tensor]) -> CapturedStep: ...

    def reset(self) -> None:
        """Forgets the memory of captured steps, which must not be replayed any more."""
        ...


class Platform(Protocol):
    """One device."""

    device: torch.device

    @property
    def max_profile_tokens(self) -> int | None:
        """Tokens of the step that is measured at the start; None: as many as a step may have."""
        ...

    def total_memory(self) -> int:
        """Bytes of memory that the device has, or this process may use."""
        ...

    def free_memory(self) -> int | None:
        """Bytes that nobody uses now, where the device knows; None where memory is overcommitted."""
        ...

    def used_memory(self) -> int:
        """Bytes in use, as the operating system or the driver counts them."""
        ...

    def reset_peak(self) -> bool:
        """Starts a new measurement of `peak_memory`; False where the operating system does not allow it."""
        ...

    def peak_memory(self) -> int:
        """Largest number of bytes in use since `reset_peak`, counted as `used_memory` counts them."""
        ...

    def measure_peak(self, work: Callable[[], object]) -> int:
        """Bytes that `work` takes at its peak beyond those in use before. Runs it twice: the first time warms up."""
        ...

    def trim(self) -> None:
        """Returns memory that is held unused to the operating system or the driver."""
        ...

    def memory(self, owner: str, num_bytes: int, huge_pages: bool = True) -> Memory:
        """Memory of the device."""
        ...

    def host_memory(self, owner: str, num_bytes: int) -> Memory:
        """Memory of the host that blocks are swapped to."""
        ...

    def copies(self) -> Copies: ...

    def step_capture(self) -> StepCapture: ...


def platform_for(device: str) -> Platform:
    """The platform of a configured device: "auto" is CUDA where there is a device, else the CPU.

    Raises `ValueError` where the device is not there.
    """
    from rollout.platform import cpu, cuda

    problem = cuda.unavailable_reason()
    if device == "cuda" and problem is not None:
        raise ValueError(f"device='cuda' cannot be used: {problem}")
    return cuda.CudaPlatform() if device == "cuda" or (device == "auto" and problem is None) else cpu.CpuPlatform()
