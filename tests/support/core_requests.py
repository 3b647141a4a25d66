"""Requests and schedulers for tests of `rollout.core`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.core.logprob_columns import LogprobColumns
from rollout.core.schedule import SchedulePlan, StepResult
from rollout.core.scheduler import Scheduler, SchedulerConfig
from rollout.request import Request
from rollout.sampling_params import SamplingParams

ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
INHERITED = ("params", "seed", "max_tokens", "eos_token_ids", "stop_token_ids", "priority", "cache_salt")


def make_family(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    n: int = 1,
    arrival: int = 0,
    seed: int = 0,
    min_tokens: int = 0,
    forced: Sequence[int] | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    **fields: Any,
) -> list[Request]:
    """The `n` requests `name/0`, `name/1`, … of group `name`; the first leads the others."""
    params = SamplingParams(
        n=n,
        max_tokens=max(max_tokens, 1),
        min_tokens=min_tokens,
        forced_token_ids=forced,
        logprobs=logprobs,
        logprob_token_ids=None if logprobs is None else [0] * (logprobs % 2),
        prompt_logprobs=prompt_logprobs,
    )
    family = [
        Request(
            request_id=f"{name}/{index}",
            group_id=name,
            prompt_token_ids=list(prompt),
            params=params,
            seed=seed,
            sample_index=index,
            max_tokens=max_tokens,
            arrival=arrival,
            **fields,
        )
        for index in range(n)
    ]
    family[0].siblings = family[1:]
    return family


def make_request(name: str, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> Request:
    return make_family(name, prompt, max_tokens, **fields)[0]


def continue_from(parent: Request, name: str, at: int, sample_indices: Sequence[int], **fields: Any) -> list[Request]:
    """Requests of group `name` that begin with the first `at` output tokens of `parent`; the first leads the others."""
    start = parent.num_prompt_tokens
    family = [
        Request(
            request_id=f"{name}/{index}",
            group_id=name,
            prompt_token_ids=parent.prompt_token_ids,
            token_ids=parent.token_ids[: start + at],
            sample_index=index,
            policy_spans=[span for span in parent.policy_spans if span[1] < at],
            top_logprobs=_leading(parent.top_logprobs, at),
            **{array: getattr(parent, array)[:at] for array in ARRAYS},
            **{field: getattr(parent, field) for field in INHERITED} | fields,
        )
        for index in sample_indices
    ]
    family[0].siblings = family[1:]
    return family


def _leading(columns: LogprobColumns | None, at: int) -> LogprobColumns | None:
    if columns is not None:
        columns = columns.copy()
        columns.truncate(at)
    return columns


def make_scheduler(**changes: Any) -> Scheduler:
    """A small scheduler with much room: blocks of 4 tokens, 32 of them, unless changed."""
    settings: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 32,
    }
    return Scheduler(SchedulerConfig(**{**settings, **changes}))


def shape(plan: SchedulePlan) -> list[tuple[str, int, int]]:
    """(request, first position, number of tokens) of each sequence."""
    return [(sequence.request_id, sequence.start, len(sequence.token_ids)) for sequence in plan.sequences]


def drawers(plan: SchedulePlan) -> list[str]:
    return [draw.request_id for draw in plan.draws]


def is_idle(scheduler: Scheduler) -> bool:
    pools = (scheduler.kv.pool, scheduler.kv.host_pool)
    return not scheduler.has_unfinished() and all(pool.num_free == pool.num_blocks for pool in pools)


def empty_result() -> StepResult:
    nothing = np.zeros(0, dtype=np.float32)
    return StepResult(np.zeros(0, dtype=np.int64), nothing, nothing, nothing, nothing)
