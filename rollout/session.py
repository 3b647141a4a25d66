"""Sessions: conversations of several turns as token ids, in which nothing that was sampled is tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.chat_template import ChatTemplate, describe_difference
from rollout.engine.admission import LoRAChoice, OnInvalid, params_each
from rollout.outputs import CompletionOutput, PolicyVersionSpan, RequestOutput, check_whole
from rollout.prompts import Message, encode_prompt
from rollout.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rollout.llm import LLM


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens `start` to `end` (exclusive) of a session: sampled together, or given together."""

    start: int
    end: int
    is_sampled: bool
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None  # with `sample_index` and the tokens before it replays the turn
    sample_index: int | None = None
    policy_versions: tuple[PolicyVersionSpan, ...] = ()  # counted from `start`


@dataclass(slots=True)
class _Chat:
    """Where a session stands in its chat template."""

    messages: list[Message]  # without the answer that is being sampled
    rendered: str  # the text of these up to where the answer begins
    answer_start: int  # token at which it begins


@dataclass(slots=True)
class _Columns:
    """What was returned with the tokens; at tokens that were given it is 0, and 1 in `kept_mass`."""

    raw_logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)

    def extend(self, sample: CompletionOutput | None, num_tokens: int) -> None:
        for name in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy"):
            given = [1.0 if name == "kept_mass" else 0.0] * num_tokens
            getattr(self, name).extend(given if sample is None else getattr(sample, name).tolist())

    def copy(self) -> _Columns:
        return _Columns(self.raw_logprobs[:], self.sampled_logprobs[:], self.kept_mass[:], self.entropy[:])


class Session:
    """A conversation, or any text in turns, that only ever grows at its end.

        session = llm.session([{"role": "user", "content": "What is 2 + 2?"}])
        session.generate(params)
        session.add([{"role": "user", "content": "And 3 + 3?"}])
        session.generate(params)
        trainer(session.token_ids, session.loss_mask, session.sampled_logprobs)

    `add` appends what the chat template puts after an answer: the end of the assistant's turn, unless the sample has
    ended with it, the new messages, and the beginning of the next answer. `add_text` and `add_token_ids` append
    anything else. The prompt of each turn is all that the session holds, so that the prefix cache has it already.

    Where the chat template would now render the turns before in another way than they were sampled (without their
    reasoning, say) `add` raises `ValueError` with the difference. With `strict=False` it appends all the same: the
    model then sees what it sampled, and not what the template makes of it; see `preserves_prefixes`.
    """

    def __init__(
        self,
        llm: LLM,
        messages: Sequence[Message] | None = None,
        *,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        lora_request: LoRAChoice = None,
        strict: bool = True,
    ) -> None:
        """The options of the chat template are those of `LLM.chat`. Raises `ValueError` for messages that it refuses,
        and for messages where the model has no tokenizer."""
        self.llm = llm
        self.token_ids: list[int] = []
        self.turns: list[Turn] = []
        self.cache_salt = cache_salt
        self.lora_request = lora_request
        self._template_options: dict[str, Any] = {
            "chat_template": chat_template,
            "tools": tools,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
        }
        self._strict = strict
        self._chat: _Chat | None = None
        self._columns = _Columns()
        if messages is not None:
            self.add(messages)

    @property
    def is_chat(self) -> bool:
        """Whether it was begun with messages, to which a chat template appends."""
        return self._chat is not None

    @property
    def loss_mask(self) -> list[int]:
        """For each token 1 if it was sampled, 0 if it was given."""
        return [int(turn.is_sampled) for turn in self.turns for _ in range(turn.start, turn.end)]

    @property
    def raw_logprobs(self) -> np.ndarray:
        """float32 [len(token_ids)], as in `CompletionOutput`; 0 where the token was given."""
        return np.array(self._columns.raw_logprobs, np.float32)

    @property
    def sampled_logprobs(self) -> np.ndarray:
        """float32 [len(token_ids)], as in `CompletionOutput`; 0 where the token was given."""
        return np.array(self._columns.sampled_logprobs, np.float32)

    @property
    def kept_mass(self) -> np.ndarray:
        """float32 [len(token_ids)], as in `CompletionOutput`; 1 where the token was given."""
        return np.array(self._columns.kept_mass, np.float32)

    @property
    def entropy(self) -> np.ndarray:
        """float32 [len(token_ids)], as in `CompletionOutput`; 0 where the token was given."""
        return np.array(self._columns.entropy, np.float32)

    def add(self, messages: Sequence[Message]) -> list[int]:
        """Appends the messages of others (user, tool, system), all those before the next answer. Returns their ids.

        Raises `ValueError`, changing nothing, for messages that the template refuses, for a template that would render
        the turns before anew (see the class), where no answer was sampled since the last call, and in a session that
        was begun with text or token ids, of which the template knows nothing.
        """
        if self._chat is not None:
            return self._add_to_chat(self._chat, messages)
        if self.token_ids:
            raise ValueError("messages cannot follow text or token ids that no chat template has rendered")
        template = self._template()
        ids = template.encode(messages)
        chat = _Chat(list(messages), template.render(messages, add_generation_prompt=True), len(ids))
        self._append_given(ids)
        self._chat = chat
        return ids

    def add_text(self, text: str) -> list[int]:
        """Appends text, which is tokenised by itself: as a prompt where it is the first, else without special tokens.
        Returns its ids. In a chat it is part of the answer, such as the result of a tool that is called within it."""
        tokenizer = self.llm.get_tokenizer()
        if self.token_ids:
            ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        else:
            ids = encode_prompt(text, tokenizer).token_ids
        self._append_given(ids)
        return ids

    def add_token_ids(self, token_ids: Sequence[int]) -> None:
        """Appends token ids as they are. Raises `ValueError` for what is no list of integers, and for
        ids that the model does not have."""
        self._append_given(encode_prompt({"prompt_token_ids": token_ids}, None).token_ids)

    def generate(self, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Samples the next turn, or goes on with one that was cut off, and appends it.

        Raises as `LLM.generate` does, with the session as it was.
        """
        return generate_sessions([self], sampling_params, use_tqdm=False)[0]

    def fork(self) -> Session:
        """Another session that begins as this one; both go on by themselves, and share what is cached."""
        other = Session(self.llm, cache_salt=self.cache_salt, lora_request=self.lora_request, strict=self._strict)
        other.token_ids, other.turns = self.token_ids[:], self.turns[:]
        other._template_options = self._template_options
        other._columns = self._columns.copy()
        if self._chat is not None:
            other._chat = _Chat(self._chat.messages[:], self._chat.rendered, self._chat.answer_start)
        return other

    def append_sample(self, sample: CompletionOutput | RequestOutput) -> None:
        """Appends a turn that was sampled elsewhere, from this session's token ids as its prompt.

        An output with its one sample tells what its prompt was, and is refused with `ValueError` where that is not what
        the session holds; a sample alone does not. Raises `ValueError` for the delta of a stream too.
        """
        check_whole(sample, "sample")
        if isinstance(sample, RequestOutput):
            if len(sample.outputs) != 1:
                raise ValueError(f"sample has {len(sample.outputs)} outputs: give the one that is to be appended")
            if list(sample.prompt_token_ids) != self.token_ids:
                raise ValueError(
                    f"sample is of another prompt, of {len(sample.prompt_token_ids)} tokens: it must be the "
                    f"{len(self.token_ids)} that the session holds"
                )
            (sample,) = sample.outputs
        start = len(self.token_ids)
        self.token_ids = [*self.token_ids, *sample.token_ids]
        self._columns.extend(sample, len(sample.token_ids))
        self.turns.append(
            Turn(
                start,
                len(self.token_ids),
                is_sampled=True,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                seed=sample.seed,
                sample_index=sample.sample_index,
                policy_versions=tuple(sample.policy_versions),
            )
        )

    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.llm.get_tokenizer(), **self._template_options)

    def _append_given(self, ids: list[int]) -> None:
        if not ids:
            return
        size = self.llm.vocab_size
        outside = next((token_id for token_id in ids if not 0 <= token_id < size), None)
        if outside is not None:
            raise ValueError(f"token_ids holds {outside}: ids must be from 0 to {size - 1}")
        start = len(self.token_ids)
        self.token_ids = [*self.token_ids, *ids]
        self._columns.extend(None, len(ids))
        self.turns.append(Turn(start, len(self.token_ids), is_sampled=False))

    def _add_to_chat(self, chat: _Chat, messages: Sequence[Message]) -> list[int]:
        if len(self.token_ids) == chat.answer_start:
            raise ValueError("the last messages were not answered: add all messages before an answer together")
        template = self._template()
        answer = template.decode(self.token_ids[chat.answer_start :])
        before, suffix = template.after_answer(chat.messages, answer, messages)
        difference = describe_difference(chat.rendered + answer, before)
        if self._strict and difference is not None:
            raise ValueError(
                f"the chat template does not leave the turns before as they were sampled: {difference} (strict=False "
                "appends all the same)"
            )
        ids = self._without_overlap(template.encode_suffix(suffix))
        answered = [*chat.messages, {"role": "assistant", "content": answer}, *messages]
        start = len(self.token_ids) + len(ids)
        self._append_given(ids)
        self._chat = _Chat(answered, before + suffix, start)
        return ids

    def _is_special(self, ids: list[int]) -> bool:
        added = self.llm.get_tokenizer().added_tokens_decoder
        return bool(ids) and all(token_id in added and added[token_id].special for token_id in ids)

    def _without_overlap(self, suffix: list[int]) -> list[int]:
        """What follows an answer, without the ids that a sample ends with already: one that has ended by itself, or
        that was cut off behind the end of its turn, which `ignore_eos` lets it write."""
        last = self.turns[-1]
        if last.is_sampled and (last.finish_reason == "stop" or self._is_special(suffix[:1])):
            for length in range(min(len(suffix), last.end - last.start), 0, -1):
                if self.token_ids[-length:] == suffix[:length]:
                    return suffix[length:]
        return suffix


def generate_sessions(
    sessions: Sequence[Session],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    use_tqdm: bool | None = None,
    on_invalid: OnInvalid = "raise",
) -> list[RequestOutput]:
    """Samples the next turn of many sessions of one engine together, and appends each to its session.

    `sampling_params`, one for all or one a session, ask for one sample (`n=1`): `Session.fork` makes several sessions
    of one. With `on_invalid="return"` a session that has no room left, say, stays as it is, and its output has `error`
    set. Raises as `LLM.generate` does, with no session changed.
    """
    if not sessions:
        return []
    llm = sessions[0].llm
    if any(session.llm is not llm for session in sessions):
        raise ValueError("the sessions are not of one LLM: generate those of each by themselves")
    if len({id(session) for session in sessions}) != len(sessions):
        raise ValueError("a session is in the list twice: use fork() to sample several turns of it")
    if sampling_params is not None:
        for params in params_each(sampling_params, len(sessions)):
            if params.n != 1:
                raise ValueError(f"n={params.n} is not valid in a session: it must be 1 (fork the session for more)")
    outputs = llm.generate(
        [{"prompt_token_ids": session.token_ids, "cache_salt": session.cache_salt} for session in sessions],
        sampling_params,
        lora_request=[session.lora_request for session in sessions],
        use_tqdm=use_tqdm,
        on_invalid=on_invalid,
    )
    for session, output in zip(sessions, outputs, strict=True):
        if output.error is None:
            session.append_sample(output.outputs[0])
    return outputs
