"""Trainers whose weights are a base and PEFT's adapters, while the engine has them merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rollout import LLM, Cause, SamplingParams
from rollout.weights.trainer_tensors import policy_tensors
from tests.support.oracle import load_reference
from tests.support.policies import random_prompt
from tests.support.tiny import make_tiny_llama

PARAMS = SamplingParams(n=2, max_tokens=24, seed=5, ignore_eos=True)
PROMPTS = [random_prompt(37, 1), random_prompt(9, 2)]


def engine_and_trainer(tmp_path: Path, dtype: torch.dtype) -> tuple[LLM, torch.nn.Module]:
    """Both with the same policy: the base and an adapter that has learned."""
    folder = make_tiny_llama(tmp_path, vocab_size=300, tokenizer=True, dtype=dtype)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    trainer = get_peft_model(load_reference(folder, dtype), config)
    assert isinstance(trainer, torch.nn.Module)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    llm = LLM(folder, kv_cache_memory="2MiB")
    with llm.policy_update() as update:
        update.load(policy_tensors(trainer))
    return llm, trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_in_bfloat16_is_rounding_and_in_float32_no_gap(tmp_path: Path, dtype: torch.dtype) -> None:
    llm, trainer = engine_and_trainer(tmp_path, dtype)
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    diagnosis = llm.diagnose(llm.generate(PROMPTS, PARAMS), trainer)
    if dtype is torch.float32:
        assert diagnosis.verdict is Cause.NONE and diagnosis.gap.max_abs < 1e-4
    else:
        assert diagnosis.causes == (Cause.PRECISION,)
        assert diagnosis.gap.max_abs > 1e-2 and diagnosis.evidence["rounding"]["left_in_float32"] < 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_dict().items())


@pytest.mark.parametrize("name", ["mlp.down_proj.weight", "self_attn.q_proj.lora_B.default.weight"])
def test_a_base_or_an_adapter_that_has_moved_is_wrong_weights(tmp_path: Path, name: str) -> None:
    llm, trainer = engine_and_trainer(tmp_path, torch.float32)
    outputs = llm.generate(PROMPTS, PARAMS)
    with torch.no_grad():
        trainer.get_parameter(f"base_model.model.model.layers.1.{name}")[3] += 1.0
    diagnosis = llm.diagnose(outputs, trainer)
    merged = f"model.layers.1.{name.removesuffix('.lora_B.default.weight').removesuffix('.weight')}.weight"
    assert diagnosis.causes == (Cause.WRONG_WEIGHTS,)
    assert diagnosis.evidence["tensors_differ"] == [merged]
    assert diagnosis.parts[Cause.PRECISION].max_abs < 1e-4
