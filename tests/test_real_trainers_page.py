"""The programs of docs/real_trainers.md run by the commands that stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributed import ROOT, kill_group
from tests.support.tiny import make_tiny_llama

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "real_trainers.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


def test_every_program_is_run_by_a_command():
    assert len(PROGRAMS) == PAGE.count("```python")
    run = re.findall(r" (\w+\.py)", "\n".join(COMMANDS))
    assert sorted(run) == sorted(PROGRAMS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.findall(r"(\w+)\.py", command)[-1])
def test_the_page_runs_as_it_is_printed(command: str, tmp_path: Path):
    make_tiny_llama(tmp_path / "path" / "to" / "model", tie=True)
    for name, code in PROGRAMS.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    environment = {
        **os.environ,
        # Not a link to the environment, so that the first lines of its commands name the same Python.
        "PATH": f"{Path(sys.executable).parent.resolve()}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "trainers")),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with open(tmp_path / "output", "wb") as output:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", command],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = shell.wait(timeout=600)
    finally:
        kill_group(shell)
    text = (tmp_path / "output").read_text(errors="replace")
    assert code == 0, text
    receipts = re.findall(r"receipt \w+: policy 1, .*?fingerprint (\w+)", text)
    assert len(receipts) == (2 if "fsdp2" in command or "accelerate" in command else 1), text
    assert len(set(receipts)) == 1
