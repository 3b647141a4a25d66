"""Writing the tiled cache and copying blocks."""

import pytest
import torch

import rollout_kernels as rk
from rollout_kernels.kv_cache import QUANTISED_MAXIMUM
from rollout_kernels.reference.kv_cache import read_kv
from tests.support.kernels import BACKENDS, DTYPES, assert_same_bits, nan_caches, num_threads, randn, rows_apart


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_cache_shapes_round_up_to_whole_tiles(dtype: torch.dtype) -> None:
    k_shape, v_shape = rk.kv_cache_shapes(5, 20, 3, 80, dtype)
    if dtype == torch.bfloat16:
        assert (k_shape, v_shape) == ((10, 3, 40, 16, 2), (10, 3, 8, 80, 2))
    else:
        assert (k_shape, v_shape) == ((10, 3, 80, 16), (10, 3, 16, 80))
    assert rk.kv_cache_shapes(2, 16, 1, 6, torch.float32)[0] == (2, 1, 16, 16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 64, 80])
def test_written_tokens_are_read_back_and_others_stay(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    k, v = randn(40, 3, head_dim, dtype=dtype, seed=1), randn(40, 3, head_dim, dtype=dtype, seed=2)
    slots = torch.randperm(16 * 8, generator=torch.Generator().manual_seed(0))[:40]
    cache = nan_caches(8, 16, 3, head_dim, dtype)
    with rk.use_backend(backend):
        rk.write_kv(rows_apart(k), rows_apart(v), cache, slots)
    padded = cache.keys.shape[2] * (2 if dtype == torch.bfloat16 else 1)
    keys, values = read_kv(cache, slots, padded)
    assert_same_bits(keys[..., :head_dim], k)
    assert_same_bits(values[..., :head_dim], v)
    assert not keys[..., head_dim:].any()
    assert not values[..., head_dim:].any()
    others = torch.tensor(sorted(set(range(128)) - set(slots.tolist())))
    keys, values = read_kv(cache, others, padded)
    assert keys.isnan().all()
    assert values.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_is_the_documented_one(dtype: torch.dtype) -> None:
    k, v = randn(1, 2, 32, dtype=dtype, seed=1), randn(1, 2, 32, dtype=dtype, seed=2)
    cache = nan_caches(4, 16, 2, 32, dtype)
    rk.write_kv(k, v, cache, torch.tensor([16 * 2 + 5]))
    for head in range(2):
        for d in range(32):
            if dtype == torch.bfloat16:
                assert cache.keys[2, head, d // 2, 5, d % 2] == k[0, head, d]
                assert cache.values[2, head, 2, d, 1] == v[0, head, d]
            else:
                assert cache.keys[2, head, d, 5] == k[0, head, d]
                assert cache.values[2, head, 5, d] == v[0, head, d]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slot", [-1, 32])
def test_a_slot_outside_the_cache_is_refused_and_nothing_is_written(backend: str, slot: int) -> None:
    k = randn(2, 1, 16)
    cache = nan_caches(2, 16, 1, 16, torch.float32)
    with rk.use_backend(backend), pytest.raises(ValueError, match=rf"slot_mapping\[1\]={slot} is not a slot"):
        rk.write_kv(k, k, cache, torch.tensor([0, slot]))
    assert cache.keys.isnan().all()


def test_many_tokens_write_the_same_with_two_threads() -> None:
    k = randn(2000, 3, 64, dtype=torch.bfloat16, seed=1)
    caches = []
    for count in (1, 2):
        cache = nan_caches(125, 16, 3, 64, torch.bfloat16)
        with num_threads(count):
            rk.write_kv(k, k, cache, torch.arange(2000).flip(0).contiguous())
        caches.append(cache)
    for a, b in zip(*(cache.tensors() for cache in caches), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_copied_whole_and_in_order(backend: str, dtype: torch.dtype) -> None:
    caches = []
    for layer in range(3):
        shapes = rk.kv_cache_shapes(6, 20, 2, 24, dtype)
        caches.append(rk.KVCache(*(randn(*shape, dtype=dtype, seed=layer) for shape in shapes)))
    before = [tuple(tensor.clone() for tensor in cache.tensors()) for cache in caches]
    with rk.use_backend(backend):
        rk.copy_blocks(caches, [(0, 3), (3, 5), (1, 2)], 2)
    source_of = {0: 0, 1: 1, 2: 1, 3: 0, 4: 4, 5: 0}
    for cache, old in zip(caches, before, strict=True):
        for tensor, previous in zip(cache.tensors(), old, strict=True):
            for block, source in source_of.items():
                assert_same_bits(tensor[2 * block : 2 * block + 2], previous[2 * source : 2 * source + 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_move_between_pools_of_different_sizes(backend: str) -> None:
    k_shape, v_shape = rk.kv_cache_shapes(4, 16, 2, 16, torch.float32)
    device = [rk.KVCache(randn(*k_shape, seed=1), randn(*v_shape, seed=2))]
    host = [nan_caches(2, 16, 2, 16, torch.float32)]
    with rk.use_backend(backend):
        rk.copy_blocks_between(device, host, [(3, 0)], 1)
        assert_same_bits(host[0][0][0], device[0][0][3])
        assert_same_bits(host[0][1][0], device[0][1][3])
        assert host[0][0][1].isnan().all()
        with pytest.raises(ValueError, match="the pools have 4 and 2 blocks"):
            rk.copy_blocks_between(device, host, [(0, 2)], 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [6, 64, 80])
def test_a_quantised_cache_holds_each_token_to_half_a_step(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    k = randn(40, 3, head_dim, dtype=dtype, seed=1, scale=5.0)
    v = randn(40, 3, head_dim, dtype=dtype, seed=2)
    v[7, 1] = 0.0
    slots = torch.randperm(16 * 8, generator=torch.Generator().manual_seed(0))[:40]
    cache = nan_caches(8, 16, 3, head_dim, torch.int8)
    with rk.use_backend(backend):
        rk.write_kv(rows_apart(k), rows_apart(v), cache, slots)
    for written, read in zip((k, v), read_kv(cache, slots, head_dim), strict=True):
        step = written.double().abs().amax(-1, keepdim=True) / 127
        assert ((written.double() - read.double()).abs() <= step * 0.5001).all()
        largest = written.double().abs().argmax(-1, keepdim=True)
        assert torch.allclose(read.double().gather(-1, largest), written.double().gather(-1, largest), rtol=1e-6)
    assert not read_kv(cache, slots, head_dim)[1][7, 1].any()
    assert cache.key_scales is not None
    others = torch.tensor(sorted(set(range(128)) - set(slots.tolist())))
    assert cache.key_scales[others // 16, :, others % 16].isnan().all()


def test_the_reference_keeps_float8_to_its_precision() -> None:
    k, v = randn(40, 3, 24, seed=1, scale=5.0), randn(40, 3, 24, seed=2)
    cache = nan_caches(3, 16, 3, 24, torch.float8_e4m3fn)
    with rk.use_backend("reference"):
        rk.write_kv(k, v, cache, torch.arange(40))
    for written, read in zip((k, v), read_kv(cache, torch.arange(40), 24), strict=True):
        smallest = written.abs().amax(-1, keepdim=True) / QUANTISED_MAXIMUM[cache.keys.dtype] * 2**-10
        assert ((written - read).abs() <= written.abs() * 2**-4 * 1.001 + smallest).all()


def test_a_quantised_cache_needs_scales_of_its_shape() -> None:
    k, slot = randn(1, 2, 16), torch.tensor([0])
    cache = nan_caches(2, 16, 2, 16, torch.int8)
    with pytest.raises(TypeError, match=r"cache.keys is torch.int8: cache.value_scales must be given"):
        rk.write_kv(k, k, cache._replace(value_scales=None), slot)
    with pytest.raises(ValueError, match=r"cache.key_scales has shape \(1, 2, 16\): it must be \[2, 2, 16\]"):
        rk.write_kv(k, k, cache._replace(key_scales=torch.ones(1, 2, 16)), slot)
    plain = nan_caches(2, 16, 2, 16, torch.float32)
    with pytest.raises(TypeError, match=r"cache.keys is torch.float32: cache.key_scales must be None"):
        rk.write_kv(k, k, plain._replace(key_scales=torch.ones(2, 2, 16)), slot)
    with pytest.raises(ValueError, match="must both be quantised, or neither"):
        rk.copy_blocks_between([plain], [cache], [(0, 0)], 1)


def test_wrong_caches_are_named() -> None:
    k = randn(1, 2, 16)
    cache = nan_caches(2, 16, 2, 16, torch.float32)
    slot = torch.tensor([0])
    with pytest.raises(TypeError, match=r"cache.keys is torch.float32 and the tokens are torch.bfloat16"):
        rk.write_kv(k.bfloat16(), k.bfloat16(), cache, slot)
    with pytest.raises(ValueError, match="k has shape"):
        rk.write_kv(k[:, :1], k[:, :1], cache, slot)
    with pytest.raises(ValueError, match=r"cache\.keys has shape"):
        rk.write_kv(k, k, cache._replace(keys=cache.keys[:, :, :8]), slot)
    with pytest.raises(TypeError, match=r"slot_mapping is torch.int32"):
        rk.write_kv(k, k, cache, slot.int())
