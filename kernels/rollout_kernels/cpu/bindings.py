"""The C interface of the kernels, as ctypes sees it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_uint64, c_void_p
from typing import Any


class CSampleArguments(ctypes.Structure):
    """Mirrors `SampleArguments` of `csrc/sampler.cpp`."""

    _fields_ = [
        ("logits", c_void_p),
        ("row_stride", c_int64),
        ("vocab_size", c_int64),
        ("num_draws", c_int64),
        ("num_rows", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seed", c_void_p),
        ("sample_index", c_void_p),
        ("position", c_void_p),
        ("row_index", c_void_p),
        ("banned_start", c_void_p),
        ("banned_ids", c_void_p),
        ("adjusted", c_void_p),
        ("adjusted_stride", c_int64),
        ("num_adjusted", c_int64),
        ("adjusted_index", c_void_p),
        ("allowed", c_void_p),
        ("allowed_stride", c_int64),
        ("num_allowed", c_int64),
        ("allowed_index", c_void_p),
        ("forced", c_void_p),
        ("token_ids", c_void_p),
        ("raw_logprobs", c_void_p),
        ("sampled_logprobs", c_void_p),
        ("kept_mass", c_void_p),
        ("entropy", c_void_p),
        ("status", c_void_p),
        ("num_kept", c_void_p),
    ]


class CTopArguments(ctypes.Structure):
    """Mirrors `TopArguments` of `csrc/top_logprobs.cpp`."""

    _fields_ = [
        ("logits", c_void_p),
        ("row_stride", c_int64),
        ("vocab_size", c_int64),
        ("num_draws", c_int64),
        ("num_rows", c_int64),
        ("num_top", c_int64),
        ("token_ids", c_void_p),
        ("row_index", c_void_p),
        ("chosen_start", c_void_p),
        ("chosen_ids", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("chosen_logprobs", c_void_p),
    ]


_CODES: dict[str, Any] = {
    "p": c_void_p,
    "l": c_int64,
    "i": c_int,
    "f": c_float,
    "u": c_uint64,
    "S": POINTER(CSampleArguments),
    "T": POINTER(CTopArguments),
    "-": None,
}

# Function -> result and arguments: p pointer, l 64-bit integer, i int, f float, u unsigned 64-bit integer.
SIGNATURES = {
    "rk_set_num_threads": ("-", "l"),
    "rk_embedding": ("l", "pli p l p ll"),
    "rk_linear": ("-", "pli pli p pli lll"),
    "rk_linear_rotary": ("l", "pli pl p p lll p p lll"),
    "rk_linear_silu_and_mul": ("-", "pli pl p p lll"),
    "rk_linear_int8": ("-", "pli pp pi p pli lll"),
    "rk_quantize_weight": ("-", "pli pp ll"),
    "rk_rms_norm": ("-", "pli pi f pl pi p ll"),
    "rk_rms_norm_backward": ("-", "pi p p pi f pi p p p ll"),
    "rk_rotary": ("l", "pll pll i l p p l f l"),
    "rk_silu_and_mul": ("-", "pli p ll"),
    "rk_silu_and_mul_backward": ("-", "p pli p ll"),
    "rk_lora_shrink": ("l", "pli p p p llll"),
    "rk_lora_expand": ("l", "pp i p p pli llll"),
    "rk_write_kv": ("l", "pll pll ii pp pp p l lll"),
    "rk_copy_blocks": ("-", "p p p l p l"),
    "rk_paged_attention": ("-", "pl pp pp ii pl p p p lllll f lf p p"),
    "rk_attention_backward": ("-", "p pl pl pl p p i p llll f l f p p p"),
    "rk_sample": ("l", "S"),
    "rk_noise_bits": ("-", "lll p p l"),
    "rk_token_logprobs": ("l", "pl p p f p p ll"),
    "rk_token_logprobs_backward": ("-", "pl p p f p p i ll"),
    "rk_top_logprobs": ("l", "T"),
    "rk_replay": ("l", "ppp l p"),
    "rk_fingerprint": ("u", "p lll"),
    "rk_copy_and_fingerprint": ("u", "pi pi ll"),
}


def bind(library: ctypes.CDLL) -> dict[str, Any]:
    """The library's functions by name without `rk_`, their argument types set."""
    functions = {}
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype = _CODES[result]
        function.argtypes = [_CODES[code] for code in arguments.replace(" ", "")]
        functions[name.removeprefix("rk_")] = function
    return functions
