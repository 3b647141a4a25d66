"""The forms that a prompt may take, and their token ids."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
PromptLike = str | Sequence[int] | Mapping[str, Any] | Sequence[Message]

_CHAT_OPTIONS = ("chat_template", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
_KEYS = ("prompt", "prompt_token_ids", "messages", *_CHAT_OPTIONS, "cache_salt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with its text where it was given as text. `error` says why it cannot be used."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None
    error: str | None = None


def split_prompts(prompts: Any) -> list[Any]:
    """One prompt, or a list of them, as a list. A list of integers is one prompt of token ids, and a list of messages
    (`{"role": …, "content": …}`) is one conversation. What the prompts are is not checked here, but when each is
    encoded: a bad one fails alone."""
    if isinstance(prompts, (str, Mapping, bytes, bytearray)):
        return [prompts]
    if isinstance(prompts, torch.Tensor):
        return _rows(prompts)
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r} is not valid: it must be a prompt or a list of prompts")
    items = list(prompts)
    if items and (all(_is_token_id(item) for item in items) or all(_is_message(item) for item in items)):
        return [items]
    return items


def _rows(prompts: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of one dimension is one prompt of token ids; of two, a prompt a row, padding included."""
    return list(prompts) if prompts.ndim > 1 else [prompts]


def encode_token_ids(item: PromptLike, name: str) -> Prompt:
    """Token ids where nothing is tokenised. Raises `ValueError` for text and messages."""
    if isinstance(item, Mapping):
        is_text = "prompt_token_ids" not in item and any(item.get(key) is not None for key in ("prompt", "messages"))
    elif isinstance(item, torch.Tensor) or not isinstance(item, Iterable):
        is_text = False
    else:
        is_text = isinstance(item, str) or any(map(_is_message, item))
    if is_text:
        raise ValueError(f"{name} takes token ids only: tokenize text and messages first (`llm.get_tokenizer()`)")
    return encode_prompt(item, None)


def encode_prompt(prompt: PromptLike, tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    """Token ids of one prompt. Raises `ValueError` naming what is wrong with it; the vocabulary is not checked here."""
    if isinstance(prompt, str):
        return Prompt(_encode_text(prompt, tokenizer), prompt)
    if isinstance(prompt, Mapping):
        return _encode_mapping(prompt, tokenizer)
    if isinstance(prompt, (bytes, bytearray)):
        raise ValueError(f"prompt={prompt!r} is not valid: text must be str, not {type(prompt).__name__} (decode it)")
    if isinstance(prompt, torch.Tensor):
        return Prompt(_check_ids(prompt))
    if not isinstance(prompt, Iterable):
        raise ValueError(f"prompt={prompt!r} is not valid: it must be text, token ids, messages or a dict of these")
    items: list[Any] = list(prompt)
    if items and all(_is_message(item) for item in items):
        return Prompt(encode_chat(items, tokenizer))
    return Prompt(_check_ids(items))


def _encode_mapping(prompt: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    """vLLM's `TextPrompt` and `TokensPrompt`, or "messages" with the options of `LLM.chat`; a key whose value is None
    is as good as absent."""
    given = {key: value for key, value in prompt.items() if value is not None}
    unknown = sorted(map(repr, given.keys() - _KEYS))
    if unknown:
        raise ValueError(f"prompt keys {', '.join(unknown)} are not supported: {', '.join(map(repr, _KEYS))} are")
    options = {key: given[key] for key in _CHAT_OPTIONS if key in given}
    if options and "messages" not in given:
        raise ValueError(f"prompt keys {', '.join(map(repr, options))} are not used without 'messages': leave them out")
    salt, text = given.get("cache_salt"), given.get("prompt")
    if salt is not None and not isinstance(salt, str):
        raise ValueError(f"cache_salt={salt!r} is not valid: it must be text")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt={text!r} is not valid: it must be text")
    if "prompt_token_ids" in given:
        return Prompt(_check_ids(given["prompt_token_ids"]), text, salt)
    if "messages" in given:
        return Prompt(encode_chat(given["messages"], tokenizer, **options), text, salt)
    if text is not None:
        return Prompt(_encode_text(text, tokenizer), text, salt)
    raise ValueError(f"prompt={prompt!r} is not valid: it must have 'prompt', 'prompt_token_ids' or 'messages'")


def encode_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, by the tokenizer's chat template; the template alone writes special tokens.

    Messages go to the template as they are, with all their keys (`tool_calls`, `reasoning_content`, …), and so do
    `tools` and `chat_template_kwargs` (`enable_thinking`, …). Raises `ValueError` for what the template refuses.
    """
    options = {
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": tools,
        **dict(chat_template_kwargs or {}),
    }
    return list(_apply_template(messages, tokenizer, tokenize=True, return_dict=False, **options))


def render_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of which `encode_chat` makes token ids."""
    options = {"chat_template": chat_template, "tools": tools, **dict(chat_template_kwargs or {})}
    return _apply_template(messages, tokenizer, add_generation_prompt=add_generation_prompt, tokenize=False, **options)


def _apply_template(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase | None, **options: Any) -> Any:
    if tokenizer is None:
        raise ValueError("messages need a tokenizer, and the model's folder has none: give prompt_token_ids")
    if isinstance(messages, str) or not all(map(_is_message, messages)):
        raise ValueError(f"messages={messages!r} is not valid: it must be a list of dicts with a 'role'")
    if not messages:
        raise ValueError("the conversation is empty: it must have at least 1 message")
    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], **options)
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: content that is None, added to text
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if tokenizer is None:
        raise ValueError("text prompts need a tokenizer, and the model's folder has none: give prompt_token_ids")
    ids = list(tokenizer(text).input_ids)
    bos, bos_token_id = tokenizer.bos_token, tokenizer.bos_token_id
    if isinstance(bos, str) and text.startswith(bos) and ids[:2] == [bos_token_id] * 2:
        return ids[1:]  # a rendered chat template has written the BOS that the tokenizer adds
    return ids


def _is_token_id(item: object) -> bool:
    return isinstance(item, numbers.Integral) and not isinstance(item, bool)


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and "role" in item


def _check_ids(ids: object) -> list[int]:
    if isinstance(ids, torch.Tensor):
        if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(
                f"prompt_token_ids is a tensor of {ids.dtype} and shape {list(ids.shape)}: it must hold integers in "
                "one dimension"
            )
        return ids.tolist()
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Iterable):
        raise ValueError(f"prompt_token_ids={ids!r} is not valid: it must be a list of integers")
    items = list(ids)
    for token_id in items:
        if not _is_token_id(token_id):
            raise ValueError(f"prompt_token_ids holds {token_id!r}: token ids must be integers")
    return [int(token_id) for token_id in items]
