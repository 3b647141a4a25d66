"""What single tokens add to a text, for each kind of tokenizer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from rollout.engine.token_texts import DecodedTexts, KnownTexts
from tests.support import tokenizers

TEXT = "\u4f60\u597d" * 9 + "the cat\n\n x=1 \u4f60\u597d \U0001f9d1\u200d\U0001f680 d\u0159evo e\u0301"
KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": tokenizers.byte_level,
    "sentencepiece": tokenizers.sentencepiece,
    "gemma_like": tokenizers.gemma_like,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_the_tokens_make_the_text(kind: str) -> None:
    """A token within a character adds nothing, and the one that ends it the whole of it."""
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    texts = DecodedTexts(tokenizer)
    added = [texts.after(ids[max(0, place - 16) : place], token_id) for place, token_id in enumerate(ids)]
    assert "".join(added).removeprefix(" ") == TEXT
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(added) and "" in added and "\U0001f9d1" in "".join(added)
    known = KnownTexts()
    for place, token_id in enumerate(ids):
        known.learn(texts, ids[max(0, place - 16) : place], token_id)
    again = pickle.loads(pickle.dumps(known))
    assert [again.after(ids[max(0, place - 16) : place], token_id) for place, token_id in enumerate(ids)] == added


@pytest.mark.parametrize("kind", [tokenizers.sentencepiece, tokenizers.gemma_like, tokenizers.metaspace])
def test_a_token_keeps_the_space_before_it(kind: Callable[[], Any]) -> None:
    tokenizer = kind()
    assert DecodedTexts(tokenizer).after((), tokenizer.convert_tokens_to_ids("▁the")) == " the"


def test_bytes_that_are_no_character_are_shown_by_the_token_after_them() -> None:
    tokenizer = tokenizers.byte_level()
    texts, ids = DecodedTexts(tokenizer), tokenizer.encode("\u4f60x", add_special_tokens=False)
    assert texts.after((), ids[0]) == "" and texts.after(ids[:1], ids[-1]) == "\N{REPLACEMENT CHARACTER}x"
    assert tokenizer.decode([ids[0], ids[-1]]) == "\N{REPLACEMENT CHARACTER}x"


def test_special_tokens_show_their_names() -> None:
    tokenizer = tokenizers.byte_level()
    (token_id,) = tokenizer.encode("<|sep|>", add_special_tokens=False)
    assert DecodedTexts(tokenizer).after((), token_id) == "<|sep|>"
