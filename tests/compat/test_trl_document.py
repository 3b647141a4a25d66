"""The programs of docs/trl.md run as they are printed, and its table of refusals names arguments that there are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import rollout.compat
from tests.support.distributed import ROOT
from tests.support.tiny import make_tiny_llama
from tests.support.trl import needs_trl

PAGE = (ROOT / "docs" / "trl.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize("name", ["colocate", "rollout_func"])
def test_programs_end_with_the_receipt_of_the_second_policy(
    stand_in: None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    make_tiny_llama(tmp_path / "path" / "to" / "model", vocab_size=160, tokenizer=True)
    (tmp_path / f"{name}.py").write_text(PROGRAMS[name])
    monkeypatch.chdir(tmp_path)
    if name == "colocate":
        rollout.compat.uninstall()
    runpy.run_path(f"{name}.py", run_name="__main__")
    assert "policy 2" in capsys.readouterr().out.splitlines()[-1]
