"""The code of the pages in `docs/` runs as it is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rollout import LLM, SamplingParams
from rollout.weights.receipt import parameters_fingerprint
from rollout_trainers.recipe import config_from_values
from rollout_trainers.rewards import final_number_reward, math_verify_reward
from rollout_trainers.run import run
from rollout_trainers.tasks import make_task
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example
from tests.support.drafters import make_medusa
from tests.support.reward_models import make_reward_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_code_about_adapters_trains_one_and_samples_with_it(tmp_path: Path, smollm2_path: Path) -> None:
    assert smollm2_path.is_dir()
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "lora.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    script = tmp_path / "adapter.py"
    script.write_text(code[1], encoding="utf-8")
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    first, second, last = result.stdout.splitlines()
    assert "policy 1," in first and "policy 2," in second
    assert len({line.split("fingerprint ")[1].split(",")[0] for line in (first, second)}) == 2  # the adapter did move
    assert "lora_name='policy'" in last and "lora_name='saved'" in last and last.endswith("None] {1, 7}")


def test_the_code_about_draft_models_runs(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8").split("## A draft model")[1]
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    model, draft = tiny_model(tokenizer=True), tiny_model(tokenizer=True, seed=3, num_layers=1)
    names: dict[str, Any] = {"MODEL": str(model), "DRAFT": str(draft), "LLM": LLM, "SamplingParams": SamplingParams}
    drafter = {name: 2 * tensor for name, tensor in load_file(draft / "model.safetensors").items()}
    names |= {"policy": load_file(model / "model.safetensors"), "drafter": drafter}
    exec(compile(block, "speculation.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == [parameters_fingerprint(drafter.items(), torch.float32)]
    plain = LLM(model, kv_cache_memory="1MiB")
    wanted = plain.generate("Once upon a time", SamplingParams(temperature=0.7, seed=1, max_tokens=24))[0]
    assert names["output"].outputs[0].token_ids == wanted.outputs[0].token_ids


def test_the_code_about_heads_runs(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8").split("## Heads")[1]
    serving, training = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    model = tiny_model(tokenizer=True)
    names: dict[str, Any] = {"MODEL": str(model), "HEADS": str(make_medusa(tmp_path, num_heads=2)), "LLM": LLM}
    names |= {"SamplingParams": SamplingParams}
    exec(compile(serving, "speculation.md", "exec"), names)
    plain = LLM(model)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24)
    assert names["output"].outputs[0].token_ids == plain.generate("Once upon a time", params)[0].outputs[0].token_ids
    exec(compile(training, "speculation.md", "exec"), names)
    assert names["metrics"]["drafter/loss"] > 0
    sent = parameters_fingerprint(names["heads"].named_parameters(), torch.float32)
    assert names["llm"].verify().drafter_fingerprint == sent
    saved = {"method": "medusa", "model": names["HEADS"], "num_speculative_tokens": 2}
    assert LLM(model, speculative_config=saved).verify().drafter_fingerprint == sent


def test_the_code_about_trees_runs(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "trees.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(page), "exec"), {"MODEL": str(tiny_model())})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["forced: True", "resumed: True"]
    assert lines[2] == f"samples: 8 tokens: {8 * 29}"
    assert lines[3] == f"packed: {5 + 2 * 24 + 4 * 21 + 2 * 19} of which drawn: {2 * 24 + 4 * 21 + 2 * 19}"


def test_the_code_about_logprobs_runs(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "logprobs.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(page), "exec"), {"MODEL": str(tiny_model(tokenizer=True))})
    assert capsys.readouterr().out.splitlines() == [
        "sampled first: True entries: True",
        "arrays: (8, 3) (8,) (8, 2)",
        "prompt: None True",
        "mode: raw_logprobs True",
        "scored: True",
        "json: True",
    ]


def test_the_code_about_environments_runs(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "environments.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(page), "exec"), {"MODEL": str(tiny_model(tokenizer=True))})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(re.match(r"[123] (stop|length|max_turns) \[", line) for line in lines)


def test_the_recipe_about_data_makes_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    config = config_from_values({"model": "any", **yaml.safe_load(block)}, ["task.train_size=3", "task.eval_size=2"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rows = [{"question": f"{i} + {i}?", "solution": str(2 * i)} for i in range(5)]
    (tmp_path / "data" / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = make_task(config.task)
    assert task.rewards == (math_verify_reward,)
    assert sorted(example.columns["answer"] for example in (*task.train, *task.evaluation)) == list("02468")


def test_the_code_about_reward_models_runs(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    page = ROOT / "docs" / "algorithms.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    recipes = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (recipe,) = [text for text in recipes if "reward_model:" in text]
    assert "path/to/a/sequence/classifier" in block
    classifier = make_reward_model(tmp_path / "classifier")
    values = {
        "model": str(tiny_model(tokenizer=True)),
        "output_dir": str(tmp_path / "run"),
        "steps": 1,
        "engine": {"kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 6},
        "algorithm": {"group_size": 2, "prompts_per_step": 2},
        "loss": {"algorithm": "ppo"},
        "tracking": {"wandb": "disabled"},
    }
    train = [Example(f"{number} + 1 =", {"answer": str(number + 1)}) for number in range(4)]
    names = {"run": run, "config": config_from_values(values), "final_number_reward": final_number_reward}
    code = block.replace("path/to/a/sequence/classifier", str(classifier))
    exec(compile(code, str(page), "exec"), {**names, "train": train})
    (row,) = [row for row in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "reward" in row]
    both = row["rewards/final_number_reward/mean"] + row["rewards/RewardModel/mean"]
    assert row["reward"] == pytest.approx(both, rel=1e-5) and row["rewards/RewardModel/std"] > 0
    named = config_from_values({**values, **yaml.safe_load(recipe)})
    assert named.reward_model.weight == 0.5
