"""The page's code runs as it is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.worker.ledger import process_resident_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


def test_the_code_of_the_page_runs(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    budget = process_resident_bytes() + (400 << 20)
    exec(compile(block, str(PAGE), "exec"), {"MODEL": str(tiny_model()), "BUDGET": budget})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["budget", "budget", "budget", "sampling:", "training:"]
