"""The bytes of tokens against the tokenizers' own decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollout.sampling.vocabulary import TokenSearch, Vocabulary, problem
from tests.support.tiny import write_tiny_tokenizer


def sentencepiece_like() -> PreTrainedTokenizerBase:
    """Llama's kind: spaces are written as another character, and every byte has a token of its own."""
    tokens = ["<s>", "<|end|>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "\u2581the", "the", "\u2581\u2581", "a\u2581b", "\u00e9", "\u4f60", "<0x", "x"]
    built = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    built.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    built.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", clean_up_tokenization_spaces=False)


def metaspace() -> PreTrainedTokenizerBase:
    """T5's kind: the first space of a text is left out."""
    tokens = {"<unk>": 0, "\u2581a": 1, "b": 2, "\u2581": 3, "\u2581\u2581\u00e9c": 4}
    built = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
    built.decoder = decoders.Metaspace()
    built.add_special_tokens([AddedToken("<unk>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>", clean_up_tokenization_spaces=False)


def byte_level(folder: Path) -> PreTrainedTokenizerBase:
    write_tiny_tokenizer(folder, 400)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=["byte level", "sentencepiece", "metaspace", "smollm2"])
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path
) -> Vocabulary:
    if request.param == "smollm2":
        tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    elif request.param == "byte level":
        tokenizer = byte_level(tmp_path_factory.mktemp("tokenizer"))
    else:
        tokenizer = metaspace() if request.param == "metaspace" else sentencepiece_like()
    return Vocabulary(tokenizer, len(tokenizer) + 5)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(vocabulary: Vocabulary, data: st.DataObject) -> None:
    known = st.integers(0, vocabulary.vocab_size - 6)
    if vocabulary.vocab_size > 10_000:
        known |= st.integers(0, 400)  # bytes, and special tokens
    ids = data.draw(st.lists(known, max_size=12))
    for tokens, skip in ((vocabulary.written, False), (vocabulary.plain, True)):
        text = vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)
        assert isinstance(text, str)  # one list of ids, so not a list of texts
        ours = b"".join(tokens[token_id] for token_id in ids).decode(errors="replace")
        if "\ufffd" not in ours:
            assert ours.endswith(text)
            assert not ours.removesuffix(text).strip(" ")  # some leave out the first spaces of a text
        else:  # decoders differ in how much of a run of wrong bytes one replacement character stands for
            assert "\ufffd" in text


def test_ids_beyond_the_tokenizer_write_nothing(vocabulary: Vocabulary) -> None:
    assert vocabulary.written[-5:] == vocabulary.plain[-5:] == [b""] * 5


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(max_size=4) | st.text("ab\u00e9", max_size=4).map(str.encode), min_size=1, max_size=30),
    st.text("ab\u00e9", min_size=1, max_size=3).map(str.encode),
)
def test_tokens_are_found_by_their_bytes(tokens: list[bytes], text: bytes) -> None:
    search = TokenSearch(tokens)
    for cut in range(len(text)):
        rest = text[cut:]  # may begin in the middle of a character
        found = search.beginning_with(rest)
        assert sorted(found) == [i for i, token in enumerate(tokens) if token.startswith(rest)]
    assert sorted(search.containing(text)) == [i for i, token in enumerate(tokens) if text in token]
    assert search.containing(text).dtype == np.int64


def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    pieces = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()  # "##b" is "b", but not at the beginning of a text
    for tokenizer in (PreTrainedTokenizerFast(tokenizer_object=built) for built in (words, pieces)):
        assert "does not say what each token writes" in (problem(tokenizer) or "")
        with pytest.raises(ValueError, match="does not say what each token writes"):
            Vocabulary(tokenizer, 3)
    assert problem(sentencepiece_like()) is None
