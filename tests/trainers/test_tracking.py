"""Metrics in JSON lines, in an offline W&B run that is read back from disk, and on the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from rollout_trainers.alerts import Alert
from rollout_trainers.config import TrackingSection
from rollout_trainers.histograms import Histogram
from rollout_trainers.mismatch import Finding
from rollout_trainers.recipe import config_from_values
from rollout_trainers.tracking import (
    ALERTS_FILE,
    HISTOGRAMS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    ProgressLine,
    Timers,
    Tracker,
    read_json_lines,
    wandb_mode,
)
from rollout_trainers.types import SampleRow
from tests.support.wandb_files import read_finished_records, read_history

ROWS = [
    SampleRow(1, "user: 2 + 2 =", "4", 1.0, 0.5, 2, "stop", {"answer": "4"}, logprob=-0.25, entropy=1.5),
    SampleRow(1, "user: 2 + 2 =", "five", 0.0, -0.5, 64, "length", {"answer": "4"}),
]


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x"}, "online"),
        ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_API_KEY": "x"}, "offline"),
        ("disabled", {}, "disabled"),
    ],
)
def test_wandb_is_offline_where_no_key_is_set(setting: str, environment: dict[str, str], expected: str):
    assert wandb_mode(TrackingSection(wandb=setting), environment) == expected  # type: ignore[arg-type]


def test_an_offline_run_holds_the_metrics_and_an_incremental_table_of_samples(tmp_path: Path):
    tracker = Tracker(TrackingSection(), tmp_path, "sums", {"steps": 2}, environment={})
    tracker.log(1, {"reward": 0.25, "completions/mean_length": 7.0, "timing_s/gen": 1.5, "engine/kv_usage": 0.1})
    tracker.log_samples(1, ROWS)
    tracker.log(2, {"reward": 0.5})
    tracker.log_diagnosis(Finding(2, 0.3, "stale KV", "stale KV: the samples were drawn on other KV"))
    tracker.log_samples(2, [SampleRow(2, "user: 3 + 3 =", "6", 1.0, 0.0, 2, "stop", {"answer": "6"})])
    tracker.finish({"trained": 0.5})

    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (record_file,) = run.glob("run-*.wandb")
    history = read_history(record_file)
    metrics = [row for row in history if "train/reward" in row]
    assert [row["train/reward"] for row in metrics] == [0.25, 0.5]
    assert [row["train/global_step"] for row in metrics] == [1, 2]
    assert metrics[0]["train/completions/mean_length"] == 7.0
    assert (metrics[0]["timing_s/gen"], metrics[0]["engine/kv_usage"]) == (1.5, 0.1)

    verdicts = [(row["train/global_step"], row["diagnosis/verdict"]) for row in history if "diagnosis/text" in row]
    assert verdicts == [(2, "stale KV")]
    tables = [row for row in history if "completions" in row or "completions/path" in row]
    assert len(tables) == 2
    files = sorted((run / "files" / "media" / "table").rglob("*.table.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["data"]]
    assert sorted(row[2] for row in rows) == ["4", "6", "five"]
    columns = json.loads(files[0].read_text())["columns"]
    four = dict(zip(columns, next(row for row in rows if row[2] == "4"), strict=True))
    assert (four["logprob"], four["entropy"], four["split"]) == (-0.25, 1.5, "train")


ALERTS = [
    Alert(2, "entropy_collapse", "Entropy has collapsed", "Entropy is 0.01 nats a token.", "WARN"),
    Alert(3, "entropy_collapse", "Entropy has collapsed: over", "It is 0.5.", "INFO"),
    Alert(3, "not_finite", "Numbers are not finite", "Not finite: loss.", "ERROR"),
    Alert(4, "entropy_collapse", "Entropy has collapsed", "Entropy is 0.02 nats a token.", "WARN"),
]


def test_an_offline_run_holds_what_the_recipe_calls_it_its_summaries_histograms_and_alerts(tmp_path: Path):
    labels = {"group": "sums", "job_type": "train", "tags": ["cpu", "grpo"], "notes": "a note", "entity": "team"}
    section = config_from_values({"model": "any", "tracking": labels}).tracking
    tracker = Tracker(section, tmp_path, "sums", {"steps": 2}, environment={})
    for step, reward in ((1, 0.75), (2, 0.5)):
        metrics = {"reward": reward, "loss": 0.1 * step, "rewards/right/mean": reward, "timing_s/gen": float(step)}
        tracker.log(step, metrics | {"eval/accuracy": reward})
        tracker.log_histograms(step, {"histogram/length": Histogram(2.5, 1.0, (2, 0, step))})
    tracker.log_histograms(2, {})
    tracker.log_alerts(ALERTS)
    tracker.finish({"trained": 0.5})

    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (record_file,) = run.glob("run-*.wandb")
    records = read_finished_records(record_file)
    of_kind = {kind: [each for each in records if each.WhichOneof("record_type") == kind] for kind in ("run", "alert")}
    described = of_kind["run"][0].run
    assert (described.run_group, described.job_type, list(described.tags)) == ("sums", "train", ["cpu", "grpo"])
    assert (described.notes, described.entity) == ("a note", "team")
    assert [(each.alert.title, each.alert.level) for each in of_kind["alert"]] == [
        ("Entropy has collapsed", "WARN"),
        ("Numbers are not finite", "ERROR"),
        ("Entropy has collapsed", "WARN"),  # W&B would leave out an equal title within a minute
    ]
    assert of_kind["alert"][0].alert.text == "Step 2: Entropy is 0.01 nats a token."

    kept = {each.metric.name: each.metric.summary for each in records if each.WhichOneof("record_type") == "metric"}
    assert kept["train/reward"].max and kept["train/reward"].mean and kept["train/reward"].last
    assert kept["train/rewards/right/mean"].max
    assert kept["timing_s/gen"].mean and not kept["timing_s/gen"].max
    assert "train/loss" not in kept  # its last value, which is what W&B keeps by itself
    steps = {each.metric.name: each.metric.step_metric for each in records if each.HasField("metric")}
    assert steps["train/reward"] == "train/global_step"

    drawn = [row for row in read_history(record_file) if row.get("histogram/length/_type") == "histogram"]
    assert [row["histogram/length/values"] for row in drawn] == [[2, 0, 1], [2, 0, 2]]
    assert drawn[0]["histogram/length/bins"] == [2.5, 3.5, 4.5, 5.5]
    assert [row["train/global_step"] for row in drawn] == [1, 2]

    # and the same beside it, for the report
    assert [Alert(**record) for record in read_json_lines(tmp_path / ALERTS_FILE)] == ALERTS
    stored = read_json_lines(tmp_path / HISTOGRAMS_FILE)
    assert [record["step"] for record in stored] == [1, 2]
    assert Histogram.from_plain(stored[1]["histogram/length"]) == Histogram(2.5, 1.0, (2, 0, 2))


@pytest.mark.parametrize("tags", ["cpu", [""], [3], ["x" * 65]])
def test_tags_are_a_list_of_texts(tags: object):
    with pytest.raises(ValueError, match=r"tracking\.tags"):
        config_from_values({"model": "any", "tracking": {"tags": tags}})


def test_a_resumed_run_continues_its_wandb_run(tmp_path: Path):
    first = Tracker(TrackingSection(), tmp_path / "first", "sums", {}, environment={})
    first.log(1, {"reward": 0.25})
    run_id = first.wandb_id
    first.finish({})
    assert run_id
    resumed = Tracker(TrackingSection(), tmp_path / "second", "sums", {}, 2, run_id, environment={})
    resumed.log(2, {"reward": 0.5})
    assert resumed.wandb_id == run_id
    resumed.finish({})
    (run,) = (tmp_path / "second" / "wandb").glob(f"offline-run-*-{run_id}")
    history = read_history(run / f"run-{run_id}.wandb")
    assert [row["train/reward"] for row in history if "train/reward" in row] == [0.5]
    assert Tracker(TrackingSection(wandb="disabled"), tmp_path / "third", "sums", {}).wandb_id is None


def test_all_of_a_step_is_one_row_and_a_repeated_step_is_the_same_step_of_wandb(tmp_path: Path):
    """A run that was cut off in step 3 goes on from a checkpoint after step 1."""
    tracker = Tracker(TrackingSection(), tmp_path, "sums", {}, environment={})
    run_id = tracker.wandb_id
    tracker.log(0, {"eval/accuracy": 0.5})
    for step in (1, 2, 3):
        tracker.log(step, {"reward": step / 4})
        tracker.log_histograms(step, {"histogram/length": Histogram(2.5, 1.0, (2, 0, step))})
        tracker.log_samples(step, ROWS)
        if step < 3:
            tracker.log(step, {"eval/accuracy": step / 8})
            tracker.commit()
    tracker.break_off()
    resumed = Tracker(TrackingSection(), tmp_path / "resumed", "sums", {}, 2, run_id, environment={})
    for step in (2, 3, 4):
        resumed.log(step, {"reward": step / 4})
        resumed.commit()
    resumed.commit()  # there is nothing more
    resumed.finish({})

    def steps(folder: Path) -> list[tuple[int, int, float | None, float | None]]:
        (record_file,) = folder.glob(f"wandb/offline-run-*-{run_id}/run-*.wandb")
        rows = read_history(record_file)
        assert all("completions/path" in row for row in rows if "histogram/length/values" in row)
        names = ("_step", "train/global_step", "train/reward", "eval/accuracy")
        return [tuple(row.get(name) for name in names) for row in rows]  # type: ignore[misc]

    assert steps(tmp_path) == [(0, 0, None, 0.5), (1, 1, 0.25, 0.125), (2, 2, 0.5, 0.25), (3, 3, 0.75, None)]
    assert steps(tmp_path / "resumed") == [(2, 2, 0.5, None), (3, 3, 0.75, None), (4, 4, 1.0, None)]


def test_json_lines_hold_everything_and_null_for_what_is_not_finite(tmp_path: Path):
    tracker = Tracker(TrackingSection(wandb="disabled"), tmp_path, "sums", {})
    tracker.log(1, {"reward": 0.25, "loss": float("nan")})
    tracker.log_samples(1, ROWS)
    tracker.finish({})
    assert read_json_lines(tmp_path / METRICS_FILE) == [{"step": 1, "reward": 0.25, "loss": None}]
    assert [row["completion"] for row in read_json_lines(tmp_path / SAMPLES_FILE)] == ["4", "five"]
    assert not (tmp_path / "wandb").exists()


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path):
    section = TrackingSection(wandb="disabled")
    tracker = Tracker(section, tmp_path, "sums", {})
    for step in (1, 2, 3):
        tracker.log(step, {"reward": float(step)})
    tracker.finish({})
    with (tmp_path / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "rew')  # a crash in the middle of a line
    resumed = Tracker(section, tmp_path, "sums", {}, first_step=3)
    resumed.log(3, {"reward": 30.0})
    resumed.finish({})
    assert [row["reward"] for row in read_json_lines(tmp_path / METRICS_FILE)] == [1.0, 2.0, 30.0]


def test_timers_add_up_the_time_of_a_phase():
    clock = iter([0.0, 1.0, 5.0, 7.5])
    timers = Timers(clock=lambda: next(clock))
    for _ in range(2):
        with timers.phase("gen"):
            pass
    assert timers.metrics() == {"timing_s/gen": 3.5}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_is_rewritten_in_a_terminal_and_kept_elsewhere():
    for stream, returns in ((Terminal(), 3), (io.StringIO(), 0)):
        clock = iter([0.0, 10.0, 20.0])
        progress = ProgressLine(3, stream, clock=lambda clock=clock: next(clock))
        for step in (1, 2, 3):
            progress.update(step, {"reward": f"0.{step}"})
        text = stream.getvalue()
        assert text.count("\r") == returns
        assert "2/3 reward 0.2 left 0:10" in text
        assert text.endswith("\n")
