"""An engine with `kv_cache_dtype="int8"`: the memory it takes, and how near its samples stay to those without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import LLM, SamplingParams
from tests.support.tiny import make_tiny_llama

PROMPTS = [[7, 8, 9], list(range(40, 100)), [11, 12] * 9]
PARAMS = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, n=2)


def test_the_pool_holds_the_scales_and_more_blocks_than_in_bfloat16(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, head_dim=64, dtype=torch.bfloat16)
    plain, quantised = (LLM(folder, kv_cache_memory="2MiB", kv_cache_dtype=name) for name in ("auto", "int8"))
    pools = [llm.collective_rpc(lambda worker: worker.pool)[0] for llm in (plain, quantised)]
    slots, layers, heads = 16, 2, 2
    assert pools[0].block_bytes == slots * layers * heads * 2 * 64 * 2
    assert pools[1].block_bytes == slots * layers * heads * 2 * (64 + 4)
    assert pools[1].num_blocks == (2 << 20) // pools[1].block_bytes
    ledger = quantised.memory_ledger()["kv_cache"]
    assert 0 <= ledger.reserved - pools[1].num_blocks * pools[1].block_bytes < 8192
    cache = quantised.collective_rpc(lambda worker: worker.runner.kv_caches[0])[0]
    assert cache.keys.dtype == torch.int8
    assert cache.key_scales.shape == (pools[1].num_blocks, heads, slots)


def logprobs_of(llm: LLM, sequences: list[list[int]]) -> np.ndarray:
    return np.concatenate([output.logprobs[1:] for output in llm.score(sequences)])


def test_logprobs_stay_near_those_of_a_cache_that_is_not_quantised(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, head_dim=64)
    plain = LLM(folder, kv_cache_memory="8MiB").generate(PROMPTS, PARAMS)
    prompts = [[*prompt, *out.token_ids] for prompt, o in zip(PROMPTS, plain, strict=True) for out in o.outputs]
    exact, quantised, reference = (
        logprobs_of(LLM(folder, kv_cache_memory="8MiB", kv_cache_dtype=dtype, kernels=kernels), prompts)
        for dtype, kernels in (("auto", "auto"), ("int8", "auto"), ("int8", "reference"))
    )
    # An element that lies between two integers may be rounded the other way by kernels whose inputs differ in a bit.
    assert np.abs(quantised - reference).mean() < 2e-4
    assert 1e-4 < np.abs(quantised - exact).mean() < 0.03 * exact.std()


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' is not valid: it must be one of 'auto', 'int8'"):
        LLM(make_tiny_llama(tmp_path), kv_cache_dtype="fp8")
