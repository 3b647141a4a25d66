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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rollout.config import EngineConfig
from rollout.core.scheduler import check_fits
from rollout.engine.group import WorkerGroup
from rollout.engine.importable import pickle_for_workers
from rollout.engine.lock import FairLock
from rollout.engine.messages import Abort, Add, Call, Family, Finish, Proceed, Ready, Rpc, Start, StepFailed
from rollout.engine.profile import StepProfile
from rollout.engine.reports import join_ledgers, join_sleep_reports
from rollout.engine.transfer import Update, apply, pack_family
from rollout.errors import EngineClosedError, StaleWeightsError, WorkerDiedError
from rollout.metrics import EngineSnapshot
from rollout.models.registry import ModelRegistry
from rollout.platform.replicas import replica_settings
from rollout.request import FinishReason, Request, RequestStatus
from rollout.weights.receipt import Receipt
from rollout.weights.transaction import PolicyUpdate
from rollout.worker.ledger import LedgerReport, SleepReport

T = TypeVar("T")


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
        try:
            architectures = pickle_for_workers(ModelRegistry.registered(), "a model class of the registry")
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
    def policy_version(self) -> int:
        return self._receipt.policy_version

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

    # Requests

    def check_ready(self) -> None:
        self._call_all(type(None), "check_ready")

    def check_fits(self, request: Request) -> None:
        check_fits(request, self._limits)

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests, each leader with its siblings on the rank that has least to do. All or none."""
        self._group.check_alive()
        leaders = list(requests)
        for leader in leaders:
            self.check_fits(leader)
        families: dict[int, list[Family]] = {}
        handles: list[int] = []
        for leader in leaders:
            rank = min(range(self._group.num_ranks), key=self._work.__getitem__)
            family_handles = [self._place(sample, rank, leader) for sample in (leader, *leader.siblings)]
            families.setdefault(rank, []).append(pack_family(leader, family_handles))
            handles += family_handles
        commands = {rank: Add(self._group.number(), members) for rank, members in families.items()}
        try:
            self._group.ask(commands, type(None))
        except BaseException:
            for handle in handles:
                if handle in self._requests:
                    self._drop(handle)
            raise

    def _place(self, request: Request, rank: int, leader: Request) -> int:
        handle = next(self._numbers)
        work = request.max_tokens + (request.num_prompt_tokens if request is leader else 0)
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
        """Ends requests by their own or their group's id. `take_ended` has what they sampled, and all that came since.

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

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request from outside; of one that has ended already, only the reason changes."""
        request.finish_reason, request.stop_reason = reason, stop_reason
        if not request.is_finished:
            request.status = RequestStatus.FINISHED
            (handle,) = self._handles[request.request_id]
            self._drop(handle)

    def step(self) -> Iterator[Update]:
        """Waits until a worker has sent something, if anything is unfinished, and returns all that came.

        Raises what a worker's step raised: no token is lost, and it tries again at the next `step`. Raises
        `WorkerDiedError`. In either case what came before has been returned.
        """
        if not self._group.inbox and not self._ended and self._failures:
            rank, failed = self._failures.popleft()
            raise failed.fault.error(rank)
        while self._requests and not self._group.inbox and not self._ended:
            for rank in self._halted:
                self._group.send(rank, Proceed())
            self._halted.clear()
            self._group.receive()
        return self.take_ended()

    def take_ended(self) -> Iterator[Update]:
        """Everything that has come, also what belongs to requests that go on. Each request changes in its turn."""
        inbox, ended = self._group.inbox, self._ended
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

    def sleep(self, level: int = 1) -> SleepReport:
        return join_sleep_reports(self._call_all(SleepReport, "sleep", level))

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        self._call_all(type(None), "wake_up", None if tags is None else list(tags))

    def verify(self) -> Receipt:
        return same_receipt(self._call_all(Receipt, "verify"))

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

    def policy_update(self, version: int | None, in_flight: str, timeout: float | None) -> PolicyUpdate:
        raise NotImplementedError

    def shared_model(self) -> NoReturn:
        self._refuse("shared_model", "a trainer in this process cannot share tensors of other processes")

    def profile(self) -> AbstractContextManager[list[StepProfile]]:
        self._refuse("profile", "it measures kernels of the process that calls it")

    def _refuse(self, method: str, why: str) -> NoReturn:
        raise ValueError(f"{method}() is not supported with data_parallel_size={self.config.data_parallel_size}: {why}")

    def close(self) -> None:
        """Ends the processes. Requests in flight end with what they have. Nothing happens the second time."""
        if self._group.is_alive:
            self.abort(list(self._handles))
        self._ended += self._requests
        self._group.close()


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
