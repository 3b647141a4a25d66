"""Episodes: many at once, each as it would be alone; what goes wrong in one ends that one."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout import LLM, SamplingParams
from rollout_trainers.config import EnvironmentSection
from rollout_trainers.environments import Action, Environment, Episode, StepResult
from rollout_trainers.types import Example
from tests.support.environments import Echo, ending_params, play
from tests.support.tiny import make_tiny_llama

CHAT = [Example([{"role": "user", "content": text}], {"number": i}) for i, text in enumerate(("a", "two", "and then"))]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, near_uniform=True)
    return LLM(folder, kv_cache_memory="8MiB", max_model_len=256)


def tokens_of(episode: Episode) -> list[int]:
    assert episode.session is not None
    return episode.session.token_ids


def long_params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=200, seed=seed, ignore_eos=True)


# case TR-01
def test_what_was_sampled_is_never_tokenised_again_and_the_mask_is_true_on_it_alone(llm: LLM) -> None:
    for episode in play(llm, CHAT, Echo):
        assert episode.finish_reason == "stop" and len(episode.outputs) == 3
        session, environment = episode.session, episode.environment
        assert session is not None and isinstance(environment, Echo)
        own = [token for token, is_own in zip(session.token_ids, session.loss_mask, strict=True) if is_own]
        assert own == [token for output in episode.outputs for token in output.outputs[0].token_ids]
        assert [action.token_ids for action in environment.actions] == [
            output.outputs[0].token_ids for output in episode.outputs
        ]
        for output in episode.outputs:  # each turn was sampled from all that came before it
            end = len(output.prompt_token_ids)
            assert session.token_ids[:end] == output.prompt_token_ids
            assert session.token_ids[end : end + len(output.outputs[0].token_ids)] == output.outputs[0].token_ids
        assert [message["role"] for message in episode.messages] == [*("assistant", "user") * 2, "assistant"]
        assert environment.is_closed and environment.metrics["length"] == len(own)
        assert episode.turn_rewards == [len(action.token_ids) / 10 for action in environment.actions]


def test_an_episode_is_the_same_alone_among_others_in_any_order_and_a_few_at_a_time(llm: LLM) -> None:
    together = play(llm, CHAT, lambda: Echo(wait=lambda number: 0.01 * (3 - number)))
    few = play(llm, CHAT, Echo, EnvironmentSection(max_concurrent=1))
    llm.reset_prefix_cache()
    for place, example in enumerate(CHAT):
        (alone,) = play(llm, [example], Echo, params=lambda _, place=place: ending_params(place))
        assert tokens_of(alone) == tokens_of(together[place]) == tokens_of(few[place])
    assert llm.num_unfinished == 0


def test_environments_think_while_the_engine_samples_and_at_once(llm: LLM) -> None:
    running, most = 0, 0

    class Slow(Echo):
        async def step(self, action: Action) -> StepResult:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            return await super().step(action)

    play(llm, CHAT * 2, Slow, params=lambda _: ending_params(0))
    assert most > 1
    most = 0
    play(llm, CHAT * 2, Slow, EnvironmentSection(max_concurrent=1))
    assert most == 1


class Failing(Echo):
    """Goes wrong in the episode of number 1, in its second turn."""

    def __init__(self, failure: Any) -> None:
        super().__init__()
        self.failure = failure

    async def step(self, action: Action) -> StepResult:
        if self.number == 1 and len(self.actions) == 1:
            return await self.failure() if asyncio.iscoroutinefunction(self.failure) else self.failure()
        return await super().step(action)


def crash() -> StepResult:
    raise OSError("no route")


def leave() -> StepResult:
    raise SystemExit(3)


async def cancel() -> StepResult:
    raise asyncio.CancelledError


async def hang() -> StepResult:
    await asyncio.sleep(1000)
    raise AssertionError


@pytest.mark.parametrize(
    ("failure", "reason", "error"),
    [
        (crash, "error", "OSError: no route"),
        (leave, "error", "RuntimeError: it raised SystemExit(3)"),
        (cancel, "error", "it cancelled itself"),
        (hang, "timeout", "a call took more than 0.3 s"),
        (lambda: None, "error", "step of the environment returned None"),
        (lambda: ("x", float("nan"), False), "error", "a reward of nan: it must be a finite number"),
        (lambda: ("x", True, False), "error", "a reward of True: it must be a finite number"),
        (lambda: ("x", "1", False), "error", "a reward of '1': it must be a finite number"),
        (lambda: ("x", 1.0, 1), "error", "done=1: it must be True or False"),
        (lambda: (7, 1.0, False), "error", "returned 7: an observation must be text"),
        (lambda: ([{"role": "user"}], 1.0, False), "error", "ValueError"),  # the template takes no such message
        (lambda: ([5000], 1.0, False), "error", "ids must be from 0 to 130"),
    ],
    ids=["crash", "exit", "cancel", "hang", "nothing", "nan", "bool", "text", "done", "observation", "message", "ids"],
)
def test_what_fails_ends_its_episode_alone_with_what_it_has(llm: LLM, failure: Any, reason: str, error: str) -> None:
    section = EnvironmentSection(step_timeout=0.3)
    episodes = play(llm, CHAT, lambda: Failing(failure), section)
    whole = play(llm, CHAT, Echo)
    failed = episodes[1]
    assert failed.finish_reason == reason and failed.error is not None and error in failed.error
    assert len(failed.outputs) == 2
    assert tokens_of(whole[1])[: len(tokens_of(failed))] == tokens_of(failed)
    assert failed.turn_rewards[:1] == whole[1].turn_rewards[:1]
    for place in (0, 2):
        assert episodes[place].finish_reason == "stop" and tokens_of(episodes[place]) == tokens_of(whole[place])
    assert all(isinstance(each.environment, Echo) and each.environment.is_closed for each in episodes)
    assert llm.num_unfinished == 0


class Numbers(Environment):
    """Calls no `super().__init__()`, and answers with scalars of NumPy's and torch's."""

    def __init__(self, metrics: Any) -> None:
        self.own = metrics

    async def step(self, action: Action) -> StepResult:
        self.metrics["seen"] = np.float32(2)  # type: ignore[assignment]
        if self.own is not None:
            self.metrics = self.own
        return StepResult("", reward=np.float32(0.5), done=np.True_)  # type: ignore[arg-type]


def test_numbers_may_be_numpys_and_an_environment_need_not_call_the_constructor_of_its_base(llm: LLM) -> None:
    for episode in play(llm, CHAT, lambda: Numbers(None)):
        assert (episode.finish_reason, episode.turn_rewards, episode.metrics) == ("stop", [0.5], {"seen": 2.0})


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        (7, "metrics of the environment are 7: they must be numbers by name"),
        ({"seen": float("nan")}, "metric 'seen' has the value nan: it must be a finite number"),
        ({"reward": 1.0}, "metric 'reward' is not valid: the trainer logs a metric of this name"),
    ],
)
def test_metrics_of_an_environment_that_are_none_end_its_episode_with_an_error(
    llm: LLM, metrics: Any, error: str
) -> None:
    for episode in play(llm, CHAT, lambda: Numbers(metrics)):
        assert episode.finish_reason == "error" and episode.error is not None and error in episode.error
        assert episode.metrics == {} and len(episode.outputs) == 1


class WithoutTools(Echo):
    @property
    def tools(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no tools today")


def test_an_environment_whose_tools_cannot_be_told_ends_its_own_episode(llm: LLM) -> None:
    made = iter(range(3))
    episodes = play(llm, CHAT, lambda: WithoutTools() if next(made) == 0 else Echo())
    assert sorted(episode.finish_reason for episode in episodes) == ["error", "stop", "stop"]
    assert [episode.error for episode in episodes if episode.error] == ["RuntimeError: no tools today"]


def test_an_environment_that_cannot_be_made_or_begun_has_an_episode_without_tokens(llm: LLM) -> None:
    made = iter(range(3))

    def make() -> Environment:
        if next(made) == 0:
            raise ConnectionError("no sandbox left")
        return Echo()

    episodes = play(llm, CHAT, make)
    failed = [episode for episode in episodes if episode.finish_reason == "error"]
    assert [episode.error for episode in failed] == ["ConnectionError: no sandbox left"]
    assert failed[0].session is None and failed[0].outputs == []
    assert sum(episode.finish_reason == "stop" for episode in episodes) == 2


def test_an_environment_that_blocks_the_loop_does_not_hold_up_the_end(llm: LLM) -> None:
    release = threading.Event()

    class Blocking(Echo):
        async def step(self, action: Action) -> StepResult:
            release.wait(20)
            return await super().step(action)

    try:
        (episode,) = play(llm, CHAT[:1], Blocking, EnvironmentSection(step_timeout=0.2))
        assert episode.finish_reason == "timeout"
    finally:
        release.set()


def test_limits_of_turns_tokens_and_room(llm: LLM) -> None:
    (two,) = play(llm, CHAT[:1], lambda: Echo(9), EnvironmentSection(max_turns=2))
    assert two.finish_reason == "max_turns" and len(two.outputs) == len(two.turn_rewards) == 2
    (cut,) = play(llm, CHAT[:1], Echo, params=lambda seed: SamplingParams(max_tokens=3, seed=seed, ignore_eos=True))
    assert cut.finish_reason == "length" and len(cut.outputs) == len(cut.turn_rewards) == 1

    class Wordy(Echo):
        async def step(self, action: Action) -> StepResult:
            return StepResult("x" * 300)

    (full,) = play(llm, CHAT[:1], Wordy)
    assert full.finish_reason == "length" and full.error is None and len(full.outputs) == 1
    assert full.session is not None and len(full.session.token_ids) > llm.max_model_len  # what no turn saw


def test_a_whole_episode_that_takes_too_long_keeps_the_tokens_of_the_turn_it_was_in(llm: LLM) -> None:
    steps = llm.step

    def slow_step(*args: Any) -> Any:
        time.sleep(0.02)
        return steps(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "step", slow_step)
        (episode,) = play(llm, CHAT[:1], Echo, EnvironmentSection(episode_timeout=0.3), params=long_params)
    assert episode.finish_reason == "timeout"
    assert 0 < len(episode.outputs[0].outputs[0].token_ids) < 200
    (whole,) = play(llm, CHAT[:1], Echo, params=long_params)
    assert tokens_of(whole)[: len(tokens_of(episode))] == tokens_of(episode)


def test_an_interruption_leaves_nothing_in_the_engine_and_takes_nothing_of_others(llm: LLM) -> None:
    other = llm.enqueue("abc", SamplingParams(max_tokens=4))
    steps, calls = llm.step, 0
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo())
        return made[-1]

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return steps(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            play(llm, CHAT, make, params=long_params)
        patch.setattr(llm, "step", steps)
    assert len(made) == 3 and all(environment.is_closed for environment in made)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id] == other and len(output.outputs[0].token_ids) == 4
    assert llm.num_unfinished == 0


def test_episodes_of_text_and_of_token_ids(llm: LLM) -> None:
    class Plain(Environment):
        async def step(self, action: Action) -> StepResult:
            return StepResult([7, 8, 9], 0.5, done=self.metrics.setdefault("turns", 0) == 1 or self._count())

        def _count(self) -> bool:
            self.metrics["turns"] += 1
            return False

    by_text, by_ids = play(llm, [Example("once upon"), Example([5, 6, 7])], Plain)
    for episode in (by_text, by_ids):
        assert episode.session is not None and episode.finish_reason == "stop" and episode.messages == []
        assert [turn.is_sampled for turn in episode.session.turns] == [False, True, False, True]
        middle = episode.session.turns[2]
        assert episode.session.token_ids[middle.start : middle.end] == [7, 8, 9]


def test_a_template_that_rewrites_turns_is_refused_unless_asked_for(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    usual = tokenizer.chat_template
    assert isinstance(usual, str)
    try:
        tokenizer.chat_template = "{{ messages | length }}" + usual  # another beginning with every message
        (refused,) = play(llm, CHAT[2:], Echo)
        (taken,) = play(llm, CHAT[2:], Echo, EnvironmentSection(strict_template=False))
    finally:
        tokenizer.chat_template = usual
    assert refused.finish_reason == "error" and len(refused.outputs) == 1
    assert refused.error is not None and "does not leave the turns before as they were sampled" in refused.error
    assert taken.finish_reason == "stop" and len(taken.outputs) == 3
    assert tokens_of(taken)[: len(tokens_of(refused))] == tokens_of(refused)


@pytest.mark.slow
def test_engines_in_several_processes_play_the_same_episodes(tmp_path: Path, llm: LLM) -> None:
    folder = make_tiny_llama(tmp_path / "model", tokenizer=True, near_uniform=True)
    ours = play(llm, CHAT, Echo)
    with LLM(folder, kv_cache_memory="8MiB", max_model_len=256, data_parallel_size=2) as replicas:
        theirs = play(replicas, CHAT, Echo)
        assert [tokens_of(episode) for episode in theirs] == [tokens_of(episode) for episode in ours]
        late = play(replicas, CHAT, Echo, EnvironmentSection(episode_timeout=0.001), params=long_params)
        assert {episode.finish_reason for episode in late} == {"timeout"}
        assert replicas.num_unfinished == 0
