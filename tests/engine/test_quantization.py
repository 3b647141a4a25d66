"""`quantization="int8"`: the copies are read, always those of the weights, and never by a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.config import EngineConfig
from rollout.errors import (
    EngineUnusableError,
    PolicyUpdateTimeoutError,
    RolloutError,
    StaleWeightsError,
    WeightsNotLoadedError,
)
from rollout.models.products import matrix_products
from rollout.worker.batch import ForwardBatch
from rollout.worker.quantized import QuantizedWeights
from rollout_kernels import quantize_weight
from tests.support.policies import GREEDY, LONG, Policies, assert_same_samples, push_mapping, random_prompt

SAMPLED = SamplingParams(n=3, seed=11, max_tokens=9, ignore_eos=True, top_k=40)
PROMPTS = [random_prompt(21), random_prompt(40, seed=1)]
INT8: dict[str, Any] = {"quantization": "int8"}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def policies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("policies"), tie=request.param, dtype=torch.bfloat16)


def copies(llm: LLM) -> QuantizedWeights:
    quantized = llm.engine.executor.worker.quantized
    assert quantized is not None
    return quantized


def assert_copies_are_those_of_the_weights(llm: LLM) -> None:
    for product in matrix_products(llm.engine.executor.worker.model):
        fresh = quantize_weight(product.weight.detach())
        assert product.holder.int8 is not None
        assert torch.equal(product.holder.int8.values, fresh.values), product.name
        assert torch.equal(product.holder.int8.scales, fresh.scales), product.name


def assert_serves(llm: LLM, policies: Policies, number: int) -> None:
    """It samples what a new engine over that checkpoint samples, from copies of these weights."""
    assert_copies_are_those_of_the_weights(llm)
    llm.verify()
    fresh = policies.engine(number, **INT8)
    assert_same_samples(llm.generate(PROMPTS, GREEDY), fresh.generate(PROMPTS, GREEDY))
    assert_same_samples(llm.generate(PROMPTS, SAMPLED), fresh.generate(PROMPTS, SAMPLED))


def test_logprobs_are_close_to_those_of_the_weights_and_not_the_same(policies: Policies) -> None:
    exact, rounded = policies.engine(), policies.engine(**INT8)
    reference = policies.engine(kernels="reference", **INT8)
    for prompt in PROMPTS:
        logprobs = [llm.score(prompt)[0].logprobs[1:] for llm in (exact, rounded, reference)]
        difference = np.abs(logprobs[1] - logprobs[0])
        assert 1e-3 < difference.mean() < 0.1
        assert np.abs(logprobs[2] - logprobs[1]).mean() < difference.mean()  # the reference rounds alike


def test_every_product_reads_its_copy_and_verify_names_one_that_was_changed(policies: Policies) -> None:
    llm = policies.engine(**INT8)
    before = llm.score(PROMPTS[0])[0].logprobs[1:]
    products = matrix_products(llm.engine.executor.worker.model)
    assert len(products) == 2 * 4 + 1
    for product in products:
        copy = product.holder.int8
        assert copy is not None
        for part, tensor, change in (("values", copy.values, 16), ("scales", copy.scales, 0.5)):
            kept = tensor.clone()
            tensor[: len(tensor) // 2] = tensor[: len(tensor) // 2] - change
            assert np.abs(llm.score(PROMPTS[0])[0].logprobs[1:] - before).max() > 1e-5
            with pytest.raises(StaleWeightsError, match=rf"int8\.{product.name}\.{part}"):
                llm.verify()
            tensor.copy_(kept)
            llm.reset_prefix_cache()
    llm.verify()
    assert np.array_equal(llm.score(PROMPTS[0])[0].logprobs[1:], before)


def test_the_receipt_has_the_copies(policies: Policies) -> None:
    exact, rounded = policies.engine().receipt, policies.engine(**INT8).receipt
    assert exact is not None
    assert rounded is not None
    assert exact.copies == {}
    assert len(rounded.copies) == 2 * (2 * 4 + 1)
    assert "int8.lm_head.values" in rounded.copies
    assert "int8.model.layers.1.mlp.gate_up.scales" in rounded.copies
    assert rounded.fingerprint != exact.fingerprint
    assert rounded.parameters_fingerprint == exact.parameters_fingerprint
    assert rounded.tensors == exact.tensors


def push_shared(llm: LLM, weights: dict[str, torch.Tensor]) -> None:
    """A trainer owns the engine's tensors: changes them in place, then updates without moving a byte."""
    parameters = dict(llm.shared_model().named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    with pytest.raises(StaleWeightsError):
        llm.generate(PROMPTS, GREEDY)
    with llm.policy_update() as update:
        update.load(parameters)
    assert update.receipt.bytes_copied == 0


@pytest.mark.parametrize("push", [push_mapping, push_shared])
def test_copies_follow_every_update(policies: Policies, push: Callable[[LLM, dict[str, torch.Tensor]], object]) -> None:
    llm = policies.engine(**INT8)
    assert_serves(llm, policies, 0)
    for number in (1, 2, 1):
        push(llm, policies.weights(number))
        assert_serves(llm, policies, number)
    llm.reload_weights()
    assert_serves(llm, policies, 0)


def test_recorded_decode_steps_read_the_copies_too(policies: Policies) -> None:
    llm, eager = policies.engine(**INT8), policies.engine(enforce_eager=True, **INT8)
    for number in (0, 1):
        if number:
            for engine in (llm, eager):
                push_mapping(engine, policies.weights(number))
        assert_same_samples(llm.generate(PROMPTS, LONG), eager.generate(PROMPTS, LONG))
    programs = llm.engine.executor.worker.runner.decode_programs
    assert programs is not None
    assert programs.problem is None


def test_sleep_gives_the_copies_back_and_an_update_makes_them_again(policies: Policies) -> None:
    llm = policies.engine(**INT8)
    held = llm.memory_ledger()["quantized_weights"]
    assert held.reserved >= copies(llm).slab.num_bytes
    assert held.resident > 0
    assert "quantized_weights" not in llm.sleep(1).released
    llm.wake_up()
    assert_serves(llm, policies, 0)
    assert llm.sleep(2).released["quantized_weights"] == held.resident
    assert llm.memory_ledger()["quantized_weights"].resident == 0
    llm.wake_up()
    with pytest.raises(WeightsNotLoadedError):
        llm.generate(PROMPTS, GREEDY)
    push_mapping(llm, policies.weights(1))
    assert_serves(llm, policies, 1)


def test_after_sleep_a_shared_engine_refuses_until_an_update_makes_the_copies(policies: Policies) -> None:
    llm = policies.engine(**INT8)
    parameters = dict(llm.shared_model().named_parameters())
    llm.sleep(2)
    llm.wake_up()
    assert llm.memory_ledger()["quantized_weights"].resident == 0
    for call in (lambda: llm.generate(PROMPTS, GREEDY), lambda: llm.score(PROMPTS[0]), llm.verify):
        with pytest.raises(WeightsNotLoadedError, match="int8 copies of the weights were given back"):
            call()
    with pytest.raises(RuntimeError, match="stopped"), llm.policy_update():
        raise RuntimeError("stopped")
    with pytest.raises(WeightsNotLoadedError, match="int8 copies"):
        llm.generate(PROMPTS, GREEDY)
    with llm.policy_update() as update:
        update.load(parameters)
    assert_serves(llm, policies, 0)


def test_an_update_whose_quantisation_fails_never_leaves_old_copies_in_use(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = policies.engine(**INT8)
    parameters = dict(llm.shared_model().named_parameters())
    made = []

    def failing(weight: torch.Tensor, into: object) -> object:
        made.append(weight)
        if len(made) == 4:
            raise MemoryError("in the middle")
        return quantize_weight(weight, into)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("rollout.worker.quantized.quantize_weight", failing)
        with pytest.raises(MemoryError), llm.policy_update() as update:
            update.load(policies.weights(1))
    with pytest.raises(EngineUnusableError, match="in the middle"):
        llm.generate(PROMPTS, GREEDY)
    made.clear()
    push_mapping(llm, policies.weights(2))
    assert_serves(llm, policies, 2)
    with monkeypatch.context() as patch:  # the shared weights are as they were: the old policy is whole, its copies not
        patch.setattr("rollout.worker.quantized.quantize_weight", failing)
        with pytest.raises(MemoryError), llm.policy_update() as update:
            update.load(parameters)
    with pytest.raises(WeightsNotLoadedError, match="not made to the end"):
        llm.generate(PROMPTS, GREEDY)
    push_mapping(llm, policies.weights(1))
    assert_serves(llm, policies, 1)


def test_an_update_that_skips_the_copies_fails(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = policies.engine(**INT8)
    monkeypatch.setattr(llm.engine, "post_process", lambda: None)
    with pytest.raises(RolloutError, match=r"copies of parameters are not made of what was sent: int8\.model"):
        push_mapping(llm, policies.weights(1))
    with pytest.raises(EngineUnusableError):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    push_mapping(llm, policies.weights(1))
    assert_serves(llm, policies, 1)


def test_an_update_given_up_before_writing_keeps_the_old_copies(policies: Policies) -> None:
    llm = policies.engine(**INT8)
    with pytest.raises(PolicyUpdateTimeoutError), llm.policy_update(timeout=1e-9) as update:
        update.load(policies.weights(1))
    assert_serves(llm, policies, 0)


def test_a_trainer_computes_with_the_weights_themselves(policies: Policies) -> None:
    rounded, exact = policies.engine(**INT8).shared_model(), policies.engine().shared_model()
    ids = torch.tensor(PROMPTS[1])
    arguments = (ids, torch.arange(len(ids)), ForwardBatch.packed(torch.tensor([0, len(ids)])))
    with torch.no_grad():
        logits = [model.compute_logits(model(*arguments)) for model in (rounded, exact)]
        assert torch.equal(logits[0], logits[1])
    for model in (rounded, exact):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model.compute_logits(model(*arguments)).square().sum().backward()
    for one, other in zip(rounded.parameters(), exact.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_weights_that_are_not_numbers_end_requests_with_an_error(policies: Policies) -> None:
    llm, weights = policies.engine(**INT8), policies.weights(0)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    push_mapping(llm, weights)
    llm.verify()
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].finish_reason == "error"
    with pytest.raises(RuntimeError, match="scoring ended with error: the model's logits were not numbers"):
        llm.score(PROMPTS[0])
    push_mapping(llm, policies.weights(0))
    assert_serves(llm, policies, 0)


def test_float32_weights_have_copies_too(tmp_path: Path) -> None:
    policies = Policies.make(tmp_path, dtype=torch.float32)
    llm = policies.engine(**INT8)
    push_mapping(llm, policies.weights(1))
    assert_serves(llm, policies, 1)


def test_what_is_not_supported_is_refused(policies: Policies) -> None:
    for value in ("int4", "", 8, True):
        with pytest.raises(ValueError, match=f"quantization={value!r} is not valid: it must be one of None, 'int8'"):
            EngineConfig(model="m", quantization=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="remake_quantized_weights"):
        policies.engine(**INT8).collective_rpc("remake_quantized_weights")
