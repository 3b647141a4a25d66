"""The code in docs/structured_outputs.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "structured_outputs.md"


@pytest.mark.slow
def test_the_code_of_the_page_runs(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smollm2_path.is_dir()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    *samples, colour = capsys.readouterr().out.splitlines()
    assert len(samples) == 4 and all(line.startswith("stop {'answer': ") for line in samples)
    assert colour in ("red", "green", "blue")
