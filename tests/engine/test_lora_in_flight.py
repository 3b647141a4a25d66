"""Requests with adapters in flight while the policy is updated, and adapters through a roll-back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from safetensors.torch import load_file

from rollout import LLM, SamplingParams
from rollout.errors import PolicyUpdateError
from rollout.weights.target import InFlightMode
from rollout.weights.transaction import Outcome
from tests.support.adapters import peft_model, randomise
from tests.support.oracle import sampled_reference
from tests.support.policies import assert_same_samples, random_prompt
from tests.support.tiny import make_tiny_llama

PARAMS = SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True)
PROMPTS = [random_prompt(17), random_prompt(9, seed=1)]
HELD: list[InFlightMode] = ["keep", "recompute"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def engine_with(folder: Path, model: PeftModel) -> LLM:
    """An engine on policy 1: the checkpoint and the adapter "policy"."""
    llm = LLM(folder, kv_cache_memory="2MiB", block_size=4, enable_lora=True)
    with llm.policy_update() as update:
        update.load_adapter("policy", model)
    return llm


def started(llm: LLM) -> None:
    """One prompt with the adapter and one without, some steps on."""
    llm.enqueue(PROMPTS, PARAMS, lora_request=["policy", None])
    for _ in range(6):
        llm.step()


@pytest.mark.parametrize("mode", HELD)
def test_requests_go_on_with_what_their_adapter_is_now(folder: Path, mode: InFlightMode):  # cases WS-01, WS-02
    model = peft_model(folder, 0)
    llm = engine_with(folder, model)
    started(llm)
    randomise(model, 1)
    with llm.policy_update(in_flight=mode) as update:
        update.load_adapter("policy", model)
    with_adapter, without = llm.wait_for_completion()
    for output in (with_adapter, without):
        assert output.receipt_ids[2] == update.receipt.id
        assert [[span.version for span in sample.policy_versions] for sample in output.outputs] == [[1, 2]] * 2
    if mode == "recompute":
        for sample in with_adapter.outputs:
            boundary = sample.policy_versions[1].start
            expected = sampled_reference(model, PROMPTS[0], sample.token_ids)  # pyright: ignore[reportArgumentType]
            np.testing.assert_allclose(sample.raw_logprobs[boundary:], expected[boundary:], atol=1e-4)
    fresh = engine_with(folder, model)
    assert_same_samples([without], fresh.generate([PROMPTS[1]], PARAMS))  # the base did not change
    for prompt in (PROMPTS[0], PROMPTS[0] + with_adapter.outputs[0].token_ids):
        now = llm.generate([prompt], PARAMS, lora_request="policy")
        assert_same_samples(now, fresh.generate([prompt], PARAMS, lora_request="policy"))


@pytest.mark.parametrize(
    ("brings", "fault"),
    [
        ("adapter", "block"),
        ("adapter", "verify"),
        ("adapter", "invalidated"),
        ("adapter and weights", "block"),
        ("adapter and weights", "verify"),
        ("adapter and weights", "invalidated"),
        ("adapter and some weights", "coverage"),
    ],
)
@pytest.mark.parametrize("mode", HELD)
def test_the_old_adapter_comes_back_with_the_old_weights(folder: Path, mode: InFlightMode, fault: str, brings: str):
    model = peft_model(folder, 0)
    llm = engine_with(folder, model)
    whole = llm.generate(PROMPTS, PARAMS, lora_request=["policy", None])
    before = llm.receipt
    started(llm)
    randomise(model, 1)
    weights = {name: tensor * 1.1 for name, tensor in load_file(folder / "model.safetensors").items()}
    scheduler = llm.engine.scheduler
    set_version = scheduler.set_policy_version

    def failing_afterwards(version: int, keep_kv: bool = False) -> None:
        patch.setattr(scheduler, "set_policy_version", set_version)
        set_version(version, keep_kv)
        raise RuntimeError("injected")

    update = llm.policy_update(in_flight=mode, roll_back=True)
    with pytest.raises((RuntimeError, PolicyUpdateError)), pytest.MonkeyPatch.context() as patch, update:
        update.load_adapter("policy", model)
        if brings != "adapter":
            update.load(dict(list(weights.items())[: 5 if "some" in brings else None]))
        if fault == "block":
            raise RuntimeError("injected")
        if fault == "verify":
            patch.setattr(llm.engine, "stale_copies", failing_once(llm, patch))
        elif fault == "invalidated":
            patch.setattr(scheduler, "set_policy_version", failing_afterwards)
    assert update.outcome in (Outcome.ROLLED_BACK, Outcome.UNCHANGED)
    assert llm.receipt == before == llm.verify()
    assert (llm.policy_version, llm.engine.scheduler.policy_version) == (1, 1)
    outputs = llm.wait_for_completion()
    assert_same_samples(outputs, whole)
    assert [sample.policy_versions for output in outputs for sample in output.outputs] == [[(1, 0, 20)]] * 4
    assert_same_samples(llm.generate(PROMPTS, PARAMS, lora_request=["policy", None]), whole)


def failing_once(llm: LLM, patch: pytest.MonkeyPatch) -> Any:
    """In the place of `stale_copies`, which verification asks for: the first call raises."""
    real = llm.engine.stale_copies

    def fails() -> list[str]:
        patch.setattr(llm.engine, "stale_copies", real)
        raise RuntimeError("injected")

    return fails
