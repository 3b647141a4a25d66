"""Recorded programs: what a function computes with CPU kernels, made again by one call without Python in between.

    workspace = Workspace(torch.empty(1 << 20, dtype=torch.uint8))
    logits, program = record(forward, workspace)     # runs `forward` and keeps its kernel calls
    ...                                              # new values in the tensors that `forward` reads
    program.replay()                                 # `logits` holds the new result

Outputs of kernels lie in the workspace, at the addresses that the recording gave them, each for as long as some tensor
needed it: all programs of a workspace use the same memory, so a result is valid until the next recording or replay.
"""

from __future__ import annotations

import ctypes
import math
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_kernels.cpu.bindings import SIGNATURES, bind
from rollout_kernels.cpu.build import load_library
from rollout_kernels.cpu.ops import CpuKernels
from rollout_kernels.dispatch import use_kernels

_ALIGNMENT = 64
_WORDS = {"p": "q", "l": "q", "i": "i4x", "f": "f4x", "u": "Q"}  # how `struct` puts an argument into eight bytes

Result = TypeVar("Result")


class NotRecordableError(RuntimeError):
    """A function does something that a program cannot do again; the message says what."""


class Workspace:
    """Memory for the outputs of recorded kernels, handed out while somebody holds a tensor over it."""

    def __init__(self, memory: torch.Tensor) -> None:
        """`memory`: uint8, one dimension, contiguous."""
        self._memory = memory.numpy()
        self._free: list[tuple[int, int]] = []  # (start, end), ascending, never touching
        self._generation = 0
        self.peak_bytes = 0
        self.reset()

    def reset(self) -> None:
        """Forgets every tensor handed out: their memory may be given to others."""
        self._generation += 1
        self._free = [(0, self._memory.size)]

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of undefined values. Raises `NotRecordableError` where no stretch of memory is large enough."""
        size = -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        for index, (start, end) in enumerate(self._free):
            if end - start < size:
                continue
            self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
            self.peak_bytes = max(self.peak_bytes, start + size)
            return self._tensor(start, size, shape, dtype)
        raise NotRecordableError(f"the workspace of {self._memory.size:,} bytes is too small")

    def _tensor(self, start: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        part = self._memory[start : start + size]
        # torch keeps the array alive as long as any tensor over this memory, views included.
        weakref.finalize(part, self._give_back, self._generation, start, start + size)
        count = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(part)[:count].view(dtype).view(shape)

    def _give_back(self, generation: int, start: int, end: int) -> None:
        if generation != self._generation:
            return
        merged: list[tuple[int, int]] = []
        for stretch in sorted([*self._free, (start, end)]):
            if merged and merged[-1][1] == stretch[0]:
                merged[-1] = (merged[-1][0], stretch[1])
            else:
                merged.append(stretch)
        self._free = merged


class Program:
    """Kernel calls with their arguments, in order."""

    def __init__(
        self, names: Sequence[str], steps: Sequence[int], words: bytes, offsets: Sequence[int], owners: tuple[Any, ...]
    ) -> None:
        """`owners`: what keeps the memory alive that the calls read and write."""
        self.names = tuple(names)
        self._owners = owners
        count = len(self.names)
        self._steps = (ctypes.c_void_p * count)(*steps)
        self._words = ctypes.create_string_buffer(words, max(len(words), 8))
        self._offsets = (ctypes.c_int64 * count)(*offsets)
        self._nanoseconds = (ctypes.c_int64 * count)()
        pointers = (self._steps, self._words, self._offsets)
        self._arguments = (*(ctypes.addressof(pointer) for pointer in pointers), count)
        functions = bind(load_library())
        self._replay, self._set_num_threads = functions["replay"], functions["set_num_threads"]

    def replay(self) -> None:
        """Makes the calls, with as many threads as torch uses now."""
        self._run(None)

    def replay_timed(self) -> dict[str, tuple[int, float]]:
        """As `replay`; returns kernel -> (calls, seconds)."""
        ctypes.memset(self._nanoseconds, 0, ctypes.sizeof(self._nanoseconds))
        self._run(ctypes.addressof(self._nanoseconds))
        times: dict[str, tuple[int, float]] = {}
        for name, nanoseconds in zip(self.names, self._nanoseconds, strict=True):
            calls, seconds = times.get(name, (0, 0.0))
            times[name] = (calls + 1, seconds + nanoseconds * 1e-9)
        return times

    def _run(self, nanoseconds: int | None) -> None:
        self._set_num_threads(torch.get_num_threads())
        failed = self._replay(*self._arguments, nanoseconds)
        if failed:
            raise RuntimeError(f"call {failed - 1} of the program ({self.names[failed - 1]}) refused its arguments")


class _Recorder:
    """The kernels' functions, each call of which is made and kept."""

    def __init__(self) -> None:
        self._library = load_library()
        self._step_of: dict[str, int] = {}
        self.names: list[str] = []
        self.steps: list[int] = []
        self.offsets: list[int] = []
        self.words = bytearray()

    def functions(self) -> dict[str, Any]:
        return {
            name: function if name == "set_num_threads" else self._recorded(name, function)
            for name, function in bind(self._library).items()
        }

    def program(self, *owners: Any) -> Program:
        return Program(self.names, self.steps, bytes(self.words), self.offsets, owners)

    def _recorded(self, name: str, function: Any) -> Callable[..., Any]:
        codes = SIGNATURES[f"rk_{name}"][1].replace(" ", "")
        layout = struct.Struct("=" + "".join(_WORDS.get(code, "") for code in codes))

        def call(*arguments: Any) -> Any:
            step = self._step(name, len(codes))
            self.names.append(name)
            self.steps.append(step)
            self.offsets.append(len(self.words) // 8)
            self.words += layout.pack(*(0 if argument is None else argument for argument in arguments))
            return function(*arguments)

        return call

    def _step(self, name: str, num_arguments: int) -> int:
        step = self._step_of.get(name)
        if step is None:
            count = ctypes.c_int64()
            find = self._library.rk_program_step
            find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_void_p]
            step = find(name.encode(), ctypes.addressof(count))
            if step is None:
                raise NotRecordableError(f"the kernel {name} cannot be part of a program")
            assert count.value == num_arguments, (
                f"{name} takes {count.value} arguments, its signature has {num_arguments}"
            )
            self._step_of[name] = step
        return step


class _OnlyViews(TorchDispatchMode):
    """Refuses torch operations that compute something: a replay would not do them again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        if not all(value.alias_info is not None and not value.alias_info.is_write for value in returns):
            raise NotRecordableError(f"the torch operation {func} is not a view")
        return func(*args, **(kwargs or {}))


def record(function: Callable[[], Result], workspace: Workspace) -> tuple[Result, Program]:
    """Runs `function` without gradients and records its kernel calls.

    Everything it computes must be computed by kernels of `rollout_kernels` on CPU tensors; torch may make views. Raises
    `NotRecordableError` otherwise. The program keeps the function, hence what it refers to, and the workspace alive.
    """
    workspace.reset()
    recorder = _Recorder()
    kernels = CpuKernels(recorder.functions(), workspace.empty)
    with torch.inference_mode(), _OnlyViews(), use_kernels(kernels):
        result = function()
    return result, recorder.program(workspace, function)
