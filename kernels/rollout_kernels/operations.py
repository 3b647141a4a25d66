"""The public operations: check the arguments, choose the backend, go through autograd where a gradient is wanted.

T is the number of tokens, H the hidden size, Hq and Hkv the query and key-value heads, D the head dimension, R the
number of rows of logits, V the vocabulary. Model tensors are bfloat16 or float32, float16 on CUDA and for the
reference, and float64 for the reference; the *wide* dtype is float32 (float64 for float64 inputs). Every output row has
the same bits whatever rows stand beside it and however many threads work. Errors: `TypeError` for a dtype, `ValueError`
for a shape, a layout or a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout_kernels import autograd, autograd_linear, checks
from rollout_kernels.dispatch import backend_for, current_setting
from rollout_kernels.int8 import Int8Weight, empty_int8_weight
from rollout_kernels.kv_cache import KVCache, kv_cache_shapes, kv_scale_shape
from rollout_kernels.reference.reduce import accumulation_dtype
from rollout_kernels.results import SampleArguments, SampleResult, TopLogprobsResult

__all__ = [
    "copy_and_fingerprint",
    "copy_blocks",
    "copy_blocks_between",
    "embedding",
    "fingerprint",
    "kv_cache_shapes",
    "kv_scale_shape",
    "linear",
    "linear_int8",
    "linear_rotary",
    "linear_silu_and_mul",
    "linear_token_logprobs",
    "lora_expand",
    "lora_shrink",
    "merged_linear",
    "noise_bits",
    "paged_attention",
    "quantize_weight",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "token_logprobs",
    "top_logprobs",
    "varlen_attention",
    "write_kv",
]


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _goes_through_torch(*tensors: torch.Tensor | None) -> bool:
    """Whether torch must see the operation: a gradient is wanted, or a compiler, a transform or a fake tensor looks on.

    Otherwise the kernel is called at once, without the dispatcher's microseconds.
    """
    if torch.compiler.is_compiling() or type(tensors[0]) not in _PLAIN_TENSORS:
        return True
    if torch._C._are_functorch_transforms_active():  # refused there by name; here it would be a pointer that is missing
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of weight [V, H] for token ids (int64 [T]) -> [T, H], widened to float32 (float64).

    Raises `ValueError` for an id outside the table, `IndexError` where a gradient is wanted.
    """
    checks.embedding(token_ids, weight)
    if _goes_through_torch(weight):
        return torch.nn.functional.embedding(token_ids, weight).to(accumulation_dtype(weight.dtype))
    return backend_for(weight).embedding(token_ids, weight)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] @ weight [N, K]^T (+ bias [N]) -> [T, N], accumulated in float32, rounded once to `out_dtype` (x's)."""
    out_dtype = out_dtype or x.dtype
    checks.linear(x, weight, bias, out_dtype)
    if _goes_through_torch(x, weight, bias):
        return autograd_linear.linear(x, weight, bias, out_dtype, current_setting())
    return backend_for(x).linear(x, weight, bias, out_dtype)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu_and_mul(linear(x, weight, bias)) for weight [2I, K] -> [T, I], the same bits in one pass."""
    if _goes_through_torch(x, weight, bias):
        return silu_and_mul(linear(x, weight, bias))
    checks.linear(x, weight, bias, x.dtype)
    if weight.shape[0] % 2:
        checks.fail_shape("weight", weight, "[2I, K]")
    return backend_for(x).linear_silu_and_mul(x, weight, bias)


def linear_rotary(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rotated_columns: int,
) -> torch.Tensor:
    """linear(x, weight, bias) [T, N] with rotary embedding on its first columns, the same bits in one pass.

    `rotated_columns` of N are heads of size D = `cos_sin.shape[1]` (see `rotary_embedding`). Not differentiable.
    """
    checks.linear(x, weight, bias, x.dtype)
    checks.rotary_table(positions, cos_sin, x.shape[0], x.dtype)
    if rotated_columns % cos_sin.shape[1] or not 0 <= rotated_columns <= weight.shape[0]:
        raise ValueError(
            f"rotated_columns={rotated_columns} is not valid: it must be a multiple of the head size "
            f"{cos_sin.shape[1]}, up to {weight.shape[0]}"
        )
    return backend_for(x).linear_rotary(x, weight, bias, positions, cos_sin, rotated_columns)


def merged_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The `linear` of x [T, K] with each weight [N_i, K] (and bias [N_i]), side by side: [T, sum of N_i].

    One product where the weights lie one after another in one storage, and the biases too; the same bits otherwise.
    Gradients of the weights are views of one tensor.
    """
    out_dtype = out_dtype or x.dtype
    if len(biases) not in (0, len(weights)) or not weights:
        raise ValueError(f"there are {len(weights)} weights and {len(biases)} biases: give one or none to each weight")
    return autograd_linear.merged_linear(x, list(weights), list(biases), out_dtype, current_setting())


def quantize_weight(weight: torch.Tensor, into: Int8Weight | None = None) -> Int8Weight:
    """weight [N, K], in a model's dtype but float64, rounded to int8 with one scale a row, packed for `linear_int8`.

    Overwrites `into`, made by an earlier call or of the shapes of `int8_weight_shapes`, where it is given. All backends
    give the same bits. A row that holds NaN or an infinity gets the scale NaN, so that its products are NaN.
    """
    checks.quantize_weight(weight, into)
    packed = empty_int8_weight(*weight.shape, device=weight.device) if into is None else into
    backend_for(weight).quantize_weight(weight, packed)
    return packed


def linear_int8(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] @ weight^T (+ bias [N]) -> [T, N] with int8 products, rounded once to `out_dtype` (x's).

    Each row of x, in a model's dtype but float64, is rounded to int8 with one scale for every 32 neighbours along K.
    Products inside such a group are summed as integers, groups in ascending order as float32. A group that holds NaN or
    an infinity makes its row NaN. There is no gradient: raises `ValueError` where one is wanted.
    """
    out_dtype = out_dtype or x.dtype
    checks.linear_int8(x, weight, bias, out_dtype)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError("linear_int8 has no gradient: use linear with the weight itself where gradients are on")
    return backend_for(x).linear_int8(x, weight, bias, out_dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed [T, H] in `out_dtype` (the weight's), total = x + residual [T, H] in the wide dtype).

    normed = total / sqrt(mean(total^2) + eps) * weight, rounded once. Without a residual the total is x, and x itself
    is returned where it has the wide dtype.
    """
    out_dtype = out_dtype or weight.dtype
    checks.rms_norm(x, weight, residual, out_dtype)
    if not _goes_through_torch(x, weight, residual):
        return backend_for(x).rms_norm(x, weight, eps, residual, out_dtype)
    if residual is None and x.dtype is accumulation_dtype(x.dtype):
        return autograd.normalise(x, weight, eps, out_dtype, current_setting()), x
    return autograd.rms_norm(x, weight, eps, residual, out_dtype, current_setting())


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D] and k [T, Hkv, D] rotated, half-split style, computed in float32 and rounded once.

    `positions` int64 [T] index `cos_sin` [max_pos, D] (D/2 cosines, then D/2 sines), float32. Without gradients q and k
    are rotated in place, and returned (a compiler gets copies); they may be views of a fused projection, rows apart.
    """
    checks.rotary(q, k, positions, cos_sin)
    if _goes_through_torch(q, k):
        return autograd.rotate(q, k, positions, cos_sin, 1.0, current_setting())
    backend_for(q).rotate_(q, k, positions, cos_sin, 1.0)
    return q, k


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:] for x [T, 2I] -> [T, I], computed in float32 and rounded once."""
    checks.silu_and_mul(x)
    if _goes_through_torch(x):
        return autograd.silu_and_mul(x, current_setting())
    return backend_for(x).silu_and_mul(x)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, adapter_ids: torch.Tensor) -> torch.Tensor:
    """The first half of low-rank adapters (Hu et al., 2021, "LoRA"), each token with its own -> float32 [T, R].

    x [T, K] (rows may be apart) @ a[adapter_ids[t]]^T, for a [A, R, K] of x's dtype and `adapter_ids` int32 [T]: zeros
    for a token whose id is -1. Adapters of lower rank are filled up with zeros. Accumulated in float32 (float64 for
    float64). Raises `ValueError` for an id of no adapter (on a GPU, which does not look back, it counts as -1), and
    where a gradient is wanted, since there is none.
    """
    checks.lora_shrink(x, a, adapter_ids)
    _refuse_grad("lora_shrink", x, a)
    return backend_for(x).lora_shrink(x, a, adapter_ids)


def lora_expand(
    y: torch.Tensor, b: torch.Tensor, adapter_ids: torch.Tensor, out: torch.Tensor, scales: torch.Tensor
) -> None:
    """The second half: out [T, N] += scales[adapter_ids[t]] * y [T, R] @ b[adapter_ids[t]]^T, in place.

    b [A, N, R]; y and `scales` [A] are float32 (float64 where b is); `out` has a model dtype, is rounded once, and may
    be a view with rows apart, such as the queries in a fused projection. Tokens whose id is -1 stay as they are.
    Raises as `lora_shrink`.
    """
    checks.lora_expand(y, b, adapter_ids, out, scales)
    _refuse_grad("lora_expand", y, b, out)
    backend_for(b).lora_expand(y, b, adapter_ids, out, scales)


def _refuse_grad(operation: str, *tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(f"{operation} has no gradient: call it under torch.no_grad(), or detach its arguments")


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Writes k and v [T, Hkv, D] to the slots int64 [T] of a layer's cache; no two tokens may name one slot.

    The cache has the shapes of `kv_cache_shapes`, and those of `kv_scale_shape` where it is quantised: then each token
    and head is written as `QUANTISED_MAXIMUM` says. Raises `ValueError` for a slot outside it, and writes nothing.
    """
    backend = backend_for(k)
    checks.packed_kv(k, v)
    checks.kv_cache(cache, k, k.shape[2], backend.kv_layout)
    if cache.keys.shape[1] != k.shape[1]:
        checks.fail_shape("k", k, f"[T, {cache.keys.shape[1]}, D], as the cache has it")
    checks.vector("slot_mapping", slot_mapping, k.shape[0], torch.int64)
    backend.write_kv(k, v, cache, slot_mapping)


def paged_attention(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    scale: float,
    return_lse: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    last_places: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of q [T, Hq, D] over the paged cache -> [T, Hq, D] (and log-sum-exp of the scores [T, Hq]).

    Sequence s has the queries `query_start[s] : query_start[s + 1]` (int32 [S + 1]), which are its last ones (there may
    be none), and `seq_lens[s]` keys (int32 [S], those of this step included), found through `block_tables` (int32
    [S, max_blocks]). With a `window` the query at position p sees the keys p - window + 1 to p; with a `soft_cap` a
    score s becomes soft_cap * tanh(s / soft_cap). With `last_places` (int32 [S]) the last key of sequence s stands in
    the block table where position `last_places[s]` would, unless that is negative: so several sequences that differ in
    their last token alone can share a table, each with one query (not on CUDA). Not differentiable: see
    `varlen_attention`.
    """
    backend = backend_for(q)
    checks.kv_cache(cache, q, q.shape[-1], backend.kv_layout)
    checks.query_heads(q, cache.keys.shape[1])
    checks.attention_options(scale, window, soft_cap)
    num_seqs = seq_lens.shape[0]
    checks.vector("seq_lens", seq_lens, num_seqs, torch.int32)
    checks.vector("query_start", query_start, num_seqs + 1, torch.int32)
    checks.has_dtype("block_tables", block_tables, torch.int32)
    if block_tables.dim() != 2 or block_tables.shape[0] != num_seqs:
        checks.fail_shape("block_tables", block_tables, f"[{num_seqs}, max_blocks]")
    checks.unit_stride("block_tables", block_tables)
    if last_places is not None:
        checks.vector("last_places", last_places, num_seqs, torch.int32)
    out, lse = backend.paged_attention(
        q, cache, block_tables, query_start, seq_lens, block_size, scale, return_lse, window, soft_cap, last_places
    )
    return (out, lse) if return_lse else out


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal self-attention over packed sequences, differentiable: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].

    The forward writes k and v to a scratch KV pool and calls `paged_attention`'s kernel: the engine's bits exactly,
    `window` and `soft_cap` included. On a CPU gradients under a soft cap, or a window that hides keys, are computed by
    the reference: right, and slow.
    """
    checks.packed_kv(k, v)
    checks.attention_options(scale, window, soft_cap)
    checks.same_dtype("q", q, "k", k)
    checks.query_heads(q, k.shape[1])
    if k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        checks.fail_shape("k", k, f"[{q.shape[0]}, Hkv, {q.shape[2]}]")
    if _goes_through_torch(q, k, v):
        return autograd.varlen_attention(q, k, v, query_start, scale, window, soft_cap, current_setting())[0]
    checks.query_start(query_start, q.shape[0])
    return autograd.packed_attention(backend_for(q), q, k, v, query_start, scale, False, window, soft_cap)[0]


def copy_blocks(caches: Sequence[KVCache], pairs: Sequence[tuple[int, int]], tiles_per_block: int) -> None:
    """Copies block `source` to block `destination` in every layer's cache, its scales included, pair after pair."""
    copy_blocks_between(caches, caches, pairs, tiles_per_block)


def copy_blocks_between(
    source_caches: Sequence[KVCache],
    destination_caches: Sequence[KVCache],
    pairs: Sequence[tuple[int, int]],
    tiles_per_block: int,
) -> None:
    """Copies blocks from one pool to another (swap): (source, destination) pairs in order, for every layer."""
    sources = [tensor for cache in source_caches for tensor in cache.tensors()]
    destinations = [tensor for cache in destination_caches for tensor in cache.tensors()]
    if len(source_caches) != len(destination_caches):
        raise ValueError(f"source_caches has {len(source_caches)} layers, destination_caches {len(destination_caches)}")
    if len(sources) != len(destinations):
        raise ValueError("source_caches and destination_caches must both be quantised, or neither")
    for source, destination in zip(sources, destinations, strict=True):
        checks.same_dtype("source_caches", source, "destination_caches", destination)
        if source.shape[1:] != destination.shape[1:] or not (source.is_contiguous() and destination.is_contiguous()):
            checks.fail_shape("destination_caches", destination, f"[tiles, *{tuple(source.shape[1:])}] and contiguous")
        limits = (source.shape[0] // tiles_per_block, destination.shape[0] // tiles_per_block)
        for pair in pairs:
            if not all(0 <= block < limit for block, limit in zip(pair, limits, strict=True)):
                raise ValueError(f"pairs has {pair}: the pools have {limits[0]} and {limits[1]} blocks")
    if sources and pairs:
        on_device = destinations[0] if sources[0].is_cpu else sources[0]  # the host's kernels cannot reach a GPU's pool
        backend_for(on_device).copy_blocks(sources, destinations, list(pairs), tiles_per_block)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
    row_index: torch.Tensor | None = None,
    banned: tuple[torch.Tensor, torch.Tensor] | None = None,
    adjusted: tuple[torch.Tensor, torch.Tensor] | None = None,
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None,
    forced: torch.Tensor | None = None,
) -> SampleResult:
    """Draws tokens from logits float32 [rows, V]; every other argument has one value a draw (see `SampleArguments`).

    tempered = logits / temperature; top-k keeps the values that reach the k-th largest; top-p then keeps, in the order
    (probability descending, id ascending), the tokens before which less than top_p of the rest's mass lies; min-p then
    keeps what reaches min_p times the largest probability. The token is argmax p_i / E_i with E_i = -log(1 - u_i) and
    u_i = (noise_bits + 0.5) / 2^32: a pure function of the row and the draw's numbers. Temperature 0 takes the largest
    logit, the lowest id among equals.

    Banned ids, and ids that are not allowed, have probability 0. An adjusted row (the logits after penalties and
    biases; -inf is a token without mass) takes the place of the draw's logits in all of this but `raw_logprobs`. A
    forced token is reported on in place of a draw. See `SampleResult` for what comes back.

    Raises `ValueError` naming the argument and the draw for a value out of range. On a GPU, where nothing looks back, a
    draw with such a value draws nothing, and an id outside the vocabulary is not banned.
    """
    arguments = SampleArguments(
        *(temperature, top_k, top_p, min_p, seed, sample_index, position),
        row_index=row_index,
        banned=banned,
        adjusted=adjusted,
        allowed=allowed,
        forced=forced,
    )
    checks.sample(logits, arguments)
    return backend_for(logits).sample(logits, arguments)


def noise_bits(seed: int, sample_index: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """The 32 noise bits (int64) of each token id (int64, contiguous) in the draw that the three numbers name."""
    checks.vector("token_ids", token_ids, token_ids.numel(), torch.int64)
    return backend_for(token_ids).noise_bits(seed, sample_index, position, token_ids)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Log-probability [R] of a token id (int64 [R]) under softmax(logits [R, V] / temperature), differentiable.

    Bit for bit what `sample` reports for such a token, row and temperature (one for all, or float32 [R]; above 0). A
    row with NaN or +inf gives NaN.
    """
    return token_logprobs_and_entropy(logits, token_ids, temperature)[0]


def token_logprobs_and_entropy(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `token_logprobs`, and the entropy [R] of the tempered distribution in nats, which has no gradient."""
    checks.token_logprobs(logits, token_ids, temperature)
    if _goes_through_torch(logits):
        return autograd_linear.token_logprobs(logits, token_ids, *_temperature(temperature), current_setting())
    return backend_for(logits).token_logprobs(logits, token_ids, temperature)


def _temperature(temperature: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """As the pair (one a row, one for all) of which the operations read the first that is there."""
    return (temperature, 1.0) if isinstance(temperature, torch.Tensor) else (None, temperature)


def top_logprobs(
    logits: torch.Tensor,
    num_top: int,
    token_ids: torch.Tensor,
    row_index: torch.Tensor | None = None,
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> TopLogprobsResult:
    """The `num_top` (0 to V) largest log-probabilities of each of D rows of logits float32 [rows, V], with their ids.

    Draw d looks at row `row_index[d]` (int64 [D]; None: row d). `token_ids` (int64 [D]) names a token for each, -1
    none, whose log-probability and rank come back; `chosen` (int32 [D + 1] offsets into int32 ids [C]) names more, for
    their log-probabilities alone. See `TopLogprobsResult`.

    Raises `ValueError` naming the argument and the draw for a value out of range (on a GPU, where nothing looks back,
    it gives NaN), and where a gradient is wanted, since there is none.
    """
    checks.top_logprobs(logits, num_top, token_ids, row_index, chosen)
    _refuse_grad("top_logprobs", logits)
    return backend_for(logits).top_logprobs(logits, num_top, token_ids, row_index, chosen)


def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    chunk: int = 512,
    kept_bytes: int = 256 << 20,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs [T], entropy [T]) of token ids (int64 [T]) under the softmax of hidden @ weight^T / temperature.

    hidden is [T, H] and weight [V, H]. The logits of at most `chunk` rows are held at a time, and where a backward pass
    will follow, up to `kept_bytes` of them until then; it computes those of the other rows again. Differentiable with
    respect to hidden and weight, both logprobs and entropy. Logprobs are bit for bit those of `sample`.
    """
    checks.linear(hidden, weight, None, hidden.dtype)
    checks.vector("token_ids", token_ids, hidden.shape[0], torch.int64)
    if isinstance(temperature, torch.Tensor):
        checks.vector("temperature", temperature, hidden.shape[0], torch.float32)
    if chunk < 1:
        raise ValueError(f"chunk={chunk!r} is not valid: it must be at least 1")
    if kept_bytes < 0:
        raise ValueError(f"kept_bytes={kept_bytes!r} is not valid: it must be at least 0")
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    num_kept = min(hidden.shape[0], kept_bytes // (4 * weight.shape[0])) if with_gradient else 0
    logprobs, entropy, _ = autograd_linear.linear_token_logprobs(
        hidden, weight, token_ids, *_temperature(temperature), chunk, num_kept, current_setting()
    )
    return logprobs, entropy


def fingerprint(tensor: torch.Tensor) -> int:
    """64 bits of the tensor's bytes in logical order (0 to 2^64 - 1), whatever its dtype, shape or strides.

    Views with rows apart are read in place; other strided tensors are copied first.
    """
    tensor = tensor.detach()
    in_place = tensor.is_contiguous() or (tensor.dim() == 2 and tensor.stride(1) == 1)
    tensor = tensor if in_place else tensor.contiguous()
    return backend_for(tensor).fingerprint(tensor if tensor.dim() <= 2 else tensor.flatten(1))


def copy_and_fingerprint(destination: torch.Tensor, source: torch.Tensor) -> int:
    """`destination.copy_(source)`, and the `fingerprint` of what was written, in one pass where both are contiguous.

    Converts as torch does (to nearest, ties to even). Raises `ValueError` for unequal shapes or a destination with rows
    that are not contiguous.
    """
    destination, source = destination.detach(), source.detach()
    if destination.shape != source.shape:
        raise ValueError(f"source has shape {tuple(source.shape)}, destination {tuple(destination.shape)}")
    if not destination.is_contiguous() and not (destination.dim() == 2 and destination.stride(1) == 1):
        raise ValueError(f"destination has strides {destination.stride()}: its rows must be contiguous")
    value = backend_for(destination).copy_and_fingerprint(destination, source)
    if not destination.is_inference():
        torch.autograd.graph.increment_version(destination)
    return value
