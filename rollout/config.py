"""Configuration of an engine: one frozen dataclass, checked at construction; errors name the field."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from rollout.byte_sizes import parse_bytes
from rollout.speculation.config import SpeculativeConfig

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to know, apart from the model itself.

    `kv_cache_memory` (bytes, or text such as "4GiB") gives the KV pool outright; otherwise the pool takes what
    `gpu_memory_utilization` of the device's memory leaves after weights and the measured peak of a forward pass.
    `device` "auto" is CUDA where there is a device. `kernels` "auto" are the C++ kernels on a CPU and Triton's on CUDA.
    `dtype` "auto" is the checkpoint's own, bfloat16 for one in float16; "float16" has kernels on CUDA alone.
    `kv_cache_dtype` "int8", or "fp8" on CUDA (e4m3; also "fp8_e4m3", as vLLM has it), keeps keys and values in 8 bits
    with a scale for each token and head, in about half the memory of bfloat16 (`docs/quantization.md`). A trainer's
    forward pass does not quantise: the sampler's logprobs then differ from its own.
    `swap_space` is host memory for the KV of preempted requests, used with `preemption_mode="swap"`. `enforce_eager`
    runs every step through the model's Python instead of replaying recorded decode steps; results are the same.
    `quantization="int8"` computes matrix products with int8 copies of the weights, made anew by every policy update:
    faster, with logprobs of the rounded weights (`docs/quantization.md`); a trainer's own, from the weights themselves,
    differ from them and need a correction (`rollout_trainers.corrections`).
    `enable_lora` makes room for `max_loras` LoRA adapters of ranks up to `max_lora_rank` (`docs/lora.md`).
    `generation_config` "off" samples with the defaults of `SamplingParams` where no parameters are given; "auto" with
    what the model's `generation_config.json` suggests, or that in another folder. What it changes is logged.
    `num_threads` sets the threads of torch and of the kernels, for the whole process.
    `max_logprobs` is the most that a request may ask for with `logprobs` or `prompt_logprobs`; -1 is no limit.
    `logprobs_mode` says which distribution the dictionaries of logprobs are of: the model's own ("raw_logprobs") or the
    one that the token was drawn from ("processed_logprobs"). The arrays of an output hold both in any case.
    `data_parallel_size` above 1 runs so many copies of the engine, each in a process of its own, which share the
    requests. `num_threads`, `kv_cache_memory` and `swap_space` are of each; without `num_threads` they share the
    machine's cores, and `gpu_memory_utilization` on a CPU is of all of them. On CUDA each has a device of its own.
    `speculative_config`, a `SpeculativeConfig` or a dictionary of its fields, has several tokens of a sample computed
    in one step where they can be guessed (`docs/speculation.md`); results are the same.
    `reasoning_start` and `reasoning_end` are the texts between which the model thinks (`thinking_token_budget`).
    """

    model: str
    tokenizer: str | None = None
    generation_config: str = "off"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory: int | str | None = None
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] = "auto"  # the last is stored as "fp8"
    gpu_memory_utilization: float = 0.5
    swap_space: int | str = 0
    enable_prefix_caching: bool = True
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    kernels: Literal["auto", "cpu", "triton", "reference"] = "auto"
    enforce_eager: bool = False
    quantization: Literal["int8"] | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    speculative_config: SpeculativeConfig | None = None
    num_threads: int | None = None
    data_parallel_size: int = 1
    seed: int = 0
    trust_remote_code: bool = False
    reasoning_start: str = "<think>"
    reasoning_end: str = "</think>"
    worker_extension_cls: str | None = None

    def __post_init__(self) -> None:
        _check_choice(self, "device", ("auto", "cpu", "cuda"))
        _check_choice(self, "dtype", ("auto", "bfloat16", "float16", "float32"))
        _check_choice(self, "kv_cache_dtype", ("auto", "int8", "fp8", "fp8_e4m3"))
        if self.kv_cache_dtype == "fp8_e4m3":
            object.__setattr__(self, "kv_cache_dtype", "fp8")
        _check_choice(self, "preemption_mode", ("recompute", "swap"))
        _check_choice(self, "scheduling_policy", ("fcfs", "priority"))
        _check_choice(self, "logprobs_mode", ("raw_logprobs", "processed_logprobs"))
        _check_choice(self, "kernels", ("auto", "cpu", "triton", "reference"))
        _check_choice(self, "quantization", (None, "int8"))
        sizes = ("max_num_seqs", "max_num_batched_tokens", "block_size")
        for field in (*sizes, "data_parallel_size", "max_loras", "max_lora_rank"):
            _check_positive(self, field)
        for field in ("max_model_len", "num_threads"):
            if getattr(self, field) is not None:
                _check_positive(self, field)
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ValueError(
                f"generation_config={self.generation_config!r} is not valid: it must be 'off', 'auto' or a folder"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization!r} is not valid: above 0, up to 1")
        if isinstance(self.max_logprobs, bool) or not isinstance(self.max_logprobs, int) or self.max_logprobs < -1:
            raise ValueError(
                f"max_logprobs={self.max_logprobs!r} is not valid: an integer of at least 0, or -1 for no limit"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r} is not valid: it must be an integer from 0 to {2**63 - 1}")
        if self.kv_cache_memory is not None:
            size = parse_bytes(self.kv_cache_memory, "kv_cache_memory")
            if size <= 0:
                raise ValueError(f"kv_cache_memory={self.kv_cache_memory!r} is not valid: it must be above 0")
            object.__setattr__(self, "kv_cache_memory", size)
        object.__setattr__(self, "swap_space", parse_bytes(self.swap_space, "swap_space"))
        if int(self.swap_space) < 0:
            raise ValueError(f"swap_space={self.swap_space!r} is not valid: it must be at least 0")
        if self.preemption_mode == "recompute" and self.swap_space:
            raise ValueError(
                f"swap_space={self.swap_space!r} is not used with preemption_mode='recompute': leave it at 0"
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ValueError("swap_space=0 is not valid with preemption_mode='swap': give it bytes, e.g. '1GiB'")
        for field in ("reasoning_start", "reasoning_end"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise ValueError(f"{field}={getattr(self, field)!r} is not valid: it must be text, not empty")
        for field in ("enforce_eager", "enable_lora"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}={getattr(self, field)!r} is not valid: it must be True or False")
        object.__setattr__(self, "speculative_config", _speculative_config(self.speculative_config))
        if self.enable_lora and self.data_parallel_size > 1:
            raise ValueError(
                f"enable_lora=True is not supported with data_parallel_size={self.data_parallel_size}: leave that at 1"
            )
        if not self.enable_lora:
            for field, default in (("max_loras", 1), ("max_lora_rank", 16)):
                if getattr(self, field) != default:
                    raise ValueError(f"{field}={getattr(self, field)} is not used with enable_lora=False: switch it on")
        if self.trust_remote_code:
            raise ValueError("trust_remote_code=True is not supported: register the architecture with ModelRegistry")


def _speculative_config(value: object) -> SpeculativeConfig | None:
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    names = [field.name for field in fields(SpeculativeConfig)]
    if not isinstance(value, dict):
        raise ValueError(
            f"speculative_config={value!r} is not valid: it must be a SpeculativeConfig or a dictionary of its fields"
        )
    unknown = [name for name in value if name not in names]
    if unknown or "method" not in value:
        why = f"{unknown[0]!r} is no field" if unknown else "'method' is missing"
        raise ValueError(f"speculative_config={value!r} is not valid: {why}; its fields are {', '.join(names)}")
    return SpeculativeConfig(**value)


def _check_choice(config: EngineConfig, field: str, choices: tuple[str | None, ...]) -> None:
    value = getattr(config, field)
    if value not in choices:
        raise ValueError(f"{field}={value!r} is not valid: it must be one of {', '.join(map(repr, choices))}")


def _check_positive(config: EngineConfig, field: str) -> None:
    value = getattr(config, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}={value!r} is not valid: it must be an integer of at least 1")
