"""Prompts that cannot be used, and lengths at the exact limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from rollout import LLM, SamplingParams
from tests.support.tiny import make_tiny_llama
from tests.support.tokenizers import byte_level_with_bos

LIMIT = 32


def folder_with(path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A tiny model with this tokenizer."""
    folder = make_tiny_llama(path, vocab_size=300)
    tokenizer.save_pretrained(folder)
    return folder


def small(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="4MiB", max_model_len=LIMIT, max_num_batched_tokens=16)


def test_an_empty_prompt_is_refused_and_its_neighbours_run(tmp_path: Path) -> None:
    # case PR-01
    llm = small(make_tiny_llama(tmp_path, tokenizer=True))
    good = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = llm.generate([[5, 6]], good)[0].outputs[0].token_ids
    for empty in ("", [], (), {"prompt_token_ids": []}, {"prompt": ""}, {"prompt": "", "prompt_token_ids": []}):
        with pytest.raises(ValueError, match=r"prompts\[1\]: the prompt is empty"):
            llm.generate([[5, 6], empty], good)  # type: ignore[list-item]
        assert llm.num_unfinished == 0
        outputs = llm.generate([[5, 6], empty, [7]], good, on_invalid="return")  # type: ignore[list-item]
        assert outputs[0].outputs[0].token_ids == expected and len(outputs[2].outputs[0].token_ids) == 4
        assert outputs[1].outputs == [] and "the prompt is empty" in (outputs[1].error or "")
    for space in (" ", "\n", "  \n "):  # white space is a prompt
        assert len(llm.generate(space, good)[0].outputs[0].token_ids) == 4
    assert llm.generate([], good) == []
    for nothing in ({"messages": []}, [[], [5]], {"prompt": None}, {}):
        with pytest.raises(
            ValueError, match=r"prompts\[0\]: (the conversation is empty|the prompt is empty|prompt=\{)"
        ):
            llm.generate(nothing, good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the conversation is empty"):
        llm.chat([[]], good)
    assert llm.generate([[5, 6]], good)[0].outputs[0].token_ids == expected


def test_an_empty_text_is_a_prompt_where_the_tokenizer_begins_it_with_a_token(tmp_path: Path) -> None:
    # cases PR-01, PR-04
    llm = LLM(folder_with(tmp_path, byte_level_with_bos()), kv_cache_memory="4MiB")
    output = llm.generate("", SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert output.prompt_token_ids == [1] and len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("token_id", [-1, 131, 1131, 2**31])
def test_ids_outside_the_vocabulary_are_refused_by_field_and_disturb_nobody(token_id: int, tmp_path: Path) -> None:
    # case ST-05
    llm = small(make_tiny_llama(tmp_path))
    good = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    alone = llm.generate([[5]], good)[0].outputs[0]
    llm.enqueue([[5]], good)
    for _ in range(5):
        llm.step()
    with pytest.raises(ValueError, match=f"prompt_token_ids holds {token_id}: ids must be from 0 to 130"):
        llm.generate([[5], [5, token_id]])
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate([[5]], SamplingParams(stop_token_ids=[token_id], min_tokens=3))
    with pytest.raises(ValueError, match="prompt_token_ids holds"):
        llm.score([5, token_id])
    with pytest.raises(ValueError, match="integers"):
        llm.generate([[5], [5, 1.5]])  # type: ignore[list-item]
    outputs = llm.generate([[5, token_id], [5]], good, on_invalid="return")
    assert "prompt_token_ids holds" in (outputs[0].error or "") and outputs[1].outputs[0].token_ids == alone.token_ids
    ((neighbour,),) = [output.outputs for output in llm.wait_for_completion()]
    assert neighbour.token_ids == alone.token_ids
    assert neighbour.raw_logprobs.tolist() == alone.raw_logprobs.tolist()
    assert llm.num_unfinished == 0


def test_prompt_and_output_never_exceed_the_limit(tmp_path: Path) -> None:
    # case PR-02
    llm = small(make_tiny_llama(tmp_path))
    for max_tokens in (None, 1, 5):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        completion = llm.generate([[3] * (LIMIT - 1)], params)[0].outputs[0]
        assert len(completion.token_ids) == 1 and completion.finish_reason == "length"
        completion = llm.generate([[3] * (LIMIT - 4)], params)[0].outputs[0]
        assert len(completion.token_ids) == min(max_tokens or 4, 4) and completion.finish_reason == "length"
        for length in (LIMIT, LIMIT + 1):
            with pytest.raises(ValueError, match=f"has {length} tokens and max_model_len is {LIMIT}"):
                llm.generate([[3] * length], params)
            outputs = llm.generate([[4, 5], [3] * length, [6]], params, on_invalid="return")
            assert [len(output.outputs) for output in outputs] == [1, 0, 1]
            assert f"{length} tokens" in (outputs[1].error or "")
    with pytest.raises(ValueError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)


def test_a_prompt_of_exactly_the_limit_can_be_scored(tmp_path: Path) -> None:
    # case PR-02
    llm = small(make_tiny_llama(tmp_path))
    assert len(llm.score([[3] * LIMIT])[0].logprobs) == LIMIT - 1
    with pytest.raises(ValueError, match=f"has {LIMIT + 1} tokens, max_model_len is {LIMIT}"):
        llm.score([[3] * (LIMIT + 1)])
    with pytest.raises(ValueError, match="empty"):
        llm.score([[]])


def test_a_request_that_the_pool_can_never_hold_is_refused_at_once(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    llm = LLM(folder, kv_cache_memory=16_500, block_size=16)  # two blocks of 8,192 bytes
    assert llm.get_metrics()["kv_cache_blocks"] == 2
    with pytest.raises(ValueError, match="need 3 KV blocks of 16 tokens, the pool has 2"):
        llm.generate([[3] * 20], SamplingParams(max_tokens=20))
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    assert len(llm.generate([[3] * 20], params)[0].outputs[0].token_ids) == 13
    outputs = llm.generate([[3] * 20, [4] * 40], params, on_invalid="return")
    assert outputs[0].error is None and "KV blocks" in (outputs[1].error or "")


def test_an_interrupted_generate_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # case SC-04
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    params = SamplingParams(n=4, max_tokens=200, seed=1, ignore_eos=True)
    step, num_steps = llm.engine.step, 0

    def interrupted() -> list:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7], [8, 9]], params)
    monkeypatch.undo()
    metrics = llm.get_metrics()
    assert llm.num_unfinished == metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage"] == 0
    outputs = llm.generate([[9, 9], [5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [output.prompt_token_ids for output in outputs] == [[9, 9], [5]]
    llm.abort(["unknown", outputs[0].request_id])  # not known, and finished: nothing happens


def test_every_way_in_gives_a_prompt_one_bos(tmp_path: Path) -> None:
    # case PR-04
    llm = LLM(folder_with(tmp_path, byte_level_with_bos()), kv_cache_memory="4MiB")
    tokenizer: Any = llm.get_tokenizer()
    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)

    def prompt_ids(prompt: Any) -> list[int]:
        return llm.generate(prompt, params)[0].prompt_token_ids

    text = "the cat"
    assert prompt_ids(text) == prompt_ids({"prompt": text}) == tokenizer(text).input_ids
    assert tokenizer(text).input_ids[0] == tokenizer.bos_token_id == 1
    messages = [{"role": "user", "content": text}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert expected.count(1) == 1 and expected[0] == 1
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered.startswith("<s>") and tokenizer(rendered).input_ids[:2] == [1, 1]  # what would go wrong
    assert llm.chat(messages, params)[0].prompt_token_ids == expected
    for prompt in (messages, {"messages": messages}, rendered, {"prompt": rendered}):
        assert prompt_ids(prompt) == expected
    for ids in ([5, 6], [1, 5, 6], [1, 1, 5]):  # token ids are taken as they are
        assert prompt_ids(ids) == prompt_ids({"prompt_token_ids": ids}) == ids
    assert prompt_ids("<s><s>the") == tokenizer("<s>the").input_ids  # two are written, and two come


def test_dicts_as_vllm_has_them_are_prompts_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    llm = LLM(folder_with(tmp_path, byte_level_with_bos()), kv_cache_memory="4MiB")
    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": [7, 8], "prompt": "as text", "multi_modal_data": None}, params)[0]
    assert output.prompt_token_ids == [7, 8] and output.prompt == "as text"
    output = llm.generate({"prompt": "ab", "prompt_token_ids": None, "cache_salt": "mine"}, params)[0]
    assert output.prompt_token_ids[0] == 1 and output.prompt == "ab"
    for prompt, message in (
        ({"prompt": "ab", "multi_modal_data": {"image": 1}}, "prompt keys 'multi_modal_data' are not supported"),
        ({"prompt_embeds": [1.0]}, "prompt keys 'prompt_embeds' are not supported"),
        ({"prompt": 5}, "prompt=5 is not valid: it must be text"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids='ab' is not valid"),
        ({"prompt": "ab", "cache_salt": 3}, "cache_salt=3 is not valid"),
        ({"cache_salt": "mine"}, "it must have 'prompt', 'prompt_token_ids' or 'messages'"),
        ({"messages": "hello"}, "messages='hello' is not valid"),
        ({"messages": [{"content": "no role"}]}, "a list of dicts with a 'role'"),
        (3, "prompts=3 is not valid"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompt, params)  # type: ignore[arg-type]


TELLING_TEMPLATE = (
    "{% if tools %}tools={% for tool in tools %}{{ tool['function']['name'] }},{% endfor %} {% endif %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }} {% endif %}"
    "{% for message in messages %}[{{ message['role'] }}|{{ message.get('content') }}|"
    "{{ message.get('reasoning_content') }}|{{ message.get('tool_calls') | tojson }}|{{ message.get('tool_call_id') }}]"
    "{% endfor %}{% if add_generation_prompt %}[assistant{% endif %}"
)


def test_tools_and_reasoning_reach_the_template_untouched(tmp_path: Path) -> None:
    tokenizer = byte_level_with_bos()
    tokenizer.chat_template = TELLING_TEMPLATE
    llm = LLM(folder_with(tmp_path, tokenizer), kv_cache_memory="4MiB", max_model_len=512)
    params = SamplingParams(max_tokens=1, seed=1, ignore_eos=True)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    conversation = [
        {"role": "user", "content": "1 and 1?"},
        {"role": "assistant", "content": None, "reasoning_content": "I add", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]

    def shown(**options: Any) -> str:
        text = llm.get_tokenizer().decode(llm.chat(conversation, params, **options)[0].prompt_token_ids)
        assert isinstance(text, str)
        return text

    plain = shown()
    assert plain.startswith("[user|1 and 1?|None|null|None][assistant|None|I add|[{") and plain.endswith("[assistant")
    assert '"arguments": {"a": 1}' in plain and "[tool|2|None|null|c1]" in plain
    assert shown(tools=tools) == "tools=add, " + plain
    assert shown(chat_template_kwargs={"enable_thinking": False}) == "thinking=False " + plain
    assert shown(add_generation_prompt=False) == plain.removesuffix("[assistant")
    assert shown(chat_template="{{ messages | length }} messages") == "3 messages"
    options: dict[str, Any] = {"tools": tools, "chat_template_kwargs": {"enable_thinking": True}}
    in_dict = llm.generate({"messages": conversation, **options}, params)[0].prompt_token_ids
    assert in_dict == llm.chat(conversation, params, **options)[0].prompt_token_ids
    with pytest.raises(ValueError, match="prompt keys 'tools' are not used without 'messages'"):
        llm.generate({"prompt": "ab", "tools": tools}, params)
    with pytest.raises(ValueError, match=r"prompts\[0\]: the chat template refuses these messages: no"):
        llm.chat(conversation, params, chat_template="{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match=r"prompts\[0\]: the chat template refuses these messages"):
        llm.chat(conversation, params, chat_template="{{ 'a' + messages[1]['content'] }}")


def test_bytes_are_no_prompt(tmp_path: Path) -> None:
    llm = small(make_tiny_llama(tmp_path, tokenizer=True))
    for wrong in (b"abc", bytearray(b"abc"), ["text", b"abc"], {"prompt": b"abc"}, {"prompt_token_ids": b"abc"}):
        with pytest.raises(ValueError, match=r"b'abc'.* is not valid"):
            llm.generate(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"b'abc'.* is not valid|score takes token ids only"):
            llm.score(wrong)  # type: ignore[arg-type]
    assert llm.num_unfinished == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_tensors_of_integers_are_prompts(tmp_path: Path, dtype: torch.dtype) -> None:
    llm = small(make_tiny_llama(tmp_path, tokenizer=True))
    params = SamplingParams(max_tokens=3, seed=1)
    rows = torch.tensor([[5, 6, 7], [8, 9, 10]], dtype=dtype)
    expected = llm.generate(rows.tolist(), params)
    for given in (
        rows,
        list(rows),
        [{"prompt_token_ids": row} for row in rows],
        rows.numpy(),
    ):
        outputs = llm.generate(given, params)  # type: ignore[arg-type]
        assert [output.prompt_token_ids for output in outputs] == [[5, 6, 7], [8, 9, 10]]
        assert [output.outputs[0].token_ids for output in outputs] == [o.outputs[0].token_ids for o in expected]
    (single,) = llm.generate(rows[0], params)  # type: ignore[arg-type]
    assert single.prompt_token_ids == [5, 6, 7] and all(type(token) is int for token in single.prompt_token_ids)
    assert llm.score(rows)[1].token_ids == [8, 9, 10]  # type: ignore[arg-type]
    for wrong in (rows.float(), rows.bool(), rows[None], rows[0, 0]):
        with pytest.raises(ValueError, match=r"prompt_token_ids is a tensor of torch\.\w+ and shape"):
            llm.generate(wrong, params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"prompts\[0\]: the prompt is empty"):
        llm.generate(rows[0, :0], params)  # type: ignore[arg-type]


def test_score_says_that_it_takes_token_ids_only(tmp_path: Path) -> None:
    llm = small(make_tiny_llama(tmp_path, tokenizer=True))
    message = [{"role": "user", "content": "a"}]
    for wrong in ("text", ["text"], [[5, 6], "text"], message, [message], {"prompt": "text"}, {"messages": message}):
        with pytest.raises(ValueError, match=r"token_ids\[\d\]: score takes token ids only"):
            llm.score(wrong)  # type: ignore[arg-type]
    assert llm.score([{"prompt": "kept", "prompt_token_ids": [5, 6]}])[0].token_ids == [5, 6]
