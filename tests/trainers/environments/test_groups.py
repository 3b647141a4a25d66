"""Episodes sampled ahead of the trainer: each token by the policy that its version names, none lost, none twice, and
every environment closed in the end.

Which policy has sampled a token is told by transformers: its logprob under that policy's weights. What is the policy's
own is told by the environments, which write down what they were given and what they have answered.
"""

from __future__ import annotations

import asyncio
import io
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rollout import LLM, SamplingParams
from rollout_trainers.asynchronous import GroupStream
from rollout_trainers.config import EnvironmentSection, RunConfig
from rollout_trainers.environments import (
    Action,
    Environment,
    Episode,
    EpisodeGroups,
    EpisodeProducer,
    Observation,
    StepResult,
)
from rollout_trainers.environments.episodes import EpisodeRunner
from rollout_trainers.packing import pack_micro_batches
from rollout_trainers.producer import select_examples
from rollout_trainers.recipe import config_from_values
from rollout_trainers.types import Example, Sample
from tests.support.environments import Echo
from tests.support.oracle import load_reference, reference_logprobs
from tests.support.paced import PacedLLM
from tests.support.tiny import make_tiny_llama

EXAMPLES = [Example(text, {"number": i}) for i, text in enumerate(("abc", "hello", "what", "two and two", "q", "end"))]
GROUP_SIZE = 2


class Diary(Environment):
    """Answers each of `num_turns` turns with a few token ids, and writes down all that was said."""

    num_turns = 3

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[list[int], bool]] = []  # token ids, and whether they are the policy's
        self.is_closed = False

    async def reset(self, example: Example) -> Observation:
        self.number = example.columns["number"]
        return await super().reset(example)

    async def step(self, action: Action) -> StepResult:
        self.said.append((action.token_ids, True))
        await asyncio.sleep(0.002 * (len(action.token_ids) % 3))
        answer = [7, 8, 9, len(self.said) % 2 + 5]
        self.said.append((answer, False))
        return StepResult(answer, len(action.token_ids) / 10, done=len(self.said) >= 2 * self.num_turns)

    async def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class Made:
    """Makes environments of a kind, and remembers them."""

    def __init__(self, kind: Callable[[], Environment] = Diary) -> None:
        self.kind = kind
        self.all: list[Any] = []

    def __call__(self) -> Environment:
        self.all.append(self.kind())
        return self.all[-1]

    def assert_closed(self) -> None:
        assert self.all and all(environment.is_closed for environment in self.all)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies whose turns end after some eight tokens."""
    folder, ends = tmp_path_factory.mktemp("models"), [2, *range(40, 56)]
    return [
        make_tiny_llama(folder / str(seed), seed=seed, tokenizer=True, near_uniform=True, eos_token_id=ends)
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[PreTrainedModel]:
    return [load_reference(folder) for folder in folders]


@pytest.fixture(scope="module")
def weights(folders: list[Path]) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / "model.safetensors") for folder in folders]


@pytest.fixture
def streams() -> Iterator[list[GroupStream]]:
    """Streams to be closed at the end, whatever happens; their engines are let run for it."""
    made: list[GroupStream] = []
    yield made
    for stream in made:
        if isinstance(stream.engine, PacedLLM):
            stream.engine.open()
        stream.close()
    assert not [each for each in threading.enumerate() if each.name in ("rollout-sampler", "rollout-event-loop")]


def configuration(
    steps: int = 4, max_tokens: int = 60, environment: dict[str, Any] | None = None, **asynchrony: Any
) -> RunConfig:
    return config_from_values(
        {
            "model": "a/model",
            "steps": steps,
            "engine": {"sleep": False},
            "sampling": {"max_tokens": max_tokens},
            "environment": {"max_turns": 4, **(environment or {})},
            "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": 2},
            "optimizer": {"warmup_steps": 0},
            "asynchrony": asynchrony,
        }
    )


def make_stream(
    folder: Path,
    config: RunConfig,
    streams: list[GroupStream],
    make: Callable[[], Environment] = Diary,
    kind: type[LLM] = LLM,
    keeps_ended: bool = True,
) -> GroupStream:
    engine = kind(folder, kv_cache_memory="4MiB", max_model_len=320)
    source = EpisodeGroups(engine, EXAMPLES, make, config, keeps_ended)
    streams.append(GroupStream(engine, EXAMPLES, config, source))
    return streams[-1]


def plain_samples(folder: Path, config: RunConfig, steps: int, make: Callable[[], Environment] = Diary) -> list[Sample]:
    """What synchronous training samples, as long as the policy stays what it is."""
    engine = LLM(folder, kv_cache_memory="4MiB", max_model_len=320)
    producer = EpisodeProducer(engine, make, config.environment, 1.0, config.sampling.max_tokens, config.seed)
    samples = []
    for step in range(1, steps + 1):
        examples = select_examples(EXAMPLES, step, config.algorithm.prompts_per_step, config.seed)
        samples += producer.produce(step, examples, config.algorithm.group_size)
    return samples


def by_seed(samples: Sequence[Sample]) -> dict[int, tuple[list[int], bytes, bytes]]:
    """Tokens, mask and logprobs, bit for bit, by what they were drawn from."""
    found = {}
    for sample in samples:
        assert sample.seed not in found, "an episode is there twice"
        assert sample.loss_mask is not None
        found[sample.seed] = (
            sample.completion_token_ids,
            sample.loss_mask.tobytes(),
            sample.sampled_logprobs.tobytes(),
        )
    return found


def assert_right(sample: Sample, policies: Sequence[PreTrainedModel]) -> None:
    """Each token of the policy's has the logprob that the policy of its version gives it (`policies` are by version),
    and the mask marks what its environment was given."""
    notes = sample.episode
    assert notes is not None and sample.loss_mask is not None
    if notes.environment is not None:
        tokens, mask = [], []
        for said, is_own in notes.environment.said:
            for token in said:
                tokens.append(token)
                mask.append(is_own)
        while mask and not mask[-1]:
            tokens.pop()
            mask.pop()
        assert sample.completion_token_ids == tokens
        assert sample.loss_mask.tolist() == mask
    spans = [(span.version, span.start, span.end) for span in sample.versions]
    spans = spans or [(sample.policy_version, 0, sample.num_tokens)]
    assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
    assert spans[-1][2] == sample.num_tokens == len(sample.sampled_logprobs)
    assert sorted({version for version, _, _ in spans}) == [version for version, _, _ in spans]
    ids = sample.prompt_token_ids + sample.completion_token_ids
    own = [place for place, is_own in enumerate(sample.loss_mask) if is_own]  # in the completion
    for version, start, end in spans:
        rows = reference_logprobs(policies[version], ids)
        for index in range(start, end):
            place = len(sample.prompt_token_ids) + own[index]
            assert sample.sampled_logprobs[index] == pytest.approx(float(rows[place - 1][ids[place]]), abs=2e-4)


# case TR-01
@pytest.mark.parametrize(
    "asynchrony",
    [
        {"mode": "one_step_off"},
        {"mode": "in_flight", "max_staleness": 2, "held_cache": "recompute"},
        {"step_tokens": 60, "max_staleness": 3},
        {"over_sampling": 1.0},
    ],
    ids=["one_step_off", "in_flight", "step_tokens", "over_sampling"],
)
def test_every_token_is_of_the_policy_that_its_version_names_within_the_bound(
    asynchrony: dict[str, Any],
    folders: list[Path],
    references: list[PreTrainedModel],
    weights: list[dict[str, torch.Tensor]],
    streams: list[GroupStream],
) -> None:
    config, made = configuration(steps=6, **asynchrony), Made()
    stream = make_stream(folders[0], config, streams, made)
    policies = [references[version % 2] for version in range(7)]
    seen: list[Sample] = []
    for step in range(1, 7):
        samples = stream.take(step, 2)
        stream.book.check_integrity()
        assert [sample.group for sample in samples] == [place for place in range(len(samples) // 2) for _ in range(2)]
        for sample in samples:
            assert_right(sample, policies)
            assert step - 1 - sample.oldest_version <= config.asynchrony.staleness_bound
        metrics = stream.metrics(samples, step)
        oldest = min(sample.oldest_version for sample in samples)
        assert metrics["staleness/max"] == step - 1 - oldest
        if asynchrony.get("mode") == "one_step_off":
            assert {(sample.oldest_version, len(sample.versions)) for sample in samples} == {(max(0, step - 2), 0)}
        seen += samples
        for batch in pack_micro_batches(samples, 400):
            assert len(batch.sampler_logprobs) == int(batch.lengths.sum())
        if not config.asynchrony.samples_ahead:
            stream.sleep()
        stream.update(step, lambda update, step=step: update.load(weights[step % 2]))
        stream.engine.wake_up()
    plain = plain_samples(folders[0], config, 6)
    assert by_seed(seen).keys() <= by_seed(plain).keys()  # none is there twice
    if not config.asynchrony.has_budget:
        assert len(seen) == len(plain)  # none is lost
    assert not stream.book.groups
    assert len(made.all) == len(seen)
    made.assert_closed()


# case TR-06
@pytest.mark.parametrize(
    "asynchrony",
    [{"mode": "one_step_off"}, {"mode": "in_flight"}, {"over_sampling": 1.0}, {"step_tokens": 60, "max_staleness": 3}],
    ids=["one_step_off", "in_flight", "over_sampling", "step_tokens"],
)
def test_under_one_policy_episodes_are_those_of_synchronous_training_also_after_a_break(
    asynchrony: dict[str, Any], folders: list[Path], weights: list[dict[str, torch.Tensor]], streams: list[GroupStream]
) -> None:
    """After each step another engine goes on with what a checkpoint has kept: what has ended is not played again."""
    config, made = configuration(steps=5, **asynchrony), Made()
    stream = make_stream(folders[0], config, streams, made)
    seen: list[Sample] = []
    for step in range(1, 6):
        samples = stream.take(step, 2)
        seen += samples
        assert stream.metrics(samples, step)["perf/gen_tokens_per_s"] >= 0  # also where tokens were lost by the break
        stream.update(step, lambda update: update.load(weights[0]))
        file = io.BytesIO()
        torch.save(stream.state_dict(), file)
        stream.close()
        assert stream.engine.get_metrics()["num_requests_running"] == 0
        file.seek(0)
        state = torch.load(file, weights_only=True)
        kept = {each["number"] for each in state["groups"] if each["output"] is not None}
        stream = make_stream(folders[0], config, streams, made)
        stream.load_state_dict(state)
        stream.update(step, lambda update: update.load(weights[0]))
        assert {number for number, group in stream.book.groups.items() if group.place is not None} == kept
        if asynchrony.get("mode") == "one_step_off":
            assert kept == stream.book.groups.keys()  # between two batches there is nothing unfinished
        stream.book.check_integrity()
    ours, plain = by_seed(seen), by_seed(plain_samples(folders[0], config, 5))
    assert all(plain[seed] == drawn for seed, drawn in ours.items())
    if not config.asynchrony.has_budget:
        assert ours.keys() == plain.keys()
    assert not stream.book.groups
    kept_samples = [sample for sample in seen if sample.episode is not None and sample.episode.environment is None]
    for sample in kept_samples:  # what is left of them beside their environment is what they were
        assert sample.episode is not None and sample.episode.num_turns == len(sample.policy_spans)
        assert sample.episode.reward == pytest.approx(sample.num_tokens / 10)
    if asynchrony.get("mode") == "one_step_off":
        assert len(kept_samples) == 4 * 2 * GROUP_SIZE and len(made.all) == len(seen)
    made.assert_closed()


def test_where_rewards_ask_for_environments_what_has_ended_is_played_again_too(
    folders: list[Path], weights: list[dict[str, torch.Tensor]], streams: list[GroupStream]
) -> None:
    config = configuration(steps=2, mode="one_step_off")
    stream = make_stream(folders[0], config, streams, keeps_ended=False)
    first = stream.take(1, 2)
    stream.update(1, lambda update: update.load(weights[0]))
    state = stream.state_dict()
    assert [each["output"] for each in state["groups"]] == [None, None]
    other = make_stream(folders[0], config, streams, keeps_ended=False)
    other.load_state_dict(state)
    other.update(1, lambda update: update.load(weights[0]))
    second = other.take(2, 2)
    assert all(sample.episode is not None and sample.episode.environment.is_closed for sample in second)
    assert by_seed(first + second) == by_seed(plain_samples(folders[0], config, 2))
    assert {sample.oldest_version for sample in second} == {1}  # they are of the policy that there is now


class Gated(Diary):
    """Thinks in its second turn until it is let go on."""

    gate = threading.Event()

    async def step(self, action: Action) -> StepResult:
        while len(self.said) == 2 and not self.gate.is_set():
            await asyncio.sleep(0.002)
        return await super().step(action)


def gated() -> type[Gated]:
    return type("Gate", (Gated,), {"gate": threading.Event()})


@pytest.mark.parametrize("held_cache", ["recompute", "keep"])
def test_a_policy_comes_while_environments_think_and_the_next_turn_is_its_own(
    held_cache: str,
    folders: list[Path],
    references: list[PreTrainedModel],
    weights: list[dict[str, torch.Tensor]],
    streams: list[GroupStream],
) -> None:
    """The KV that a turn begins with is its policy's own, whatever becomes of a turn that is being sampled."""
    kind = gated()
    config = configuration(mode="in_flight", max_staleness=1, over_sampling=0.0, held_cache=held_cache)
    stream = make_stream(folders[0], config, streams, kind)
    taken: list[Sample] = []
    trainer = threading.Thread(target=lambda: taken.extend(stream.take(1, 2)))
    trainer.start()
    with stream._changed:  # until all of them think
        source = stream._source
        assert isinstance(source, EpisodeGroups)
        assert stream._changed.wait_for(lambda: thinking(source) == 4, 60)
    stream.update(1, lambda update: update.load(weights[1]))  # does not wait for them
    kind.gate.set()
    trainer.join()
    for sample in taken:
        assert [span.version for span in sample.versions] == [0, 1]
        assert sample.episode is not None and sample.versions[0].end == sample.episode.turn_ends[1]
        assert (sample.oldest_version, sample.policy_version) == (0, 1)
        assert sample.receipt_id == stream.engine.receipt.id  # type: ignore[attr-defined]
        assert_right(sample, references)


def thinking(source: EpisodeGroups) -> int:
    """Episodes whose environment is at work in their second turn."""
    return sum(
        len(episode.outputs) == 2 and len(episode.turn_rewards) == 1
        for group in source._running.values()
        for episode in group
    )


def test_a_policy_that_comes_in_the_middle_of_a_turn_samples_its_other_half(
    folders: list[Path],
    references: list[PreTrainedModel],
    weights: list[dict[str, torch.Tensor]],
    streams: list[GroupStream],
) -> None:
    config = configuration(mode="in_flight", max_staleness=1, over_sampling=0.0, held_cache="recompute")
    stream = make_stream(folders[0], config, streams, kind=PacedLLM)
    engine = stream.engine
    assert isinstance(engine, PacedLLM)
    taken: list[Sample] = []
    engine.allow(0)
    trainer = threading.Thread(target=lambda: taken.extend(stream.take(1, 2)))
    trainer.start()
    engine.allow_and_wait(12)
    stream.update(1, lambda update: update.load(weights[1]))
    engine.open()
    trainer.join()
    broken = 0
    for sample in taken:
        assert_right(sample, references)
        assert sample.episode is not None
        broken += bool(sample.versions) and sample.versions[0].end not in sample.episode.turn_ends
    assert broken > 0
    metrics = stream.metrics(taken, 1)
    assert metrics["staleness/partial_ratio"] > 0


def test_a_group_is_as_old_as_its_first_token_and_not_as_its_environments(
    folders: list[Path], weights: list[dict[str, torch.Tensor]], streams: list[GroupStream]
) -> None:
    gate = threading.Event()

    class Slow(Diary):
        async def reset(self, example: Example) -> Observation:
            if example.columns["number"] == late:
                while not gate.is_set():
                    await asyncio.sleep(0.002)
            return await super().reset(example)

    config = configuration(steps=3, mode="in_flight", max_staleness=1)
    late = select_examples(EXAMPLES, 2, 2, config.seed)[1].columns["number"]  # the last group that begins with policy 0
    stream = make_stream(folders[0], config, streams, Slow)
    first = stream.take(1, 2)
    assert stream.book.deadline(stream.book.groups[3]) == 2
    stream.update(1, lambda update: update.load(weights[1]))
    gate.set()
    with stream._changed:
        assert stream._changed.wait_for(lambda: stream.book.deadline(stream.book.groups[3]) == 3, 60)
    second = stream.take(2, 2)
    stream.update(2, lambda update: update.load(weights[0]))
    samples = first + second + stream.take(3, 2)
    (number,) = {sample.oldest_version for sample in samples if sample.example.columns["number"] == late}
    assert number == 1
    assert len(by_seed(samples)) == 12


def test_at_most_so_many_episodes_run_at_once_over_all_groups(folders: list[Path], streams: list[GroupStream]) -> None:
    running, most = 0, 0

    class Counted(Diary):
        async def reset(self, example: Example) -> Observation:
            nonlocal running, most
            running += 1
            most = max(most, running)
            return await super().reset(example)

        async def close(self) -> None:
            nonlocal running
            running -= 1
            await super().close()

    config = configuration(steps=2, mode="in_flight", environment={"max_concurrent": 3})
    stream = make_stream(folders[0], config, streams, Counted)
    seen = stream.take(1, 2) + stream.take(2, 2)
    assert most == 3 and running == 0
    assert by_seed(seen) == by_seed(plain_samples(folders[0], config, 2))


def test_an_episode_that_fails_ends_alone_and_where_all_do_the_step_fails(
    folders: list[Path], streams: list[GroupStream]
) -> None:
    class Unlucky(Diary):
        async def step(self, action: Action) -> StepResult:
            if self.number in bad:
                raise OSError("no route")
            return await super().step(action)

    cases: list[dict[str, Any]] = [{"mode": "one_step_off"}, {"mode": "in_flight", "over_sampling": 0.0}]
    for options in cases:
        config = configuration(steps=2, **options)
        first, second = (select_examples(EXAMPLES, step, 2, config.seed) for step in (1, 2))
        bad = {first[0].columns["number"], *(example.columns["number"] for example in second)}
        made = Made(Unlucky)
        stream = make_stream(folders[0], config, streams, made)
        samples = stream.take(1, 2)
        assert [sample.finish_reason for sample in samples] == ["error", "error", "stop", "stop"]
        assert all(sample.num_tokens > 0 for sample in samples)
        with pytest.raises(ValueError, match="all 4 environments have failed; the first with OSError: no route"):
            stream.take(2, 2)
        stream.close()
        made.assert_closed()


def test_a_budget_that_leaves_a_step_one_group_that_fails_does_not_end_the_run(
    folders: list[Path], streams: list[GroupStream]
) -> None:
    class Unlucky(Diary):
        async def reset(self, example: Example) -> Observation:
            observation = await super().reset(example)
            if self.number in bad:
                raise OSError("no route")
            return observation

    config = configuration(steps=4, step_tokens=1, max_staleness=3)
    bad = {select_examples(EXAMPLES, 1, 2, config.seed)[0].columns["number"]}
    stream = make_stream(folders[0], config, streams, Unlucky)
    assert [sample.finish_reason for sample in stream.take(1, 2)] == ["error", "error"]
    assert len(stream.take(2, 2)) >= GROUP_SIZE


@pytest.mark.parametrize("mode", ["one_step_off", "in_flight", "synchronous"])
def test_an_error_of_the_engine_is_the_trainers_and_environments_are_closed_all_the_same(
    mode: str, folders: list[Path], streams: list[GroupStream]
) -> None:
    made = Made()
    options: dict[str, Any] = {"step_tokens": 10**6} if mode == "synchronous" else {"mode": mode}
    stream = make_stream(folders[0], configuration(**options), streams, made, PacedLLM)
    engine = stream.engine
    assert isinstance(engine, PacedLLM)
    engine.fails_with = OSError("the disk has gone")
    with pytest.raises(OSError, match="the disk has gone"):
        stream.take(1, 2)
    with pytest.raises(OSError, match="the disk has gone"):
        stream.close()  # the engine cannot be tidied up
    made.assert_closed()
    engine.fails_with = None
    stream.close()


@pytest.mark.parametrize("mode", ["one_step_off", "in_flight", "synchronous"])
def test_closing_in_the_midst_of_episodes_closes_their_environments(
    mode: str, folders: list[Path], streams: list[GroupStream]
) -> None:
    """Ctrl-C while the trainer waits: some episodes are asleep in their environment, and would be for ever."""

    asleep = threading.Semaphore(0)

    class Forever(Diary):
        async def step(self, action: Action) -> StepResult:
            asleep.release()
            await asyncio.sleep(1e6)
            return await super().step(action)

    made = Made(Forever)
    options: dict[str, Any] = {"step_tokens": 10**6} if mode == "synchronous" else {"mode": mode}
    stream = make_stream(folders[0], configuration(environment={"step_timeout": None}, **options), streams, made)

    def interrupt() -> None:
        for _ in range(4):
            assert asleep.acquire(timeout=60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        stream.take(1, 2)
    interrupter.join()
    stream.close()
    stream.close()
    made.assert_closed()
    assert stream.engine.num_unfinished == 0  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="closed"):
        stream.take(1, 2)


def test_an_environment_that_does_not_let_go_holds_up_no_end_and_no_other(
    folders: list[Path], streams: list[GroupStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_trainers.environments.episodes._SECONDS_TO_CLOSE", 0.2)

    class Clinging(Diary):
        async def close(self) -> None:
            await super().close()
            await asyncio.sleep(1e6)

        async def step(self, action: Action) -> StepResult:
            await asyncio.sleep(1e6)
            return await super().step(action)

    made = Made(Clinging)
    stream = make_stream(folders[0], configuration(mode="in_flight", environment={"step_timeout": None}), streams, made)
    stream._start()
    with stream._changed:
        assert stream._changed.wait_for(lambda: len(made.all) == 8, 60)
    stream.close()
    made.assert_closed()


def test_a_rest_of_the_sampler_counts_for_no_episodes_time(folders: list[Path]) -> None:
    engine = LLM(folders[0], kv_cache_memory="2MiB", max_model_len=96)
    runner = EpisodeRunner(engine, Diary, EnvironmentSection(episode_timeout=50.0, step_timeout=None))
    episode = Episode(EXAMPLES[0])
    runner.add(episode, SamplingParams(max_tokens=4, seed=1))
    runner.advance()
    before = runner.deadline
    runner.rest(3.5)
    assert runner.deadline == pytest.approx(before + 3.5)
    while runner.is_busy:
        runner.wait()
        runner.advance()
    runner.close()
    assert episode.finish_reason in ("stop", "length")


def test_chats_go_on_under_the_next_policy_with_the_templates_own_tokens_between_their_turns(
    folders: list[Path],
    references: list[PreTrainedModel],
    weights: list[dict[str, torch.Tensor]],
    streams: list[GroupStream],
) -> None:
    chats = [Example([{"role": "user", "content": text}], {"number": i}) for i, text in enumerate(("a", "two", "q"))]
    config = configuration(steps=4, mode="in_flight", max_staleness=2, held_cache="recompute")
    engine = LLM(folders[0], kv_cache_memory="8MiB", max_model_len=400)
    stream = GroupStream(engine, chats, config, EpisodeGroups(engine, chats, Echo, config))
    streams.append(stream)
    tokenizer: Any = engine.get_tokenizer()
    for step in range(1, 5):
        for sample in stream.take(step, 2):
            assert sample.episode is not None and sample.loss_mask is not None
            actions = [action.token_ids for action in sample.episode.environment.actions]
            assert sample.policy_token_ids == [token for action in actions for token in action]
            given = np.array(sample.completion_token_ids)[~sample.loss_mask].tolist()
            between = tokenizer.decode(given)
            told = [f"{len(action)} tokens" for action in actions[: len(sample.policy_spans) - 1]]
            assert [part in between for part in told] == [True] * len(told)
            assert between.count("<|im_start|>user") == len(told)
            sample.episode.environment = None  # its turns are checked; the logprobs are left
            assert_right(sample, [references[version % 2] for version in range(5)])
        stream.update(step, lambda update, step=step: update.load(weights[step % 2]))
