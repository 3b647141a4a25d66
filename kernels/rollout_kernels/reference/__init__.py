"""The operations in plain torch and numpy: the truth that the other kernels are tested against, and the fallback.

Row-invariant and independent of the number of threads, like every backend: rows are computed one at a time, or by
elementwise work in float64 that is rounded once. All of them take float64 as well, and are then an oracle in float64.
"""

from rollout_kernels.reference.activation import silu_and_mul, silu_and_mul_backward
from rollout_kernels.reference.attention import attention_backward, paged_attention
from rollout_kernels.reference.embedding import embedding
from rollout_kernels.reference.fingerprint import copy_and_fingerprint, fingerprint
from rollout_kernels.reference.fused import linear_rotary, linear_silu_and_mul
from rollout_kernels.reference.kv_cache import copy_blocks, write_kv
from rollout_kernels.reference.linear import linear
from rollout_kernels.reference.linear_int8 import linear_int8, quantize_weight
from rollout_kernels.reference.logprobs import token_logprobs, token_logprobs_backward
from rollout_kernels.reference.lora import lora_expand, lora_shrink
from rollout_kernels.reference.noise import noise_bits
from rollout_kernels.reference.norm import rms_norm, rms_norm_backward
from rollout_kernels.reference.rotary import rotate_
from rollout_kernels.reference.sampling import sample
from rollout_kernels.reference.top_logprobs import top_logprobs

name = "reference"
kv_layout = "tiled"

__all__ = [
    "attention_backward",
    "copy_and_fingerprint",
    "copy_blocks",
    "embedding",
    "fingerprint",
    "kv_layout",
    "linear",
    "linear_int8",
    "linear_rotary",
    "linear_silu_and_mul",
    "lora_expand",
    "lora_shrink",
    "name",
    "noise_bits",
    "paged_attention",
    "quantize_weight",
    "rms_norm",
    "rms_norm_backward",
    "rotate_",
    "sample",
    "silu_and_mul",
    "silu_and_mul_backward",
    "token_logprobs",
    "token_logprobs_backward",
    "top_logprobs",
    "write_kv",
]
