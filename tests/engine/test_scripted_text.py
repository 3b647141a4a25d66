"""Text and stop strings of whole samples, with the tokens that come written down: by a logits processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rollout import LLM, CompletionOutput, RequestOutputKind, SamplingParams
from tests.support.tiny import make_tiny_llama
from tests.support.tokenizers import byte_level, gemma_like, sentencepiece

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXT = "naive \u4f60\u597d \U0001f9d1\u200d\U0001f680 d\u0159"
EMOJI = "\U0001f9d1"


class Script:
    """Lets only the next token of a list be drawn."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)

    def __call__(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        chosen = torch.full_like(logits, -torch.inf)
        for row, output in enumerate(batch.output_token_ids):
            chosen[row, self.token_ids[len(output)]] = 0.0
        return chosen


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "gemma_like", "smollm2"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> LLM:
    kinds: dict[str, Callable[[], Any]] = {
        "byte_level": byte_level,
        "sentencepiece": sentencepiece,
        "gemma_like": gemma_like,
        "smollm2": lambda: AutoTokenizer.from_pretrained(smollm2_path),
    }
    tokenizer = kinds[request.param]()
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=max(300, len(tokenizer)), hidden_size=16)
    tokenizer.save_pretrained(folder)
    return LLM(folder, kv_cache_memory="2MiB")


def ids_of(llm: LLM, text: str) -> list[int]:
    return list(llm.get_tokenizer()(text, add_special_tokens=False).input_ids)


def run(llm: LLM, prompt: list[int], token_ids: list[int], **params: Any) -> CompletionOutput:
    """The sample of these tokens, generated and streamed; both are the same, so that nothing was taken back."""
    asked = SamplingParams(
        **{"max_tokens": len(token_ids), "ignore_eos": True, **params}, logits_processors=[Script(token_ids)]
    )
    whole = llm.generate(prompt, asked)[0].outputs[0]
    deltas = [delta.outputs[0] for delta in llm.stream(prompt, replace(asked, output_kind=RequestOutputKind.DELTA))]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.token_ids
    assert not any(REPLACEMENT in delta.text for delta in deltas[:-1])
    assert whole.token_ids == token_ids[: len(whole.token_ids)]
    return whole


def test_a_sample_that_is_cut_anywhere_has_whole_characters_and_says_where_one_was_cut(llm: LLM) -> None:
    # case ST-07
    tokenizer: Any = llm.get_tokenizer()
    ids = ids_of(llm, TEXT)
    for end in range(1, len(ids) + 1):
        text = run(llm, [5, 6], ids[:end]).text
        whole = text.rstrip(REPLACEMENT)
        assert TEXT.startswith(whole) and len(text) - len(whole) < 4
        decoded = tokenizer.decode(ids[:end])
        assert decoded.rstrip(REPLACEMENT) == whole or decoded.count(REPLACEMENT) > text.count(REPLACEMENT)
    assert run(llm, [5, 6], ids).text == TEXT == tokenizer.decode(ids)


def test_a_prompt_that_ends_within_a_character_never_shows(llm: LLM) -> None:
    # case ST-07
    tokenizer: Any = llm.get_tokenizer()
    ids = ids_of(llm, f"naive {EMOJI} d")
    begin = next(i for i in range(len(ids)) if REPLACEMENT in tokenizer.decode(ids[: i + 1]))
    end = next(i for i in range(len(ids)) if EMOJI in tokenizer.decode(ids[: i + 1]))
    assert begin < end
    for cut in range(begin + 1, end + 1):
        asked = SamplingParams(max_tokens=len(ids) - cut, ignore_eos=True, logits_processors=[Script(ids[cut:])])
        deltas = [
            delta.outputs[0].text
            for delta in llm.stream(ids[:cut], replace(asked, output_kind=RequestOutputKind.DELTA))
        ]
        assert deltas[0].startswith(REPLACEMENT) and "".join(deltas).lstrip(REPLACEMENT) == " d"
        assert "".join(deltas) == llm.generate(ids[:cut], asked)[0].outputs[0].text
        assert "naive" not in "".join(deltas) and EMOJI not in "".join(deltas)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_of_any_tokens_end_the_sample_where_they_begin(llm: LLM, include: bool) -> None:
    # cases ST-01, ST-07
    tokenizer: Any = llm.get_tokenizer()
    prompt, ids = ids_of(llm, "the cat d"), ids_of(llm, TEXT)
    for stop, start in (("ve", 3), ("\u4f60", 6), ("\u597d \U0001f9d1", 7), ("\u200d\U0001f680", 10), ("d\u0159", 13)):
        stopped = run(llm, prompt, ids, stop=["zz", stop], include_stop_str_in_output=include)
        assert stopped.text == TEXT[: start + (len(stop) if include else 0)]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert stop in tokenizer.decode(stopped.token_ids) and stop not in tokenizer.decode(stopped.token_ids[:-1])
    for stop in ("cat d", "dnaive", "t d"):  # of the prompt, and across its end
        unstopped = run(llm, prompt, ids, stop=stop, include_stop_str_in_output=include)
        assert (unstopped.text, unstopped.finish_reason) == (TEXT, "length")


def test_a_stop_string_is_not_looked_for_in_the_first_min_tokens_tokens(llm: LLM) -> None:
    # case ST-03
    ids = ids_of(llm, "naive")
    twice, prompt = ids + ids, [5] * 50
    first = run(llm, prompt, twice, stop="naive")
    assert len(first.token_ids) == len(ids) and first.text == ""
    for min_tokens in range(len(ids), len(twice)):
        later = run(llm, prompt, twice, stop="naive", min_tokens=min_tokens)
        assert later.finish_reason == "stop" and len(later.token_ids) == len(twice)
        assert later.text.strip() == "naive"
    assert run(llm, prompt, twice, stop="naive", min_tokens=len(twice)).finish_reason == "length"
