"""Kernels of `rollout`: a small set of operations, each row-invariant, with gradients, on several backends.

>>> import rollout_kernels as rk
>>> out = rk.linear(x, weight)  # C++ on CPU tensors, compiled on first use; plain torch where there is no compiler
>>> with rk.use_backend("reference"):
...     expected = rk.linear(x, weight)
"""

from rollout_kernels.cpu.build import BuildError
from rollout_kernels.dispatch import (
    backend_info,
    backend_on,
    can_record,
    checkpoint_contexts,
    set_backend,
    use_backend,
)
from rollout_kernels.int8 import Int8Weight, int8_weight_shapes
from rollout_kernels.kv_cache import KVCache, KVLayout
from rollout_kernels.operations import (
    copy_and_fingerprint,
    copy_blocks,
    copy_blocks_between,
    embedding,
    fingerprint,
    kv_cache_shapes,
    kv_scale_shape,
    linear,
    linear_int8,
    linear_rotary,
    linear_silu_and_mul,
    linear_token_logprobs,
    lora_expand,
    lora_shrink,
    merged_linear,
    noise_bits,
    paged_attention,
    quantize_weight,
    rms_norm,
    rotary_embedding,
    sample,
    silu_and_mul,
    token_logprobs,
    token_logprobs_and_entropy,
    top_logprobs,
    varlen_attention,
    write_kv,
)
from rollout_kernels.results import (
    STATUS_NOT_NUMBERS,
    STATUS_NOTHING_LEFT,
    STATUS_OK,
    SampleArguments,
    SampleResult,
    TopLogprobsResult,
)

__all__ = [
    "STATUS_NOTHING_LEFT",
    "STATUS_NOT_NUMBERS",
    "STATUS_OK",
    "BuildError",
    "Int8Weight",
    "KVCache",
    "KVLayout",
    "SampleArguments",
    "SampleResult",
    "TopLogprobsResult",
    "backend_info",
    "backend_on",
    "can_record",
    "checkpoint_contexts",
    "copy_and_fingerprint",
    "copy_blocks",
    "copy_blocks_between",
    "embedding",
    "fingerprint",
    "int8_weight_shapes",
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
    "set_backend",
    "silu_and_mul",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "top_logprobs",
    "use_backend",
    "varlen_attention",
    "write_kv",
]
