"""Sessions: turns that only append, and the check of chat templates that they rest on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rollout import LLM, SamplingParams, Session, generate_sessions, preserves_prefixes
from tests.support.tiny import CHAT_TEMPLATE, make_tiny_llama
from tests.support.tokenizers import byte_level_with_bos, sentencepiece

PARAMS = SamplingParams(max_tokens=12, seed=3, temperature=1.5, ignore_eos=True)
ANSWER_ONLY = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and not loop.last %}"
    "[assistant] {{ message['content'].split('</think>')[-1].strip() }}<|im_end|>\n"
    "{% else %}[{{ message['role'] }}] {{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_llama(tmp_path_factory.mktemp("session"), tokenizer=True, vocab_size=300)
    return LLM(folder, kv_cache_memory="8MiB", block_size=8)


def check_alignment(session: Session) -> None:
    """Turns cover the tokens, and every array has an entry a token, also where it was given."""
    assert [turn.start for turn in session.turns] == [0, *(turn.end for turn in session.turns[:-1])]
    assert session.turns[-1].end == len(session.token_ids) == len(session.loss_mask)
    mask = np.array(session.loss_mask, bool)
    for array, given in (
        (session.raw_logprobs, 0),
        (session.sampled_logprobs, 0),
        (session.entropy, 0),
        (session.kept_mass, 1),
    ):
        assert array.dtype == np.float32 and array.shape == mask.shape and (array[~mask] == given).all()
    assert (session.raw_logprobs[mask] < 0).all()


def test_turns_are_appended_and_nothing_sampled_is_tokenised_again(llm: LLM) -> None:
    # case PR-05
    tokenizer: Any = llm.get_tokenizer()
    session = llm.session(user("hello there"))
    first_prompt = list(session.token_ids)
    assert first_prompt == llm.chat(user("hello there"), PARAMS)[0].prompt_token_ids
    first = session.generate(PARAMS)
    sampled = first.outputs[0].token_ids
    assert first.prompt_token_ids == first_prompt and session.token_ids == first_prompt + sampled
    assert tokenizer(tokenizer.decode(sampled)).input_ids != sampled  # to tokenise it again would change it
    suffix = session.add(user("and more"))
    assert tokenizer.decode(suffix) == "<|im_end|>\n<|im_start|>user\nand more<|im_end|>\n<|im_start|>assistant\n"
    second = session.generate(PARAMS)
    assert second.prompt_token_ids == first_prompt + sampled + suffix
    assert second.num_cached_tokens >= len(first_prompt + sampled) // 8 * 8
    third_suffix = session.add([{"role": "tool", "content": "3"}, *user("so?")])
    third = session.generate(PARAMS)
    assert third.prompt_token_ids == second.prompt_token_ids + second.outputs[0].token_ids + third_suffix
    assert third.num_cached_tokens > second.num_cached_tokens
    check_alignment(session)
    assert [(turn.is_sampled, turn.finish_reason) for turn in session.turns] == [(False, None), (True, "length")] * 3
    assert [turn.seed for turn in session.turns if turn.is_sampled] == [3, 3, 3]
    assert sum(session.loss_mask) == 36


def test_logprobs_of_a_session_are_those_of_its_tokens_in_place(llm: LLM) -> None:
    # case PR-05
    session = llm.session(user("hello there"))
    session.generate(PARAMS)
    session.add(user("and more"))
    session.generate(PARAMS)
    llm.reset_prefix_cache()
    scores = llm.score(session.token_ids)[0].logprobs
    places = np.flatnonzero(session.loss_mask)
    assert len(places) == 24
    assert np.array_equal(session.raw_logprobs[places], scores[places - 1])
    for turn in session.turns:
        if turn.is_sampled:  # each turn can be replayed from what it says
            params = SamplingParams(max_tokens=12, seed=turn.seed, temperature=1.5, ignore_eos=True)
            again = llm.generate(session.token_ids[: turn.start], params)[0].outputs[0]
            assert again.token_ids == session.token_ids[turn.start : turn.end]


def test_an_end_of_turn_that_was_sampled_does_not_come_twice(llm: LLM) -> None:
    end = llm.get_tokenizer().convert_tokens_to_ids("<|im_end|>")
    sessions = [llm.session(user("hello")) for _ in range(20)]
    params = [SamplingParams(max_tokens=300, seed=seed, temperature=50.0) for seed in range(20)]
    outputs = generate_sessions(sessions, params, use_tqdm=False)
    session, sample = next(
        (session, output.outputs[0])
        for session, output in zip(sessions, outputs, strict=True)
        if output.outputs[0].finish_reason == "stop"
    )
    assert sample.token_ids[-1] == end
    before = list(session.token_ids)
    suffix = session.add(user("more"))
    assert suffix[0] != end and session.token_ids == before + suffix
    text = str(llm.get_tokenizer().decode(session.token_ids))
    assert text.count("<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n") == 1
    assert "<|im_end|><|im_end|>" not in text
    assert session.loss_mask[len(before) - 1] == 1


def test_an_answer_that_was_cut_off_goes_on_as_if_it_had_not_been(llm: LLM) -> None:
    whole, parts = llm.session(user("hello")), llm.session(user("hello"))
    whole.generate(SamplingParams(max_tokens=20, seed=4, ignore_eos=True))
    parts.generate(SamplingParams(max_tokens=7, seed=4, ignore_eos=True))
    parts.generate(SamplingParams(max_tokens=13, seed=4, ignore_eos=True))
    assert parts.token_ids == whole.token_ids and parts.loss_mask == whole.loss_mask
    for name in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy"):
        assert np.array_equal(getattr(parts, name), getattr(whole, name))
    assert parts.add(user("more")) == whole.add(user("more"))


def test_many_sessions_go_on_together_as_each_would_alone(llm: LLM) -> None:
    texts = ["hello", "a longer question", "x"]
    params = [SamplingParams(max_tokens=10, seed=seed, ignore_eos=True) for seed in range(3)]
    alone, together = ([llm.session(user(text)) for text in texts] for _ in range(2))
    for turn in range(2):
        for session, of_session in zip(alone, params, strict=True):
            session.generate(of_session)
        outputs = generate_sessions(together, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [s.token_ids[-10:] for s in together]
        if turn == 0:
            for session in (*alone, *together):
                session.add(user("more"))
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.token_ids == theirs.token_ids and np.array_equal(mine.raw_logprobs, theirs.raw_logprobs)
        check_alignment(mine)
    assert generate_sessions([]) == []
    with pytest.raises(ValueError, match="twice"):
        generate_sessions([together[0], together[0]])
    with pytest.raises(ValueError, match="n=2 is not valid in a session"):
        together[0].generate(SamplingParams(n=2))


def test_a_fork_goes_on_by_itself(llm: LLM) -> None:
    session = llm.session(user("hello"))
    session.generate(PARAMS)
    session.add(user("more"))
    before = list(session.token_ids)
    forks = [session.fork() for _ in range(3)]
    generate_sessions(forks, SamplingParams(max_tokens=10, temperature=1.5, ignore_eos=True))
    assert len({tuple(fork.token_ids) for fork in forks}) == 3 and session.token_ids == before
    for fork in forks:
        assert fork.token_ids[: len(before)] == before
        fork.add(user("again"))
        check_alignment(fork)


def test_a_turn_that_was_streamed_is_appended(llm: LLM) -> None:
    streamed, sampled = llm.session(user("hello")), llm.session(user("hello"))
    *_, last = llm.stream({"prompt_token_ids": streamed.token_ids}, PARAMS)
    streamed.append_sample(last.outputs[0])
    sampled.generate(PARAMS)
    assert streamed.token_ids == sampled.token_ids and streamed.turns == sampled.turns
    assert np.array_equal(streamed.sampled_logprobs, sampled.sampled_logprobs)


def test_a_session_without_room_stays_as_it_is(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path, tokenizer=True), kv_cache_memory="4MiB", max_model_len=64)
    sessions = [llm.session(), llm.session()]
    sessions[0].add_token_ids([5] * 64)
    sessions[1].add_token_ids([5] * 10)
    with pytest.raises(ValueError, match=r"prompts\[0\]: the prompt has 64 tokens"):
        generate_sessions(sessions, PARAMS)
    assert [len(session.token_ids) for session in sessions] == [64, 10]
    outputs = generate_sessions(sessions, PARAMS, on_invalid="return", use_tqdm=False)
    assert "64 tokens" in (outputs[0].error or "")
    assert [len(session.token_ids) for session in sessions] == [64, 22]


def test_text_and_token_ids_can_be_turns(llm: LLM) -> None:
    tokenizer: Any = llm.get_tokenizer()
    session = llm.session()
    assert session.add_text("the sea") == tokenizer("the sea").input_ids
    session.generate(PARAMS)
    session.add_token_ids([7, 8])
    session.add_text(" result")
    assert session.token_ids[-2 - len(tokenizer(" result").input_ids) :] == [7, 8, *tokenizer(" result").input_ids]
    session.generate(PARAMS)
    check_alignment(session)
    assert [turn.is_sampled for turn in session.turns] == [False, True, False, False, True]
    with pytest.raises(ValueError, match=r"holds 1.5: token ids must be integers"):
        session.add_token_ids([1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="messages cannot follow text"):
        session.add(user("hello"))

    chat = llm.session(user("hello"))
    with pytest.raises(ValueError, match="were not answered"):
        chat.add(user("hello?"))
    chat.generate(PARAMS)
    chat.add_text("<result>")  # within the answer
    chat.generate(PARAMS)
    chat.add(user("more"))
    assert str(tokenizer.decode(chat.token_ids)).count("<|im_start|>user") == 2


def test_a_template_that_changes_earlier_turns_is_refused_with_the_difference(llm: LLM) -> None:
    # case PR-05
    for strict in (True, False):
        session = llm.session(user("2 + 2?"), chat_template=ANSWER_ONLY, strict=strict)
        thoughts = llm.get_tokenizer()("<think>two and two</think>4", add_special_tokens=False).input_ids
        session.add_token_ids(thoughts)
        before = list(session.token_ids)
        if strict:
            with pytest.raises(ValueError, match=r"<think>two and two</think>4.* became .*\[assistant\] 4"):
                session.add(user("and 3 + 3?"))
            assert session.token_ids == before
        else:
            suffix = session.add(user("and 3 + 3?"))
            assert session.token_ids == before + suffix
            assert llm.get_tokenizer().decode(suffix) == "<|im_end|>\n[user] and 3 + 3?<|im_end|>\n[assistant] "
    for template, message in (
        ("{% for m in messages %}{{ m['role'] }} {% endfor %}", "renders the end of an answer 0 times"),
        ("{{ messages[0]['content'] }}{% for m in messages[1:] %}{{ m['content'] * 2 }}{% endfor %}", "2 times"),
    ):
        session = llm.session(user("hello"), chat_template=template)
        session.generate(PARAMS)
        with pytest.raises(ValueError, match=message):
            session.add(user("more"))


@pytest.mark.parametrize("make", [byte_level_with_bos, sentencepiece])
def test_what_follows_an_answer_is_tokenised_as_in_the_whole_text(make: Callable[[], Any], tmp_path: Path) -> None:
    # cases PR-04, PR-05: no second BOS, and no space that a tokenizer puts before texts
    tokenizer = make()
    tokenizer.chat_template = byte_level_with_bos().chat_template
    folder = make_tiny_llama(tmp_path, vocab_size=300)
    tokenizer.save_pretrained(folder)
    llm = LLM(folder, kv_cache_memory="4MiB")
    session = llm.session(user("the cat"))
    assert session.token_ids.count(1) == 1
    answer = tokenizer("the cat sat", add_special_tokens=False).input_ids
    session.add_token_ids(answer)
    suffix = session.add(user("naive"))
    assert session.token_ids.count(1) == 1
    conversation = [*user("the cat"), {"role": "assistant", "content": "the cat sat"}, *user("naive")]
    whole = llm.chat(conversation, SamplingParams(max_tokens=1))[0].prompt_token_ids
    assert whole[-len(suffix) :] == suffix and suffix[0] == tokenizer.convert_tokens_to_ids("<|sep|>")


def test_templates_are_told_apart_by_whether_they_only_append(llm: LLM, smollm2_path: Path) -> None:
    # case PR-05
    tokenizer = llm.get_tokenizer()
    report = preserves_prefixes(tokenizer)
    assert report and report.differences == {} and str(report) == "the chat template preserves prefixes"
    assert preserves_prefixes(AutoTokenizer.from_pretrained(smollm2_path))

    report = preserves_prefixes(tokenizer, chat_template=ANSWER_ONLY)
    assert not report and list(report.differences) == ["reasoning in the text"]
    assert "first thoughts" in report.differences["reasoning in the text"]
    assert "does not preserve prefixes. With reasoning in the text: " in str(report)

    as_field = CHAT_TEMPLATE.replace(
        "message['content']", "(message.get('reasoning_content', '') if loop.last else '') + message['content']"
    )
    assert list(preserves_prefixes(tokenizer, chat_template=as_field).differences) == ["reasoning_content"]

    opens_with_thoughts = CHAT_TEMPLATE.replace("assistant\n' }}", "assistant\n<think></think>' }}")
    report = preserves_prefixes(tokenizer, chat_template=opens_with_thoughts)
    assert "plain turns" in report.differences and "<think></think>" in report.differences["plain turns"]

    without_system = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE
    )
    report = preserves_prefixes(tokenizer, chat_template=without_system)
    assert report and "no system" in report.refused["a system message"]

    dated = "{{ messages | length }} messages\n" + CHAT_TEMPLATE
    assert len(preserves_prefixes(tokenizer, chat_template=dated).differences) == 5
    with pytest.raises(ValueError, match="refuses these messages: never"):
        preserves_prefixes(tokenizer, chat_template="{{ raise_exception('never') }}")


def test_ids_that_the_model_does_not_have_are_refused(llm: LLM) -> None:
    session = llm.session()
    session.add_token_ids([299])
    for wrong in (300, -1, 10**6):
        with pytest.raises(ValueError, match=rf"token_ids holds {wrong}: ids must be from 0 to 299"):
            session.add_token_ids([5, wrong])
    assert session.token_ids == [299] and len(session.turns) == 1


def test_an_output_is_appended_to_the_session_that_it_is_of(llm: LLM) -> None:
    session, other = llm.session(user("a")), llm.session(user("b"))
    (output,) = llm.generate([session.token_ids], PARAMS)
    before = other.token_ids
    with pytest.raises(ValueError, match="sample is of another prompt"):
        other.append_sample(output)
    session.append_sample(output)
    assert session.token_ids == output.prompt_token_ids + output.outputs[0].token_ids
    with pytest.raises(ValueError, match="sample is of another prompt"):
        session.append_sample(output)  # a second time: the session has gone on
    (pair,) = llm.generate([other.token_ids], SamplingParams(n=2, max_tokens=2))
    with pytest.raises(ValueError, match="sample has 2 outputs"):
        other.append_sample(pair)
    assert other.token_ids == before
    check_alignment(session)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_turn_is_written_once_whatever_ended_the_sample(llm: LLM, ignore_eos: bool) -> None:
    tokenizer = llm.get_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    texts = []
    for answer in ([40, 41, end], [40, 41]):
        session = llm.session(user("q"))
        start = len(session.token_ids)
        sampled = SamplingParams(max_tokens=len(answer), forced_token_ids=answer, ignore_eos=ignore_eos)
        reason = session.generate(sampled).outputs[0].finish_reason
        assert reason == ("stop" if answer[-1] == end and not ignore_eos else "length")
        session.add(user("r"))
        check_alignment(session)
        texts.append(session.token_ids[start:])
    assert texts[0] == texts[1] and texts[0].count(end) == 2  # of the answer, and of the next message
