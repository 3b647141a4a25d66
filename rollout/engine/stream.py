"""Outputs while samples grow: what each step brought, as the requests' `output_kind` asks for it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from rollout.engine.collect import Group
from rollout.engine.delivery import Delivery
from rollout.engine.interface import Engine
from rollout.outputs import CompletionOutput, RequestOutput
from rollout.sampling_options import RequestOutputKind


def stream(
    engine: Engine,
    delivery: Delivery,
    groups: Sequence[Group],
    refused: Iterable[RequestOutput],
    tokenizer: PreTrainedTokenizerBase | None,
) -> Generator[RequestOutput, None, None]:
    """Yields what was refused, then runs the engine until `groups` are finished, and yields what is new of each after
    every step.

    Other threads may step the engine too; while it is held (a policy update that keeps requests, sleep) this waits. The
    groups that are unfinished when the iterator is closed are aborted, and nothing else.
    """
    streams = [GroupStream(group, tokenizer) for group in groups]

    def has_news() -> bool:
        return any(each.has_news for each in streams)

    try:
        yield from refused
        while streams:
            engine.wait_while_held(has_news)
            with engine.lock:
                if not has_news() and not engine.is_held:
                    delivery.step()
                outputs = [output for each in streams if (output := each.take()) is not None]
            streams = [each for each in streams if not each.is_done]
            yield from outputs
    finally:
        delivery.release(groups)


class GroupStream:
    """What was told of a group's samples, and what is new of them. `take` is called with the engine's lock."""

    def __init__(self, group: Group, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._group = group
        self._tokenizer = tokenizer
        self._kind = group.samples[0].params.output_kind
        self._num_told = [0] * len(group.samples)  # tokens of each sample
        self._told_end = [False] * len(group.samples)
        self._told_prompt = False  # its logprobs

    @property
    def is_done(self) -> bool:
        """Whether the end of every sample was told."""
        return all(self._told_end)

    @property
    def has_news(self) -> bool:
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self._group.num_unfinished == 0 and not self.is_done
        return any(map(self._is_new, range(len(self._num_told))))

    def take(self) -> RequestOutput | None:
        """What there is to tell, which then is told."""
        if not self.has_news:
            return None
        if self._kind is RequestOutputKind.DELTA:
            changed = filter(self._is_new, range(len(self._num_told)))
            completions = [self._completion(index, self._num_told[index]) for index in changed]
        else:
            completions = [self._completion(index, 0) for index in range(len(self._num_told))]
        for index, sample in enumerate(self._group.samples):
            self._num_told[index], self._told_end[index] = sample.num_output_tokens, sample.is_finished
        output = self._group.output(self._tokenizer, completions)
        if self._kind is RequestOutputKind.DELTA:
            output.is_delta = True
            if self._told_prompt:
                output.prompt_logprobs = None
            self._told_prompt = self._told_prompt or output.prompt_logprobs is not None
        return output

    def _is_new(self, index: int) -> bool:
        sample = self._group.samples[index]
        return sample.num_output_tokens > self._num_told[index] or sample.is_finished > self._told_end[index]

    def _completion(self, index: int, first: int) -> CompletionOutput:
        """A sample from its output token `first` on, with the text that goes along with it."""
        is_delta = self._kind is RequestOutputKind.DELTA
        text, shown = self._group.texts.get(self._group.samples[index].request_id), None
        if text is not None:
            new = text.take()
            shown = new if is_delta else text.shown
        completion = self._group.completion(index, self._tokenizer, first, shown)
        completion.is_delta = is_delta
        return completion
