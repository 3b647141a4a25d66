"""Bad words: the generated text never contains one, whatever tokens could spell it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollout import LLM, SamplingParams
from tests.support.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path, kv_cache_memory="96MiB", max_num_seqs=64)


def towards(llm: LLM, *texts: str) -> dict[int, float]:
    """A bias that makes the model write little else than these texts, in whatever pieces."""
    tokenizer = llm.get_tokenizer()
    ids = {token_id for text in texts for token_id in tokenizer.encode(text)}
    ids |= {token_id for text in texts for char in text for token_id in tokenizer.encode(char)}
    return dict.fromkeys(ids, 12.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad_words", "texts"),
    [
        (["giraffe"], ["giraffe", " giraffe", "Giraffe"]),  # the two forms have different numbers of tokens
        ([" giraffe"], ["giraffe", " giraffe"]),
        (["New York City"], ["New York City", " New York", " City"]),
        (["New York", "New Yam"], [" New York", " New Yam", "New"]),  # two words that share their first tokens
        (["\u4f60\u597d", "\u00e9"], ["\u4f60\u597d", "\u00e9", "\u00e8"]),  # characters of several tokens
    ],
)
def test_the_text_never_contains_a_bad_word(llm: LLM, bad_words: list[str], texts: list[str]) -> None:
    # case SP-04
    prompt = llm.get_tokenizer().encode(f"Say {texts[0]} again:")  # the prompt may contain it
    asked = {"n": 6, "seed": 3, "max_tokens": 24, "logit_bias": towards(llm, *texts), "ignore_eos": True}
    free = llm.generate(prompt, SamplingParams(**asked))[0].outputs  # type: ignore[arg-type]
    assert any(word in completion.text for word in bad_words for completion in free)
    banned = llm.generate(prompt, SamplingParams(bad_words=bad_words, **asked))[0].outputs  # type: ignore[arg-type]
    assert len({tuple(completion.token_ids) for completion in banned}) > 1
    for completion in banned:
        assert completion.finish_reason == "length" and len(completion.token_ids) == 24
        assert not [word for word in bad_words if word in completion.text]


@pytest.mark.slow
def test_tokens_of_a_phrase_are_allowed_unless_they_complete_it(llm: LLM) -> None:
    # case SP-04
    prompt = llm.get_tokenizer().encode("The largest city is")
    asked = {"n": 8, "seed": 5, "max_tokens": 20, "logit_bias": towards(llm, " New York City")}
    outputs = llm.generate(prompt, SamplingParams(bad_words=[" New York City"], **asked))[0].outputs  # type: ignore[arg-type]
    text = "|".join(completion.text for completion in outputs)
    assert "New York" in text and "City" in text and " New York City" not in text


@pytest.mark.slow
def test_a_word_that_begins_in_the_prompt_does_not_count(llm: LLM) -> None:
    # case SP-04
    tokenizer = llm.get_tokenizer()
    params = {"temperature": 0.0, "max_tokens": 3, "logit_bias": {tokenizer.encode("raffe")[0]: 60.0}}
    prompt = tokenizer.encode("I saw a gi")
    first = tokenizer.decode(tokenizer.encode("raffe")[:1])
    plain = llm.generate(prompt, SamplingParams(**params))[0].outputs[0]  # type: ignore[arg-type]
    banned = llm.generate(prompt, SamplingParams(bad_words=[f"gi{first}"], **params))[0].outputs[0]  # type: ignore[arg-type]
    assert plain.text.startswith(str(first)) and banned.token_ids == plain.token_ids
    one = llm.generate(prompt, SamplingParams(bad_words=[str(first)], **params))[0].outputs[0]  # type: ignore[arg-type]
    assert str(first) not in one.text  # also where it would be the first generated token


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_bad_words_hold_across_special_tokens_and_preemption(preemption_mode: str, tmp_path: Path) -> None:
    # cases SP-04, SC-01
    folder = make_tiny_llama(tmp_path, vocab_size=300, tokenizer=True, near_uniform=True, num_layers=1)
    large = LLM(folder, kv_cache_memory="16MiB")
    block = 2 * 2 * 16 * 4 * 16  # k and v, heads, head_dim, bytes, tokens
    swap = {"preemption_mode": "swap", "swap_space": 60 * block} if preemption_mode == "swap" else {}
    small = LLM(folder, kv_cache_memory=30 * block, block_size=4, **swap)
    tokenizer = large.get_tokenizer()
    letters = [*tokenizer.encode("a b e t"), 0, 1, 2]  # with special tokens, which write nothing
    words = ["ab", "t e", "ee"]
    for skip in (True, False):
        params = [
            SamplingParams(
                n=4,
                seed=seed,
                max_tokens=30,
                ignore_eos=True,
                allowed_token_ids=letters,
                bad_words=words,
                skip_special_tokens=skip,
                frequency_penalty=0.5,
            )
            for seed in range(4)
        ]
        wanted = large.generate([[9, seed] for seed in range(4)], params)
        before = small.get_metrics()["num_preemptions_total"]
        outputs = small.generate([[9, seed] for seed in range(4)], params)
        assert small.get_metrics()["num_preemptions_total"] > before
        texts = [completion.text for output in wanted for completion in output.outputs]
        assert all(len(completion.token_ids) == 30 for output in wanted for completion in output.outputs)
        assert not [word for word in words for text in texts if word in text]
        assert any("a" in text for text in texts) and any("b" in text for text in texts)
        if not skip:
            assert any(f"a{end}b" in text for text in texts for end in ("<|im_end|>", "<|im_start|>", "<unk>"))
        for output, expected in zip(outputs, wanted, strict=True):
            for a, b in zip(output.outputs, expected.outputs, strict=True):
                assert a.token_ids == b.token_ids and np.array_equal(a.sampled_logprobs, b.sampled_logprobs)
    assert small.get_metrics()["kv_cache_usage"] == 0


def test_bad_words_without_a_tokenizer_are_refused_before_anything_is_scheduled(
    tiny_model: Callable[..., Path],
) -> None:
    llm = LLM(tiny_model(), kv_cache_memory="4MiB")
    for field, value in {"bad_words": ["x"], "thinking_token_budget": 4}.items():
        with pytest.raises(ValueError, match=f"{field}=.*needs a tokenizer"):
            llm.generate([[5], [6]], [SamplingParams(), SamplingParams(**{field: value})])  # type: ignore[arg-type]
    assert llm.num_unfinished == 0
    with pytest.raises(ValueError, match="bad_words"):
        SamplingParams(bad_words=["\ud800"])
