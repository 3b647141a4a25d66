"""`generate` against transformers, on architectures of odd sizes, and the forms of its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import LLM, ModelRegistry, SamplingParams
from rollout import generate as generate_once
from tests.support.oracle import assert_greedy_matches, load_reference, sampled_reference
from tests.support.tiny import make_tiny_llama

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie": False},
    "odd_sizes": {"hidden_size": 56, "num_heads": 7, "num_kv_heads": 7, "head_dim": 80, "tie": False},
    "odd_head_dim": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 20},
    "biases": {"bias": True, "tie": False},
    "llama3_rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear_rope_old_config": {"rope_scaling": {"type": "linear", "factor": 4.0}, "config_style": "rope_scaling"},
    "sharded": {"num_shards": 3},
    "bin_shards": {"num_shards": 2, "file_format": "bin", "tie": False},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_and_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, **ARCHITECTURES[name])
    reference = load_reference(folder)
    generator = np.random.default_rng(7)
    prompts = [generator.integers(3, 131, size).tolist() for size in (1, 5, 16, 33, 70)]
    llm = LLM(folder, kv_cache_memory="8MiB", max_num_batched_tokens=48, block_size=8)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert output.prompt_token_ids == prompt
        assert len(completion.token_ids) == 24 and completion.finish_reason == "length"
        assert_greedy_matches(reference, prompt, completion.token_ids)
        expected = sampled_reference(reference, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.raw_logprobs, expected, atol=1e-4)


def test_bfloat16_logprobs_are_close_to_float64(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, num_layers=3, dtype=torch.bfloat16)
    reference = load_reference(folder, torch.float64)
    prompt = list(range(3, 60))
    llm = LLM(folder, kv_cache_memory="8MiB")
    assert llm.collective_rpc(lambda worker: worker.dtype) == [torch.bfloat16]
    completion = llm.generate(prompt, SamplingParams(max_tokens=64, seed=1, ignore_eos=True))[0].outputs[0]
    expected = sampled_reference(reference, prompt, completion.token_ids)
    assert np.abs(completion.raw_logprobs - expected).mean() < 0.05


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_say_which_distribution_they_are_of(temperature: float, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, tie=False)
    reference = load_reference(folder)
    prompt = [5, 9, 77, 31]
    llm = LLM(folder, kv_cache_memory="4MiB")
    plain = SamplingParams(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
    completion = llm.generate(prompt, plain)[0].outputs[0]
    raw = sampled_reference(reference, prompt, completion.token_ids)
    tempered = sampled_reference(reference, prompt, completion.token_ids, temperature)
    np.testing.assert_allclose(completion.raw_logprobs, raw, atol=1e-4)
    np.testing.assert_allclose(completion.sampled_logprobs, tempered, atol=1e-4)
    assert (completion.kept_mass == 1.0).all()

    filtered = SamplingParams(temperature=temperature, top_k=9, top_p=0.8, max_tokens=40, seed=3, ignore_eos=True)
    completion = llm.generate(prompt, filtered)[0].outputs[0]
    tempered = sampled_reference(reference, prompt, completion.token_ids, temperature)
    np.testing.assert_allclose(completion.sampled_logprobs + np.log(completion.kept_mass), tempered, atol=1e-4)
    assert (completion.kept_mass < 1.0).any()
    assert completion.cumulative_logprob == pytest.approx(float(completion.raw_logprobs.sum()), abs=1e-4)


def test_scores_equal_transformers_in_one_chunk_and_in_many(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    reference = load_reference(folder)
    generator = np.random.default_rng(1)
    sequences = [generator.integers(0, 131, size).tolist() for size in (1, 2, 15, 16, 17, 48, 100)]
    scores = []
    for budget in (512, 16):
        llm = LLM(folder, kv_cache_memory="8MiB", max_num_batched_tokens=budget, block_size=8)
        for _ in range(2):  # a second time: cached blocks must not hide positions
            scores.append([output.logprobs for output in llm.score(sequences)])
    for other in scores[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(scores[0], other, strict=True))
    for ids, logprobs in zip(sequences, scores[0], strict=True):
        assert logprobs.shape == (len(ids) - 1,)
        np.testing.assert_allclose(logprobs, sampled_reference(reference, ids[:1], ids[1:]), atol=1e-4)


def test_scores_of_a_sample_are_its_raw_logprobs(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    prompt = [8, 9, 10, 11]
    completion = llm.generate(prompt, SamplingParams(max_tokens=50, seed=2, ignore_eos=True))[0].outputs[0]
    score = llm.score(prompt + completion.token_ids)[0]
    assert np.array_equal(score.logprobs[len(prompt) - 1 :], completion.raw_logprobs)


def test_outputs_come_in_input_order_with_parameters_of_their_own(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB", max_num_seqs=3)
    prompts = [[10 + i] * (1 + i) for i in range(9)]
    params = [SamplingParams(max_tokens=20 - 2 * i, n=1 + i % 3, seed=i, ignore_eos=True) for i in range(9)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs) for output in outputs] == [1 + i % 3 for i in range(9)]
    for i, output in enumerate(outputs):
        assert all(len(completion.token_ids) == 20 - 2 * i for completion in output.outputs)
        assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    assert llm.generate([], SamplingParams()) == []
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 3 prompts"):
        llm.generate([[3], [4], [5]], [SamplingParams(), SamplingParams()])


def test_requests_with_equal_prompts_compute_it_once_and_sample_as_each_alone(tmp_path: Path) -> None:
    prompts = [[*range(5, 26)], [7, 8, 9], [*range(5, 26)], [*range(5, 26)]]
    params = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=3 + number, ignore_eos=True, n=1 + number % 2)
        for number in range(4)
    ]
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="4MiB")
    rows: list[int] = []
    execute = llm.engine.executor.execute

    def watch(plan: Any) -> Any:
        rows.append(sum(len(sequence.token_ids) for sequence in plan.sequences))
        return execute(plan)

    llm.engine.executor.execute = watch  # type: ignore[method-assign]
    together = llm.generate(prompts, params)
    assert rows[0] == 21 + 3  # not the last block of the prompt once more for each request that has it
    for prompt, each, output in zip(prompts, params, together, strict=True):
        assert llm.reset_prefix_cache()
        alone = llm.generate(prompt, each)[0]
        for expected, sample in zip(alone.outputs, output.outputs, strict=True):
            assert sample.token_ids == expected.token_ids
            assert np.array_equal(sample.raw_logprobs, expected.raw_logprobs)


def test_text_ids_dicts_and_messages_are_prompts(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path, tokenizer=True), kv_cache_memory="4MiB")
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    ids = tokenizer("ab c").input_ids
    forms: list[Any] = ["ab c", {"prompt": "ab c"}, ids, {"prompt_token_ids": ids}, np.array(ids), tuple(ids)]
    same = [llm.generate(form, params)[0] for form in forms]
    assert all(output.prompt_token_ids == ids for output in same)
    assert len({tuple(output.outputs[0].token_ids) for output in same}) == 1
    assert same[0].prompt == "ab c" and same[2].prompt is None
    assert same[0].outputs[0].text == tokenizer.decode(same[0].outputs[0].token_ids, skip_special_tokens=True)

    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    for output in (*llm.generate(messages, params), *llm.generate([messages], params), *llm.chat(messages, params)):
        assert output.prompt_token_ids == list(rendered)
    assert len(llm.chat([messages, messages], params)) == 2


def test_generate_once_returns_outputs(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, seed=0, ignore_eos=True)
    outputs = generate_once(make_tiny_llama(tmp_path), [[5, 6]], params, kv_cache_memory="4MiB")
    assert len(outputs[0].outputs[0].token_ids) == 4


def test_every_eos_id_of_the_generation_config_ends_a_sample(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, eos_token_id=[2, 90], near_uniform=True)
    llm = LLM(folder, kv_cache_memory="8MiB")
    params = SamplingParams(n=32, max_tokens=400, seed=4)
    completions = llm.generate([5, 6, 7], params)[0].outputs
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in ended} == {2, 90}
    assert all(c.stop_reason is None and not {2, 90} & set(c.token_ids[:-1]) for c in ended)


def test_a_seedless_request_can_be_replayed_from_its_output(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB", seed=11)
    output = llm.generate([9, 8, 7], SamplingParams(n=3, max_tokens=12, ignore_eos=True))[0]
    for completion in output.outputs:
        params = SamplingParams(
            max_tokens=12, seed=completion.seed, first_sample_index=completion.sample_index, ignore_eos=True
        )
        again = llm.generate([9, 8, 7], params)[0].outputs[0]
        assert again.token_ids == completion.token_ids
        assert np.array_equal(again.sampled_logprobs, completion.sampled_logprobs)


def test_unknown_parameters_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_wrong_configuration_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    for field, value in {
        "block_size": 0,
        "max_num_seqs": -1,
        "gpu_memory_utilization": 1.5,
        "kv_cache_memory": "lots",
        "device": "tpu",
        "dtype": "float16",
        "max_model_len": 100_000,
        "seed": -1,
    }.items():
        with pytest.raises(ValueError, match=field):
            LLM(folder, **{field: value})
    with pytest.raises(ValueError, match="kv_cache_memory=1,024 is not valid: one block takes"):
        LLM(folder, kv_cache_memory=1024)
    with pytest.raises(ValueError, match="cuda"):
        LLM(folder, device="cuda")
    with pytest.raises(ValueError, match="architectures"):
        other = make_tiny_llama(tmp_path / "other")
        config = json.loads((other / "config.json").read_text()) | {"architectures": ["UnknownForCausalLM"]}
        (other / "config.json").write_text(json.dumps(config))
        LLM(other)


def test_the_pool_is_sized_from_the_memory_that_is_there(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    small = LLM(folder, gpu_memory_utilization=0.02).get_metrics()
    large = LLM(folder, gpu_memory_utilization=0.04).get_metrics()
    assert small["kv_cache_blocks"] < large["kv_cache_blocks"]
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        LLM(folder, gpu_memory_utilization=1e-6)


def test_an_architecture_can_be_registered_from_outside(tmp_path: Path) -> None:
    from rollout.models.llama import LlamaForCausalLM

    class RenamedForCausalLM(LlamaForCausalLM):
        pass

    folder = make_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["RenamedForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    ModelRegistry.register_model("RenamedForCausalLM", RenamedForCausalLM)
    assert "RenamedForCausalLM" in ModelRegistry.get_supported_archs()
    assert len(LLM(folder, kv_cache_memory="4MiB").generate([3, 4])[0].outputs[0].token_ids) > 0
    with pytest.raises(ValueError, match="already registered"):
        ModelRegistry.register_model("RenamedForCausalLM", LlamaForCausalLM)


def test_a_checkpoint_that_lacks_a_tensor_or_has_a_wrong_one_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        ({k: v for k, v in tensors.items() if k != name}, f"lacks 1 tensors: {name}"),
        (tensors | {name: torch.zeros(3, 5)}, r"has shape \(3, 5\), the model needs \(96, 64\)"),
        (tensors | {"model.layers.9.mlp.up_proj.weight": tensors[name].clone()}, "has no place"),
        (tensors | {"lm_head.weight": torch.zeros(131, 64)}, "ties 'lm_head.weight'"),
    ):
        save_file(change, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            LLM(folder, kv_cache_memory="4MiB")


def test_worker_extension_sees_the_worker(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    llm = LLM(folder, kv_cache_memory="4MiB", worker_extension_cls="tests.support.extension.WorkerExtension")
    assert llm.collective_rpc("scaled_layers", args=(10,), kwargs={"plus": 3}) == [23]
    assert llm.collective_rpc(lambda worker, x: worker.model.shape.vocab_size + x, args=(1,)) == [132]
    with pytest.raises(ValueError, match="no such public method"):
        llm.collective_rpc("missing")
    with pytest.raises(ValueError, match="worker_extension_cls"):
        LLM(folder, worker_extension_cls="tests.support.extension.Missing")
    with pytest.raises(ValueError, match="would replace: execute"):
        LLM(folder, worker_extension_cls="tests.support.extension.ClashingExtension")
