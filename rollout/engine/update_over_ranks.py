"""A policy update of engines in several processes: all of them, or none.

    PolicyUpdateOverRanks ──── one message a step ────►  PolicyUpdate of each rank
    pause ─► wake ─► load ─► post_process ─► verify      each on all ranks, before the next on any
                     all receipts equal?                 no: all give up, and are put back or marked unusable
    invalidate ─► resume                                 on all ranks

Tensors of this process go to all ranks at once, through one bucket of shared memory; a transport is read by each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from rollout.engine.bucket import ALIGNMENT
from rollout.engine.group import NoAnswerError
from rollout.engine.importable import pickle_for_workers
from rollout.engine.lock import LockTimeoutError
from rollout.engine.messages import (
    Arrived,
    BucketTensor,
    Call,
    GiveUp,
    Layout,
    LoadBucket,
    LoadTransport,
    Numbered,
    OpenUpdate,
    UpdateStep,
)
from rollout.engine.update_on_rank import dtype_name, dtype_of
from rollout.errors import EngineClosedError, FingerprintMismatchError, PolicyUpdateTimeoutError, WorkerDiedError
from rollout.weights.in_process import InProcess
from rollout.weights.incoming import Incoming
from rollout.weights.receipt import Receipt
from rollout.weights.target import InFlightMode
from rollout.weights.transaction import Outcome, Phase, PolicyUpdate, _Sent, _Step
from rollout.weights.transport import NamedTensor, Transport

if TYPE_CHECKING:
    from rollout.engine.replicas import EngineReplicas

T = TypeVar("T")

BUCKET_BYTES = 64 << 20

# Seconds that a rank has at least to say that it gave up. It may have to put the old policy back, or to wait for the
# sender of a transport, which is silent for as long as the transport's own limit allows.
_GIVE_UP_SECONDS = 8.0
_GIVE_UP_TRANSPORT_SECONDS = 150.0

_RemoteStep = Literal["wake", "post_process", "verify", "invalidate", "resume"]


class PolicyUpdateOverRanks(PolicyUpdate):
    """Like `PolicyUpdate`, with the same steps in the same order.

    What is sent is checked here, before any rank hears of it; what each rank holds in the end is compared with what
    was sent, and with what the others hold. Where a step fails on any rank, all give up: if one of them can no longer
    serve the old policy, none does.
    """

    def __init__(
        self,
        engines: EngineReplicas,
        version: int | None,
        in_flight: InFlightMode,
        timeout: float | None,
        roll_back: bool,
    ) -> None:
        # The base asks for the policy version, and for adapters, of which there are none: every step that touches the
        # engine is another one here, so that `engines` need not be an `UpdateTarget`.
        super().__init__(engines, version, in_flight, timeout, roll_back)  # type: ignore[arg-type]
        self._engines = engines
        self._bucket = engines.bucket
        self._packed: list[BucketTensor] = []  # what lies in the bucket, and no rank has heard of yet
        self._used = 0  # bytes of the bucket
        self._bucket_bytes = 0
        self._give_up_seconds = _GIVE_UP_SECONDS

    def pause(self) -> None:
        """Stops all ranks, once requests in flight are where the mode wants them."""
        with _Step(self, "pause"):
            self._started = time.perf_counter()
            self._engines.stop_for_update(self._in_flight, self._timeout)
            spent = time.perf_counter() - self._started
            mode = "abort" if self._in_flight == "wait" else self._in_flight  # none is left to wait for
            asked: list[int] = []

            def open_update(number: int) -> OpenUpdate:
                asked.append(number)
                return OpenUpdate(number, self.version, mode, self._timeout, spent, self._roll_back)

            try:
                self._ask_all("pause", open_update, type(None))
            except BaseException as error:
                if asked:
                    self._tell_to_give_up(error)
                else:  # no rank has heard of this update
                    self._engines.go_on(None)
                raise

    def wake(self) -> None:
        """Makes the weights' memory writable on all ranks, and learns what tensors they have."""
        with _Step(self, "wake"):
            layout, *others = self._ask_step("wake", Layout)
            assert all(other == layout for other in others), "ranks of one model have other tensors"
            # Each stands for the tensors of all ranks: dtype and shape, and next to no memory.
            self._parameters = {
                name: torch.empty((), dtype=dtype_of(dtype)).expand(shape)
                for name, (dtype, shape) in layout.parameters.items()
            }
            self._tied = layout.tied
            largest = max(map(_room, self._parameters.values()))
            self._bucket_bytes = max(largest, min(BUCKET_BYTES, sum(map(_room, self._parameters.values()))))

    def _load(
        self, named: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[NamedTensor] | Transport
    ) -> list[str]:
        loaded = super()._load(named)
        self._send_bucket()
        return loaded

    def _store(self, item: Incoming) -> None:
        """Copies one tensor into the bucket, in the dtype that the ranks have."""
        if item.target in self._sent:
            super()._store(item)  # compares the two
            return
        room = _room(item.destination)
        if self._used + room > self._bucket_bytes:
            self._send_bucket()
        self._bucket.reserve(self._bucket_bytes)
        shape, dtype = tuple(item.destination.shape), item.destination.dtype
        super()._store(replace(item, destination=self._bucket.view(self._used, shape, dtype)))
        self._packed.append(BucketTensor(item.target, dtype_name(dtype), shape, self._used))
        self._used += room

    def _send_bucket(self) -> None:
        """Has every rank load what lies in the bucket."""
        if self._packed:
            packed, self._packed, self._used = self._packed, [], 0
            self._ask_all("load", lambda number: LoadBucket(number, self._bucket.num_bytes, packed), type(None))

    def _receive(self, transport: Transport) -> list[str]:
        """Has every rank read the transport by itself; one that is memory of this process is sent from here."""
        if isinstance(transport, InProcess):
            return super()._receive(transport)
        try:
            payload = pickle_for_workers(transport, f"the transport {type(transport).__name__}")
            self._written = True
            patience, self._give_up_seconds = self._give_up_seconds, _GIVE_UP_TRANSPORT_SECONDS
            first, *others = self._ask_all("load", lambda number: LoadTransport(number, payload), Arrived)
            self._give_up_seconds = patience  # nobody waits for a sender any more
        finally:
            transport.close()
        for rank, other in enumerate(others, start=1):
            if other.fingerprints != first.fingerprints:
                names = [name for name, value in first.fingerprints.items() if other.fingerprints.get(name) != value]
                raise FingerprintMismatchError(f"rank {rank} got other tensors than rank 0, e.g. {names[:3]}")
        self._sent |= {name: _Sent(name, value) for name, value in first.fingerprints.items()}
        self.bytes_copied += first.num_bytes
        return first.names

    def post_process(self) -> None:
        """Ends the loading: every parameter must be covered. Lets the ranks rebuild what they derive from them."""
        with _Step(self, "post_process"):
            self._send_bucket()  # something is left where a load failed, and the user went on
            self._check_covered()
            self._ask_step("post_process", type(None))

    def verify(self) -> None:
        """Has every rank fingerprint its memory, and compares with what was sent and with one another."""
        with _Step(self, "verify"):
            receipts = self._ask_step("verify", Receipt)
            for rank, receipt in enumerate(receipts):
                wrong = [name for name, value in self.fingerprints.items() if receipt.tensors[name] != value]
                if wrong:
                    raise FingerprintMismatchError(f"the memory of rank {rank} is not what was sent: {wrong[:3]}")
                if receipt.id != receipts[0].id:
                    raise FingerprintMismatchError(
                        f"rank {rank} would not hold what rank 0 holds: receipt {receipt.id}, not {receipts[0].id}"
                    )
            self._receipt = receipts[0]

    def invalidate(self) -> None:
        """Gives all ranks their new version, so that no older KV can be hit."""
        with _Step(self, "invalidate"):
            self._ask_step("invalidate", type(None))

    def resume(self) -> None:
        """Lets all ranks serve again."""
        with _Step(self, "resume"):
            self._ask_step("resume", type(None))
        self.outcome = Outcome.SUCCEEDED
        self._receipt = self.verified_receipt.timed(self.phase_seconds)
        self._bucket.empty()
        self._engines.go_on(self._receipt)

    def give_up(self, error: BaseException) -> None:
        """Ends the update because of `error`; no-op once it has ended. See `PolicyUpdate.give_up`."""
        if self.phase in (Phase.RESUMED, Phase.FAILED):
            return
        at, self.phase = self.phase, Phase.FAILED
        self._packed, self._used = [], 0
        self._bucket.empty()
        if at is Phase.OPEN:  # pause has put back what it did
            self.outcome = Outcome.UNCHANGED
            return
        self.outcome = self._tell_to_give_up(error, at)

    def _tell_to_give_up(self, error: BaseException, at: Phase = Phase.OPEN) -> Outcome:
        """Has all ranks give up, and makes sure that they agree on what they hold."""
        what = f"policy update to {self.version}"
        reason = f"the policy update to version {self.version} failed when {at.value}: {type(error).__name__}: {error}"
        try:
            outcomes = set(self._insist(lambda number: GiveUp(number, reason), Outcome))
            if not outcomes <= {Outcome.UNCHANGED, Outcome.ROLLED_BACK}:
                self._insist(lambda number: Call(number, "mark_unusable", [reason]), type(None))
                error.add_note(f"{what} failed half-way; no rank generates until an update succeeds on all of them")
                return Outcome.UNUSABLE
        except (WorkerDiedError, EngineClosedError) as failure:
            self._engines.tell_living(GiveUp(-1, reason))
            error.add_note(f"{what} failed half-way, and so did giving it up on all ranks: {failure}")
            return Outcome.UNUSABLE
        finally:
            self._engines.go_on(None)
        if Outcome.ROLLED_BACK in outcomes:
            error.add_note(f"{what} rolled back on all ranks; the old policy stays, verified")
            return Outcome.ROLLED_BACK
        error.add_note(f"{what} given up; nothing was written on any rank, what they held before stays")
        return Outcome.UNCHANGED

    def _ask_step(self, step: _RemoteStep, kind: type[T]) -> list[T]:
        return self._ask_all(step, lambda number: UpdateStep(number, step), kind)

    def _ask_all(self, step: str, command: Callable[[int], Numbered], kind: type[T]) -> list[T]:
        """Asks every rank, for as long as the update may last. Raises `PolicyUpdateTimeoutError` naming those that have
        not answered by then: what they answer later is dropped."""
        left = None
        if self._timeout is not None:
            least = _GIVE_UP_SECONDS if step == "resume" else 1e-3  # the new version is in force by then
            left = max(least, self._started + self._timeout - time.perf_counter())
        try:
            return self._engines.ask_all(command, kind, left)
        except NoAnswerError as error:
            missing = f"no answer from rank {', '.join(map(str, error.ranks))}"
            raise PolicyUpdateTimeoutError(self._passed(step, missing)) from error
        except LockTimeoutError as error:
            raise PolicyUpdateTimeoutError(self._passed(step, str(error))) from error

    def _passed(self, step: str, why: str) -> str:
        return f"the policy update passed its limit of {self._timeout} s at {step}: {why}"

    def _insist(self, command: Callable[[int], Numbered], kind: type[T]) -> list[T]:
        """Asks every rank. If the update has a limit, one that does not answer here either is killed: nobody could say
        which policy it holds. Raises `WorkerDiedError` then."""
        limit = None if self._timeout is None else max(self._timeout, self._give_up_seconds)
        while True:
            try:
                return self._engines.ask_all(command, kind, limit)
            except (NoAnswerError, LockTimeoutError) as error:
                ranks = error.ranks if isinstance(error, NoAnswerError) else ()
                why = f"it did not answer when a policy update had to be given up, for {limit} s"
                self._engines.kill_silent(ranks, why)


def _room(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in the bucket."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
