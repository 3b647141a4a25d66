"""Text as it grows, for each kind of tokenizer: against `tokenizer.decode`, and against SentencePiece's rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rollout import SamplingParams
from rollout.engine.detokenize import Detokenizer, SpelledText, WindowText
from rollout.engine.sample_text import SampleText
from tests.support import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXT = "naive \u4f60\u597d \U0001f9d1\u200d\U0001f680 d\u0159evo\n\n  x=1 t.e\u0301\u00e9"
EMOJI = "\U0001f9d1"
KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": tokenizers.byte_level,
    "sentencepiece": tokenizers.sentencepiece,
    "gemma_like": tokenizers.gemma_like,
    "metaspace": tokenizers.metaspace,
    "wordpiece": tokenizers.wordpiece,
    "end_of_word": tokenizers.end_of_word,
}
MADE: dict[str, tuple[Any, Detokenizer]] = {name: (make(), Detokenizer(make())) for name, make in KINDS.items()}


def decoded(tokenizer: Any, ids: list[int], skip_special_tokens: bool = True) -> str:
    """What `tokenizer.decode` says, with SentencePiece's own rule for bytes that are no characters."""
    text = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    tokens = [token for token in tokenizer.convert_ids_to_tokens(ids) if token is not None]
    if not any(re.fullmatch("<0x..>", token) for token in tokens):
        return text
    pieces: list[bytes] = []
    for token in tokens:
        if skip_special_tokens and token in tokenizers.SPECIALS:
            continue
        byte = re.fullmatch("<0x(..)>", token)
        pieces.append(bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode())
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    text = re.sub("[\udc80-\udcff]", REPLACEMENT, text)  # one for each byte that is in no character
    return text.removeprefix(" ") if tokenizer.decode([tokenizer.convert_tokens_to_ids("▁the")]) == "the" else text


def grown(detokenizer: Detokenizer, ids: list[int], params: SamplingParams) -> list[str]:
    """What each token shows, and what the end does."""
    growing = detokenizer.growing(params)
    return [*(growing.append(token_id) for token_id in ids), growing.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150)
def test_joined_deltas_are_the_whole_text_for_any_ids(kind: str, data: st.DataObject) -> None:
    # case ST-07
    tokenizer, detokenizer = MADE[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=20))  # also ids that no token has
    params = SamplingParams(skip_special_tokens=data.draw(st.booleans()))
    deltas = grown(detokenizer, ids, params)
    assert "".join(deltas) == detokenizer.text(ids, params) == decoded(tokenizer, ids, params.skip_special_tokens)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma_like"])
@given(data=st.data())
@settings(max_examples=100)
def test_no_delta_of_a_real_text_holds_half_a_character(kind: str, data: st.DataObject) -> None:
    # case ST-07
    tokenizer, detokenizer = MADE[kind]
    text = data.draw(st.text(st.sampled_from(TEXT), min_size=1, max_size=15))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    deltas = grown(detokenizer, ids, SamplingParams())
    assert not any(REPLACEMENT in delta for delta in deltas) and deltas[-1] == ""
    assert "".join(deltas) == tokenizer.decode(ids) == text
    for cut in range(len(ids)):  # the sample ends after each token
        shown = grown(detokenizer, ids[:cut], SamplingParams())
        assert text.startswith("".join(shown[:-1])) and set(shown[-1]) <= {REPLACEMENT}
        assert "".join(shown).rstrip(REPLACEMENT) == "".join(shown[:-1])


def test_bytes_that_no_character_can_begin_with_are_shown_at_once() -> None:
    # case ST-07
    tokenizer, detokenizer = MADE["byte_level"]
    of = {byte: tokenizer.convert_tokens_to_ids(chr(byte)) for byte in (0xE4, 0xFF, 0xBD)} | {0x41: 36 + 4}
    assert tokenizer.decode([of[0x41]]) != REPLACEMENT
    assert grown(detokenizer, [of[0xFF]], SamplingParams()) == [REPLACEMENT, ""]
    assert grown(detokenizer, [of[0xBD], of[0xE4]], SamplingParams()) == [REPLACEMENT, "", REPLACEMENT]
    letter = tokenizer.decode([of[0x41]])
    assert grown(detokenizer, [of[0xE4], of[0x41]], SamplingParams()) == ["", REPLACEMENT + letter, ""]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma_like", "smollm2"])
def test_a_prompt_that_ends_within_a_character_shows_nothing_of_itself(kind: str, smollm2_path: Path) -> None:
    # case ST-07
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_path) if kind == "smollm2" else MADE[kind][0]
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer(EMOJI + " the cat", add_special_tokens=False).input_ids
    num_emoji = next(i for i in range(1, len(ids)) if tokenizer.decode(ids[:i]).endswith(EMOJI))
    cuts = [cut for cut in range(1, num_emoji + 1) if tokenizer.decode(ids[:cut]).strip()]
    assert len(cuts) > 1
    for cut in cuts:  # the prompt holds some bytes of the emoji, and at last all of them
        output = ids[cut:]
        deltas = grown(detokenizer, output, SamplingParams())
        assert "".join(deltas) == detokenizer.text(output, SamplingParams()) == decoded(tokenizer, output)
        assert EMOJI not in "".join(deltas)
        assert "".join(deltas).lstrip(REPLACEMENT) in (" the cat", "the cat")
        assert (REPLACEMENT in deltas[0]) == (cut < num_emoji)  # at once: no character can begin with these bytes


def test_a_real_tokenizer_streams_whole_characters(smollm2_path: Path) -> None:
    # case ST-07
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_path)
    detokenizer = Detokenizer(tokenizer)
    ids = list(tokenizer(TEXT).input_ids)
    deltas = grown(detokenizer, ids, SamplingParams())
    assert "".join(deltas) == TEXT and all(REPLACEMENT not in delta for delta in deltas)
    everything = list(range(0, len(tokenizer), 7))
    for skip_special_tokens in (True, False):
        params = SamplingParams(skip_special_tokens=skip_special_tokens)
        expected = tokenizer.decode(everything, skip_special_tokens=skip_special_tokens)
        assert "".join(grown(detokenizer, everything, params)) == detokenizer.text(everything, params) == expected


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma_like"])
def test_a_stop_string_is_found_with_the_token_that_completes_its_last_character(kind: str) -> None:
    # cases ST-01, ST-07
    tokenizer, detokenizer = MADE[kind]
    ids = tokenizer(f"naive {EMOJI} the", add_special_tokens=False).input_ids
    last = next(i for i in range(len(ids)) if EMOJI in tokenizer.decode(ids[: i + 1]))
    params = SamplingParams(stop=f" {EMOJI}", max_tokens=None)
    text, taken = SampleText(detokenizer.growing(params), params), ""
    for i, token_id in enumerate(ids[: last + 1]):
        assert (text.append([token_id]) is not None) == (i == last)
        taken += text.take()
    assert taken == text.text == "naive"


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma_like", "metaspace", "wordpiece"])
def test_the_window_says_the_same_as_the_spelling(kind: str) -> None:
    """Tokenizers of no known kind are decoded through a window: right for text, in any of these too."""
    tokenizer, _ = MADE[kind]
    ids = tokenizer("the cat sat. naive, d the", add_special_tokens=False).input_ids
    params = SamplingParams()
    window = WindowText(tokenizer, params)
    parts = [window.append(token_id) for token_id in ids] + [window.finish()]
    assert "".join(parts) == tokenizer.decode(ids)
    assert isinstance(Detokenizer(tokenizer).growing(params), SpelledText)


@pytest.mark.parametrize("kind", tokenizers.BYTE_FALLBACK_ORDERS)
def test_whole_and_growing_text_agree_whatever_the_order_of_a_decoders_steps(kind: str) -> None:
    tokenizer = tokenizers.byte_fallback(kind)
    detokenizer = Detokenizer(tokenizer)
    rng = np.random.default_rng(0)
    broken = tokenizer.convert_tokens_to_ids(["<0x7D>", "<0xE4>", "<0x41>", "▁the"])
    rows = [broken, *rng.integers(0, len(tokenizer), (50, 24)).tolist(), *rng.integers(4, 260, (20, 24)).tolist()]
    for ids, skips in product(rows, (True, False)):
        params = SamplingParams(skip_special_tokens=skips)
        text = detokenizer.text(ids, params)
        assert text == "".join(grown(detokenizer, ids, params))
        stopping = SamplingParams(skip_special_tokens=skips, stop=["}", "the"])
        sample, shown = SampleText(detokenizer.growing(stopping), stopping), ""
        for token_id in ids:
            sample.append([token_id])
            shown += sample.take()
            if sample.stop is not None:
                break
        sample.finish()
        shown += sample.take()
        assert shown == sample.text == (text if sample.stop is None else re.split("}|the", text)[0])
    ids = tokenizer("the cat sat. 你好, é d the", add_special_tokens=False).input_ids
    assert detokenizer.text(ids, SamplingParams()) == tokenizer.decode(ids)


def test_a_window_that_never_becomes_whole_is_bounded() -> None:
    class Broken:
        longest = 0

        def decode(self, token_ids: list[int], **_: object) -> str:
            self.longest = max(self.longest, len(token_ids))
            return REPLACEMENT * len(token_ids)

    tokenizer = Broken()
    window = WindowText(tokenizer, SamplingParams())  # type: ignore[arg-type]
    parts = [window.append(0) for _ in range(200)] + [window.finish()]
    assert "".join(parts) == REPLACEMENT * 200 and tokenizer.longest < 40


def test_special_tokens_are_spaced_or_not_where_the_kind_of_tokenizer_puts_spaces() -> None:
    tokenizer, detokenizer = MADE["wordpiece"]
    ids = tokenizer.convert_tokens_to_ids(["<s>", "<|sep|>", "the", "cat", "</s>", "</s>"])
    spaced, joined = (
        SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces) for spaces in (True, False)
    )
    assert detokenizer.text(ids, spaced) == tokenizer.decode(ids) == "<s> <|sep|> the cat </s> </s>"
    assert detokenizer.text(ids, joined) == "".join(grown(detokenizer, ids, joined)) == "<s><|sep|> the cat </s></s>"
    for kind in ("byte_level", "sentencepiece", "metaspace"):  # these put none
        tokenizer, detokenizer = MADE[kind]
        ids = tokenizer.convert_tokens_to_ids(["<s>", "<|sep|>", "the", "</s>"])
        assert detokenizer.text(ids, spaced) == detokenizer.text(ids, joined) == "<s><|sep|>the</s>"


def test_spaces_before_punctuation_stay_whatever_the_tokenizer_would_clean_up() -> None:
    tokenizer: Any = tokenizers.metaspace()
    tokenizer.clean_up_tokenization_spaces = True
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁cat", "▁."])
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.text(ids, SamplingParams()) == "".join(grown(detokenizer, ids, SamplingParams())) == "the cat ."
    assert tokenizer.decode(ids) == "the cat."
