"""What the bits of the compiled `linear` rest on: all tiles of a dtype are made of one matrix instruction."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Runs in a process of its own, since here the kernels are interpreted.
SCRIPT = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rollout_kernels.gpu.linear import ahead_of_time_cases

for case in ahead_of_time_cases():
    if not case.tensor_cores:
        continue
    names = list(case.signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    source = ASTSource(case.kernel, case.signature, case.constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options).asm["ptx"]
    kinds = set(re.findall(r"(?:wgmma\\.mma_async|mma)\\.sync\\.aligned\\.(m\\d+n\\d+k\\d+)", ptx))
    print(case.constants["COLUMNS"], *sorted(kinds))
"""


@pytest.mark.parametrize(("capability", "instruction"), [(80, "m16n8k16"), (90, "m64n64k16")])
def test_every_width_of_tile_uses_the_same_instruction(capability: int, instruction: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert lines == {("64", instruction), ("128", instruction)}
