"""An engine of several processes is diagnosed like one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rollout import LLM, Cause, SamplingParams
from tests.support.oracle import load_reference
from tests.support.policies import random_prompt
from tests.support.trainers import overwrite_kv_cache

PARAMS = SamplingParams(n=2, max_tokens=12, seed=5, ignore_eos=True)
PROMPTS = [random_prompt(37, 1), random_prompt(19, 2), random_prompt(52, 3)]
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, kv_cache_memory="1MiB", data_parallel_size=2) as engine:
        yield engine


@pytest.mark.slow
def test_causes_are_named_across_processes(llm: LLM, folder: Path) -> None:
    reference = load_reference(folder)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert llm.diagnose(outputs, reference).verdict is Cause.NONE
    with torch.no_grad():
        reference.get_parameter(NAME)[3] += 1.0
    diagnosis = llm.diagnose(outputs, reference)
    assert diagnosis.causes == (Cause.WRONG_WEIGHTS,)
    assert diagnosis.evidence["tensors_differ"] == [NAME]
    overwrite_kv_cache(llm)
    stale = llm.diagnose(llm.generate(PROMPTS, PARAMS), load_reference(folder))
    assert stale.verdict is Cause.STALE_KV
