"""EngineReplicas: several engines in processes of their own, used like the one `EngineCore` in this process.

    LLM ─► EngineReplicas ─┬─ socket ─► worker process of rank 0: EngineCore
                           └─ socket ─► worker process of rank 1: EngineCore

Each prompt with its samples goes to the rank with least work. A sample is a pure function of the weights and of what
it was asked for, so it comes out the same wherever it runs. The replicas step by themselves, as long as they have
something to do; here `step` waits for what they send.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rollout.config import EngineConfig
from rollout.core.scheduler import check_fits
from rollout.engine.bucket import SharedBucket
from rollout.engine.core import Update
from rollout.engine.group import WorkerGroup
from rollout.engine.importable import pickle_for_workers
from rollout.engine.lock import FairLock, LockTimeoutError
from rollout.engine.messages import (
    Abort,
    Add,
    Call,
    Command,
    Family,
    Finish,
    Numbered,
    Proceed,
    Ready,
    Rpc,
    Start,
    StepFailed,
)
from rollout.engine.profile import StepProfile
from rollout.engine.reports import join_ledgers, join_sleep_reports, join_wake_reports
from rollout.engine.sleep_arguments import check_sleep, check_tags
from rollout.engine.transfer import apply, pack_family, pack_processors
from rollout.engine.update_over_ranks import PolicyUpdateOverRanks
from rollout.errors import (
    EngineAsleepError,
    EngineClosedError,
    PolicyUpdateError,
    PolicyUpdateTimeoutError,
    RolloutError,
    StaleWeightsError,
    WorkerDiedError,
)
from rollout.lora.manager import LoadedAdapter
from rollout.lora.request import LoRARequest
from rollout.metrics import EngineSnapshot
from rollout.models.loader import read_config
from rollout.models.registry import ModelRegistry
from rollout.models.tokenizer import find_tokenizer
from rollout.platform.replicas import replica_settings
from rollout.request import FinishReason, Request, RequestStatus
from rollout.sampling.grammars import Grammars
from rollout.sampling_params import SamplingParams
from rollout.weights.receipt import Receipt
from rollout.weights.target import InFlightMode
from rollout.weights.transaction import PolicyUpdate
from rollout.worker.ledger import LedgerReport, SleepReport, WakeReport

T = TypeVar("T")

_TURN_SECONDS = 1.0  # that a step waits for workers before other threads may use the engine


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request runs, and the tokens that it may cost there."""

    rank: int
    work: int


class EngineReplicas:
    """See the module's docstring, and `EngineCore` for the methods. Callers in several threads hold `lock`.

    Once a worker process has ended unasked, every call raises `WorkerDiedError`: the policy cannot be kept the same on
    all ranks any more. What the requests have is kept and returned first.
    """

    def __init__(self, config: EngineConfig, folder: Path, on_tensor: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.lock = FairLock()
        self._folder = folder
        settings = replica_settings(config)
        self._group = WorkerGroup([setting.environment for setting in settings])
        self._requests: dict[int, Request] = {}  # everything unfinished, by handle
        self._places: dict[int, _Place] = {}
        self._handles: dict[str, list[int]] = {}  # request id -> its handle, group id -> those of its samples
        self._numbers = itertools.count()
        self._work = [0] * len(settings)  # tokens that unfinished requests may cost each rank
        self._ended: deque[int] = deque()  # handles of requests that end here, since their worker cannot
        self._failures: deque[tuple[int, StepFailed]] = deque()  # rank, and what is to be raised
        self._halted: set[int] = set()  # ranks whose last step failed
        self._undelivered: deque[Update] = deque()
        self.deliver: Callable[[Iterable[Update]], None] = self._undelivered.extend  # until the user replaces it
        self._changed = threading.Condition()  # notified when steps may run again, or requests ended without one
        self._stopping: str | None = None  # why nobody is let in: a policy update, or sleep on its way
        self._is_draining = False  # requests in flight still run
        try:
            architectures = pickle_for_workers(
                ModelRegistry.classes_for(read_config(folder)), "the model's class in the registry"
            )
            starts = {
                rank: Start(self._group.number(), setting.config, str(folder), rank, architectures)
                for rank, setting in enumerate(settings)
            }
            replies = self._group.start(starts, Ready, on_tensor)
            self._receipt = same_receipt([reply.receipt for reply in replies])
        except BaseException:
            self._group.close()
            raise
        self.vocab_size: int = replies[0].vocab_size
        self.max_model_len: int = replies[0].limits.max_model_len
        self._limits = replace(replies[0].limits, num_blocks=min(reply.limits.num_blocks for reply in replies))

    @property
    def bucket(self) -> SharedBucket:
        """Memory that all worker processes see."""
        return self._group.bucket

    @property
    def policy_version(self) -> int:
        """The newest version of any rank; they only differ while all are unusable."""
        return max(state.policy_version for state in self._group.states)

    @property
    def receipt(self) -> Receipt | None:
        """That of rank 0; the others' are equal."""
        return self._receipt

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        """What sleeps on any rank."""
        return tuple(dict.fromkeys(tag for state in self._group.states for tag in state.sleeping_tags))

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    @property
    def process_ids(self) -> list[int]:
        """Of the worker processes, in rank order."""
        return self._group.pids

    # Whether it may run

    @property
    def is_held(self) -> bool:
        """Whether requests in flight have to wait. Not once a worker has died: to wait would be in vain."""
        if not self._group.is_alive or self._is_draining:
            return False
        return self._stopping is not None or any(state.is_held for state in self._group.states)

    def wait_while_held(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.is_held or until())

    def check_running(self) -> None:
        """Raises the error that says why the requests in flight are held, if they are. That a worker has died is said
        by `step`, after all that came before."""
        with suppress(WorkerDiedError, EngineClosedError):
            self._call_all(type(None), "check_running")

    def check_ready(self) -> None:
        self._group.check_alive()
        if self._stopping is not None:
            raise EngineAsleepError(f"{self._stopping}: generate once it has ended")
        self._call_all(type(None), "check_ready")

    # Requests

    def check_fits(self, request: Request) -> None:
        """Raises `ValueError` where the request can never run to its end, or its logits processors cannot be sent."""
        check_fits(request, self._limits)
        pack_processors(request.params)

    def check_grammar(
        self, params: SamplingParams, eos_token_ids: AbstractSet[int], output: Sequence[int] = ()
    ) -> None:
        """Compiled here too, so that what is wrong is said before any rank hears of it. See `EngineCore`."""
        self._grammars.check(params, eos_token_ids, output)

    @cached_property
    def _grammars(self) -> Grammars:
        tokenizer = find_tokenizer(self.config.tokenizer, self._folder)
        assert tokenizer is not None, "structured outputs without a tokenizer are refused before"
        return Grammars(tokenizer, self.vocab_size, num_threads=1)

    def adapters(self) -> None:
        """The engines apply no adapters: `enable_lora` is refused with several."""

    def adapters_for(self, choices: Sequence[LoRARequest | str | None]) -> list[LoadedAdapter | None]:
        """None for each request: raises `ValueError` for one that names an adapter, which only one engine can have."""
        if any(choice is not None for choice in choices):
            raise ValueError(f"lora_request is not supported with data_parallel_size={self.config.data_parallel_size}")
        return [None] * len(choices)

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests, each leader with its siblings on the rank that has least to do. All or none."""
        self._group.check_alive()
        leaders = list(requests)
        for leader in leaders:
            self.check_fits(leader)
        families: dict[int, list[Family]] = {}
        handles: list[int] = []
        for leader in leaders:
            parent = self._handle_of(leader.forked_from)
            rank = min(range(self._group.num_ranks), key=self._work.__getitem__)
            rank = rank if parent is None else self._places[parent].rank  # where the KV is
            family_handles = [self._place(sample, rank, leader) for sample in (leader, *leader.siblings)]
            families.setdefault(rank, []).append(pack_family(leader, family_handles, parent))
            for sample in (leader, *leader.siblings):
                sample.forked_from = None  # the worker knows
            handles += family_handles
        commands = {rank: Add(self._group.number(), members) for rank, members in families.items()}
        try:
            self._group.ask(commands, type(None))
        except BaseException:
            for handle in handles:
                if handle in self._requests:
                    self._drop(handle)
            raise

    def _handle_of(self, request: Request | None) -> int | None:
        """The handle of an unfinished request."""
        return None if request is None else next(iter(self._handles.get(request.request_id, ())), None)

    def _place(self, request: Request, rank: int, leader: Request) -> int:
        handle = next(self._numbers)
        width = 1 if request.beam_options is None else request.beam_options.width
        work = request.max_tokens * width + (request.num_prompt_tokens if request is leader else 0)
        request.policy_version = self.policy_version
        self._requests[handle], self._places[handle] = request, _Place(rank, work)
        self._handles[request.request_id] = [handle]
        self._handles.setdefault(request.group_id, []).append(handle)
        self._work[rank] += work
        return handle

    def _forget(self, handle: int) -> int:
        """Takes a request off the books. Returns the rank where it ran."""
        request, place = self._requests.pop(handle), self._places.pop(handle)
        self._work[place.rank] -= place.work
        del self._handles[request.request_id]
        group = self._handles[request.group_id]
        group.remove(handle)
        if not group:
            del self._handles[request.group_id]
        return place.rank

    def _drop(self, handle: int) -> None:
        """Takes a request off the books and lets it end where it runs; nothing more is told of it."""
        rank = self._forget(handle)
        if self._group.is_alive:
            self._group.send(rank, Finish(handle))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests by their own or their group's id. `flush` delivers what they sampled.

        Where a worker has died they end here, with what has arrived.
        """
        handles = [handle for request_id in request_ids for handle in self._handles.get(request_id, ())]
        handles = list(dict.fromkeys(handles))
        by_rank: dict[int, list[int]] = {}
        for handle in handles:
            by_rank.setdefault(self._places[handle].rank, []).append(handle)
        commands = {rank: Abort(self._group.number(), members) for rank, members in by_rank.items()}
        try:
            self._group.ask(commands, type(None))
        except (WorkerDiedError, EngineClosedError):
            self._ended += handles

    def finish(self, request: Request, stop: str, num_output_tokens: int) -> None:
        """Ends a request from outside, with its first `num_output_tokens`, in whose text a stop string was found; of
        one that has ended already, only these and the reason change."""
        request.cut_output(num_output_tokens)
        request.finish_reason, request.stop_reason = FinishReason.STOP, stop
        if not request.is_finished:
            request.status = RequestStatus.FINISHED
            (handle,) = self._handles[request.request_id]
            self._drop(handle)

    def step(self) -> Iterator[Update]:
        """Waits until a worker has sent something, if anything is unfinished, and returns all that came; nothing when
        that takes so long that other threads should have their turn.

        Raises what a worker's step raised: no token is lost, and it tries again at the next `step`. Raises
        `WorkerDiedError`. In either case what came before has been returned.
        """
        if self._failures and not self._has_news:
            rank, failed = self._failures.popleft()
            raise failed.fault.error(rank)
        if self._requests and self.is_held and not self._has_news:
            self.check_running()
        turn_ends = time.monotonic() + _TURN_SECONDS
        while self._requests and not self._has_news:
            left = turn_ends - time.monotonic()
            if left <= 0 or self._group.is_closing:
                break
            for rank in self._halted:
                self._group.send(rank, Proceed())
            self._halted.clear()
            self._group.receive(left)
        return self._take()

    @property
    def _has_news(self) -> bool:
        return bool(self._undelivered or self._group.inbox or self._ended)

    def flush(self) -> None:
        """Delivers all that came, and wakes those who wait for that or for the state that has changed."""
        self.deliver(self._take())
        with self._changed:
            self._changed.notify_all()

    def _take(self) -> Iterator[Update]:
        """Everything that has come, also what belongs to requests that go on. Each request changes in its turn."""
        inbox, ended = self._group.inbox, self._ended
        while self._undelivered:
            yield self._undelivered.popleft()
        while inbox or ended:
            while inbox:
                rank, message = inbox.popleft()
                if isinstance(message, StepFailed):
                    self._halted.add(rank)
                    self._failures.append((rank, message))
                    continue
                for request, token_ids in apply(message, self._requests):
                    if request.is_finished:
                        self._forget(self._handles[request.request_id][0])
                    yield request, token_ids
            while ended:
                handle = ended.popleft()
                if handle in self._requests:
                    request = self._requests[handle]
                    self._forget(handle)
                    request.finish_reason, request.status = FinishReason.ABORT, RequestStatus.FINISHED
                    yield request, []
        if not self._requests:
            self._failures.clear()  # of requests that nobody waits for any more

    # The engine as a whole

    def sleep(self, level: int, mode: InFlightMode, timeout: float | None) -> SleepReport:
        """Takes `lock` by itself. Where a rank fails the others sleep: `wake_up` wakes those that do."""
        check_sleep(level, mode)
        self._stop("the engine is going to sleep", mode, timeout)
        try:
            with self.lock:
                mode = "abort" if mode == "wait" else mode  # nothing is left to wait for
                return join_sleep_reports(self._call_all(SleepReport, "sleep", level, mode))
        finally:
            self.go_on(None)

    def wake_up(self, tags: Iterable[str] | None = None) -> WakeReport:
        tags = check_tags(tags, self.config)
        try:
            reports = self._call_all(WakeReport, "wake_up", tags)
            return join_wake_reports(reports)
        finally:
            self.flush()

    def verify(self) -> Receipt:
        same_receipt(self._call_all(Receipt, "verify"))
        return self._receipt

    def reset_prefix_cache(self) -> bool:
        """False where a rank has requests that hold blocks; the others have forgotten theirs."""
        return all(self._call_all(bool, "reset_prefix_cache"))

    def memory_ledger(self) -> LedgerReport:
        return join_ledgers(self._call_all(LedgerReport, "memory_ledger"))

    def snapshots(self) -> list[EngineSnapshot]:
        return [snapshot for (snapshot,) in self._call_all(list[EngineSnapshot], "snapshots")]

    def _call_all(self, kind: type[T], method: str, *arguments: Any) -> list[T]:
        """Calls a method of every rank's engine. Raises the error of the lowest rank that has one."""
        ranks = range(self._group.num_ranks)
        return self._group.ask({rank: Call(self._group.number(), method, list(arguments)) for rank in ranks}, kind)

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Calls `method` on every worker, in its process; see `InProcessExecutor.collective_rpc`.

        A callable and all values are pickled. Raises the error of the lowest rank that has one, `TimeoutError` naming
        the ranks that have not answered in time: these go on, and what they answer later is dropped.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout!r} is not valid: it must be above 0 seconds, or None")
        payload = pickle_for_workers((method, tuple(args), dict(kwargs)), "the call")
        ranks = range(self._group.num_ranks)
        results = self._group.ask({rank: Rpc(self._group.number(), payload) for rank in ranks}, bytes, timeout)
        return [pickle.loads(result) for result in results]

    # Stopping: sleep, and policy updates. These take `lock` by themselves.

    def policy_update(
        self, version: int | None, in_flight: InFlightMode, timeout: float | None, roll_back: bool
    ) -> PolicyUpdate:
        return PolicyUpdateOverRanks(self, version, in_flight, timeout, roll_back)

    def stop_for_update(self, mode: InFlightMode, timeout: float | None) -> None:
        """Lets nobody else in, until `go_on`."""
        try:
            self._stop("a policy update is in progress", mode, timeout)
        except TimeoutError as error:
            raise PolicyUpdateTimeoutError(f"the policy update passed its limit of {timeout} s: {error}") from error

    def ask_all(self, command: Callable[[int], Numbered], kind: type[T], timeout: float | None = None) -> list[T]:
        """Asks every rank, and delivers what ended by it. `command` makes the message with a number.

        Raises `NoAnswerError` naming the ranks that have not answered in `timeout` seconds, `LockTimeoutError` where
        another thread did not let the engine go for so long.
        """
        started = time.monotonic()
        with self.lock.within(timeout):
            left = None if timeout is None else max(1e-3, timeout - (time.monotonic() - started))
            try:
                ranks = range(self._group.num_ranks)
                return self._group.ask({rank: command(self._group.number()) for rank in ranks}, kind, left)
            finally:
                self.flush()

    def kill_silent(self, ranks: Collection[int], why: str) -> None:
        """Kills workers that do not answer: `ranks`, or those that another thread, which has the lock, waits for."""
        self._group.kill_silent(ranks, why)

    def tell_living(self, command: Command) -> None:
        """Sends a message to every rank whose process runs, after one has died. Nobody waits for replies."""
        with self.lock:
            self._group.send_to_living(command)

    def go_on(self, receipt: Receipt | None) -> None:
        """Ends what `_stop` began; under a new receipt, if there is one."""
        self._receipt = receipt or self._receipt
        self._stopping = None
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Wakes those who wait while requests are held."""
        with self._changed:
            self._changed.notify_all()
        # A thread that waits for a worker without an answer may have the lock. What there is to deliver can wait.
        with suppress(LockTimeoutError), self.lock.within(_TURN_SECONDS):
            self.flush()

    def _stop(self, reason: str, mode: InFlightMode, timeout: float | None) -> None:
        """Lets nobody else in. Where requests are to be waited for they run to their end first."""
        with self.lock.within(None if timeout is None else max(timeout, 2 * _TURN_SECONDS)):
            self._group.check_alive()
            if self._stopping is not None:
                raise PolicyUpdateError(
                    f"{self._stopping}: before it has ended no update can begin, and the engine cannot sleep"
                )
            if mode == "wait" and self._requests and self.is_held:
                try:
                    self.check_running()
                except RolloutError as obstacle:
                    raise EngineAsleepError(
                        f"'wait' would never end, since requests in flight cannot run: {obstacle}"
                    ) from obstacle
            self._is_draining = mode == "wait"  # first: nobody is to take the requests for held
            self._stopping = reason
        if mode == "wait":
            self._drain(timeout)

    def _drain(self, timeout: float | None) -> None:
        """Runs the requests in flight to their end, other threads between the steps. Where it fails the engine goes on
        as before."""
        deadline = None if timeout is None else time.perf_counter() + timeout
        drained = False
        try:
            while not drained:
                with self.lock.within(None if timeout is None else 2 * _TURN_SECONDS):
                    if deadline is not None and time.perf_counter() > deadline and self._requests:
                        raise TimeoutError(
                            f"{len(self._requests)} requests in flight had not ended after {timeout} s, and go on"
                        )
                    self.deliver(self.step())
                    drained = not self._requests
        finally:
            if not drained:
                self._stopping = None
            self._is_draining = False
            self._tell_waiting()

    # What there is only in one process

    def shared_model(self) -> NoReturn:
        self._refuse("shared_model", "a trainer in this process cannot share tensors of other processes")

    def shared_drafter(self) -> NoReturn:
        self._refuse("shared_drafter", "a trainer in this process cannot share tensors of other processes")

    def resize_kv_cache(self, num_bytes: int) -> NoReturn:
        self._refuse("resize_kv_cache", "the pools of other processes have the size that they were started with")

    def profile(self) -> AbstractContextManager[list[StepProfile]]:
        self._refuse("profile", "it measures kernels of the process that calls it")

    def _refuse(self, method: str, why: str) -> NoReturn:
        raise ValueError(f"{method}() is not supported with data_parallel_size={self.config.data_parallel_size}: {why}")

    def close(self) -> None:
        """Ends the processes, also one that does not answer, whatever other threads wait for: they get
        `EngineClosedError`. Requests in flight end with what has arrived of them. Nothing happens the second time."""
        self._group.interrupt()
        with self.lock:
            if self._group.is_alive:
                self._group.receive(timeout=0)
            self._ended += self._requests
            self._group.close()
            self.flush()


def same_receipt(receipts: Sequence[Receipt]) -> Receipt:
    """Rank 0's receipt, which all must equal. Raises `StaleWeightsError` naming rank and tensors where one does not."""
    first = receipts[0]
    for rank, receipt in enumerate(receipts[1:], start=1):
        if receipt.id != first.id:
            here, there = (r.tensors | r.buffers | r.copies for r in (first, receipt))
            names = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
            raise StaleWeightsError(
                f"rank {rank} does not hold what rank 0 holds: its receipt is {receipt.id} (policy "
                f"{receipt.policy_version}), not {first.id} (policy {first.policy_version}); tensors that differ: "
                f"{', '.join(names[:5]) or 'none'}"
            )
    return first
