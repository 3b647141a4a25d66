"""`generation_config.json` changes nothing by itself, and what it changes when asked to is said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rollout import LLM, SamplingParams
from tests.support.tiny import make_tiny_llama

SUGGESTED = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 7,
    "do_sample": True,
    "eos_token_id": [2, 90],
    "bos_token_id": 1,
    "transformers_version": "4.40.0",
}


def folder_with(path: Path, content: dict[str, Any]) -> Path:
    folder = make_tiny_llama(path)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def small(folder: Path, **options: Any) -> LLM:
    return LLM(folder, kv_cache_memory="4MiB", **options)


def test_the_file_changes_nothing_unless_it_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = small(folder_with(tmp_path, SUGGESTED))
    assert llm.get_default_sampling_params() == SamplingParams()
    assert len(llm.generate([[5, 6]], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 16
    assert caplog.messages == []


def test_the_file_says_what_is_sampled_with_where_nothing_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = small(folder_with(tmp_path, SUGGESTED), generation_config="auto", seed=3)
    defaults = SamplingParams(temperature=0.6, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1, max_tokens=7)
    assert llm.get_default_sampling_params() == defaults
    (line,) = caplog.messages
    for change in ("temperature 1.0 -> 0.6", "top_p 1.0 -> 0.9", "top_k 0 -> 40", "min_p 0.0 -> 0.05"):
        assert change in line
    assert "max_tokens 16 -> 7" in line and "repetition_penalty 1.0 -> 1.1" in line
    assert line.endswith("; not used: do_sample=True") and str(tmp_path) in line
    assert caplog.records[0].levelno == logging.WARNING

    expected = small(tmp_path, seed=3).generate([[5, 6], [7]], defaults)
    for outputs in (llm.generate([[5, 6], [7]]), list(llm.stream([[5, 6], [7]]))[-2:]):
        assert all(len(output.outputs[0].token_ids) <= 7 for output in outputs)
        if outputs[0].request_id == "0":
            assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    llm.enqueue([[5, 6]])
    assert all(len(output.outputs[0].token_ids) <= 7 for output in llm.wait_for_completion())


def test_explicit_parameters_are_never_touched(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, SUGGESTED)
    explicit = SamplingParams(seed=4, ignore_eos=True)
    mine, theirs = (
        small(folder, generation_config=choice).generate([[5, 6]], explicit)[0].outputs[0] for choice in ("auto", "off")
    )
    assert mine.token_ids == theirs.token_ids and len(mine.token_ids) == 16
    assert mine.sampled_logprobs.tolist() == theirs.sampled_logprobs.tolist()


def test_the_file_may_lie_in_another_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.25, "num_beams": 4, "penalty_alpha": null}')
    llm = small(folder, generation_config=str(other))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25)
    assert "temperature 1.0 -> 0.25; not used: num_beams=4, penalty_alpha=None" in caplog.messages[0]
    caplog.clear()
    (folder / "generation_config.json").unlink()
    assert small(folder, generation_config="auto").get_default_sampling_params() == SamplingParams()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperature": -1}', "generation_config.json: temperature=-1 is not valid"),
        ('{"max_new_tokens": 0}', "generation_config.json: max_tokens=0 is not valid"),
        ("[1]", "must hold an object"),
        ("{", "cannot be read"),
    ],
)
def test_a_file_that_suggests_what_cannot_be_is_refused(content: str, message: str, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        small(folder, generation_config=str(other))
    with pytest.raises(ValueError, match="generation_config='nowhere' is not valid"):
        small(folder, generation_config="nowhere")
    with pytest.raises(ValueError, match="generation_config=None is not valid"):
        small(folder, generation_config=None)
