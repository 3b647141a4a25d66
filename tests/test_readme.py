"""The README's example runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.slow
def test_the_training_loop_runs_and_ends_every_step_with_a_receipt(tmp_path: Path, smollm2_path: Path) -> None:
    assert smollm2_path.is_dir()
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    script = tmp_path / "loop.py"
    script.write_text(code[1], encoding="utf-8")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    receipts = [line for line in result.stdout.splitlines() if line.startswith("receipt ")]
    assert ["policy 1," in receipts[0], "policy 2," in receipts[1], "policy 3," in receipts[2]] == [True] * 3
    assert len({line.split("fingerprint ")[1].split(",")[0] for line in receipts}) == 3  # the weights did move
