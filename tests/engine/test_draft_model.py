"""A draft model in a whole engine: outputs are those without it, and it is right where it is the same model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from rollout import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from rollout.worker.sizing import split_budget
from tests.support.tiny import make_tiny_llama

PROMPTS = [[*range(40, 60), *range(40, 44)], [3, 4, 5], [7, 8] * 9, list(range(60, 100))]
ALWAYS = {"method": "draft_model", "max_batch_for_speculation": 64, "only_if_faster": False}
ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
LONG = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"), tokenizer=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same vocabulary, smaller and with other heads."""
    path = tmp_path_factory.mktemp("draft")
    return make_tiny_llama(path, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, seed=5, tokenizer=True)


def make(folder: Path, draft: Path | None, **options: Any) -> LLM:
    fields = {
        name: options.pop(name) for name in ("num_speculative_tokens", "draft_kv_cache_memory") if name in options
    }
    speculative = None if draft is None else {**ALWAYS, "model": str(draft), **fields}
    return LLM(folder, **{"kv_cache_memory": "4MiB", "block_size": 8, "speculative_config": speculative, **options})


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return make(folder, None)


@pytest.fixture(scope="module")
def self_drafted(folder: Path) -> LLM:
    return make(folder, folder, num_speculative_tokens=4)


def counts(llm: LLM) -> tuple[float, float]:
    metrics = llm.get_metrics()
    return metrics["draft_tokens_total"], metrics["accepted_draft_tokens_total"]


def assert_same(mine: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for one, another in zip(mine, wanted, strict=True):
        for a, b in zip(one.outputs, another.outputs, strict=True):
            assert (a.token_ids, a.text) == (b.token_ids, b.text)
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
            assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)
            assert (a.logprobs is None) == (b.logprobs is None)
            if a.logprobs is not None and b.logprobs is not None:
                assert list(a.logprobs) == list(b.logprobs)


# case SD-01
@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0.0}, {}, {"top_p": 0.9, "temperature": 0.7}, {"top_k": 5}, {"min_p": 0.1}],
    ids=lambda fields: ", ".join(fields) or "nothing",
)
def test_the_model_itself_guesses_every_token_whatever_is_drawn(
    plain: LLM, self_drafted: LLM, fields: dict[str, Any]
) -> None:
    params = replace(LONG, n=2, **fields)
    before = counts(self_drafted)
    for _ in range(2):  # the second time its prompts are prefix hits, of both models
        assert_same(self_drafted.generate(PROMPTS, params), plain.generate(PROMPTS, params))
    drafted, accepted = (now - then for now, then in zip(counts(self_drafted), before, strict=True))
    assert drafted == accepted > 300
    self_drafted.engine.scheduler.check_integrity()


# cases SD-02, SD-03
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 8, "logprobs": 2},
        {"prompt_logprobs": 1, "temperature": 0.0},
        {"stop_token_ids": range(40, 60), "ignore_eos": False},
        {"min_tokens": 12, "stop_token_ids": range(40, 80)},
        {"stop": ["e", "a"], "ignore_eos": False},
        {"forced_token_ids": PROMPTS[0][:12]},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 3.0, "presence_penalty": 0.5, "bad_words": ["e", "ab"], "temperature": 0.0},
        {"structured_outputs": StructuredOutputsParams(regex="([ab]{3,5}!)+"), "logit_bias": {69: 2.0}},
        {"thinking_token_budget": 3, "logit_bias": {69: 2.0}, "logprobs": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_another_model_changes_nothing(
    folder: Path, other: Path, plain: LLM, self_drafted: LLM, fields: dict[str, Any]
) -> None:
    params = replace(LONG, **fields)
    wanted = plain.generate(PROMPTS, params)
    for llm in (make(folder, other, num_speculative_tokens=3), self_drafted):
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, params), wanted)
        llm.engine.scheduler.check_integrity()


# case SD-04
@pytest.mark.parametrize("cap", [2, 5, 6, 7, 40])
def test_a_stop_within_an_accepted_run_cuts_everything_behind_it(plain: LLM, self_drafted: LLM, cap: int) -> None:
    tokens = plain.generate(PROMPTS[0], LONG)[0].outputs[0].token_ids
    for place in (3, 4, 5, 11):
        params = replace(LONG, max_tokens=cap, ignore_eos=False, stop_token_ids=[tokens[place]])
        assert_same(self_drafted.generate(PROMPTS[0], params), plain.generate(PROMPTS[0], params))
    self_drafted.engine.scheduler.check_integrity()


@pytest.mark.parametrize("swap", [False, True])
def test_preempted_samples_are_guessed_again(folder: Path, plain: LLM, swap: bool) -> None:
    params = replace(LONG, n=3, logprobs=1)
    options = {"preemption_mode": "swap", "swap_space": 30 * 8192 * 2} if swap else {}
    llm = make(
        folder, folder, num_speculative_tokens=3, kv_cache_memory=24 * 8192, max_num_batched_tokens=30, **options
    )
    assert_same(llm.generate(PROMPTS, params), plain.generate(PROMPTS, params))
    assert llm.get_metrics()["num_preemptions_total"] > 0
    drafted, accepted = counts(llm)
    assert drafted >= accepted > 40
    llm.engine.scheduler.check_integrity()
    assert llm.get_metrics()["kv_cache_usage"] == 0


def test_a_small_pool_of_its_own_is_for_those_who_fit(folder: Path, plain: LLM) -> None:
    llm = make(folder, folder, draft_kv_cache_memory=11 * 8192, num_speculative_tokens=5)
    assert llm.engine.scheduler.config.num_draft_blocks == 11
    assert_same(llm.generate(PROMPTS, LONG), plain.generate(PROMPTS, LONG))
    drafted, accepted = counts(llm)
    assert drafted == accepted > 20
    llm.engine.scheduler.check_integrity()


def test_a_long_prompt_is_caught_up_with_in_chunks(folder: Path, plain: LLM) -> None:
    prompt = [(7 * place) % 100 + 10 for place in range(150)]
    llm = make(folder, folder, max_num_batched_tokens=16)
    assert_same(llm.generate([prompt, PROMPTS[0]], LONG), plain.generate([prompt, PROMPTS[0]], LONG))
    drafted, accepted = counts(llm)
    assert drafted == accepted > 20


def test_beyond_the_positions_that_it_was_made_for_it_guesses_nothing(tmp_path: Path, folder: Path, plain: LLM) -> None:
    short = make_tiny_llama(tmp_path, tokenizer=True, max_position_embeddings=48)  # else the target
    llm = make(folder, short)
    prompts = [PROMPTS[0], [*PROMPTS[3], *PROMPTS[3]]]
    assert_same(llm.generate(prompts, LONG), plain.generate(prompts, LONG))
    drafted, accepted = counts(llm)
    assert drafted == accepted
    assert 8 < accepted < 48 - len(PROMPTS[0])
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"kernels": "reference"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_target_stay_its_own(folder: Path, options: dict[str, Any]) -> None:
    wanted = make(folder, None, **options).generate(PROMPTS, LONG)
    llm = make(folder, folder, **options)
    assert_same(llm.generate(PROMPTS, LONG), wanted)
    drafted, accepted = counts(llm)
    assert accepted > 50
    assert (drafted == accepted) == (options.keys().isdisjoint({"kv_cache_dtype", "quantization"}))


def test_only_a_batch_that_may_speculate_reaches_the_draft_model(folder: Path, plain: LLM) -> None:
    llm = LLM(
        folder,
        kv_cache_memory="4MiB",
        block_size=8,
        max_num_seqs=6,
        max_model_len=80,
        speculative_config={**ALWAYS, "model": str(folder), "max_batch_for_speculation": 2},
    )
    assert llm.engine.scheduler.config.num_draft_blocks == 2 * 10
    assert_same(llm.generate(PROMPTS, LONG), plain.generate(PROMPTS, LONG))
    assert counts(llm) == (0, 0)
    assert_same(llm.generate(PROMPTS[:2], LONG), plain.generate(PROMPTS[:2], LONG))
    assert counts(llm)[0] > 20


@pytest.mark.parametrize(
    ("budget", "most", "blocks"),
    [(1000, 0, (10, 0)), (1000, 3, (9, 3)), (1000, 8, (8, 8)), (1000, 50, (8, 8)), (99, 5, (0, 0)), (1000, 1, (9, 1))],
)
def test_a_budget_is_split_between_both_pools(budget: int, most: int, blocks: tuple[int, int]) -> None:
    assert split_budget(budget, 100, 20 if most else 0, most) == blocks
    assert blocks[0] * 100 + blocks[1] * 20 <= budget


def test_its_pool_comes_out_of_a_measured_budget(folder: Path) -> None:
    options = {"kv_cache_memory": None, "gpu_memory_utilization": 0.02, "block_size": 128, "max_num_seqs": 8}
    pools = [make(folder, draft, **options).engine._worker.pool for draft in (None, folder)]
    assert pools[1].num_draft_blocks == 8 * 512 // 128
    assert pools[1].num_blocks < pools[0].num_blocks


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 140}, "has a vocabulary of 140 tokens, the target one of 131"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"num_hidden_layers": 3}, "lacks 9 tensors: model.layers.2"),
    ],
)
def test_a_model_that_cannot_draft_is_refused_with_the_reason(
    tmp_path: Path, folder: Path, change: dict[str, Any], named: str
) -> None:
    draft = make_tiny_llama(tmp_path)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=named):
        make(folder, draft)


def test_a_tokenizer_with_other_ids_is_refused_with_a_token_that_differs(tmp_path: Path, folder: Path) -> None:
    draft = make_tiny_llama(tmp_path, tokenizer=True)
    text = (draft / "tokenizer.json").read_text()
    changed = json.loads(text)
    vocabulary = changed["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"another vocabulary than the target: .* 'a' as token \d+ \(4 such"):
        make(folder, draft)
    (draft / "tokenizer.json").unlink()
    (draft / "tokenizer_config.json").unlink()
    assert counts(make(folder, draft)) == (0, 0)  # sizes are equal, and there is nothing to compare


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": "no/such/folder"}, "speculative_config: model 'no/such/folder' is not a folder"),
        ({"draft_kv_cache_memory": 100}, "draft_kv_cache_memory=100 is not valid: one block takes 8,192 bytes"),
    ],
)
def test_what_the_configuration_names_wrongly_is_said(folder: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LLM(folder, kv_cache_memory="1MiB", block_size=8, speculative_config={**ALWAYS, "model": str(folder), **fields})


def test_its_weights_are_those_of_its_checkpoint(folder: Path, other: Path) -> None:
    parameters = make(folder, other).engine.parameters()
    own = {name: tensor for name, tensor in parameters.items() if name.startswith("drafter.")}
    checkpoint = load_file(other / "model.safetensors")
    assert own.keys() == {f"drafter.{name}" for name in checkpoint}
    assert all(np.array_equal(own[f"drafter.{name}"].detach(), tensor) for name, tensor in checkpoint.items())
