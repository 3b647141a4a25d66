"""Prompts and their parameters on the way into the engine: checked, numbered, and made into requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rollout.engine.beginning import Beginning
from rollout.engine.collect import Group
from rollout.engine.delivery import Delivery
from rollout.engine.detokenize import Detokenizer
from rollout.engine.interface import Engine
from rollout.engine.text_checks import TextChecks
from rollout.lora.manager import LoadedAdapter
from rollout.lora.request import LoRARequest
from rollout.outputs import RequestOutput
from rollout.prompts import Prompt
from rollout.request import Request
from rollout.sampling.noise import derive_seed
from rollout.sampling_checks import resolve_count, tokens_outside
from rollout.sampling_params import SamplingParams

OnInvalid = Literal["raise", "return"]
LoRAChoice = LoRARequest | str | None  # an adapter, or the name of one in memory


class Admission:
    """Makes requests and hands them to the engine, all of a call or none. Callers hold the engine's lock."""

    def __init__(
        self,
        engine: Engine,
        delivery: Delivery,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._engine = engine
        self._delivery = delivery
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._numbers = itertools.count()
        config = engine.config
        self._text = TextChecks(tokenizer, engine.vocab_size, config.reasoning_start, config.reasoning_end)

    def problem(self, prompt: Prompt, params: SamplingParams | None) -> str | None:
        """Why a prompt cannot be run with these parameters (None: scored), in a sentence."""
        ids, limit, vocab_size = prompt.token_ids, self._engine.max_model_len, self._engine.vocab_size
        if not ids:
            return "the prompt is empty: it must have at least 1 token"
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                return f"prompt_token_ids holds {token_id}: ids must be from 0 to {vocab_size - 1}"
        if params is None:
            return None if len(ids) <= limit else f"the prompt has {len(ids)} tokens, max_model_len is {limit}"
        if len(ids) >= limit:
            return f"the prompt has {len(ids)} tokens and max_model_len is {limit}: no token could be generated"
        outside = tokens_outside(params, vocab_size)
        if outside is not None:
            return outside
        too_many = self.too_many_logprobs(params)
        if too_many is not None:
            return too_many
        num_forced = len(params.forced_token_ids or ())
        if len(ids) + num_forced > limit:
            return f"the prompt's {len(ids)} tokens and {num_forced} forced ones are more than max_model_len={limit}"
        if params.stop_strings and self._detokenizer is None:
            return "stop strings need a tokenizer, and the model's folder has none"
        if params.structured_outputs is not None and (problem := self._grammar_problem(params)) is not None:
            return problem
        return self._text.problem(params)

    def _eos_of(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self._eos_token_ids

    def _grammar_problem(self, params: SamplingParams) -> str | None:
        if self._detokenizer is None:
            return "structured_outputs needs a tokenizer, and the model's folder has none"
        try:
            self._engine.check_grammar(params, self._eos_of(params))
        except ValueError as error:
            return str(error)
        return None

    def too_many_logprobs(self, params: SamplingParams) -> str | None:
        """Why the engine returns fewer logprobs a token than these parameters ask for, in a sentence."""
        limit = self._engine.config.max_logprobs
        if limit == -1:
            return None
        for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            asked = self._engine.vocab_size if count == -1 else count or 0
            if asked > limit:
                every = f", all {asked} tokens," if count == -1 else ""
                return f"{field}={count}{every} is more than the engine's max_logprobs={limit}: configure a larger one"
        return None

    def admit(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        choices: Sequence[LoRAChoice],
        on_invalid: OnInvalid,
        streams: bool = False,
    ) -> tuple[dict[int, Group], dict[int, RequestOutput]]:
        """Checks every prompt, then hands the good ones to the engine. Both results are by the prompt's index.

        `streams`: outputs are wanted while the samples grow.
        """
        if on_invalid not in ("raise", "return"):
            raise ValueError(f"on_invalid={on_invalid!r} is not valid: it must be 'raise' or 'return'")
        self._engine.check_ready()
        adapters = self._engine.adapters_for(choices)
        refused: dict[int, RequestOutput] = {}
        families: dict[int, tuple[Prompt, list[Request]]] = {}
        for index, prompt in enumerate(prompts):
            problem = prompt.error or self.problem(prompt, params[index])
            requests: list[Request] = []
            if problem is None:
                requests = self.make_requests(prompt, params[index], priorities[index], adapters[index])
                problem = self.unfit(requests)
            if problem is None:
                families[index] = (prompt, requests)
            elif on_invalid == "raise":
                raise ValueError(f"prompts[{index}]: {problem}")
            else:
                refused[index] = RequestOutput(f"invalid-{index}", prompt.text, prompt.token_ids, [], error=problem)
        groups = self.submit(list(families.values()), streams)
        return dict(zip(families, groups, strict=True)), refused

    def unfit(self, requests: list[Request]) -> str | None:
        """Why the requests can never run to their end, in a sentence."""
        try:
            self._engine.check_fits(requests[0])
        except ValueError as error:
            return str(error)
        return None

    def make_requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        adapter: LoadedAdapter | None = None,
        scores: bool = False,
        beginning: Beginning | None = None,
        place: tuple[int, int] | None = None,
    ) -> list[Request]:
        """The samples of one prompt, the first leading the others, all with the same `beginning` of their output.

        `place`: the number of the group and the first sample's place in it, for a group of several such families.
        Raises `ValueError` for a beginning that is not of the form which the parameters ask for.
        """
        if params.structured_outputs is not None and beginning is not None:
            self._engine.check_grammar(params, self._eos_of(params), beginning.token_ids)
        number, first = (self.next_number(), 0) if place is None else place
        room = self._engine.max_model_len - len(prompt.token_ids)
        max_tokens = 0 if scores else room if params.max_tokens is None else min(params.max_tokens, room)
        seed = params.seed if params.seed is not None else derive_seed(self._engine.config.seed, number)

        def own_fields() -> dict[str, Any]:
            if beginning is None:
                return {}
            num_top = resolve_count(params.logprobs, self._engine.vocab_size)
            return beginning.request_fields(prompt.token_ids, params, num_top, self._engine.config.logprobs_mode)

        samples = [
            Request(
                request_id=f"{number}-{first + index}",
                group_id=str(number),
                prompt_token_ids=prompt.token_ids,
                params=params,
                seed=seed,
                sample_index=params.first_sample_index + index,
                max_tokens=max_tokens,
                eos_token_ids=self._eos_of(params),
                stop_token_ids=frozenset(params.stop_token_ids or ()),
                priority=priority,
                arrival=number,
                cache_salt=prompt.cache_salt,
                scores_prompt=scores or params.prompt_logprobs is not None,
                lora_request=None if adapter is None else adapter.request,
                adapter_slot=-1 if adapter is None else adapter.slot,
                adapter_key=None if adapter is None else adapter.key,
                **own_fields(),
            )
            for index in range(params.n)
        ]
        samples[0].siblings = samples[1:]
        return samples

    def next_number(self) -> int:
        """The number of the next request."""
        return next(self._numbers)

    def submit(self, families: list[tuple[Prompt, list[Request]]], streams: bool = False) -> list[Group]:
        """Hands requests to the engine, all or none. Those that follow none of their group lead."""
        self._engine.add(request for _, requests in families for request in _leaders(requests))
        receipt = self._engine.receipt
        mode = self._engine.config.logprobs_mode
        groups = [
            Group.of(prompt, requests, receipt, self._detokenizer, mode, streams) for prompt, requests in families
        ]
        for group in groups:
            self._delivery.groups[group.group_id] = group
        return groups


def _leaders(requests: list[Request]) -> list[Request]:
    followers = {sibling.request_id for request in requests for sibling in request.siblings}
    return [request for request in requests if request.request_id not in followers]


def params_each(sampling_params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts, from one for all or a list."""
    return _one_each("sampling_params", sampling_params, SamplingParams, count)


def priorities_each(priority: Sequence[int] | None, count: int, policy: str) -> list[int]:
    """The priority of each of `count` prompts. Raises `ValueError` where the scheduling policy uses none."""
    if priority is not None and policy != "priority":
        raise ValueError("priority is not used under scheduling_policy='fcfs': configure 'priority'")
    return _one_each("priority", 0 if priority is None else priority, int, count)


def _one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    """One value for each prompt. Raises `ValueError` where a list has another length, `TypeError` for another type."""
    if isinstance(value, str) or not isinstance(value, (kind, Iterable)):
        raise TypeError(f"{name}={value!r} is not valid: it must be {kind.__name__} or a list of them")
    values = [value] * count if isinstance(value, kind) else list(value)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts: give one, or one a prompt")
    for entry in values:
        if not isinstance(entry, kind):
            raise TypeError(f"{name} holds {entry!r}: it must be {kind.__name__}")
    return values
