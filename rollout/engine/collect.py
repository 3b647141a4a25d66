"""From a group of finished requests to the output that the user gets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout.engine.detokenize import Detokenizer
from rollout.engine.sample_text import SampleText
from rollout.outputs import CompletionOutput, Logprob, PolicyVersionSpan, RequestOutput
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
    resumes: RequestOutput | None = None  # whose unfinished samples these are; the others stay as they are there

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        samples: list[Request],
        receipt: Receipt | None,
        detokenizer: Detokenizer | None,
        streams: bool = False,
    ) -> Group:
        """`streams`: the text is wanted while it grows."""
        group = cls(samples[0].group_id, prompt, samples, {}, detokenizer, num_unfinished=len(samples))
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
        stop = text.append(token_ids) if token_ids else None
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
            request_id=self.group_id,
            prompt=self.prompt.text,
            prompt_token_ids=leader.prompt_token_ids,
            outputs=outputs,
            finished=self.num_unfinished == 0,
            num_cached_tokens=leader.num_cached_tokens if self.resumes is None else self.resumes.num_cached_tokens,
            policy_version=max(versions),
            receipt_id=self.receipt_ids.get(max(versions)),
            receipt_ids={version: self.receipt_ids[version] for version in sorted(versions & self.receipt_ids.keys())},
            lora_request=leader.lora_request,
            cache_salt=leader.cache_salt,
        )

    def completion(
        self, index: int, tokenizer: PreTrainedTokenizerBase | None, first: int = 0, text: str | None = None
    ) -> CompletionOutput:
        """A sample as it stands, from its output token `first` on; with all of its text, or with `text`."""
        sample = self.samples[index]
        token_ids = sample.output_token_ids[first:]
        if text is None:
            text = self._text(sample)
        raw = np.array(sample.raw_logprobs[first:], np.float32)
        logprobs = None
        if sample.params.logprobs is not None:
            logprobs = [{token_id: Logprob(logprob)} for token_id, logprob in zip(token_ids, raw.tolist(), strict=True)]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            raw_logprobs=raw,
            sampled_logprobs=np.array(sample.sampled_logprobs[first:], np.float32),
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
        )

    def _text(self, sample: Request) -> str:
        growing = self.texts.get(sample.request_id)
        if growing is not None:
            return growing.text
        return "" if self.detokenizer is None else self.detokenizer.text(sample.output_token_ids, sample.params)


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
