"""Checks of the arguments of the public operations: cheap, before any kernel runs, naming the argument.

`TypeError` for a wrong dtype, `ValueError` for a wrong shape or layout.
"""

from __future__ import annotations

import functools
import math

import torch

from rollout_kernels.errors import draw_error, logprob_error, top_logprob_error
from rollout_kernels.int8 import Int8Weight, int8_weight_shapes
from rollout_kernels.kv_cache import QUANTISED_MAXIMUM, TILE, KVCache, KVLayout, tile_shapes
from rollout_kernels.results import SampleArguments

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def fail_shape(name: str, tensor: torch.Tensor, wanted: str) -> None:
    raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be {wanted}")


def model_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in MODEL_DTYPES:
        raise TypeError(f"{name} is {dtype}: it must be bfloat16, float16 or float32 (or float64, for the reference)")


def same_dtype(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if tensor.dtype is not other.dtype:
        raise TypeError(f"{name} is {tensor.dtype} and {other_name} is {other.dtype}: they must be the same")


def has_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} is {tensor.dtype}: it must be {dtype}")


def unit_stride(name: str, tensor: torch.Tensor) -> None:
    """The last dimension lies contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}: its last dimension must be contiguous")


def vector(name: str, tensor: torch.Tensor, length: int, dtype: torch.dtype) -> None:
    """A contiguous vector of this length and dtype."""
    has_dtype(name, tensor, dtype)
    if tensor.dim() != 1 or tensor.shape[0] != length:
        fail_shape(name, tensor, f"[{length}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: it must be contiguous")


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> None:
    model_dtype("weight", weight.dtype)
    if weight.dim() != 2:
        fail_shape("weight", weight, "[V, H]")
    unit_stride("weight", weight)
    vector("token_ids", token_ids, token_ids.numel(), torch.int64)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    model_dtype("x", x.dtype)
    model_dtype("out_dtype", out_dtype)
    same_dtype("x", x, "weight", weight)
    depth = x.shape[-1]
    if weight.dim() != 2:
        fail_shape("weight", weight, "[N, K]")
    if x.dim() != 2 or depth != weight.shape[1]:
        fail_shape("x", x, f"[T, {weight.shape[1]}]")
    if depth > 1:
        unit_stride("x", x)
        unit_stride("weight", weight)
    if bias is not None:
        vector("bias", bias, weight.shape[0], weight.dtype)


def _low_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"{name} is {dtype}: it must be bfloat16, float16 or float32")


def _int8_weight(name: str, weight: Int8Weight, rows: int, depth: int) -> None:
    values, scales = int8_weight_shapes(rows, depth)
    has_dtype(f"{name}.values", weight.values, torch.uint8)
    if tuple(weight.values.shape) != values:
        fail_shape(f"{name}.values", weight.values, f"{list(values)}, as int8_weight_shapes({rows}, {depth}) has it")
    if not weight.values.is_contiguous():
        raise ValueError(f"{name}.values has strides {weight.values.stride()}: it must be contiguous")
    vector(f"{name}.scales", weight.scales, scales[0], torch.float32)


def quantize_weight(weight: torch.Tensor, into: Int8Weight | None) -> None:
    _low_dtype("weight", weight.dtype)
    if weight.dim() != 2 or weight.shape[1] < 1:
        fail_shape("weight", weight, "[N, K]")
    unit_stride("weight", weight)
    if into is not None:
        if into.in_features != weight.shape[1]:
            raise ValueError(f"into.in_features={into.in_features} is not valid: the weight has {weight.shape[1]}")
        _int8_weight("into", into, *weight.shape)


def linear_int8(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    _low_dtype("x", x.dtype)
    _low_dtype("out_dtype", out_dtype)
    rows, depth = weight.scales.shape[0], weight.in_features
    if x.dim() != 2 or x.shape[1] != depth:
        fail_shape("x", x, f"[T, {depth}]")
    unit_stride("x", x)
    _int8_weight("weight", weight, rows, depth)
    if bias is not None:
        _low_dtype("bias", bias.dtype)
        vector("bias", bias, rows, bias.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    for name, dtype in (("x", x.dtype), ("weight", weight.dtype), ("out_dtype", out_dtype)):
        model_dtype(name, dtype)
    if x.dim() != 2:
        fail_shape("x", x, "[T, H]")
    vector("weight", weight, x.shape[1], weight.dtype)
    unit_stride("x", x)
    if residual is not None:
        has_dtype("residual", residual, torch.float64 if x.dtype == torch.float64 else torch.float32)
        if residual.shape != x.shape:
            fail_shape("residual", residual, str(tuple(x.shape)))
        unit_stride("residual", residual)
    if residual is None and x.dtype is torch.float32 and not x.is_contiguous():
        raise ValueError("x has rows apart: without a residual, a float32 x must be contiguous, since it is returned")


def _heads(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of a tensor [T, H, D] whose heads lie side by side; rows may be apart."""
    shape = tuple(tensor.shape)
    if len(shape) != 3:
        fail_shape(name, tensor, "[T, H, D]")
    strides = tensor.stride()
    if (strides[2] != 1 and shape[2] > 1) or (strides[1] != shape[2] and shape[1] > 1):
        raise ValueError(f"{name} has strides {strides}: the heads of a row must lie side by side")
    return shape


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    model_dtype("q", q.dtype)
    same_dtype("k", k, "q", q)
    num_tokens, _, head_dim = _heads("q", q)
    k_tokens, _, k_dim = _heads("k", k)
    if head_dim % 2:
        fail_shape("q", q, "[T, H, D] with an even head dimension")
    if k_tokens != num_tokens or k_dim != head_dim:
        fail_shape("k", k, f"[{num_tokens}, H, {head_dim}]")
    rotary_table(positions, cos_sin, num_tokens, q.dtype)
    if cos_sin.shape[1] != head_dim:
        fail_shape("cos_sin", cos_sin, f"[max_pos, {head_dim}]")


def rotary_table(positions: torch.Tensor, cos_sin: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> None:
    vector("positions", positions, num_tokens, torch.int64)
    has_dtype("cos_sin", cos_sin, torch.float64 if dtype == torch.float64 else torch.float32)
    if cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or not cos_sin.is_contiguous():
        fail_shape("cos_sin", cos_sin, "[max_pos, D] with D even, and contiguous")


def _adapters(name: str, adapters: torch.Tensor, adapter_ids: torch.Tensor, num_tokens: int) -> None:
    model_dtype(name, adapters.dtype)
    if adapters.dim() != 3 or not adapters.is_contiguous():
        fail_shape(name, adapters, "[adapters, out, in] and contiguous")
    vector("adapter_ids", adapter_ids, num_tokens, torch.int32)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, adapter_ids: torch.Tensor) -> None:
    same_dtype("x", x, "a", a)
    _adapters("a", a, adapter_ids, x.shape[0])
    if x.dim() != 2 or x.shape[1] != a.shape[2]:
        fail_shape("x", x, f"[T, {a.shape[2]}]")
    unit_stride("x", x)


def lora_expand(
    y: torch.Tensor, b: torch.Tensor, adapter_ids: torch.Tensor, out: torch.Tensor, scales: torch.Tensor
) -> None:
    wide = torch.float64 if b.dtype is torch.float64 else torch.float32
    _adapters("b", b, adapter_ids, y.shape[0])
    has_dtype("y", y, wide)
    if y.dim() != 2 or y.shape[1] != b.shape[2] or not y.is_contiguous():
        fail_shape("y", y, f"[T, {b.shape[2]}] and contiguous")
    model_dtype("out", out.dtype)
    if tuple(out.shape) != (y.shape[0], b.shape[1]):
        fail_shape("out", out, f"[{y.shape[0]}, {b.shape[1]}]")
    unit_stride("out", out)
    vector("scales", scales, b.shape[0], wide)


def silu_and_mul(x: torch.Tensor) -> None:
    model_dtype("x", x.dtype)
    if x.dim() != 2 or x.shape[1] % 2:
        fail_shape("x", x, "[T, 2I]")
    unit_stride("x", x)


def packed_kv(k: torch.Tensor, v: torch.Tensor) -> None:
    """Keys and values [T, Hkv, D] of one dtype, rows possibly apart."""
    model_dtype("k", k.dtype)
    same_dtype("k", k, "v", v)
    _heads("k", k)
    _heads("v", v)
    if k.shape != v.shape:
        fail_shape("v", v, f"that of k, {tuple(k.shape)}")


_tile_shapes = functools.cache(tile_shapes)


def kv_cache(cache: KVCache, like: torch.Tensor, head_dim: int, layout: KVLayout) -> None:
    """The cache can hold tokens such as `like`, in the backend's layout."""
    keys, values = cache.keys, cache.values
    same_dtype("cache.keys", keys, "cache.values", values)
    if keys.dtype is not like.dtype and keys.dtype not in QUANTISED_MAXIMUM:
        raise TypeError(
            f"cache.keys is {keys.dtype} and the tokens are {like.dtype}: they must be the same, or the cache "
            f"quantised ({' or '.join(map(str, QUANTISED_MAXIMUM))})"
        )
    wanted_keys, wanted_values = _tile_shapes(head_dim, keys.dtype, layout)
    if keys.shape[2:] != wanted_keys:
        fail_shape("cache.keys", keys, f"[tiles, H, {', '.join(map(str, wanted_keys))}]: see kv_cache_shapes")
    if values.shape[2:] != wanted_values or values.shape[:2] != keys.shape[:2]:
        fail_shape("cache.values", values, f"[tiles, H, {', '.join(map(str, wanted_values))}]: see kv_cache_shapes")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("cache.keys and cache.values must be contiguous")
    _kv_scales("cache.key_scales", cache.key_scales, keys)
    _kv_scales("cache.value_scales", cache.value_scales, keys)


def _kv_scales(name: str, scales: torch.Tensor | None, keys: torch.Tensor) -> None:
    if (scales is not None) != (keys.dtype in QUANTISED_MAXIMUM):
        wanted = "must be None" if scales is not None else "must be given"
        raise TypeError(f"cache.keys is {keys.dtype}: {name} {wanted}")
    if scales is None:
        return
    has_dtype(name, scales, torch.float32)
    if scales.shape != (*keys.shape[:2], TILE) or not scales.is_contiguous():
        fail_shape(name, scales, f"[{keys.shape[0]}, {keys.shape[1]}, {TILE}] and contiguous")


def attention_options(scale: float, window: int | None, soft_cap: float | None) -> None:
    if not scale > 0:
        raise ValueError(f"scale={scale!r} is not valid: it must be above 0")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window={window!r} is not valid: it must be an integer of at least 1, or None")
    if soft_cap is not None and not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"soft_cap={soft_cap!r} is not valid: it must be a finite number above 0, or None")


def query_heads(q: torch.Tensor, num_kv_heads: int) -> None:
    model_dtype("q", q.dtype)
    _heads("q", q)
    if q.shape[1] % num_kv_heads:
        fail_shape("q", q, f"[T, Hq, D] with Hq a multiple of the {num_kv_heads} key-value heads")


def query_start(starts: torch.Tensor, num_tokens: int) -> None:
    vector("query_start", starts, starts.shape[0], torch.int32)
    ends = starts[:: max(starts.shape[0] - 1, 1)].tolist()  # the first and the last: one read
    if ends != [0, num_tokens][: len(ends)] or len(ends) < 2 - (num_tokens == 0):
        raise ValueError(f"query_start must go from 0 to the number of tokens, {num_tokens}")


def sample(logits: torch.Tensor, arguments: SampleArguments) -> None:
    has_dtype("logits", logits, torch.float32)
    if logits.dim() != 2 or logits.shape[1] < 1:
        fail_shape("logits", logits, "[R, V]")
    unit_stride("logits", logits)
    draws = arguments.temperature.shape[0]
    for name in ("temperature", "top_p", "min_p"):
        vector(name, getattr(arguments, name), draws, torch.float32)
    vector("top_k", arguments.top_k, draws, torch.int32)
    for name in ("seed", "sample_index", "position"):
        vector(name, getattr(arguments, name), draws, torch.int64)
    if arguments.row_index is not None:
        vector("row_index", arguments.row_index, draws, torch.int64)
    if arguments.banned is not None:
        start, ids = arguments.banned
        vector("banned", start, draws + 1, torch.int32)
        vector("banned", ids, ids.shape[0], torch.int32)
        # To look at a value on a device is to wait for it, which a decode step must not: the kernels there mask.
        if start.is_cpu and int(start[-1]) > ids.shape[0]:
            raise ValueError(f"banned offsets end at {int(start[-1])}, but there are {ids.shape[0]} ids")
    if arguments.adjusted is not None:
        _indexed_rows("adjusted", *arguments.adjusted, draws, logits.shape[1], torch.float32)
    if arguments.allowed is not None:
        _indexed_rows("allowed", *arguments.allowed, draws, -(-logits.shape[1] // 32), torch.int32)
    if arguments.forced is not None:
        vector("forced", arguments.forced, draws, torch.int64)


def _indexed_rows(
    name: str, rows: torch.Tensor, index: torch.Tensor, draws: int, width: int, dtype: torch.dtype
) -> None:
    """Rows [any number, width], and an index for each draw, int64."""
    has_dtype(name, rows, dtype)
    if rows.dim() != 2 or rows.shape[1] != width:
        fail_shape(name, rows, f"[rows, {width}]")
    unit_stride(name, rows)
    vector(f"{name} index", index, draws, torch.int64)


def draw_values(arguments: SampleArguments, num_rows: int, vocab_size: int) -> None:
    """The values of `sample`'s arguments on the host: what the Triton kernels cannot report from the device.

    Raises `ValueError` naming the first draw that has a value out of range, and the argument. Call it before the
    arguments are moved to the device.
    """
    temperature, top_p, min_p = arguments.temperature, arguments.top_p, arguments.min_p
    draws = temperature.shape[0]
    rows = torch.arange(draws) if arguments.row_index is None else arguments.row_index
    good = [
        (temperature >= 0) & (temperature < torch.inf),
        arguments.top_k >= -1,
        (top_p > 0) & (top_p <= 1),
        (min_p >= 0) & (min_p <= 1),
        (rows >= 0) & (rows < num_rows),
        _offsets_and_ids(arguments.banned, draws, vocab_size),
        *(
            torch.ones(draws, dtype=torch.bool) if index is None else (index >= -1) & (index < count)
            for index, count in _optional_indices(arguments, vocab_size)
        ),
    ]
    bad = ~torch.stack(good, 1)
    if bad.any():
        draw = int(bad.any(1).int().argmax())
        raise draw_error(arguments, draw, int(bad[draw].int().argmax()) + 1)


def top_logprobs(
    logits: torch.Tensor,
    num_top: int,
    token_ids: torch.Tensor,
    row_index: torch.Tensor | None,
    chosen: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    has_dtype("logits", logits, torch.float32)
    if logits.dim() != 2 or logits.shape[1] < 1:
        fail_shape("logits", logits, "[R, V]")
    unit_stride("logits", logits)
    if isinstance(num_top, bool) or not isinstance(num_top, int) or not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"num_top={num_top!r} is not valid: it must be an integer from 0 to {logits.shape[1]}")
    draws = token_ids.shape[0]
    vector("token_ids", token_ids, draws, torch.int64)
    if row_index is not None:
        vector("row_index", row_index, draws, torch.int64)
    if chosen is not None:
        start, ids = chosen
        vector("chosen", start, draws + 1, torch.int32)
        vector("chosen", ids, ids.shape[0], torch.int32)
        if start.is_cpu and (int(start[0]), int(start[-1])) != (0, ids.shape[0]):
            raise ValueError(f"chosen offsets must go from 0 to the number of ids, {ids.shape[0]}")


def top_logprob_values(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    row_index: torch.Tensor | None,
    chosen: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """The values of `top_logprobs`' arguments, where they lie on the host. Raises `ValueError` naming the draw."""
    (num_rows, vocab_size), draws = logits.shape, token_ids.shape[0]
    rows = torch.arange(draws) if row_index is None else row_index
    good = [(token_ids >= -1) & (token_ids < vocab_size), (rows >= 0) & (rows < num_rows)]
    good.append(_offsets_and_ids(chosen, draws, vocab_size))
    bad = ~torch.stack(good, 1)
    if bad.any():
        draw = int(bad.any(1).int().argmax())
        problem = int(bad[draw].int().argmax()) + 1
        raise top_logprob_error(token_ids, row_index, draw, problem, num_rows, vocab_size)


def _optional_indices(arguments: SampleArguments, vocab_size: int) -> list[tuple[torch.Tensor | None, int]]:
    """The arguments that name a row, or a token, or with -1 none of them: (int64 [R] or None, how many there are)."""
    adjusted, allowed = arguments.adjusted, arguments.allowed
    return [
        (None, 0) if adjusted is None else (adjusted[1], adjusted[0].shape[0]),
        (None, 0) if allowed is None else (allowed[1], allowed[0].shape[0]),
        (arguments.forced, vocab_size),
    ]


def _offsets_and_ids(lists: tuple[torch.Tensor, torch.Tensor] | None, draws: int, vocab_size: int) -> torch.Tensor:
    """Whether each draw's offsets ascend and its ids are in the vocabulary, bool [R]."""
    if lists is None:
        return torch.ones(draws, dtype=torch.bool)
    start, ids = (part.long() for part in lists)
    first, end = start[:-1], start[1:]
    before = torch.cat([torch.zeros(1, dtype=torch.int64), ((ids < 0) | (ids >= vocab_size)).long().cumsum(0)])
    last = ids.shape[0]
    return (first >= 0) & (end >= first) & (before[end.clamp(0, last)] == before[first.clamp(0, last)])


def logprob_values(vocab_size: int, token_ids: torch.Tensor, temperature: float | torch.Tensor) -> None:
    """The values of `token_logprobs`' arguments that lie on the host. Raises `ValueError` naming row and argument."""
    rows = token_ids.shape[0]
    if not token_ids.is_cpu:
        if rows and not isinstance(temperature, torch.Tensor) and not 0.0 < temperature < torch.inf:
            raise logprob_error(token_ids, temperature, 0, 2, vocab_size)
        return
    heat = temperature if isinstance(temperature, torch.Tensor) else torch.full((rows,), temperature)
    bad = torch.stack([(token_ids < 0) | (token_ids >= vocab_size), ~((heat > 0) & (heat < torch.inf))], 1)
    if bad.any():
        row = int(bad.any(1).int().argmax())
        raise logprob_error(token_ids, temperature, row, 2 if bad[row, 1] else 1, vocab_size)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor) -> None:
    if logits.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"logits is {logits.dtype}: it must be float32")
    if logits.dim() != 2 or logits.shape[1] < 1:
        fail_shape("logits", logits, "[R, V]")
    unit_stride("logits", logits)
    vector("token_ids", token_ids, logits.shape[0], torch.int64)
    if isinstance(temperature, torch.Tensor):
        vector("temperature", temperature, logits.shape[0], torch.float32)
