"""Writing the plain cache: each element where the layout says, quantised by the documented rule, no other touched."""

import pytest
import torch

from rollout_kernels.gpu.kv_cache import write_kv
from tests.kernels.gpu.paged import QUANTISED, dequantised, nan_cache, quantised_by_torch
from tests.support.kernels import assert_close, assert_same_bits, randn, rows_apart


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 72, 33])
def test_written_tokens_are_read_back_and_other_slots_stay(dtype: torch.dtype, head_dim: int) -> None:
    k, v = (randn(20, 3, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    order = torch.randperm(16 * 4, generator=torch.Generator().manual_seed(0))
    cache = nan_cache(4, 16, 3, head_dim, dtype)
    write_kv(rows_apart(k), rows_apart(v), cache, order[:20])
    for written, tokens in zip(cache[:2], (k, v), strict=True):
        assert_same_bits(written[order[:20] // 16, :, order[:20] % 16], tokens)
        assert written[order[20:] // 16, :, order[20:] % 16].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *QUANTISED])
def test_a_slot_outside_the_cache_writes_nothing(dtype: torch.dtype) -> None:
    k = randn(4, 2, 64, dtype=torch.bfloat16)
    cache, untouched = (nan_cache(2, 16, 2, 64, dtype) for _ in range(2))
    write_kv(k, k, cache, torch.tensor([-1, 32, -(2**40), 2**40]))
    for tensor, expected in zip(cache.tensors(), untouched.tensors(), strict=True):
        assert_same_bits(tensor, expected)


@pytest.mark.parametrize("cache_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantised_elements_and_scales_are_those_of_torch(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    size = torch.logspace(-6, 3, 12, dtype=torch.float64)[:, None, None]
    k, v = ((randn(12, 3, 80, dtype=torch.float64, seed=seed) * size).to(dtype) for seed in (1, 2))
    cache = nan_cache(1, 16, 3, 80, cache_dtype)
    write_kv(rows_apart(k), rows_apart(v), cache, torch.arange(12))
    assert cache.key_scales is not None and cache.value_scales is not None
    for tokens, elements, scales in ((k, cache.keys, cache.key_scales), (v, cache.values, cache.value_scales)):
        expected, expected_scale = quantised_by_torch(tokens, cache_dtype)
        assert_same_bits(elements[0, :, :12].transpose(0, 1), expected)
        assert_same_bits(scales[0, :, :12].T, expected_scale)
        assert scales[0, :, 12:].isnan().all()


def test_ties_go_to_the_even_element() -> None:
    k = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0] * 2)[None, None]
    cache = nan_cache(1, 16, 1, 16, torch.int8)
    write_kv(k, -k, cache, torch.tensor([3]))
    assert cache.keys[0, 0, 3, :8].tolist() == [127, 0, 2, 2, 0, -2, 126, -127]
    assert cache.values[0, 0, 3, :8].tolist() == [-127, 0, -2, -2, 0, 2, -126, 127]


def test_every_value_rounds_to_e4m3_as_torch_does() -> None:
    """All elements, the points between neighbours, and what lies just beside these; each row's scale is 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0, subnormals, ..., 448
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(side)) for side in (0.0, 1e9)]
    values = torch.cat((codes, middles, *beside))
    values = torch.cat((values, -values, torch.zeros(-2 * len(values) % 63)))
    rows = torch.cat((torch.full((len(values) // 63, 1), 448.0), values.view(-1, 63)), 1)[:, None]
    cache = nan_cache(-(-len(rows) // 16), 16, 1, 64, torch.float8_e4m3fn)
    write_kv(rows, rows, cache, torch.arange(len(rows)))
    written = cache.keys.transpose(1, 2).reshape(-1, 1, 64)[: len(rows)]
    assert torch.equal(written.float(), rows.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("cache_dtype", QUANTISED)
def test_zeros_have_scale_zero_and_a_nan_spoils_its_own_token_and_head_alone(cache_dtype: torch.dtype) -> None:
    k = randn(3, 2, 64, dtype=torch.bfloat16)
    k[0] = 0
    k[1, 1, 5] = torch.nan
    k[2, 0, 7] = torch.inf
    cache = nan_cache(1, 16, 2, 64, cache_dtype)
    write_kv(k, k, cache, torch.arange(3))
    keys = dequantised(cache, torch.arange(3))[0]
    assert keys[0].eq(0).all() and cache.key_scales is not None and cache.key_scales[0, :, 0].eq(0).all()
    assert keys[1, 1].isnan().all() and not keys[2, 0].isfinite().any()
    for token, head in ((1, 0), (2, 1)):
        assert_close(keys[token, head], k[token, head], 0.07)


@pytest.mark.parametrize("cache_dtype", QUANTISED)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(cache_dtype: torch.dtype) -> None:
    k, v = (randn(9, 3, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    together, alone = (nan_cache(1, 16, 3, 64, cache_dtype) for _ in range(2))
    write_kv(k, v, together, torch.arange(9))
    for token in range(9):
        write_kv(k[token : token + 1], v[token : token + 1], alone, torch.tensor([token]))
    for a, b in zip(together.tensors(), alone.tensors(), strict=True):
        assert_same_bits(a, b)
