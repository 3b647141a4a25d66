"""Resuming: unfinished samples go on as if they had never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout.engine.admission import Admission
from rollout.engine.beginning import Beginning
from rollout.engine.collect import Group, is_unfinished
from rollout.engine.interface import Engine
from rollout.lora.manager import LoadedAdapter
from rollout.outputs import CompletionOutput, RequestOutput, check_whole
from rollout.prompts import Prompt
from rollout.request import Request
from rollout.sampling_params import SamplingParams


def resume(
    engine: Engine,
    admission: Admission,
    outputs: Sequence[RequestOutput],
    params: Sequence[SamplingParams],
    priorities: Sequence[int],
) -> dict[int, Group]:
    """Queues the unfinished samples of `outputs`, one group for each output that has any; returned by its index.

    Every sample goes on by itself: it may have any length. Raises `ValueError`, and queues nothing, where an output
    cannot be resumed with its parameters. The engine's lock is held.
    """
    engine.check_ready()
    adapters = engine.adapters_for([output.lora_request for output in outputs])
    families: dict[int, tuple[Prompt, list[Request]]] = {}
    for index, output in enumerate(outputs):
        name = f"outputs[{index}]"
        if output.error is not None:
            raise ValueError(f"{name} is of a prompt that was refused: {output.error}")
        check_whole(output, name)
        if not any(map(is_unfinished, output.outputs)):
            continue
        prompt = Prompt(list(output.prompt_token_ids), output.prompt, output.cache_salt)
        problem = admission.problem(prompt, params[index])
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        requests = _requests(admission, name, output, prompt, params[index], priorities[index], adapters[index])
        families[index] = (prompt, requests)
    groups = dict(zip(families, admission.submit(list(families.values())), strict=True))
    for index, group in groups.items():
        group.resumes = outputs[index]
        group.receipt_ids = outputs[index].receipt_ids | group.receipt_ids
    return groups


def _requests(
    admission: Admission,
    name: str,
    output: RequestOutput,
    prompt: Prompt,
    params: SamplingParams,
    priority: int,
    adapter: LoadedAdapter | None,
) -> list[Request]:
    """One request for each unfinished sample."""
    _check_count(name, output, params)
    number = admission.next_number()
    requests: list[Request] = []
    for index, sample in enumerate(output.outputs):
        if not is_unfinished(sample):
            continue
        try:
            beginning = _beginning(sample, params)
            own = replace(params, n=1, seed=sample.seed, first_sample_index=sample.sample_index)
            if len(output.prompt_logprobs or ()) == len(prompt.token_ids):
                own = replace(own, prompt_logprobs=None)  # they are there already
            place = (number, len(requests))
            (request,) = admission.make_requests(prompt, own, priority, adapter, beginning=beginning, place=place)
            if request.num_output_tokens >= request.max_tokens:
                raise ValueError(
                    f"max_tokens={request.max_tokens} is not valid: it counts all output tokens, and there are "
                    f"{request.num_output_tokens} already"
                )
            problem = admission.unfit([request])
            if problem is not None:
                raise ValueError(problem)
        except ValueError as error:
            raise ValueError(f"{name}.outputs[{index}]: {error}") from error
        requests.append(request)
    return requests


def _check_count(name: str, output: RequestOutput, params: SamplingParams) -> None:
    """The parameters of forks may be those of their parent: of one sample, say."""
    count = len(output.outputs)
    is_fork = any(sample.parent is not None for sample in output.outputs)
    if params.n != count and not (is_fork and params.n == 1):
        raise ValueError(
            f"{name}: n={params.n} is not valid: the output has {count} samples, so that it must be {count}"
        )


def _beginning(sample: CompletionOutput, params: SamplingParams) -> Beginning:
    first, own = params.first_sample_index, sample.sample_index - sample.index
    is_parents = sample.parent is not None and first <= sample.parent[1]
    if first != own and not is_parents:
        raise ValueError(f"first_sample_index={first} is not valid: that of the interrupted call was {own}")
    if params.seed is not None and params.seed != sample.seed:
        raise ValueError(f"seed={params.seed} is not valid: the sample was drawn with seed {sample.seed}")
    forced = tuple(params.forced_token_ids or ())
    num_common = min(len(forced), len(sample.token_ids))
    if forced[:num_common] != tuple(sample.token_ids[:num_common]):
        raise ValueError("forced_token_ids is not valid: the sample begins with other tokens")
    return Beginning.of_output(sample)
