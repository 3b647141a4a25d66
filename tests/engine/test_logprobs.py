"""`logprobs`, `prompt_logprobs` and `logprob_token_ids` against transformers in float32."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from rollout.logprobs import Logprobs
from tests.support.oracle import load_reference, reference_logits, reference_logprobs
from tests.support.tiny import make_tiny_llama

PROMPT = [5, 9, 77, 31]
VOCAB = 131


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tie=False, tokenizer=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="8MiB", block_size=8, max_logprobs=-1)


def sample(llm: LLM, prompt: Sequence[int] = PROMPT, **params: Any) -> CompletionOutput:
    asked: dict[str, Any] = {"max_tokens": 24, "seed": 3, "ignore_eos": True}
    return llm.generate(list(prompt), SamplingParams(**(asked | params)))[0].outputs[0]


def logits_after(reference: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """float64 [len(output), vocab]: row i is over output[i]."""
    return reference_logits(reference, [*prompt, *output])[len(prompt) - 1 : -1].double().numpy()


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def check_prompt(output: RequestOutput, reference: PreTrainedModel, num_top: int) -> None:
    """One entry a token, the first None; the values and ranks are those of the whole sequence in one pass."""
    ids, entries = output.prompt_token_ids, output.prompt_logprobs
    assert entries is not None and len(entries) == len(ids) and entries[0] is None
    logprobs = reference_logprobs(reference, ids).numpy()
    for place in range(1, len(ids)):
        entry, row = entries[place], logprobs[place - 1]
        assert entry is not None
        order = np.argsort(-row, kind="stable")[:num_top].tolist()
        assert list(entry) == [ids[place], *(token_id for token_id in order if token_id != ids[place])]
        for token_id, found in entry.items():
            assert found.logprob == pytest.approx(row[token_id], abs=1e-4)
            assert found.rank == 1 + (row > row[token_id]).sum()


@pytest.mark.parametrize("asked", [0, 1, 5, True, -1])
def test_every_entry_has_the_sampled_token_and_the_most_likely_ones(
    asked: int, llm: LLM, reference: PreTrainedModel
) -> None:
    # case LP-07
    completion = sample(llm, temperature=1.5, logprobs=asked)
    num_top = VOCAB if asked == -1 else int(asked)
    assert completion.logprobs is not None and len(completion.logprobs) == 24
    rows = logits_after(reference, PROMPT, completion.token_ids)
    expected, outside = log_softmax(rows), 0
    for token_id, row, logprobs, entry in zip(completion.token_ids, rows, expected, completion.logprobs, strict=True):
        order = np.argsort(-row, kind="stable")[:num_top].tolist()
        assert list(entry) == [token_id, *(other for other in order if other != token_id)]  # no duplicates
        outside += token_id not in order
        for other, found in entry.items():
            assert found.logprob == pytest.approx(logprobs[other], abs=1e-4)
            assert found.rank == 1 + (row > row[other]).sum()
    assert outside == 0 if asked == -1 else outside > 3
    sum_of_sampled = sum(entry[i].logprob for i, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(sum_of_sampled, abs=1e-9)


def test_no_logprobs_asked_for_are_none(llm: LLM) -> None:
    # case LP-07
    completion = sample(llm)
    assert completion.logprobs is None and completion.top_token_ids is None and completion.token_ranks is None
    assert completion.chosen_logprobs is None and completion.top_logprobs is None
    assert len(completion.raw_logprobs) == 24  # the arrays are there in any case


def test_the_compact_arrays_are_those_of_the_entries(llm: LLM) -> None:
    completion = sample(llm, logprobs=4, logprob_token_ids=[7, 2, 7])
    top_ids, top_logprobs, ranks = completion.top_token_ids, completion.top_logprobs, completion.token_ranks
    chosen, entries = completion.chosen_logprobs, completion.logprobs
    assert top_ids is not None and top_logprobs is not None and ranks is not None
    assert chosen is not None and entries is not None
    assert (top_ids.shape, top_logprobs.shape, ranks.shape, chosen.shape) == ((24, 4), (24, 4), (24,), (24, 2))
    assert (top_ids.dtype, top_logprobs.dtype, ranks.dtype) == (np.int32, np.float32, np.int32)
    assert entries.chosen_token_ids == (7, 2)
    for place, (token_id, entry) in enumerate(zip(completion.token_ids, entries, strict=True)):
        assert entry[token_id].logprob == completion.raw_logprobs[place] and entry[token_id].rank == ranks[place]
        for other, logprob in zip(top_ids[place].tolist(), top_logprobs[place].tolist(), strict=True):
            assert entry[other].logprob == logprob
        assert [entry[7].logprob, entry[2].logprob] == chosen[place].tolist()


def test_named_tokens_come_at_every_step(llm: LLM, reference: PreTrainedModel) -> None:
    wanted = [130, 0, 44]
    completion = sample(llm, logprob_token_ids=wanted)
    expected = log_softmax(logits_after(reference, PROMPT, completion.token_ids))
    assert completion.logprobs is not None
    np.testing.assert_allclose(completion.logprobs.chosen_logprobs, expected[:, wanted], atol=1e-4)
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert list(entry) == list(dict.fromkeys([token_id, *wanted]))
        assert all(entry[other].rank is None for other in wanted if other != token_id)


def test_the_entries_are_used_like_a_list(llm: LLM) -> None:
    entries = sample(llm, logprobs=2).logprobs
    assert isinstance(entries, Logprobs)
    as_list = list(entries)
    assert len(entries) == len(as_list) == 24
    assert entries == as_list and as_list == entries and entries != as_list[1:] and entries != [*as_list[:-1], {}]
    assert entries[-1] == as_list[23] and entries[3:7] == as_list[3:7] and entries[::-5] == as_list[::-5]
    assert as_list[2] in entries and entries.index(as_list[2]) == 2 and list(reversed(entries)) == as_list[::-1]
    assert repr(entries) == repr(as_list) and all(type(entry) is dict for entry in as_list)
    with pytest.raises(IndexError):
        entries[24]


def test_outputs_are_pickled_without_the_tokenizer(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=20, seed=1, logprobs=3, prompt_logprobs=1, temperature=1.8)
    output = llm.generate([8, 122, 124, 40], params)[0]
    data = pickle.dumps(output)
    again = pickle.loads(data)
    assert len(data) < 100_000
    assert again.prompt_logprobs == output.prompt_logprobs
    for mine, its in zip(again.outputs, output.outputs, strict=True):
        assert mine.logprobs == its.logprobs and its.top_token_ids is not None
        assert np.array_equal(mine.top_token_ids, its.top_token_ids)
    assert pickle.loads(pickle.dumps(again)).outputs[1].logprobs == output.outputs[1].logprobs


def test_outputs_as_json_have_no_infinities(folder: Path, llm: LLM) -> None:
    processed = LLM(folder, kv_cache_memory="4MiB", logprobs_mode="processed_logprobs")
    params = SamplingParams(max_tokens=6, logprobs=4, prompt_logprobs=1, top_k=2, seed=1, stop_token_ids=[7])
    for engine, has_infinities in ((llm, False), (processed, True)):
        output = engine.generate(PROMPT, params)[0]
        as_dict = output.to_dict()
        again = json.loads(json.dumps(as_dict, allow_nan=False))
        entries = output.outputs[0].logprobs
        assert entries is not None
        assert any(math.isinf(found.logprob) for entry in entries for found in entry.values()) == has_infinities
        for entry, plain in zip(entries, again["outputs"][0]["logprobs"], strict=True):
            assert {int(key) for key in plain} == set(entry)
            for token_id, found in entry.items():
                value = -9999.0 if math.isinf(found.logprob) else found.logprob
                assert plain[str(token_id)] == {
                    "logprob": value,
                    "rank": found.rank,
                    "decoded_token": found.decoded_token,
                }
        assert again["outputs"][0]["raw_logprobs"] == output.outputs[0].raw_logprobs.tolist()
        assert again["prompt_logprobs"][0] is None and again["outputs"][0]["policy_versions"][0]["version"] == 0
        assert again["logprobs_mode"] == engine.config.logprobs_mode


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_the_mode_says_which_distribution_the_entries_are_of(
    mode: str, temperature: float, folder: Path, reference: PreTrainedModel
) -> None:
    # case LP-01
    llm = LLM(folder, kv_cache_memory="4MiB", logprobs_mode=mode)
    output = llm.generate(PROMPT, SamplingParams(temperature=temperature, max_tokens=40, seed=3, logprobs=3))[0]
    completion = output.outputs[0]
    assert output.logprobs_mode == completion.logprobs_mode == mode
    rows, ids = logits_after(reference, PROMPT, completion.token_ids), completion.token_ids
    raw, tempered = log_softmax(rows), log_softmax(rows / temperature)
    places = np.arange(len(ids))
    np.testing.assert_allclose(completion.raw_logprobs, raw[places, ids], atol=1e-4)
    np.testing.assert_allclose(completion.sampled_logprobs, tempered[places, ids], atol=1e-4)
    np.testing.assert_allclose(completion.tempered_logprobs, tempered[places, ids], atol=1e-4)
    expected = raw if mode == "raw_logprobs" else tempered
    assert completion.logprobs is not None
    for place, entry in enumerate(completion.logprobs):
        for token_id, found in entry.items():
            assert found.logprob == pytest.approx(expected[place, token_id], abs=1e-4)
    trainer = tempered[places, ids]
    assert np.abs(np.exp(completion.sampled_logprobs - trainer) - 1).max() < 1e-3
    assert completion.cumulative_logprob == pytest.approx(expected[places, ids].sum(), abs=1e-3)


def kept_by(row: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Which tokens filters leave of a row of tempered logits, bool [vocab]: the slow obvious thing."""
    order = np.argsort(-row, kind="stable")
    if top_k:
        order = order[:top_k]
    order = order[row[order] > -np.inf]
    p = np.exp(row[order] - row[order].max())
    p /= p.sum()
    order = order[(np.cumsum(p) - p) < top_p]
    order = order[np.exp(row[order] - row[order[0]]) >= min_p]
    kept = np.zeros(len(row), bool)
    kept[order] = True
    return kept


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9}])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_raw_tempered_and_processed_logprobs_are_exact_under_filters(
    mode: str, filters: dict[str, Any], folder: Path, reference: PreTrainedModel
) -> None:
    # case LP-02
    llm = LLM(folder, kv_cache_memory="4MiB", logprobs_mode=mode)
    asked: dict[str, Any] = {"temperature": 0.8, "logprobs": 5, "logprob_token_ids": [3, 60], **filters}
    completion = sample(llm, max_tokens=40, **asked)
    ids, places = completion.token_ids, np.arange(40)
    rows = logits_after(reference, PROMPT, ids)
    raw, tempered = log_softmax(rows), log_softmax(rows / 0.8)
    kept = np.array([kept_by(row / 0.8, **filters) for row in rows])
    processed = np.where(kept, tempered - np.log((np.exp(tempered) * kept).sum(-1, keepdims=True)), -np.inf)
    np.testing.assert_allclose(completion.raw_logprobs, raw[places, ids], atol=1e-4)
    np.testing.assert_allclose(completion.tempered_logprobs, tempered[places, ids], atol=1e-4)
    np.testing.assert_allclose(completion.sampled_logprobs, processed[places, ids], atol=1e-4)
    difference = completion.sampled_logprobs - tempered[places, ids]
    np.testing.assert_allclose(difference, -np.log(completion.kept_mass), atol=1e-4)
    expected = raw if mode == "raw_logprobs" else processed
    outside = 0
    assert completion.logprobs is not None
    for place, entry in enumerate(completion.logprobs):
        assert {3, 60, ids[place], *np.argsort(-rows[place], kind="stable")[:5].tolist()} == set(entry)
        for token_id, found in entry.items():
            outside += math.isinf(found.logprob)
            assert found.logprob == pytest.approx(expected[place, token_id], abs=1e-4)
    assert outside == 0 if mode == "raw_logprobs" else outside > 10
    assert completion.cumulative_logprob == pytest.approx(expected[places, ids].sum(), abs=1e-3)


def test_a_greedy_sample_was_drawn_from_one_token(folder: Path) -> None:
    llm = LLM(folder, kv_cache_memory="4MiB", logprobs_mode="processed_logprobs")
    completion = sample(llm, temperature=0, logprobs=3, logprob_token_ids=[9])
    assert completion.logprobs is not None
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token_id] == Logprob(0.0, 1, entry[token_id].decoded_token)
        assert all(found.logprob == -math.inf for other, found in entry.items() if other != token_id)


def test_processed_entries_leave_out_what_may_not_come(folder: Path, reference: PreTrainedModel) -> None:
    llm = LLM(folder, kv_cache_memory="4MiB", logprobs_mode="processed_logprobs", max_logprobs=-1)
    banned = [2, 20, 21, 22, 23]
    params = {"min_tokens": 10, "stop_token_ids": banned[1:], "ignore_eos": False, "max_tokens": 10}
    completion = sample(llm, logprobs=-1, temperature=0.9, **params)
    rows = logits_after(reference, PROMPT, completion.token_ids) / 0.9
    rows[:, banned] = -np.inf
    expected = log_softmax(rows)
    assert completion.logprobs is not None
    for place, entry in enumerate(completion.logprobs):
        assert {other for other, found in entry.items() if found.logprob == -math.inf} == set(banned)
        found = np.array([entry[token_id].logprob for token_id in range(VOCAB)])
        np.testing.assert_allclose(found, expected[place], atol=1e-4)


def adjusted(rows: np.ndarray, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """What `ADJUSTING` makes of rows of logits [len(output), vocab], each over the token after those before it."""
    rows = rows.copy()
    for place, row in enumerate(rows):
        before = np.bincount(output[:place], minlength=VOCAB)
        seen = (before + np.bincount(prompt, minlength=VOCAB)) > 0
        row[seen] = np.where(row > 0, row / 1.3, row * 1.3)[seen]
        row -= 0.2 * before + 0.4 * (before > 0)
        row[50] += 1.5
        row[np.arange(VOCAB) % 4 == 0] = -np.inf
    return rows


ADJUSTING: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.4,
    "logit_bias": {50: 1.5},
    "allowed_token_ids": [token_id for token_id in range(VOCAB) if token_id % 4],
}


@pytest.mark.parametrize("forced", [None, [1, 4, 50, 130, 66, 3]])
def test_processed_entries_are_of_the_adjusted_masked_and_filtered_row(
    forced: list[int] | None, folder: Path, reference: PreTrainedModel
) -> None:
    # case LP-02; of forced tokens many are not kept
    llm = LLM(folder, kv_cache_memory="4MiB", logprobs_mode="processed_logprobs", max_logprobs=-1)
    asked: dict[str, Any] = {
        "temperature": 0.8,
        "top_k": 12,
        "top_p": 0.85,
        "logprobs": 20,
        "logprob_token_ids": [5, 8],
    }
    completion = sample(llm, forced_token_ids=forced, **asked, **ADJUSTING)
    assert completion.token_ids[:6] == forced or forced is None
    raw = logits_after(reference, PROMPT, completion.token_ids)
    rows = adjusted(raw, PROMPT, completion.token_ids)
    entries = completion.logprobs
    assert entries is not None
    num_left_out = 0
    for token_id, row, entry in zip(completion.token_ids, rows, entries, strict=True):
        kept = kept_by(row / 0.8, 12, 0.85)
        expected = np.where(kept, row / 0.8, -np.inf)
        expected = log_softmax(expected)
        order = np.argsort(-row, kind="stable")[:20].tolist()
        assert set(entry) == {token_id, 5, 8, *order}
        for other, found in entry.items():
            assert found.logprob == pytest.approx(expected[other], abs=1e-4)
        assert entry[token_id].rank == 1 + (row > row[token_id]).sum()
        num_left_out += not kept[token_id]
    assert num_left_out == 0 if forced is None else num_left_out >= 3
    places = np.arange(len(rows))
    np.testing.assert_allclose(completion.raw_logprobs, log_softmax(raw)[places, completion.token_ids], atol=1e-4)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_prompt_logprobs_do_not_depend_on_order_repetition_or_the_cache(
    prefix_caching: bool, folder: Path, reference: PreTrainedModel
) -> None:
    # case LP-04
    whole = np.random.default_rng(4).integers(3, VOCAB, 17).tolist()
    prompts = [whole[:7], whole[:8], whole[:9], whole, [6]]
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=8, enable_prefix_caching=prefix_caching)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, seed=1)
    seen: dict[int, Any] = {}
    for order in (prompts, prompts[::-1]):
        for _ in range(2):
            llm.generate(order, SamplingParams(max_tokens=2, seed=1))  # others publish blocks, and hit them
            for output in llm.generate(order, params):
                check_prompt(output, reference, 1)
                entries = output.prompt_logprobs
                assert entries is not None
                first = seen.setdefault(len(entries), entries)
                assert np.array_equal(first.logprobs, entries.logprobs) and first == entries
                assert len(output.outputs[0].token_ids) == 1


def test_prompt_logprobs_are_right_at_the_edges_of_chunks(folder: Path, reference: PreTrainedModel) -> None:
    # case LP-05
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, VOCAB, size).tolist() for size in (15, 16, 17, 33, 48)]
    decoding = [[40, 41, 42], [50]]
    scoring = SamplingParams(max_tokens=5, prompt_logprobs=2, logprobs=2, seed=7, ignore_eos=True)
    others = SamplingParams(max_tokens=60, logprobs=2, seed=8, ignore_eos=True)
    whole = LLM(folder, kv_cache_memory="8MiB").generate(prompts + decoding, [scoring] * 5 + [others] * 2)
    chunked = LLM(folder, kv_cache_memory="8MiB", max_num_batched_tokens=16, block_size=8)
    chunked.enqueue(decoding, others)
    ended = [output for _ in range(5) for output in chunked.step()]
    chunked.enqueue(prompts, scoring)
    while chunked.num_unfinished:
        ended += chunked.step()
    by_prompt = {tuple(output.prompt_token_ids): output for output in ended}
    assert len(by_prompt) == 7
    for output in whole:
        other = by_prompt[tuple(output.prompt_token_ids)]
        if output.prompt_logprobs is not None:
            check_prompt(other, reference, 2)
        assert other.prompt_logprobs == output.prompt_logprobs
        for mine, its in zip(other.outputs, output.outputs, strict=True):
            assert mine.token_ids == its.token_ids and mine.logprobs == its.logprobs
            assert mine.logprobs is not None and len(mine.logprobs) == len(mine.token_ids) > 0


def test_no_update_without_a_new_token_comes_from_a_prompt_in_chunks(folder: Path) -> None:
    # case LP-05
    llm = LLM(folder, kv_cache_memory="8MiB", max_num_batched_tokens=16)
    llm.enqueue(list(range(3, 51)), SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=2, ignore_eos=True))
    updates = [llm.engine.step() for _ in range(5)]
    assert [len(step) for step in updates] == [0, 0, 1, 1, 1]
    assert all(len(token_ids) == 1 for step in updates for _, token_ids in step)


def test_the_samples_of_a_prompt_share_its_logprobs_under_preemption(folder: Path, reference: PreTrainedModel) -> None:
    # case LP-05
    prompts = [np.random.default_rng(seed).integers(3, VOCAB, 12 + seed).tolist() for seed in range(6)]
    params = SamplingParams(n=3, max_tokens=20, seed=2, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    roomy = LLM(folder, kv_cache_memory="8MiB").generate(prompts, params)
    block_bytes = 2 * 2 * 2 * 16 * 4 * 16
    tight = LLM(folder, kv_cache_memory=20 * block_bytes, block_size=4, max_num_batched_tokens=10)
    outputs = tight.generate(prompts, params)
    assert tight.get_metrics()["num_preemptions_total"] >= 3
    for mine, its in zip(outputs, roomy, strict=True):
        check_prompt(mine, reference, 1)
        assert mine.prompt_logprobs == its.prompt_logprobs
        assert [sample.logprobs for sample in mine.outputs] == [sample.logprobs for sample in its.outputs]


def test_what_was_scored_of_an_aborted_prompt_is_returned(folder: Path) -> None:
    llm = LLM(folder, kv_cache_memory="8MiB", max_num_batched_tokens=16)
    prompt = list(range(3, 51))
    (request_id,) = llm.enqueue(prompt, SamplingParams(n=2, max_tokens=3, prompt_logprobs=2))
    llm.step()
    llm.abort([request_id])
    (part,) = llm.wait_for_completion()
    whole = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=2))[0]
    assert part.prompt_logprobs is not None and whole.prompt_logprobs is not None
    assert part.prompt_logprobs == whole.prompt_logprobs[:17]


def test_scoring_returns_the_most_likely_tokens_too(llm: LLM, reference: PreTrainedModel) -> None:
    sequences = [[9], list(range(30, 60)), [5, 5]]
    plain = llm.score(sequences)
    for output, without in zip(llm.score(sequences, prompt_logprobs=3), plain, strict=True):
        assert np.array_equal(output.logprobs, without.logprobs) and without.prompt_logprobs is None
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.token_ids)
        assert np.array_equal(output.prompt_logprobs.logprobs, output.logprobs)
        wrapped = RequestOutput("", None, output.token_ids, [], prompt_logprobs=output.prompt_logprobs)
        check_prompt(wrapped, reference, 3)
        json.dumps(output.to_dict(), allow_nan=False)
    whole = llm.score([4, 8, 15], prompt_logprobs=-1)[0].prompt_logprobs
    assert whole is not None and [len(entry) for entry in whole[1:] if entry] == [VOCAB, VOCAB]


def test_more_logprobs_than_the_engine_allows_are_refused_by_name(folder: Path, llm: LLM) -> None:
    limited = LLM(folder, kv_cache_memory="4MiB", max_logprobs=3)
    good = SamplingParams(max_tokens=2, logprobs=3, prompt_logprobs=3)
    for field in ("logprobs", "prompt_logprobs"):
        for count in (4, -1):
            wanted: dict[str, Any] = {field: count}
            asked = SamplingParams(max_tokens=2, **wanted)
            with pytest.raises(ValueError, match=rf"prompts\[1\]: {field}={count}.*max_logprobs=3"):
                limited.generate([[5], [6]], [good, asked])
            refused = limited.generate([[5], [6]], [good, asked], on_invalid="return")
            assert len(refused[0].outputs[0].token_ids) == 2 and "max_logprobs=3" in str(refused[1].error)
    with pytest.raises(ValueError, match=r"prompt_logprobs=4.*max_logprobs=3"):
        limited.score([5, 6], prompt_logprobs=4)
    with pytest.raises(ValueError, match="logprob_token_ids holds 131"):
        llm.generate([5], SamplingParams(logprob_token_ids=[131]))
    for value in (-2, 1.5, True, "all"):
        with pytest.raises(ValueError, match="max_logprobs"):
            LLM(folder, max_logprobs=value)
    with pytest.raises(ValueError, match="logprobs_mode='raw_logits' is not valid"):
        LLM(folder, logprobs_mode="raw_logits")
    assert not llm.engine.has_unfinished


def test_no_limit_allows_more_than_the_vocabulary(llm: LLM) -> None:
    completion = sample(llm, logprobs=10_000, max_tokens=2)
    assert completion.logprobs is not None and [len(entry) for entry in completion.logprobs] == [VOCAB, VOCAB]


def test_equal_logits_come_in_the_order_of_their_ids(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_tiny_llama(tmp_path, tie=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    completion = sample(LLM(folder, kv_cache_memory="4MiB"), logprobs=3)
    assert completion.top_token_ids is not None and completion.token_ranks is not None
    assert (completion.top_token_ids == [0, 1, 2]).all() and (completion.token_ranks == 1).all()


def test_logits_of_the_prompt_that_are_not_numbers_end_the_sample_and_invent_no_entries(tmp_path: Path) -> None:
    # case SP-05
    llm = LLM(make_tiny_llama(tmp_path, tie=False), kv_cache_memory="8MiB")
    with torch.no_grad(), llm.policy_update() as update:
        tensors = {name: tensor.clone() for name, tensor in llm.engine.parameters().items()}
        tensors["model.embed_tokens.weight"][9] = math.nan
        update.load(tensors)
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    good, bad = llm.generate([[5, 6, 7], [5, 6, 9, 7, 8]], params)
    assert good.outputs[0].finish_reason in ("length", "stop") and len(good.prompt_logprobs or ()) == 3
    (sample,) = bad.outputs
    assert (sample.finish_reason, sample.stop_reason) == ("error", "the logits are not numbers")
    assert bad.prompt_logprobs is not None and len(bad.prompt_logprobs) <= 3  # none of the broken token
    assert all(math.isfinite(entry.logprob) for place in bad.prompt_logprobs[1:] for entry in (place or {}).values())
    assert llm.get_metrics()["kv_cache_usage"] == 0
