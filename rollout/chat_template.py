"""Chat templates: what they render, what they put between turns, and whether they leave the turns before alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rollout.prompts import Message, encode_chat, render_chat

_SENTINEL = "sentinel5f2b9c"  # stands for the end of what was sampled; letters and digits, that no template changes
_CONTEXT = 40  # characters shown around a difference


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template, or another one, with the options that every rendering gets."""

    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The text of a conversation. Raises `ValueError` for messages that the template refuses."""
        return render_chat(messages, self.tokenizer, add_generation_prompt=add_generation_prompt, **self._options())

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        return encode_chat(messages, self.tokenizer, **self._options())

    def after_answer(self, messages: Sequence[Message], answer: str, new: Sequence[Message]) -> tuple[str, str]:
        """What the template makes of `messages`, the assistant's `answer` and `new` ones.

        Returns the text up to the end of the answer, and the text from there to where the next answer begins. Raises
        `ValueError` for a template that does not render the answer, or renders it more than once.
        """
        answered = [*messages, {"role": "assistant", "content": answer + _SENTINEL}, *new]
        before, *after = self.render(answered, add_generation_prompt=True).split(_SENTINEL)
        if len(after) != 1:
            raise ValueError(f"the chat template renders the end of an answer {len(after)} times: it must do so once")
        return before, after[0]

    def decode(self, token_ids: list[int]) -> str:
        """The text of an answer, as it would stand in a message."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # one list of ids, so not a list of texts
        return text.strip()

    def encode_suffix(self, text: str) -> list[int]:
        """Token ids of a text that follows an answer: without what a tokenizer puts before texts."""
        encoded = self.tokenizer(_SENTINEL + text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded.offset_mapping]
        if len(_SENTINEL) in starts:
            return list(encoded.input_ids[starts.index(len(_SENTINEL)) :])
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _options(self) -> dict[str, Any]:
        return {
            "chat_template": self.chat_template,
            "tools": self.tools,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """Whether a chat template renders the beginning of a conversation unchanged when turns are added; true if so.

    `differences` and `refused` say, for each kind of messages that was tried, what changes, or why the template does
    not take them.
    """

    differences: dict[str, str]
    refused: dict[str, str]

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self:
            return "the chat template preserves prefixes"
        parts = [f"{kind}: {difference}" for kind, difference in self.differences.items()]
        return "the chat template does not preserve prefixes. With " + "; with ".join(parts)


def preserves_prefixes(
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PrefixReport:
    """Tells whether a chat template only ever appends: whether the tokens of a turn stay as they were sampled.

    Templates that do not (which leave out the reasoning of earlier turns, say) render another beginning once a turn is
    added: a conversation that is rendered anew is then not the one that was sampled, its cached prefix is lost, and
    the sampled logprobs belong to other tokens. Tried are plain turns, a system message, reasoning as a field and in
    the text, and a tool call with its result. Raises `ValueError` where the template takes no plain turns.
    """
    template = ChatTemplate(tokenizer, chat_template, tools, chat_template_kwargs or {})
    differences: dict[str, str] = {}
    refused: dict[str, str] = {}
    for kind, conversation in _CONVERSATIONS.items():
        try:
            found = _first_difference(template, conversation)
        except ValueError as error:
            if kind == _PLAIN:
                raise
            refused[kind] = str(error)
            continue
        if found is not None:
            differences[kind] = found
    return PrefixReport(differences, refused)


def describe_difference(before: str, after: str) -> str | None:
    """Where a text that was `before` is another one in `after`, in words; None where only white space is."""
    here = [(i, character) for i, character in enumerate(before) if not character.isspace()]
    there = [(i, character) for i, character in enumerate(after) if not character.isspace()]
    for (i, old), (j, new) in zip(here, there, strict=False):
        if old != new:
            return f"{_excerpt(before, i)} became {_excerpt(after, j)}"
    if len(here) == len(there):
        return None
    return f"{_excerpt(before, len(before))} became {_excerpt(after, len(after))}"


def _excerpt(text: str, position: int) -> str:
    return repr(text[max(0, position - _CONTEXT) : position + _CONTEXT])


def _first_difference(template: ChatTemplate, conversation: Sequence[Message]) -> str | None:
    """In what the first rendering differs that does not begin as an earlier one, of fewer messages, does."""
    earlier: list[str] = []
    for count in range(1, len(conversation) + 1):
        rendered = template.render(conversation[:count], add_generation_prompt=False)
        for text in earlier:
            if not rendered.startswith(text):
                return _describe_beginning(text, rendered)
        earlier.append(rendered)
        if count < len(conversation) and conversation[count]["role"] == "assistant":
            earlier.append(template.render(conversation[:count], add_generation_prompt=True))
    return None


def _describe_beginning(text: str, rendered: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(text, rendered, strict=False)) if a != b), len(rendered))
    return f"{_excerpt(text, same)} became {_excerpt(rendered, same)}"


_PLAIN = "plain turns"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
_CONVERSATIONS: dict[str, list[Message]] = {
    _PLAIN: [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "second answer"},
        {"role": "user", "content": "third question"},
    ],
    "a system message": [
        {"role": "system", "content": "instructions"},
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "second answer"},
        {"role": "user", "content": "third question"},
    ],
    "reasoning_content": [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer", "reasoning_content": "first thoughts"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "second answer", "reasoning_content": "second thoughts"},
        {"role": "user", "content": "third question"},
    ],
    "reasoning in the text": [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "<think>\nfirst thoughts\n</think>\n\nfirst answer"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "<think>\nsecond thoughts\n</think>\n\nsecond answer"},
        {"role": "user", "content": "third question"},
    ],
    "a tool call": [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
    ],
}
