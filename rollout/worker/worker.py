"""One device of the engine: loads the weights, sizes and holds the KV pool, executes plans, sleeps and wakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

import rollout_kernels
from rollout.config import EngineConfig
from rollout.core.schedule import DraftPlan, ScheduledSequence, SchedulePlan, StepResult
from rollout.lora.memory import AdapterMemory
from rollout.models.loader import (
    build_model,
    load_weights,
    materialize,
    num_parameter_bytes,
    read_config,
    resolve_dtype,
)
from rollout.models.tokenizer import find_tokenizer
from rollout.platform.platform import Memory, platform_for
from rollout.sampling.adjust import Adjuster
from rollout.sampling.grammars import Grammars
from rollout.speculation.model_drafter import ModelDrafter
from rollout.speculation.rejection import RejectionSampler
from rollout.worker.batch import KVCaches
from rollout.worker.decode_program import MOST_DECODE_ROWS, DecodePrograms
from rollout.worker.graphs import DecodeGraphs
from rollout.worker.inputs import DirectInputs, StagedInputs
from rollout.worker.ledger import LedgerReport, MemoryLedger, SleepReport, WakeReport
from rollout.worker.quantized import QuantizedWeights
from rollout.worker.runner import Runner
from rollout.worker.sizing import KVPoolSize, full_step, kv_budget, short_step

_FEW_SEQUENCES = 8  # of so many at once each may have several rows in a recorded step (drafts pay where few decode)
_OWNERS = {
    "scheduling": (),
    "weights": ("weights",),
    "kv_cache": ("kv_cache", "swap"),
    "graphs": ("workspace", "graphs"),
}  # wake-up tag -> owners in the ledger


class Worker:
    """Everything on one device. The model's parameters and the KV pool lie in memory that can be given back.

    `rank` is its number among the engine's workers.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, on_tensor: Callable[[str], None] | None = None, rank: int = 0
    ) -> None:
        self.rank = rank
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.config = config
        self.platform = platform_for(config.device)
        self.device = self.platform.device
        with rollout_kernels.use_backend(config.kernels):
            kernels = rollout_kernels.backend_on(self.device)
        self._kv_layout, self._runs_triton = kernels.kv_layout, kernels.name == "triton"
        self.folder = folder
        model_config = read_config(folder)
        self.dtype = resolve_dtype(config.dtype, model_config)
        self.model = build_model(model_config, self.dtype)
        self.ledger = MemoryLedger(self.platform.used_memory, self.platform.trim)

        self._weights = self.platform.memory("weights", num_parameter_bytes(self.model))
        materialize(self.model, self._weights.carve, self.device)
        self.ledger.register("weights", self._weights)
        self.ledger.register("buffers", lambda: sum(buffer.nbytes for buffer in self.model.buffers()))
        self.quantized: QuantizedWeights | None = None
        if config.quantization == "int8":
            if self._on_gpu or self._runs_triton:
                raise ValueError(
                    f"quantization='int8' is not supported on {self.device} with {kernels.name} kernels: give "
                    "device='cpu' and kernels 'auto', 'cpu' or 'reference'"
                )
            self.quantized = QuantizedWeights(self.model)
            self.ledger.register("quantized_weights", self.quantized.slab)
        self.adapters: AdapterMemory | None = None
        if config.enable_lora:
            self.adapters = AdapterMemory(
                self.model,
                config.max_loras,
                config.max_lora_rank,
                lambda num_bytes: self.platform.memory("adapters", num_bytes),
                self._forget_adapter_steps,
            )
            self.ledger.register("adapters", self.adapters)
        self.reload_weights(on_tensor)
        inputs = StagedInputs(self.platform.copies()) if self._runs_triton or self._on_gpu else DirectInputs()
        self.ledger.register("inputs", lambda: inputs.num_bytes)
        adjuster = Adjuster(
            self.model.shape.vocab_size, lambda: self.tokenizer, config.reasoning_start, config.reasoning_end
        )
        self.runner = Runner(
            self.model,
            [],
            [],
            config.block_size,
            inputs=inputs,
            logprobs_mode=config.logprobs_mode,
            adjuster=adjuster,
            grammars=lambda: self.grammars,
        )
        self.drafter: ModelDrafter | None = None
        self.num_draft_blocks = 0  # of the drafter's own pool
        speculative = config.speculative_config
        if speculative is not None and speculative.verification == "rejection":
            self.runner.rejection = RejectionSampler(
                lambda: None if self.drafter is None else self.drafter.distributions
            )
        self.pool = self._size_pool()
        self._allocate_pool()
        self._prepare_decode_programs()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, for parameters that are about text; loaded when the first of them comes.

        Requests with such parameters are refused at admission where there is none.
        """
        tokenizer = find_tokenizer(self.config.tokenizer, self.folder)
        assert tokenizer is not None, "a request that needs a tokenizer was admitted, and there is none"
        return tokenizer

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars (`structured_outputs`) and makes their masks; itself made when the first of them comes."""
        return Grammars(self.tokenizer, self.model.shape.vocab_size, torch.get_num_threads())

    @property
    def _on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def _forget_adapter_steps(self) -> None:
        """Recorded and captured steps compute projections that adapters did change, and now others do."""
        if self.runner.decode_programs is not None:
            self.runner.decode_programs.forget_adapter_steps()
        if self.runner.decode_graphs is not None:
            self.runner.decode_graphs.release()

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

    def propose_drafts(self, plan: DraftPlan) -> dict[str, list[int]]:
        """Guesses of the sequences' next tokens, by a drafter with weights: request id -> as many as were asked for, or
        fewer."""
        assert self.drafter is not None, "drafts are planned for a drafter with weights, and there is none"
        with self._kernels(), torch.inference_mode():
            return self.drafter.propose(plan)

    def _kernels(self) -> AbstractContextManager[None]:
        return nullcontext() if self.config.kernels == "auto" else rollout_kernels.use_backend(self.config.kernels)

    def _sleepers(self, level: int, keep_weights: bool) -> list[str]:
        """Owners that give their memory back at a level. Captured decode steps are among them where tensors do not
        come back to their addresses."""
        owners = [*_OWNERS["kv_cache"], "workspace"]
        if level == 2:
            owners += ["quantized_weights", "adapters"]
            owners += [] if keep_weights else ["weights"]
        if not self._weights.keeps_addresses:
            owners.append("graphs")
        return [owner for owner in owners if owner in self.ledger.owners]

    def sleeping_tags(self, level: int, keep_weights: bool) -> frozenset[str]:
        """The wake-up tags of what `sleep` gives back."""
        sleepers = set(self._sleepers(level, keep_weights))
        return frozenset(tag for tag, owners in _OWNERS.items() if not sleepers.isdisjoint(owners))

    def sleep(self, level: int, keep_weights: bool) -> SleepReport:
        """Gives memory back: level 1 the KV pool and the workspace of decode steps, level 2 the weights too, unless a
        trainer shares them, and the int8 copies of them in any case."""
        if level == 2 and self.quantized is not None:
            self.quantized.give_up()
        return self.ledger.release(self._sleepers(level, keep_weights))

    def wake_up(self, tags: Iterable[str]) -> WakeReport:
        """Takes memory into use again, by its wake-up tags; it holds zeros. Nothing changes where it is awake.

        Raises `torch.OutOfMemoryError` where the device does not have it any more, and then holds what it held before:
        free some, and wake up again.
        """
        owners = [owner for tag in tags for owner in _OWNERS[tag]]
        return self.ledger.resume([owner for owner in owners if owner in self.ledger.owners])

    def memory_ledger(self) -> LedgerReport:
        return self.ledger.report()

    def _size_pool(self) -> KVPoolSize:
        layer_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self._cache_tensors(1))
        block_bytes = layer_bytes * self.model.shape.num_hidden_layers
        if self.config.kv_cache_memory is not None:
            budget = int(self.config.kv_cache_memory)
        else:
            total = self.platform.total_memory()
            peak = self.measure_step()
            self.platform.trim()
            weights = self._weights.num_bytes + (0 if self.quantized is None else self.quantized.slab.num_bytes)
            weights += 0 if self.adapters is None else self.adapters.num_bytes
            budget = kv_budget(
                total,
                self.config.gpu_memory_utilization,
                weights,
                peak,
                self.platform.free_memory(),
            )
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

    @property
    def _longest(self) -> int:
        """Tokens of a sequence at most."""
        return self.config.max_model_len or self.model.shape.max_position_embeddings

    def _measure_peak(self) -> int:
        """Bytes that a step of `max_num_batched_tokens` needs for activations, from a shorter one that really runs."""
        most = self.platform.max_profile_tokens
        assert most is not None
        tokens = min(most, self.config.max_num_batched_tokens, self.model.shape.max_position_embeddings)
        self.runner.kv_caches = self._caches(-(-tokens // self.config.block_size), None)
        plan = short_step(tokens, min(self.config.max_num_seqs, tokens), self.config.block_size, self._profiled_slot)
        measured = self.platform.measure_peak(lambda: self.execute(plan))
        self.runner.kv_caches = []
        per_token = measured / tokens
        max_num_seqs = self.config.max_num_seqs
        max_rows = max(max_num_seqs, min(max_num_seqs, _FEW_SEQUENCES) * MOST_DECODE_ROWS)
        logits = 4 * max_rows * self.model.shape.vocab_size
        return int(per_token * self.config.max_num_batched_tokens) + logits

    def _measure_full_step(self) -> int:
        """Bytes that the largest step needs, from running it, and those of the captured decode steps."""
        plan, num_blocks = full_step(
            self.config.max_num_batched_tokens,
            self.config.max_num_seqs,
            self._longest,
            self.config.block_size,
            self._profiled_slot,
        )
        self.runner.kv_caches = self._caches(num_blocks, None)
        peak = self.platform.measure_peak(lambda: self.execute(plan))
        graphs = 0
        if self._runs_triton and not self.config.enforce_eager:
            graphs = sum(self._measure_graphs(slot) for slot in sorted({-1, self._profiled_slot}))
        self.runner.kv_caches = []
        return peak + graphs

    @property
    def _profiled_slot(self) -> int:
        """The adapter slot of the rows of a step that measures: steps with adapters take more memory than others."""
        return -1 if self.adapters is None else 0

    def _measure_graphs(self, adapter_slot: int) -> int:
        """Bytes of the whole ladder of captured steps: its two largest are captured, and all but the first taken to be
        as large as the second, since they share its memory pool. `self.runner.kv_caches` must be there."""
        graphs = self._decode_graphs()
        sizes: list[int] = []
        for size in graphs.ladder[:-3:-1]:
            sequences = [ScheduledSequence("profile", 0, [0], [0], adapter_slot=adapter_slot)] * size
            with torch.inference_mode(), rollout_kernels.use_backend(self.config.kernels):
                graphs.run(sequences)
            sizes.append(graphs.num_bytes)
        graphs.release()
        more = sizes[1] - sizes[0] if len(sizes) > 1 else 0
        return sizes[0] + more * (len(graphs.ladder) - 1)

    def _decode_graphs(self) -> DecodeGraphs:
        return DecodeGraphs(
            self.model,
            self.runner.kv_caches,
            self.config.block_size,
            self.config.max_num_seqs,
            -(-self._longest // self.config.block_size),
            self.runner.inputs,
            self.platform.step_capture(),
            self.device,
        )

    def _allocate_pool(self) -> None:
        size = self.pool
        self._kv_slab = self._new_kv_slab(size)
        self.ledger.register("kv_cache", self._kv_slab)
        self.runner.kv_caches = self._caches(size.num_blocks, self._kv_slab)
        if size.num_host_blocks:
            host = self.platform.host_memory("swap", size.num_host_blocks * size.block_bytes + self._padding)
            self.ledger.register("swap", host, on_host=self._on_gpu)
            self.runner.host_caches = self._caches(size.num_host_blocks, host)

    @property
    def _padding(self) -> int:
        """Bytes of a pool that may be lost between the tensors of its layers."""
        return 64 * len(self._cache_tensors(1)) * self.model.shape.num_hidden_layers

    def _new_kv_slab(self, size: KVPoolSize) -> Memory:
        # Each layer touches its own part of the pool, a few KiB a block: huge pages would make a short request clear
        # 2 MiB for each layer, after every sleep again.
        num_bytes = size.num_blocks * size.block_bytes + self._padding
        return self.platform.memory("kv_cache", num_bytes, huge_pages=False)

    def pool_of(self, num_bytes: int) -> KVPoolSize:
        """The pool that fits into `num_bytes`. Raises `ValueError` where that is not even one block."""
        num_blocks = num_bytes // self.pool.block_bytes
        if num_blocks < 1:
            raise ValueError(f"num_bytes={num_bytes:,} is not valid: one block takes {self.pool.block_bytes:,} bytes")
        return replace(self.pool, num_blocks=num_blocks)

    def resize_kv_cache(self, size: KVPoolSize, asleep: bool) -> None:
        """Another KV pool, its content all zeros, asleep where the old one was.

        Recorded and captured decode steps know the old addresses: they are made anew when they are next needed. Raises
        `torch.OutOfMemoryError` or `OSError`, with the old pool in place but empty, where there is not enough memory.
        """
        old = self._kv_slab
        old.release()  # a device may not have the memory of both
        self.platform.trim()
        try:
            slab = self._new_kv_slab(size)
        except (torch.OutOfMemoryError, OSError):
            if not asleep:
                old.resume()
            raise
        self.ledger.unregister("kv_cache")
        self.pool, self._kv_slab = size, slab
        self.ledger.register("kv_cache", slab)
        self.runner.kv_caches = self._caches(size.num_blocks, slab)
        if asleep:
            slab.release()
        self._forget_decode_programs()
        self._prepare_decode_programs()

    def _forget_decode_programs(self) -> None:
        for owner in ("workspace", "graphs"):
            if owner in self.ledger.owners:
                self.ledger.release([owner])
                self.ledger.unregister(owner)
        self.runner.decode_programs = self.runner.decode_graphs = None

    def measure_step(self) -> int:
        """Bytes that a step takes at its peak besides weights and KV, from one that really runs, on a small pool of its
        own. No requests may be in flight."""
        runner = self.runner
        kept = runner.kv_caches, runner.decode_programs, runner.decode_graphs
        runner.decode_programs = runner.decode_graphs = None
        try:
            return self._measure_full_step() if self.platform.max_profile_tokens is None else self._measure_peak()
        finally:
            runner.kv_caches, runner.decode_programs, runner.decode_graphs = kept

    def _prepare_decode_programs(self) -> None:
        """Lets decode steps be recorded, or captured."""
        if self.config.enforce_eager:
            return
        if self._runs_triton:
            self.runner.decode_graphs = graphs = self._decode_graphs()
            self.ledger.register("graphs", lambda: graphs.num_bytes, graphs.release)
            return
        if self._on_gpu:  # the reference waits for the device everywhere: its steps cannot be captured
            return
        max_num_seqs = self.config.max_num_seqs
        max_rows = max(max_num_seqs, min(max_num_seqs, _FEW_SEQUENCES) * MOST_DECODE_ROWS)
        logits = 4 * max_rows * self.model.shape.vocab_size
        # No page is held before it is written, so the generous part costs nothing where it is not needed.
        slab = self.platform.memory("workspace", 2 * logits + (256 << 20), huge_pages=False)
        self.ledger.register("workspace", slab)
        self.runner.decode_programs = DecodePrograms(
            self.model,
            self.runner.kv_caches,
            self.config.block_size,
            max_rows,
            -(-self._longest // self.config.block_size),
            slab.carve((slab.num_bytes,), torch.uint8),
        )

    def _cache_tensors(self, num_blocks: int) -> list[tuple[Sequence[int], torch.dtype]]:
        """Shapes and types of the fields of one layer's `KVCache`."""
        model, block_size = self.model.shape, self.config.block_size
        quantised = self.config.kv_cache_dtype == "int8"
        dtype = torch.int8 if quantised else self.dtype
        keys, values = rollout_kernels.kv_cache_shapes(
            num_blocks, block_size, model.num_key_value_heads, model.head_dim, dtype, self._kv_layout
        )
        scales = rollout_kernels.kv_scale_shape(num_blocks, block_size, model.num_key_value_heads)
        return [(keys, dtype), (values, dtype), *([(scales, torch.float32)] * 2 if quantised else [])]

    def _caches(self, num_blocks: int, slab: Memory | None) -> KVCaches:
        def tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            if slab is not None:
                return slab.carve(shape, dtype)
            return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

        tensors = self._cache_tensors(num_blocks)
        layers = range(self.model.shape.num_hidden_layers)
        return [rollout_kernels.KVCache(*(tensor(shape, dtype) for shape, dtype in tensors)) for _ in layers]
