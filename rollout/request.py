"""One sample on its way through the engine: what it was asked for, its tokens so far, and where it stands."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollout.core.beam import BeamOptions, BeamResult
from rollout.core.logprob_columns import LogprobColumns
from rollout.lora.request import LoRARequest
from rollout.sampling.state import SampleState
from rollout.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands.

    `SWAPPED` is waiting with its KV in host memory; `PREEMPTED` is waiting without KV. `PARKED`: a beam that has drawn,
    and waits for the other beams of its search.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    PARKED = "parked"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended.

    `ABORT` keeps what was sampled; `ERROR`: the model's logits were not numbers, or no token was left to draw.
    """

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One sample. A request for `n` samples becomes `n` of these; the first leads and the others fork from it.

    The lists are filled as follows: `token_ids` starts as the prompt, with the output that is known already (of a
    sample that is resumed, or a fork), and grows by the scheduler's update; the arrays of logprobs grow with it, one
    value per sampled token. `num_computed_tokens` counts the leading tokens whose KV is written; it moves only when a
    step's result arrives.

    Forced tokens but the last are in `token_ids` from the start too, without values in the arrays: they are known
    tokens that are computed as a prompt is, and one after the other they become output as their values arrive. The
    last one is drawn in its turn, like any token, except that the draw is forced.
    """

    request_id: str  # unique, one per sample
    group_id: str  # the user's request; the same for all its samples
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    sample_index: int  # params.first_sample_index + position in the group
    max_tokens: int  # resolved against the model's length limit; 0 scores the prompt and samples nothing
    eos_token_ids: frozenset[int] = frozenset()  # empty where ignore_eos is set
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower runs first, under the priority policy
    arrival: int = 0  # running number, given by the engine
    rank: tuple[int, int, int] = (0, 0, 0)  # who goes first; given by the scheduler's add and kept
    cache_salt: str | None = None
    scores_prompt: bool = False  # return the logprob of every prompt token
    lora_request: LoRARequest | None = None
    adapter_slot: int = -1  # where its adapter lies, which stays there while the request is unfinished; -1 for none
    adapter_key: str | None = None  # the adapter's name and content, part of every block's hash
    beam_options: BeamOptions | None = None  # where set, this is a beam search; see `rollout.core.beam_groups`
    forked_from: Request | None = None  # goes on from an output of this one: shares its KV while that runs
    parent: tuple[str, int] | None = None  # group id and sample index of the sample that it was forked from
    branch_position: int = 0  # leading output tokens that it has from there
    num_forced_tokens: int = 0  # leading output tokens that nobody drew

    token_ids: list[int] = field(default_factory=list)  # prompt + output
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    siblings: list[Request] = field(default_factory=list)  # forks of the leader that still wait for its prompt
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that matched; None for EOS
    policy_version: int = 0  # version under which the tokens were sampled; set at admission
    # (version, index of the first output token that it samples), extended at admission under another version
    policy_spans: list[tuple[int, int]] = field(default_factory=list)

    raw_logprobs: array[float] = field(default_factory=lambda: array("f"))
    sampled_logprobs: array[float] = field(default_factory=lambda: array("f"))
    kept_mass: array[float] = field(default_factory=lambda: array("f"))
    entropy: array[float] = field(default_factory=lambda: array("f"))
    prompt_logprobs: array[float] = field(default_factory=lambda: array("f"))  # raw; of tokens 1.. of the prompt
    top_logprobs: LogprobColumns | None = None  # a position a sampled token, where the parameters ask for it
    prompt_top_logprobs: LogprobColumns | None = None  # a position a value of `prompt_logprobs`, likewise
    sample_state: SampleState | None = None  # where draws take more than logits, temperature and filters
    beam_result: BeamResult | None = None  # of a beam search that has ended

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        self.token_ids += self.forced_token_ids[self.num_known_output_tokens : -1]
        self.num_forced_tokens = max(self.num_forced_tokens, len(self.forced_token_ids))
        if self.params.wants_top_logprobs and self.beam_options is None and self.top_logprobs is None:
            self.top_logprobs = LogprobColumns()
        if self.params.prompt_logprobs is not None and self.prompt_top_logprobs is None:
            self.prompt_top_logprobs = LogprobColumns()
        if self.params.adjusts_logits:
            self.sample_state = SampleState(
                self.token_ids, len(self.prompt_token_ids), self.eos_token_ids, self.stop_token_ids
            )

    @property
    def may_join(self) -> bool:
        """Whether it may fork from another request with its prompt: it samples, and from the end of its prompt on."""
        begins = self.token_ids == self.prompt_token_ids and not self.forced_token_ids and self.forked_from is None
        return begins and self.max_tokens > 0 and self.beam_options is None and not self.scores_prompt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output, forced tokens that are still to come included."""
        return len(self.token_ids)

    @property
    def num_known_output_tokens(self) -> int:
        """Output tokens, forced tokens that are still to come included."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were drawn, or forced and reported on. The values of a beam lie with its search."""
        if self.beam_options is not None:
            return self.num_known_output_tokens
        return min(len(self.entropy), len(self.token_ids) - len(self.prompt_token_ids))

    @property
    def output_token_ids(self) -> list[int]:
        start = len(self.prompt_token_ids)
        return self.token_ids[start : start + self.num_output_tokens]

    @property
    def forced_token_ids(self) -> Sequence[int]:
        """What the first output tokens are."""
        return self.params.forced_token_ids or ()

    @property
    def arrays(self) -> tuple[array[float], ...]:
        """Those with one value an output token."""
        return self.raw_logprobs, self.sampled_logprobs, self.kept_mass, self.entropy

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether its last token is the EOS or stop id that has ended it."""
        if (
            self.finish_reason is not FinishReason.STOP
            or isinstance(self.stop_reason, str)
            or not self.num_output_tokens
        ):
            return False
        return self.token_ids[-1] in self.eos_token_ids or self.token_ids[-1] in self.stop_token_ids

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def cut_output(self, num_tokens: int) -> None:
        """Drops all output tokens behind the first `num_tokens`, which are there, with their values."""
        del self.token_ids[self.num_prompt_tokens + num_tokens :]
        for column in self.arrays:
            del column[num_tokens:]
        if self.top_logprobs is not None:
            self.top_logprobs.truncate(num_tokens)

    def cut_back(self) -> None:
        """Drops what is kept of tokens that were never appended, or only in part: an update was interrupted."""
        num_output = min(self.num_known_output_tokens, *map(len, self.arrays))
        if self.top_logprobs is not None:
            num_output = min(num_output, len(self.top_logprobs))
            self.top_logprobs.truncate(num_output)
        for column in self.arrays:
            del column[num_output:]
        top, num_scored = self.prompt_top_logprobs, len(self.prompt_logprobs)
        if top is not None and len(top) > num_scored:
            self.prompt_top_logprobs = top.copy()  # others may share it
            self.prompt_top_logprobs.truncate(num_scored)

    def forget_prompt_logprobs(self) -> None:
        """The prompt's tokens will be scored anew. What a fork of it shares stays as it is."""
        del self.prompt_logprobs[:]
        if self.prompt_top_logprobs is not None:
            self.prompt_top_logprobs = LogprobColumns()

    def share_prompt_logprobs(self, other: Request) -> None:
        """Takes over what `other`, with the same prompt and parameters, knows of the prompt's tokens so far."""
        top = other.prompt_top_logprobs
        if top is not None:  # shared where nobody adds to it any more
            self.prompt_top_logprobs = top if len(top) == self.num_prompt_tokens - 1 else top.copy()
        self.prompt_logprobs = other.prompt_logprobs[:]

    def banned_token_ids(self, position: int) -> tuple[int, ...]:
        """Ids that may not be drawn as the token at `position`: those that would end the request, before `min_tokens`
        is reached. Where the output has a grammar its masks say so, since there may be nothing else to draw."""
        if self.params.structured_outputs is not None:
            return ()
        if position - len(self.prompt_token_ids) >= self.params.min_tokens:
            return ()
        return tuple(sorted(self.eos_token_ids | self.stop_token_ids))


def join_equal_prompts(requests: Iterable[Request]) -> list[Request]:
    """The leaders of requests that arrive together: those with the same prompt become forks of the first of them.

    The prefix cache alone would have each of them compute the last block of the prompt again. What a sample is does not
    depend on it.
    """
    leaders: list[Request] = []
    first: dict[tuple[object, ...], Request] = {}
    for request in requests:
        if not request.may_join:
            leaders.append(request)
            continue
        key = (
            tuple(request.prompt_token_ids),
            request.cache_salt,
            request.adapter_key,
            request.adapter_slot,
            request.priority,
        )
        leader = first.setdefault(key, request)
        if leader is request:
            leaders.append(request)
        else:
            leader.siblings += [request, *request.siblings]
            request.siblings = []
    return leaders
