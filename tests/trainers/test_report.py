"""The report: its data, self-contained, and safe against what samples say."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollout.memory_phases import OTHERS, PhaseMemory
from rollout_trainers.charts import axis_ticks, line_chart, running_mean, stacked_bars
from rollout_trainers.config import TrackingSection
from rollout_trainers.report import write_report
from rollout_trainers.tracking import Tracker
from rollout_trainers.types import SampleRow

HOSTILE = "</script><script>alert(1)</script> & <b>"
SUMMARY = {
    "name": "sums",
    "task": "reasoning_gym/chain_sum",
    "config": {"steps": 3, "note": HOSTILE},
    "base": {"accuracy": 0.25, "low": 0.18, "high": 0.34, "num": 128},
    "trained": {"accuracy": 0.875, "low": 0.8, "high": 0.92, "num": 128},
    "p_value": 1e-9,
}


def write_run(folder: Path) -> None:
    tracker = Tracker(TrackingSection(wandb="disabled"), folder, "sums", {})
    tracker.log(0, {"eval/accuracy": 0.25, "eval/accuracy_low": 0.18, "eval/accuracy_high": 0.34})
    for step in (1, 2, 3):
        tracker.log(
            step,
            {
                "reward": 0.2 * step,
                "timing_s/gen": 1.0,
                "timing_s/step": 2.0 + step,
                "perf/sleep_released_gb": 0.25,
                "engine/prefix_cache_hit_rate": 0.5,
                "engine/num_preemptions_total": 0,
                **({"sampling/logp_difference/max": 0.0} if step < 3 else {}),  # in step 3 nothing was compared
                "sampling/logp_difference/num_tokens": 600 if step < 3 else 0,
                "completions/mean_length": 10.0 - step,
            },
        )
        sampling = {"weights": 2 << 20, "kv_cache": 5 << 20, OTHERS: 3 << 20}
        sleeping = {"weights": 2 << 20, "kv_cache": 0, OTHERS: 3 << 20}
        phases = [
            PhaseMemory("sampling", 12 << 20, 10 << 20, sampling),
            PhaseMemory("sleeping", 10 << 20, 5 << 20, sleeping),
        ]
        tracker.log_memory(step, phases)
        tracker.log_samples(step, [SampleRow(step, "user: 1 + 1", HOSTILE, 1.0, 0.5, 3, "stop", {"answer": "2"})])
    tracker.log(3, {"eval/accuracy": 0.875, "eval/accuracy_low": 0.8, "eval/accuracy_high": 0.92})
    tracker.finish({})


def test_the_page_holds_figures_curves_and_samples_and_needs_nothing_else(tmp_path: Path):
    write_run(tmp_path)
    page = write_report(tmp_path, SUMMARY).read_text(encoding="utf-8")
    for figure in (
        "25.0%",
        "87.5%",
        "80.0% to 92.0%, n = 128",
        "p = 1e-09",
        "4.0 s each (median)",
        "256 MiB",
        "1,200 tokens",
    ):
        assert figure in page
    assert not re.search(r"""(?:src|href)\s*=|@import|https?://""", page)
    charts = re.findall(r"<svg.*?</svg>", page)
    titles = [ElementTree.fromstring(chart).get("aria-label") for chart in charts]
    assert "Reward" in titles
    assert "Seconds a step, by phase" in titles
    assert "KV cache: slots that held nothing, prefix hits (shares)" in titles
    assert "Preemptions so far" in titles
    assert "Memory (GiB): given back by sleep, and peak" in titles
    assert "Peak memory (MiB) by phase" in titles
    assert "Memory (MiB) at the end of each phase by owner, and its peak (line), step 3" in titles
    assert "Gradient norm" not in titles  # nothing was logged for it
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert data is not None
    samples = json.loads(data[1])
    assert [sample["step"] for sample in samples] == [1, 2, 3]
    assert samples[0]["completion"] == HOSTILE
    assert HOSTILE not in page


def test_the_picture_is_a_png(tmp_path: Path):
    write_run(tmp_path)
    write_report(tmp_path, SUMMARY)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_run_without_evaluation_or_steps_has_a_report(tmp_path: Path):
    Tracker(TrackingSection(wandb="disabled"), tmp_path, "sums", {}).finish({})
    page = write_report(tmp_path, {"name": "sums", "task": "none", "config": {}}).read_text(encoding="utf-8")
    assert "Untrained" not in page


def test_the_browser_shows_the_data_by_text_and_not_as_markup(tmp_path: Path):
    write_run(tmp_path)
    page = write_report(tmp_path, SUMMARY).read_text(encoding="utf-8")
    assert "textContent" in page
    assert "innerHTML" not in page


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.31, 0.32), (-5.0, 120.0), (3.0, 3.0), (0.0, 1e-6), (1, 60)])
def test_ticks_cover_the_range_in_few_even_steps(low: float, high: float):
    ticks = axis_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 8
    steps = [second - first for first, second in itertools.pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps))


def test_charts_of_one_point_and_of_none():
    assert line_chart("nothing", {}) == ""
    ElementTree.fromstring(line_chart("one <&> point", {"a": [(1, 2.0)]}))


def test_stacked_bars_are_as_high_as_their_parts_and_marked_at_their_peak():
    chart = stacked_bars("a <&> b", {"x": {"one": 30.0, "two": 50.0}, "y": {"two": 20.0, "debt": -5.0}}, {"x": 100.0})
    tree = ElementTree.fromstring(chart)
    drawn = list(tree.iter("rect"))
    heights = [float(bar.get("height", "nan")) for bar in drawn]
    per_unit = heights[0] / 30.0
    assert heights == pytest.approx([30 * per_unit, 50 * per_unit, 0, 0, 20 * per_unit, 0], abs=0.1)
    first, second = drawn[0], drawn[1]
    assert float(second.get("y", "nan")) + heights[1] == pytest.approx(float(first.get("y", "nan")), abs=0.1)
    bottom = float(first.get("y", "nan")) + heights[0]
    (mark,) = [line for line in tree.iter("line") if line.get("stroke") == "#1f2937"]
    assert bottom - float(mark.get("y1", "nan")) == pytest.approx(100 * per_unit, abs=0.3)
    assert stacked_bars("nothing", {}) == ""


def test_running_mean_uses_what_is_there_at_the_start():
    assert running_mean([1.0, 2.0, 3.0, 6.0], 2) == [1.0, 1.5, 2.5, 4.5]
