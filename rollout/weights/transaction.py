"""A policy update as one transaction.

    with rollout.policy_update(version=7) as update:    pause ─► wake
        update.load(policy.named_parameters())          load (any number of times, any order, any split)
    print(update.receipt)                               post_process ─► verify ─► invalidate ─► resume

It ends in one of four ways (`Outcome`): the engine holds the new policy, whole, and there is a receipt; nothing was
written and the engine goes on with the old policy; what was written was taken back (`roll_back=True`) and it goes on
likewise; or the engine refuses to generate until a complete update succeeds. It never serves a mixture.
"""

from __future__ import annotations

import enum
import time
from collections.abc import ItemsView, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from rollout.errors import (
    DuplicateTensorError,
    FingerprintMismatchError,
    IllegalPhaseError,
    PolicyUpdateTimeoutError,
    PolicyVersionError,
    RollBackError,
    RolloutError,
    TensorKindError,
    TiedTensorError,
    TransportError,
    UncoveredParametersError,
)
from rollout.weights.adapter_update import AdapterSource, AdapterUpdate
from rollout.weights.guard import SharedWeightsGuard
from rollout.weights.incoming import Incoming, check_layout, match
from rollout.weights.names import is_drafters
from rollout.weights.receipt import (
    Receipt,
    changed_tensors,
    fingerprint_of,
    fingerprint_tensors,
    make_receipt,
    verify_receipt,
)
from rollout.weights.target import IN_FLIGHT_MODES, InFlightMode, UpdateTarget
from rollout.weights.trainer_tensors import PolicyTensors, policy_tensors
from rollout.weights.transport import HeldPolicy, NamedTensor, Transport
from rollout.weights.undo import UndoLog
from rollout_kernels import copy_and_fingerprint

if TYPE_CHECKING:
    from peft import LoraConfig


class Phase(enum.StrEnum):
    """How far an update has come: the last step that succeeded."""

    OPEN = "open"
    PAUSED = "paused"
    AWAKE = "awake"
    LOADED = "loaded"
    POST_PROCESSED = "post-processed"
    VERIFIED = "verified"
    INVALIDATED = "invalidated"
    RESUMED = "resumed"
    FAILED = "failed"


class Outcome(enum.StrEnum):
    """How an update has ended, and what the engine holds since."""

    SUCCEEDED = "succeeded"  # the new policy
    UNCHANGED = "unchanged"  # what it held before: nothing was written
    ROLLED_BACK = "rolled back"  # the old policy: what was written was taken back and verified
    UNUSABLE = "unusable"  # a mixture, or nothing that was verified


# phase -> legal steps; each step leads to the phase beside it
_STEPS: dict[Phase, dict[str, Phase]] = {
    Phase.OPEN: {"pause": Phase.PAUSED},
    Phase.PAUSED: {"wake": Phase.AWAKE},
    Phase.AWAKE: {"load": Phase.LOADED},
    Phase.LOADED: {"load": Phase.LOADED, "post_process": Phase.POST_PROCESSED},
    Phase.POST_PROCESSED: {"verify": Phase.VERIFIED},
    Phase.VERIFIED: {"invalidate": Phase.INVALIDATED},
    Phase.INVALIDATED: {"resume": Phase.RESUMED},
    Phase.RESUMED: {},
    Phase.FAILED: {},
}


class _Sent(NamedTuple):
    """What the trainer sent for one engine tensor: under which name, and its fingerprint (None: shared memory)."""

    name: str
    fingerprint: int | None


@dataclass(slots=True)
class _Step:
    """One step as a context: checks that it is legal and in time, and moves the phase on when it succeeds."""

    update: PolicyUpdate
    name: str
    started: float = 0.0

    def __enter__(self) -> None:
        self.update._require(self.name)
        if self.name != "resume":  # the new version is in force already: too late to give up
            self.update._check_time(self.name)
        self.started = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = self.update.phase_seconds
        seconds[self.name] = seconds.get(self.name, 0.0) + time.perf_counter() - self.started
        if kind is None:
            self.update.phase = _STEPS[self.update.phase][self.name]


class PolicyUpdate:
    """One policy update of `engine` to `version` (default: the engine's next). A context manager, used once.

    `in_flight` says what becomes of unfinished requests: "abort" returns what they have; "wait" runs them to their end
    first; "keep" lets them go on afterwards with the KV that they have, sampling from the new policy; "recompute" lets
    them go on after computing their KV anew under the new policy. `timeout` limits the whole update, in seconds.

    After the block, `receipt` holds the proof. An error in the block, or of any phase, is raised after the engine has
    been put back or marked unusable; a note of the error, and `outcome`, say which. With `roll_back` what is
    overwritten is kept in host memory until the update has succeeded, so that the old policy can be put back whatever
    happens; not where the trainer shares the engine's memory, which raises `RollBackError`.
    """

    def __init__(
        self,
        engine: UpdateTarget,
        version: int | None = None,
        in_flight: InFlightMode = "abort",
        timeout: float | None = None,
        roll_back: bool = False,
    ) -> None:
        if in_flight not in IN_FLIGHT_MODES:
            raise ValueError(f"in_flight={in_flight!r} is not valid: it must be one of {', '.join(IN_FLIGHT_MODES)}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout!r} is not valid: it must be above 0 seconds, or None")
        self.version = _next_version(version, engine.policy_version)
        self._asked_version = version
        self.phase = Phase.OPEN
        self.phase_seconds: dict[str, float] = {}
        self.bytes_copied = 0
        self.bytes_shared = 0
        self.outcome: Outcome | None = None
        self._engine = engine
        self._in_flight: InFlightMode = in_flight
        self._timeout = timeout
        self._roll_back = roll_back
        self._undo: UndoLog | None = None
        self._before: Receipt | None = None
        self._started = time.perf_counter()
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._tied: Mapping[str, str] = {}
        self._storages: frozenset[int] = frozenset()
        self._orphans: frozenset[str] = frozenset()
        self._sent: dict[str, _Sent] = {}
        self._shared: dict[str, torch.Tensor] = {}
        self._written = False
        self._adapters = AdapterUpdate(engine.adapters())
        self._unchanged: dict[str, int] = {}  # fingerprints of the parameters that the update leaves as they are
        self._receipt: Receipt | None = None

    @property
    def receipt(self) -> Receipt:
        """The receipt, once the update has succeeded."""
        if self._receipt is None or self.phase is not Phase.RESUMED:
            raise IllegalPhaseError(f"there is no receipt: the update to policy {self.version} is {self.phase.value}")
        return self._receipt

    @property
    def fingerprints(self) -> dict[str, int]:
        """Of every tensor that was copied so far, by the engine's name of it."""
        return {name: sent.fingerprint for name, sent in self._sent.items() if sent.fingerprint is not None}

    @property
    def verified_receipt(self) -> Receipt:
        """What `verify` found; not yet in force."""
        assert self._receipt is not None, "verify() comes first"
        return self._receipt

    def __enter__(self) -> PolicyUpdate:
        try:
            self.pause()
            self.wake()
        except BaseException as error:
            self.give_up(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.give_up(error)
            return
        try:
            self.commit()
        except BaseException as failure:
            self.give_up(failure)
            raise

    def pause(self) -> None:
        """Stops the engine, once requests in flight are where the mode wants them."""
        with _Step(self, "pause"):
            self._started = time.perf_counter()
            self._engine.pause(self._in_flight, self._timeout)
            try:  # another update may have ended since this one was made
                self.version = _next_version(self._asked_version, self._engine.policy_version)
            except PolicyVersionError:
                self._engine.cancel()
                raise

    def count_from(self, seconds: float) -> None:
        """Counts seconds that had passed elsewhere before `pause` towards the limit."""
        self._started -= seconds

    def wake(self) -> None:
        """Makes the weights' memory writable and learns the engine's tensors."""
        with _Step(self, "wake"):
            self._engine.wake_weights()
            self._parameters = dict(self._engine.parameters())
            self._tied = dict(self._engine.tied())
            self._storages = frozenset(t.untyped_storage().data_ptr() for t in self._parameters.values())
            self._orphans = self._engine.orphans()
            self._before = self._engine.receipt
            if self._roll_back and self._engine.holds_policy:
                self._undo = self._engine.undo_log()

    def load(
        self, named: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[NamedTensor] | Transport
    ) -> list[str]:
        """Takes tensors over and returns their Hugging Face names; may be called often, with any split and order.

        A model stands for `policy_tensors(model)`: wrapped, sharded and with adapters, as the trainer has it. Its names
        and shapes are checked before anything is gathered, and a rank that fails goes on gathering for the others.
        A generator is consumed lazily and each tensor is copied before the next is asked for, so it may overwrite
        its tensors and never holds more than one. A mapping, list or tuple is checked wholly before the first byte is
        written. A tensor that is the engine's own memory is covered without a copy. A transport is read to its end and
        closed; what arrived must have the fingerprints that its sending side computed.
        """
        with _Step(self, "load"):
            return self._load(named)

    def _load(
        self, named: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[NamedTensor] | Transport
    ) -> list[str]:
        if isinstance(named, Transport):
            return self._receive(named)
        pairs = _pairs(named)
        if isinstance(pairs, PolicyTensors):
            with closing(pairs):
                check_layout(pairs.shapes, self._parameters, self._tied)
                return self._store_all(pairs)
        if isinstance(pairs, tuple):
            self._check_all(pairs)
        return self._store_all(pairs)

    def _store_all(self, pairs: Iterable[NamedTensor]) -> list[str]:
        """Copies one tensor after the other into the engine."""
        loaded = []
        for item in filter(None, map(self._match, pairs)):
            self._store(item)
            loaded.append(item.name)
        return loaded

    def load_adapter(
        self,
        name: str,
        source: AdapterSource,
        config: LoraConfig | Mapping[str, Any] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[str]:
        """Puts a LoRA adapter in the place of the one called `name`, or beside the others. Returns its layers' names.

        `source` is a PEFT model (and `adapter` which of its adapters, by default the active one), the folder of one, or
        names and tensors as PEFT has them with their `config`. It is checked and copied here, and written when the
        loading ends. An update that loads adapters alone leaves the weights as they are: they must be those of the last
        receipt. Afterwards requests name the adapter: `generate(..., lora_request=name)`.
        """
        with _Step(self, "load"):
            return self._adapters.stage(name, source, config, adapter)

    def _receive(self, transport: Transport) -> list[str]:
        """Loads what a transport brings, one tensor after the other."""
        loaded: list[str] = []
        arrived: dict[str, int] = {}
        tied = {name: self._parameters[target] for name, target in self._tied.items()}
        try:
            held = HeldPolicy(self._engine.policy_version, {**self._parameters, **tied}, self._seconds_left())
            transport.prepare(self.version, held)
            for name, tensor in transport.tensors():
                item = self._match((name, tensor))
                if item is not None:
                    self._store(item)
                    loaded.append(item.name)
                arrived[name] = self._arrived_fingerprint(item, tensor)
            told = transport.sent_fingerprints()
        except TransportError:
            self._check_time("a transport that was silent or slow")
            raise
        finally:
            transport.close()
        wrong = [name for name in told.keys() | arrived.keys() if told and told.get(name) != arrived.get(name)]
        if wrong:
            raise FingerprintMismatchError(f"what arrived is not what the trainer sent: {_some(sorted(wrong))}")
        return loaded

    def _arrived_fingerprint(self, item: Incoming | None, tensor: torch.Tensor) -> int:
        """Of the bytes as they came; known from the copy where the engine's dtype is the same."""
        stored = self._sent[item.target].fingerprint if item is not None else None
        if item is None or stored is None or tensor.dtype != item.destination.dtype:
            return fingerprint_of(tensor)
        return stored

    def post_process(self) -> None:
        """Ends the loading: every parameter must be covered, of the model, of its drafter, or of both; or only adapters
        loaded. Lets the engine rebuild what it derives from them."""
        with _Step(self, "post_process"):
            if not self._adapters.is_staged or self._sent:
                self._check_covered()
            self._unchanged = self._check_unchanged()
            self._engine.post_process()
            self.bytes_copied += self._adapters.write()

    def verify(self) -> None:
        """Fingerprints the engine's memory and compares it with what was sent."""
        with _Step(self, "verify"):
            sent = {name: tensor for name, tensor in self._parameters.items() if name not in self._unchanged}
            fingerprints = self._unchanged | fingerprint_tensors(sent)
            self._adapters.verify()
            adapters = self._engine.adapters()
            wrong = [name for name, value in self.fingerprints.items() if value != fingerprints[name]]
            if wrong:
                raise FingerprintMismatchError(f"the engine's memory is not what was sent: {_some(wrong)}")
            stale = self._engine.stale_copies()
            if stale:
                raise FingerprintMismatchError(f"copies of parameters are not made of what was sent: {_some(stale)}")
            self._receipt = make_receipt(
                self.version,
                self._parameters,
                self._tied,
                self._engine.buffers(),
                fingerprints,
                copies=self._engine.copies(),
                adapters={} if adapters is None else adapters.tensors(),
                bytes_copied=self.bytes_copied,
                bytes_shared=self.bytes_shared,
            )
            self._check_buffers(self._receipt)

    def invalidate(self) -> None:
        """Gives the engine its new version, so that no older KV can be hit."""
        with _Step(self, "invalidate"):
            self._engine.invalidate(self.version)

    def resume(self) -> None:
        """Hands the receipt to the engine, which serves again."""
        with _Step(self, "resume"):
            assert self._receipt is not None
            self._receipt = self._receipt.timed(self.phase_seconds)
            self._engine.resume(self._receipt, SharedWeightsGuard(self._shared))
        self.outcome = Outcome.SUCCEEDED
        self._close_undo()

    def commit(self) -> None:
        """Every step that is left, from the coverage check to serving again. Leaving the block calls it."""
        if self.phase is Phase.AWAKE:  # no load succeeded: says what is missing
            self._check_covered()
            self._require("post_process")
        for step in (self.post_process, self.verify, self.invalidate, self.resume):
            if step.__name__ in _STEPS[self.phase]:
                step()

    def _require(self, step: str) -> None:
        legal = _STEPS[self.phase]
        if step not in legal:
            steps = " or ".join(f"{name}()" for name in legal) or "none: open a new policy_update"
            raise IllegalPhaseError(
                f"{step}() is not legal while the policy update is {self.phase.value}; legal next steps: {steps}"
            )

    def _check_time(self, what: str) -> None:
        if self._timeout is not None and self.phase is not Phase.OPEN:
            seconds = time.perf_counter() - self._started
            if seconds > self._timeout:
                raise PolicyUpdateTimeoutError(f"the policy update passed its limit of {self._timeout} s at {what}")

    def _seconds_left(self) -> float | None:
        """Of the update's time limit, at least a moment; None where there is no limit."""
        if self._timeout is None:
            return None
        return max(1e-3, self._started + self._timeout - time.perf_counter())

    def _match(self, named: NamedTensor) -> Incoming | None:
        name, source = _named_tensor(named)
        self._check_time(name)
        item = match(name, source, self._parameters, self._tied, self._storages)
        if item is not None and item.is_shared and item.target in self._orphans and item.target not in self._sent:
            raise UncoveredParametersError(
                f"{item.name} was sent as the engine's own memory, which holds no policy: it was given back by "
                "sleep(level=2), or an update that failed has written to it, and torch has seen no change in place "
                "since. Send it from other memory, copy it in with copy_ first, or use reload_weights()",
                (item.target,),
            )
        if self._roll_back and item is not None and item.is_shared:
            raise RollBackError(
                f"roll_back=True cannot keep the old value of {item.name}: it lies in memory that the trainer shares "
                "with the engine, and has changed already. Use roll_back=False"
            )
        return item

    def _check_all(self, named: tuple[NamedTensor, ...]) -> None:
        """Raises for anything wrong in tensors that are all there, without writing."""
        first: dict[str, Incoming] = {}
        for item in filter(None, map(self._match, named)):
            twin = first.setdefault(item.target, item)
            if twin is not item and not twin.same_source(item):
                self._check_equal(item, twin.name, fingerprint_of(twin.cast()))
            if item.target in self._sent and not item.is_shared:
                self._check_repeated(item, item.cast())

    def _store(self, item: Incoming) -> None:
        """Copies one tensor into the engine, unless it is there already."""
        size = item.destination.nbytes
        if item.is_shared:
            self._shared.setdefault(item.target, item.source.detach())
            if item.target not in self._sent:
                self._sent[item.target] = _Sent(item.name, None)
                self.bytes_shared += size
            return
        if item.target in self._sent:
            self._check_repeated(item, item.cast())
            return
        if self._undo is not None:
            self._undo.save(item.target)
        self._written = True
        self._sent[item.target] = _Sent(item.name, copy_and_fingerprint(item.destination, item.source))
        self.bytes_copied += size

    def _check_repeated(self, item: Incoming, cast: torch.Tensor) -> None:
        before = self._sent[item.target]
        expected = before.fingerprint if before.fingerprint is not None else fingerprint_of(item.destination)
        self._check_equal(item, before.name, expected, cast)

    def _check_equal(self, item: Incoming, name: str, expected: int, cast: torch.Tensor | None = None) -> None:
        """The tensor must equal what was sent as `name` for the same tensor of the engine."""
        if fingerprint_of(item.cast() if cast is None else cast) == expected:
            return
        if item.name != name:
            raise TiedTensorError(
                f"{item.name} and {name} are tied in the engine's model (one tensor), but they were sent with "
                "different values: untie them in the model's configuration (tie_word_embeddings=false) or send one"
            )
        raise DuplicateTensorError(f"{item.name} was sent twice in one policy update, with different values")

    def _check_covered(self) -> None:
        """Of the model, and of its drafter, all parameters must have been loaded or none; of one of them all."""
        touched = {is_drafters(name) for name in self._sent} or {False}
        wanted = [name for name in self._parameters if is_drafters(name) in touched]
        missing = tuple(name for name in wanted if name not in self._sent)
        if missing or not self._sent:
            raise UncoveredParametersError(
                f"{len(self._sent)} of {len(wanted)} parameters were loaded; missing: {_some(missing)}",
                missing,
            )

    def _check_unchanged(self) -> dict[str, int]:
        """What the update does not bring must be as the last receipt has it. Returns its fingerprints."""
        before = self._before
        kept = {name: tensor for name, tensor in self._parameters.items() if name not in self._sent}
        fingerprints = fingerprint_tensors(kept)
        known = {} if before is None else before.tensors
        wrong = tuple(name for name, value in fingerprints.items() if known.get(name) != value)
        if wrong:
            what = "only adapters were loaded" if not self._sent else "no parameter of the drafter was loaded"
            what = "only the drafter was loaded" if all(map(is_drafters, self._sent)) and self._sent else what
            raise UncoveredParametersError(
                f"{what}, and {len(wrong)} of {len(fingerprints)} parameters are not those of the last receipt: load "
                f"every parameter in the same update; these differ: {_some(wrong)}",
                wrong,
            )
        return fingerprints

    def _check_buffers(self, receipt: Receipt) -> None:
        """Buffers follow from the configuration alone, so an update never changes them."""
        before = self._before
        if before is not None and before.buffers != receipt.buffers:
            names = sorted(before.buffers.keys() | receipt.buffers.keys())
            wrong = [name for name in names if before.buffers.get(name) != receipt.buffers.get(name)]
            raise FingerprintMismatchError(f"buffers are not as they were before the update: {_some(wrong)}")

    def give_up(self, error: BaseException) -> None:
        """Ends the update because of `error`, raised in its block or elsewhere (on another rank); no-op once it ended.

        Puts the engine back, or marks it unusable. A note of the error, and `outcome`, say which.
        """
        if self.phase in (Phase.RESUMED, Phase.FAILED):
            return
        at, self.phase = self.phase, Phase.FAILED
        self.outcome = Outcome.UNCHANGED
        if at is Phase.OPEN:  # pause itself failed, and left the engine as it was
            return
        self._adapters.restore()
        if self._old_policy_is_whole():
            if self._before is not None and "invalidate" in self.phase_seconds:
                self._engine.restore(self._before)
            else:
                self._engine.cancel()
            self._close_undo()
            error.add_note(f"policy update to {self.version} given up; nothing was written, {self._what_stays()}")
            return
        self.outcome = Outcome.UNUSABLE
        reason = f"the policy update to version {self.version} failed when {at.value}: {type(error).__name__}: {error}"
        try:
            problem = self._take_back()
            if problem is None:
                self.outcome = Outcome.ROLLED_BACK
                error.add_note(f"policy update to {self.version} rolled back; the old policy stays, verified")
                return
            reason += problem
        finally:  # also where the roll-back is interrupted
            if self.outcome is Outcome.UNUSABLE:
                copied = {name for name, sent in self._sent.items() if sent.fingerprint is not None}
                self._engine.mark_unusable(reason, copied)
            self._close_undo()
        error.add_note(
            f"policy update to {self.version} failed half-way{problem}; the engine refuses until one succeeds"
        )

    def _what_stays(self) -> str:
        return "the old policy stays" if self._engine.holds_policy else "the engine holds no policy, as before"

    def _take_back(self) -> str | None:
        """Writes the old policy back and verifies it; a clause that says why it could not, or None."""
        before = self._before
        if not self._roll_back:
            return ""
        if self._undo is None or before is None:
            return "; there was no policy to roll back to"
        try:
            self._undo.restore()
            if "post_process" in self.phase_seconds and self._engine.copies():
                self._engine.post_process()
            manager = self._engine.adapters()
            adapters = {} if manager is None else manager.tensors()
            verify_receipt(
                before, self._parameters, self._tied, self._engine.buffers(), self._engine.copies(), adapters
            )
            stale = self._engine.stale_copies()
            if stale:
                raise RollBackError(f"copies of parameters are not those of the old policy: {_some(stale)}")
            self._engine.restore(before)
        except (RolloutError, RuntimeError, ValueError, OSError, MemoryError) as failure:
            return f"; the roll-back failed too: {type(failure).__name__}: {failure}"
        return None

    def _close_undo(self) -> None:
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def _old_policy_is_whole(self) -> bool:
        """Nothing was copied, and memory that the trainer shares still has what the last receipt says."""
        if self._written:
            return False
        before = self._before
        if not self._shared or before is None:
            return True
        tensors = {name: self._parameters[name] for name in self._shared}
        changed = set(changed_tensors(before, tensors, {}, {}))
        return changed.isdisjoint(tensors)


def _next_version(version: int | None, current: int) -> int:
    if version is None:
        return current + 1
    if isinstance(version, bool) or not isinstance(version, int) or version <= current:
        raise PolicyVersionError(
            f"version={version!r} is not valid: it must be an integer above the engine's policy version {current}"
        )
    return version


def _named_tensor(pair: NamedTensor) -> NamedTensor:
    """The pair, where it is one. Raises `TensorKindError` naming what it is instead."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        raise TensorKindError(f"{pair!r:.200} is not a pair of a name and a tensor")
    return pair[0], pair[1]


def _pairs(named: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[NamedTensor]) -> Iterable[NamedTensor]:
    """The pairs as a tuple where all of them are there already, else as they come."""
    if isinstance(named, torch.nn.Module):
        return policy_tensors(named)
    if isinstance(named, (str, bytes)) or not isinstance(named, Iterable):
        raise TensorKindError(
            f"load() got {named!r:.200}: it takes a module, a mapping or pairs of names and tensors, or a Transport"
        )
    pairs = cast(Iterable[NamedTensor], named.items() if isinstance(named, Mapping) else named)
    return tuple(pairs) if isinstance(pairs, (list, tuple, ItemsView)) else pairs


def _some(names: Iterable[str], shown: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
