"""A drafter with weights beside what comes between steps: errors, Ctrl-C, another pool. Tokens stay what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout import LLM, RequestOutput, SamplingParams
from rollout.core.schedule import DraftPlan
from rollout.core.scheduler import Scheduler
from rollout.engine.core import EngineCore
from tests.engine.test_resume import assert_same
from tests.support.tiny import make_tiny_llama

PROMPTS = [list(range(40, 60)), [3, 4, 5], [7, 8] * 9]
PARAMS = SamplingParams(n=2, max_tokens=30, seed=5, temperature=0.8, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and another one which draws the same tokens now and then."""
    paths = [tmp_path_factory.mktemp(name) for name in ("model", "drafter")]
    target, drafter = (
        make_tiny_llama(path, near_uniform=True, tokenizer=True, seed=seed) for seed, path in enumerate(paths)
    )
    return target, drafter


@pytest.fixture(scope="module")
def wanted(folders: tuple[Path, Path]) -> list[RequestOutput]:
    return LLM(folders[0], kv_cache_memory="2MiB", block_size=8).generate(PROMPTS, PARAMS)


def make(folders: tuple[Path, Path], *, right: bool = False, memory: str | None = None, **options: Any) -> LLM:
    speculative = {
        "method": "draft_model",
        "model": str(folders[0] if right else folders[1]),
        "draft_kv_cache_memory": memory,
        "max_batch_for_speculation": 64,
        "only_if_faster": False,
    }
    values = {"kv_cache_memory": "2MiB", "block_size": 8, **options}
    return LLM(folders[0], speculative_config=speculative, **values)


def scheduler(llm: LLM) -> Scheduler:
    assert isinstance(llm.engine, EngineCore)
    return llm.engine.scheduler


def num_held(llm: LLM) -> int:
    """Draft blocks that somebody holds."""
    planner = scheduler(llm).draft_planner
    assert planner is not None
    return planner.kv.pool.num_blocks - planner.kv.pool.num_free


def check(llm: LLM, outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for mine, other in zip(outputs, wanted, strict=True):
        for sample, expected in zip(mine.outputs, other.outputs, strict=True):
            assert_same(sample, expected)
    assert llm.get_metrics()["drafter_kv_cache_usage"] == num_held(llm) == 0
    scheduler(llm).check_integrity()


class Failing:
    """Stands before the drafter: in one of its calls there is an error, before or after it has done its work."""

    def __init__(self, llm: LLM, call: int, error: BaseException, after: bool) -> None:
        assert isinstance(llm.engine, EngineCore)
        self._propose = llm.engine.executor.worker.propose_drafts
        self._call, self._error, self._after = call, error, after
        self.num_calls = 0

    def __call__(self, plan: DraftPlan) -> dict[str, list[int]]:
        self.num_calls += 1
        guesses = self._propose(plan) if self._after or self.num_calls != self._call else {}
        if self.num_calls == self._call:
            raise self._error
        return guesses


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the device is gone")], ids=["ctrl-c", "error"])
@pytest.mark.parametrize(("call", "after"), [(1, False), (2, True), (4, False)])
def test_an_interrupted_drafter_loses_nothing(
    folders: tuple[Path, Path],
    wanted: list[RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    after: bool,
    error: BaseException,
) -> None:
    llm = make(folders)
    assert isinstance(llm.engine, EngineCore)
    failing = Failing(llm, call, error, after)
    monkeypatch.setattr(llm.engine.executor.worker, "propose_drafts", failing)
    llm.enqueue(PROMPTS, PARAMS)
    with pytest.raises(type(error)):
        while True:
            llm.step()
    assert failing.num_calls == call and num_held(llm) == 0
    scheduler(llm).check_integrity()
    assert scheduler(llm).num_running == 0
    check(llm, llm.wait_for_completion(), wanted)
    assert failing.num_calls > call


@pytest.mark.parametrize(("memory", "num_blocks"), [("16KiB", 2), ("48KiB", 6), ("1MiB", 128)])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_small_pools_of_both_change_nothing(
    folders: tuple[Path, Path], wanted: list[RequestOutput], memory: str, num_blocks: int, mode: str
) -> None:
    # The engine preempts, the drafter's KV goes and comes back, prompts come in chunks.
    llm = make(
        folders,
        right=True,
        memory=memory,
        kv_cache_memory="128KiB",
        preemption_mode=mode,
        swap_space="128KiB" if mode == "swap" else 0,
        max_num_batched_tokens=24,
    )
    for _ in range(2):
        check(llm, llm.generate(PROMPTS, PARAMS), wanted)
    metrics = llm.get_metrics()
    assert metrics["num_preemptions_total"] > 0
    assert 0 < metrics["accepted_draft_tokens_total"] == metrics["draft_tokens_total"]
    assert metrics["drafter_kv_cache_blocks"] == num_blocks
    assert metrics["drafter_computed_tokens_total"] > 40


def test_another_kv_pool_and_a_reset_change_nothing(folders: tuple[Path, Path], wanted: list[RequestOutput]) -> None:
    llm = make(folders)
    check(llm, llm.generate(PROMPTS, PARAMS), wanted)
    planner = scheduler(llm).draft_planner
    assert planner is not None and len(planner.kv.pool.index) > 0
    assert llm.reset_prefix_cache()
    assert len(planner.kv.pool.index) == 0
    check(llm, llm.generate(PROMPTS, PARAMS), wanted)
    llm.resize_kv_cache("1MiB")
    assert len(planner.kv.pool.index) == 0
    check(llm, llm.generate(PROMPTS, PARAMS), wanted)
    with pytest.raises(ValueError, match="propose_drafts"):
        llm.collective_rpc("propose_drafts")
