"""Chooses who computes: a table from device and setting to a backend, loaded on first use.

A backend is an object with one function for each operation, all with the same arguments: `cpu.ops.CpuKernels`, or the
module `gpu.ops` (Triton) or `reference`. float64 is always computed by the reference, which is then an oracle in double
precision. On CPU tensors Triton's kernels run in its interpreter, where `TRITON_INTERPRET=1` asks for that.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib import metadata
from typing import Any

import torch

from rollout_kernels import reference
from rollout_kernels.cpu.build import BuildError, build, find_compiler, openmp_runtimes

Backend = Any  # CpuKernels, or the module `gpu.ops` or `reference`

SETTINGS = ("auto", "cpu", "triton", "reference")

# (device type, setting) -> backends to try in order
_TABLE = {
    ("cpu", "auto"): ("cpu", "reference"),
    ("cpu", "cpu"): ("cpu",),
    ("cpu", "triton"): ("triton",),
    ("cpu", "reference"): ("reference",),
    ("cuda", "auto"): ("triton", "reference"),
    ("cuda", "triton"): ("triton",),
    ("cuda", "reference"): ("reference",),
}

_setting = "auto"  # of the process
# Of the code inside a `with`: a setting's name, or a backend itself.
_override: ContextVar[str | Backend | None] = ContextVar("rollout_kernels_backend", default=None)
_chosen: dict[tuple[str, str], Backend] = {}  # (device type, setting) -> backend


@functools.cache
def _cpu_kernels() -> Backend:
    from rollout_kernels.cpu.ops import CpuKernels

    return CpuKernels()


def _triton_kernels(device_type: str) -> Backend:
    """Raises `BuildError` without triton, `ValueError` for CPU tensors where the kernels are not interpreted."""
    if importlib.util.find_spec("triton") is None:
        raise BuildError("triton is not installed, which the GPU kernels are written in: pip install 'rollout-rl[gpu]'")
    from rollout_kernels.gpu.interpreter import is_interpreted

    if device_type == "cpu" and not is_interpreted():
        raise ValueError(
            "backend 'triton' computes on CUDA tensors; on CPU tensors it runs only in Triton's interpreter: set "
            "TRITON_INTERPRET=1 before Python starts"
        )
    from rollout_kernels.gpu import ops

    return ops


@functools.cache
def _warn_of_fallback(reason: str) -> None:
    warnings.warn(f"rollout_kernels computes with the slow reference kernels: {reason}", RuntimeWarning, stacklevel=2)


def _choose(device_type: str, setting: str) -> Backend:
    names = _TABLE.get((device_type, setting))
    if names is None:
        known = ", ".join(f"{device} with {setting}" for device, setting in sorted(_TABLE))
        raise ValueError(f"no kernels for device {device_type!r} with backend {setting!r}; there are: {known}")
    for name in names[:-1]:
        try:
            return _load(name, device_type)
        except BuildError as error:
            _warn_of_fallback(str(error))
    return _load(names[-1], device_type)


def _load(name: str, device_type: str) -> Backend:
    if name == "cpu":
        return _cpu_kernels()
    return _triton_kernels(device_type) if name == "triton" else reference


def current_setting() -> str:
    """The setting in force. A compiled graph keeps the one that was in force when it was traced."""
    override = _override.get()
    if override is None:
        return _setting
    return override if isinstance(override, str) else override.name


# What torch.compiler.assume_constant_result does. That imports the whole compiler: half a second of every start.
# A function has no such attribute for the type checker.
current_setting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def backend_for(tensor: torch.Tensor, setting: str | None = None) -> Backend:
    """The backend for operations on this tensor, under `setting` or else the one in force.

    Raises `BuildError` where the setting forbids a fallback.
    """
    if tensor.dtype is torch.float64:
        return reference
    override = _override.get()
    if setting is None and override is not None and not isinstance(override, str):
        return override
    return _backend("cpu" if tensor.is_cpu else tensor.device.type, setting or override or _setting)


def backend_on(device: torch.device) -> Backend:
    """The backend for the model's tensors on this device: what `backend_for` says of them."""
    override = _override.get()
    if override is not None and not isinstance(override, str):
        return override
    return _backend(device.type, override or _setting)


def _backend(device_type: str, setting: str) -> Backend:
    key = (device_type, setting)
    backend = _chosen.get(key)
    if backend is None:
        backend = _chosen[key] = _choose(*key)
    return backend


def can_record(tensor: torch.Tensor) -> bool:
    """Whether the kernels in force for this tensor can be recorded into a program (see `cpu/program.py`)."""
    return backend_for(tensor).name == "cpu"


def _check_setting(name: str) -> None:
    if name not in SETTINGS:
        raise ValueError(f"backend={name!r} is not valid: it must be one of {', '.join(map(repr, SETTINGS))}")


def set_backend(name: str) -> None:
    """Sets the backend of the whole process, one of `SETTINGS`. Raises `ValueError` for other names."""
    global _setting
    _check_setting(name)
    _setting = name
    _chosen.clear()  # so that a compiler which has been installed since is found


@contextmanager
def use_kernels(kernels: Backend) -> Iterator[None]:
    """This very backend inside a `with` block, for the thread that runs it (float64 stays the reference's)."""
    token = _override.set(kernels)
    try:
        yield
    finally:
        _override.reset(token)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """The given backend inside a `with` block, for the thread that runs it; the previous one after it."""
    _check_setting(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For activation checkpointing: the forward pass is computed again on the backend that is in force now.

    `torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False, context_fn=checkpoint_contexts)`. Without it
    the second forward uses what is in force in the thread of the backward pass.
    """
    return nullcontext(), use_backend(current_setting())


def backend_info() -> dict[str, str | list[str]]:
    """What `rollout doctor` shows: the setting, the backend for CPU tensors, compiler, library, OpenMP, Triton."""
    override = _override.get()
    setting = override if isinstance(override, str) else _setting
    info: dict[str, str | list[str]] = {"setting": setting, "openmp": openmp_runtimes()}
    try:
        compiler = find_compiler()
        info |= {"compiler": compiler.version, "compiler_path": compiler.path, "library": str(build())}
    except BuildError as error:
        info["problem"] = str(error)
    fallback = setting == "auto" and "problem" in info
    info["cpu"] = "reference" if fallback else "cpu" if setting == "auto" else setting
    info["triton"] = metadata.version("triton") if importlib.util.find_spec("triton") else "not installed"
    return info
