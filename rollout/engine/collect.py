"""From a group of finished requests to the output that the user gets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout.config import LogprobsMode
from rollout.engine.detokenize import Detokenizer
from rollout.engine.sample_text import SampleText
from rollout.engine.token_texts import TEXT_CONTEXT, DecodedTexts
from rollout.logprobs import PromptLogprobs, SampleLogprobs
from rollout.outputs import CompletionOutput, PolicyVersionSpan, RequestOutput
from rollout.prompts import Prompt
from rollout.request import Request
from rollout.sampling_options import RequestOutputKind
from rollout.weights.receipt import Receipt


@dataclass(slots=True)
class Group:
    """The samples of one prompt while they run."""

    group_id: str
    prompt: Prompt
    samples: list[Request]
    receipt_ids: dict[int, str]  # policy version -> id of the receipt of its weights
    detokenizer: Detokenizer | None = None
    texts: dict[str, SampleText] = field(default_factory=dict)  # by request id, of those whose text is needed early
    num_unfinished: int = 0
    logprobs_mode: LogprobsMode = "raw_logprobs"
    prompt_logprobs: PromptLogprobs | None = None  # once all of them are known
    resumes: RequestOutput | None = None  # whose unfinished samples these are; the others stay as they are there

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        samples: list[Request],
        receipt: Receipt | None,
        detokenizer: Detokenizer | None,
        logprobs_mode: LogprobsMode,
        streams: bool = False,
    ) -> Group:
        """`streams`: the text is wanted while it grows."""
        group = cls(
            samples[0].group_id,
            prompt,
            samples,
            {},
            detokenizer,
            num_unfinished=len(samples),
            logprobs_mode=logprobs_mode,
        )
        group.note_receipt(receipt)
        params = samples[0].params
        shows_growth = streams and params.detokenize and params.output_kind is not RequestOutputKind.FINAL_ONLY
        if detokenizer is not None and (params.stop_strings or shows_growth):
            for sample in samples:
                text = group.texts[sample.request_id] = SampleText(detokenizer.growing(params), params)
                text.begin(sample.output_token_ids)
        return group

    def note_receipt(self, receipt: Receipt | None) -> None:
        """Remembers the receipt of the policy that samples at present."""
        if receipt is not None and receipt.policy_version not in self.receipt_ids:
            self.receipt_ids[receipt.policy_version] = receipt.id

    def append(self, request: Request, token_ids: list[int]) -> str | None:
        """Looks for stop strings in a sample's new tokens. Returns the one that was found."""
        text = self.texts.get(request.request_id)
        if text is None:
            return None
        stop = text.append(_written(request, token_ids)) if token_ids else None
        if request.is_finished:
            text.finish()
        return stop

    def output(
        self, tokenizer: PreTrainedTokenizerBase | None, outputs: list[CompletionOutput] | None = None
    ) -> RequestOutput:
        """The output of the group as it stands: with all samples, or with `outputs`."""
        leader = self.samples[0]
        if outputs is None:
            outputs = [self.completion(index, tokenizer) for index in range(len(self.samples))]
            outputs = outputs if self.resumes is None else joined(self.resumes, outputs)
        versions = {span.version for output in outputs for span in output.policy_versions} or {leader.policy_version}
        return RequestOutput(
            request_id=self.group_id if self.resumes is None else self.resumes.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=leader.prompt_token_ids,
            outputs=outputs,
            finished=self.num_unfinished == 0,
            num_cached_tokens=leader.num_cached_tokens if self.resumes is None else self.resumes.num_cached_tokens,
            policy_version=max(versions),
            receipt_id=self.receipt_ids.get(max(versions)),
            receipt_ids={version: self.receipt_ids[version] for version in sorted(versions & self.receipt_ids.keys())},
            lora_request=leader.lora_request,
            prompt_logprobs=self._prompt_logprobs(tokenizer),
            logprobs_mode=self.logprobs_mode,
            cache_salt=leader.cache_salt,
        )

    def num_output_tokens(self) -> list[int]:
        """Of each sample, as it stands; the lengths of those of a resumed output that had ended come last."""
        ended = [] if self.resumes is None else [each for each in self.resumes.outputs if not is_unfinished(each)]
        return [sample.num_output_tokens for sample in self.samples] + [len(each.token_ids) for each in ended]

    def completion(
        self, index: int, tokenizer: PreTrainedTokenizerBase | None, first: int = 0, text: str | None = None
    ) -> CompletionOutput:
        """A sample as it stands, from its output token `first` on; with all of its text, or with `text`."""
        sample = self.samples[index]
        token_ids = sample.output_token_ids
        if text is None:
            text = self._text(sample)
        raw = np.array(sample.raw_logprobs[first:], np.float32)
        sampled = np.array(sample.sampled_logprobs[first:], np.float32)
        logprobs = None
        if sample.top_logprobs is not None:
            logprobs = SampleLogprobs(
                token_ids[first:],
                raw if self.logprobs_mode == "raw_logprobs" else sampled,
                sample.top_logprobs.rows(first),
                chosen_token_ids=sample.params.logprob_token_ids or (),
                texts=_texts(tokenizer, sample),
                before=token_ids[max(0, first - TEXT_CONTEXT) : first],
            )
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids[first:],
            raw_logprobs=raw,
            sampled_logprobs=sampled,
            kept_mass=np.array(sample.kept_mass[first:], np.float32),
            entropy=np.array(sample.entropy[first:], np.float32),
            finish_reason=None if sample.finish_reason is None else str(sample.finish_reason),
            stop_reason=sample.stop_reason,
            seed=sample.seed,
            sample_index=sample.sample_index,
            policy_versions=_spans(sample.policy_spans, sample.num_output_tokens, first),
            parent=sample.parent,
            branch_position=sample.branch_position,
            num_forced_tokens=min(sample.num_forced_tokens, sample.num_output_tokens),
            logprobs=logprobs,
            logprobs_mode=self.logprobs_mode,
        )

    def _text(self, sample: Request) -> str:
        growing = self.texts.get(sample.request_id)
        if growing is not None:
            return growing.text
        if self.detokenizer is None:
            return ""
        return self.detokenizer.text(_written(sample, sample.output_token_ids), sample.params)

    def _prompt_logprobs(self, tokenizer: PreTrainedTokenizerBase | None) -> PromptLogprobs | None:
        """Of the sample that knows most of them: one that was aborted early may have none."""
        if self.resumes is not None and self.samples[0].params.prompt_logprobs is None:
            return self.resumes.prompt_logprobs
        if self.prompt_logprobs is None:
            sample = max(self.samples, key=lambda sample: len(sample.prompt_logprobs))
            found = prompt_logprobs_of(sample, tokenizer)
            if found is None or len(found) < sample.num_prompt_tokens:
                return found
            self.prompt_logprobs = found
        return self.prompt_logprobs


def _written(sample: Request, token_ids: list[int]) -> list[int]:
    """The last tokens of a sample without the one that has only ended it: its text is no part of the sample's, as in
    vLLM, unless the parameters say so."""
    if sample.ends_with_stop_token and not sample.params.include_stop_str_in_output:
        return token_ids[:-1]
    return token_ids


def prompt_logprobs_of(sample: Request, tokenizer: PreTrainedTokenizerBase | None) -> PromptLogprobs | None:
    """Of a request's prompt, as far as it is computed; None where they were not asked for."""
    if sample.prompt_top_logprobs is None:
        return None
    top = sample.prompt_top_logprobs.rows()
    return PromptLogprobs(
        sample.prompt_token_ids[: len(top.ranks) + 1],
        np.array(sample.prompt_logprobs, np.float32),
        top,
        texts=_texts(tokenizer, sample),
        is_prompt=True,
    )


def _texts(tokenizer: PreTrainedTokenizerBase | None, sample: Request) -> DecodedTexts | None:
    return None if tokenizer is None or not sample.params.detokenize else DecodedTexts(tokenizer)


def is_unfinished(output: CompletionOutput) -> bool:
    """Whether there is something to resume: it was aborted, or is still on its way."""
    return output.finish_reason in (None, "abort")


def joined(before: RequestOutput, resumed: list[CompletionOutput]) -> list[CompletionOutput]:
    """All samples of an output, the unfinished ones of then as they are now."""
    now = iter(resumed)
    return [replace(next(now), index=output.index) if is_unfinished(output) else output for output in before.outputs]


def _spans(starts: list[tuple[int, int]], num_tokens: int, first: int) -> list[PolicyVersionSpan]:
    """(version, first token) pairs, in order, as spans that cover the output from token `first` on, counted from it."""
    ends = [*(start for _, start in starts), num_tokens][1:]  # a sample that never ran has no start
    spans = (
        PolicyVersionSpan(version, max(start - first, 0), end - first)
        for (version, start), end in zip(starts, ends, strict=True)
    )
    return [span for span in spans if span.start < span.end]
