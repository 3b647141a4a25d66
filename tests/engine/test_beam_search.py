"""`LLM.beam_search` against transformers' beam search and against all sequences there are."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout import LLM, BeamSearchOutput, BeamSearchParams, BeamSearchSequence, SamplingParams, StructuredOutputsParams
from rollout.weights.target import InFlightMode
from tests.support.adapters import peft_model, saved
from tests.support.beams import Found, brute_force, slow_beam_search
from tests.support.oracle import NEAR_TIE, load_reference, reference_logprobs
from tests.support.policies import Policies, random_prompt, slow_steps
from tests.support.tiny import make_tiny_llama

ENDS = [2, 7, 11]
PROMPTS = [[5, 6], [9, 3, 4, 8, 12, 3, 20], [13] * 4 + [1, 22]]
LONG = BeamSearchParams(3, 400, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 24 tokens, three of which end a sequence: they are reached often."""
    return make_tiny_llama(tmp_path_factory.mktemp("beams"), vocab_size=24, eos_token_id=ENDS, seed=3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="2MiB", block_size=4)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


def row_of(model: PreTrainedModel, temperature: float = 1.0) -> Callable[[tuple[int, ...]], list[float]]:
    """Log-probabilities of the next token, by transformers, each looked up once."""

    @cache
    def row(tokens: tuple[int, ...]) -> list[float]:
        return reference_logprobs(model, tokens, temperature)[-1].tolist()

    return row


def transformers_search(model: PreTrainedModel, prompt: list[int], params: BeamSearchParams) -> list[Found]:
    result: Any = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=ENDS,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = []
    for tokens, score in zip(
        result.sequences[:, len(prompt) :].tolist(), result.sequences_scores.tolist(), strict=True
    ):
        ends = [index for index, token_id in enumerate(tokens) if token_id in ENDS]
        output = tuple(tokens[: ends[0] + 1] if ends else tokens)
        found.append(Found(output, score * len(output) ** params.length_penalty, score))
    return found


def assert_found(sequences: Sequence[BeamSearchSequence], found: Sequence[Found]) -> None:
    """The same sequences with the same scores; only a near tie may change their order."""
    assert [s.score for s in sequences] == pytest.approx([f.score for f in found], abs=NEAR_TIE)
    for index, (mine, theirs) in enumerate(zip(sequences, found, strict=True)):
        neighbours = [found[i].score for i in (index - 1, index + 1) if 0 <= i < len(found)]
        is_near_tie = any(abs(score - theirs.score) < NEAR_TIE for score in neighbours)
        assert is_near_tie or tuple(mine.output_token_ids) == theirs.token_ids
        assert is_near_tie or mine.cum_logprob == pytest.approx(theirs.cum_logprob, abs=1e-3)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
def test_sequences_and_scores_are_those_of_transformers(
    llm: LLM, reference: PreTrainedModel, length_penalty: float, early_stopping: bool | Literal["never"]
):
    # case BS-01
    for width in (2, 5):
        params = BeamSearchParams(width, 10, length_penalty=length_penalty, early_stopping=early_stopping)
        outputs = llm.beam_search(PROMPTS, params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_found(output.sequences, transformers_search(reference, prompt, params))
            for sequence in output.sequences:
                assert sequence.score == sequence.cum_logprob / len(sequence.output_token_ids) ** length_penalty
                assert sequence.cum_logprob == pytest.approx(math.fsum(sequence.output_logprobs), abs=1e-12)


def test_both_ways_to_end_occur(llm: LLM):
    sequences = [s for output in llm.beam_search(PROMPTS, BeamSearchParams(5, 6)) for s in output.sequences]
    assert {sequence.finish_reason for sequence in sequences} == {"stop", "length"}
    for sequence in sequences:
        last = sequence.output_token_ids[-1]
        assert sequence.stop_reason == (last if last in ENDS else None)
        assert (sequence.finish_reason == "stop") == (last in ENDS)


@pytest.fixture(scope="module")
def five_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("five"), vocab_size=5, eos_token_id=2, seed=1)


@pytest.mark.parametrize("prompt", [[3, 1], [0, 1, 3, 4] * 15], ids=["2 tokens", "60 tokens"])
def test_a_width_that_covers_everything_ranks_all_sequences(five_tokens: Path, prompt: list[int]):
    # case BS-01
    llm, row = LLM(five_tokens, kv_cache_memory="2MiB"), row_of(load_reference(five_tokens))
    for length_penalty in (0.0, 1.0, 2.0):
        every = brute_force(row, prompt, 5, 4, {2}, length_penalty)
        assert len(every) == 1 + 4 + 16 + 64 * 5
        params = BeamSearchParams(len(every), 4, length_penalty=length_penalty, early_stopping="never")
        (output,) = llm.beam_search(prompt, params)
        assert_found(output.sequences, every)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_with_a_temperature_the_tempered_distribution_is_searched(
    llm: LLM, reference: PreTrainedModel, temperature: float
):
    params = BeamSearchParams(4, 8, temperature=temperature)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        assert_found(output.sequences, slow_beam_search(row_of(reference, temperature), prompt, 4, 8, ENDS))


def test_without_eos_the_logprobs_are_those_that_score_returns(llm: LLM):
    (output,) = llm.beam_search(PROMPTS[1], BeamSearchParams(4, 30, ignore_eos=True))
    assert {len(sequence.output_token_ids) for sequence in output.sequences} == {30}
    assert any(set(ENDS) & set(sequence.output_token_ids) for sequence in output.sequences)
    for sequence in output.sequences:
        (score,) = llm.score([*PROMPTS[1], *sequence.output_token_ids])
        np.testing.assert_array_equal(sequence.output_logprobs, score.logprobs[len(PROMPTS[1]) - 1 :])


def test_a_width_of_one_is_greedy(llm: LLM):
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(1, 10, ignore_eos=True))
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert [o.sequences[0].output_token_ids for o in outputs] == [o.outputs[0].token_ids for o in greedy]


def test_searches_leave_nothing_behind_and_say_what_they_saved(llm: LLM):
    (output,) = llm.beam_search([3] * 40, BeamSearchParams(4, 20, ignore_eos=True))
    assert 0.5 < output.kv_blocks_saved < 0.75  # at most 3 of 4 blocks
    assert llm.get_metrics()["kv_cache_usage"] == 0
    llm.engine.scheduler.check_integrity()
    (alone,) = llm.beam_search([3] * 40, BeamSearchParams(1, 20, ignore_eos=True))
    assert alone.kv_blocks_saved == 0


def test_max_tokens_ends_at_the_models_length(folder: Path):
    llm = LLM(folder, kv_cache_memory="1MiB", max_model_len=16)
    (output,) = llm.beam_search(list(range(3, 14)), BeamSearchParams(2, 100, ignore_eos=True))
    assert {len(sequence.output_token_ids) for sequence in output.sequences} == {5}


def test_text_and_tokens(tmp_path: Path):
    llm = LLM(make_tiny_llama(tmp_path, tokenizer=True, eos_token_id=list(range(2, 131, 3))), kv_cache_memory="1MiB")
    tokenizer = llm.get_tokenizer()
    for keeps_eos in (False, True):
        params = BeamSearchParams(4, 6, include_stop_str_in_output=keeps_eos, skip_special_tokens=False)
        (output,) = llm.beam_search("hello", params)
        assert output.prompt == "hello"
        assert any(sequence.finish_reason == "stop" for sequence in output.sequences)
        for sequence in output.sequences:
            cut = 1 if sequence.finish_reason == "stop" and not keeps_eos else 0
            shown = sequence.output_token_ids[: len(sequence.output_token_ids) - cut]
            assert sequence.tokens == [*output.prompt_token_ids, *shown]
            assert sequence.output_text == tokenizer.decode(shown)
            assert sequence.text == tokenizer.decode(sequence.tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 1025),
        ("beam_width", True),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("length_penalty", math.inf),
        ("length_penalty", "1"),
        ("length_penalty", 20.5),
        ("early_stopping", "always"),
        ("early_stopping", None),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", None),
        ("structured_outputs", StructuredOutputsParams(regex="a+")),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=f"^{field}=.*(it must be|is not supported)"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, field: value})  # type: ignore[arg-type]


def test_a_bad_prompt_is_refused_before_any_is_scheduled(llm: LLM):
    for bad in ([], [24], [3] * 600):
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            llm.beam_search([[3, 4], bad], BeamSearchParams(2, 3))
    assert llm.num_unfinished == 0


def test_searches_run_with_an_adapter(tmp_path: Path):
    folder = make_tiny_llama(tmp_path / "model", vocab_size=24, eos_token_id=ENDS)
    model = peft_model(folder, 1)
    llm = LLM(folder, kv_cache_memory="2MiB", block_size=4, enable_lora=True)
    adapter = saved(model, tmp_path, "a", 1)
    plain, (output,) = (
        llm.beam_search(PROMPTS[0], BeamSearchParams(3, 8)),
        llm.beam_search(PROMPTS[0], BeamSearchParams(3, 8), adapter),
    )
    assert output.lora_request == adapter
    assert_found(output.sequences, slow_beam_search(row_of(model), PROMPTS[0], 3, 8, ENDS))  # type: ignore[arg-type]
    assert plain[0].sequences[0].score != output.sequences[0].score


def test_logits_that_are_not_numbers_end_a_search_in_error(tmp_path: Path):
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="1MiB")
    with llm.policy_update() as update:
        weights = {name: tensor.clone() for name, tensor in llm.shared_model().named_parameters()}
        weights["model.norm.weight"].data.fill_(math.nan)
        update.load(weights)
    (output,) = llm.beam_search([3, 4], BeamSearchParams(2, 5))
    assert output.sequences == []
    assert output.error is not None and "not numbers" in output.error
    assert llm.get_metrics()["kv_cache_usage"] == 0


def test_the_code_of_the_page_runs(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "beam_search.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, str(page), "exec"), {"MODEL": str(tiny_model(tokenizer=True))})
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("of blocks saved") and second.endswith("of blocks saved")


# In flight


@contextmanager
def in_flight(llm: LLM, prompt: list[int]) -> Iterator[Future[list[BeamSearchOutput]]]:
    """A long search in a thread of its own, that has begun; what the block does happens meanwhile."""
    before = llm.get_metrics()["generation_tokens_total"]
    with slow_steps(llm) as hurry, ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.beam_search, prompt, LONG)
        deadline = time.monotonic() + 240
        while llm.get_metrics()["generation_tokens_total"] < before + 10:
            assert time.monotonic() < deadline, "the search does not begin"
            time.sleep(0.001)
        yield future
        hurry()


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("policies"))


@pytest.mark.parametrize("mode", ["abort", "recompute", "keep"])
def test_a_policy_update_ends_searches_that_have_begun(policies: Policies, mode: InFlightMode):
    llm, prompt = policies.engine(), random_prompt(9)
    whole = llm.beam_search(prompt, LONG)[0]
    with in_flight(llm, prompt) as future, llm.policy_update(in_flight=mode) as update:
        update.load(policies.weights(1))
    (output,) = future.result()
    assert output.error is not None
    assert f"a policy update {'is in progress' if mode == 'abort' else 'has begun'}" in output.error
    assert {sequence.finish_reason for sequence in output.sequences} == {"abort"}
    count = len(output.sequences[0].output_token_ids)
    assert 0 < count < 400
    assert (output.policy_version, output.receipt_id) == (0, whole.receipt_id)
    assert_found(
        output.sequences,
        [
            Found(tuple(s.output_token_ids), s.cum_logprob, s.score)
            for s in policies.engine().beam_search(prompt, BeamSearchParams(3, count, ignore_eos=True))[0].sequences
        ],
    )
    fresh, theirs = (
        llm.beam_search(prompt, BeamSearchParams(3, 9)),
        policies.engine(1).beam_search(prompt, BeamSearchParams(3, 9)),
    )
    assert fresh[0].policy_version == 1
    assert [s.output_token_ids for s in fresh[0].sequences] == [s.output_token_ids for s in theirs[0].sequences]


@pytest.mark.parametrize(("level", "mode"), [(0, "keep"), (0, "recompute"), (1, "recompute")])
def test_a_search_goes_on_after_sleep(policies: Policies, level: int, mode: InFlightMode):
    # contract 1
    llm, prompt = policies.engine(), random_prompt(9)
    (whole,) = llm.beam_search(prompt, LONG)
    with in_flight(llm, prompt) as future:
        llm.sleep(level, mode)
        assert not future.done()
        llm.wake_up()
    (output,) = future.result()
    assert output.error is None
    for mine, theirs in zip(output.sequences, whole.sequences, strict=True):
        assert mine.output_token_ids == theirs.output_token_ids
        np.testing.assert_array_equal(mine.output_logprobs, theirs.output_logprobs)


def test_an_aborted_search_returns_the_best_so_far(policies: Policies):
    llm = policies.engine()
    with in_flight(llm, random_prompt(9)) as future:
        llm.abort(list(llm._delivery.groups))
    (output,) = future.result()
    assert output.error == "the search was aborted: by abort(), or because the engine cannot go on"
    assert [sequence.finish_reason for sequence in output.sequences] == ["abort"] * 3
    assert llm.get_metrics()["kv_cache_usage"] == 0
