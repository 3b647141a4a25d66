"""The beams of searches as requests: each computes and draws like any other, and forks where its search goes on twice.

A search has as many requests as it may have beams, made when it is added; the first is the one that was asked for. A
beam that has its candidates is parked until all beams of its search have theirs: it holds its KV and no seat. Then the
first child of each parent goes on in its parent's request, further ones fork from it into requests that are free, and
requests without a child give their blocks back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rollout.core.beam import BeamResult, BeamSearch
from rollout.core.planner import Planner
from rollout.core.schedule import StepResult
from rollout.core.stop import NOT_A_TOKEN
from rollout.request import FinishReason, Request, RequestStatus


@dataclass(slots=True, eq=False)
class _Group:
    """A search and the requests of its places."""

    search: BeamSearch
    requests: list[Request]
    has_failed: bool = False  # a beam's logits were not numbers
    saved_sum: float = 0.0  # shares of blocks that were saved, added up
    num_measured: int = 0

    @property
    def root(self) -> Request:
        return self.requests[0]

    def live(self) -> Iterator[Request]:
        return (self.requests[beam.place] for beam in self.search.beams)


class BeamGroups:
    """All unfinished searches of a scheduler, over its planner's queues and KV."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._groups: dict[str, _Group] = {}  # by the root's id
        self._place: dict[str, tuple[_Group, int]] = {}  # request id -> its search and place
        self.num_tokens = 0  # of all beams, since start

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_further(self) -> int:
        """Requests of searches besides their roots."""
        return len(self._place) - len(self._groups)

    def begun(self) -> list[Request]:
        """The roots of searches that depend on what the present policy has computed."""
        return [group.root for group in self._groups.values() if group.search.has_begun]

    def add(self, root: Request, ranks: Iterable[tuple[int, int, int]]) -> None:
        """Makes the further requests of a search, with these ranks. None of them is queued."""
        options = root.beam_options
        assert options is not None
        assert not root.siblings, "a beam search has no samples"
        search = BeamSearch(options, root.prompt_token_ids, root.max_tokens, root.eos_token_ids | root.stop_token_ids)
        further = [_further(root, place, rank) for place, rank in zip(range(1, options.width), ranks, strict=True)]
        group = self._groups[root.request_id] = _Group(search, [root, *further])
        for place, request in enumerate(group.requests):
            self._place[request.request_id] = (group, place)

    def take(self, request: Request, result: StepResult, draw: int) -> None:
        """Parks a running beam with the candidates that draw number `draw` of a step has found for it."""
        group, place = self._place[request.request_id]
        if result.token_ids[draw] == NOT_A_TOKEN:
            group.has_failed = True
            return
        top = result.top_logprobs[draw]
        group.search.take(place, top.token_ids[0].tolist(), _scored(request, result, draw).tolist())
        self.num_tokens += 1
        request.status = RequestStatus.PARKED
        self._planner.parked.add(request)

    def settle(self) -> list[tuple[Request, FinishReason]]:
        """Lets every search go on whose beams all have their candidates; returns the roots of those that are over.

        The running queue holds running requests only.
        """
        over: list[tuple[Request, FinishReason]] = []
        for group in self._groups.values():
            if group.has_failed:
                over.append((group.root, FinishReason.ERROR))
            elif group.search.is_ready:
                self._measure(group)
                if group.search.advance():
                    self._go_on(group)
                else:
                    over.append((group.root, FinishReason(group.search.finished[0].finish_reason)))
        return over

    def _measure(self, group: _Group) -> None:
        """Every beam has written its last token, so that nobody has a block that it still has to copy."""
        tables = [self._planner.kv.block_ids(request) for request in group.live() if request.num_computed_tokens]
        if len(tables) > 1:
            num_distinct = len(set().union(*tables))
            group.saved_sum += 1 - num_distinct / sum(map(len, tables))
            group.num_measured += 1

    def _go_on(self, group: _Group) -> None:
        """Brings the requests to where the search's beams are."""
        planner, requests, beams = self._planner, group.requests, group.search.beams
        num_computed = [request.num_computed_tokens for request in requests]  # 0 where the KV was taken meanwhile
        kept = {beam.place for beam in beams if beam.place == beam.parent}
        for place, request in enumerate(requests):
            if place not in kept:
                self._withdraw(request)
                planner.kv.forget(request)
                request.status = RequestStatus.WAITING
        num_seats = planner.config.max_num_seqs - len(planner.running)
        for beam in beams:
            request, parent = requests[beam.place], requests[beam.parent]
            request.token_ids = beam.token_ids
            request.adapter_key = group.root.adapter_key
            if num_computed[beam.parent] and num_seats > 0:
                if request is parent:
                    planner.parked.discard(request)
                else:
                    planner.kv.fork(parent, request)
                    request.num_computed_tokens = parent.num_computed_tokens
                planner.start_running(request)
                num_seats -= 1
            else:
                self._withdraw(request)
                request.status = RequestStatus.PREEMPTED
                planner.waiting.add(request)

    def _withdraw(self, request: Request) -> None:
        """Takes a request out of its queue and gives its KV back."""
        planner = self._planner
        queues = {RequestStatus.RUNNING: planner.running, RequestStatus.PARKED: planner.parked}
        queues.get(request.status, planner.waiting).discard(request)
        planner.kv.release(request)
        request.num_computed_tokens = 0

    def close(self, root: Request, reason: FinishReason) -> None:
        """Ends a search: the root gets its result, and all requests of the search leave their queues and blocks."""
        group = self._groups.pop(root.request_id)
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            group.search.give_up(str(reason))
        root.beam_result = BeamResult(group.search.finished, group.saved_sum / max(1, group.num_measured))
        for request in group.requests:
            self._withdraw(request)
            del self._place[request.request_id]
            if request is not root:
                self._planner.kv.forget(request)
                request.status = RequestStatus.FINISHED

    def forget_kv(self) -> list[Request]:
        """Takes the KV of every beam, wherever a step was interrupted; returns those that wait to compute theirs anew.

        Candidates that a beam has found stay. The queues are the caller's to make anew.
        """
        waiting: list[Request] = []
        for group in self._groups.values():
            search = group.search
            if search.is_ready:  # interrupted before it went on: its last beam draws again
                del search.candidates[search.beams[-1].place]
            live = {beam.place: beam for beam in search.beams}
            for place, request in enumerate(group.requests):
                self._planner.kv.forget(request)
                was_waiting = request.status is RequestStatus.WAITING
                if request.status is RequestStatus.RUNNING:
                    self._planner.count_preemption(request)
                request.num_computed_tokens = 0
                if place not in live:
                    request.status = RequestStatus.WAITING
                    continue
                request.token_ids = live[place].token_ids
                if place in search.candidates:
                    request.status = RequestStatus.PARKED
                else:
                    never_ran = was_waiting and not search.has_begun
                    request.status = RequestStatus.WAITING if never_ran else RequestStatus.PREEMPTED
                    waiting.append(request)
        return waiting

    def check_integrity(self) -> None:
        """Every beam stands where it should. Raises `AssertionError`."""
        queues = (self._planner.running, self._planner.waiting, self._planner.parked)
        running, waiting, parked = ({request.request_id for request in queue} for queue in queues)
        for group in self._groups.values():
            assert not group.search.is_ready, f"{group.root.request_id} could go on"
            live = {beam.place: beam for beam in group.search.beams}
            for place, request in enumerate(group.requests):
                name, kv = request.request_id, self._planner.kv
                num_places = (name in running) + (name in waiting) + (name in parked)
                if place not in live:
                    assert num_places == 0, f"{name} is no beam and stands in a queue"
                    assert not kv.holds_blocks(request), f"{name} is no beam and holds blocks"
                    continue
                assert request.token_ids == live[place].token_ids, f"{name} has other tokens than its beam"
                if place in group.search.candidates:
                    assert request.status is RequestStatus.PARKED
                    assert name not in running | waiting
                    assert (name in parked) == (request.num_computed_tokens > 0) == kv.holds_blocks(request)
                    assert request.num_computed_tokens in (0, request.num_tokens)
                else:
                    assert request.status is not RequestStatus.PARKED
                    assert num_places == 1, f"{name} stands in {num_places} queues"
        assert parked <= self._place.keys(), "what is parked is no beam"


def _scored(request: Request, result: StepResult, draw: int) -> np.ndarray:
    """float64 [k]: the logprobs of the candidates that count, which are those at the request's temperature.

    Both of a token's logprobs are its logit, divided by the temperature or not, less a constant; the token that was
    drawn, without filters, tells the constants.
    """
    raw = result.top_logprobs[draw].logprobs[0].astype(np.float64)
    temperature = request.params.temperature
    if temperature in (0.0, 1.0):
        return raw
    return (raw - float(result.raw_logprobs[draw])) / temperature + float(result.sampled_logprobs[draw])


def _further(root: Request, place: int, rank: tuple[int, int, int]) -> Request:
    return Request(
        request_id=f"{root.request_id}.{place}",
        group_id=root.group_id,
        prompt_token_ids=root.prompt_token_ids,
        params=root.params,
        seed=root.seed,
        sample_index=root.sample_index,
        max_tokens=root.max_tokens,
        eos_token_ids=root.eos_token_ids,
        stop_token_ids=root.stop_token_ids,
        priority=root.priority,
        arrival=root.arrival,
        rank=rank,
        cache_salt=root.cache_salt,
        lora_request=root.lora_request,
        adapter_slot=root.adapter_slot,
        adapter_key=root.adapter_key,
        beam_options=root.beam_options,
    )
