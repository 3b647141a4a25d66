"""Calls of the C++ kernels. Arguments have been checked by `dispatch.py`; shapes and meanings are documented there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from rollout_kernels.cpu.bindings import CSampleArguments, CTopArguments, bind
from rollout_kernels.cpu.build import load_library
from rollout_kernels.errors import (
    adapter_error,
    draw_error,
    logprob_error,
    position_error,
    slot_error,
    token_error,
    top_logprob_error,
)
from rollout_kernels.int8 import Int8Weight, scratch_row_bytes
from rollout_kernels.kv_cache import TILE, KVCache
from rollout_kernels.results import SampleArguments, SampleResult, TopLogprobsResult


class _ModelDtypes(dict[torch.dtype, int]):
    """The kernels' numbers of the dtypes that they compute with."""

    def __missing__(self, dtype: torch.dtype) -> int:
        raise TypeError(f"{dtype} has no CPU kernels: they take bfloat16 and float32 (the backend 'reference' has it)")


_DTYPE = _ModelDtypes({torch.float32: 0, torch.bfloat16: 1})
_KV_DTYPE = dict(_DTYPE) | {torch.int8: 2}


class CpuKernels:
    """The operations on CPU tensors of bfloat16 and float32. Raises `BuildError` where they cannot be built."""

    name = "cpu"
    kv_layout = "tiled"

    def __init__(
        self, functions: dict[str, Any] | None = None, empty: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """`functions` stand in for the library's, by name; `empty` for torch's, for what a forward pass allocates."""
        functions = functions or bind(load_library())
        self._empty = empty
        self._set_num_threads = functions["set_num_threads"]
        self._num_threads = 0
        self._embedding = functions["embedding"]
        self._linear = functions["linear"]
        self._linear_rotary = functions["linear_rotary"]
        self._linear_silu_and_mul = functions["linear_silu_and_mul"]
        self._linear_int8 = functions["linear_int8"]
        self._quantize_weight = functions["quantize_weight"]
        self._rms_norm = functions["rms_norm"]
        self._rms_norm_backward = functions["rms_norm_backward"]
        self._rotary = functions["rotary"]
        self._silu_and_mul = functions["silu_and_mul"]
        self._silu_and_mul_backward = functions["silu_and_mul_backward"]
        self._lora_shrink = functions["lora_shrink"]
        self._lora_expand = functions["lora_expand"]
        self._write_kv = functions["write_kv"]
        self._copy_blocks = functions["copy_blocks"]
        self._paged_attention = functions["paged_attention"]
        self._attention_backward = functions["attention_backward"]
        self._sample = functions["sample"]
        self._noise_bits = functions["noise_bits"]
        self._token_logprobs = functions["token_logprobs"]
        self._token_logprobs_backward = functions["token_logprobs_backward"]
        self._top_logprobs = functions["top_logprobs"]
        self._fingerprint = functions["fingerprint"]
        self._copy_and_fingerprint = functions["copy_and_fingerprint"]

    def _follow_torch(self) -> None:
        """Lets the kernels use as many threads as torch does now."""
        count = torch.get_num_threads()
        if count != self._num_threads:
            self._set_num_threads(count)
            self._num_threads = count

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self._follow_torch()
        rows, size = token_ids.shape[0], weight.shape[1]
        out = self._empty(rows, size, dtype=torch.float32)
        bad = self._embedding(
            *(weight.data_ptr(), weight.stride(0), _DTYPE[weight.dtype], token_ids.data_ptr(), weight.shape[0]),
            *(out.data_ptr(), rows, size),
        )
        if bad:
            raise token_error(token_ids, bad - 1, weight.shape[0])
        return out

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        self._follow_torch()
        rows, depth = x.shape
        columns = weight.shape[0]
        out = self._empty(rows, columns, dtype=out_dtype)
        code = _DTYPE[x.dtype]
        # fmt: off
        self._linear(
            x.data_ptr(), x.stride(0), code, weight.data_ptr(), weight.stride(0), code,
            None if bias is None else bias.data_ptr(), out.data_ptr(), columns, _DTYPE[out_dtype], rows, columns, depth,
        )
        # fmt: on
        return out

    def linear_silu_and_mul(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self._follow_torch()
        rows, depth = x.shape
        columns = weight.shape[0] // 2
        out = self._empty(rows, columns, dtype=x.dtype)
        self._linear_silu_and_mul(
            *(x.data_ptr(), x.stride(0), _DTYPE[x.dtype], weight.data_ptr(), weight.stride(0), _pointer(bias)),
            *(out.data_ptr(), rows, columns, depth),
        )
        return out

    def linear_rotary(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        rotated_columns: int,
    ) -> torch.Tensor:
        self._follow_torch()
        rows, depth = x.shape
        columns = weight.shape[0]
        out = self._empty(rows, columns, dtype=x.dtype)
        bad = self._linear_rotary(
            *(x.data_ptr(), x.stride(0), _DTYPE[x.dtype], weight.data_ptr(), weight.stride(0), _pointer(bias)),
            *(out.data_ptr(), rows, columns, depth, positions.data_ptr(), cos_sin.data_ptr(), *cos_sin.shape),
            rotated_columns,
        )
        if bad:
            raise position_error(positions, bad - 1, cos_sin.shape[0])
        return out

    def quantize_weight(self, weight: torch.Tensor, into: Int8Weight) -> None:
        self._follow_torch()
        rows, depth = weight.shape
        # fmt: off
        self._quantize_weight(
            weight.data_ptr(), weight.stride(0), _DTYPE[weight.dtype], into.values.data_ptr(), into.scales.data_ptr(),
            rows, depth,
        )
        # fmt: on

    def linear_int8(
        self, x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        self._follow_torch()
        rows, columns, depth = x.shape[0], weight.scales.shape[0], weight.in_features
        out = self._empty(rows, columns, dtype=out_dtype)
        scratch = self._empty(rows * scratch_row_bytes(depth), dtype=torch.uint8)  # the quantised rows of x
        # fmt: off
        self._linear_int8(
            x.data_ptr(), x.stride(0), _DTYPE[x.dtype], weight.values.data_ptr(), weight.scales.data_ptr(),
            _pointer(bias), _DTYPE[torch.float32 if bias is None else bias.dtype], scratch.data_ptr(), out.data_ptr(),
            columns, _DTYPE[out_dtype], rows, columns, depth,
        )
        # fmt: on
        return out

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._follow_torch()
        rows, size = x.shape
        out = self._empty(rows, size, dtype=out_dtype)
        residual_pointer, residual_stride, total_pointer = None, 0, None
        if residual is None and x.dtype is torch.float32:
            total = x
        else:
            total = self._empty(rows, size, dtype=torch.float32)
            total_pointer = total.data_ptr()
            if residual is not None:
                residual_pointer, residual_stride = residual.data_ptr(), residual.stride(0)
        # fmt: off
        self._rms_norm(
            x.data_ptr(), x.stride(0), _DTYPE[x.dtype], weight.data_ptr(), _DTYPE[weight.dtype], eps, residual_pointer,
            residual_stride, out.data_ptr(), _DTYPE[out_dtype], total_pointer, rows, size,
        )
        # fmt: on
        return out, total

    def rms_norm_backward(
        self,
        grad: torch.Tensor,
        grad_total: torch.Tensor | None,
        total: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        x_dtype: torch.dtype | None,
        with_residual: bool,
        with_weight: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        self._follow_torch()
        rows, size = total.shape
        grad_x = None if x_dtype is None else torch.empty((rows, size), dtype=x_dtype)
        grad_residual = torch.empty((rows, size), dtype=torch.float32) if with_residual else None
        grad_weight = torch.empty(size, dtype=torch.float32) if with_weight else None
        inverse_rms = torch.empty(rows, dtype=torch.float32)
        self._rms_norm_backward(
            *(grad.data_ptr(), _DTYPE[grad.dtype], _pointer(grad_total), total.data_ptr()),
            *(weight.data_ptr(), _DTYPE[weight.dtype], eps, _pointer(grad_x), _DTYPE[x_dtype or torch.float32]),
            *(_pointer(grad_residual), inverse_rms.data_ptr(), _pointer(grad_weight), rows, size),
        )
        return grad_x, grad_residual, grad_weight

    def rotate_(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, direction: float
    ) -> None:
        self._follow_torch()
        rows, heads, head_dim = q.shape
        # fmt: off
        bad = self._rotary(
            q.data_ptr(), q.stride(0), heads, k.data_ptr(), k.stride(0), k.shape[1], _DTYPE[q.dtype], head_dim,
            positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[0], direction, rows,
        )
        # fmt: on
        if bad:
            raise position_error(positions, bad - 1, cos_sin.shape[0])

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        self._follow_torch()
        rows, size = x.shape[0], x.shape[1] // 2
        out = self._empty(rows, size, dtype=x.dtype)
        self._silu_and_mul(x.data_ptr(), x.stride(0), _DTYPE[x.dtype], out.data_ptr(), rows, size)
        return out

    def silu_and_mul_backward(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self._follow_torch()
        rows, size = grad.shape
        grad_x = torch.empty((rows, 2 * size), dtype=x.dtype)
        self._silu_and_mul_backward(
            grad.data_ptr(), x.data_ptr(), x.stride(0), _DTYPE[x.dtype], grad_x.data_ptr(), rows, size
        )
        return grad_x

    def lora_shrink(self, x: torch.Tensor, a: torch.Tensor, adapter_ids: torch.Tensor) -> torch.Tensor:
        self._follow_torch()
        rows, size = x.shape
        out = self._empty(rows, a.shape[1], dtype=torch.float32)
        bad = self._lora_shrink(
            *(x.data_ptr(), x.stride(0), _DTYPE[x.dtype], a.data_ptr(), adapter_ids.data_ptr(), out.data_ptr()),
            *(rows, a.shape[1], size, a.shape[0]),
        )
        if bad:
            raise adapter_error(adapter_ids, bad - 1, a.shape[0])
        return out

    def lora_expand(
        self, y: torch.Tensor, b: torch.Tensor, adapter_ids: torch.Tensor, out: torch.Tensor, scales: torch.Tensor
    ) -> None:
        self._follow_torch()
        rows, rank = y.shape
        bad = self._lora_expand(
            *(y.data_ptr(), b.data_ptr(), _DTYPE[b.dtype], adapter_ids.data_ptr(), scales.data_ptr()),
            *(out.data_ptr(), out.stride(0), _DTYPE[out.dtype], rows, rank, b.shape[1], b.shape[0]),
        )
        if bad:
            raise adapter_error(adapter_ids, bad - 1, b.shape[0])

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        kv_dtype = _kv_dtype(cache)
        self._follow_torch()
        tokens, heads, head_dim = k.shape
        # fmt: off
        bad = self._write_kv(
            k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1), _DTYPE[k.dtype],
            kv_dtype, cache.keys.data_ptr(), cache.values.data_ptr(), _pointer(cache.key_scales),
            _pointer(cache.value_scales), slot_mapping.data_ptr(), cache.keys.shape[0] * TILE,
            tokens, heads, head_dim,
        )
        # fmt: on
        if bad:
            raise slot_error(slot_mapping, bad - 1, cache.keys.shape[0] * TILE)

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: KVCache,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_size: int,
        scale: float,
        return_lse: bool,
        window: int | None,
        soft_cap: float | None,
        last_places: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kv_dtype = _kv_dtype(cache)
        self._follow_torch()
        tokens, heads, head_dim = q.shape
        out = self._empty(tokens, heads, head_dim, dtype=q.dtype)
        lse = torch.empty(tokens, heads, dtype=torch.float32) if return_lse else None
        # fmt: off
        self._paged_attention(
            q.data_ptr(), q.stride(0), cache.keys.data_ptr(), cache.values.data_ptr(),
            _pointer(cache.key_scales), _pointer(cache.value_scales), _DTYPE[q.dtype], kv_dtype,
            block_tables.data_ptr(), block_tables.stride(0), query_start.data_ptr(), seq_lens.data_ptr(),
            _pointer(last_places), seq_lens.shape[0], heads, cache.keys.shape[1], head_dim, block_size, scale,
            window or 0, soft_cap or 0.0, out.data_ptr(), _pointer(lse),
        )
        # fmt: on
        return out, lse

    def attention_backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        query_start: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._follow_torch()
        grads = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (q, k, v))
        self._attention_backward(
            *(grad.data_ptr(), q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(out.data_ptr(), lse.data_ptr(), _DTYPE[q.dtype], query_start.data_ptr(), query_start.shape[0] - 1),
            *(q.shape[1], k.shape[1], q.shape[2], scale, window or 0, soft_cap or 0.0),
            *(tensor.data_ptr() for tensor in grads),
        )
        return grads[0], grads[1], grads[2]

    def copy_blocks(
        self,
        sources: list[torch.Tensor],
        destinations: list[torch.Tensor],
        pairs: list[tuple[int, int]],
        tiles_per_block: int,
    ) -> None:
        self._follow_torch()
        count = len(sources)
        source_pointers = (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor in sources))
        target_pointers = (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor in destinations))
        block_bytes = (ctypes.c_int64 * count)(
            *(tensor.stride(0) * tensor.element_size() * tiles_per_block for tensor in sources)
        )
        flat_pairs = (ctypes.c_int64 * (2 * len(pairs)))(*(block for pair in pairs for block in pair))
        arrays = [ctypes.addressof(array) for array in (source_pointers, target_pointers, block_bytes, flat_pairs)]
        self._copy_blocks(arrays[0], arrays[1], arrays[2], count, arrays[3], len(pairs))

    def sample(self, logits: torch.Tensor, arguments: SampleArguments) -> SampleResult:
        self._follow_torch()
        draws = arguments.temperature.shape[0]
        raw, sampled, mass, entropy = torch.empty((4, draws), dtype=torch.float32).unbind()
        token_ids, status = torch.empty(draws, dtype=torch.int64), torch.empty(draws, dtype=torch.uint8)
        num_kept = torch.empty(draws, dtype=torch.int32)
        result = SampleResult(token_ids, raw, sampled, mass, entropy, status, num_kept)
        start, ids = arguments.banned or (None, None)
        c_arguments = CSampleArguments(
            *(logits.data_ptr(), logits.stride(0), logits.shape[1], draws, logits.shape[0]),
            *(arguments.temperature.data_ptr(), arguments.top_k.data_ptr(), arguments.top_p.data_ptr()),
            *(arguments.min_p.data_ptr(), arguments.seed.data_ptr(), arguments.sample_index.data_ptr()),
            *(arguments.position.data_ptr(), _pointer(arguments.row_index), _pointer(start), _pointer(ids)),
            *(*_indexed_rows(arguments.adjusted), *_indexed_rows(arguments.allowed), _pointer(arguments.forced)),
            *(result.token_ids.data_ptr(), result.raw_logprobs.data_ptr(), result.sampled_logprobs.data_ptr()),
            *(result.kept_mass.data_ptr(), result.entropy.data_ptr(), result.status.data_ptr()),
            num_kept.data_ptr(),
        )
        bad = self._sample(ctypes.byref(c_arguments))
        if bad:
            raise draw_error(arguments, bad // 16 - 1, bad % 16)
        return result

    def noise_bits(self, seed: int, sample_index: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        bits = torch.empty(token_ids.shape, dtype=torch.int64)
        self._noise_bits(seed, sample_index, position, token_ids.data_ptr(), bits.data_ptr(), token_ids.numel())
        return bits

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._follow_torch()
        rows, size = logits.shape
        logprobs = torch.empty(rows, dtype=torch.float32)
        entropy = torch.empty(rows, dtype=torch.float32)
        bad = self._token_logprobs(
            *(logits.data_ptr(), logits.stride(0), token_ids.data_ptr(), *_temperature(temperature)),
            *(logprobs.data_ptr(), entropy.data_ptr(), rows, size),
        )
        if bad:
            raise logprob_error(token_ids, temperature, bad // 4 - 1, bad % 4, size)
        return logprobs, entropy

    def token_logprobs_backward(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: float | torch.Tensor,
        grad: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        self._follow_torch()
        rows, size = logits.shape
        out = torch.empty((rows, size), dtype=out_dtype)
        self._token_logprobs_backward(
            *(logits.data_ptr(), logits.stride(0), token_ids.data_ptr(), *_temperature(temperature)),
            *(grad.data_ptr(), out.data_ptr(), _DTYPE[out_dtype], rows, size),
        )
        return out

    def top_logprobs(
        self,
        logits: torch.Tensor,
        num_top: int,
        token_ids: torch.Tensor,
        row_index: torch.Tensor | None,
        chosen: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> TopLogprobsResult:
        self._follow_torch()
        draws, (num_rows, size) = token_ids.shape[0], logits.shape
        start, ids = chosen or (None, None)
        result = TopLogprobsResult(
            top_ids=torch.empty((draws, num_top), dtype=torch.int32),
            top_logprobs=torch.empty((draws, num_top), dtype=torch.float32),
            logprobs=torch.empty(draws, dtype=torch.float32),
            ranks=torch.empty(draws, dtype=torch.int32),
            chosen_logprobs=torch.empty(0 if ids is None else ids.shape[0], dtype=torch.float32),
        )
        arguments = CTopArguments(
            *(logits.data_ptr(), logits.stride(0), size, draws, num_rows, num_top, token_ids.data_ptr()),
            *(_pointer(row_index), _pointer(start), _pointer(ids), result.top_ids.data_ptr()),
            *(result.top_logprobs.data_ptr(), result.logprobs.data_ptr(), result.ranks.data_ptr()),
            result.chosen_logprobs.data_ptr(),
        )
        bad = self._top_logprobs(ctypes.byref(arguments))
        if bad:
            raise top_logprob_error(token_ids, row_index, bad // 4 - 1, bad % 4, num_rows, size)
        return result

    def fingerprint(self, tensor: torch.Tensor) -> int:
        self._follow_torch()
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        size = tensor.element_size()
        row_bytes = tensor.numel() // max(rows, 1) * size
        stride = tensor.stride(0) * size if tensor.dim() > 1 else row_bytes
        return self._fingerprint(tensor.data_ptr(), rows, row_bytes, stride)

    def copy_and_fingerprint(self, destination: torch.Tensor, source: torch.Tensor) -> int:
        self._follow_torch()
        to, origin = destination.dtype, source.dtype
        together = destination.is_contiguous() and source.is_contiguous() and source.device == destination.device
        if not together or (to != origin and not {to, origin} <= _DTYPE.keys()):
            destination.copy_(source)
            return self.fingerprint(destination if destination.dim() <= 2 else destination.flatten(1))
        same = to == origin
        return self._copy_and_fingerprint(
            *(destination.data_ptr(), 0 if same else _DTYPE[to], source.data_ptr(), 0 if same else _DTYPE[origin]),
            *(destination.numel(), destination.element_size()),
        )


def _kv_dtype(cache: KVCache) -> int:
    """The kernels' number for the dtype of a cache."""
    code = _KV_DTYPE.get(cache.keys.dtype)
    if code is None:
        raise TypeError(f"cache.keys is {cache.keys.dtype}: the CPU kernels take bfloat16, float32 and int8")
    return code


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _indexed_rows(pair: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[int | None, int, int, int | None]:
    """Rows, their stride and number, and the index of each draw, as `sample` takes them."""
    if pair is None:
        return None, 0, 0, None
    rows, index = pair
    return rows.data_ptr(), rows.stride(0), rows.shape[0], index.data_ptr()


def _temperature(temperature: float | torch.Tensor) -> tuple[int | None, float]:
    """The pair (pointer to one a row, one for all) that the kernels take."""
    return (temperature.data_ptr(), 0.0) if isinstance(temperature, torch.Tensor) else (None, temperature)
