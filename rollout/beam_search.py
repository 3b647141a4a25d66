"""Beam search as users see it: its parameters, its outputs, and the way of a prompt into the engine and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout.core.beam import BeamOptions, BeamResult, EarlyStopping, Hypothesis, num_candidates
from rollout.engine.admission import Admission, LoRAChoice
from rollout.engine.collect import Group
from rollout.engine.interface import Engine
from rollout.lora.request import LoRARequest
from rollout.prompts import Prompt
from rollout.request import FinishReason, Request
from rollout.sampling_options import StructuredOutputsParams
from rollout.sampling_params import SamplingParams

MAX_BEAM_WIDTH = 1024
MAX_LENGTH_PENALTY = 20.0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search, with vLLM's field names; `docs/beam_search.md` says what is found.

    `beam_width` sequences are kept and returned, each of at most `max_tokens` tokens. A sequence's score is the sum of
    the logprobs of its generated tokens, an EOS at the end included, divided by their number to the power of
    `length_penalty`: 0 compares sums, 1 means, and more than 1 prefers long sequences. With a `temperature` above 0
    the logprobs are those of the logits divided by it; 0 stands for the model's own.

    `early_stopping` says when `beam_width` finished sequences suffice: True at once; False when the best beam, scored
    as if it ended now, is no better than the worst of them; "never" when no length could make it better.

    `include_stop_str_in_output` leaves the EOS in `tokens` and in the texts. Raises `ValueError` naming the field, the
    value and the valid range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        _check_integer("beam_width", self.beam_width, MAX_BEAM_WIDTH)
        _check_integer("max_tokens", self.max_tokens, None)
        _check_real("temperature", self.temperature, 0.0, 1e6)
        _check_real("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value: object = getattr(self, field)
            if not isinstance(value, bool):
                raise ValueError(f"{field}={value!r} is not valid: it must be True or False")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping={self.early_stopping!r} is not valid: it must be False, True or 'never'")
        if self.structured_outputs is not None:
            raise ValueError(
                f"structured_outputs={self.structured_outputs!r} is not supported by beam search: leave it at None, or "
                "use generate"
            )


def _check_integer(field: str, value: object, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (high is not None and value > high):
        valid = "an integer of at least 1" if high is None else f"an integer from 1 to {high}"
        raise ValueError(f"{field}={value!r} is not valid: it must be {valid}")


def _check_real(field: str, value: object, low: float, high: float) -> None:
    in_range = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not in_range:  # as is NaN
        raise ValueError(f"{field}={value!r} is not valid: it must be a finite number from {low:g} to {high:g}")


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that was found.

    `tokens` and `text` begin with the prompt and, as in vLLM, leave the EOS out unless `include_stop_str_in_output` is
    set; so does `output_text`, which is of the output alone. `output_token_ids` always has the EOS, so that
    `output_logprobs`, whose sum is `cum_logprob`, has one value a token. `stop_reason` is the EOS that ended it.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    output_token_ids: list[int]
    output_text: str
    output_logprobs: np.ndarray  # float64, of the distribution that was searched
    finish_reason: str  # "stop" or "length"; "abort" or "error" of a sequence that the search had not finished
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt and the sequences found for it, best first.

    `kv_blocks_saved`: the share of KV blocks that the beams would have needed besides if they shared none, the mean
    over all steps. `error` says why the search did not run to its end; the sequences are then the best so far.
    """

    sequences: list[BeamSearchSequence]
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    kv_blocks_saved: float
    policy_version: int
    receipt_id: str | None
    error: str | None = None
    lora_request: LoRARequest | None = None


def make_searches(
    admission: Admission,
    engine: Engine,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    choices: Sequence[LoRAChoice],
) -> list[tuple[Prompt, list[Request]]]:
    """A request for each prompt, for `Admission.submit`. Raises `ValueError` for the first that cannot be run."""
    engine.check_ready()
    wanted = SamplingParams(
        temperature=params.temperature, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, seed=0
    )
    adapters = engine.adapters_for(choices)
    searches: list[tuple[Prompt, list[Request]]] = []
    for index, prompt in enumerate(prompts):
        problem = prompt.error or admission.problem(prompt, wanted)
        if problem is not None:
            raise ValueError(f"prompts[{index}]: {problem}")
        (request,) = admission.make_requests(prompt, wanted, 0, adapters[index])
        count = num_candidates(params.beam_width, len(request.eos_token_ids))
        request.params = replace(wanted, logprobs=min(count, engine.vocab_size))
        request.beam_options = BeamOptions(params.beam_width, params.length_penalty, params.early_stopping)
        try:
            engine.check_fits(request)
        except ValueError as error:
            raise ValueError(f"prompts[{index}]: {error}") from error
        searches.append((prompt, [request]))
    return searches


def search_output(
    group: Group, params: BeamSearchParams, tokenizer: PreTrainedTokenizerBase | None
) -> BeamSearchOutput:
    """The output of a search that has ended."""
    (request,) = group.samples
    result = request.beam_result or BeamResult([])  # none where its worker has died
    return BeamSearchOutput(
        sequences=[_sequence(request, hypothesis, params, tokenizer) for hypothesis in result.hypotheses],
        request_id=group.group_id,
        prompt=group.prompt.text,
        prompt_token_ids=request.prompt_token_ids,
        kv_blocks_saved=result.kv_blocks_saved,
        policy_version=request.policy_version,
        receipt_id=group.receipt_ids.get(request.policy_version),
        error=_why_not_ended(request),
        lora_request=request.lora_request,
    )


def _sequence(
    request: Request, hypothesis: Hypothesis, params: BeamSearchParams, tokenizer: PreTrainedTokenizerBase | None
) -> BeamSearchSequence:
    output = list(hypothesis.token_ids)
    if hypothesis.stop_token_id is not None and not params.include_stop_str_in_output:
        del output[-1]
    tokens = [*request.prompt_token_ids, *output]

    def text(token_ids: list[int]) -> str:
        decoded = (
            "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        )
        assert isinstance(decoded, str)
        return decoded

    return BeamSearchSequence(
        tokens=tokens,
        text=text(tokens),
        cum_logprob=hypothesis.cum_logprob,
        score=hypothesis.score,
        output_token_ids=list(hypothesis.token_ids),
        output_text=text(output),
        output_logprobs=np.array(hypothesis.logprobs),
        finish_reason=hypothesis.finish_reason,
        stop_reason=hypothesis.stop_token_id,
    )


def _why_not_ended(request: Request) -> str | None:
    if request.finish_reason is FinishReason.ERROR:
        return "the model's logits were not numbers (NaN or infinite)"
    if request.finish_reason is FinishReason.ABORT:
        return f"the search was aborted: {request.stop_reason or 'by abort(), or because the engine cannot go on'}"
    return None
