"""Requests with LoRA adapters: PEFT's logprobs, every row as if it were alone, adapters that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from rollout import LLM, LoRARequest, RequestOutput, SamplingParams
from rollout.errors import EngineAsleepError, PolicyUpdateError, StaleWeightsError, WeightsNotLoadedError
from rollout.models.llama import LlamaForCausalLM
from rollout.models.registry import ModelRegistry
from tests.support.adapters import peft_model, saved
from tests.support.oracle import load_reference, reference_logprobs, sampled_reference
from tests.support.policies import assert_same_samples, random_prompt
from tests.support.tiny import make_tiny_llama

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
PROMPTS = [random_prompt(length, seed=length) for length in (9, 9, 3, 17)]


@dataclass(frozen=True)
class World:
    """A checkpoint, and adapters a (all layers, rank 4) and b (some layers, rank 3, rsLoRA) over it."""

    folder: Path
    plain: PreTrainedModel
    a: PeftModel
    b: PeftModel
    requests: dict[str, LoRARequest]

    def engine(self, **options: Any) -> LLM:
        settings = {"kv_cache_memory": "2MiB", "block_size": 4, "enable_lora": True, "max_loras": 2, **options}
        return LLM(self.folder, **settings)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("lora")
    folder = make_tiny_llama(path / "model", bias=True)
    a = peft_model(folder, 1)
    b = peft_model(folder, 2, r=3, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"])
    requests = {"a": saved(a, path, "a", 1), "b": saved(b, path, "b", 2)}
    return World(folder, load_reference(folder), a, b, requests)


def assert_close(model: nn.Module, output: RequestOutput) -> None:
    for completion in output.outputs:
        expected = sampled_reference(model, output.prompt_token_ids, completion.token_ids)  # type: ignore[arg-type]
        np.testing.assert_allclose(completion.raw_logprobs, expected, atol=1e-4)


def differ(one: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.outputs[0].raw_logprobs[0] != b.outputs[0].raw_logprobs[0] for a, b in pairs)


def test_logprobs_are_those_of_peft_in_float32_with_forks_and_without_an_adapter(world: World) -> None:
    llm, requests = world.engine(), world.requests
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True, n=3)
    outputs = llm.generate(PROMPTS, params, lora_request=[requests["a"], None, requests["b"], requests["a"]])
    for output, model in zip(outputs, (world.a, world.plain, world.b, world.a), strict=True):
        assert_close(model, output)
    assert [output.lora_request for output in outputs] == [requests["a"], None, requests["b"], requests["a"]]
    assert llm.list_loras() == {1, 2}


def test_score_chat_and_enqueue_take_adapters(world: World, tmp_path: Path) -> None:
    llm, requests = world.engine(), world.requests
    (score,) = llm.score([PROMPTS[3]], lora_request=requests["a"])
    rows = reference_logprobs(world.a, PROMPTS[3])[:-1]  # type: ignore[arg-type]
    expected = rows[torch.arange(len(rows)), torch.tensor(PROMPTS[3][1:])].numpy()
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)
    llm.enqueue(PROMPTS[:2], PARAMS, lora_request=["a", requests["b"]])
    outputs = llm.wait_for_completion()
    assert_close(world.a, outputs[0])
    assert_close(world.b, outputs[1])
    folder = make_tiny_llama(tmp_path / "chat", tokenizer=True)
    request = saved(peft_model(folder, 5), tmp_path, "a", 1)
    talker = LLM(folder, kv_cache_memory="2MiB", enable_lora=True)
    messages = [{"role": "user", "content": "hi"}]
    with_adapter = talker.chat(messages, PARAMS, lora_request=request)
    assert differ(with_adapter, talker.chat(messages, PARAMS))


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"kernels": "reference"}, {"enforce_eager": True}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_of_a_mixed_batch_has_the_bits_that_it_has_alone(
    world: World, options: dict[str, Any], dtype: str
) -> None:
    choices = [world.requests["a"], None, world.requests["b"], None]
    together = world.engine(dtype=dtype, **options).generate(PROMPTS, PARAMS, lora_request=choices)
    plain = LLM(world.folder, kv_cache_memory="2MiB", block_size=4, dtype=dtype, **options)
    for index, choice in enumerate(choices):
        if choice is None:
            alone = plain.generate(PROMPTS[index], PARAMS)  # an engine that knows nothing of adapters
        else:
            alone = world.engine(dtype=dtype, max_loras=1, **options).generate(
                PROMPTS[index], PARAMS, lora_request=choice
            )
        assert_same_samples([together[index]], alone)


def test_an_int8_engine_applies_the_adapter_to_its_rounded_weights(world: World) -> None:
    llm = world.engine(quantization="int8")
    output = llm.generate(PROMPTS[0], PARAMS, lora_request=world.requests["a"])[0]
    expected = sampled_reference(world.a, PROMPTS[0], output.outputs[0].token_ids)  # type: ignore[arg-type]
    without = sampled_reference(world.plain, PROMPTS[0], output.outputs[0].token_ids)
    error = np.abs(output.outputs[0].raw_logprobs - expected).mean()
    assert error < 0.1 * np.abs(without - expected).mean()


def test_recorded_and_eager_steps_with_adapters_agree_bit_for_bit(world: World) -> None:
    choices = [world.requests["a"], None, world.requests["b"], world.requests["a"]]
    eager = world.engine(enforce_eager=True)
    expected = eager.generate(PROMPTS, PARAMS, lora_request=choices)
    llm = world.engine()
    programs = llm.collective_rpc(lambda worker: worker.runner.decode_programs)[0]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):  # replays take other adapters in the same rows
        outputs = llm.generate([PROMPTS[i] for i in order], PARAMS, lora_request=[choices[i] for i in order])
        assert_same_samples(outputs, [expected[i] for i in order])
    assert programs.problem is None and programs.recorded_sizes == [4]
    plain = llm.generate(PROMPTS, PARAMS)
    assert_same_samples(plain, LLM(world.folder, kv_cache_memory="2MiB", block_size=4).generate(PROMPTS, PARAMS))
    assert set(programs._recorded) == {(4, True), (4, False)}


def test_recorded_steps_with_several_rows_a_sequence_apply_the_adapter_to_each(world: World) -> None:
    request = world.requests["a"]
    (drawn,) = world.engine(enforce_eager=True).generate([PROMPTS[0]], PARAMS, lora_request=request)
    forced = replace(PARAMS, forced_token_ids=drawn.outputs[0].token_ids[:8])
    llm = world.engine(max_num_batched_tokens=3)
    assert_same_samples(llm.generate([PROMPTS[0]], forced, lora_request=request), [drawn])
    programs = llm.collective_rpc(lambda worker: worker.runner.decode_programs)[0]
    assert (3, True) in programs._recorded


def test_a_step_without_adapters_makes_the_calls_of_an_engine_without_them(world: World) -> None:
    calls = []
    for llm in (world.engine(), LLM(world.folder, kv_cache_memory="2MiB", block_size=4)):
        llm.generate(PROMPTS, PARAMS)
        calls.append(llm.collective_rpc(lambda worker: worker.runner.decode_programs._recorded[4, False])[0].program)
    assert calls[0].names == calls[1].names


def test_only_projections_that_an_adapter_in_memory_changes_are_computed(world: World) -> None:
    llm = world.engine()
    recorded: dict[tuple[int, bool], Any] = llm.collective_rpc(lambda worker: worker.runner.decode_programs)[
        0
    ]._recorded

    def shrinks(choice: str) -> int:
        llm.generate([[5, 6]], PARAMS, lora_request=world.requests[choice])
        programs = llm.collective_rpc(lambda worker: worker.runner.decode_programs)[0]
        return programs._recorded[1, True].program.names.count("lora_shrink")

    assert recorded == {}
    assert shrinks("b") == 2 * 3
    alone = llm.generate(PROMPTS, PARAMS, lora_request="b")
    assert shrinks("a") == 2 * 7
    assert_same_samples(llm.generate(PROMPTS, PARAMS, lora_request="b"), alone)
    llm.remove_lora(1)
    assert shrinks("b") == 2 * 3


def test_cached_blocks_are_never_shared_between_adapters(world: World) -> None:
    # case WS-01
    llm, prompt = world.engine(), random_prompt(21)
    fresh = {
        name: world.engine(enable_prefix_caching=False).generate(prompt, PARAMS, lora_request=choice)
        for name, choice in (("a", world.requests["a"]), ("b", world.requests["b"]), ("none", None))
    }
    for _ in range(2):
        for name, choice in (("none", None), ("a", world.requests["a"]), ("b", world.requests["b"])):
            assert_same_samples(llm.generate(prompt, PARAMS, lora_request=choice), fresh[name])
    hits = [llm.generate(prompt, PARAMS, lora_request=choice)[0].num_cached_tokens for choice in ("a", "b", None)]
    assert hits == [20, 20, 20]


def test_an_adapter_that_is_read_anew_hits_no_block_of_the_old_one(world: World, tmp_path: Path) -> None:
    # case WS-01
    request = saved(peft_model(world.folder, 7), tmp_path, "x", 9)
    llm, prompt = world.engine(), random_prompt(21)
    before = llm.generate(prompt, PARAMS, lora_request=request)
    receipt = llm.receipt
    saved(peft_model(world.folder, 8), tmp_path, "x", 9)
    assert_same_samples(llm.generate(prompt, PARAMS, lora_request=request), before)  # the folder is not looked at
    assert llm.add_lora(request) is False
    after = llm.generate(prompt, PARAMS, lora_request=request)
    assert after[0].num_cached_tokens == 0 and differ(after, before)
    assert llm.receipt is not None and receipt is not None and llm.receipt.id != receipt.id
    assert after[0].receipt_id == llm.receipt.id


def test_the_least_recently_used_adapter_makes_room_and_comes_back_from_its_folder(
    world: World, tmp_path: Path
) -> None:
    third = saved(peft_model(world.folder, 3), tmp_path, "c", 3)
    llm = world.engine()
    choices = {"a": world.requests["a"], "b": world.requests["b"], "c": third}
    first = {name: llm.generate(PROMPTS[:1], PARAMS, lora_request=choice) for name, choice in choices.items()}
    assert llm.list_loras() == {2, 3}
    llm.generate(PROMPTS[:1], PARAMS, lora_request="b")
    assert_same_samples(llm.generate(PROMPTS[:1], PARAMS, lora_request=choices["a"]), first["a"])
    assert llm.list_loras() == {1, 2}
    assert llm.pin_lora(1) is True
    llm.generate(PROMPTS[:1], PARAMS, lora_request="b")
    llm.generate(PROMPTS[:1], PARAMS, lora_request="a")
    llm.generate(PROMPTS[:1], PARAMS, lora_request="b")
    llm.generate(PROMPTS[:1], PARAMS, lora_request=third)  # a is older, and pinned
    assert llm.list_loras() == {1, 3}
    with pytest.raises(ValueError, match=r"there is no adapter 'b'; adapters in memory: 'a' \(1\), 'c' \(3\)"):
        llm.generate(PROMPTS[:1], PARAMS, lora_request="b")


def test_more_adapters_than_there_is_room_for_are_refused_with_what_is_known(world: World) -> None:
    llm = world.engine(max_loras=1)
    with pytest.raises(ValueError, match=r"no room for the adapter 'b': max_loras=1 .*'a' \(1\).*raise max_loras"):
        llm.generate(PROMPTS[:2], PARAMS, lora_request=[world.requests["a"], world.requests["b"]])
    assert not llm.engine.has_unfinished
    llm.enqueue(PROMPTS[:1], PARAMS, lora_request=world.requests["a"])
    for call in (llm.remove_lora, lambda _: llm.add_lora(world.requests["a"])):
        with pytest.raises(ValueError, match="the adapter 'a' is in use: wait for its requests, or abort them"):
            call(1)
    with pytest.raises(ValueError, match="no room for the adapter 'b'"):
        llm.add_lora(world.requests["b"])
    assert_close(world.a, llm.wait_for_completion()[0])
    assert llm.add_lora(world.requests["b"]) is True
    assert llm.list_loras() == {2} and llm.remove_lora(2) is True and llm.remove_lora(2) is False
    assert llm.receipt is not None and llm.receipt.adapters == {}
    llm.verify()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("zebra", r"there is no adapter 'zebra'; adapters in memory: 'a' \(1\)"),
        (LoRARequest("zebra", 5), "there is no adapter 'zebra', and no lora_path to read"),
        (LoRARequest("zebra", 1), "lora_int_id=1 is the adapter 'a', not 'zebra'"),
        (LoRARequest("a", 4, "x"), r"the name is that of the adapter 'a' \(1\)"),
        (LoRARequest("a", 1, "/elsewhere"), "is not where the adapter 'a' in memory comes from"),
        (LoRARequest("zebra", 5, "/nowhere"), "lora_path='/nowhere' is not valid: there is no adapter_config.json"),
        (["a"], r"lora_request has 1 entries for 2 prompts"),
    ],
)
def test_what_names_no_adapter_is_refused_and_nothing_runs(world: World, choice: Any, message: str) -> None:
    llm = world.engine()
    llm.add_lora(world.requests["a"])
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPTS[:2], PARAMS, lora_request=choice)
    assert not llm.engine.has_unfinished and llm.list_loras() == {1}


def test_wrong_types_are_named(world: World) -> None:
    llm = world.engine()
    with pytest.raises(TypeError, match="lora_request=7 is not valid"):
        llm.generate(PROMPTS[:1], PARAMS, lora_request=7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lora_request holds 7"):
        llm.generate(PROMPTS[:1], PARAMS, lora_request=[7])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="lora_int_id=0 is not valid"):
        LoRARequest("a", 0)
    with pytest.raises(ValueError, match="lora_name='' is not valid"):
        LoRARequest("", 1)


def test_configurations_that_cannot_be_are_refused(world: World) -> None:
    for field, value in (("max_loras", 0), ("max_lora_rank", -1), ("enable_lora", 1)):
        with pytest.raises(ValueError, match=f"{field}={value}"):
            world.engine(**{field: value})
    with pytest.raises(ValueError, match="max_loras=2 is not used with enable_lora=False"):
        world.engine(enable_lora=False)
    llm = LLM(world.folder, kv_cache_memory="2MiB")
    with pytest.raises(ValueError, match="enable_lora=False"):
        llm.generate(PROMPTS[:1], PARAMS, lora_request="a")
    with pytest.raises(ValueError, match=r"has rank 4 in .*, the engine has memory for max_lora_rank=3"):
        world.engine(max_lora_rank=3).add_lora(world.requests["a"])


def test_a_model_that_applies_no_adapters_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    without = type("PlainLlama", (LlamaForCausalLM,), {"supports_lora": False})
    monkeypatch.setattr(ModelRegistry, "resolve", lambda config: without)
    with pytest.raises(ValueError, match="enable_lora=True is not supported by PlainLlama"):
        world.engine()


def test_adapters_for_another_model_are_refused_by_name(world: World, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", num_layers=3)
    with pytest.raises(ValueError, match=r"the adapter changes 'model.layers.2.*', which is no layer"):
        world.engine().add_lora(saved(peft_model(other, 1), tmp_path, "deep", 1))
    wide = make_tiny_llama(tmp_path / "wide", intermediate_size=128)
    with pytest.raises(
        ValueError, match=r"lora_A and lora_B of .*_proj have the shapes .*128.*, the engine's layer needs"
    ):
        world.engine().add_lora(saved(peft_model(wide, 1), tmp_path, "wide", 1))
    request = saved(peft_model(world.folder, 1), tmp_path, "head", 1)
    tensors = load_file(tmp_path / "head" / "adapter_model.safetensors")
    tensors = {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)} | tensors
    tensors["base_model.model.lm_head.lora_B.weight"] = torch.ones(131, 4)
    save_file(tensors, tmp_path / "head" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="the adapter changes 'lm_head', which is no layer"):
        world.engine().add_lora(request)


def test_an_edited_adapter_tensor_is_noticed(world: World) -> None:
    llm = world.engine()
    llm.add_lora(world.requests["a"])
    receipt = llm.verify()
    assert receipt.adapters.keys() == llm.engine.adapters().tensors().keys()  # type: ignore[union-attr]
    assert "a/scales" in receipt.adapters and len(receipt.adapters) == 2 * 2 * 7 + 1
    layer = llm.collective_rpc(lambda worker: worker.model)[0].model.layers[1].mlp.down_proj
    for tensor, place in ((layer.lora.a, (0, 3, 5)), (layer.lora.b, (0, 2, 1)), (layer.lora.scales, (0,))):
        before = float(tensor[place])
        tensor[place] = before + 1
        with pytest.raises(StaleWeightsError, match=r"1 tensors are not those of receipt .*: a/"):
            llm.verify()
        tensor[place] = before
        assert llm.verify() == receipt
    layer.lora.a[0, 9, 0] = 1.0  # beyond the adapter's rank
    with pytest.raises(StaleWeightsError, match=r"1 layers hold values beside their adapter \(first: a/model.layers.1"):
        llm.verify()


def test_level_1_keeps_adapters_and_level_2_drops_them(world: World) -> None:
    # case SW-01
    llm = world.engine()
    expected = llm.generate(PROMPTS, PARAMS, lora_request=world.requests["a"])
    held = llm.memory_ledger()["adapters"]
    assert 0 < held.resident <= held.reserved
    assert "adapters" not in llm.sleep(1).released
    llm.wake_up()
    assert_same_samples(llm.generate(PROMPTS, PARAMS, lora_request="a"), expected)
    assert llm.sleep(2).released["adapters"] == held.resident
    with pytest.raises(EngineAsleepError, match="the weights sleep"):
        llm.add_lora(world.requests["a"])
    llm.wake_up()
    with pytest.raises(WeightsNotLoadedError):
        llm.add_lora(world.requests["a"])
    llm.reload_weights()
    assert llm.list_loras() == set()
    for choice in ("a", world.requests["a"], LoRARequest("a", 1)):  # nothing is read again by the way
        with pytest.raises(ValueError, match=r"the adapter 'a' was dropped by sleep\(level=2\): load it again"):
            llm.generate(PROMPTS, PARAMS, lora_request=choice)
    assert llm.receipt is not None and llm.receipt.adapters == {}
    assert llm.add_lora(world.requests["a"]) is True
    assert_same_samples(llm.generate(PROMPTS, PARAMS, lora_request="a"), expected)
    llm.verify()


def test_weights_that_a_trainer_shares_stay_at_level_2_and_adapters_go(world: World) -> None:
    llm = world.engine()
    expected = llm.generate(PROMPTS, PARAMS, lora_request=world.requests["a"])
    llm.shared_model()
    assert set(llm.sleep(2).released) >= {"adapters"}
    llm.wake_up(["kv_cache"])
    with pytest.raises(ValueError, match="was dropped by sleep"):
        llm.generate(PROMPTS, PARAMS, lora_request="a")
    llm.verify()
    llm.add_lora(world.requests["a"])
    assert_same_samples(llm.generate(PROMPTS, PARAMS, lora_request="a"), expected)


def test_adapters_are_left_alone_while_a_policy_update_is_open(world: World) -> None:
    llm = world.engine()
    llm.add_lora(world.requests["a"])
    with pytest.raises(ZeroDivisionError), llm.policy_update():
        for change in (lambda: llm.add_lora(world.requests["b"]), lambda: llm.remove_lora(1)):
            with pytest.raises(PolicyUpdateError, match="a policy update is open"):
                change()
        raise ZeroDivisionError
    assert llm.list_loras() == {1}


def test_the_trainers_own_forward_pass_of_the_shared_model_has_no_adapter(world: World) -> None:
    from rollout.worker.batch import ForwardBatch

    llm = world.engine()
    llm.add_lora(world.requests["a"])
    model, ids = llm.shared_model(), torch.tensor(PROMPTS[3])
    hidden = model(ids, torch.arange(len(ids)), ForwardBatch.packed(torch.tensor([0, len(ids)])))
    logprobs = model.compute_logits(hidden).double().log_softmax(-1)
    np.testing.assert_allclose(logprobs, reference_logprobs(world.plain, PROMPTS[3]), atol=1e-4)
    ids_of_rows = torch.zeros(len(ids), dtype=torch.int32)
    batch = ForwardBatch(torch.tensor([0, len(ids)], dtype=torch.int32), adapter_ids=ids_of_rows)
    for parameter in model.parameters():
        parameter.requires_grad_()
    with pytest.raises(ValueError, match="lora_shrink has no gradient"):
        model(ids, torch.arange(len(ids)), batch)


@pytest.mark.parametrize("caching", [True, False])
def test_forced_resumed_and_forked_samples_keep_their_adapter(world: World, caching: bool) -> None:
    llm = world.engine(enable_prefix_caching=caching)
    params = SamplingParams(n=2, max_tokens=20, seed=3, ignore_eos=True)
    adapters = [world.requests["a"], world.requests["b"], None]
    prompts = PROMPTS[:1] * 3
    whole = llm.generate(prompts, params, lora_request=adapters)
    forced = [replace(params, n=1, forced_token_ids=output.outputs[0].token_ids) for output in whole]
    for output, wanted in zip(llm.generate(prompts, forced, lora_request=adapters), whole, strict=True):
        assert_same_samples([output], [replace(wanted, outputs=wanted.outputs[:1])])
    ids = llm.enqueue(prompts, params, lora_request=adapters)
    for _ in range(7):
        llm.step()
    forks = [llm.fork(request_id, at=4) for request_id in ids]
    llm.step()
    llm.abort(ids)
    ended = {output.request_id: output for output in llm.wait_for_completion()}
    assert_same_samples(llm.resume([ended[name] for name in ids], params), whole)
    for name, adapter, wanted in zip(forks, adapters, whole, strict=True):
        fork = ended[name]
        assert fork.lora_request == adapter
        forced_alone = wanted.outputs[0].token_ids[:4]
        alone = replace(params, n=1, first_sample_index=fork.outputs[0].sample_index, forced_token_ids=forced_alone)
        assert_same_samples([fork], llm.generate(prompts[0], alone, lora_request=adapter))
