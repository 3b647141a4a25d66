"""Contract 1 with LoRA adapters: a sample depends on its own adapter, and not on those of others in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import LLM, CompletionOutput, LoRARequest, SamplingParams
from tests.support.adapters import peft_model, saved
from tests.support.tiny import make_tiny_llama

SHARED = list(range(40, 75))
PROMPTS = [[3], SHARED, [*SHARED, 9, 8], [*SHARED[:20], 7], [11, 12] * 9, SHARED, SHARED, [5, 4, 3, 2]]
ADAPTERS = ["a", None, "b", "a", None, "a", "b", "b"]
PARAMS = [
    SamplingParams(max_tokens=20, seed=1, ignore_eos=True, n=3),
    SamplingParams(max_tokens=25, seed=2, n=2, temperature=0.7),
    SamplingParams(max_tokens=12, seed=3, top_k=5),
    SamplingParams(max_tokens=16, temperature=0),
    SamplingParams(max_tokens=9, seed=6, ignore_eos=True),
    SamplingParams(max_tokens=25, seed=2, n=2, temperature=0.7),
    SamplingParams(max_tokens=25, seed=2, n=2, temperature=0.7),
    SamplingParams(max_tokens=14, seed=7, temperature=1.3),
]
ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")


@dataclass(frozen=True)
class Setting:
    """An engine's options, the adapters, and every prompt's samples from an engine of its own."""

    options: dict[str, Any]
    adapters: dict[str, LoRARequest]
    expected: list[list[CompletionOutput]]
    slot_bytes: int

    def choices(self, order: list[int]) -> list[LoRARequest | None]:
        names = [ADAPTERS[index] for index in order]
        return [None if name is None else self.adapters[name] for name in names]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    path, dtype = tmp_path_factory.mktemp("adapters"), {"float32": torch.float32, "bfloat16": torch.bfloat16}
    folder = make_tiny_llama(path / "model", dtype=dtype[request.param], near_uniform=True)
    adapters = {
        "a": saved(peft_model(folder, 1), path, "a", 1),
        "b": saved(peft_model(folder, 2, r=3, target_modules=["k_proj", "o_proj", "up_proj"]), path, "b", 2),
    }
    expected = []
    for prompt, params, name in zip(PROMPTS, PARAMS, ADAPTERS, strict=True):
        # Rows without an adapter are those of an engine that has none.
        options: dict[str, Any] = {} if name is None else {"enable_lora": True}
        llm = LLM(folder, kv_cache_memory="16MiB", enable_prefix_caching=False, **options)
        choice = None if name is None else adapters[name]
        expected.append(llm.generate(prompt, params, lora_request=choice)[0].outputs)
    options = {"model": folder, "enable_lora": True, "max_loras": 2}
    return Setting(options, adapters, expected, 2 * 2 * 2 * 16 * dtype[request.param].itemsize)


def same(a: CompletionOutput, b: CompletionOutput) -> bool:
    return a.token_ids == b.token_ids and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)


@settings(max_examples=15)
@given(
    block_size=st.sampled_from([1, 4, 16]),
    budget=st.integers(1, 80),
    max_num_seqs=st.integers(1, 20),
    spare_tokens=st.integers(0, 200),
    prefix_caching=st.booleans(),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    eager=st.booleans(),
    order=st.permutations(range(len(PROMPTS))),
)
def test_outputs_are_bit_identical_under_every_option(
    setting: Setting,
    block_size: int,
    budget: int,
    max_num_seqs: int,
    spare_tokens: int,
    prefix_caching: bool,
    preemption_mode: str,
    eager: bool,
    order: list[int],
) -> None:
    # cases SC-01, SE-02
    num_blocks = -(-(75 + spare_tokens) // block_size) + 1
    memory = num_blocks * setting.slot_bytes * (-(-block_size // 16) * 16)
    llm = LLM(
        **setting.options,
        kv_cache_memory=memory,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=prefix_caching,
        preemption_mode=preemption_mode,
        swap_space=memory if preemption_mode == "swap" else 0,
        enforce_eager=eager,
    )
    outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order], lora_request=setting.choices(order))
    for index, output in zip(order, outputs, strict=True):
        assert all(same(a, b) for a, b in zip(output.outputs, setting.expected[index], strict=True)), PROMPTS[index]
    llm.engine.scheduler.check_integrity()
    assert llm.get_metrics()["kv_cache_usage"] == 0


def test_the_same_prompt_under_two_adapters_and_none_gives_three_samples(setting: Setting) -> None:
    first = [setting.expected[index][0].raw_logprobs[0] for index in (1, 5, 6)]
    assert len(set(first)) == 3


def test_neither_the_slot_nor_the_adapters_in_other_slots_change_a_bit(setting: Setting, tmp_path: Path) -> None:
    llm = LLM(**setting.options, kv_cache_memory="4MiB")
    third = saved(peft_model(setting.options["model"], 9, r=16), tmp_path, "c", 3)
    for other in (None, third, setting.adapters["b"]):
        if other is not None:
            llm.add_lora(other)
        for index in (0, 3, 5):
            outputs = llm.generate(PROMPTS[index], PARAMS[index], lora_request=setting.adapters["a"])[0].outputs
            assert all(same(a, b) for a, b in zip(outputs, setting.expected[index], strict=True))
        llm.remove_lora(1)  # comes back in the slot that is free then
