"""Budgets of reasoning: sections are closed by force once the sample has spent its tokens, and otherwise left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout import LLM, EngineConfig, SamplingParams
from tests.support.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=300, tokenizer=True, near_uniform=True)
    return LLM(folder, kv_cache_memory="16MiB")


@pytest.mark.parametrize("budget", [0, 1, 5, 20])
def test_a_section_that_the_prompt_opens_is_closed_after_the_budget(llm: LLM, budget: int) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    params = SamplingParams(n=8, seed=1, max_tokens=40, ignore_eos=True, thinking_token_budget=budget)
    free = llm.generate(prompt, SamplingParams(n=8, seed=1, max_tokens=40, ignore_eos=True))[0].outputs
    closing = tokenizer.encode("</think>")
    for completion, unlimited in zip(llm.generate(prompt, params)[0].outputs, free, strict=True):
        assert completion.token_ids[:budget] == unlimited.token_ids[:budget]
        assert completion.token_ids[budget : budget + len(closing)] == closing
        assert len(completion.token_ids) == 40 and completion.text.count("</think>") == 1
        forced = slice(budget, budget + len(closing))
        assert (completion.sampled_logprobs[forced] == 0).all() and (completion.kept_mass[forced] < 1).all()


def test_sampling_is_free_where_no_section_is_open_or_the_model_closes_it(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    asked = {"n": 4, "seed": 2, "max_tokens": 30, "ignore_eos": True}
    for text in ("hello", "<think>yes</think>", "</think><thin"):
        prompt = tokenizer.encode(text)
        free = llm.generate(prompt, SamplingParams(**asked))[0].outputs  # type: ignore[arg-type]
        limited = llm.generate(prompt, SamplingParams(thinking_token_budget=3, **asked))[0].outputs  # type: ignore[arg-type]
        assert [a.token_ids for a in limited] == [a.token_ids for a in free]
        assert all(np.array_equal(a.sampled_logprobs, b.sampled_logprobs) for a, b in zip(limited, free, strict=True))


def test_a_section_that_the_output_opens_counts_too_and_eos_cannot_come_instead_of_the_end(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    opening, closing = tokenizer.encode("<think>"), tokenizer.encode("</think>")

    def write(logits, batch):
        for row, output in zip(logits, batch.output_token_ids, strict=True):
            row[:] = -50.0
            place = len(output)
            row[opening[place] if place < len(opening) else 2 if place >= len(opening) + 4 else 60 + place] = 50.0
        return logits

    params = SamplingParams(seed=1, max_tokens=60, thinking_token_budget=4, logits_processors=[write])
    completion = llm.generate([5], params)[0].outputs[0]
    inside = list(range(60 + len(opening), 64 + len(opening)))
    assert completion.token_ids == [*opening, *inside, *closing, 2]
    assert completion.finish_reason == "stop"


def test_the_budget_goes_with_other_masks_or_is_refused(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    closing = tokenizer.encode("</think>")
    prompt = tokenizer.encode("<think>")
    some = [70, 71, *closing]
    params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True, thinking_token_budget=5, allowed_token_ids=some)
    assert llm.generate(prompt, params)[0].outputs[0].token_ids[5 : 5 + len(closing)] == closing
    # A stop id that closes the section waits for min_tokens, as everything does that would end the sample.
    late = SamplingParams(
        seed=1, max_tokens=30, min_tokens=9, thinking_token_budget=2, stop_token_ids=closing[:1], ignore_eos=True
    )
    completion = llm.generate(prompt, late)[0].outputs[0]
    assert len(completion.token_ids) == 10 and completion.token_ids[-1] == closing[0]
    for field, value in {"allowed_token_ids": some[:-1], "bad_words": ["a", "/th"]}.items():
        with pytest.raises(ValueError, match=f"thinking_token_budget=5: {field}"):
            llm.generate(prompt, SamplingParams(thinking_token_budget=5, **{field: value}))  # type: ignore[arg-type]


def test_marks_are_configured_and_must_be_writable(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, tokenizer=True, near_uniform=True)
    llm = LLM(folder, kv_cache_memory="8MiB", reasoning_start="[[", reasoning_end="]]")
    params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True, thinking_token_budget=4)
    tokens = llm.generate("[[", params)[0].outputs[0].token_ids
    assert tokens[4:6] == llm.get_tokenizer().encode("]]")
    broken = LLM(folder, kv_cache_memory="8MiB", reasoning_end="\U0001f6d1")
    with pytest.raises(ValueError, match=r"thinking_token_budget=4: reasoning_end=.* cannot be written"):
        broken.generate("x", params)
    for field in ("reasoning_start", "reasoning_end"):
        with pytest.raises(ValueError, match=f"{field}='' is not valid"):
            EngineConfig(model=str(folder), **{field: ""})  # type: ignore[arg-type]
