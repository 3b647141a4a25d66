"""`structured_outputs` through the engine: outputs have their form, and are drawn from the right distribution."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
from scipy.stats import chisquare

from rollout import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from rollout.core.schedule import Draw
from rollout.sampling.grammars import Grammars
from tests.support.oracle import load_reference, reference_logprobs
from tests.support.tiny import make_tiny_llama

VOCAB_SIZE = 300  # 3 specials, every byte, 41 pairs of letters
EOS: tuple[int, ...] = (1, 2)
PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_tiny_llama(path, vocab_size=VOCAB_SIZE, tokenizer=True, eos_token_id=list(EOS), near_uniform=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="16MiB")


def ids_of(llm: LLM, tokens: Sequence[str]) -> list[int]:
    """Tokens by their spelling; "Ġ" is a space and "Ċ" a new line."""
    ids = llm.get_tokenizer().convert_tokens_to_ids(list(tokens))
    assert isinstance(ids, list) and 0 not in ids
    return ids


def text_of(llm: LLM, token_ids: Sequence[int]) -> str:
    text = llm.get_tokenizer().decode(list(token_ids))
    assert isinstance(text, str)
    return text


class Pet(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["cat", "dog"]
    age: Annotated[int, msgspec.Meta(ge=0, le=30)]
    tags: Annotated[list[Annotated[str, msgspec.Meta(max_length=3)]], msgspec.Meta(max_length=2)]
    sold: bool | None


def is_a_pet(text: str) -> bool:
    return isinstance(msgspec.json.decode(text, type=Pet), Pet) and json.loads(text) is not None


FORMS: dict[str, tuple[StructuredOutputsParams, Callable[[str], object]]] = {
    "json": (StructuredOutputsParams(json=msgspec.json.schema(Pet)["$defs"]["Pet"]), is_a_pet),
    "json_object": (StructuredOutputsParams(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "regex": (StructuredOutputsParams(regex=r"[a-c]{2,4}(-\d{2})?"), re.compile(r"[a-c]{2,4}(-\d{2})?").fullmatch),
    "choice": (StructuredOutputsParams(choice=["yes", "yes, please", "no"]), ["yes", "yes, please", "no"].__contains__),
    "grammar": (
        StructuredOutputsParams(grammar='start: sum\nsum: NUMBER | NUMBER "+" sum\nNUMBER: /[1-9][0-9]?/'),
        re.compile(r"[1-9][0-9]?(\+[1-9][0-9]?)*").fullmatch,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biased", ["nothing", "eos", "stops", "white space", "letters"])
def test_an_output_that_has_stopped_has_its_form_whatever_the_logits_prefer(llm: LLM, form: str, biased: str) -> None:
    # case SO-01
    structured, has_form = FORMS[form]
    stops = ids_of(llm, ["~", "ta"])
    preferred = {
        "nothing": [],
        "eos": EOS,
        "stops": stops,
        "white space": ids_of(llm, ["Ġ", "Ċ", "ĉ"]),
        "letters": ids_of(llm, list("abxyz")),
    }[biased]
    params = SamplingParams(
        n=3,
        seed=5,
        max_tokens=600 if biased == "white space" else 150,
        structured_outputs=structured,
        stop_token_ids=stops,
        logit_bias=dict.fromkeys(preferred, 100.0) or None,
    )
    stopped = 0
    for completion in llm.generate(PROMPT, params)[0].outputs:
        if completion.finish_reason == "stop":
            stopped += 1
            assert completion.token_ids[-1] in {*EOS, *stops}
            assert completion.stop_reason == (completion.token_ids[-1] if completion.token_ids[-1] in stops else None)
            assert has_form(text_of(llm, completion.token_ids[:-1]))
        else:
            assert completion.finish_reason == "length"
        assert not {*EOS, *stops} & set(completion.token_ids[:-1])
    if biased != "letters" and (form in ("choice", "regex", "json") or (form == "grammar" and biased != "nothing")):
        assert stopped == 3


@pytest.mark.parametrize("form", FORMS)
def test_an_output_that_was_cut_is_the_beginning_of_a_whole_one(llm: LLM, form: str) -> None:
    # case SO-01
    structured, has_form = FORMS[form]
    bias = dict.fromkeys(EOS, 5.0)
    whole = SamplingParams(seed=3, max_tokens=300, temperature=0.7, structured_outputs=structured, logit_bias=bias)
    long = llm.generate(PROMPT, whole)[0].outputs[0]
    assert long.finish_reason == "stop" and has_form(text_of(llm, long.token_ids[:-1]))
    for max_tokens in {1, len(long.token_ids) - 1, *range(2, len(long.token_ids), 7)} - {len(long.token_ids)}:
        short = llm.generate(PROMPT, replace(whole, max_tokens=max_tokens))[0].outputs[0]
        assert (short.finish_reason, short.token_ids) == ("length", long.token_ids[:max_tokens])
        assert len(short.token_ids) == max_tokens


@pytest.mark.parametrize("form", FORMS)
def test_without_eos_a_sample_ends_by_itself_where_nothing_can_follow(llm: LLM, form: str) -> None:
    # case SO-01
    structured, has_form = FORMS[form]
    letters = dict.fromkeys(ids_of(llm, list("abcxyz")), 20.0)  # after the end, too
    params = SamplingParams(n=4, seed=2, max_tokens=90, structured_outputs=structured, ignore_eos=True)
    for bias in (None, letters, dict.fromkeys(EOS, 100.0)):
        outputs = llm.generate(PROMPT, replace(params, logit_bias=bias))[0].outputs
        for completion in outputs:
            assert not set(EOS) & set(completion.token_ids)
            if completion.finish_reason == "stop":
                assert completion.stop_reason is None and has_form(completion.text)
            else:
                assert (completion.finish_reason, len(completion.token_ids)) == ("length", 90)
    stopped = [output.finish_reason == "stop" for output in llm.generate(PROMPT, params)[0].outputs]
    assert all(stopped) if form in ("json", "choice", "regex") else True


def test_min_tokens_keeps_a_grammar_from_ending_while_it_can_go_on(llm: LLM) -> None:
    # case SO-01
    structured = StructuredOutputsParams(regex="a{2,9}")
    eos_first = dict.fromkeys(EOS, 100.0)
    params = SamplingParams(max_tokens=50, seed=1, structured_outputs=structured, logit_bias=eos_first)
    for min_tokens, letters in [(0, 2), (2, 2), (5, 5), (9, 9), (30, 9)]:
        completion = llm.generate(PROMPT, replace(params, min_tokens=min_tokens))[0].outputs[0]
        assert completion.finish_reason == "stop" and completion.token_ids[-1] in EOS
        assert len(completion.token_ids) == letters + 1 and completion.text.startswith("a" * letters)
        completion = llm.generate(PROMPT, replace(params, min_tokens=min_tokens, ignore_eos=True))[0].outputs[0]
        assert (completion.finish_reason, completion.text) == ("stop", "a" * 9)


def test_stop_strings_may_cut_a_form(llm: LLM) -> None:
    structured = StructuredOutputsParams(choice=["abcabc"])
    params = SamplingParams(max_tokens=20, stop=["ca"], structured_outputs=structured)
    completion = llm.generate(PROMPT, params)[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", "ca")


CHOICES = ["te", "tea", "teat", "het"]


def paths(llm: LLM, choices: Sequence[str], ends: Sequence[int]) -> dict[tuple[int, ...], list[set[int]]]:
    """Every sequence of tokens that writes one of the texts and ends, with what may be drawn at each of its places."""
    pieces = {i: text_of(llm, [i]) for i in range(3, VOCAB_SIZE)}
    found: dict[tuple[int, ...], list[set[int]]] = {}

    def follow(output: tuple[int, ...], text: str, seen: list[set[int]]) -> None:
        may_come = {i for i, piece in pieces.items() if any(choice.startswith(text + piece) for choice in choices)}
        may_come |= set(ends) if text in choices else set()
        for token_id in may_come:
            if token_id in ends:
                found[*output, token_id] = [*seen, may_come]
            else:
                follow((*output, token_id), text + pieces[token_id], [*seen, may_come])

    follow((), "", [])
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_choices_come_as_often_as_their_renormalised_tokens_say(llm: LLM, folder: Path, temperature: float) -> None:
    # case SO-01
    reference = load_reference(folder)
    expected = {}
    for path, places in paths(llm, CHOICES, EOS).items():
        rows = np.exp(reference_logprobs(reference, [*PROMPT, *path], temperature).numpy()[len(PROMPT) - 1 : -1])
        expected[path] = np.prod(
            [row[token] / row[sorted(place)].sum() for row, token, place in zip(rows, path, places, strict=True)]
        )
    assert len(expected) == 20 and sum(expected.values()) == pytest.approx(1.0, abs=1e-5)
    structured = StructuredOutputsParams(choice=CHOICES)
    params = SamplingParams(n=3000, temperature=temperature, max_tokens=8, seed=11, structured_outputs=structured)
    outputs = llm.generate(PROMPT, params)[0].outputs
    drawn = [tuple(output.token_ids) for output in outputs]
    assert set(drawn) <= set(expected)
    counts = np.array([drawn.count(path) for path in expected])
    wanted = np.array(list(expected.values())) / sum(expected.values()) * len(drawn)
    assert chisquare(counts, wanted).pvalue > 1e-3
    for output in outputs[:20]:  # and their logprobs say so
        assert output.sampled_logprobs.sum() == pytest.approx(np.log(expected[tuple(output.token_ids)]), abs=1e-4)


def test_kept_mass_is_what_the_grammar_left_of_the_distribution(llm: LLM, folder: Path) -> None:
    reference = load_reference(folder)
    may_come = paths(llm, CHOICES, EOS)
    structured = StructuredOutputsParams(choice=CHOICES)
    params = SamplingParams(n=16, temperature=0.8, max_tokens=8, seed=1, structured_outputs=structured)
    for output in llm.generate(PROMPT, params)[0].outputs:
        tokens = output.token_ids
        rows = reference_logprobs(reference, [*PROMPT, *tokens]).numpy()[len(PROMPT) - 1 : -1]
        np.testing.assert_allclose(output.raw_logprobs, rows[range(len(tokens)), tokens], atol=1e-4)
        tempered = np.exp(rows / 0.8)
        tempered /= tempered.sum(1, keepdims=True)
        kept = [row[sorted(place)].sum() for row, place in zip(tempered, may_come[tuple(tokens)], strict=True)]
        np.testing.assert_allclose(output.kept_mass, kept, rtol=1e-3)
        drawn = np.log(tempered[range(len(tokens)), tokens])
        np.testing.assert_allclose(output.sampled_logprobs, drawn - np.log(kept), atol=1e-3)


def test_greedy_takes_the_best_token_that_the_grammar_allows(llm: LLM, folder: Path) -> None:
    reference = load_reference(folder)
    may_come = paths(llm, CHOICES, EOS)
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=CHOICES))
    tokens = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    rows = reference_logprobs(reference, [*PROMPT, *tokens]).numpy()[len(PROMPT) - 1 : -1]
    for row, token, place in zip(rows, tokens, may_come[tuple(tokens)], strict=True):
        assert row[token] > row[sorted(place)].max() - 1e-4


def test_other_parameters_hold_beside_a_grammar(llm: LLM) -> None:
    structured = StructuredOutputsParams(regex="[a-h]{8}")
    allowed = ids_of(llm, list("abcdefgh"))
    base = SamplingParams(n=4, seed=3, max_tokens=20, structured_outputs=structured)
    for output in llm.generate(PROMPT, replace(base, allowed_token_ids=[*allowed[:3], *EOS]))[0].outputs:
        assert set(output.text.removesuffix("<|im_start|>")) <= set("abc") and output.finish_reason == "stop"
    for output in llm.generate(PROMPT, replace(base, bad_words=["a", "b"]))[0].outputs:
        assert not set("ab") & set(output.text) and output.finish_reason == "stop"
    for output in llm.generate(PROMPT, replace(base, presence_penalty=2.0, frequency_penalty=2.0, temperature=0.01))[
        0
    ].outputs:
        assert len(set(output.token_ids)) == len(output.token_ids)  # near uniform: a penalty of 2 decides
    for output in llm.generate(PROMPT, replace(base, top_k=1))[0].outputs:
        np.testing.assert_array_equal(output.sampled_logprobs, 0.0)
        assert re.fullmatch("[a-h]{8}", text_of(llm, output.token_ids[:-1]))


def test_masks_of_many_samples_beside_each_other_stay_their_own(llm: LLM) -> None:
    closing = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
    assert (
        min(closing) < 140
    )  # as many draws as token ids: places in the step and ids are not to be taken for each other
    grammars = SamplingParams(
        n=140, seed=1, max_tokens=10, structured_outputs=StructuredOutputsParams(regex="[a-z]{4,6}")
    )
    thinking = SamplingParams(seed=2, max_tokens=12, ignore_eos=True, thinking_token_budget=0)
    prompts = [PROMPT, "<think>"]
    alone = [llm.generate(prompt, params)[0] for prompt, params in zip(prompts, (grammars, thinking), strict=True)]
    assert alone[1].outputs[0].token_ids[: len(closing)] == closing
    forward = llm.generate(prompts, [grammars, thinking])
    backward = llm.generate(prompts[::-1], [thinking, grammars])[::-1]
    for together in (forward, backward):
        for output, expected in zip(together, alone, strict=True):
            for completion, wanted in zip(output.outputs, expected.outputs, strict=True):
                assert (completion.token_ids, completion.text) == (wanted.token_ids, wanted.text)
                assert np.array_equal(completion.sampled_logprobs, wanted.sampled_logprobs)


def test_where_parameters_leave_nothing_the_sample_ends_in_error_and_others_go_on(llm: LLM) -> None:
    structured = StructuredOutputsParams(regex="ab")
    (a,) = ids_of(llm, ["a"])
    impossible = SamplingParams(max_tokens=9, structured_outputs=structured, allowed_token_ids=[a, *EOS])
    outputs = llm.generate([PROMPT, PROMPT], [impossible, replace(impossible, allowed_token_ids=None)])
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].token_ids) == ("error", [a])
    assert (outputs[1].outputs[0].finish_reason, outputs[1].outputs[0].text[:2]) == ("stop", "ab")


BAD = [
    (StructuredOutputsParams(json={"type": "nope"}), "structured_outputs.json=.*Invalid type: nope"),
    (StructuredOutputsParams(regex="("), "structured_outputs.regex=.*unclosed group"),
    (StructuredOutputsParams(grammar="start: missing"), "structured_outputs.grammar=.*missing"),
]


@pytest.mark.parametrize(("structured", "message"), BAD, ids=["type", "regex", "grammar"])
def test_a_bad_form_fails_its_own_request_before_anything_is_scheduled(
    llm: LLM, structured: StructuredOutputsParams, message: str
) -> None:
    steps = llm.engine.counters.num_steps
    bad, good = SamplingParams(structured_outputs=structured), SamplingParams(max_tokens=3)
    with pytest.raises(ValueError, match=rf"(?s)prompts\[1\]: {message}"):
        llm.generate([PROMPT, PROMPT], [good, bad])
    assert llm.engine.counters.num_steps == steps and llm.num_unfinished == 0
    outputs = llm.generate([PROMPT, PROMPT], [good, bad], on_invalid="return")
    assert len(outputs[0].outputs[0].token_ids) == 3
    assert outputs[1].outputs == [] and re.search(f"(?s){message}", outputs[1].error or "")


def test_without_a_tokenizer_a_form_is_refused(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="2MiB")
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        llm.generate([3, 4], SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])))


def test_ids_beyond_the_tokenizer_are_not_drawn(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, vocab_size=VOCAB_SIZE, tokenizer=True, near_uniform=True)
    tokenizer_files = {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}
    padded = make_tiny_llama(tmp_path / "padded", vocab_size=389, near_uniform=True)
    for name, content in tokenizer_files.items():
        (padded / name).write_bytes(content)
    llm = LLM(padded, kv_cache_memory="2MiB")
    params = SamplingParams(n=8, seed=1, max_tokens=60, structured_outputs=StructuredOutputsParams(regex="(?s:.)*"))
    for output in llm.generate(PROMPT, params)[0].outputs:
        assert max(output.token_ids) < VOCAB_SIZE


def test_forced_tokens_under_a_grammar_are_scored_under_its_masks(llm: LLM) -> None:
    structured = StructuredOutputsParams(choice=CHOICES)
    free = SamplingParams(n=4, seed=6, max_tokens=8, structured_outputs=structured)
    for output in llm.generate(PROMPT, free)[0].outputs:
        for count in range(1, len(output.token_ids) + 1):
            forced = replace(
                free, n=1, first_sample_index=output.sample_index, forced_token_ids=output.token_ids[:count]
            )
            assert_same(llm.generate(PROMPT, forced)[0].outputs[0], output)
    (z,) = ids_of(llm, ["z"])
    with pytest.raises(ValueError, match=rf"forced_token_ids\[0\]={z} is not valid: structured_outputs.choice"):
        llm.generate(PROMPT, replace(free, forced_token_ids=[z]))


def test_resumed_samples_and_forks_go_on_in_their_grammar(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=6, max_tokens=30, structured_outputs=FORMS["json"][0])
    expected = llm.generate(PROMPT, params)[0].outputs
    for num_steps in (1, 6, 12):
        ids = llm.enqueue(PROMPT, params)
        for _ in range(num_steps):
            llm.step()
        llm.abort(ids)
        (part,) = llm.wait_for_completion()
        for one, other in zip(llm.resume(part, params)[0].outputs, expected, strict=True):
            assert_same(one, other)
        other_form = replace(params, structured_outputs=StructuredOutputsParams(regex="-+"))
        with pytest.raises(ValueError, match=r"output token 0 is .*structured_outputs.regex does not allow"):
            llm.resume(part, other_form)
    (whole,) = llm.generate(PROMPT, params)
    llm.fork(whole, at=5, n=4, sampling_params=replace(params, n=1, max_tokens=80))
    (branches,) = llm.wait_for_completion()
    for branch in branches.outputs:
        assert branch.token_ids[:5] == expected[0].token_ids[:5]
        assert branch.finish_reason == "stop" and is_a_pet(text_of(llm, branch.token_ids[:-1]))


def assert_same(one: CompletionOutput, other: CompletionOutput) -> None:
    assert (one.token_ids, one.finish_reason, one.stop_reason) == (
        other.token_ids,
        other.finish_reason,
        other.stop_reason,
    )
    for name in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


class InjectedError(Exception):
    """The fault that the test asked for."""


def test_a_failed_step_leaves_the_masks_as_they_were(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    structured = StructuredOutputsParams(json_object=True)
    params = SamplingParams(n=3, seed=6, max_tokens=30, structured_outputs=structured)
    expected = llm.generate(PROMPT, params)[0].outputs
    runner = llm.engine.executor.worker.runner
    real, calls = type(runner)._forward, [0]

    def failing(self: object, *arguments: object) -> object:
        calls[0] += 1
        if calls[0] in (2, 5):
            raise InjectedError
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(runner), "_forward", failing)
    monkeypatch.setattr(runner, "decode_programs", None)
    llm.enqueue(PROMPT, params)
    outputs, num_failed = [], 0
    while llm.num_unfinished:
        with suppress(InjectedError):
            num_failed += 1
            outputs += llm.step()
            num_failed -= 1
    assert num_failed == 2
    for one, other in zip(outputs[0].outputs, expected, strict=True):
        assert_same(one, other)


def test_masks_are_computed_while_the_model_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine.executor.worker.runner
    forward, masks = type(runner)._forward, Grammars.masks
    model_runs, masks_are_there, met = threading.Event(), threading.Event(), []

    def waiting_forward(self: Any, *arguments: Any) -> Any:
        model_runs.set()
        met.append(masks_are_there.wait(timeout=20))
        return forward(self, *arguments)

    def waiting_masks(self: Grammars, draws: Mapping[int, Draw]) -> Any:
        met.append(model_runs.wait(timeout=20))
        computed = masks(self, draws)
        masks_are_there.set()
        return computed

    monkeypatch.setattr(type(runner), "_forward", waiting_forward)
    monkeypatch.setattr(Grammars, "masks", waiting_masks)
    params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(choice=["a"]))
    assert llm.generate(PROMPT, params)[0].outputs[0].text == "a"
    assert met == [True, True]


class Address(msgspec.Struct):
    street: Annotated[str, msgspec.Meta(max_length=30)]
    zip: Annotated[str, msgspec.Meta(pattern="^[0-9]{5}$")]


class Person(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=20)]
    age: Annotated[int, msgspec.Meta(ge=0, le=120)]
    height: Annotated[float, msgspec.Meta(gt=0, lt=3)]
    mood: Literal["happy", "sad", "tired"]
    address: Address
    friends: Annotated[list[Annotated[str, msgspec.Meta(max_length=12)]], msgspec.Meta(min_length=1, max_length=3)]
    email: str | None = None


class Call(msgspec.Struct, tag="call"):
    tool: Literal["search", "add"]
    arguments: dict[str, int]


class Answer(msgspec.Struct, tag="answer"):
    text: Annotated[str, msgspec.Meta(max_length=60)]


QUESTIONS = ["Describe a person in JSON.", "What is 17 + 25? Answer in JSON.", "Hello!"]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path, kv_cache_memory="256MiB")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Person, Call | Answer, list[Person] | None], ids=["nested", "tagged union", "list"])
def test_smollm2_writes_what_its_schema_asks_for(smollm2: LLM, kind: object) -> None:
    # case SO-01
    params = SamplingParams(
        n=4, seed=8, max_tokens=160, structured_outputs=StructuredOutputsParams(json=msgspec.json.schema(kind))
    )
    stopped = 0
    outputs = smollm2.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    for completion in (completion for output in outputs for completion in output.outputs):
        assert completion.finish_reason in ("stop", "length")
        if completion.finish_reason == "stop":
            stopped += 1
            json.loads(completion.text)
            msgspec.json.decode(completion.text, type=kind)  # type: ignore[arg-type]
    assert stopped >= 6
