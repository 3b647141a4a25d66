"""Mistral's sliding window against transformers, which masks a matrix of all scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import LLM, SamplingParams
from tests.support.oracle import assert_greedy_matches, load_reference, reference_logprobs
from tests.support.tiny import TINY_WINDOW, make_tiny_model

PROMPT = torch.randint(3, 131, (5 * TINY_WINDOW,), generator=torch.Generator().manual_seed(7)).tolist()
ENGINE = {"kv_cache_memory": "2MiB", "max_num_batched_tokens": 17, "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("mistral"), "MistralForCausalLM", torch.float32)


def with_window(folder: Path, copy: Path, window: object) -> Path:
    """The same checkpoint with another window in its config."""
    copy.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
    return copy


def test_scores_and_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    llm, reference = LLM(folder, **ENGINE), load_reference(folder)
    expected = reference_logprobs(reference, PROMPT)[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]
    np.testing.assert_allclose(llm.score(PROMPT)[0].logprobs, expected.numpy(), atol=2e-4)
    (output,) = llm.generate(PROMPT[:20], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert_greedy_matches(reference, PROMPT[:20], output.outputs[0].token_ids)


def test_the_window_is_the_configs(folder: Path, tmp_path: Path) -> None:
    """Without one, logprobs are others from the first token on that would not see all."""
    windowed = LLM(folder, **ENGINE).score(PROMPT)[0].logprobs
    whole = LLM(with_window(folder, tmp_path / "whole", None), **ENGINE).score(PROMPT)[0].logprobs
    assert np.array_equal(windowed[:TINY_WINDOW], whole[:TINY_WINDOW])
    assert np.abs(windowed[TINY_WINDOW:] - whole[TINY_WINDOW:]).min() > 1e-5


def test_a_window_that_is_no_number_of_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sliding_window=0 is not valid: it must be an integer of at least 1, or null"):
        LLM(with_window(folder, tmp_path / "none", 0), **ENGINE)
