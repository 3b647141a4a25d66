"""The code in docs/text.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tiny import make_tiny_llama

PAGE = Path(__file__).resolve().parents[2] / "docs" / "text.md"


def test_the_code_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {"MODEL": make_tiny_llama(tmp_path, tokenizer=True)})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(re.fullmatch(r"4 turns, \d+ of \d+ tokens were sampled", line) for line in lines)
