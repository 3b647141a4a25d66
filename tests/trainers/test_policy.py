"""The trainer's logprobs on a real engine's own model: the sampler's bits, and gradients that packing leaves alone."""

from __future__ import annotations

import math

import pytest
import torch

from rollout import LLM
from rollout_trainers.packing import PackedBatch, pack, pack_micro_batches
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.types import Example, Sample
from tests.support.live_bytes import LiveBytes
from tests.support.tiny import make_tiny_llama

EXAMPLES = [Example("abc"), Example("hello world, hello"), Example("q"), Example("what is 2 + 2?")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module", params=list(DTYPES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_engine(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def float32_engine(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_engine(tmp_path_factory, "float32")


def tiny_engine(tmp_path_factory: pytest.TempPathFactory, dtype: str) -> LLM:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, dtype=DTYPES[dtype])
    return LLM(folder, dtype=dtype, max_model_len=128, kv_cache_memory="4 MiB", block_size=4)


def rollouts(engine: LLM, temperature: float) -> list[Sample]:
    producer = RolloutProducer(engine, temperature, max_tokens=24, seed=3)
    samples = producer.produce(1, EXAMPLES, group_size=3)
    for index, sample in enumerate(samples):
        sample.advantage = 1.0 - 0.25 * index
    return samples


def shared_policy(engine: LLM, temperature: float, keep_reference: bool = False) -> SharedPolicy:
    return SharedPolicy(engine.shared_model(), temperature, keep_reference)


# case TR-06
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_before_an_update_the_trainers_logprobs_are_the_samplers_bit_for_bit(engine: LLM, temperature: float):
    samples = rollouts(engine, temperature)
    policy = shared_policy(engine, temperature)
    for batch in pack_micro_batches(samples, 100):
        with_gradient, entropy = policy.logprobs(batch)
        assert with_gradient.requires_grad
        assert torch.equal(with_gradient.detach(), batch.sampler_logprobs)
        assert torch.equal(policy.frozen_logprobs(batch), batch.sampler_logprobs)
        sampled_entropy = torch.cat([torch.from_numpy(samples[i].entropy) for i in batch.sample_indices])
        torch.testing.assert_close(entropy.detach(), sampled_entropy, rtol=1e-4, atol=1e-4)
        ratio = torch.exp(with_gradient.detach() - batch.old_logprobs)
        assert (ratio == 1.0).all()


# case TR-06
def test_a_missing_temperature_or_a_shift_by_one_position_would_be_seen(engine: LLM):
    samples = rollouts(engine, 0.7)
    batch = pack(samples, range(len(samples)))
    assert (shared_policy(engine, 1.0).frozen_logprobs(batch) - batch.sampler_logprobs).abs().max() > 1e-3
    policy = shared_policy(engine, 0.7)
    shifted = PackedBatch(**{**_fields(batch), "rows": (batch.rows - 1).clamp(min=0)})
    assert (policy.frozen_logprobs(shifted) - batch.sampler_logprobs).abs().max() > 1e-3


def _fields(batch: PackedBatch) -> dict:
    return {name: getattr(batch, name) for name in PackedBatch.__slots__}


def test_packing_changes_neither_the_logprobs_nor_beyond_rounding_the_gradients(engine: LLM):
    samples = rollouts(engine, 1.0)
    policy = shared_policy(engine, 1.0)
    parameters = dict(policy.model.named_parameters())

    def gradients(token_budget: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs: list[torch.Tensor] = [torch.empty(0)] * len(samples)
        sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in parameters.items()}
        for batch in pack_micro_batches(samples, token_budget):
            values, _ = policy.logprobs(batch)
            (values * batch.advantages).sum().backward()
            for index, part in zip(batch.sample_indices, values.detach().split(batch.lengths.tolist()), strict=True):
                logprobs[index] = part
            for name, parameter in parameters.items():
                assert parameter.grad is not None, name
                sums[name] += parameter.grad.float()
                parameter.grad = None
        return torch.cat(logprobs), sums

    packed_logprobs, packed = gradients(10_000)
    single_logprobs, single = gradients(1)  # one sample a batch
    assert torch.equal(packed_logprobs, single_logprobs)
    tolerance = 1e-5 if engine.config.dtype == "float32" else 3e-2
    for name in packed:
        difference = (packed[name] - single[name]).norm()
        assert difference <= tolerance * single[name].norm() + 1e-6, name


def test_gradients_equal_the_difference_quotient_of_the_logprobs(float32_engine: LLM):
    samples = rollouts(float32_engine, 1.0)
    policy = shared_policy(float32_engine, 1.0)
    batch = pack(samples, range(len(samples)))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator)
        direction /= direction.norm()
        (policy.logprobs(batch)[0] * batch.advantages).double().sum().backward()
        assert parameter.grad is not None, name
        slope = float((parameter.grad * direction).double().sum())
        for other in policy.model.named_parameters():
            other[1].grad = None
        step, values = 1e-2, []
        original = parameter.detach().clone()
        for sign in (1, -1):
            with torch.no_grad():
                parameter.copy_(original + sign * step * direction)
            values.append(float((policy.frozen_logprobs(batch) * batch.advantages).double().sum()))
        with torch.no_grad():
            parameter.copy_(original)
        quotient = (values[0] - values[1]) / (2 * step)
        assert math.isclose(slope, quotient, rel_tol=2e-2, abs_tol=2e-2), (name, slope, quotient)


def test_the_reference_is_the_initial_policy_and_the_own_weights_come_back(engine: LLM):
    samples = rollouts(engine, 1.0)
    batches = pack_micro_batches(samples, 60)
    policy = shared_policy(engine, 1.0, keep_reference=True)
    before = [policy.frozen_logprobs(batch) for batch in batches]
    originals = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    with torch.no_grad():
        for parameter in originals:
            dict(policy.model.named_parameters())[parameter].mul_(1.05)
    moved = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    references = policy.reference_logprobs(batches)
    for reference, expected, batch in zip(references, before, batches, strict=True):
        assert torch.equal(reference, expected)
        assert not torch.equal(policy.frozen_logprobs(batch), expected)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter.detach(), moved[name])
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(originals[name])
    with engine.policy_update() as update:
        update.load(policy.model.named_parameters())


def test_without_a_kept_reference_asking_for_it_is_an_error(engine: LLM):
    with pytest.raises(ValueError, match="keeps no reference"):
        shared_policy(engine, 1.0).reference_logprobs([])


def test_gradient_checkpointing_changes_no_bit_and_keeps_less(engine: LLM):
    samples = rollouts(engine, 0.7)
    batch = pack(samples, range(len(samples)))
    model = engine.shared_model()
    found = []
    for checkpointing in (False, True):
        policy = SharedPolicy(model, 0.7, gradient_checkpointing=checkpointing)
        with LiveBytes(model.parameters(), settle=0.0) as memory:
            logprobs, entropy = policy.logprobs(batch)
            kept = memory.live
        ((logprobs * batch.advantages).sum() + 0.1 * entropy.sum()).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = None
        found.append((logprobs.detach(), gradients, kept))
    (plain_logprobs, plain, plain_kept), (logprobs, gradients, kept) = found
    assert torch.equal(logprobs, plain_logprobs)
    assert torch.equal(logprobs, batch.sampler_logprobs)
    for name, gradient in plain.items():
        assert gradient is not None
        assert torch.equal(gradients[name], gradient), name
    assert kept < plain_kept / 2


def test_a_model_that_does_not_run_its_layers_so_is_refused(engine: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(engine.shared_model()), "supports_recompute", False)
    with pytest.raises(ValueError, match=r"policy.gradient_checkpointing.*supports_recompute"):
        SharedPolicy(engine.shared_model(), 1.0, gradient_checkpointing=True)
