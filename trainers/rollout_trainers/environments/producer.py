"""Samples that are episodes: the policy takes turns with an environment, and all of it is one sequence to train on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout import LLM
from rollout.lora.request import LoRARequest
from rollout.outputs import PolicyVersionSpan
from rollout.prompts import encode_prompt
from rollout.sampling_params import SamplingParams
from rollout_trainers.config import EnvironmentSection
from rollout_trainers.environments.episodes import EnvironmentFactory, Episode, run_episodes
from rollout_trainers.producer import check_reproducible, check_version, derive_seed
from rollout_trainers.types import EpisodeNotes, Example, Sample, messages_text


class EpisodeProducer:
    """Stands where `RolloutProducer` does, for a task with an environment.

    `temperature` and `max_tokens` are of each turn. With an `adapter` that the engine applies all are sampled with it.
    """

    def __init__(
        self,
        engine: LLM,
        make_environment: EnvironmentFactory,
        section: EnvironmentSection,
        temperature: float,
        max_tokens: int,
        seed: int,
        adapter: LoRARequest | None = None,
    ) -> None:
        self.engine = engine
        self.adapter = adapter
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.seed = seed
        self._make_environment = make_environment
        self._section = section

    @property
    def max_completion_tokens(self) -> int:
        """Of the policy's, in all turns of an episode."""
        return self.max_tokens * self._section.max_turns

    def produce(self, step: int, examples: Sequence[Example], group_size: int, first_place: int = 0) -> list[Sample]:
        """`group_size` episodes of each example, group after group; each has a seed of its own, which follows from
        (seed, step, place, its number in the group), where places count from `first_place` on.

        Raises as `RolloutProducer.produce` does, and `ValueError` where every environment has failed.
        """
        places = range(first_place, first_place + len(examples))
        params = [
            episode_params(self.temperature, self.max_tokens, self.seed, step, place, member)
            for place in places
            for member in range(group_size)
        ]
        repeated = [example for example in examples for _ in range(group_size)]
        groups = [place for place in places for _ in range(group_size)]
        return self._run(repeated, params, groups, is_trained_on=True)

    def evaluate(
        self, examples: Sequence[Example], temperature: float, max_tokens: int, first_place: int = 0
    ) -> list[Sample]:
        """One episode of each example; the seeds are the same whenever it is called, and follow from the examples'
        places, counted from `first_place` on."""
        places = range(first_place, first_place + len(examples))
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=max_tokens, seed=derive_seed(self.seed, "evaluation", place)
            )
            for place in places
        ]
        return self._run(examples, params, places, is_trained_on=False)

    def _run(
        self,
        examples: Sequence[Example],
        params: Sequence[SamplingParams],
        groups: Sequence[int],
        is_trained_on: bool,
    ) -> list[Sample]:
        version = self.engine.policy_version
        episodes = run_episodes(self.engine, examples, params, self._make_environment, self._section, self.adapter)
        for episode in episodes:
            check_episode(episode, self.temperature if is_trained_on else None)
            for output in episode.outputs:
                check_version(output.outputs[0], version)
        samples = [
            episode_sample(self.engine, episode, each.seed, group)
            for episode, each, group in zip(episodes, params, groups, strict=True)
        ]
        check_environments(samples)
        return samples


def episode_params(
    temperature: float, max_tokens: int, seed: int, step: int, place: int, member: int
) -> SamplingParams:
    """Those of each turn of an episode: number `member` of the group at `place` of `step`, in the run of `seed`."""
    return SamplingParams(
        temperature=temperature, max_tokens=max_tokens, seed=derive_seed(seed, "episode", step, place, member)
    )


def check_episode(episode: Episode, temperature: float | None) -> None:
    """Raises `ValueError` where the engine has failed in a turn, and where a trainer could not reproduce the logprobs
    at this `temperature` (None: none is to)."""
    for output in episode.outputs:
        if output.outputs[0].finish_reason == "error":
            raise ValueError(f"request {output.request_id} ended with 'error': it can't be trained on")
        if temperature is not None:
            check_reproducible(output, temperature)


def check_environments(samples: Sequence[Sample]) -> None:
    """Raises `ValueError` where every sample is an episode whose environment has failed."""
    if have_failed(samples):
        first = samples[0].episode
        assert first is not None
        raise ValueError(f"all {len(samples)} environments have failed; the first with {first.error}")


def have_failed(samples: Sequence[Sample]) -> bool:
    """Whether there are samples, and all are episodes whose environment has failed."""
    return bool(samples) and all(sample.episode is not None and sample.finish_reason == "error" for sample in samples)


def episode_sample(llm: LLM, episode: Episode, seed: int | None, group: int) -> Sample:
    """The tokens of an episode up to the policy's last one, and which policy has sampled each. Where the policy had no
    turn there are none."""
    assert seed is not None
    session = episode.session
    token_ids = encode_prompt(episode.example.prompt, llm.get_tokenizer()).token_ids
    start = end = len(token_ids)
    loss_mask = np.zeros(0, np.bool_)
    empty = np.zeros(0, np.float32)
    sampled_logprobs, raw_logprobs, entropy = empty, empty, empty
    if session is not None:
        token_ids = session.token_ids
        sampled = [turn for turn in session.turns if turn.is_sampled and turn.end > turn.start]
        start, end = (sampled[0].start, sampled[-1].end) if sampled else (len(token_ids), len(token_ids))
        loss_mask = np.array(session.loss_mask[start:end], np.bool_)
        sampled_logprobs = session.sampled_logprobs[start:end][loss_mask]
        raw_logprobs = session.raw_logprobs[start:end][loss_mask]
        entropy = session.entropy[start:end][loss_mask]
    versions = _version_spans(episode)
    newest = versions[-1].version if versions else llm.policy_version
    return Sample(
        example=episode.example,
        group=group,
        prompt_token_ids=token_ids[:start],
        completion_token_ids=token_ids[start:end],
        text=_text(llm, episode, token_ids[start:end]),
        finish_reason=episode.finish_reason,
        sampled_logprobs=sampled_logprobs,
        raw_logprobs=raw_logprobs,
        entropy=entropy,
        seed=seed,
        sample_index=0,
        policy_version=newest,
        receipt_id=_receipt_id(episode, newest),
        versions=versions if len(versions) > 1 else (),
        loss_mask=loss_mask,
        episode=EpisodeNotes(
            messages=[dict(message) for message in episode.messages],
            turn_rewards=episode.turn_rewards,
            turn_ends=np.cumsum([len(output.outputs[0].token_ids) for output in episode.outputs], dtype=int).tolist(),
            environment=episode.environment,
            metrics=dict(episode.metrics),
            error=episode.error,
        ),
    )


def _version_spans(episode: Episode) -> tuple[PolicyVersionSpan, ...]:
    """Which policy has sampled which tokens, counted in the policy's own: what it was answered does not count."""
    spans: list[PolicyVersionSpan] = []
    num_before = 0
    for output in episode.outputs:
        (completion,) = output.outputs
        for span in completion.policy_versions:
            if spans and spans[-1].version == span.version:
                spans[-1] = spans[-1]._replace(end=num_before + span.end)
            else:
                spans.append(PolicyVersionSpan(span.version, num_before + span.start, num_before + span.end))
        num_before += len(completion.token_ids)
    return tuple(spans)


def _receipt_id(episode: Episode, version: int) -> str | None:
    """Of the weights of a policy that has sampled some turn."""
    known = [output.receipt_ids[version] for output in episode.outputs if version in output.receipt_ids]
    return known[-1] if known else None


def _text(llm: LLM, episode: Episode, token_ids: list[int]) -> str:
    """For people to read: of a chat who said what; of other episodes all that came after the prompt."""
    if episode.messages:
        return messages_text(episode.messages)
    text = llm.get_tokenizer().decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # one list of ids, so not a list of texts
    return text
