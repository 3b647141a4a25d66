"""The code in docs/sleep.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.tiny import make_tiny_llama

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sleep.md"


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(PAGE), "exec"), {"MODEL": make_tiny_llama(tmp_path)})
