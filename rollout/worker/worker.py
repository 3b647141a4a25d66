"""One device of the engine: loads the weights, sizes and holds the KV pool, executes plans, sleeps and wakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

import rollout_kernels
from rollout.config import EngineConfig
from rollout.core.schedule import DraftPlan, SchedulePlan, StepResult
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
from rollout.speculation.features import FeatureCache, slots_per_block
from rollout.speculation.model_drafter import DrafterHost, ModelDrafter
from rollout.speculation.rejection import RejectionSampler
from rollout.speculation.with_weights import make_model_drafter
from rollout.weights.names import DRAFTER_PREFIX
from rollout.worker.decode_program import MOST_DECODE_ROWS
from rollout.worker.formats import check_formats, quantised_kv
from rollout.worker.graphs import DecodeGraphs
from rollout.worker.inputs import DirectInputs, StagedInputs, StepInputs
from rollout.worker.ledger import LedgerReport, MemoryLedger, SleepReport, WakeReport
from rollout.worker.pool_layout import PoolLayout
from rollout.worker.quantized import QuantizedWeights
from rollout.worker.runner import Runner
from rollout.worker.sizing import KVPoolSize, kv_budget, split_budget
from rollout.worker.step_memory import LargestStep, measure_graphs, measure_peak, set_aside
from rollout.worker.step_replays import decode_graphs, decode_programs

_FEW_SEQUENCES = 8  # of so many at once each may have several rows in a recorded step (drafts pay where few decode)
_OWNERS = {
    "scheduling": (),
    "weights": ("weights", "drafter"),
    "kv_cache": ("kv_cache", "swap", "features", "drafter_kv_cache"),
    "graphs": ("workspace", "drafter_workspace", "graphs", "drafter_graphs"),
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
        self._runs_triton = kernels.name == "triton"
        self.folder = folder
        model_config = read_config(folder)
        self.dtype = resolve_dtype(config.dtype, model_config)
        check_formats(config, self.dtype, kernels.name)
        self.model = build_model(model_config, self.dtype)
        shape = self.model.shape
        self._layout = PoolLayout(
            shape.num_hidden_layers,
            shape.num_key_value_heads,
            shape.head_dim,
            self.dtype,
            config.block_size,
            kernels.kv_layout,
            quantised=quantised_kv(config),
        )
        self.ledger = MemoryLedger(self.platform.used_memory, self.platform.trim)

        self._weights = self.platform.memory("weights", num_parameter_bytes(self.model))
        materialize(self.model, self._weights.carve, self.device)
        self.ledger.register("weights", self._weights)
        self.ledger.register("buffers", lambda: sum(buffer.nbytes for buffer in self.model.buffers()))
        self.quantized: QuantizedWeights | None = None
        if config.quantization == "int8":
            self.quantized = QuantizedWeights(
                self.model, lambda num_bytes: self.platform.memory("quantized_weights", num_bytes)
            )
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
        inputs = StagedInputs(self.platform.copies()) if self._runs_triton or self._on_gpu else DirectInputs()
        self.ledger.register("inputs", lambda: inputs.num_bytes)
        self.drafter = self._make_drafter(inputs, kernels.kv_layout)
        self.reload_weights(on_tensor)
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
        speculative = config.speculative_config
        if speculative is not None and speculative.verification == "rejection":
            self.runner.rejection = RejectionSampler(
                lambda: None if self.drafter is None else self.drafter.distributions
            )
        self.runner.notes_likely = speculative is not None and speculative.method == "suffix"
        self.pool: KVPoolSize = self._size_pool()
        self._allocate_pool()
        self._prepare_decode_programs()
        if self.drafter is not None:
            self.drafter.allocate(self.num_draft_blocks)

    def _make_drafter(self, inputs: StepInputs, kv_layout: rollout_kernels.KVLayout) -> ModelDrafter | None:
        speculative = self.config.speculative_config
        if speculative is None or not speculative.has_weights:
            return None
        host = DrafterHost(
            self.config,
            speculative,
            self.model,
            self.folder,
            self.dtype,
            self._longest,
            self.platform,
            self.ledger,
            inputs,
            kv_layout,
            self._runs_triton,
            self._features,
        )
        drafter = make_model_drafter(host)
        self.ledger.register("buffers", lambda: sum(buffer.nbytes for buffer in drafter.buffers().values()))
        return drafter

    def _features(self) -> FeatureCache:
        assert self.runner.features is not None, "features are read before there is a KV pool"
        return self.runner.features

    @property
    def num_draft_blocks(self) -> int:
        """Blocks of the drafter's own pool; 0 where there is none."""
        return self.pool.num_draft_blocks

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
    def can_have_alternatives(self) -> bool:
        """Whether a step can compute guesses in the place of drafts: attention must find keys in other places."""
        return not self._runs_triton

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
        """Reads the checkpoint again, and that of a drafter, into the tensors that are there."""
        load_weights(self.model, self.folder, on_tensor)
        if self.drafter is not None:
            self.drafter.load(on_tensor)
        self.remake_quantized_weights()

    def remake_quantized_weights(self) -> None:
        """Makes the int8 copies of the weights anew, where the engine has them."""
        if self.quantized is not None:
            with self._kernels():
                self.quantized.remake()

    def parameters(self) -> dict[str, torch.Tensor]:
        """The tensors that the kernels read, under the checkpoint's names."""
        return dict(self.model.named_parameters())

    def tied(self) -> dict[str, str]:
        return self.model.tied_names

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the forward pass reads besides the parameters; computed from the configuration."""
        return dict(self.model.named_buffers())

    def drafter_parameters(self) -> dict[str, torch.Tensor]:
        """A drafter's own tensors, "drafter." before the names that its checkpoint has for them."""
        return {} if self.drafter is None else _prefixed(self.drafter.parameters())

    def drafter_tied(self) -> dict[str, str]:
        tied = {} if self.drafter is None else self.drafter.tied()
        return {f"{DRAFTER_PREFIX}{name}": f"{DRAFTER_PREFIX}{target}" for name, target in tied.items()}

    def drafter_buffers(self) -> dict[str, torch.Tensor]:
        return {} if self.drafter is None else _prefixed(self.drafter.buffers())

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
        owners = [*_OWNERS["kv_cache"], "workspace", "drafter_workspace"]
        if level == 2:
            owners += ["quantized_weights", "adapters"]
            owners += [] if keep_weights else _OWNERS["weights"]
        if not self._weights.keeps_addresses:
            owners += ["graphs", "drafter_graphs"]
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
        block_bytes = self._layout.block_bytes + self._feature_block_bytes
        draft_block_bytes = 0 if self.drafter is None else self.drafter.block_bytes
        given, most_draft_blocks = self._draft_blocks(draft_block_bytes)
        if self.config.kv_cache_memory is not None:
            budget = int(self.config.kv_cache_memory)
            num_blocks = budget // block_bytes
            num_draft_blocks = min(most_draft_blocks, num_blocks)
        else:
            budget = self._measured_budget(block_bytes) - given * draft_block_bytes
            num_blocks, num_draft_blocks = split_budget(budget, block_bytes, draft_block_bytes, most_draft_blocks)
        if num_blocks < 1:
            raise ValueError(f"kv_cache_memory={budget:,} is not valid: one block takes {block_bytes:,} bytes")
        num_host_blocks = int(self.config.swap_space) // block_bytes
        if self.config.preemption_mode == "swap" and num_host_blocks < 1:
            raise ValueError(
                f"swap_space={self.config.swap_space:,} is not valid: one block takes {block_bytes:,} bytes"
            )
        return KVPoolSize(num_blocks, num_host_blocks, block_bytes, given or num_draft_blocks)

    def _measured_budget(self, block_bytes: int) -> int:
        """Bytes for KV beside the weights and the largest step."""
        total = self.platform.total_memory()
        peak = self.measure_step()
        self.platform.trim()
        weights = self._weights.num_bytes + (0 if self.quantized is None else self.quantized.slab.num_bytes)
        weights += 0 if self.adapters is None else self.adapters.num_bytes
        weights += 0 if self.drafter is None else sum(tensor.nbytes for tensor in self.drafter.parameters().values())
        free = self.platform.free_memory()
        budget = kv_budget(total, self.config.gpu_memory_utilization, weights, peak, free)
        if budget < block_bytes:
            raise ValueError(
                f"gpu_memory_utilization={self.config.gpu_memory_utilization} leaves no room for KV: of {total:,} "
                f"bytes the weights take {weights:,} and a step at most {peak:,}"
            )
        return budget

    @property
    def _feature_block_bytes(self) -> int:
        """Bytes of the features of a block's tokens, where a drafter reads them."""
        if self.drafter is None or not self.drafter.needs_features:
            return 0
        return math.prod(self._feature_shape(1)) * self.dtype.itemsize

    def _draft_blocks(self, block_bytes: int) -> tuple[int, int]:
        """Blocks of a drafter's own pool: those that the configuration gives it memory for, or 0, and otherwise as many
        as the sequences of a full batch that speculates can need."""
        speculative = self.config.speculative_config
        if speculative is None or not block_bytes:
            return 0, 0
        if speculative.draft_kv_cache_memory is None:
            return 0, min(speculative.max_batch_for_speculation, self.config.max_num_seqs) * self._max_blocks
        given = int(speculative.draft_kv_cache_memory) // block_bytes
        if given < 1:
            raise ValueError(
                f"speculative_config: draft_kv_cache_memory={speculative.draft_kv_cache_memory:,} is not valid: one "
                f"block takes {block_bytes:,} bytes"
            )
        return given, 0

    @property
    def _longest(self) -> int:
        """Tokens of a sequence at most."""
        return self.config.max_model_len or self.model.shape.max_position_embeddings

    def _decode_graphs(self) -> DecodeGraphs:
        return decode_graphs(self.runner, self.config.max_num_seqs, self._max_blocks, self.platform)

    @property
    def _max_blocks(self) -> int:
        """Blocks of a sequence at most."""
        return -(-self._longest // self.config.block_size)

    def _allocate_pool(self) -> None:
        size = self.pool
        host_rows: torch.Tensor | None = None
        if size.num_host_blocks:
            host = self.platform.host_memory("swap", size.num_host_blocks * size.block_bytes + self._layout.padding)
            self.ledger.register("swap", host, on_host=self._on_gpu)
            self.runner.host_caches = self._layout.caches(size.num_host_blocks, host.carve)
            if self._feature_block_bytes:
                host_rows = host.carve(self._feature_shape(size.num_host_blocks), self.dtype)
        self._use_pool(size, self._new_pool(size), host_rows)

    def _new_pool(self, size: KVPoolSize) -> dict[str, Memory]:
        """Memory for the keys and values of a pool, and for the features of their tokens, by owner."""
        # Each layer touches its own part of the pool, a few KiB a block: huge pages would make a short request clear
        # 2 MiB for each layer, after every sleep again.
        num_bytes = self._layout.pool_bytes(size.num_blocks)
        memory = {"kv_cache": self.platform.memory("kv_cache", num_bytes, huge_pages=False)}
        if self._feature_block_bytes:
            num_bytes = (size.num_blocks + 1) * self._feature_block_bytes
            memory["features"] = self.platform.memory("features", num_bytes, huge_pages=False)
        return memory

    def _use_pool(self, size: KVPoolSize, memory: Mapping[str, Memory], host_rows: torch.Tensor | None) -> None:
        for owner, slab in memory.items():
            self.ledger.register(owner, slab)
        self.pool = size
        self.runner.kv_caches = self._layout.caches(size.num_blocks, memory["kv_cache"].carve)
        if "features" in memory:
            assert self.drafter is not None
            num_rows, width = self._feature_shape(size.num_blocks)
            rows = memory["features"].carve((num_rows + 1, width), self.dtype)
            self.runner.features = FeatureCache(rows, host_rows, self.config.block_size, self.drafter.has_kv)

    def _feature_shape(self, num_blocks: int) -> tuple[int, int]:
        return num_blocks * slots_per_block(self.config.block_size), self.model.output_weight.shape[1]

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
        old = [owner for owner in ("kv_cache", "features") if owner in self.ledger.owners]
        self.ledger.release(old)  # a device may not have the memory of both
        try:
            memory = self._new_pool(size)
        except (torch.OutOfMemoryError, OSError):
            if not asleep:
                self.ledger.resume(old)
            raise
        for owner in old:
            self.ledger.unregister(owner)
        features = self.runner.features
        self._use_pool(size, memory, None if features is None else features.host_rows)
        if asleep:
            self.ledger.release(memory)
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
        with set_aside(self.runner):
            peak = measure_peak(self.runner, self._layout, self.platform, self._largest_step, self.execute)
            if self._runs_triton and not self.config.enforce_eager and self.platform.max_profile_tokens is None:
                with self._kernels():
                    peak += sum(
                        measure_graphs(self._decode_graphs(), slot)
                        for slot in sorted({-1, self._largest_step.adapter_slot})
                    )
        if self.drafter is not None:  # it runs before the step; what it needed may not have gone back by then
            with self._kernels():
                peak += self.drafter.measure_step()
        return peak

    @property
    def _largest_step(self) -> LargestStep:
        config = self.config
        return LargestStep(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            self._max_rows,
            self._longest,
            adapter_slot=-1 if self.adapters is None else 0,
        )

    @property
    def _max_rows(self) -> int:
        """Rows of a recorded step at most."""
        max_num_seqs = self.config.max_num_seqs
        return max(max_num_seqs, min(max_num_seqs, _FEW_SEQUENCES) * MOST_DECODE_ROWS)

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
        programs, workspace = decode_programs(
            self.runner, self._max_rows, self._max_blocks, self.platform, owner="workspace"
        )
        self.runner.decode_programs = programs
        self.ledger.register("workspace", workspace)


def _prefixed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{DRAFTER_PREFIX}{name}": tensor for name, tensor in tensors.items()}
