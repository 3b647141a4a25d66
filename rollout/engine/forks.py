"""Forks: new samples that begin with the output of another, up to any of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollout.engine.admission import Admission
from rollout.engine.beginning import Beginning
from rollout.engine.collect import Group
from rollout.engine.delivery import Delivery
from rollout.engine.interface import Engine
from rollout.lora.request import LoRARequest
from rollout.outputs import RequestOutput, check_whole
from rollout.prompts import Prompt
from rollout.request import FinishReason, Request
from rollout.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class _Parent:
    """What a fork has to know of the sample that it leaves."""

    name: tuple[str, int]  # request id, sample index
    prompt: Prompt
    beginning: Beginning  # all of its output
    params: SamplingParams | None  # None: an output does not say
    seed: int
    first_index: int  # the sample index that its group begins with
    next_index: int  # a sample index that none of its group has
    finish_reason: str | None
    lora_request: LoRARequest | None
    priority: int
    request: Request | None  # where it is in flight


class Forks:
    """Makes forks. Callers hold the engine's lock.

    A sample's noise is a function of its seed, its sample index and the position. Forks keep their parent's seed and
    get indices that no sample of their tree has: counted on from the highest, for each seed.
    """

    def __init__(self, engine: Engine, admission: Admission, delivery: Delivery) -> None:
        self._engine = engine
        self._admission = admission
        self._delivery = delivery
        self._next_index: dict[int, int] = {}  # seed -> the first sample index that no fork of it has

    def fork(
        self,
        source: str | RequestOutput,
        sample: int,
        at: int | None,
        n: int,
        params: SamplingParams | None,
        priority: int | None,
    ) -> Group:
        """Queues `n` forks of sample `sample` of `source` after its output token number `at`, as one group.

        Raises `ValueError`, and queues nothing, for a place or parameters that are not valid.
        """
        self._engine.check_ready()
        parent = self._parent(source, sample)
        at = _place(parent, at)
        own = self._params(parent, at, n, params)
        beginning = parent.beginning.branch(at, parent.name, parent.request)
        problem = self._admission.problem(parent.prompt, own)
        if problem is not None:
            raise ValueError(problem)
        (adapter,) = self._engine.adapters_for([parent.lora_request])
        requests = self._admission.make_requests(
            parent.prompt, own, parent.priority if priority is None else priority, adapter, beginning=beginning
        )
        if at >= requests[0].max_tokens:
            raise ValueError(
                f"max_tokens={requests[0].max_tokens} is not valid: it counts all output tokens, and a fork at {at} "
                "has that many already"
            )
        problem = self._admission.unfit(requests)
        if problem is not None:
            raise ValueError(problem)
        (group,) = self._admission.submit([(parent.prompt, requests)])
        self._next_index[requests[0].seed] = own.first_sample_index + n
        return group

    def _parent(self, source: str | RequestOutput, sample: int) -> _Parent:
        if isinstance(source, RequestOutput):
            check_whole(source, f"the output of request {source.request_id!r}")
            _check_sample(sample, len(source.outputs))
            return _of_output(source, sample)
        if not isinstance(source, str):
            raise TypeError(f"request={source!r} is not valid: it must be a request id or a RequestOutput")
        group = self._delivery.groups.get(source)
        if group is None:
            raise ValueError(f"request {source!r} is not in flight: give its RequestOutput")
        if group.samples[0].beam_options is not None:
            raise ValueError(f"request {source!r} is a beam search, which cannot be forked")
        if group.resumes is not None:  # some of its samples had ended before
            raise ValueError(f"request {source!r} resumes another: wait for its RequestOutput")
        _check_sample(sample, len(group.samples))
        return _of_request(group, group.samples[sample])

    def _params(self, parent: _Parent, at: int, n: int, params: SamplingParams | None) -> SamplingParams:
        """The parameters of forks: those that were given, or the parent's, with fresh sample indices."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n={n!r} is not valid: it must be an integer of at least 1")
        if params is None:
            if parent.params is None:
                raise ValueError("sampling_params=None is not valid: an output does not hold those it was sampled with")
            params = replace(parent.params, n=n, forced_token_ids=None, prompt_logprobs=None)
        elif params.n not in (1, n):
            raise ValueError(f"sampling_params.n={params.n} is not valid: it must be 1, or n={n}")
        elif params.first_sample_index not in (0, parent.first_index):
            raise ValueError(
                f"first_sample_index={params.first_sample_index} is not valid: leave it at 0 (forks get indices that "
                "no other sample of their tree has)"
            )
        inherited = tuple(parent.beginning.token_ids[:at])
        forced = tuple(params.forced_token_ids or inherited)
        if forced[:at] != inherited:
            raise ValueError(
                f"forced_token_ids is not valid: the first {at} tokens must be those that the fork begins with"
            )
        seed = parent.seed if params.seed is None else params.seed
        index = self._next_index.get(seed, 0)
        if seed == parent.seed:
            index = max(index, parent.next_index)
        return replace(params, n=n, seed=seed, first_sample_index=index)


def _check_sample(sample: int, count: int) -> None:
    if isinstance(sample, bool) or not isinstance(sample, int) or not 0 <= sample < count:
        raise ValueError(f"sample={sample!r} is not valid: it must be from 0 to {count - 1}")


def _of_request(group: Group, request: Request) -> _Parent:
    return _Parent(
        name=(group.group_id, request.sample_index),
        prompt=group.prompt,
        beginning=Beginning.of_request(request),
        params=request.params,
        seed=request.seed,
        first_index=group.samples[0].sample_index,
        next_index=max(sample.sample_index for sample in group.samples) + 1,
        finish_reason=request.finish_reason,
        lora_request=request.lora_request,
        priority=request.priority,
        request=None if request.is_finished else request,
    )


def _of_output(output: RequestOutput, index: int) -> _Parent:
    sample = output.outputs[index]
    return _Parent(
        name=(output.request_id, sample.sample_index),
        prompt=Prompt(list(output.prompt_token_ids), output.prompt, output.cache_salt),
        beginning=Beginning.of_output(sample),
        params=None,
        seed=sample.seed,
        first_index=sample.sample_index - sample.index,
        next_index=max(other.sample_index for other in output.outputs) + 1,
        finish_reason=sample.finish_reason,
        lora_request=output.lora_request,
        priority=0,
        request=None,
    )


def _place(parent: _Parent, at: int | None) -> int:
    """Where the fork begins. Raises `ValueError` for a place that the parent has not, or where it has stopped."""
    num_tokens = len(parent.beginning.token_ids)
    last = num_tokens
    if parent.finish_reason in (FinishReason.STOP, FinishReason.REPETITION):
        last -= 1  # behind its last token there is nothing to go on with
    at = num_tokens if at is None else at
    if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= last:
        why = f", since the sample ended at {num_tokens} ({parent.finish_reason})" if last < num_tokens else ""
        raise ValueError(f"at={at!r} is not valid: it must be from 0 to {last}{why}")
    return at
