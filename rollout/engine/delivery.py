"""Who waits for what the engine samples: groups of requests, and the loop that runs the engine for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rollout.engine.collect import Group
from rollout.engine.core import Update
from rollout.engine.interface import Engine


class Delivery:
    """The groups in flight. Whoever waits for one of them steps the engine for all; nobody steps one that is held.

    Callers hold the engine's lock, except of `wait`.
    """

    def __init__(self, engine: Engine) -> None:
        self.groups: dict[str, Group] = {}
        self._engine = engine
        self._abandoned: list[Group] = []
        engine.deliver = self.deliver

    def step(self) -> None:
        """One step of the engine, delivered."""
        if self._abandoned:
            abandoned, self._abandoned = self._abandoned, []
            self._forget(abandoned)
        self.deliver(self._engine.step())

    def deliver(self, updates: Iterable[Update]) -> None:
        """Hands updates to their groups, each exactly once, whatever the tokenizer makes of one of them."""
        updates = iter(updates)
        for request, token_ids in updates:
            group = self.groups[request.group_id]
            delivered = False
            try:
                if token_ids or request.beam_result is not None:
                    group.note_receipt(self._engine.receipt)
                stop = group.append(request, token_ids)
                if stop is not None:
                    self._engine.finish(request, stop, group.texts[request.request_id].num_tokens)
                delivered = True
            finally:
                if request.is_finished:
                    group.num_unfinished -= 1
                if not delivered:
                    self.deliver(updates)

    def wait(self, groups: Sequence[Group], on_progress: Callable[[int], object]) -> None:
        """Runs the engine until `groups` are finished, and waits while it is held (a policy update that keeps requests,
        sleep). `on_progress` gets the number of samples that have ended since its last call. An interruption aborts
        the groups, and nothing else."""
        remaining = _num_unfinished(groups)
        try:
            while remaining:
                with self._engine.lock:
                    if _num_unfinished(groups) and not self._engine.is_held:
                        self.step()
                now = _num_unfinished(groups)
                on_progress(remaining - now)
                remaining = now
                self._engine.wait_while_held(lambda: not _num_unfinished(groups))
        finally:
            self.release(groups)

    def engine_ids(self, request_ids: Iterable[str]) -> list[str]:
        """The ids by which the engine knows requests that outputs name.

        A resumed output keeps its id, and its samples run in a group with another. That id may be of another engine,
        and a request of this one may have it too: it then means the latter alone.
        """
        resumed: dict[str, list[str]] = {}
        for group in self.groups.values():
            if group.resumes is not None:
                resumed.setdefault(group.resumes.request_id, []).append(group.group_id)
        found: list[str] = []
        for request_id in request_ids:
            own = self.groups.get(request_id)
            if own is not None and own.resumes is None:
                found.append(request_id)
            elif request_id in resumed:
                found += resumed[request_id]
            elif own is None:
                found.append(request_id)  # a single sample's, or nobody's
        return found

    def release(self, groups: Sequence[Group]) -> None:
        """Nobody waits for `groups` any more: those that are unfinished are aborted. Takes the lock by itself.

        Where this thread has it already (the garbage collector closes a stream in the midst of a step), the next step
        does so.
        """
        if self._engine.lock.is_mine:
            self._abandoned += groups
            return
        with self._engine.lock:
            self._forget(groups)

    def _forget(self, groups: Sequence[Group]) -> None:
        left = [group.group_id for group in groups if group.num_unfinished]
        if left:
            self._engine.abort(left)
            self._engine.flush()
        for group in groups:
            self.groups.pop(group.group_id, None)


def _num_unfinished(groups: Sequence[Group]) -> int:
    return sum(group.num_unfinished for group in groups)
