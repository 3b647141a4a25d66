"""The workspace in Weights & Biases: `layout.py` as a view of a project, through W&B's package `wandb-workspaces`.

A run writes the panels for which it has logged something as `workspace.json` beside its other files. `rollout dashboard
ENTITY/PROJECT` makes a view of it, or of the whole layout, where there is a network.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollout_trainers.durable import write_text
from rollout_trainers.layout import LAYOUT, Panel, Section, panels_of
from rollout_trainers.metric_catalog import wandb_key
from rollout_trainers.run_files import read_run
from rollout_trainers.wandb_sink import STEP_METRIC

WORKSPACE_FILE = "workspace.json"
VIEW_NAME = "rollout"

_COLUMNS = 3
_WIDTH, _HEIGHT = 8, 6  # of a panel, on W&B's grid of 24 columns


def layout_of(names: Iterable[str]) -> tuple[Section, ...]:
    """The layout for a run that has logged `names`: without what it has no numbers for, and each metric by its name."""
    names = list(names)
    sections = []
    for section in LAYOUT:
        panels = tuple(Panel(panel.title, tuple(chosen), panel.kind) for panel, chosen in panels_of(section, names))
        if panels:
            sections.append(Section(section.name, panels, section.is_open))
    return tuple(sections)


def write_workspace(directory: Path) -> Path:
    """Writes `workspace.json` of the run in `directory`."""
    sections = layout_of(read_run(directory).names)
    path = directory / WORKSPACE_FILE
    write_text(path, json.dumps([asdict(section) for section in sections], indent=1) + "\n")
    return path


def read_workspace(path: Path) -> tuple[Section, ...]:
    """The layout that `write_workspace` has written. Raises `ValueError` where the file holds another thing."""
    try:
        return tuple(
            Section(
                values["name"],
                tuple(Panel(each["title"], tuple(each["metrics"]), each["kind"]) for each in values["panels"]),
                values["is_open"],
            )
            for values in json.loads(path.read_text(encoding="utf-8"))
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no layout: {error!r}") from error


def save_workspace(
    target: str, folder: Path | None = None, name: str = VIEW_NAME, json_path: Path | None = None
) -> str:
    """Saves a view called `name` of the project `target` ("entity/project"), with the panels of the run in `folder`, or
    with all. Returns its address. With a `json_path` nothing is sent: the view is written there, as W&B's API takes it.

    Raises `ValueError` for another target, a folder that holds no run, where `wandb-workspaces` is not installed, and
    where W&B does not take the view.
    """
    match = re.fullmatch(r"([^/\s]+)/([^/\s]+)", target)
    if match is None:
        raise ValueError(f"{target!r} is not a project of W&B: write ENTITY/PROJECT")
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError("a workspace needs W&B's package wandb-workspaces: pip install 'rollout-rl[workspaces]'")
    workspace = build_workspace(_sections(folder), match[1], match[2], name)
    if json_path is None:
        return _send(workspace)
    view = workspace._to_model()  # its only way to plain values
    json_path.write_text(view.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n", encoding="utf-8")
    return str(json_path)


def _send(workspace: Any) -> str:
    from wandb.errors import Error

    try:
        return workspace.save().url
    except Error as error:
        raise ValueError(f"W&B did not take the workspace: {error}") from error


def _sections(folder: Path | None) -> Sequence[Section]:
    if folder is None:
        return LAYOUT
    path = folder / WORKSPACE_FILE
    return read_workspace(path) if path.is_file() else layout_of(read_run(folder).names)


def build_workspace(sections: Sequence[Section], entity: str, project: str, name: str = VIEW_NAME) -> Any:
    """The `wandb_workspaces.workspaces.Workspace`, not saved yet: lines against the training step, media panels for
    histograms, and the table of samples."""
    workspaces = importlib.import_module("wandb_workspaces.workspaces")  # optional
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(
                name=section.name,
                panels=[_panel(panel, place) for place, panel in enumerate(section.panels)],
                is_open=section.is_open,
                layout_settings=workspaces.SectionLayoutSettings(
                    columns=_COLUMNS, rows=max(1, -(-len(section.panels) // _COLUMNS))
                ),
                panel_settings=workspaces.SectionPanelSettings(x_axis=STEP_METRIC),
            )
            for section in sections
        ],
        settings=workspaces.WorkspaceSettings(x_axis=STEP_METRIC, max_runs=20),
        runset_settings=workspaces.RunsetSettings(
            pinned_columns=["run:displayName", "summary:train/reward.max", "summary:eval/accuracy.max"]
        ),
        auto_generate_panels=False,
    )


def _panel(panel: Panel, place: int) -> Any:
    reports = importlib.import_module("wandb_workspaces.reports.v2")
    column, row = place % _COLUMNS, place // _COLUMNS
    layout = reports.Layout(x=column * _WIDTH, y=row * _HEIGHT, w=_WIDTH, h=_HEIGHT)
    keys = [metric if metric.startswith("histogram/") else wandb_key(metric) for metric in panel.metrics]
    if panel.kind == "table":
        return reports.WeavePanelSummaryTable(table_name="completions", layout=layout)
    if panel.kind == "histogram":
        return reports.MediaBrowser(title=panel.title, media_keys=keys, layout=layout)
    plot_type = "stacked-area" if panel.kind == "area" else None
    if any("*" in key for key in keys):
        pattern = "|".join(re.escape(key).replace(r"\*", ".*") for key in keys)
        return reports.LinePlot(
            title=panel.title, x=STEP_METRIC, metric_regex=f"^({pattern})$", plot_type=plot_type, layout=layout
        )
    return reports.LinePlot(title=panel.title, x=STEP_METRIC, y=keys, plot_type=plot_type, layout=layout)
