"""Requests between an engine and its worker processes: there as they were asked for, back as they grow.

The same `Request` stands on both sides. The worker's is scheduled and sampled; what happens to it is told by
`StepOutputs`, which `apply` does to the caller's.
"""

from __future__ import annotations

import pickle
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from rollout.core.logprob_columns import LogprobColumns
from rollout.engine.core import Update
from rollout.engine.importable import pickle_for_workers
from rollout.engine.messages import Change, Family, Sample, StepOutputs, TopRows
from rollout.request import FinishReason, Request, RequestStatus
from rollout.sampling_params import SamplingParams

_MOST_PROCESSORS = 256  # lists of processors that a worker remembers
_COLUMNS = tuple(map(attrgetter, ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")))


def pack_family(leader: Request, handles: Sequence[int], forked_from: int | None = None) -> Family:
    """A leader and its siblings as one message; `handles` has a number for each, the leader's first. `forked_from` is
    the handle of the request that they are forks of, where it is unfinished in the same worker.

    Raises `ValueError` for logits processors that cannot be sent.
    """
    assert leader.lora_request is None, "adapters are refused where there are several engines"
    samples = [leader, *leader.siblings]
    processors = pack_processors(leader.params)
    return Family(
        group_id=leader.group_id,
        prompt_token_ids=np.array(leader.prompt_token_ids, np.int32).tobytes(),
        params=leader.params if processors is None else replace(leader.params, logits_processors=None),
        seed=leader.seed,
        max_tokens=leader.max_tokens,
        eos_token_ids=sorted(leader.eos_token_ids),
        stop_token_ids=sorted(leader.stop_token_ids),
        priority=leader.priority,
        arrival=leader.arrival,
        cache_salt=leader.cache_salt,
        scores_prompt=leader.scores_prompt,
        processors=processors,
        samples=[
            Sample(handle, sample.request_id, sample.sample_index)
            for handle, sample in zip(handles, samples, strict=True)
        ],
        beam_options=leader.beam_options,
        output_token_ids=np.array(leader.output_token_ids, np.int32).tobytes(),
        policy_spans=leader.policy_spans,
        branch_position=leader.branch_position,
        forked_from=forked_from,
    )


def pack_processors(params: SamplingParams) -> bytes | None:
    """The logits processors as bytes, None where there are none. Raises `ValueError` where they cannot be sent."""
    if params.logits_processors is None:
        return None
    return pickle_for_workers(params.logits_processors, "logits_processors")


class Unpacker:
    """The worker's side of `pack_family`. Processors that come again are the objects that came before: they are called
    once for the rows of all requests that name them."""

    def __init__(self) -> None:
        self._processors: OrderedDict[bytes, Any] = OrderedDict()

    def requests(self, family: Family, forked_from: Request | None = None) -> list[Request]:
        """See `unpack_family`."""
        return unpack_family(family, self._with_processors(family), forked_from)

    def _with_processors(self, family: Family) -> SamplingParams:
        if family.processors is None:
            return family.params
        if family.processors not in self._processors:
            self._processors[family.processors] = pickle.loads(family.processors)
        self._processors.move_to_end(family.processors)
        if len(self._processors) > _MOST_PROCESSORS:
            self._processors.popitem(last=False)
        return replace(family.params, logits_processors=self._processors[family.processors])


def unpack_family(family: Family, params: SamplingParams, forked_from: Request | None = None) -> list[Request]:
    """The requests of a message, with these parameters, the first leading the others. `forked_from` is the request that
    they are forks of. The arrays of what they begin with, which nobody asks for here, hold zeros."""
    prompt = np.frombuffer(family.prompt_token_ids, np.int32).tolist()
    output = np.frombuffer(family.output_token_ids, np.int32).tolist()
    zeros = bytes(4 * len(output))
    asks = params.wants_top_logprobs and family.beam_options is None
    requests = [
        Request(
            request_id=sample.request_id,
            group_id=family.group_id,
            prompt_token_ids=prompt,
            params=params,
            seed=family.seed,
            sample_index=sample.sample_index,
            max_tokens=family.max_tokens,
            eos_token_ids=frozenset(family.eos_token_ids),
            stop_token_ids=frozenset(family.stop_token_ids),
            priority=family.priority,
            arrival=family.arrival,
            cache_salt=family.cache_salt,
            scores_prompt=family.scores_prompt,
            beam_options=family.beam_options,
            token_ids=[*prompt, *output],
            raw_logprobs=array("f", zeros),
            sampled_logprobs=array("f", zeros),
            kept_mass=array("f", zeros),
            entropy=array("f", zeros),
            top_logprobs=LogprobColumns(num_skipped=len(output)) if asks else None,
            policy_spans=list(family.policy_spans),
            branch_position=family.branch_position,
            forked_from=forked_from,
        )
        for sample in family.samples
    ]
    requests[0].siblings = requests[1:]
    return requests


class Reporter:
    """The worker's side: knows which handle names which request, and what has been told of it."""

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}  # request id -> handle
        self._requests: dict[int, Request] = {}
        self._num_spans: dict[int, int] = {}  # handle -> policy spans that were told, once it has begun
        self._scores_told: set[int] = set()  # handles whose prompt's logprobs were told

    def add(self, handle: int, request: Request) -> None:
        self._handles[request.request_id] = handle
        self._requests[handle] = request

    def request(self, handle: int) -> Request | None:
        """The request of a handle; None where it has ended and that was told."""
        return self._requests.get(handle)

    def forget(self, request: Request) -> None:
        """Nothing more is told of this request."""
        handle = self._handles.pop(request.request_id)
        del self._requests[handle]
        self._num_spans.pop(handle, None)
        self._scores_told.discard(handle)

    def outputs(self, updates: Iterable[Update]) -> StepOutputs | None:
        """The message of these updates, or None where they are of requests that nobody wants to hear of."""
        known = [(request, token_ids) for request, token_ids in updates if request.request_id in self._handles]
        if not known:
            return None
        handles = [self._handles[request.request_id] for request, _ in known]
        columns = array("f")
        for column in _COLUMNS:
            for request, token_ids in known:
                values = column(request)
                columns += values[len(values) - len(token_ids) :]
        return StepOutputs(
            handles=np.array(handles, np.int64).tobytes(),
            counts=np.array([len(token_ids) for _, token_ids in known], np.int32).tobytes(),
            token_ids=np.array([token_id for _, token_ids in known for token_id in token_ids], np.int32).tobytes(),
            columns=columns.tobytes(),
            changes=list(self._changes(known, handles)),
            top_logprobs={
                index: _pack_top(request.top_logprobs, len(request.top_logprobs) - len(token_ids))
                for index, (request, token_ids) in enumerate(known)
                if request.top_logprobs is not None and token_ids
            },
        )

    def _changes(self, updates: Sequence[Update], handles: Sequence[int]) -> Iterator[Change]:
        for index, ((request, _), handle) in enumerate(zip(updates, handles, strict=True)):
            num_spans = len(request.policy_spans)
            if not request.is_finished and self._num_spans.get(handle) == num_spans:
                continue
            self._num_spans[handle] = num_spans
            tells_scores = handle not in self._scores_told
            self._scores_told.add(handle)
            prompt_top = request.prompt_top_logprobs
            yield Change(
                index=index,
                num_cached_tokens=request.num_cached_tokens,
                policy_version=request.policy_version,
                policy_spans=request.policy_spans,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                prompt_logprobs=request.prompt_logprobs.tobytes() if tells_scores else b"",
                prompt_top_logprobs=_pack_top(prompt_top) if tells_scores and prompt_top is not None else None,
                beam_result=request.beam_result,
            )
            if request.is_finished:
                self.forget(request)


def apply(message: StepOutputs, requests: Mapping[int, Request]) -> Iterator[Update]:
    """Does to the caller's requests what the message tells, one update at a time, each when it is asked for.

    Updates of requests that are not in `requests`, or have ended, are left out: a stop string was found since.
    """
    handles = np.frombuffer(message.handles, np.int64).tolist()
    ends = np.frombuffer(message.counts, np.int32).cumsum().tolist()
    token_ids = np.frombuffer(message.token_ids, np.int32).tolist()
    columns = np.frombuffer(message.columns, np.float32).reshape(4, -1)
    changes = {change.index: change for change in message.changes}
    first = 0
    for index, (handle, end) in enumerate(zip(handles, ends, strict=True)):
        start, first = first, end
        request = requests.get(handle)
        if request is None or request.is_finished:
            continue
        new = token_ids[start:end]
        known = request.num_prompt_tokens + request.num_output_tokens  # forced tokens stand behind it already
        request.token_ids[known : known + len(new)] = new
        for column, values in zip(_COLUMNS, columns[:, start:end], strict=True):
            column(request).frombytes(values.tobytes())
        if index in message.top_logprobs and request.top_logprobs is not None:
            _unpack_top(message.top_logprobs[index], request.top_logprobs)
        if index in changes:
            _apply_change(request, changes[index])
        yield request, new


def _apply_change(request: Request, change: Change) -> None:
    request.num_cached_tokens = change.num_cached_tokens
    request.policy_version = change.policy_version
    request.policy_spans = change.policy_spans
    request.prompt_logprobs.frombytes(change.prompt_logprobs)
    if change.prompt_top_logprobs is not None and request.prompt_top_logprobs is not None:
        _unpack_top(change.prompt_top_logprobs, request.prompt_top_logprobs)
    if change.finish_reason is not None:
        request.beam_result = change.beam_result
        request.finish_reason = FinishReason(change.finish_reason)
        request.stop_reason = change.stop_reason
        request.status = RequestStatus.FINISHED


def _pack_top(columns: LogprobColumns, first: int = 0) -> TopRows:
    return TopRows(columns.num_top, columns.num_chosen, columns.packed_rows(first).tobytes())


def _unpack_top(rows: TopRows, columns: LogprobColumns) -> None:
    columns.num_top, columns.num_chosen = rows.num_top, rows.num_chosen
    columns.packed.frombytes(rows.packed)
