"""The programs of docs/policy_updates.md run as they are printed, for every transport."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tiny import make_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / "policy_updates.md").read_text(), re.DOTALL)
TRAINERS = [text for name, text in BLOCKS if name == "trainer.py"]
ENGINES = [text for name, text in BLOCKS if name == "engine.py"]


NAMES = ("shared memory", "broadcast", "files", "sparse delta")


def with_lines_of(program: str, variant: str, start: str) -> str:
    """The program with the variant's lines in place of its own one that starts with `start`, and of its import."""
    if variant == program:
        return program
    lines = [line for line in program.splitlines() if "rollout.weights.shared_memory" not in line]
    (line,) = (line for line in variant.splitlines() if line.startswith(start))
    preparation, _, rest = variant.partition(line)
    place = next(index for index, own in enumerate(lines) if own.strip().startswith(start))
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    return "\n".join([preparation, *lines[:place], indent + line, *rest.strip().splitlines(), *lines[place + 1 :]])


@pytest.mark.slow
def test_trainer_and_engine_print_the_same_fingerprints_for_every_transport(tmp_path: Path):
    assert len(TRAINERS) == len(ENGINES) == len(NAMES)
    for index, name in enumerate(NAMES):
        make_tiny_llama(tmp_path / name / "model", dtype=torch.bfloat16)
        (tmp_path / name / "trainer.py").write_text(with_lines_of(TRAINERS[0], TRAINERS[index], "sender = "))
        (tmp_path / name / "engine.py").write_text(with_lines_of(ENGINES[0], ENGINES[index], "update.load("))
    printed = [text.split("=== ") for text in run_both(tmp_path)]
    for name, engine, trainer in zip(NAMES, *(texts[1:] for texts in printed), strict=True):
        of_engine, of_trainer = (re.findall(r"policy (\d) is (\w{32})", text) for text in (engine, trainer))
        assert of_engine == of_trainer, name
        assert [version for version, _ in of_engine] == ["1", "2", "3"]
        assert len({fingerprint for _, fingerprint in of_engine}) == 3


def run_both(folder: Path) -> list[str]:
    """Two processes, one for the engines' programs and one for the trainers', in turn; what each printed."""
    programs = [folder / name for name in NAMES]
    lines = ["import os, runpy, sys", "for folder in sys.argv[2:]:"]
    lines += ["    print('===', folder, flush=True)", "    os.chdir(folder)", "    runpy.run_path(sys.argv[1])"]
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "trainers"))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for name in ("engine.py", "trainer.py"):
            command = [sys.executable, "-c", "\n".join(lines), name, *map(str, programs)]
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log))
        codes = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    printed = [(folder / f"{name}.log").read_text() for name in ("engine.py", "trainer.py")]
    assert codes == [0, 0], "\n---\n".join(printed)
    return printed
