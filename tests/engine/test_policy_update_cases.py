"""Policy updates through `LLM`, against transformers with the weights that were sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout import LLM, SamplingParams
from rollout.errors import (
    AdapterTensorError,
    EngineAsleepError,
    EngineUnusableError,
    PolicyUpdateError,
    PolicyVersionError,
    RolloutError,
    StaleWeightsError,
    TensorShapeError,
    TiedTensorError,
    UncoveredParametersError,
    UnknownTensorError,
)
from rollout.weights.receipt import Receipt
from rollout.weights.trainer_tensors import policy_tensors
from tests.support.oracle import load_reference
from tests.support.policies import (
    GREEDY,
    LONG,
    PUSHES,
    InFlight,
    Policies,
    assert_is_beginning,
    assert_same_samples,
    assert_sampled_by,
    push_mapping,
    random_prompt,
)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Push = Callable[[LLM, dict[str, torch.Tensor]], Receipt]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("untied"), tie=False, bias=True)


@pytest.fixture(params=list(PUSHES))
def push(request: pytest.FixtureRequest) -> Push:
    return PUSHES[request.param]


def idle_blocks(llm: LLM) -> int:
    llm.engine.scheduler.check_integrity()
    return llm.engine.scheduler.stats().num_free_blocks


def update_with(llm: LLM, weights: object) -> None:
    with llm.policy_update() as update:
        update.load(weights)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("length", [12, 50, 64])
def test_no_block_of_the_old_policy_is_hit_after_an_update(tied: Policies, push: Push, block_size: int, length: int):
    # case WS-01
    llm, prompt = tied.engine(block_size=block_size), random_prompt(length)
    first, second = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 1) // block_size * block_size
    assert_same_samples([first], [second])
    assert_sampled_by(tied.reference(0), first)

    receipt = push(llm, tied.weights(1))
    updated = llm.generate(prompt, GREEDY)[0]
    assert updated.num_cached_tokens == 0
    assert updated.receipt_id == receipt.id == llm.receipt.id  # pyright: ignore[reportOptionalMemberAccess]
    assert updated.policy_version == 1
    assert updated.outputs[0].policy_versions == [(1, 0, 12)]
    hit = llm.generate(prompt, GREEDY)[0]
    assert hit.num_cached_tokens == second.num_cached_tokens
    assert llm.reset_prefix_cache() is True
    cold = llm.generate(prompt, GREEDY)[0]
    assert cold.num_cached_tokens == 0
    fresh = tied.engine(1, block_size=block_size).generate(prompt, GREEDY)[0]
    assert_same_samples([updated, hit, cold], [fresh] * 3)
    assert_sampled_by(tied.reference(1), updated)
    assert first.outputs[0].token_ids != updated.outputs[0].token_ids


def test_samples_of_a_group_are_those_of_a_fresh_engine_after_an_update(untied: Policies, push: Push):  # case WS-01
    params = SamplingParams(n=8, seed=5, max_tokens=10, ignore_eos=True, top_p=0.9)
    llm, prompt = untied.engine(), random_prompt(22)
    before = llm.generate(prompt, params)
    push(llm, untied.weights(1))
    updated = llm.generate(prompt, params)
    assert updated[0].num_cached_tokens == 0
    assert_same_samples(updated, untied.engine(1).generate(prompt, params))
    assert [c.token_ids for c in before[0].outputs] != [c.token_ids for c in updated[0].outputs]


def test_going_back_to_an_earlier_policy_hits_nothing_of_its_first_time(tied: Policies, push: Push):  # case WS-01
    llm, prompt = tied.engine(), random_prompt(30)
    first = llm.generate(prompt, GREEDY)
    for number in (1, 0):
        push(llm, tied.weights(number))
        again = llm.generate(prompt, GREEDY)
        assert again[0].num_cached_tokens == 0
    assert_same_samples(first, again)


@pytest.mark.parametrize("steps", [1, 3, 30])
@pytest.mark.parametrize("n", [1, 2])
def test_an_update_returns_what_running_requests_have(tied: Policies, push: Push, steps: int, n: int):  # case WS-02
    params = SamplingParams(n=n, temperature=0, max_tokens=400, ignore_eos=True)
    prompts = [random_prompt(20 + 7 * index, seed=index) for index in range(8)]
    whole = tied.engine().generate(prompts[0], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))[0]
    llm = tied.engine(max_num_seqs=6)
    idle = idle_blocks(llm)
    with InFlight(llm, prompts, params) as flight:
        flight.wait_for_steps(steps)
        assert llm.reset_prefix_cache() is False
        push(llm, tied.weights(1)) if push is not PUSHES["shared"] else push_mapping(llm, tied.weights(1))
    assert [len(output.outputs) for output in flight.outputs] == [n] * 8
    for output in flight.outputs:
        for completion in output.outputs:
            assert completion.finish_reason == "abort"
            assert len(completion.raw_logprobs) == len(completion.token_ids) < 400
            assert output.policy_version == 0
    assert_is_beginning(flight.outputs[0].outputs[0], whole.outputs[0])
    assert idle_blocks(llm) == idle
    assert llm.reset_prefix_cache() is True
    updated = llm.generate(prompts, GREEDY)
    assert [output.num_cached_tokens for output in updated] == [0] * 8
    assert_same_samples(updated, tied.engine(1).generate(prompts, GREEDY))


def test_a_request_during_an_update_is_refused_and_the_update_succeeds(tied: Policies):  # case WS-02
    llm, prompt = tied.engine(), random_prompt(9)
    with llm.policy_update() as update:
        for call in (lambda: llm.generate(prompt, GREEDY), lambda: llm.score(prompt)):
            with pytest.raises(EngineAsleepError, match="a policy update is in progress"):
                call()
        update.load(tied.weights(1))
    assert_sampled_by(tied.reference(1), llm.generate(prompt, GREEDY)[0])


def test_a_second_update_at_the_same_time_is_refused_and_the_first_succeeds(tied: Policies):  # case WS-02
    llm, prompt = tied.engine(), random_prompt(9)
    with llm.policy_update() as update:
        with pytest.raises(PolicyUpdateError, match="another policy update is open"):
            update_with(llm, tied.weights(2))
        with pytest.raises(EngineAsleepError, match="in progress"):
            llm.generate(prompt, GREEDY)
        update.load(tied.weights(1))
    assert llm.policy_version == 1
    assert_sampled_by(tied.reference(1), llm.generate(prompt, GREEDY)[0])


@pytest.mark.parametrize(
    "order", [["weights", "update", "kv_cache"], ["all", "update"], ["update", "all"], ["kv_cache", "update"]]
)
def test_waking_never_brings_the_checkpoint_back(tmp_path: Path, order: list[str]):  # case WS-03
    policies = Policies.make(tmp_path, tie=False)
    weights = [policies.weights(number) for number in range(3)]
    references = [policies.reference(number) for number in range(3)]
    llm, prompt = policies.engine(), random_prompt(17)
    (policies.folders[0] / "model.safetensors").unlink()  # a reload would raise
    for number in (1, 2, 0, 1):
        llm.sleep(2)
        for step in order:
            if step == "update":
                push_mapping(llm, weights[number])
            else:
                llm.wake_up(None if step == "all" else [step])
        output = llm.generate(prompt, GREEDY)[0]
        assert output.num_cached_tokens == 0
        assert_sampled_by(references[number], output)
        assert llm.receipt is not None
        assert output.receipt_id == llm.receipt.id


def test_a_tied_head_follows_an_update_without_a_head(tied: Policies, push: Push):  # case WS-05
    llm, weights = tied.engine(), tied.weights(1)
    assert HEAD not in weights
    receipt = push(llm, weights)
    assert receipt.tensors[HEAD] == receipt.tensors[EMBED]
    assert_sampled_by(tied.reference(1), llm.generate(random_prompt(11), GREEDY)[0])
    score = llm.score(random_prompt(11))[0]
    assert len(score.logprobs) == 10


def test_an_update_of_the_embedding_alone_is_not_a_policy(tied: Policies):  # case WS-05
    llm = tied.engine()
    with pytest.raises(UncoveredParametersError, match=r"1 of 20 parameters"):
        update_with(llm, {EMBED: tied.weights(1)[EMBED]})
    with pytest.raises(EngineUnusableError, match="UncoveredParametersError"):
        llm.generate(random_prompt(5), GREEDY)


def test_a_tied_head_is_accepted_if_equal_and_refused_if_not(tied: Policies):  # case WS-05
    llm, weights, prompt = tied.engine(), tied.weights(1), random_prompt(11)
    old = llm.generate(prompt, GREEDY)
    with pytest.raises(TiedTensorError, match=r"lm_head\.weight and model\.embed_tokens\.weight are tied"):
        update_with(llm, {**weights, HEAD: weights[EMBED] * 1.5})
    llm.reset_prefix_cache()
    assert_same_samples(old, llm.generate(prompt, GREEDY))
    update_with(llm, {**weights, HEAD: weights[EMBED].clone()})
    assert_sampled_by(tied.reference(1), llm.generate(prompt, GREEDY)[0])


def test_an_untied_head_stays_when_only_the_embedding_changes(untied: Policies, push: Push):  # case WS-05
    llm, weights = untied.engine(), untied.weights(0)
    before = llm.receipt
    weights[EMBED] = untied.weights(1)[EMBED]
    receipt = push(llm, weights)
    assert before is not None
    changed = {name for name, value in receipt.tensors.items() if value != before.tensors[name]}
    assert changed == {EMBED}
    reference = untied.reference(0)
    reference.get_input_embeddings().weight.data.copy_(weights[EMBED])  # pyright: ignore[reportCallIssue]
    assert_sampled_by(reference, llm.generate(random_prompt(13), GREEDY)[0])


WRAPPERS = {
    "ddp": "module.{}",
    "compile": "_orig_mod.{}",
    "fsdp": "_fsdp_wrapped_module.{}",
    "peft": "base_model.model.{}",
    "combined": "module._orig_mod.base_model.model._fsdp_wrapped_module.{}",
    "repeated": "module.module._orig_mod._orig_mod.{}",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_names_change_every_parameter_once(untied: Policies, wrapper: str):  # case WS-08
    llm = untied.engine()
    before = llm.receipt
    weights = untied.weights(1)
    named = [(WRAPPERS[wrapper].format(name), tensor) for name, tensor in weights.items()]
    named = [(name.replace(".layers.1.", ".layers.1._checkpoint_wrapped_module."), tensor) for name, tensor in named]
    named = [(name.replace(".q_proj.", ".q_proj.base_layer."), tensor) for name, tensor in named]
    named = [(name.replace("norm.weight", "norm.modules_to_save.default.weight"), tensor) for name, tensor in named]
    with llm.policy_update() as update:
        assert sorted(update.load(named)) == sorted(weights)
    assert before is not None
    assert all(value != before.tensors[name] for name, value in update.receipt.tensors.items())
    assert update.receipt.bytes_copied == update.receipt.num_bytes
    fresh = untied.engine(1).receipt
    assert fresh is not None
    assert update.receipt.tensors == fresh.tensors
    assert update.receipt.fingerprint == fresh.fingerprint
    assert_sampled_by(untied.reference(1), llm.generate(random_prompt(13), GREEDY)[0])


@pytest.mark.parametrize("fault", ["adapter", "unknown", "missing", "empty", "placeholder", "nothing"])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_faulty_update_leaves_the_old_policy_or_refuses(untied: Policies, fault: str, lazy: bool):
    # cases WS-08, WS-10
    llm, prompt, weights = untied.engine(), random_prompt(13), untied.weights(1)
    old = llm.generate(prompt, GREEDY)
    name = "model.layers.0.self_attn.q_proj.weight"
    error: type[RolloutError] = UncoveredParametersError
    if fault == "adapter":
        weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] = torch.zeros(2, 64)
        error = AdapterTensorError
    elif fault == "unknown":
        weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 64)
        error = UnknownTensorError
    elif fault in ("empty", "placeholder"):
        weights[name] = torch.zeros(0) if fault == "empty" else weights[name][:7]
        error = TensorShapeError
    elif fault == "missing":
        del weights[name]
    else:
        weights = {}
    with pytest.raises(error):
        update_with(llm, iter(weights.items()) if lazy else weights)
    assert llm.policy_version == 0
    if fault == "nothing" or (not lazy and fault != "missing"):
        assert_same_samples(old, llm.generate(prompt, GREEDY))
        llm.verify()
    else:
        for call in (lambda: llm.generate(prompt, GREEDY), lambda: llm.score(prompt)):
            with pytest.raises(EngineUnusableError, match=error.__name__):
                call()
    push_mapping(llm, untied.weights(2))
    assert_sampled_by(untied.reference(2), llm.generate(prompt, GREEDY)[0])


def test_merged_lora_samples_as_transformers_merged_and_leaves_the_trainer_alone(untied: Policies):  # case WS-11
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(untied.folders[0], dtype=torch.float32)
    trainer = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    )
    for name, parameter in trainer.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    llm, prompt = untied.engine(), random_prompt(13)
    for _ in range(3):
        update_with(llm, policy_tensors(trainer))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_dict().items())
    output = llm.generate(prompt, GREEDY)[0]
    merged = trainer.merge_and_unload().eval()
    assert isinstance(merged, PreTrainedModel)
    assert_sampled_by(merged, output)
    with pytest.raises(AssertionError):
        assert_sampled_by(untied.reference(0), output)


def test_generation_is_refused_when_shared_weights_changed_without_an_update(tied: Policies):
    llm, prompt = tied.engine(), random_prompt(13)
    model = llm.shared_model()
    before = llm.generate(prompt, GREEDY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for call in (lambda: llm.generate(prompt, GREEDY), lambda: llm.score(prompt), llm.verify):
        with pytest.raises(StaleWeightsError):
            call()
    with llm.policy_update() as update:
        update.load(model.named_parameters())
    after = llm.generate(prompt, GREEDY)[0]
    assert after.num_cached_tokens == 0
    assert not np.array_equal(after.outputs[0].raw_logprobs, before[0].outputs[0].raw_logprobs)
    assert update.receipt.bytes_copied == 0
    assert llm.verify() is llm.receipt


def test_an_in_place_change_in_mid_flight_stops_the_requests(tied: Policies):
    llm, prompts = tied.engine(), [random_prompt(13), random_prompt(9, seed=1)]
    whole = llm.generate(prompts, LONG)
    model = llm.shared_model()
    flight = InFlight(llm, prompts, LONG).__enter__()
    flight.wait_for_steps(3)
    with torch.no_grad():
        embedding = model.get_parameter(EMBED)
        embedding.copy_(embedding.roll(1, dims=0))
    with pytest.raises(StaleWeightsError, match="changed in place"):
        flight.__exit__()
    with llm.policy_update() as update:
        update.load(model.named_parameters())
    updated = llm.generate(prompts, LONG)
    assert [output.num_cached_tokens for output in updated] == [0, 0]
    assert updated[0].outputs[0].token_ids != whole[0].outputs[0].token_ids
    assert update.receipt.id == updated[0].receipt_id


def test_versions_only_rise(tied: Policies):
    llm = tied.engine()
    with llm.policy_update(version=7) as update:
        update.load(tied.weights(1))
    assert llm.policy_version == update.receipt.policy_version == 7
    for version in (7, 3, 0):
        with pytest.raises(PolicyVersionError, match="above the engine's policy version 7"):
            llm.policy_update(version=version)
    assert_sampled_by(tied.reference(1), llm.generate(random_prompt(6), GREEDY)[0])


def test_a_bfloat16_engine_takes_float32_weights_and_holds_them_rounded(tied: Policies, tmp_path: Path):
    llm = tied.engine(dtype="bfloat16")
    push_mapping(llm, tied.weights(1))
    reference = load_reference(tied.folders[1]).to(torch.bfloat16).to(torch.float32)  # pyright: ignore[reportArgumentType]
    for name, tensor in llm.engine.parameters().items():
        assert torch.equal(tensor.float(), reference.get_parameter(name)), name
