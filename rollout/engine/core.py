"""EngineCore: requests in, tokens out, and the states in which it refuses to run. Plain, one thread, no text.

    add ─► waiting ─► step: schedule ─► execute ─► update ─► (request, new tokens) …
    sleep / wake_up / policy update: only between steps; requests in flight end, or are held, by the mode

It runs only when the weights' memory and the KV pool are awake, the weights hold one whole policy with a receipt, and
no tensor that a trainer shares with it has changed since that receipt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout.config import EngineConfig
from rollout.engine.garbage import collection_paused
from rollout.engine.lock import FairLock
from rollout.engine.make_scheduler import make_scheduler
from rollout.engine.profile import StepProfile, profile
from rollout.engine.sleep_arguments import TAGS, check_sleep, check_tags
from rollout.errors import (
    EngineAsleepError,
    EngineBusyError,
    EngineUnusableError,
    PolicyUpdateError,
    PolicyUpdateTimeoutError,
    RolloutError,
    StaleWeightsError,
    WeightsNotLoadedError,
)
from rollout.executor.in_process import InProcessExecutor
from rollout.lora.manager import AdapterManager, LoadedAdapter
from rollout.lora.request import LoRARequest
from rollout.metrics import EngineCounters, EngineSnapshot
from rollout.models.causal_lm import CausalLM
from rollout.request import FinishReason, Request, join_equal_prompts
from rollout.sampling_params import SamplingParams
from rollout.weights.guard import SharedWeightsGuard, change_count, shared_versions
from rollout.weights.placement import Placement
from rollout.weights.receipt import Receipt, make_receipt, verify_receipt, with_adapters
from rollout.weights.target import InFlightMode
from rollout.weights.transaction import PolicyUpdate
from rollout.weights.undo import UndoLog
from rollout.worker.ledger import LedgerReport, SleepReport, WakeReport
from rollout.worker.slab import slab_bytes

Update = tuple[Request, list[int]]  # a request and the tokens it has just got


@dataclass(slots=True)
class _Pause:
    """Somebody has stopped the engine, or is about to."""

    reason: str  # for those who want to generate meanwhile
    conflict: str  # for those who want to stop it too
    mode: InFlightMode  # what becomes of requests in flight
    is_draining: bool = False  # they still run, and nobody else is let in


class EngineCore:
    """See the module's docstring.

    Callers in several threads hold `lock`; `sleep` and the methods of a policy update (`pause` to `mark_unusable`)
    take it by themselves. Requests that end, or get tokens, outside the caller's own `step` go to `deliver`, which the
    engine's user may replace; until then they are what the next `step` or `take_ended` returns.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, on_tensor: Callable[[str], None] | None = None, rank: int = 0
    ) -> None:
        """`rank` is the engine's number among replicas."""
        self.config = config
        self.lock = FairLock()
        self.executor = InProcessExecutor(config, folder, on_tensor, rank)
        self._worker = self.executor.worker
        shape = self._worker.model.shape
        longest = shape.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ValueError(f"max_model_len={config.max_model_len} is not valid: the model was made for {longest}")
        self.max_model_len: int = config.max_model_len or longest
        self.vocab_size: int = shape.vocab_size
        self.scheduler = make_scheduler(config, self.max_model_len, self._worker)
        memory = self._worker.adapters
        self._adapters = None if memory is None else AdapterManager(memory, self._slots_in_use)
        self.counters = EngineCounters()
        self.deliver: Callable[[Iterable[Update]], None] = self._deliver_later
        self._ended_between_steps: list[Update] = []
        self._changed = threading.Condition()  # notified when steps may run again, or requests ended without one
        self._asleep: frozenset[str] = frozenset()
        self._weights_loaded = True
        self._weights_shared = False
        self._unusable: str | None = None
        self._pause: _Pause | None = None
        self._guard: SharedWeightsGuard | None = None
        self._policy_version = 0
        self._receipt: Receipt | None = make_receipt(
            0, self.parameters(), self.tied(), self.buffers(), copies=self.copies()
        )
        self._tensors = tuple(self.parameters().values())
        self._changes = shared_versions(self._tensors)  # torch's change counters, as of the receipt
        self._orphans: dict[str, int] = {}  # parameters that hold no policy, and torch's change counter of then
        drafter = self._worker.drafter
        self._placement = Placement(self._worker.model, None if drafter is None else drafter.module)

    @property
    def policy_version(self) -> int:
        """Version of the policy that the weights hold; 0 is the checkpoint's. Of an unusable engine, that which it held
        last: the version that failed may be sent again."""
        if self._unusable is not None and self._receipt is not None:
            return self._receipt.policy_version
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
        """Raises the error that says why no new request may come now, if there is one."""
        self.check_running()
        if self._pause is not None:
            raise EngineAsleepError(f"{self._pause.reason}, after the requests in flight: generate once it has ended")
        self._check_placement(StaleWeightsError)
        if self._guard is not None:
            self._guard.check()
        if shared_versions(self._tensors) != self._changes:
            raise StaleWeightsError(
                "the engine's weights were changed outside a policy update since the last receipt: run a policy_update "
                "that covers every parameter, or reload_weights()"
            )

    def _check_holds_a_policy(self) -> None:
        """Raises the error that says why the weights are no policy beside which adapters could be put."""
        if self._pause is not None:
            raise PolicyUpdateError("a policy update is open: load adapters with it, or after it has ended")
        if self._unusable is not None:
            raise EngineUnusableError(f"the engine is unusable: {self._unusable}")
        if "weights" in self._asleep:
            raise EngineAsleepError("the weights sleep: call wake_up(['weights']) before changing adapters")
        if not self._weights_loaded:
            raise WeightsNotLoadedError("the weights hold no policy: run a policy_update, or reload_weights(), first")

    def _obstacle(self) -> RolloutError | None:
        """Why no step may run before somebody has done something about it: the requests in flight are held."""
        if self._unusable is not None:
            return EngineUnusableError(
                f"the engine is unusable: {self._unusable}. A policy update that covers every parameter repairs it"
            )
        if self._pause is not None and not self._pause.is_draining:
            return EngineAsleepError(f"{self._pause.reason}: generate after it has ended")
        if self._asleep:
            tags = sorted(self._asleep)
            return EngineAsleepError(f"the engine sleeps ({', '.join(tags)}): call wake_up({tags}) before generating")
        if not self._weights_loaded:
            return WeightsNotLoadedError(
                "the weights were given back by sleep(level=2) and hold no policy: run a policy_update that covers "
                "every parameter, or reload_weights()"
            )
        return self._copies_obstacle()

    def _copies_obstacle(self) -> WeightsNotLoadedError | None:
        quantized = self._worker.quantized
        if quantized is None or quantized.is_current:
            return None
        return WeightsNotLoadedError(
            "the int8 copies of the weights were given back by sleep(level=2), or not made to the end: run a "
            "policy_update that covers every parameter, or reload_weights()"
        )

    def check_running(self) -> None:
        """Raises the error that says why the requests in flight are held, if they are."""
        obstacle = self._obstacle()
        if obstacle is not None:
            raise obstacle

    @property
    def is_held(self) -> bool:
        """Whether requests in flight have to wait: the engine sleeps, is paused, or holds no policy."""
        return self._obstacle() is not None

    def wait_while_held(self, until: Callable[[], bool]) -> None:
        """Returns once steps may run, or `until()` holds. Without `lock`: those who change the state need it."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_held or until())

    def flush(self) -> None:
        """Delivers what ended between steps, and wakes those who wait for that or for the state that has changed."""
        self.deliver(self.take_ended())
        with self._changed:
            self._changed.notify_all()

    def _deliver_later(self, updates: Iterable[Update]) -> None:
        self._ended_between_steps += updates

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests. Raises before any of them is queued if the engine cannot run, or one can never fit."""
        requests = list(requests)
        self.check_ready()
        for request in requests:
            self.scheduler.check_fits(request)
        # Without a prefix cache nobody shares what another request has computed.
        for request in join_equal_prompts(requests) if self.config.enable_prefix_caching else requests:
            for sample in (request, *request.siblings):
                sample.policy_version = self._policy_version
            self.scheduler.add(request)

    def check_fits(self, request: Request) -> None:
        """Raises `ValueError`, with the numbers, if the request can never run to its end."""
        self.scheduler.check_fits(request)

    def check_grammar(
        self, params: SamplingParams, eos_token_ids: AbstractSet[int], output: Sequence[int] = ()
    ) -> None:
        """Raises `ValueError` if `structured_outputs` cannot be used, or does not allow the forced tokens, or an output
        that begins with `output`. The model must have a tokenizer."""
        self._worker.grammars.check(params, eos_token_ids, output)

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
        Raises, and changes nothing, while the requests in flight are held.
        """
        with collection_paused():
            return self._step()  # its plan is gone when it returns

    def _step(self) -> list[Update]:
        if not self.scheduler.has_unfinished():
            return self.take_ended()
        self.check_running()
        if self._guard is not None:
            self._check_placement(StaleWeightsError)
            self._guard.check_counters()
        updates = self.take_ended()
        started = time.perf_counter()
        try:
            draft_plan = self.scheduler.plan_drafts()
            if draft_plan is not None:
                self.scheduler.take_drafts(draft_plan, self.executor.propose_drafts(draft_plan))
            plan = self.scheduler.schedule()
            stepped = self.scheduler.update(plan, self.executor.execute(plan))
        except BaseException:
            self.scheduler.preempt_all()
            self._ended_between_steps = updates
            raise
        seconds = time.perf_counter() - started
        self.counters.stepped(plan, stepped, seconds, self.scheduler.stats())
        speculation = self.scheduler.speculation
        if speculation is not None and plan.is_decode:
            num_tokens = sum(len(token_ids) for _, token_ids in stepped)
            speculation.took(plan.num_decoding, len(plan.draws), num_tokens, seconds)
        return updates + stepped

    def finish(self, request: Request, stop: str, num_output_tokens: int) -> None:
        """Ends a request from outside: a stop string was found in the text of its first `num_output_tokens`. Those
        that came with them are dropped."""
        self.counters.num_generated_tokens -= request.num_output_tokens - num_output_tokens
        request.cut_output(num_output_tokens)
        self.scheduler.finish(request, FinishReason.STOP, stop)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block. False, and nothing is changed, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def verify(self) -> Receipt:
        """Fingerprints the weights again. Raises `StaleWeightsError` naming what differs from the last receipt."""
        if "weights" in self._asleep or not self._weights_loaded or self._receipt is None:
            raise WeightsNotLoadedError("the weights hold no policy that could be verified: run a policy_update first")
        self._check_placement(StaleWeightsError)
        obstacle = self._copies_obstacle()
        if obstacle is not None:
            raise obstacle
        adapters = {} if self._adapters is None else self._adapters.tensors()
        verify_receipt(self._receipt, self.parameters(), self.tied(), self.buffers(), self.copies(), adapters)
        dirty = [] if self._adapters is None else self._adapters.dirty()
        if dirty:
            raise StaleWeightsError(f"{len(dirty)} layers hold values beside their adapter (first: {dirty[0]})")
        stale = self.stale_copies()
        if stale:
            raise StaleWeightsError(f"{len(stale)} int8 copies are not those of the weights (first: {stale[0]})")
        return self._receipt

    def resize_kv_cache(self, num_bytes: int) -> int:
        """Another KV pool of at most `num_bytes`; cached blocks are forgotten. Asleep or awake, it stays so.

        Returns the bytes of its blocks. Raises `EngineBusyError` while requests are unfinished or an update is open,
        and `ValueError` where not even one block fits.
        """
        if self._pause is not None or self.scheduler.has_unfinished():
            raise EngineBusyError("the KV pool cannot change while requests are in flight, or a policy update is open")
        size = self._worker.pool_of(num_bytes)
        self.scheduler.reset_prefix_cache()  # first: should the worker fail, its blocks are empty all the same
        self._worker.resize_kv_cache(size, "kv_cache" in self._asleep)
        self.scheduler.set_num_blocks(size.num_blocks)
        self.counters.peak_blocks_in_use = 0
        return size.num_blocks * size.block_bytes

    def memory_ledger(self) -> LedgerReport:
        return self._worker.memory_ledger()

    def snapshots(self) -> list[EngineSnapshot]:
        """What the engine counts now; one entry, where an engine of replicas has one for each."""
        speculation = self.scheduler.speculation
        stats, version = self.scheduler.stats(), self._policy_version
        if speculation is None:
            return [EngineSnapshot(stats, self.counters, version)]
        drafts = [speculation.num_drafted, speculation.num_accepted, speculation.alternatives_tried_and_right]
        return [EngineSnapshot(stats, self.counters, version, drafts, speculation.seconds_won_and_lost)]

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """See `InProcessExecutor.collective_rpc`."""
        return self.executor.collective_rpc(method, timeout, args, kwargs)

    def profile(self) -> AbstractContextManager[list[StepProfile]]:
        """See `rollout.engine.profile.profile`."""
        return profile(self)

    def policy_update(
        self, version: int | None, in_flight: InFlightMode, timeout: float | None, roll_back: bool
    ) -> PolicyUpdate:
        """See `rollout.weights.transaction`."""
        return PolicyUpdate(self, version, in_flight, timeout, roll_back)

    def close(self) -> None:
        """Gives the memory back; requests in flight end with what they have."""
        self.sleep(2)

    def shared_model(self) -> CausalLM:
        """The module that the engine runs. From now on `sleep(level=2)` keeps the weights, also those of a drafter:
        somebody else uses them."""
        self._weights_shared = True
        if self._guard is None:
            self._guard = SharedWeightsGuard(self.parameters())
        return self._worker.model

    def shared_drafter(self) -> nn.Module:
        """The module that guesses. From now on `sleep(level=2)` keeps the weights, its own and the model's too. Raises
        `ValueError` where there is no drafter with weights."""
        if self._worker.drafter is None:
            raise ValueError(f"speculative_config={self.config.speculative_config!r} has no drafter with weights")
        self.shared_model()
        return self._worker.drafter.module

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        """What sleeps: "scheduling" (level 0), "weights", "kv_cache", "graphs"."""
        return tuple(tag for tag in TAGS if tag in self._asleep)

    def sleep(self, level: int = 1, mode: InFlightMode = "abort", timeout: float | None = None) -> SleepReport:
        """Stops, and gives memory back. Level 0: nothing. Level 1: the KV pool, what decode steps need besides, and
        what the heap holds unused. Level 2: the weights too, with their int8 copies.

        Requests in flight end with finish reason "abort" and the tokens they have ("abort"), run to their end first
        ("wait"), or are held until the engine runs again: with their KV ("keep", level 0 only), or computing it anew
        ("recompute"). Cached blocks are forgotten, except by level 0. Weights that a trainer shares stay, whatever the
        level; the int8 copies of them go, until a policy update. Raises `ValueError` for another level or mode, and
        `TimeoutError`, staying awake, if requests that are waited for have not ended after `timeout` seconds.
        """
        check_sleep(level, mode)
        pause = _Pause("the engine is going to sleep", "the engine is going to sleep", mode)
        with self.lock:
            self._stop(pause)
            if not pause.is_draining:
                return self._fall_asleep(level, mode)
        self._drain(pause, timeout)
        with self.lock:
            return self._fall_asleep(level, mode)

    def _fall_asleep(self, level: int, mode: InFlightMode) -> SleepReport:
        try:
            return self._give_back(level, mode)
        finally:
            self._pause = None
            self.flush()

    def _give_back(self, level: int, mode: str) -> SleepReport:
        if level == 2 and self._slots_in_use():
            raise ValueError(
                f"mode={mode!r} is not valid at level=2 while requests with LoRA adapters are unfinished, since it "
                "drops the adapters: use 'wait' or 'abort', or level=1"
            )
        if mode == "recompute":
            self.scheduler.preempt_all()
        if level == 0:
            self._asleep |= {"scheduling"}
            used = self._worker.platform.used_memory()
            return SleepReport({}, used, used)
        reset = self.scheduler.reset_prefix_cache()
        assert reset, "blocks are in use although no request runs"
        # First what may no longer be read: giving back may fail half-way.
        self._asleep |= self._worker.sleeping_tags(level, self._weights_shared)
        if "weights" in self._asleep:
            self._weights_loaded = False
            self._orphan(self.parameters().keys())
        if level == 2 and self._adapters is not None:
            self._adapters.drop_all()
            self._renew_receipt()
        return self._worker.sleep(level, keep_weights=self._weights_shared)

    def wake_up(self, tags: Iterable[str] | None = None) -> WakeReport:
        """Takes memory into use again: all of it, or what `tags` names (a string is one tag). Nothing is loaded.

        "kv_cache" wakes "graphs" too: neither is of use without the other. What is awake stays as it is. On a CPU
        pages come back from the operating system when they are written; on CUDA memory is allocated here. Raises
        `ValueError` for an unknown tag, and `torch.OutOfMemoryError` where the device's memory is taken: then all
        sleeps as before, and holds no memory that it did not hold before.
        """
        tags = check_tags(tags, self.config)
        if "kv_cache" in tags:
            tags.append("graphs")
        report = self._worker.wake_up(tags)
        self._asleep -= set(tags)
        self.flush()
        return report

    @property
    def holds_policy(self) -> bool:
        """Whether the weights hold one whole policy, that of the receipt."""
        return self._unusable is None and self._weights_loaded and self._copies_obstacle() is None

    def pause(self, in_flight: InFlightMode, timeout: float | None) -> None:
        update = _Pause("a policy update is in progress", "another policy update is open", in_flight)
        with self.lock:
            self._check_placement(PolicyUpdateError)
            self._stop(update)
        if update.is_draining:
            try:
                self._drain(update, timeout)
            except TimeoutError as error:
                raise PolicyUpdateTimeoutError(f"the policy update passed its limit of {timeout} s: {error}") from error

    def _stop(self, pause: _Pause) -> None:
        """Lets nobody else in, and no step run until `_pause` is cleared; where requests are waited for, they still
        have to be drained. `lock` is held."""
        if self._pause is not None:
            raise PolicyUpdateError(
                f"{self._pause.conflict}: before it has ended no update can begin, and the engine cannot sleep"
            )
        pause.is_draining = pause.mode == "wait" and self.scheduler.has_unfinished()
        obstacle = self._obstacle()
        if pause.is_draining and obstacle is not None:
            raise EngineAsleepError(f"'wait' would never end, since requests in flight cannot run: {obstacle}")
        self._pause = pause
        try:
            if pause.mode == "abort":
                searches = [request for request in self.scheduler.unfinished() if request.beam_options is not None]
                self._end_searches(searches, pause.reason)
                self._abort_all()
                self.flush()
        except BaseException:
            self._pause = None
            raise

    def _drain(self, pause: _Pause, timeout: float | None) -> None:
        """Runs the requests in flight to their end; other threads have the lock between the steps. Where it fails the
        engine goes on as before."""
        deadline = None if timeout is None else time.perf_counter() + timeout
        try:
            while pause.is_draining:
                with self.lock:
                    if deadline is not None and time.perf_counter() > deadline and self.scheduler.has_unfinished():
                        count = len(self.scheduler.unfinished())
                        raise TimeoutError(f"{count} requests in flight had not ended after {timeout} s, and go on")
                    self.deliver(self.step())
                    pause.is_draining = self.scheduler.has_unfinished()
        finally:
            if pause.is_draining:
                with self.lock:
                    self._pause = None

    def wake_weights(self) -> None:
        self._worker.wake_up(["weights"])
        self._asleep -= {"weights"}

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The model's, and those of a drafter under "drafter."."""
        return self._worker.parameters() | self._worker.drafter_parameters()

    def tied(self) -> Mapping[str, str]:
        return self._worker.tied() | self._worker.drafter_tied()

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self._worker.buffers() | self._worker.drafter_buffers()

    def copies(self) -> Mapping[str, torch.Tensor]:
        quantized = self._worker.quantized
        return {} if quantized is None else quantized.tensors()

    def adapters(self) -> AdapterManager | None:
        return self._adapters

    def adapters_for(self, choices: Sequence[LoRARequest | str | None]) -> list[LoadedAdapter | None]:
        """The adapter of each request, read from its folder where it is not in memory.

        Raises `ValueError` for an adapter that is not known or cannot be applied, and where `max_loras` do not suffice.
        """
        if all(choice is None for choice in choices):
            return [None] * len(choices)
        with self._changing_adapters() as manager:
            return manager.resolve(choices)

    def add_lora(self, request: LoRARequest) -> bool:
        """Reads an adapter from its folder into memory, also where it is there already; returns whether it was not.

        Raises `ValueError` for a folder that cannot be applied, where there is no room, and while it is in use.
        """
        self._check_holds_a_policy()
        is_new = request.lora_int_id not in self.list_loras()
        with self._changing_adapters() as manager:
            manager.load(request)
        return is_new

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forgets an adapter; False where there is none of this number. Raises `ValueError` while it is in use."""
        self._check_holds_a_policy()
        with self._changing_adapters() as manager:
            return manager.remove(lora_int_id)

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keeps an adapter in memory until it is removed. Raises `ValueError` where there is none of this number."""
        self._manager().pin(lora_int_id)
        return True

    def list_loras(self) -> set[int]:
        """Numbers of the adapters in memory."""
        return {adapter.request.lora_int_id for adapter in self._manager().loaded}

    def _manager(self) -> AdapterManager:
        if self._adapters is None:
            raise ValueError("enable_lora=False is not valid for requests with adapters: switch it on")
        return self._adapters

    def _slots_in_use(self) -> set[int]:
        return {request.adapter_slot for request in self.scheduler.unfinished()} - {-1}

    @contextmanager
    def _changing_adapters(self) -> Iterator[AdapterManager]:
        """After the block, also one that failed, the receipt covers the adapters that are in memory then."""
        manager = self._manager()
        before = manager.loaded
        try:
            yield manager
        finally:
            if set(manager.loaded) != set(before):
                self._renew_receipt()

    def _renew_receipt(self) -> None:
        """The receipt covers the adapters that are in memory now, beside the policy of the last update."""
        assert self._receipt is not None
        parameters = dict(self.parameters())
        tied = {name: parameters[target] for name, target in self.tied().items()}
        tensors = parameters | tied | dict(self.buffers()) | dict(self.copies())
        self._receipt = with_adapters(self._receipt, tensors, self._manager().tensors())

    def _bind_adapters(self) -> None:
        """Requests that outlive an update go on with what their adapter is now; the next hashes are under its key."""
        if self._adapters is None:
            return
        key_at = {adapter.slot: adapter.key for adapter in self._adapters.loaded}
        for request in self.scheduler.unfinished():
            if request.adapter_slot >= 0:
                request.adapter_key = key_at[request.adapter_slot]

    def stale_copies(self) -> list[str]:
        quantized = self._worker.quantized
        return [] if quantized is None else quantized.stale()

    def post_process(self) -> None:
        """The int8 copies depend on the weights' values. The other kernels read the weights as they lie."""
        self._worker.remake_quantized_weights()

    def undo_log(self) -> UndoLog:
        parameters, ledger = self.parameters(), self._worker.ledger
        num_bytes = slab_bytes((tensor.shape, tensor.dtype) for tensor in parameters.values())
        memory = self._worker.platform.host_memory("undo_log", num_bytes)
        ledger.register("undo_log", memory, on_host=self._worker.device.type != "cpu")
        return UndoLog(parameters, memory, on_close=lambda: ledger.unregister("undo_log"))

    def invalidate(self, version: int) -> None:
        with self.lock:
            self._take_version(version)

    def _take_version(self, version: int) -> None:
        assert self._pause is not None
        self._end_searches(self.scheduler.begun_beam_searches(), "a policy update has begun")
        self._bind_adapters()
        keep = self._pause.mode == "keep"
        if not keep:
            self.scheduler.preempt_all()
        self.scheduler.set_policy_version(version, keep_kv=keep)
        self._policy_version = version

    def resume(self, receipt: Receipt, guard: SharedWeightsGuard) -> None:
        assert "weights" not in self._asleep, "the weights fell asleep during a policy update"
        if not guard.names and self._weights_shared:
            guard = SharedWeightsGuard(self.parameters())
        with self.lock:
            self._receipt = receipt
            self._guard = guard if guard.names else None
            self._weights_shared = self._weights_shared or bool(guard.names)
            self._weights_loaded = True
            self._unusable = None
            self._go_on()

    def cancel(self) -> None:
        with self.lock:
            self._pause = None
            self.flush()

    def restore(self, receipt: Receipt) -> None:
        guard = SharedWeightsGuard(self.parameters()) if self._guard is not None else None
        with self.lock:
            if self.scheduler.policy_version != receipt.policy_version:  # also where `invalidate` came half-way
                self._take_version(receipt.policy_version)
            self._receipt, self._guard = receipt, guard
            self._go_on()

    def _go_on(self) -> None:
        """Runs again; the weights are as the receipt has them."""
        self._changes = shared_versions(self._tensors)
        self._orphans = {}
        self._pause = None
        self.flush()

    def mark_unusable(self, reason: str, written: Collection[str] = ()) -> None:
        with self.lock:
            self._unusable = reason
            self._orphan(written)
            self._abort_all()
            self._pause = None
            self.flush()

    def _orphan(self, names: Collection[str]) -> None:
        """These parameters hold no policy from now on."""
        parameters = self.parameters()
        self._orphans |= {name: change_count(parameters[name]) for name in names}

    def orphans(self) -> frozenset[str]:
        parameters = self.parameters()
        return frozenset(name for name, count in self._orphans.items() if change_count(parameters[name]) == count)

    def _check_placement(self, error: type[StaleWeightsError] | type[PolicyUpdateError]) -> None:
        problem = self._placement.problem()
        if problem is not None:
            raise error(problem)

    def _end_searches(self, searches: Iterable[Request], reason: str) -> None:
        """Ends beam searches with the reason, which their outputs tell."""
        for search in searches:
            self.scheduler.finish(search, FinishReason.ABORT, reason)
            self._ended_between_steps.append((search, []))

    def _abort_all(self) -> None:
        self.abort([request.request_id for request in self.scheduler.unfinished()])
