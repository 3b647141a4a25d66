"""Compiles the Triton kernels ahead of time, on any machine: the triton wheel brings the compiler, ptxas and cuobjdump.

Nothing runs. What is learnt about each kernel is what its speed hangs on: registers, spills, shared memory, and which
matrix instructions the compiler chose.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90)  # A100, H100
# What every launch gives the compiler: otherwise the environment (TRITON_DEFAULT_FP_FUSION) would decide whether
# a * b + c is rounded once or twice, and results would hang on it.
PINNED = {"enable_fp_fusion": True}
# Largest shared memory of one block in bytes, opted into: CUDA C++ programming guide, technical specifications.
SHARED_MEMORY_LIMIT = {80: 163 << 10, 90: 227 << 10}


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One configuration in which the engine launches a kernel."""

    name: str  # e.g. "linear bf16 K=576"
    kernel: Any  # the @triton.jit function
    signature: dict[str, str]  # parameter -> "*bf16", "i32", "i64", "fp32", or "constexpr"
    constants: dict[str, Any]  # values of the constexpr parameters
    num_warps: int
    num_stages: int
    tensor_cores: bool = False  # mma (sm_80) / wgmma or mma (sm_90) must be in the PTX
    divisible_by_16: tuple[str, ...] = ()  # pointers and sizes that the engine guarantees to be multiples of 16


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What one case became on one device."""

    name: str
    capability: int
    registers: int  # of a thread
    spill_bytes: int  # local memory of a thread: Triton makes no local arrays, so that these are spilled registers
    shared_bytes: int  # of a block
    matrix_instruction: str  # "wgmma", "mma" or "none"
    num_warps: int
    num_stages: int

    def problems(self, needs_tensor_cores: bool) -> list[str]:
        """What would make this kernel slow, or impossible to launch, in words."""
        found = []
        if self.spill_bytes:
            found.append(f"spills {self.spill_bytes} bytes of registers")
        if self.shared_bytes > SHARED_MEMORY_LIMIT[self.capability]:
            found.append(f"needs {self.shared_bytes} bytes of shared memory of {SHARED_MEMORY_LIMIT[self.capability]}")
        if needs_tensor_cores and self.matrix_instruction == "none":
            found.append("uses no tensor cores")
        return found


def all_cases() -> dict[str, list[KernelCase]]:
    """The cases of every kernel file, by the file's name without `.py`, in the order in which it lists them."""
    package = importlib.import_module("rollout_kernels.gpu")
    cases = {}
    for module in sorted({info.name for info in pkgutil.iter_modules(package.__path__)} - {"ops"}):
        contents = vars(importlib.import_module(f"rollout_kernels.gpu.{module}"))
        if "ahead_of_time_cases" in contents:
            cases[module] = contents["ahead_of_time_cases"]()
    return cases


def compile_case(case: KernelCase, capability: int) -> KernelReport:
    """Compiles one case for one device. Raises triton's own errors where it does not compile.

    Raises `RuntimeError` under `TRITON_INTERPRET=1`, where kernels are Python and there is nothing to compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(case.kernel, triton.JITFunction):
        raise RuntimeError("kernels cannot be compiled under TRITON_INTERPRET=1: run this in another process")
    _check_signature(case)
    names = list(case.signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    source = ASTSource(fn=case.kernel, signature=case.signature, constexprs=case.constants, attrs=attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **PINNED},
    )
    usage = _resource_usage(compiled.asm["cubin"])
    return KernelReport(
        name=case.name,
        capability=capability,
        registers=usage["REG"],
        spill_bytes=usage["STACK"],
        shared_bytes=int(compiled.metadata.shared),
        matrix_instruction=matrix_instruction(compiled.asm["ptx"]),
        num_warps=case.num_warps,
        num_stages=case.num_stages,
    )


def _check_signature(case: KernelCase) -> None:
    """A case must name every parameter of its kernel, in order, and give every constexpr its value."""
    names = list(case.signature)
    if names != list(case.kernel.arg_names):
        raise ValueError(f"case {case.name!r} names {names}, but the kernel's parameters are {case.kernel.arg_names}")
    constants = {name for name, kind in case.signature.items() if kind == "constexpr"}
    if constants != set(case.constants):
        raise ValueError(f"case {case.name!r} gives values for {sorted(case.constants)}, not for {sorted(constants)}")
    unknown = sorted(set(case.divisible_by_16) - (set(names) - constants))
    if unknown:
        raise ValueError(f"case {case.name!r} calls {unknown} multiples of 16, which are no runtime parameters")


def matrix_instruction(ptx: str) -> str:
    """The kind of matrix instruction that the PTX uses: "wgmma", "mma" or "none"."""
    if re.search(r"\bwgmma\.mma_async\b", ptx):
        return "wgmma"
    return "mma" if re.search(r"\bmma\.sync\b", ptx) else "none"


@functools.cache
def _cuobjdump() -> str:
    import triton.backends.nvidia

    return str(Path(next(iter(triton.backends.nvidia.__path__)), "bin", "cuobjdump"))


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """What a thread of the kernel in `cubin` takes, by cuobjdump's names: REG and STACK among them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return parse_resource_usage(done.stdout)


def parse_resource_usage(text: str) -> dict[str, int]:
    """Reads what `cuobjdump --dump-resource-usage` prints about a kernel. `ValueError` where numbers are missing."""
    usage = {name: int(value) for name, value in re.findall(r"\b([A-Z]+(?:\[\d+\])?):(\d+)", text)}
    if "REG" not in usage or "STACK" not in usage:
        raise ValueError(f"cuobjdump printed no resource usage: {text!r}")
    return usage
