"""The page's code runs as it is printed, and its tables have every default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tiny import make_tiny_llama

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"


def test_the_code_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_llama(tmp_path, vocab_size=400, tokenizer=True, near_uniform=True)
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    exec(compile(block, str(PAGE), "exec"), {"MODEL": str(folder)})
    assert capsys.readouterr().out.splitlines() == [
        "replayed: True",
        "words: []",
        "repeats: 0",
        "closed: True",
        "ended: repetition 4",
    ]
