"""Several runs on one page, and the commands that write reports and workspaces."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollout.cli import main
from rollout_trainers.alerts import Alert
from rollout_trainers.comparison import write_comparison
from rollout_trainers.config import TrackingSection
from rollout_trainers.run_record import write_record
from rollout_trainers.tracking import Tracker

HOSTILE = "<script>alert(1)</script>"


def write_run(folder: Path, rate: float, steps: int, *, held_out: bool = True) -> Path:
    config = {"name": HOSTILE, "steps": steps, "optimizer": {"learning_rate": rate, "beta1": 0.9}, "model": "tiny"}
    config["output_dir"] = str(folder)
    tracker = Tracker(TrackingSection(wandb="disabled"), folder, HOSTILE, {})
    for step in range(1, steps + 1):
        tracker.log(step, {"reward": rate * step, "timing_s/step": 36.0, "timing_s/gen": 20.0, "entropy": 1.0})
    if held_out:
        tracker.log(steps, {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6})
    tracker.log_alerts([Alert(2, "kl_runaway", "KL runs away", f"It is 3. {HOSTILE}", "WARN")])
    tracker.finish({})
    write_record(folder, {"name": HOSTILE, "task": "sums", "config": config}, is_finished=True)
    return folder


def charts(page: str) -> dict[str, ElementTree.Element]:
    found = [ElementTree.fromstring(chart) for chart in re.findall(r"<svg.*?</svg>", page)]
    return {str(chart.get("aria-label")): chart for chart in found}


def series(chart: ElementTree.Element) -> dict[str, list[list[float]]]:
    return dict(json.loads(str(chart.get("data-series"))))


def test_runs_have_a_line_each_in_every_chart_and_a_row_each_in_the_table(tmp_path: Path):
    folders = [write_run(tmp_path / "a" / "x", 0.1, 3), write_run(tmp_path / "b" / "x", 0.2, 4, held_out=False)]
    page = write_comparison(tmp_path / "out" / "page.html", folders).read_text(encoding="utf-8")
    drawn = charts(page)
    assert series(drawn["Reward"]) == {
        "a/x": [[1, 0.1], [2, 0.2], [3, pytest.approx(0.3)]],
        "b/x": [[step, pytest.approx(0.2 * step)] for step in (1, 2, 3, 4)],
    }
    assert list(series(drawn["Held-out accuracy: eval/accuracy"])) == ["a/x"]
    assert "Seconds a step, by phase" in drawn and "Gradient norm" not in drawn
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    cells = [[html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows]
    assert ["a/x", "3", "0.200 (last 3 steps)", *["50.0% (40.0% to 60.0%), step 3"] * 2, "0.03", "1"] in cells
    assert ["b/x", "4", "0.500 (last 4 steps)", "-", "-", "0.04", "1"] in cells
    assert ["optimizer.learning_rate", "0.1", "0.2"] in cells and ["steps", "3", "4"] in cells
    assert not [row for row in cells if row and row[0] in ("optimizer.beta1", "name", "output_dir", "model")]
    assert page.count("KL runs away") == 2
    assert HOSTILE not in page and not re.search(r"""(?:src|href)\s*=|@import|https?://""", page)


def test_a_comparison_is_of_several_runs(tmp_path: Path):
    run = write_run(tmp_path / "a", 0.1, 3)
    for folders in ([run], [run, run], [run, tmp_path / "a" / ".." / "a"]):
        with pytest.raises(ValueError, match="two runs or more"):
            write_comparison(tmp_path / "page.html", folders)
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has no metrics\.jsonl"):
        write_comparison(tmp_path / "page.html", [run, tmp_path])


def test_the_command_writes_one_report_or_compares_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    first, second = write_run(tmp_path / "a", 0.1, 3), write_run(tmp_path / "b", 0.2, 3)
    assert main(["report", "a"]) == 0
    assert capsys.readouterr().out.splitlines() == ["a/report.html"]
    page = (first / "report.html").read_text(encoding="utf-8")
    assert html.escape(f"{HOSTILE}: sums") in page and "KL runs away" in page and "Untrained" not in page
    assert main(["report", "a", str(second)]) == 0
    assert capsys.readouterr().out.splitlines() == ["comparison.html"]
    assert list(series(charts((tmp_path / "comparison.html").read_text(encoding="utf-8"))["Reward"])) == ["a", "b"]
    assert main(["report", "a", "b", "--output", "more/both.html"]) == 0
    assert (tmp_path / "more" / "both.html").is_file()
    for wrong in (["report", "a", "--output", "x.html"], ["report", str(tmp_path)], ["dashboard", "project"]):
        assert main(wrong) == 2
    errors = capsys.readouterr().err
    for words in ("--output is for several runs", "not the folder of a run", "write ENTITY/PROJECT"):
        assert words in errors


def test_a_run_that_died_has_a_report(tmp_path: Path):
    tracker = Tracker(TrackingSection(wandb="disabled"), tmp_path, "sums", {})
    write_record(tmp_path, {"name": "sums", "task": "adding", "config": {"steps": 9}}, is_finished=False)
    tracker.log(1, {"reward": 0.5})
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "rew')
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>sums: adding</title>" in page and "not finished" in page and "&quot;steps&quot;: 9" in page


def test_an_older_run_without_the_newer_files_has_a_report(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n', encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 0
    assert f"<title>{tmp_path.name}</title>" in (tmp_path / "report.html").read_text(encoding="utf-8")
