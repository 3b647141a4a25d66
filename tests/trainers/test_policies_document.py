"""The code of `docs/policies.md` runs as it is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rollout_trainers.policy_config import LoraSection
from rollout_trainers.recipe import config_from_values

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


def test_the_code_trains_an_adapter_and_saves_it(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(PAGE), "exec"), {"MODEL": str(tiny_model(tokenizer=True))})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["1", "True"], ["2", "True"]]
    assert len({line.split("fingerprint ")[1].split(",")[0] for line in lines}) == 2
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    PeftModel.from_pretrained(merged, str(tmp_path / "trained" / "adapter"))


def test_the_recipe_is_one_and_the_table_has_every_choice_of_lora() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    config = config_from_values({"model": "any", **yaml.safe_load(block)})
    assert config.policy.uses_lora and config.loss.uses_kl
    named = re.findall(r"`(\w+)`", " ".join(line for line in text.splitlines() if line.startswith("| `")))
    assert sorted(named) == sorted(field.name for field in fields(LoraSection))
