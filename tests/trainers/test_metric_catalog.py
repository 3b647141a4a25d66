"""The page about dashboards has every metric that runs log, and none that they don't."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rollout_trainers.alert_rules import RULES
from rollout_trainers.alert_table import LIMITS, alerts_as_markdown
from rollout_trainers.alerts_config import AlertsSection
from rollout_trainers.environments import Action, StepResult, ToolEnvironment
from rollout_trainers.layout import LAYOUT
from rollout_trainers.metric_catalog import CATALOG, catalog_as_markdown, describe
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.run_files import RunFiles, read_run
from rollout_trainers.types import Example, Task
from tests.support.tiny import make_tiny_llama

PAGE = Path(__file__).parents[2] / "docs" / "dashboards.md"
TRAIN = [Example([{"role": "user", "content": text}]) for text in ("abc", "what", "two", "q", "the")]

# Together these turn on all that a recipe can have logged.
OPTIONS = {
    "corrected": (
        "loss.algorithm=dapo",
        "loss.kl_coefficient=0.01",
        "loss.dual_clip=3",
        "algorithm.minibatches=2",
        "engine.quantization=int8",
        "engine.kv_cache_memory=null",
        "engine.memory_budget=4GiB",
        "algorithm.recompute_logprobs=true",
        "tracking.diagnose_above=1e-9",
    ),
    "ppo": ("loss.algorithm=ppo",),
    "ahead": ("asynchrony.mode=in_flight", "asynchrony.max_staleness=2", "engine.sleep=false", "steps=2"),
    "teacher": ("teacher.model={model}",),
    "tools": ("environment.max_turns=2",),
}


class Asked(ToolEnvironment):
    """One tool, which is not called; each turn earns the share of its token ids below 60."""

    def __init__(self) -> None:
        super().__init__([double])

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        return result._replace(reward=sum(token < 60 for token in action.token_ids) / len(action.token_ids))


def double(number: int) -> int:
    """
    Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


def share_of_low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFiles]:
    """One step of each, read back from its folder."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_tiny_llama(
        folder / "model",
        tokenizer=True,
        dtype=torch.bfloat16,
        near_uniform=True,
        max_position_embeddings=1024,
        eos_token_id=[2, *range(40, 60)],  # so that some completions end
    )
    for name, options in OPTIONS.items():
        values = {
            "model": str(model),
            "output_dir": str(folder / name),
            "steps": 1,
            "engine": {"max_model_len": 512, "kv_cache_memory": "4 MiB"},
            "sampling": {"max_tokens": 16},
            "algorithm": {"group_size": 3, "prompts_per_step": 3},
            "optimizer": {"learning_rate": 1e-3},
            "tracking": {"wandb": "disabled"},
        }
        config = config_from_values(values, [option.format(model=model) for option in options])
        if name == "tools":
            run(config, train=TRAIN, environment=Asked)
        else:
            run(
                config,
                task=Task("low ids", TRAIN, TRAIN[:2], (share_of_low_ids,), further_evaluations={"b": TRAIN[3:]}),
            )
    return {name: read_run(folder / name) for name in OPTIONS}


def test_every_metric_that_is_logged_is_in_the_catalogue_and_every_one_there_is_logged(runs: dict[str, RunFiles]):
    logged = {name for each in runs.values() for row in each.metrics for name in row if name != "step"}
    assert sorted(name for name in logged if describe(name) is None) == []
    found = {metric.name for name in logged if (metric := describe(name)) is not None}
    documented = {metric.name for group in CATALOG for metric in group.metrics}
    assert sorted(documented - found) == []


def test_the_histograms_of_the_page_are_those_that_are_logged(runs: dict[str, RunFiles]):
    logged = {name for each in runs.values() for row in each.histograms for name in row if name != "step"}
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(histogram/\w+)`", page, re.MULTILINE)) == logged
    assert {metric for section in LAYOUT for panel in section.panels for metric in panel.metrics} >= logged


def test_the_page_has_the_tables_of_the_catalogue_and_of_the_alerts():
    page = PAGE.read_text(encoding="utf-8")
    for table in (alerts_as_markdown(), catalog_as_markdown()):
        assert table in page, f"docs/dashboards.md must have:\n{table}"


def test_every_alert_and_every_limit_is_in_the_table():
    assert list(LIMITS) == list(RULES)
    limits = [limit for limit, _ in LIMITS.values() if limit is not None] + ["mismatch_exact", "enabled", "window"]
    assert sorted(limits) == sorted(AlertsSection.__dataclass_fields__)


def test_the_recipes_of_the_page_are_valid():
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    tracking, alerts = (config_from_values({"model": "any", **yaml.safe_load(block)}) for block in blocks)
    assert (tracking.tracking.tags, tracking.tracking.group) == (("grpo", "cpu"), "learning-rates")
    assert alerts.alerts == AlertsSection(window=10, entropy_floor=0.05, length_growth=None)


def test_the_files_of_the_page_are_those_of_a_run(runs: dict[str, RunFiles]):
    page = PAGE.read_text(encoding="utf-8").partition("## The report")[0]
    named = {name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w.]+)`", line)}
    named -= {"null"}
    there = {path.name for each in runs.values() for path in each.folder.iterdir() if path.is_file()} - {".lock"}
    assert named == there | {"reward.png"}


def test_a_healthy_step_has_no_alert_and_a_row_says_how_sure_the_policy_was(runs: dict[str, RunFiles]):
    assert runs["ppo"].alerts == [] and runs["tools"].alerts == []
    for row in runs["tools"].samples:
        assert row["logprob"] < 0 < row["entropy"]
