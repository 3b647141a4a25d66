"""One device of the engine: loads the weights, sizes and holds the KV pool, executes plans, sleeps and wakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

import rollout_kernels
from rollout.config import EngineConfig
from rollout.core.schedule import Draw, ScheduledSequence, SchedulePlan, StepResult
from rollout.models.loader import (
    build_model,
    load_weights,
    materialize,
    num_parameter_bytes,
    read_config,
    resolve_dtype,
)
from rollout.platform import cpu
from rollout.sampling_params import SamplingParams
from rollout.worker.batch import KVCaches
from rollout.worker.decode_program import DecodePrograms
from rollout.worker.ledger import LedgerReport, MemoryLedger, SleepReport, trim_heap
from rollout.worker.quantized import QuantizedWeights
from rollout.worker.runner import Runner
from rollout.worker.slab import Slab

_SLEEPERS = {
    "weights": ("weights",),
    "quantized_weights": ("quantized_weights",),
    "kv_cache": ("kv_cache", "swap", "workspace"),
}  # wake-up tag -> owners in the ledger
_PROFILE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class KVPoolSize:
    """Blocks of the device's pool and of the host's swap pool, and the bytes of one block over all layers."""

    num_blocks: int
    num_host_blocks: int
    block_bytes: int


class Worker:
    """Everything on one device. The model's parameters and the KV pool lie in slabs whose pages can be given back."""

    def __init__(self, config: EngineConfig, folder: Path, on_tensor: Callable[[str], None] | None = None) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.config = config
        self.device = torch.device("cpu")
        self.folder = folder
        model_config = read_config(folder)
        self.dtype = resolve_dtype(config.dtype, model_config)
        self.model = build_model(model_config, self.dtype)
        self.ledger = MemoryLedger()

        self._weights = Slab("weights", num_parameter_bytes(self.model))
        materialize(self.model, self._weights.carve, self.device)
        self.ledger.register("weights", self._weights)
        self.ledger.register("buffers", lambda: sum(buffer.nbytes for buffer in self.model.buffers()))
        self.quantized: QuantizedWeights | None = None
        if config.quantization == "int8":
            self.quantized = QuantizedWeights(self.model)
            self.ledger.register("quantized_weights", self.quantized.slab)
        self.reload_weights(on_tensor)
        self.runner = Runner(self.model, [], [], config.block_size)
        self.pool = self._size_pool()
        self._allocate_pool()
        self._prepare_decode_programs()

    def reload_weights(self, on_tensor: Callable[[str], None] | None = None) -> None:
        """Reads the checkpoint again, into the tensors that are there."""
        load_weights(self.model, self.folder, on_tensor)
        self.remake_quantized_weights()

    def remake_quantized_weights(self) -> None:
        """Makes the int8 copies of the weights anew, where the engine has them."""
        if self.quantized is not None:
            with self._kernels():
                self.quantized.remake()

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the kernels read, under the checkpoint's names."""
        return dict(self.model.named_parameters())

    def tied(self) -> Mapping[str, str]:
        return self.model.tied_names

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """What the forward pass reads besides the parameters; computed from the configuration."""
        return dict(self.model.named_buffers())

    def execute(self, plan: SchedulePlan) -> StepResult:
        """Runs one step, on this engine's kernels."""
        assert self.quantized is None or self.quantized.is_current, "the int8 copies are not those of the weights"
        with self._kernels():
            return self.runner.execute(plan)

    def _kernels(self) -> AbstractContextManager[None]:
        return nullcontext() if self.config.kernels == "auto" else rollout_kernels.use_backend(self.config.kernels)

    def sleep(self, level: int, keep_weights: bool) -> SleepReport:
        """Gives memory back: level 1 the KV pool, level 2 the weights too, unless a trainer shares them, and the int8
        copies of them in any case."""
        owners = list(_SLEEPERS["kv_cache"])
        if level == 2:
            owners += _SLEEPERS["quantized_weights"]
            if self.quantized is not None:
                self.quantized.give_up()
            if not keep_weights:
                owners += _SLEEPERS["weights"]
        return self.ledger.release([owner for owner in owners if owner in self.ledger.owners])

    def memory_ledger(self) -> LedgerReport:
        return self.ledger.report()

    def _size_pool(self) -> KVPoolSize:
        layer_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self._cache_tensors(1))
        block_bytes = layer_bytes * self.model.shape.num_hidden_layers
        if self.config.kv_cache_memory is not None:
            budget = int(self.config.kv_cache_memory)
        else:
            total = cpu.total_memory()
            peak = self._measure_peak()
            weights = self._weights.num_bytes + (0 if self.quantized is None else self.quantized.slab.num_bytes)
            budget = int(total * self.config.gpu_memory_utilization) - weights - peak
            if budget < block_bytes:
                raise ValueError(
                    f"gpu_memory_utilization={self.config.gpu_memory_utilization} leaves no room for KV: of {total:,} "
                    f"bytes the weights take {weights:,} and a step at most {peak:,}"
                )
        num_blocks = budget // block_bytes
        if num_blocks < 1:
            raise ValueError(f"kv_cache_memory={budget:,} is not valid: one block takes {block_bytes:,} bytes")
        num_host_blocks = int(self.config.swap_space) // block_bytes
        if self.config.preemption_mode == "swap" and num_host_blocks < 1:
            raise ValueError(
                f"swap_space={self.config.swap_space:,} is not valid: one block takes {block_bytes:,} bytes"
            )
        return KVPoolSize(num_blocks, num_host_blocks, block_bytes)

    def _measure_peak(self) -> int:
        """Bytes that a step of `max_num_batched_tokens` needs for activations, from a shorter one that really runs."""
        tokens = min(_PROFILE_TOKENS, self.config.max_num_batched_tokens, self.model.shape.max_position_embeddings)
        num_blocks = -(-tokens // self.config.block_size)
        self.runner.kv_caches = self._caches(num_blocks, None)
        rows = min(self.config.max_num_seqs, tokens)
        plan = SchedulePlan(
            sequences=[ScheduledSequence("profile", 0, [0] * tokens, list(range(num_blocks)))],
            draws=[Draw("profile", 0, SamplingParams(), 0, index, tokens) for index in range(rows)],
            num_scheduled_tokens=tokens,
        )
        self.execute(plan)  # first run: threads, caches, code pages
        trim_heap()
        try:
            cpu.reset_peak_memory()
        except OSError as error:
            raise ValueError(f"the memory of a step cannot be measured here ({error}): give kv_cache_memory") from error
        before = cpu.peak_memory()
        self.execute(plan)
        measured = max(0, cpu.peak_memory() - before)
        self.runner.kv_caches = []
        per_token = measured / tokens
        logits = 4 * self.config.max_num_seqs * self.model.shape.vocab_size
        return int(per_token * self.config.max_num_batched_tokens) + logits

    def _allocate_pool(self) -> None:
        size = self.pool
        # Each layer touches its own part of the pool, a few KiB a block: huge pages would make a short request clear
        # 2 MiB for each layer, after every sleep again.
        padding = 64 * len(self._cache_tensors(1)) * self.model.shape.num_hidden_layers
        slab = Slab("kv_cache", size.num_blocks * size.block_bytes + padding, huge_pages=False)
        self.ledger.register("kv_cache", slab)
        self.runner.kv_caches = self._caches(size.num_blocks, slab)
        if size.num_host_blocks:
            host = Slab("swap", size.num_host_blocks * size.block_bytes + padding, huge_pages=False)
            self.ledger.register("swap", host)
            self.runner.host_caches = self._caches(size.num_host_blocks, host)

    def _prepare_decode_programs(self) -> None:
        """Lets decode steps be recorded."""
        if self.config.enforce_eager:
            return
        shape = self.model.shape
        longest = self.config.max_model_len or shape.max_position_embeddings
        logits = 4 * self.config.max_num_seqs * shape.vocab_size
        # No page is held before it is written, so the generous part costs nothing where it is not needed.
        slab = Slab("workspace", 2 * logits + (256 << 20), huge_pages=False)
        self.ledger.register("workspace", slab)
        self.runner.decode_programs = DecodePrograms(
            self.model,
            self.runner.kv_caches,
            self.config.block_size,
            self.config.max_num_seqs,
            -(-longest // self.config.block_size),
            slab.carve((slab.free_bytes,), torch.uint8),
        )

    def _cache_tensors(self, num_blocks: int) -> list[tuple[Sequence[int], torch.dtype]]:
        """Shapes and types of the fields of one layer's `KVCache`."""
        model, block_size = self.model.shape, self.config.block_size
        quantised = self.config.kv_cache_dtype == "int8"
        dtype = torch.int8 if quantised else self.dtype
        keys, values = rollout_kernels.kv_cache_shapes(
            num_blocks, block_size, model.num_key_value_heads, model.head_dim, dtype
        )
        scales = rollout_kernels.kv_scale_shape(num_blocks, block_size, model.num_key_value_heads)
        return [(keys, dtype), (values, dtype), *([(scales, torch.float32)] * 2 if quantised else [])]

    def _caches(self, num_blocks: int, slab: Slab | None) -> KVCaches:
        def tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(tuple(shape), dtype=dtype) if slab is None else slab.carve(shape, dtype)

        tensors = self._cache_tensors(num_blocks)
        layers = range(self.model.shape.num_hidden_layers)
        return [rollout_kernels.KVCache(*(tensor(shape, dtype) for shape, dtype in tensors)) for _ in layers]
