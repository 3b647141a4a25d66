"""docs/quality.md: its tables follow from the committed data, and both sides' scripts train the same thing."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_trainers import RunConfig
from rollout_trainers.optimizer import learning_rate
from rollout_trainers.producer import select_examples
from rollout_trainers.recipe import load_recipe
from rollout_trainers.tasks import make_task
from tests.support.tiny import make_tiny_llama
from tests.support.trl import needs_trl

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "scripts" / "bench"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(BENCH / name), run_name="imported")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The quickstart recipe on a tiny model, in two steps."""
    model = make_tiny_llama(tmp_path / "model", vocab_size=160, tokenizer=True)
    sizes = ("steps=2", "evaluation.every=1", "optimizer.warmup_steps=1", "algorithm.prompts_per_step=2")
    task = ("task.train_size=8", "task.eval_size=4", "sampling.max_tokens=6", "algorithm.group_size=2")
    overrides = [f"model={model}", "engine.kv_cache_memory=4 MiB", *sizes, *task]
    return load_recipe(ROOT / "recipes" / "quickstart.yaml", overrides)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def share_of_low_ids(
    prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any
) -> list[float | None]:
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


@pytest.mark.slow
@needs_trl
def test_both_sides_train_the_recipe_and_are_scored_by_the_same_evaluator(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the script sets both: they are put back
    monkeypatch.setenv("WANDB_MODE", "disabled")
    theirs, ours, quality = script("quality_trl.py"), script("quality_ours.py"), script("quality.py")
    task = replace(make_task(config.task), rewards=(share_of_low_ids,))
    theirs["train"](config, task, tmp_path / "trl", bf16=True, batch_size=2)
    ours["train"](config, task, tmp_path / "rollout")
    before = load_file(tmp_path / "model" / "model.safetensors")
    for side in ("trl", "rollout"):
        lines = lines_of(tmp_path / side)
        assert [line["step"] for line in lines] == [1, 2]
        assert all(line["seconds"] > 0 < line["processor_seconds"] for line in lines)
        assert all(0 < line["reward"] < 1 and 0 < line["mean_length"] <= 6 for line in lines)
        after = [load_file(tmp_path / side / f"step-{step}" / "model.safetensors") for step in (1, 2)]
        assert all(values.keys() == before.keys() for values in after)
        for one, other in ((before, after[0]), (after[0], after[1])):
            assert any(not torch.equal(one[name], other[name]) for name in before)
        found = quality["evaluate"](tmp_path / side / "step-2", config, make_task(config.task))
        line = quality["evaluation_line"](2, found)
        assert line["right"] == sum(found.successes) and line["num"] == len(found.successes) == 4


@needs_trl
def test_trl_is_told_what_the_recipe_says(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    theirs = script("quality_trl.py")
    arguments = theirs["arguments"](config, tmp_path, bf16=True, batch_size=2)
    assert arguments.generation_batch_size == 2 * 2 == 2 * arguments.gradient_accumulation_steps
    assert (arguments.num_generations, arguments.max_completion_length, arguments.temperature) == (2, 6, 1.0)
    assert (arguments.beta, arguments.epsilon, arguments.loss_type, arguments.num_iterations) == (0.0, 0.2, "dapo", 1)
    task = make_task(config.task)
    rows = theirs["questions"](config, task)
    asked = [example for step in (1, 2) for example in select_examples(task.train, step, 2, config.seed)]
    assert rows["prompt"] == [example.prompt for example in asked]
    assert rows["answer"] == [example.columns["answer"] for example in asked]
    weight = torch.nn.Linear(1, 1)
    adamw, course = theirs["optimizer_of"](config, weight)
    for step in range(config.steps):
        assert adamw.param_groups[0]["lr"] == pytest.approx(learning_rate(step, config.steps, config.optimizer))
        adamw.step()
        course.step()
    other = load_recipe(ROOT / "recipes" / "quickstart.yaml", ["loss.algorithm=dr_grpo"])
    with pytest.raises(ValueError, match="only 'grpo_token'"):
        theirs["arguments"](other, tmp_path, bf16=True, batch_size=2)


def made_lines() -> list[dict[str, Any]]:
    """Two seeds a side; one of TRL's has not got as far as the others."""
    lines = []
    for side, right in (("rollout", {0: (40, 40), 5: (70, 60), 10: (90, 95)}), ("trl", {0: (40, 40), 5: (50, 61)})):
        for step, values in right.items():
            for seed, value in enumerate(values):
                lines.append(
                    {"side": side, "seed": seed, "kind": "evaluation", "step": step, "right": value, "num": 100}
                )
    lines.append({"side": "trl", "seed": 0, "kind": "evaluation", "step": 10, "right": 99, "num": 100})
    for side, seconds in (("rollout", (90.0, 2.0, 4.0)), ("trl", (99.0, 30.0, 33.0))):
        for step, value in enumerate(seconds, 1):
            lines.append({"side": side, "kind": "time", "turn": 0, "step": step, "seconds": value})
            lines[-1]["processor_seconds"] = 2 * value
            lines.append({"side": side, "seed": 0, "kind": "step", "step": step, "seconds": 1000.0})
    return lines


def test_tables_have_means_and_ranges_at_the_steps_that_all_runs_have() -> None:
    page = script("quality_page.py")
    rows = page["score_table"](made_lines()).splitlines()[2:]
    assert rows == [
        "| 0 | 0 | 40% | 40% |",
        "| 5 | 320 | 65.0% (60% to 70%) | 55.5% (50% to 61%) |",
    ]
    rows = page["time_table"](made_lines()).splitlines()[2:]
    assert rows == ["| seconds a step | 3.0 | 31.5 | 10.5 |", "| processor seconds a step | 6.0 | 63.0 | 10.5 |"]
    text = "a\n<!-- scores -->\nold\n<!-- end of scores -->\nb\n<!-- time -->\n<!-- end of time -->\n"
    once = page["filled"](text, made_lines())
    assert page["filled"](once, made_lines()) == once != text
    assert "old" not in once and once.count("| 5 | 320 |") == 1 and once.endswith("<!-- end of time -->\n")
    with pytest.raises(ValueError, match="no marks <!-- scores -->"):
        page["filled"]("a page", made_lines())
    with pytest.raises(ValueError, match="other seeds"):
        page["scores"](
            [*made_lines(), {"side": "trl", "seed": 7, "kind": "evaluation", "step": 0, "right": 1, "num": 1}]
        )


def test_the_picture_is_drawn_from_the_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script("quality_page.py")["plot"](made_lines(), tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_says_what_its_data_says_and_that_meets_the_bar() -> None:
    page = script("quality_page.py")
    lines = page["read"](page["DATA"])
    text = page["PAGE"].read_text(encoding="utf-8")
    assert page["filled"](text, lines) == text
    scores, seconds = page["scores"](lines), page["seconds_a_step"](lines)
    last = max(scores["trl"].by_step)
    assert len(scores["trl"].by_step[last]) >= 3
    assert scores["rollout"].mean(last) >= scores["trl"].mean(last)
    assert seconds["rollout"] <= seconds["trl"] / 5
