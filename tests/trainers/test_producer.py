"""Samples for training are drawn from a distribution that the trainer knows, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout import LLM, RequestOutput
from rollout_trainers.config import SamplingSection
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.types import Example
from tests.support.tiny import make_tiny_llama

EXAMPLES = [Example("abc", {}), Example("the", {})]


class OpinionatedLLM(LLM):
    """An engine that adds parameters of its own to what it is asked for."""

    added: dict[str, Any] = {}  # noqa: RUF012

    def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> list[RequestOutput]:
        return super().generate(prompts, [replace(params, **self.added) for params in sampling_params], **options)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> OpinionatedLLM:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, near_uniform=True)
    return OpinionatedLLM(folder, kv_cache_memory="8MiB")


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_samples_of_the_whole_distribution_are_taken(engine: OpinionatedLLM, temperature: float) -> None:
    engine.added = {}
    samples = RolloutProducer(engine, temperature, 12, 3).produce(1, EXAMPLES, 3)
    assert [sample.group for sample in samples] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ({"repetition_penalty": 1.3}, "a penalty, a bias or a logits processor has changed its logprob"),
        ({"frequency_penalty": 0.9}, "a penalty, a bias or a logits processor has changed its logprob"),
        ({"logit_bias": {9: 4.0}}, "a penalty, a bias or a logits processor has changed its logprob"),
        ({"top_p": 0.9}, "filters or masks have left"),
        ({"min_tokens": 2}, "filters or masks have left"),
        ({"bad_words": ["e"]}, "filters or masks have left"),
    ],
)
def test_samples_that_would_make_importance_ratios_wrong_are_refused(
    engine: OpinionatedLLM, added: dict[str, Any], reason: str
) -> None:
    engine.added = added
    producer = RolloutProducer(engine, 1.0, 12, 3)
    with pytest.raises(ValueError, match=reason):
        producer.produce(1, EXAMPLES, 4)
    assert len(producer.evaluate(EXAMPLES, 0.0, 8)) == 2  # nothing is learned from these


@pytest.mark.parametrize("field", ["repetition_penalty", "logit_bias", "top_p", "logits_processors"])
def test_the_configuration_has_no_such_parameters(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        SamplingSection(**{field: 1.0})  # type: ignore[arg-type]
