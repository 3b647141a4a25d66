"""The Triton backend: one function for each operation, with the arguments that every backend takes.

Arguments have been checked by `operations.py`. Nothing here waits for the device, so that the operations of a decode
step can be captured into a CUDA graph; only what hands a number to the host (`fingerprint`, `noise_bits`' caller) does.
"""

from __future__ import annotations

from rollout_kernels.gpu.activation import silu_and_mul, silu_and_mul_backward
from rollout_kernels.gpu.attention import paged_attention
from rollout_kernels.gpu.attention_backward import attention_backward
from rollout_kernels.gpu.copy_blocks import copy_blocks
from rollout_kernels.gpu.embedding import embedding
from rollout_kernels.gpu.fingerprint import copy_and_fingerprint, fingerprint
from rollout_kernels.gpu.fused import linear_rotary, linear_silu_and_mul
from rollout_kernels.gpu.kv_cache import write_kv
from rollout_kernels.gpu.linear import linear
from rollout_kernels.gpu.linear_int8 import linear_int8, quantize_weight
from rollout_kernels.gpu.logprobs import token_logprobs, token_logprobs_backward
from rollout_kernels.gpu.lora import lora_expand, lora_shrink
from rollout_kernels.gpu.noise import noise_bits
from rollout_kernels.gpu.norm import rms_norm, rms_norm_backward
from rollout_kernels.gpu.rotary import rotate_
from rollout_kernels.gpu.sampling import sample
from rollout_kernels.gpu.top_logprobs import top_logprobs

name = "triton"
kv_layout = "plain"

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
