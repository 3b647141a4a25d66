"""The course of a run: when it evaluates, stops and saves, what it reports, and that its folder is its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout.errors import RolloutError
from rollout_trainers import session
from rollout_trainers.checkpoint import list_checkpoints
from rollout_trainers.config import EvaluationSection
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import RunResult, run
from rollout_trainers.run_record import read_record
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example, Task
from tests.support.killed_writes import LOAD_DURABLE
from tests.support.tiny import make_tiny_llama

TRAIN = [Example(text) for text in ("abc", "hello", "what", "q")]
HELD_OUT = [Example(text) for text in ("xyz", "another", "more")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, dtype=torch.bfloat16)


class Scripted:
    """A reward of 1 for the first sample of each group, and on held-out prompts what the script says for each time."""

    __name__ = "scripted"

    def __init__(self, held_out: list[float]) -> None:
        self.held_out = iter(held_out)

    def __call__(self, prompts: list[str], completions: Any, **columns: Any) -> list[float]:
        if prompts[0] in [example.prompt for example in HELD_OUT]:
            return [next(self.held_out)] * len(prompts)
        return [float(place % 2 == 0) for place in range(len(prompts))]


def train(model: Path, output: Path, held_out: list[float], *overrides: str) -> RunResult:
    values: dict[str, Any] = {
        "model": str(model),
        "name": "tiny",
        "output_dir": str(output),
        "steps": 6,
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 2, "prompts_per_step": 1},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"success_threshold": 0.5},
        "tracking": {"wandb": "disabled"},
    }
    config = config_from_values(values, overrides)
    return run(config, reward_functions=[Scripted(held_out)], train=TRAIN, evaluation=HELD_OUT)


def evaluated(output: Path) -> list[int]:
    return [row["step"] for row in read_json_lines(output / "metrics.jsonl") if "eval/accuracy" in row]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ((), [0, 6]),
        (("evaluation.every=4",), [0, 4, 6]),
        (("evaluation.at_start=false", "evaluation.at_steps=[1, 3]"), [1, 3, 6]),
        (("evaluation.at_end=false", "evaluation.every=4", "evaluation.at_steps=[3]"), [0, 3, 4]),
        (("evaluation.at_start=false", "evaluation.at_end=false"), []),
    ],
)
def test_evaluations_are_made_when_the_recipe_says(model: Path, tmp_path: Path, overrides: tuple[str, ...], steps: Any):
    result = train(model, tmp_path, [0.1 * place for place in range(9)], *overrides)
    assert evaluated(tmp_path) == steps
    assert (result.base is not None, result.trained is not None) == (0 in steps, 6 in steps)
    assert (result.p_value is not None) == (0 in steps and 6 in steps)


def test_evaluations_by_time_come_once_enough_of_it_has_passed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    section = EvaluationSection(every_seconds=60.0)
    assert [section.is_due(1, seconds) for seconds in (59.0, 60.0)] == [False, True]
    now = [0.0]

    class Clock:
        perf_counter = staticmethod(lambda: now[0])

        @staticmethod
        def monotonic() -> float:
            now[0] += 10.0  # each call: one a step, and one an evaluation
            return now[0]

    monkeypatch.setattr(session, "time", Clock)
    train(model, tmp_path, [0.0] * 9, "evaluation.every_seconds=30", "evaluation.at_end=false")
    assert evaluated(tmp_path) == [0, 3, 6]


def test_a_run_stops_early_saves_what_it_has_and_says_why(model: Path, tmp_path: Path):
    options = ("evaluation.every=1", "early_stop={metric: eval/reward, patience: 2}", "checkpoint.every=5")
    rewards = [0.0, 0.25, 0.5, 0.5, 0.25, 0.75]
    result = train(model, tmp_path, rewards, *options)
    assert result.stopped is not None and result.stopped.step == 4
    assert evaluated(tmp_path) == [0, 1, 2, 3, 4]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000004"]
    assert result.trained is not None and result.trained.mean_reward == 0.25
    record = read_record(tmp_path)
    assert record is not None
    assert record["status"] == "finished"
    assert record["stopped"] == {
        "step": 4,
        "metric": "eval/reward",
        "reason": "eval/reward has not got better than 0.5 in 2 values",
    }
    # A run that has stopped does not go on when it is resumed, unless it is asked for something else.
    again = train(model, tmp_path, [], *options, "resume=true")
    assert again.stopped == result.stopped
    assert again.trained == result.trained
    longer = train(model, tmp_path, [0.75, 1.0], *options, "resume=true", "early_stop.patience=5")
    assert longer.stopped is None
    assert evaluated(tmp_path) == [0, 1, 2, 3, 4, 5, 6]


def test_a_training_metric_can_stop_a_run_and_the_last_policy_is_evaluated(model: Path, tmp_path: Path):
    result = train(model, tmp_path, [0.0, 0.5], "early_stop={metric: num_tokens, threshold: 10}")
    assert result.stopped is not None
    last = read_json_lines(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == result.stopped.step < 6
    assert last["eval/reward"] == 0.5
    assert "num_tokens is" in result.stopped.reason


def test_the_best_checkpoint_stays_and_can_be_the_runs_model(model: Path, tmp_path: Path):
    options = ("evaluation.every=1", "checkpoint={every: 2, keep: 1, best_metric: eval/reward, load_best: true}")
    result = train(model, tmp_path, [0.9, 0.25, 0.5, 0.75, 0.5, 0.25, 0.0], *options)
    checkpoints = tmp_path / "checkpoints"
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step-000003", "step-000006"]
    assert result.best is not None
    assert (result.best.step, result.best.metric, result.best.value) == (3, "eval/reward", 0.75)
    assert (checkpoints / "best").readlink() == Path("step-000003")
    best, last = (load_file(checkpoints / name / "model" / "model.safetensors") for name in ("best", "step-000006"))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], best[name]) for name in saved)
    assert not all(torch.equal(saved[name], last[name]) for name in saved)
    assert result.trained is not None and result.trained.mean_reward == 0.75
    record = read_record(tmp_path)
    assert record is not None and (record["model_step"], record["last_step"]) == (3, 6)
    # Whoever removes the best one has none until there is another.
    shutil.rmtree(checkpoints / "step-000003")
    again = train(model, tmp_path, [0.125], "resume=true", "steps=7", *options)
    assert again.best is not None and (again.best.step, again.best.value) == (7, 0.125)
    # Without best_metric there is no best one any more, and the next save removes its checkpoint.
    train(model, tmp_path, [0.0], "resume=true", "steps=8", "checkpoint={every: 8, keep: 1}")
    assert not (checkpoints / "best").is_symlink()
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step-000008"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("early_stop={metric: eval/acuracy, patience: 1}", "evaluation.every=1"), "early_stop.metric='eval/acuracy'"),
        (("early_stop={metric: eval/accuracy, patience: 1}",), "evaluation.every=0 .*above 0"),
        (("checkpoint.best_metric=reward",), "checkpoint.best_metric='reward' .*an evaluation's metric"),
        (("sampling.max_tokens=64",), r"sampling.max_tokens=64 .*below engine.max_model_len \(64\)"),
        (("evaluation.max_tokens=70",), r"evaluation.max_tokens=70 .*below engine.max_model_len \(64\)"),
        (("checkpoint.load_best=true",), "checkpoint.load_best=True .*without best_metric"),
        (("checkpoint.best_mode=min",), "checkpoint.best_mode='min' .*without best_metric"),
        (("evaluation.at_steps=[7]",), r"evaluation.at_steps=\[7\] .*steps of the run's 6"),
        (("evaluation.at_steps=3",), "evaluation.at_steps=3 .*a list"),
        (("evaluation.at_steps=[0]",), "evaluation.at_steps=0 .*at least 1"),
        (("evaluation.every_seconds=0",), "evaluation.every_seconds=0"),
        (("early_stop={metric: entrpy, patience: 1}",), "early_stop.metric='entrpy' .*did you mean 'entropy'"),
    ],
)
def test_mistakes_are_named(model: Path, tmp_path: Path, overrides: tuple[str, ...], message: str):
    with pytest.raises(ValueError, match=message):
        train(model, tmp_path, [0.0] * 9, *overrides)


def test_metrics_of_evaluations_need_examples_for_them(model: Path, tmp_path: Path):
    values = {"model": str(model), "output_dir": str(tmp_path / "run"), "checkpoint": {"best_metric": "eval/accuracy"}}
    with pytest.raises(ValueError, match="has no examples for evaluation"):
        run(config_from_values(values), reward_functions=[Scripted([])], train=TRAIN)
    assert not (tmp_path / "run").exists()


def test_further_held_out_sets_are_evaluated_by_name(model: Path, tmp_path: Path):
    hard = [Example(text, {"is_hard": True}) for text in ("q1", "q2")]

    def reward(prompts: list[str], completions: Any, is_hard: Any = None, **columns: Any) -> list[float]:
        return [0.25 if is_hard else float(place % 2 == 0) for place in range(len(prompts))]

    def train_on(task: Task, *overrides: str) -> RunResult:
        values: dict[str, Any] = {
            "model": str(model),
            "output_dir": str(tmp_path / "run"),
            "steps": 2,
            "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
            "sampling": {"max_tokens": 4},
            "algorithm": {"group_size": 2, "prompts_per_step": 1},
            "evaluation": {"every": 1},
            "tracking": {"wandb": "disabled"},
        }
        return run(config_from_values(values, overrides), task=task)

    task = Task("both", TRAIN, HELD_OUT, (reward,), further_evaluations={"hard": hard, "none": []})
    with pytest.raises(ValueError, match="no examples for evaluation called 'none'"):
        train_on(task, "checkpoint.best_metric=eval/none/reward")
    result = train_on(task, "checkpoint.best_metric=eval/hard/reward")
    rows = [row for row in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "eval/reward" in row]
    assert [row["eval/hard/reward"] for row in rows] == [0.25] * 3
    assert [row["eval/reward"] for row in rows] == [pytest.approx(2 / 3)] * 3
    assert not any("none" in name for name in rows[0])
    assert result.best is not None and (result.best.step, result.best.metric) == (1, "eval/hard/reward")
    assert result.trained is not None and result.trained.num == 3
    splits = {row["split"] for row in read_json_lines(tmp_path / "run" / "samples.jsonl")}
    assert splits == {"train", "held out", "held out hard"}
    with pytest.raises(ValueError, match="cannot be called 'a/b'"):
        Task("both", TRAIN, [], (), further_evaluations={"a/b": hard})


def test_two_processes_cannot_write_into_one_folder(model: Path, tmp_path: Path):
    code = f"import sys, time\nfrom pathlib import Path\n{LOAD_DURABLE}"
    code += "with durable.exclusive(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=rf"is in use by another run \(process {holder.pid}\)"):
            train(model, tmp_path, [])
        assert not (tmp_path / "metrics.jsonl").exists()
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    train(model, tmp_path, [0.0, 0.0], "steps=1")  # the kernel has freed it


@pytest.mark.slow
def test_a_run_that_ends_before_its_first_checkpoint_goes_on_under_its_id_in_wandb(model: Path, tmp_path: Path):
    wandb = pytest.importorskip("wandb")
    with pytest.raises(ValueError, match=r"reward .Scripted. raised StopIteration"):
        train(model, tmp_path, [], "tracking.wandb=offline", "evaluation.at_end=false")
    first = read_record(tmp_path)
    assert wandb.run is None  # a run that has failed does not become the next one's
    train(model, tmp_path, [0.0] * 2, "tracking.wandb=offline", "steps=1", "resume=true")
    second = read_record(tmp_path)
    assert first is not None and second is not None
    assert first["wandb_id"] == second["wandb_id"] is not None
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{first['wandb_id']}"))) in (1, 2)  # in one second, or two
    # Without W&B for a while, its id is kept.
    train(model, tmp_path, [0.0] * 2, "steps=1", "resume=true")
    third = read_record(tmp_path)
    assert third is not None and third["wandb_id"] == first["wandb_id"]


def test_the_record_says_from_the_first_moment_that_the_run_is_not_finished(model: Path, tmp_path: Path):
    class Failing(Scripted):
        def __call__(self, *arguments: Any, **columns: Any) -> list[float]:
            raise KeyboardInterrupt

    values = {"model": str(model), "output_dir": str(tmp_path), "engine": {"kv_cache_memory": "2 MiB"}}
    config = config_from_values({**values, "tracking": {"wandb": "disabled"}})
    with pytest.raises(KeyboardInterrupt):
        run(config, reward_functions=[Failing([])], train=TRAIN, evaluation=HELD_OUT)
    record = read_record(tmp_path)
    assert record is not None
    assert record["status"] == "unfinished"
    assert record["config"] == json.loads(json.dumps(record["config"]))
    assert record["task"] == "grpo"


def test_a_run_whose_gradient_is_not_finite_ends_with_the_alert_and_one_sentence(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(RolloutError, match=r"step 2 broke off, since the gradient's norm is nan.*learning_rate"):
        train(model, tmp_path, [0.0] * 9, "optimizer.learning_rate=1e30")
    (alert,) = [row for row in read_json_lines(tmp_path / "alerts.jsonl") if row["name"] == "not_finite"]
    assert alert["step"] == 2 and "grad_norm" in alert["text"]
    assert "not finite" in capfd.readouterr().err


def test_a_page_that_cannot_be_drawn_does_not_make_a_run_unfinished(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> Path:
        raise ZeroDivisionError("in a chart")

    monkeypatch.setattr(session, "write_report", broken)
    with pytest.raises(ZeroDivisionError):
        train(model, tmp_path, [0.0] * 9)
    record = read_record(tmp_path)
    assert record is not None and record["status"] == "finished"
    assert (tmp_path / "model" / "model.safetensors").is_file()


def needs_answer(prompts: Any, completions: Any, answer: list[str], weight: float = 1.0, **columns: Any) -> list[float]:
    return [weight * (text == right) for text, right in zip(completions, answer, strict=True)]


def test_a_column_that_a_reward_needs_is_missed_before_the_model_is_loaded(tmp_path: Path):
    config = config_from_values({"model": str(tmp_path / "nowhere"), "output_dir": str(tmp_path / "run")})
    whole, other = Example("a", {"answer": "1"}), Example("a", {"solution": "1", "level": 2})
    for examples, held_out, which in (([other], [], "training"), ([whole], [other], "evaluation")):
        with pytest.raises(ValueError, match="'needs_answer'") as raised:
            run(config, reward_functions=[needs_answer], train=examples, evaluation=held_out)
        assert f"needs the column 'answer', which the {which} examples do not have" in str(raised.value)
        assert "they have 'solution', 'level'" in str(raised.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="nowhere"):  # whose columns are there
        run(config, reward_functions=[needs_answer], train=[whole])


def test_sequences_longer_than_the_model_was_made_for_are_refused_before_it_is_loaded(model: Path, tmp_path: Path):
    shutil.copyfile(model / "config.json", tmp_path / "config.json")  # without weights
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(ValueError, match=f"engine.max_model_len={longest + 1} is not valid: .* at most {longest}"):
        train(tmp_path, tmp_path / "run", [], f"engine.max_model_len={longest + 1}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_an_output_folder_that_is_a_file_is_named(model: Path, tmp_path: Path, place: str):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"output_dir='.*' is not valid: .*file is a file"):
        train(model, tmp_path / place, [])
    assert (tmp_path / "file").read_text() == "mine"
