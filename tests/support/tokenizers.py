"""Small real tokenizers of each kind, made with the `tokenizers` library."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<unk>", "<s>", "</s>", "<|sep|>"]  # ids 0 to 3 of every tokenizer here
WORDS = ["the", "cat", "sat", "naive", "d", "ř", "evo", ".", ",", "'", "n", "t", "你", "é"]


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes, merges within and across characters, added tokens that are no bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("ä", "½"), ("ð", "Ł"), ("ðŁ", "§"), ("ł", "å"), ("<", "E")]
    tokens = [*SPECIALS, *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, [AddedToken("two words", special=False), AddedToken("<think>", special=False)])


def byte_level_with_bos() -> PreTrainedTokenizerFast:
    """The same, with a post-processor that puts `<s>` before every text, and a chat template that does so too."""
    tokenizer = byte_level()
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}<|sep|>"
        "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return tokenizer


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama-2 style: `▁` for spaces, a leading space left out, bytes for unknown characters."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = _unigram(decoder, byte_fallback=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _finished(tokenizer, [AddedToken("<think>", special=False)])


def gemma_like() -> PreTrainedTokenizerFast:
    """Byte-fallback without the leading space."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = _unigram(decoder, byte_fallback=True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return _finished(tokenizer, [])


BYTE_FALLBACK_ORDERS = {
    "replace, bytes": [decoders.Replace("▁", " "), decoders.ByteFallback()],
    "bytes, metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
    "bytes, fuse, metaspace": [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()],
    "bytes, fuse, replace": [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")],
    "metaspace, bytes, fuse": [decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()],
}


def byte_fallback(order: str) -> PreTrainedTokenizerFast:
    """The steps of SentencePiece's decoder in an order of `BYTE_FALLBACK_ORDERS`."""
    tokenizer = _unigram(decoders.Sequence(BYTE_FALLBACK_ORDERS[order]), byte_fallback=True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return _finished(tokenizer, [])


def metaspace() -> PreTrainedTokenizerFast:
    """T5 style: a `▁` prepended and taken away again, and no bytes."""
    tokenizer = _unigram(decoders.Metaspace(), byte_fallback=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return _finished(tokenizer, [])


def wordpiece() -> PreTrainedTokenizerFast:
    tokens = [*SPECIALS, *WORDS, *("##" + word for word in WORDS), "'s", "##'s"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return _finished(tokenizer, [])


def end_of_word() -> PreTrainedTokenizerFast:
    """BPE with `</w>` at the end of words: a kind that is decoded through a window."""
    tokens = [*SPECIALS, *WORDS, *(word + "</w>" for word in WORDS)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return _finished(tokenizer, [])


def _unigram(decoder: decoders.Decoder, byte_fallback: bool) -> Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    pieces = [*SPECIALS, *bytes_, "▁", "▁▁", "a▁b", *WORDS, *("▁" + word for word in WORDS)]
    model = models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, byte_fallback)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return tokenizer


def _finished(tokenizer: Tokenizer, added: list[AddedToken]) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
