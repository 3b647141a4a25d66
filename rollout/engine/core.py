"""EngineCore: requests in, tokens out, and the states in which it refuses to run. Plain, one thread, no text.

    add ─► waiting ─► step: schedule ─► execute ─► update ─► (request, new tokens) …
    sleep / wake_up / policy update: only between steps; requests in flight end first, with what they have

It runs only when the weights' memory and the KV pool are awake, the weights hold one whole policy with a receipt, and
no tensor that a trainer shares with it has changed since that receipt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rollout.config import EngineConfig
from rollout.core.schedule import SchedulePlan
from rollout.core.scheduler import Scheduler, SchedulerConfig
from rollout.engine.lock import FairLock
from rollout.errors import (
    EngineAsleepError,
    EngineUnusableError,
    PolicyUpdateError,
    StaleWeightsError,
    WeightsNotLoadedError,
)
from rollout.executor.in_process import InProcessExecutor
from rollout.models.causal_lm import CausalLM
from rollout.request import FinishReason, Request
from rollout.weights.guard import SharedWeightsGuard, shared_versions
from rollout.weights.placement import Placement
from rollout.weights.receipt import Receipt, make_receipt, verify_receipt
from rollout.worker.ledger import LedgerReport, SleepReport

TAGS = ("weights", "kv_cache")

Update = tuple[Request, list[int]]  # a request and the tokens it has just got


@dataclass(slots=True)
class EngineCounters:
    """Sums since the engine started."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0  # tokens whose KV was computed: prompts, outputs, and both again after preemption
    num_errors: int = 0  # requests whose logits were not numbers
    step_seconds: float = 0.0
    peak_blocks_in_use: int = 0
    waste_numerator: int = 0  # sum over steps of KV slots allocated but unused
    waste_denominator: int = 0  # sum over steps of KV slots allocated


class EngineCore:
    """See the module's docstring. Callers in several threads hold `lock`; `pause` takes it by itself, since after it
    nothing can run until `resume` or `cancel`."""

    def __init__(self, config: EngineConfig, folder: Path, on_tensor: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.lock = FairLock()
        self.executor = InProcessExecutor(config, folder, on_tensor)
        self._worker = self.executor.worker
        shape = self._worker.model.shape
        longest = shape.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ValueError(f"max_model_len={config.max_model_len} is not valid: the model was made for {longest}")
        self.max_model_len: int = config.max_model_len or longest
        self.vocab_size: int = shape.vocab_size
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                block_size=config.block_size,
                num_blocks=self._worker.pool.num_blocks,
                num_host_blocks=self._worker.pool.num_host_blocks,
                enable_prefix_caching=config.enable_prefix_caching,
                policy=config.scheduling_policy,
                preemption_mode=config.preemption_mode,
            )
        )
        self.counters = EngineCounters()
        self._ended_between_steps: list[Update] = []
        self._asleep: set[str] = set()
        self._weights_loaded = True
        self._weights_shared = False
        self._unusable: str | None = None
        self._paused = False
        self._guard: SharedWeightsGuard | None = None
        self._policy_version = 0
        self._receipt: Receipt | None = make_receipt(
            0, self.parameters(), self.tied(), self.buffers(), copies=self.copies()
        )
        self._tensors = tuple(self.parameters().values())
        self._changes = shared_versions(self._tensors)  # torch's change counters, as of the receipt
        self._placement = Placement(self._worker.model)

    @property
    def policy_version(self) -> int:
        """Version of the policy that the weights hold; 0 is the checkpoint's."""
        return self._policy_version

    @property
    def receipt(self) -> Receipt | None:
        """Proof of what the weights held when they were last loaded."""
        return self._receipt

    @property
    def has_unfinished(self) -> bool:
        """Whether a call of `step` has something to do or to return."""
        return bool(self._ended_between_steps) or self.scheduler.has_unfinished()

    def check_ready(self) -> None:
        """Raises the error that says why no forward pass may run now, if there is one."""
        if self._unusable is not None:
            raise EngineUnusableError(
                f"the engine is unusable: {self._unusable}. A policy update that covers every parameter repairs it"
            )
        if self._paused:
            raise EngineAsleepError("a policy update is in progress: generate after it has ended")
        if self._asleep:
            tags = sorted(self._asleep)
            raise EngineAsleepError(f"the engine sleeps ({', '.join(tags)}): call wake_up({tags}) before generating")
        if not self._weights_loaded:
            raise WeightsNotLoadedError(
                "the weights were given back by sleep(level=2) and hold no policy: run a policy_update that covers "
                "every parameter, or reload_weights()"
            )
        self._check_copies()
        self._check_placement(StaleWeightsError)
        if self._guard is not None:
            self._guard.check()
        if shared_versions(self._tensors) != self._changes:
            raise StaleWeightsError(
                "the engine's weights were changed outside a policy update since the last receipt: run a policy_update "
                "that covers every parameter, or reload_weights()"
            )

    def _check_copies(self) -> None:
        quantized = self._worker.quantized
        if quantized is not None and not quantized.is_current:
            raise WeightsNotLoadedError(
                "the int8 copies of the weights were given back by sleep(level=2), or not made to the end: run a "
                "policy_update that covers every parameter, or reload_weights()"
            )

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests. Raises before any of them is queued if the engine cannot run, or one can never fit."""
        requests = list(requests)
        self.check_ready()
        for request in requests:
            self.scheduler.check_fits(request)
        for request in requests:
            for sample in (request, *request.siblings):
                sample.policy_version = self._policy_version
            self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends requests by their own or their group's id, with the tokens they have. Unknown ids are ignored."""
        aborted = self.scheduler.abort(request_ids)
        self._ended_between_steps += [(request, []) for request in aborted]
        return aborted

    def take_ended(self) -> list[Update]:
        """The requests that ended between steps (aborted) and were not returned yet."""
        updates, self._ended_between_steps = self._ended_between_steps, []
        return updates

    def step(self) -> list[Update]:
        """One forward pass. Returns the requests that got tokens or ended, those that ended between steps first.

        An error of the forward pass is raised, and no token is lost: the requests wait and compute their KV anew.
        """
        if not self.scheduler.has_unfinished():
            return self.take_ended()
        if self._guard is not None:
            self._check_placement(StaleWeightsError)
            self._guard.check_counters()
        updates = self.take_ended()
        started = time.perf_counter()
        try:
            plan = self.scheduler.schedule()
            stepped = self.scheduler.update(plan, self.executor.execute(plan))
        except BaseException:
            self.scheduler.preempt_all()
            self._ended_between_steps = updates
            raise
        self._count(plan, stepped, time.perf_counter() - started)
        return updates + stepped

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a running request from outside: a stop string was found in its text."""
        self.scheduler.finish(request, reason, stop_reason)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block. False, and nothing is changed, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def verify(self) -> Receipt:
        """Fingerprints the weights again. Raises `StaleWeightsError` naming what differs from the last receipt."""
        if "weights" in self._asleep or not self._weights_loaded or self._receipt is None:
            raise WeightsNotLoadedError("the weights hold no policy that could be verified: run a policy_update first")
        self._check_placement(StaleWeightsError)
        self._check_copies()
        verify_receipt(self._receipt, self.parameters(), self.tied(), self.buffers(), self.copies())
        stale = self.stale_copies()
        if stale:
            raise StaleWeightsError(f"{len(stale)} int8 copies are not those of the weights (first: {stale[0]})")
        return self._receipt

    def memory_ledger(self) -> LedgerReport:
        return self._worker.memory_ledger()

    def shared_model(self) -> CausalLM:
        """The module that the engine runs. From now on `sleep(level=2)` keeps the weights: somebody else uses them."""
        self._weights_shared = True
        if self._guard is None:
            self._guard = SharedWeightsGuard(self.parameters())
        return self._worker.model

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        """What was given back and is not awake: "weights", "kv_cache"."""
        return tuple(tag for tag in TAGS if tag in self._asleep)

    def sleep(self, level: int = 1) -> SleepReport:
        """Gives memory back: level 1 the KV pool and what the heap holds unused, level 2 the weights too, with their
        int8 copies.

        Requests in flight end with finish reason "abort" and the tokens they have. Cached blocks are forgotten.
        Weights that a trainer shares stay, whatever the level; the int8 copies of them go, until a policy update.
        Raises `ValueError` for another level.
        """
        if self._paused:
            raise PolicyUpdateError("a policy update is open: the engine cannot sleep before it has ended")
        if level not in (1, 2):
            raise ValueError(f"level={level!r} is not valid: it must be 1 (KV pool) or 2 (KV pool and weights)")
        self._abort_all()
        reset = self.scheduler.reset_prefix_cache()
        assert reset, "blocks are in use although every request was aborted"
        report = self._worker.sleep(level, keep_weights=self._weights_shared)
        self._asleep.add("kv_cache")
        if level == 2 and not self._weights_shared:
            self._asleep.add("weights")
            self._weights_loaded = False
        return report

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes memory into use again: all of it, or what `tags` names. Nothing is loaded or reloaded.

        On a CPU pages come back from the operating system when they are written; on CUDA memory is allocated here.
        Raises `ValueError` for an unknown tag, `torch.OutOfMemoryError` where the device's memory is taken.
        """
        tags = list(TAGS if tags is None else tags)
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown:
            raise ValueError(f"tags={tags!r} is not valid: they must be among {', '.join(map(repr, TAGS))}")
        self._worker.wake_up(tags)
        self._asleep.difference_update(tags)

    def pause(self, in_flight: str, timeout: float | None) -> None:
        assert in_flight == "abort", in_flight
        with self.lock:
            if self._paused:
                raise PolicyUpdateError("another policy update is open: one at a time")
            self._check_placement(PolicyUpdateError)
            self._abort_all()
            self._paused = True

    def wake_weights(self) -> None:
        self._worker.wake_up(["weights"])
        self._asleep.discard("weights")

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._worker.parameters()

    def tied(self) -> Mapping[str, str]:
        return self._worker.tied()

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self._worker.buffers()

    def copies(self) -> Mapping[str, torch.Tensor]:
        quantized = self._worker.quantized
        return {} if quantized is None else quantized.tensors()

    def stale_copies(self) -> list[str]:
        quantized = self._worker.quantized
        return [] if quantized is None else quantized.stale()

    def post_process(self) -> None:
        """The int8 copies depend on the weights' values. The other kernels read the weights as they lie."""
        self._worker.remake_quantized_weights()

    def invalidate(self, version: int) -> None:
        self.scheduler.set_policy_version(version)
        self._policy_version = version

    def resume(self, receipt: Receipt, guard: SharedWeightsGuard) -> None:
        assert "weights" not in self._asleep, "the weights fell asleep during a policy update"
        self._receipt = receipt
        self._changes = shared_versions(self._tensors)
        self._guard = (
            guard if guard.names else (SharedWeightsGuard(self.parameters()) if self._weights_shared else None)
        )
        self._weights_shared = self._weights_shared or bool(guard.names)
        self._weights_loaded = True
        self._unusable = None
        self._paused = False

    def cancel(self) -> None:
        self._paused = False

    def mark_unusable(self, reason: str) -> None:
        self._unusable = reason
        self._paused = False

    def _check_placement(self, error: type[StaleWeightsError] | type[PolicyUpdateError]) -> None:
        problem = self._placement.problem()
        if problem is not None:
            raise error(problem)

    def _abort_all(self) -> None:
        self.abort([request.request_id for request in self.scheduler.unfinished()])

    def _count(self, plan: SchedulePlan, updates: list[Update], seconds: float) -> None:
        counters = self.counters
        counters.num_steps += 1
        counters.step_seconds += seconds
        counters.num_generated_tokens += sum(len(token_ids) for _, token_ids in updates)
        counters.num_computed_tokens += plan.num_scheduled_tokens
        counters.num_errors += sum(request.finish_reason is FinishReason.ERROR for request, _ in updates)
        stats = self.scheduler.stats()
        in_use = stats.num_blocks - stats.num_free_blocks
        counters.peak_blocks_in_use = max(counters.peak_blocks_in_use, in_use)
        counters.waste_numerator += stats.num_slots_allocated - stats.num_slots_used
        counters.waste_denominator += stats.num_slots_allocated
