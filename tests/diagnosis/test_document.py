"""The page's code runs as it is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnose.md"


def test_the_code_of_the_page_runs(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    variables: dict[str, object] = {"MODEL": str(tiny_model())}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), variables)
    printed = capsys.readouterr().out
    assert "none: no gap" in printed
    assert "wrong weights: the trainer's weights are not the engine's policy 0: 1 of 20 tensors differ" in printed
