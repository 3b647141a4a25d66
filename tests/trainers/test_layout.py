"""The layout of dashboards, and the workspace in W&B that is made of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollout_trainers.config import TrackingSection
from rollout_trainers.histograms import Histogram
from rollout_trainers.layout import LAYOUT, Panel, panels_of
from rollout_trainers.metric_catalog import CATALOG, describe, wandb_key
from rollout_trainers.tracking import Tracker
from rollout_trainers.types import SampleRow
from rollout_trainers.workspace import (
    WORKSPACE_FILE,
    build_workspace,
    layout_of,
    read_workspace,
    save_workspace,
    write_workspace,
)

ROOT = Path(__file__).parents[2]
PANELS = [panel for section in LAYOUT for panel in section.panels]
NAMES = ["reward", "rewards/right/mean", "rewards/polite/mean", "rewards/polite/std", "entropy", "histogram/length"]


def test_a_panel_shows_what_fits_its_patterns_in_its_order():
    panel = Panel("any", ("b", "a/*", "a/first"))
    assert panel.select(["a/second", "a/first", "c", "b"]) == ["b", "a/second", "a/first"]
    assert panel.select(["c"]) == []


def test_sections_and_panels_have_names_of_their_own():
    assert len({section.name for section in LAYOUT}) == len(LAYOUT)
    assert len({panel.title for panel in PANELS}) == len(PANELS)


def test_what_the_layout_shows_is_in_the_catalogue():
    """But for what further held-out sets and engines that speculate log."""
    others = ("eval/*/", "engine/draft_tokens_", "engine/accepted_")
    known = [metric.name for group in CATALOG for metric in group.metrics]
    for panel in PANELS:
        for metric in panel.metrics:
            if panel.kind in ("histogram", "table") or metric.startswith(others):
                continue
            shown = metric.replace("rewards/*/", "rewards/<function>/")
            assert panel.select(known) if "*" in metric else shown in known, metric


def test_a_run_has_the_panels_of_what_it_has_logged():
    sections = layout_of(NAMES)
    assert [section.name for section in sections] == ["Reward and evaluation", "Completions"]
    assert [(panel.title, panel.metrics) for panel in sections[0].panels] == [
        ("Reward", ("reward",)),
        ("Rewards by function", ("rewards/right/mean", "rewards/polite/mean")),
    ]
    assert layout_of([]) == ()


def write_run(folder: Path) -> None:
    tracker = Tracker(TrackingSection(wandb="disabled"), folder, "sums", {})
    tracker.log(1, {"reward": 0.5, "timing_s/gen": 1.0, "timing_s/train": 2.0, "rewards/right/mean": 0.5})
    tracker.log_histograms(1, {"histogram/length": Histogram(0.5, 1.0, (1, 2))})
    tracker.log_samples(1, [SampleRow(1, "a", "b", 1.0, 0.0, 1, "stop", {})])
    tracker.finish({})


def test_the_layout_of_a_run_is_read_back_from_beside_it(tmp_path: Path):
    write_run(tmp_path)
    path = write_workspace(tmp_path)
    assert path == tmp_path / WORKSPACE_FILE
    sections = read_workspace(path)
    assert [(panel.kind, panel.metrics) for section in sections for panel in section.panels] == [
        ("lines", ("reward",)),
        ("lines", ("rewards/right/mean",)),
        ("histogram", ("histogram/length",)),
        ("table", ("completions",)),
        ("area", ("timing_s/gen", "timing_s/train")),
    ]
    for wrong in ('[{"name": "a"}]', "[", "[3]", "3"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"workspace\.json holds no layout"):
            read_workspace(path)


@pytest.mark.parametrize("target", ["project", "a/b/c", "/b", "a/", "a b/c"])
def test_a_target_is_an_entity_and_a_project(target: str):
    with pytest.raises(ValueError, match="write ENTITY/PROJECT"):
        save_workspace(target)


def test_the_view_of_a_run_is_what_wandbs_own_package_makes_of_the_layout(tmp_path: Path):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces")
    write_run(tmp_path)
    write_workspace(tmp_path)
    saved = tmp_path / "view.json"
    assert save_workspace("team/sums", tmp_path, "mine", saved) == str(saved)
    view = json.loads(saved.read_text())
    assert (view["entity"], view["project"], view["displayName"]) == ("team", "sums", "mine")
    spec = workspaces.interface.internal.WorkspaceViewspec.model_validate(view["spec"])
    assert spec.section.settings.x_axis == "train/global_step"
    sections = spec.section.panel_bank_config.sections
    assert [section.name for section in sections] == ["Reward and evaluation", "Completions", "Samples", "Speed"]
    panels = [
        panel for section in view["spec"]["section"]["panelBankConfig"]["sections"] for panel in section["panels"]
    ]
    assert [panel["viewType"] for panel in panels] == [
        "Run History Line Plot",
        "Run History Line Plot",
        "Media Browser",
        "Weave",
        "Run History Line Plot",
    ]
    reward, functions, lengths, _, seconds = (panel["config"] for panel in panels)
    assert (reward["metrics"], reward["xAxis"]) == (["train/reward"], "train/global_step")
    assert functions["metrics"] == ["train/rewards/right/mean"]
    assert lengths["mediaKeys"] == ["histogram/length"]
    assert (seconds["metrics"], seconds["plotType"]) == (["timing_s/gen", "timing_s/train"], "stacked-area")
    # and back again: what W&B would give to who loads the view
    again = workspaces.Workspace._from_model(build_workspace(LAYOUT, "team", "sums")._to_model())
    assert [section.name for section in again.sections] == [section.name for section in LAYOUT]


class StandIn(BaseHTTPRequestHandler):
    """Answers as W&B's server does when a view is saved, and keeps what it was sent."""

    views: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length", 0)))
        query = json.loads(sent) if self.path == "/graphql" else {}
        if "upsertView" in query.get("query", ""):
            self.views.append(query["variables"])
        viewer = {"id": "1", "username": "u", "email": "e", "entity": "team", "flags": "{}", "teams": {"edges": []}}
        view = {"view": {"id": "1", "name": "nw-abc-v"}, "inserted": True}
        answer = json.dumps({"data": {"upsertView": view, "viewer": viewer}}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest's output is for failures."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def dashboard(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where nobody is logged in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-m", "rollout", "dashboard", "team/sums", "--name", "mine"],
        cwd=ROOT,
        env={**kept, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_command_sends_the_view_to_wandb(tmp_path: Path, server: str):
    pytest.importorskip("wandb_workspaces")
    done = dashboard(tmp_path, WANDB_BASE_URL=server, WANDB_API_KEY="a" * 40)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{server}/team/sums?nw=abc"
    (view,) = StandIn.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("team", "sums", "mine")
    sections = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section.name for section in LAYOUT]


@pytest.mark.slow
def test_the_command_says_in_a_sentence_that_nobody_is_logged_in(tmp_path: Path):
    pytest.importorskip("wandb_workspaces")
    done = dashboard(tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 2
    assert "error: W&B did not take the workspace: No API key configured" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_whole_layout_finds_metrics_by_pattern(tmp_path: Path):
    pytest.importorskip("wandb_workspaces")
    workspace = build_workspace(LAYOUT, "team", "sums")
    panels = {
        panel.title: panel for section in workspace.sections for panel in section.panels if hasattr(panel, "title")
    }
    pattern = panels["Rewards by function"].metric_regex
    assert re.match(pattern, wandb_key("rewards/right/mean"))
    assert not re.match(pattern, wandb_key("rewards/right/std"))
    shown = {key for panel in panels.values() for key in getattr(panel, "y", [])}
    assert {"train/reward", "train/completions/mean_length", "sampling/logp_difference/max"} <= shown


def test_names_of_the_catalogue_are_found_by_what_they_stand_for():
    names = [metric.name for group in CATALOG for metric in group.metrics]
    assert len(set(names)) == len(names)
    for name, entry in (
        ("rewards/right/mean", "rewards/<function>/mean"),
        ("memory/training_peak_bytes", "memory/<phase>_peak_bytes"),
        ("memory/training_bytes", "memory/<phase>_bytes"),
        ("memory/budget_bytes", "memory/budget_bytes"),
        ("diagnosis/stale_KV", "diagnosis/<cause>"),
        ("reward", "reward"),
    ):
        found = describe(name)
        assert found is not None and found.name == entry
    assert describe("my/own") is None and describe("rewards/a/b/mean") is None
    for group in CATALOG:
        for metric in group.metrics:
            assert set(metric.summary.split(",")) <= {"last", "min", "max", "mean"}
            assert metric.meaning and "|" not in metric.meaning
            for panel, _ in panels_of(LAYOUT[0], [metric.name]):
                assert panel.kind == "lines"


def test_keys_in_wandb_are_trls():
    assert [wandb_key(name) for name in ("reward", "rewards/a/mean", "clip_ratio/low_mean", "timing_s/gen")] == [
        "train/reward",
        "train/rewards/a/mean",
        "train/clip_ratio/low_mean",
        "timing_s/gen",
    ]
