"""docs/asynchrony.md is true: its code runs, its commands are valid, and it names every metric and field."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

from rollout_trainers.asynchrony_config import AsynchronySection
from rollout_trainers.recipe import load_recipe
from tests.support.tiny import make_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "asynchrony.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_code_of_the_page_runs(tmp_path: Path):
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {"MODEL": str(make_tiny_llama(tmp_path, tokenizer=True))})


def test_the_commands_of_the_page_are_recipes_that_can_be_run():
    commands = re.findall(r"^    rollout train (.*)$", TEXT, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        path, *overrides = shlex.split(command)
        assert load_recipe(ROOT / path, overrides).asynchrony.is_active


def test_the_page_has_every_field_of_the_section():
    for field in fields(AsynchronySection):
        assert f"`{field.name}`" in TEXT, field.name
