"""`scripts/plot_curves.py`: tables and pictures of runs, and those that `docs/recipes.md` shows."""

from __future__ import annotations

import csv
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLES = sorted((ROOT / "docs" / "curves").glob("*.csv"))


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "plot_curves.py"), run_name="plot_curves")


def write_run(folder: Path) -> Path:
    rows = [
        {"step": 0, "eval/accuracy": 0.25, "eval/accuracy_low": 0.125, "eval/accuracy_high": 0.5},
        {"step": 1, "reward": 0.123456, "entropy": 2.0, "completions/mean_length": 20, "critic/lr": 1e-3},
        {"step": 2, "reward": 0.5, "entropy": 1.0, "completions/mean_length": 10, "objective/kl": 1e-7},
        {"step": 2, "eval/accuracy": 0.75, "eval/accuracy_low": 0.5, "eval/accuracy_high": 0.875},
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_a_run_becomes_a_table_of_one_row_a_step_and_a_picture(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script["main"]([str(write_run(tmp_path / "run")), "--name", "some", "--folder", str(tmp_path)])
    with (tmp_path / "some.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert [row["reward"] for row in rows] == ["", "0.12346", "0.5"]
    assert [row["eval/accuracy"] for row in rows] == ["0.25", "", "0.75"]
    assert [row["objective/kl"] for row in rows] == ["", "", "1e-07"]
    assert "critic/lr" not in rows[0]
    assert script["read_table"](tmp_path / "some.csv")[2]["eval/accuracy_high"] == 0.875
    picture = tmp_path / "some.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    capsys.readouterr()
    script["main"](["--folder", str(tmp_path)])  # again, from the table
    assert picture.is_file()
    assert capsys.readouterr().out == f"{picture}: Held out: 25 % before, 75 % after 2 steps\n"


def test_a_folder_without_a_step_is_refused(script: dict[str, Any], tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="has no step"):
        script["main"]([str(tmp_path), "--folder", str(tmp_path)])


def sections() -> dict[str, str]:
    """The sections of the page, by what is behind the anchor of each: the table's name."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    return {re.findall(r"curves/(\w+)\.csv", text)[0]: text for text in page.split("\n## ")[1:] if ".csv" in text}


def test_the_page_shows_every_table_and_no_other():
    assert sorted(sections()) == [table.stem for table in TABLES]


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_what_the_page_says_of_a_run_is_in_its_table(table: Path, script: dict[str, Any]):
    section, rows = sections()[table.stem], script["read_table"](table)
    evaluated = [row for row in rows if "eval/accuracy" in row]
    shares = [f"{100 * row['eval/accuracy']:.0f} %" for row in (evaluated[0], evaluated[-1])]
    assert f"Held out: {shares[0]} before, {shares[1]} after {rows[-1]['step']:.0f} steps" in " ".join(section.split())
    assert evaluated[-1]["step"] == rows[-1]["step"]
    picture = table.with_suffix(".png")
    assert f"(curves/{picture.name})" in section
    assert picture.stat().st_size < 61_440
    assert (ROOT / "recipes" / re.findall(r"recipes/(\w+\.(?:yaml|py))", section)[0]).is_file()
