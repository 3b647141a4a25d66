"""Weights that change by any other way than a policy update are noticed, and methods that would do so are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.errors import PolicyUpdateError, StaleWeightsError
from tests.support.tiny import make_tiny_llama

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("method", ["reload_weights", "sleep", "execute"])
def test_methods_of_the_engines_own_are_not_called_by_rpc(method: str, tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="4MiB")
    with pytest.raises(ValueError, match=f"'{method}' cannot be called by RPC: use LLM"):
        llm.collective_rpc(method)


def test_weights_edited_by_a_callable_stop_the_engine_until_they_are_loaded_again(tmp_path: Path) -> None:
    # case WS-03
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="4MiB")
    expected = llm.generate([5, 6, 7], PARAMS)[0].outputs[0].token_ids

    def edit(worker: object) -> None:
        with torch.no_grad():
            worker.parameters()["model.layers.0.mlp.up_proj.weight"].mul_(-1)  # type: ignore[attr-defined]

    llm.collective_rpc(edit)
    with pytest.raises(StaleWeightsError, match="outside a policy update"):
        llm.generate([5, 6, 7], PARAMS)
    with pytest.raises(StaleWeightsError, match=r"up_proj|gate_up"):
        llm.verify()
    receipt = llm.reload_weights()
    output = llm.generate([5, 6, 7], PARAMS)[0]
    assert output.outputs[0].token_ids == expected
    assert output.receipt_id == receipt.id and output.num_cached_tokens == 0


def test_the_engine_does_not_sleep_inside_a_policy_update(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="4MiB")
    weights = {name: tensor.clone() for name, tensor in llm.shared_model().named_parameters()}
    with llm.policy_update() as update:
        update.load(weights)
        with pytest.raises(PolicyUpdateError, match="cannot sleep"):
            llm.sleep(2)
    assert llm.generate([5, 6, 7], PARAMS)[0].policy_version == 1


def test_bad_prompts_of_every_kind_name_their_index_and_leave_the_others_alone(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path, tokenizer=True), kv_cache_memory="4MiB")
    bad = [
        None,
        3.5,
        {"prompt_token_ids": [5], "cache_salt": [1]},
        {"prompt": 7},
        {"text": "x"},
        [{"role": "user"}],
    ]
    for prompt in bad:
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            llm.generate([[5, 6], prompt], PARAMS)  # type: ignore[list-item]
        outputs = llm.generate([[5, 6], prompt], PARAMS, on_invalid="return")  # type: ignore[list-item]
        assert len(outputs[0].outputs[0].token_ids) == 8 and outputs[1].error
    with pytest.raises(ValueError, match="top_p=1e-50"):
        SamplingParams(top_p=1e-50)
    with pytest.raises(ValueError, match="priority"):
        llm.generate([[5]], PARAMS, priority=[1])
    with pytest.raises(ValueError, match="sampling_params has 0 entries"):
        llm.generate([[5]], [])
    with pytest.raises(ValueError, match="prompts=None is not valid"):
        llm.generate(None, PARAMS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampling_params='x' is not valid"):
        llm.generate([[5]], "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer="):
        LLM(make_tiny_llama(tmp_path / "other"), tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="swap_space"):
        LLM(make_tiny_llama(tmp_path / "other"), swap_space="1MiB")
