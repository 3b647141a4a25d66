"""Compiles the C++ kernels on first use, for this machine's own instruction set, and loads them.

The library is cached by everything that decides its bytes: the sources, the compiler, the flags and the CPU. It brings
its own team of threads (`csrc/threads.h`), so torch's OpenMP runtime stays the only one in the process. Concurrent
processes wait for one another at a file lock and the finished library appears by an atomic rename, so that nobody ever
loads half a file.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE_DIR = Path(__file__).parent / "csrc"
LIBRARY_NAME = "rollout_kernels.so"
_OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")  # each of them offers libgomp's interface


class BuildError(RuntimeError):
    """The kernels cannot be built on this machine; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A GNU C++ compiler: where it is, and its name and version."""

    path: str
    version: str


def find_compiler() -> Compiler:
    """The compiler that `ROLLOUT_CXX` or `CXX` names, else the first GNU C++ one on the path. Raises `BuildError`."""
    named = os.environ.get("ROLLOUT_CXX") or os.environ.get("CXX")
    for name in [named] if named else ["g++", "c++"]:
        path = shutil.which(name)
        if path is None:
            continue
        command = [path, "-x", "c++", "-dM", "-E", "/dev/null"]  # prints the predefined macros
        macros = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        version = re.search(r'#define __VERSION__ "([^"]*)"', macros)
        if version is not None and "#define __GNUC__ " in macros and "#define __clang__ " not in macros:
            return Compiler(path, f"GNU C++ {version[1]}")
    wanted = (
        f"the compiler {named!r} of ROLLOUT_CXX or CXX is not a GNU C++ compiler"
        if named
        else "no GNU C++ compiler (g++) on the path"
    )
    raise BuildError(f"{wanted}: install g++, or set ROLLOUT_CXX to one")


def openmp_runtimes() -> list[str]:
    """Files of the OpenMP runtimes that this process has loaded, torch's own first."""
    paths: list[str] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path and Path(path).name.startswith(_OPENMP_NAMES) and f"/{path}" not in paths:
            paths.append(f"/{path}")
    torch_dir = str(Path(torch.__file__).parent)
    return sorted(paths, key=lambda path: not path.startswith(torch_dir))


def compile_flags() -> list[str]:
    """Flags of every source file."""
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    return ["-std=c++17", "-O3", native, "-pthread", "-fPIC", "-fno-math-errno", "-Wall", "-Wno-psabi"]


def cache_dir() -> Path:
    """Where libraries are kept: `$ROLLOUT_CACHE/kernels`, or `~/.cache/rollout/kernels`."""
    root = os.environ.get("ROLLOUT_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "rollout") / "kernels"


def _cpu_description() -> str:
    """What `-march=native` depends on: the CPU's name and features."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def build_key(compiler: Compiler) -> str:
    """Hash of everything that decides the library's bytes."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    machine = [_cpu_description(), platform.machine()]
    digest.update("\0".join([compiler.path, compiler.version, *compile_flags(), *machine]).encode())
    return digest.hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the operating system releases it if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")


def _compile(compiler: Compiler, target: Path) -> None:
    """Compiles all sources, several at a time, and links them to `target`, which appears whole or not at all."""
    sources = sorted(SOURCE_DIR.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # the longest work first
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as build_dir:
        objects = [Path(build_dir) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler.path, *compile_flags(), "-c", str(source), "-o", str(object_file)]
            for source, object_file in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=min(len(sources), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        library = Path(build_dir) / LIBRARY_NAME
        _run([compiler.path, "-shared", "-o", str(library), *map(str, objects), "-pthread", "-lm"])
        os.replace(library, target)


def build() -> Path:
    """The library's file, compiled if the cache has none. Raises `BuildError`."""
    compiler = find_compiler()
    target = cache_dir() / build_key(compiler) / LIBRARY_NAME
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise BuildError(f"cannot write the kernel cache {target.parent}: {error}; set ROLLOUT_CACHE") from error
    return target


@functools.cache
def load_library() -> ctypes.CDLL:
    """The loaded library, built first if need be. Raises `BuildError`."""
    path = build()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from error
