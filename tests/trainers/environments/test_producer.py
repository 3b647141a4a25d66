"""Episodes as samples: the trainer gets the sampler's own logprobs of every turn, and learns from its tokens alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import LLM
from rollout_trainers.config import EnvironmentSection, TrackingSection
from rollout_trainers.corrections import Mismatch
from rollout_trainers.environments import Action, EpisodeProducer, StepResult
from rollout_trainers.mismatch import MismatchWatch, examine
from rollout_trainers.packing import pack, pack_micro_batches
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.types import Example, Sample
from tests.support.environments import Echo
from tests.support.oracle import load_reference, reference_logprobs
from tests.support.tiny import make_tiny_llama

EXAMPLES = [Example([{"role": "user", "content": text}], {"number": i}) for i, text in enumerate(("a", "two"))]
SECTION = EnvironmentSection(max_turns=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends its turns soon: an id is EOS that it likes."""
    return make_tiny_llama(
        tmp_path_factory.mktemp("model"), tokenizer=True, near_uniform=True, eos_token_id=[2, *range(40, 60)]
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="8MiB", max_model_len=256)


def produce(llm: LLM, temperature: float = 1.0, step: int = 1) -> list[Sample]:
    return EpisodeProducer(llm, Echo, SECTION, temperature, 40, 3).produce(step, EXAMPLES, 3)


@pytest.fixture(scope="module")
def samples(llm: LLM) -> list[Sample]:
    return produce(llm)


# case TR-01
def test_groups_of_episodes_with_a_mask_and_one_value_for_each_token_of_the_policys(samples: list[Sample]) -> None:
    assert [sample.group for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert len({sample.seed for sample in samples}) == 6
    assert any(len(sample.policy_spans) == 3 for sample in samples)
    for sample in samples:
        assert sample.loss_mask is not None and sample.loss_mask.dtype == np.bool_
        assert sample.loss_mask[0] and sample.loss_mask[-1]
        assert len(sample.completion_token_ids) == len(sample.loss_mask)
        num = sample.num_tokens
        assert num == sum(end - start for start, end in sample.policy_spans) == len(sample.policy_token_ids)
        assert len(sample.sampled_logprobs) == len(sample.raw_logprobs) == len(sample.entropy) == num
        assert sample.episode is not None and len(sample.policy_spans) == sample.episode.num_turns
        lengths = np.cumsum([end - start for start, end in sample.policy_spans])
        assert sample.episode.turn_ends == lengths.tolist()
        assert sum(sample.episode.turn_rewards) == pytest.approx(num / 10)


# case TR-06
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_trainers_logprobs_are_the_samplers_bit_for_bit_in_every_turn(llm: LLM, temperature: float) -> None:
    samples = produce(llm, temperature)
    policy = SharedPolicy(llm.shared_model(), temperature)
    for batch in pack_micro_batches(samples, 200):
        assert torch.equal(policy.frozen_logprobs(batch), batch.sampler_logprobs)


def test_the_samplers_logprobs_are_those_of_transformers_over_the_whole_episode(
    folder: Path, samples: list[Sample]
) -> None:
    model = load_reference(folder)
    for sample in samples[:2]:
        tokens = [*sample.prompt_token_ids, *sample.completion_token_ids]
        rows = reference_logprobs(model, tokens)[:-1]
        expected = rows[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
        expected = expected[len(sample.prompt_token_ids) - 1 :][sample.loss_mask]
        np.testing.assert_allclose(sample.raw_logprobs, expected, atol=1e-4)


def test_the_same_step_is_sampled_again_the_same_and_another_one_is_not(llm: LLM, samples: list[Sample]) -> None:
    again, other = produce(llm), produce(llm, step=2)
    assert [sample.completion_token_ids for sample in again] == [sample.completion_token_ids for sample in samples]
    assert [sample.completion_token_ids for sample in other] != [sample.completion_token_ids for sample in samples]
    assert all(
        np.array_equal(one.sampled_logprobs, two.sampled_logprobs) for one, two in zip(again, samples, strict=True)
    )


# case TR-01
def test_tokens_of_the_environment_have_no_gradient_of_their_own(llm: LLM, samples: list[Sample]) -> None:
    sample = next(sample for sample in samples if len(sample.policy_spans) > 1)
    batch = pack([sample], [0])
    assert batch.targets.tolist() == sample.policy_token_ids
    assert batch.lengths.tolist() == [sample.num_tokens]
    whole = torch.tensor([*sample.prompt_token_ids, *sample.completion_token_ids])
    assert torch.equal(batch.input_ids, whole[:-1])  # all of it is read
    assert torch.equal(whole[batch.rows + 1], batch.targets)


def test_a_mismatch_is_examined_turn_by_turn(llm: LLM, samples: list[Sample]) -> None:
    policy = SharedPolicy(llm.shared_model(), 1.0)
    watch = MismatchWatch(TrackingSection())
    seen = Mismatch(1.0, 1.0, 0.0, 10)
    assert watch.is_due(1, seen)
    finding = examine(llm, policy, samples, 1.0, 400, 1, seen)
    assert finding.verdict == "none", finding.text  # the trainer's logprobs are the sampler's


def test_where_every_environment_fails_the_step_fails_and_where_some_do_they_have_what_they_have(llm: LLM) -> None:
    class Broken(Echo):
        async def step(self, action: Action) -> StepResult:
            raise OSError("no route")

    with pytest.raises(ValueError, match="all 6 environments have failed; the first with OSError: no route"):
        EpisodeProducer(llm, Broken, SECTION, 1.0, 40, 3).produce(1, EXAMPLES, 3)

    class Never(Echo):
        async def reset(self, example: Example) -> str:
            if example.columns["number"] == 1:
                raise OSError("no route")
            return "abc"

    samples = EpisodeProducer(llm, Never, SECTION, 1.0, 40, 3).produce(1, EXAMPLES, 3)
    assert [sample.num_tokens > 0 for sample in samples] == [True] * 3 + [False] * 3
    assert [sample.finish_reason for sample in samples[3:]] == ["error"] * 3
    assert sum(len(batch.sample_indices) for batch in pack_micro_batches(samples, 400)) == 3
