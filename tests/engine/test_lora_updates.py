"""Policy updates that bring an adapter alone, or with the weights: verified, in place, and whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict

from rollout import LLM, SamplingParams
from rollout.errors import (
    AdapterTensorError,
    DuplicateTensorError,
    EngineUnusableError,
    FingerprintMismatchError,
    PolicyUpdateError,
    TensorShapeError,
    UncoveredParametersError,
    UnknownTensorError,
)
from rollout.lora.memory import AdapterMemory
from rollout.weights.receipt import fingerprint_of
from tests.support.adapters import config_of, peft_model, randomise, saved
from tests.support.oracle import sampled_reference
from tests.support.policies import Policies, assert_same_samples, random_prompt
from tests.support.tiny import make_tiny_llama

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
PROMPT = random_prompt(21)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def engine(folder: Path, **options: Any) -> LLM:
    settings = {"kv_cache_memory": "2MiB", "block_size": 4, "enable_lora": True, **options}
    return LLM(folder, **settings)


def assert_is(model: PeftModel, llm: LLM, name: str = "policy", prompt: list[int] = PROMPT) -> None:
    (output,) = llm.generate([prompt], PARAMS, lora_request=name)
    for completion in output.outputs:
        expected = sampled_reference(model, prompt, completion.token_ids)  # type: ignore[arg-type]
        np.testing.assert_allclose(completion.raw_logprobs, expected, atol=1e-4)


def push_model(llm: LLM, model: PeftModel, folder: Path) -> None:
    with llm.policy_update() as update:
        update.load_adapter("policy", model)


def push_pairs(llm: LLM, model: PeftModel, folder: Path) -> None:
    with llm.policy_update() as update:
        update.load_adapter("policy", get_peft_model_state_dict(model), config_of(model))


def push_generator(llm: LLM, model: PeftModel, folder: Path) -> None:
    named = ((f"module.{name}", p) for name, p in model.named_parameters() if ".lora_" in name)
    with llm.policy_update() as update:
        update.load_adapter("policy", named, config_of(model).to_dict())


def push_folder(llm: LLM, model: PeftModel, folder: Path) -> None:
    model.save_pretrained(str(folder))
    with llm.policy_update() as update:
        update.load_adapter("policy", folder)


PUSHES: dict[str, Callable[[LLM, PeftModel, Path], None]] = {
    "model": push_model,
    "pairs": push_pairs,
    "generator": push_generator,
    "folder": push_folder,
}


@pytest.mark.parametrize("push", PUSHES)
def test_after_each_update_every_sample_is_of_the_new_adapter_and_no_block_of_the_old(
    push: str, folder: Path, tmp_path: Path
) -> None:
    # cases WS-01, WS-08
    llm, model = engine(folder), peft_model(folder, 0)
    for version in (1, 2, 3):
        randomise(model, version)
        PUSHES[push](llm, model, tmp_path)
        for cached in (0, 20):
            (output,) = llm.generate([PROMPT], PARAMS, lora_request="policy")
            assert (output.policy_version, output.num_cached_tokens) == (version, cached)
            assert output.receipt_id == llm.verify().id
        assert_is(model, llm)
        fresh = engine(folder, enable_prefix_caching=False)
        PUSHES[push](fresh, model, tmp_path)
        assert_same_samples([output], fresh.generate([PROMPT], PARAMS, lora_request="policy"))


def test_kilobytes_move_and_the_receipt_covers_the_adapter_and_the_old_weights(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m", hidden_size=256, intermediate_size=1024, vocab_size=2048)
    llm = engine(folder)
    before = llm.receipt
    assert before is not None
    model = peft_model(folder, 1, r=2, target_modules=["q_proj", "v_proj"])
    with llm.policy_update(version=7) as update:
        layers = update.load_adapter("policy", model)
    receipt = update.receipt
    assert sorted(layers) == sorted(f"model.layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qv")
    expected = {
        f"policy/{name.removeprefix('base_model.model.')}": fingerprint_of(tensor)
        for name, tensor in get_peft_model_state_dict(model).items()
    }
    assert {name: value for name, value in receipt.adapters.items() if name != "policy/scales"} == expected
    assert receipt.tensors == before.tensors
    assert receipt.parameters_fingerprint == before.parameters_fingerprint
    assert receipt.fingerprint != before.fingerprint and receipt.policy_version == 7
    assert 0 < receipt.bytes_copied < 0.01 * receipt.num_bytes
    assert llm.verify() == receipt


def test_bf16_engines_round_the_adapter_once_and_the_receipt_is_of_what_they_read(folder: Path) -> None:
    llm, model = engine(folder, dtype="bfloat16"), peft_model(folder, 1)
    with llm.policy_update() as update:
        update.load_adapter("policy", model)
    name = "model.layers.1.mlp.up_proj.lora_B.weight"
    sent = get_peft_model_state_dict(model)[f"base_model.model.{name}"]
    assert update.receipt.adapters[f"policy/{name}"] == fingerprint_of(sent.bfloat16())


def test_the_trainer_may_change_its_tensors_right_after_load_adapter(folder: Path) -> None:
    # case WS-10
    llm, model, kept = engine(folder), peft_model(folder, 1), peft_model(folder, 1)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield from get_peft_model_state_dict(model).items()

    with llm.policy_update() as update:
        update.load_adapter("policy", gathered(), config_of(model))
        randomise(model, 2)
    assert_is(kept, llm)


def test_an_update_of_the_weights_may_bring_an_adapter_and_keeps_those_it_does_not_name(tmp_path: Path) -> None:
    # case WS-11
    policies = Policies.make(tmp_path)
    llm = policies.engine(0, enable_lora=True, max_loras=2)
    stays, comes = peft_model(policies.folders[1], 1), peft_model(policies.folders[1], 2)
    llm.add_lora(saved(stays, tmp_path, "stays", 4))
    with llm.policy_update() as update:
        update.load(policies.weights(1))
        update.load_adapter("policy", comes)
    assert_is(stays, llm, "stays")
    assert_is(comes, llm)
    assert {name.partition("/")[0] for name in update.receipt.adapters} == {"stays", "policy"}
    assert llm.list_loras() == {4, 5}


def test_adapter_and_merged_weights_give_the_same_policy_and_the_trainers_base_never_moves(folder: Path) -> None:
    # case WS-11
    model = peft_model(folder, 3)
    base = {name: tensor.clone() for name, tensor in model.named_parameters() if "base_layer" in name}
    by_adapter, merged = engine(folder), engine(folder)
    with by_adapter.policy_update() as update:
        update.load_adapter("policy", model)
    with merged.policy_update() as update:
        update.load(model)
    one = by_adapter.generate([PROMPT], PARAMS, lora_request="policy")[0].outputs[0]
    other = merged.generate([PROMPT], PARAMS)[0].outputs[0]
    assert one.token_ids == other.token_ids
    np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-4)
    for name, tensor in model.named_parameters():
        assert "base_layer" not in name or torch.equal(tensor, base[name])


def test_an_update_of_one_adapter_leaves_the_other_and_the_weights_as_they_were(folder: Path, tmp_path: Path) -> None:
    llm, other = engine(folder, max_loras=2), peft_model(folder, 5)
    request = saved(other, tmp_path, "other", 1)
    alone = engine(folder).generate([PROMPT], PARAMS)
    before = llm.generate([PROMPT], PARAMS, lora_request=request)
    model = peft_model(folder, 6, r=2)
    with llm.policy_update() as update:
        update.load_adapter("policy", model)
    assert_same_samples(llm.generate([PROMPT], PARAMS, lora_request=request), before)
    assert_same_samples(llm.generate([PROMPT], PARAMS), alone)
    assert_is(model, llm)


def test_an_adapter_read_from_a_folder_is_replaced_by_an_update_and_the_folder_is_never_read_again(
    folder: Path, tmp_path: Path
) -> None:
    # case WS-03
    llm, model = engine(folder), peft_model(folder, 1)
    request = saved(model, tmp_path, "policy", 3)
    llm.generate([PROMPT], PARAMS, lora_request=request)
    randomise(model, 2)
    with llm.policy_update() as update:
        update.load_adapter("policy", model)
    output = llm.generate([PROMPT], PARAMS, lora_request=request)[0].outputs[0]
    expected = sampled_reference(model, PROMPT, output.token_ids)  # type: ignore[arg-type]
    np.testing.assert_allclose(output.raw_logprobs, expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"no room for the adapter 'next'.*of a policy update"):
        llm.add_lora(saved(model, tmp_path, "next", 4))  # the policy's adapter exists nowhere else
    llm.sleep(2)
    llm.wake_up()
    llm.reload_weights()
    with pytest.raises(ValueError, match="was dropped by sleep"):
        llm.generate([PROMPT], PARAMS, lora_request=request)
    with llm.policy_update() as update:
        update.load_adapter("policy", model)
    assert_is(model, llm)
    assert llm.list_loras() == {3}


def bad_rank(model: PeftModel) -> tuple[Any, Any]:
    return {n: t[:3] if "lora_A" in n else t for n, t in get_peft_model_state_dict(model).items()}, model


def missing_half(model: PeftModel) -> tuple[Any, Any]:
    pairs = get_peft_model_state_dict(model)
    return {name: tensor for name, tensor in pairs.items() if "layers.1.mlp.up_proj.lora_B" not in name}, model


def empty_placeholder(model: PeftModel) -> tuple[Any, Any]:
    pairs = get_peft_model_state_dict(model)
    return pairs | {name: torch.empty(0) for name in pairs if "layers.1.mlp.up_proj" in name}, model


def unknown_layer(model: PeftModel) -> tuple[Any, Any]:
    pairs = get_peft_model_state_dict(model)
    return {name.replace("layers.1.", "layers.9."): tensor for name, tensor in pairs.items()}, model


def too_wide(model: PeftModel) -> tuple[Any, Any]:
    pairs = get_peft_model_state_dict(model)
    return {n: torch.cat([t, t], 1) if "o_proj.lora_A" in n else t for n, t in pairs.items()}, model


def rank_too_high(model: PeftModel) -> tuple[Any, Any]:
    high = peft_model(Path(model.config.name_or_path), 1, r=17)
    return get_peft_model_state_dict(high), high


def base_tensors(model: PeftModel) -> tuple[Any, Any]:
    return dict(model.named_parameters()), model


BAD: dict[Callable[[PeftModel], tuple[Any, Any]], tuple[type[Exception], str]] = {
    bad_rank: (TensorShapeError, r"lora_A of .* has shape \(3, 64\) and lora_B \(.*, 4\)"),
    missing_half: (AdapterTensorError, "lora_B of model.layers.1.mlp.up_proj is missing"),
    empty_placeholder: (TensorShapeError, r"up_proj has shape \(0,\)"),
    unknown_layer: (UnknownTensorError, r"'model.layers.9.*', which is no layer"),
    too_wide: (TensorShapeError, r"o_proj have the shapes \(4, 128\)"),
    rank_too_high: (TensorShapeError, "rank 17 in .* max_lora_rank=16"),
    base_tensors: (AdapterTensorError, "it is no LoRA weight; give the PEFT model itself"),
}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_a_bad_adapter_is_refused_before_anything_is_written_and_the_old_one_serves(
    bad: Callable[[PeftModel], tuple[Any, Any]], folder: Path
) -> None:
    # cases WS-08, WS-10
    llm, model = engine(folder), peft_model(folder, 1)
    push_model(llm, model, folder)
    before, receipt = llm.generate([PROMPT], PARAMS, lora_request="policy"), llm.receipt
    pairs, of = bad(model)
    error, message = BAD[bad]
    with pytest.raises(error, match=message) as raised, llm.policy_update() as update:
        update.load_adapter("policy", pairs, config_of(of))
    assert "the old policy stays" in raised.value.__notes__[0]
    assert llm.verify() is receipt and llm.policy_version == 1
    assert_same_samples(llm.generate([PROMPT], PARAMS, lora_request="policy"), before)


@pytest.mark.parametrize("step", ["write", "check_holds", "tensors", "post_process"])
def test_a_fault_in_any_later_step_leaves_the_old_adapter_whole(
    step: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, model = engine(folder, max_loras=2), peft_model(folder, 1)
    push_model(llm, model, folder)
    before, receipt = llm.generate([PROMPT], PARAMS, lora_request="policy"), llm.receipt
    manager = llm.engine.adapters()
    assert manager is not None
    owner: Any = {"write": manager.memory, "post_process": llm.engine}.get(step, manager)

    def fail_once(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError(step)

    with pytest.raises(ZeroDivisionError), llm.policy_update() as update:
        update.load_adapter("policy", peft_model(folder, 2))
        update.load_adapter("new", peft_model(folder, 3, r=2))
        if step == "write":
            monkeypatch.setattr(AdapterMemory, "write", fail_once)
        else:
            monkeypatch.setattr(type(owner), step, fail_once)
    assert llm.list_loras() == {1} and llm.policy_version == 1
    assert llm.verify() is receipt
    assert_same_samples(llm.generate([PROMPT], PARAMS, lora_request="policy"), before)


def test_memory_that_does_not_hold_what_was_sent_fails_the_update(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, model = engine(folder), peft_model(folder, 1)
    push_model(llm, model, folder)
    before = llm.generate([PROMPT], PARAMS, lora_request="policy")
    write = AdapterMemory.write

    def flip(memory: AdapterMemory, slot: int, adapter: Any) -> None:
        monkeypatch.undo()
        write(memory, slot, adapter)
        memory.tensors(slot, {"model.layers.0.self_attn.q_proj": 4})["model.layers.0.self_attn.q_proj.lora_B.weight"][
            0, 0
        ] += 1

    with (
        pytest.raises(FingerprintMismatchError, match=r"'policy' in memory is not what was sent: .*q_proj.lora_B"),
        llm.policy_update() as update,
    ):
        update.load_adapter("policy", peft_model(folder, 2))
        monkeypatch.setattr(AdapterMemory, "write", flip)
    assert_same_samples(llm.generate([PROMPT], PARAMS, lora_request="policy"), before)


def test_an_adapter_alone_is_refused_where_the_weights_are_not_those_of_the_receipt(tmp_path: Path) -> None:
    # case SW-02
    policies = Policies.make(tmp_path)
    llm = policies.engine(0, enable_lora=True)
    model = peft_model(policies.folders[0], 1)
    llm.sleep(2)
    llm.wake_up()
    with (
        pytest.raises(UncoveredParametersError, match="20 of 20 parameters are not those of the last receipt"),
        llm.policy_update() as update,
    ):
        update.load_adapter("policy", model)
    with llm.policy_update() as update:
        update.load(policies.weights(0))
        update.load_adapter("policy", model)
    assert_is(model, llm)
    with pytest.raises(ZeroDivisionError), llm.policy_update() as update:
        update.load(list(policies.weights(1).items())[:3])
        raise ZeroDivisionError
    with pytest.raises(UncoveredParametersError, match="only adapters were loaded"), llm.policy_update() as update:
        update.load_adapter("policy", model)
    with pytest.raises(EngineUnusableError):
        llm.generate([PROMPT], PARAMS, lora_request="policy")
    with pytest.raises(UncoveredParametersError, match="3 of 20 parameters were loaded"), llm.policy_update() as update:
        update.load(list(policies.weights(0).items())[:3])
        update.load_adapter("policy", model)


def test_shared_weights_stay_shared_over_adapter_updates(folder: Path) -> None:
    llm, model = engine(folder), peft_model(folder, 1)
    shared = llm.shared_model()
    push_model(llm, model, folder)
    assert_is(model, llm)
    with torch.no_grad():
        next(shared.parameters()).mul_(2)
    with pytest.raises(PolicyUpdateError, match="1 of 20 parameters are not those"), llm.policy_update() as update:
        update.load_adapter("policy", model)


def test_an_update_that_is_misused_says_how_to_use_it(folder: Path) -> None:
    llm, model = engine(folder, max_loras=2), peft_model(folder, 1)
    pairs, config = get_peft_model_state_dict(model), config_of(model)

    def refused(match: str, *arguments: Any, error: type[Exception] = AdapterTensorError, **keywords: Any) -> None:
        with pytest.raises(error, match=match), llm.policy_update() as update:
            update.load_adapter(*arguments, **keywords)

    refused("names and tensors need config", "policy", pairs)
    refused("has its configuration with it", "policy", model, config)
    refused("has its configuration in it", "policy", folder, config)
    refused("adapter='x' is only used with a PEFT model", "policy", pairs, config, adapter="x")
    refused("lora_name='' is not valid", "", model, error=ValueError)
    refused("lora_path=.* is not valid: there is no adapter_config.json", "policy", folder, error=ValueError)
    with pytest.raises(DuplicateTensorError, match="'policy' was loaded twice"), llm.policy_update() as update:
        update.load_adapter("policy", model)
        update.load_adapter("policy", model)
    with pytest.raises(AdapterTensorError, match=r"update.load_adapter\(name, model\)"), llm.policy_update() as update:
        update.load(pairs)
    plain = LLM(folder, kv_cache_memory="2MiB")
    with pytest.raises(AdapterTensorError, match="enable_lora=True"), plain.policy_update() as update:
        update.load_adapter("policy", model)
    assert llm.policy_version == plain.policy_version == 0
