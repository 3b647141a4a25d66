"""An engine with a KV cache in 8 bits: the memory it takes, and how near its samples stay to those without.

The CPU has no kernels for float8: the reference serves it here, and Triton's in `test_triton_interpreter.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.config import EngineConfig
from rollout.models.causal_lm import CausalLM
from rollout.worker.batch import ForwardBatch, PagedContext
from rollout.worker.pool_layout import PoolLayout, zeros_on
from rollout_kernels import use_backend
from tests.support.tiny import make_tiny_llama

PROMPTS = [[7, 8, 9], list(range(40, 100)), [11, 12] * 9]
PARAMS = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, n=2)


@pytest.mark.parametrize(("name", "kernels"), [("int8", "auto"), ("fp8", "reference")])
def test_the_pool_holds_the_scales_and_more_blocks_than_in_bfloat16(name: str, kernels: str, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, head_dim=64, dtype=torch.bfloat16)
    plain = LLM(folder, kv_cache_memory="2MiB")
    quantised = LLM(folder, kv_cache_memory="2MiB", kv_cache_dtype=name, kernels=kernels)
    pools = [llm.collective_rpc(lambda worker: worker.pool)[0] for llm in (plain, quantised)]
    slots, layers, heads = 16, 2, 2
    assert pools[0].block_bytes == slots * layers * heads * 2 * 64 * 2
    assert pools[1].block_bytes == slots * layers * heads * 2 * (64 + 4)
    assert pools[1].num_blocks == (2 << 20) // pools[1].block_bytes
    ledger = quantised.memory_ledger()["kv_cache"]
    assert 0 <= ledger.reserved - pools[1].num_blocks * pools[1].block_bytes < 8192
    cache = quantised.collective_rpc(lambda worker: worker.runner.kv_caches[0])[0]
    assert cache.keys.dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]
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


def packed_tokens(rows: int) -> torch.Tensor:
    return torch.randint(3, 131, (rows,), generator=torch.Generator().manual_seed(5))


def distributions(model: CausalLM, tokens: torch.Tensor, quantised: torch.dtype | None) -> torch.Tensor:
    """Log-probabilities float64 [rows, vocab] of what follows each token, keys and values kept so."""
    shape, rows = model.shape, len(tokens)
    layout = PoolLayout(
        *(shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim, torch.bfloat16, 16, "tiled", quantised)
    )
    blocks = -(-rows // 16)
    start, table = torch.tensor([0, rows], dtype=torch.int32), torch.arange(blocks, dtype=torch.int32)[None]
    paged = PagedContext(layout.caches(blocks, zeros_on(tokens.device)), table, start[1:], torch.arange(rows), 16)
    with use_backend("reference"), torch.inference_mode():
        hidden = model(tokens, torch.arange(rows), ForwardBatch(query_start=start, paged=paged))
        return model.compute_logits(hidden).double().log_softmax(-1)


def test_the_distributions_of_a_cache_in_float8_are_near_those_of_one_in_bfloat16(tmp_path: Path) -> None:
    """KL(bfloat16 || 8 bits) of every token's whole distribution: float8, with 4 bits of 8, costs more."""
    folder = make_tiny_llama(tmp_path, head_dim=64, dtype=torch.bfloat16)
    llm = LLM(folder, kv_cache_memory="1MiB")
    model, tokens = llm.collective_rpc(lambda worker: worker.model)[0], packed_tokens(60)
    exact = distributions(model, tokens, None)
    kl = {
        dtype: (exact.exp() * (exact - distributions(model, tokens, dtype))).sum(-1)
        for dtype in (torch.int8, torch.float8_e4m3fn)
    }
    assert kl[torch.float8_e4m3fn].min() > -1e-9
    assert 1e-6 < kl[torch.int8].mean() < kl[torch.float8_e4m3fn].mean() < 0.02
    entropy = -(exact.exp() * exact).sum(-1).mean()
    assert kl[torch.float8_e4m3fn].max() < 0.05 * entropy  # a tiny model of strong random weights: sharp scores


def test_float8_samples_are_the_same_alone_and_together_and_from_the_prefix_cache(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    options = {"kv_cache_dtype": "fp8_e4m3", "kernels": "reference", "kv_cache_memory": "1MiB", "block_size": 8}
    params, prompts = SamplingParams(max_tokens=6, seed=3, n=2), [prompt[:20] for prompt in PROMPTS]
    llm = LLM(folder, **options)
    assert llm.config.kv_cache_dtype == "fp8"
    together = llm.generate(prompts, params)
    again = llm.generate(prompts, params)
    assert again[1].num_cached_tokens == 16
    chunked = LLM(folder, max_num_batched_tokens=7, **options)
    alone = [output for prompt in prompts for output in chunked.generate(prompt, params)]
    for outputs in (again, alone):
        for one, other in zip(together, outputs, strict=True):
            for a, b in zip(one.outputs, other.outputs, strict=True):
                assert a.token_ids == b.token_ids
                assert np.array_equal(a.raw_logprobs, b.raw_logprobs)


def test_other_dtypes_are_refused_and_float8_on_kernels_that_have_none(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8_e5m2' is not valid: it must be one of 'auto', 'int8'"):
        EngineConfig(model="m", kv_cache_dtype="fp8_e5m2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' is not supported by the CPU's kernels: give 'auto' or"):
        LLM(folder, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="dtype='float16' is not supported by the CPU's kernels: give 'bfloat16' or"):
        LLM(folder, dtype="float16", kernels="cpu")
