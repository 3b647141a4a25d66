"""Groups sampled ahead of the trainer: by which policy, how old, none lost, none twice, and what becomes of errors.

Which policy has sampled a token is told by transformers: its logprob under that policy's weights.
"""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rollout import LLM
from rollout_trainers.asynchronous import GroupStream
from rollout_trainers.config import RunConfig
from rollout_trainers.producer import RolloutProducer, select_examples
from rollout_trainers.recipe import config_from_values
from rollout_trainers.types import Example, Sample
from tests.support.oracle import load_reference, reference_logprobs
from tests.support.paced import PacedLLM
from tests.support.tiny import make_tiny_llama

EXAMPLES = [Example(text) for text in ("abc", "hello", "what", "two and two", "q", "the end", "more", "words")]
GROUP_SIZE = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies that seldom end a sample, and two that end one after some ten tokens."""
    folder = tmp_path_factory.mktemp("models")
    long = [make_tiny_llama(folder / f"long{seed}", seed=seed, tokenizer=True) for seed in range(2)]
    ends: Any = list(range(20, 34))
    short = [
        make_tiny_llama(folder / f"short{seed}", seed=seed, tokenizer=True, eos_token_id=ends, near_uniform=True)
        for seed in range(2)
    ]
    return long + short


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[PreTrainedModel]:
    return [load_reference(folder) for folder in folders]


@pytest.fixture
def streams() -> Iterator[list[GroupStream]]:
    """Streams to be closed at the end, whatever happens; their engines are let run for it."""
    made: list[GroupStream] = []
    yield made
    for stream in made:
        if isinstance(stream.engine, PacedLLM):
            stream.engine.open()
        stream.close()
    assert not samplers()


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rollout-sampler"]


def configuration(max_tokens: int = 12, steps: int = 4, **asynchrony: Any) -> RunConfig:
    return config_from_values(
        {
            "model": "a/model",
            "steps": steps,
            "engine": {"sleep": False},
            "sampling": {"max_tokens": max_tokens},
            "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": 2},
            "optimizer": {"warmup_steps": 0},
            "asynchrony": asynchrony,
        }
    )


def make_stream(folder: Path, config: RunConfig, streams: list[GroupStream], kind: type[LLM] = LLM) -> GroupStream:
    engine = kind(folder, kv_cache_memory="2MiB", max_model_len=96)
    streams.append(GroupStream(engine, EXAMPLES, config))
    return streams[-1]


def assert_sampled_by(sample: Sample, policies: Sequence[PreTrainedModel]) -> None:
    """Each token has the logprob that the policy of its version gives it; `policies` are by version."""
    ids = sample.prompt_token_ids + sample.completion_token_ids
    spans = [(span.version, span.start, span.end) for span in sample.versions]
    for version, start, end in spans or [(sample.policy_version, 0, sample.num_tokens)]:
        rows = reference_logprobs(policies[version], ids)[len(sample.prompt_token_ids) - 1 : -1][start:end]
        expected = rows[torch.arange(end - start), torch.tensor(sample.completion_token_ids[start:end])]
        np.testing.assert_allclose(sample.sampled_logprobs[start:end], expected.numpy(), atol=2e-4)


def tokens_of(samples: Sequence[Sample]) -> dict[tuple[int, int], tuple[list[int], bytes]]:
    """What was drawn, with its logprobs bit for bit, by what it was drawn from."""
    found = {}
    for sample in samples:
        key = (sample.seed, sample.sample_index)
        assert key not in found, "a sample is there twice"
        found[key] = (sample.completion_token_ids, sample.sampled_logprobs.tobytes())
    return found


def plain_samples(folder: Path, config: RunConfig, steps: int) -> list[Sample]:
    """What synchronous training samples, as long as the policy stays what it is."""
    engine = LLM(folder, kv_cache_memory="2MiB", max_model_len=96)
    producer = RolloutProducer(engine, 1.0, config.sampling.max_tokens, config.seed)
    samples = []
    for step in range(1, steps + 1):
        examples = select_examples(EXAMPLES, step, config.algorithm.prompts_per_step, config.seed)
        samples += producer.produce(step, examples, config.algorithm.group_size)
    return samples


def test_a_step_ahead_each_batch_is_of_the_policy_before_the_last(
    folders: list[Path], references: list[PreTrainedModel], streams: list[GroupStream]
):
    stream = make_stream(folders[0], configuration(mode="one_step_off"), streams)
    policies = [references[version % 2] for version in range(5)]
    weights = [load_file(folders[version] / "model.safetensors") for version in range(2)]
    for step in range(1, 5):
        samples = stream.take(step, 2)
        assert [sample.group for sample in samples] == [0, 0, 1, 1]
        assert {sample.oldest_version for sample in samples} == {max(0, step - 2)}
        for sample in samples:
            assert_sampled_by(sample, policies)
        metrics = stream.metrics(samples, step)
        assert metrics["staleness/mean"] == metrics["staleness/max"] == (0 if step == 1 else 1)
        assert metrics["staleness/versions_per_sample"] == 1
        receipt = stream.update(step, lambda update, step=step: update.load(weights[step % 2]))
        assert receipt.policy_version == step
    assert stream.engine.get_metrics()["num_requests_running"] == 0
    assert not stream.book.groups  # no batch was sampled that no step takes


def test_the_first_batch_is_that_of_synchronous_training_bit_for_bit(folders: list[Path], streams: list[GroupStream]):
    cases: list[dict[str, Any]] = [{"mode": "one_step_off"}, {"mode": "in_flight"}, {"step_tokens": 1000}]
    for asynchrony in cases:
        config = configuration(**asynchrony)
        ours = make_stream(folders[0], config, streams).take(1, 2)
        theirs = plain_samples(folders[0], config, 1)
        assert tokens_of(ours) == tokens_of(theirs)
        assert [sample.example for sample in ours] == [sample.example for sample in theirs]


@pytest.mark.parametrize("held_cache", ["recompute", "keep"])
def test_in_flight_a_sample_goes_on_under_the_policy_that_comes_meanwhile(
    held_cache: str, folders: list[Path], references: list[PreTrainedModel], streams: list[GroupStream]
):
    config = configuration(max_tokens=40, mode="in_flight", max_staleness=2, held_cache=held_cache)
    stream = make_stream(folders[0], config, streams, PacedLLM)
    engine = stream.engine
    assert isinstance(engine, PacedLLM)
    weights = [load_file(folders[version] / "model.safetensors") for version in range(2)]
    engine.stops_at_ends = True
    stream.take(1, 2)  # batches 1 to 3 begin together, and end together; then the engine waits
    stream.update(1, lambda update: update.load(weights[1]))
    engine.allow_and_wait(5)
    stream.update(2, lambda update: update.load(weights[0]))  # in the middle of batch 4
    engine.open()
    for step in (2, 3):
        assert {sample.oldest_version for sample in stream.take(step, 2)} == {0}
    samples = stream.take(4, 2)
    for sample in samples:
        assert [span.version for span in sample.versions] == [1, 2]
        assert sample.versions[0].end == sample.versions[1].start < sample.num_tokens
        assert (sample.oldest_version, sample.policy_version) == (1, 2)
        assert sample.receipt_id == engine.receipt.id  # type: ignore[union-attr]
        if held_cache == "recompute":
            assert_sampled_by(sample, [references[0], references[1], references[0]])
    metrics = stream.metrics(samples, 4)
    assert metrics["staleness/max"] == 2
    assert 1 < metrics["staleness/mean"] < 2
    assert metrics["staleness/versions_per_sample"] == 2
    assert metrics["staleness/partial_ratio"] == 1


def test_in_flight_no_sample_is_older_than_the_bound_however_trainer_and_sampler_meet(
    folders: list[Path], references: list[PreTrainedModel], streams: list[GroupStream]
):
    config = configuration(max_tokens=30, steps=8, mode="in_flight", max_staleness=2, held_cache="recompute")
    stream = make_stream(folders[2], config, streams)
    weights = [load_file(folders[2 + version] / "model.safetensors") for version in range(2)]
    policies = [references[2 + version % 2] for version in range(9)]
    seen: list[Sample] = []
    for step in range(1, 9):
        samples = stream.take(step, 2)
        stream.book.check_integrity()
        assert all(step - 1 - sample.oldest_version <= 2 for sample in samples)
        for sample in samples:
            assert_sampled_by(sample, policies)
        seen += samples
        stream.update(step, lambda update, step=step: update.load(weights[step % 2]))
    assert len(tokens_of(seen)) == 8 * 2 * GROUP_SIZE
    plain = tokens_of(plain_samples(folders[2], config, 8))
    assert tokens_of(seen).keys() == plain.keys()  # every prompt's samples, each once


def test_a_budget_of_tokens_lets_samples_go_on_in_the_next_step(
    folders: list[Path], references: list[PreTrainedModel], streams: list[GroupStream]
):
    config = configuration(max_tokens=30, steps=6, step_tokens=25, max_staleness=3)
    stream = make_stream(folders[2], config, streams)
    weights = [load_file(folders[2 + version] / "model.safetensors") for version in range(2)]
    policies = [references[2 + version % 2] for version in range(7)]
    sizes, seen = [], []
    for step in range(1, 7):
        samples = stream.take(step, 2)
        sizes.append(len(samples) // GROUP_SIZE)
        assert all(step - 1 - sample.oldest_version <= 3 for sample in samples)
        for sample in samples:
            assert_sampled_by(sample, policies)
            assert sample.num_tokens <= 30  # in all steps together
        seen += samples
        stream.sleep()
        stream.update(step, lambda update, step=step: update.load(weights[step % 2]))
        stream.engine.wake_up()
    assert 1 in sizes
    assert 2 in sizes
    assert not stream.book.groups
    assert any(len(sample.versions) > 1 for sample in seen)
    tokens_of(seen)  # none is there twice


def test_a_time_that_is_over_at_once_leaves_each_step_the_first_group_that_ends(
    folders: list[Path], streams: list[GroupStream]
):
    stream = make_stream(folders[2], configuration(max_tokens=30, step_seconds=1e-9, max_staleness=4), streams)
    samples = stream.take(1, 2)
    longest = max(sample.num_tokens for sample in samples)
    assert len({sample.group for sample in samples}) == 1
    plain = plain_samples(folders[2], configuration(max_tokens=30, step_seconds=1.0), 1)
    groups = [[sample for sample in plain if sample.group == group] for group in (0, 1)]
    assert longest == min(max(sample.num_tokens for sample in group) for group in groups)


@pytest.mark.parametrize(
    "asynchrony",
    [{"step_tokens": 20, "max_staleness": 3}, {"over_sampling": 1.0}, {"mode": "in_flight"}, {"mode": "one_step_off"}],
)
def test_under_one_policy_samples_are_those_of_synchronous_training_also_after_a_break(
    asynchrony: dict[str, Any], folders: list[Path], streams: list[GroupStream]
):
    """Updates bring the same weights; after each step another engine goes on with what a checkpoint has kept."""
    config = configuration(max_tokens=30, steps=5, **asynchrony)
    weights = load_file(folders[2] / "model.safetensors")
    stream = make_stream(folders[2], config, streams)
    seen: list[Sample] = []
    for step in range(1, 6):
        seen += stream.take(step, 2)
        stream.update(step, lambda update: update.load(weights))
        file = io.BytesIO()
        torch.save(stream.state_dict(), file)
        stream.close()
        assert stream.engine.get_metrics()["num_requests_running"] == 0
        file.seek(0)
        before, stream = stream, make_stream(folders[2], config, streams)
        stream.load_state_dict(torch.load(file, weights_only=True))
        stream.update(step, lambda update: update.load(weights))
        assert stream.book.groups.keys() == before.book.groups.keys()
        assert stream.book.num_begun == before.book.num_begun
        stream.book.check_integrity()
    ours, plain = tokens_of(seen), tokens_of(plain_samples(folders[2], config, 5))
    assert all(plain[key] == drawn for key, drawn in ours.items())
    if not config.asynchrony.has_budget:
        assert ours.keys() == plain.keys()
    assert not stream.book.groups


def test_over_sampling_takes_the_short_ones_first_and_loses_no_long_one(
    folders: list[Path], streams: list[GroupStream]
):
    config = configuration(max_tokens=40, steps=6, over_sampling=1.0)
    stream = make_stream(folders[2], config, streams)
    weights = load_file(folders[2] / "model.safetensors")
    plain = {key: len(drawn[0]) for key, drawn in tokens_of(plain_samples(folders[2], config, 6)).items()}
    seen: list[Sample] = []
    for step in range(1, 7):
        samples = stream.take(step, 2)
        seen += samples
        metrics = stream.metrics(samples, step)
        trained = np.mean([plain[sample.seed, sample.sample_index] for sample in seen])
        assert metrics["over_sampling/trained_mean_length"] == pytest.approx(trained)
        if step == 1:  # four groups have begun; the first two to end are those whose longest sample is shortest
            seeds = list(dict.fromkeys(seed for seed, _ in plain))[:4]
            longest = {seed: max(length for key, length in plain.items() if key[0] == seed) for seed in seeds}
            assert {sample.seed for sample in samples} == set(sorted(seeds, key=longest.__getitem__)[:2])
            assert metrics["async/groups_waiting"] + metrics["async/groups_in_flight"] == 2
        stream.update(step, lambda update: update.load(weights))
    assert len(seen) == len(plain)
    assert metrics["over_sampling/length_bias"] == 0
    assert metrics["over_sampling/begun_mean_length"] == pytest.approx(np.mean(list(plain.values())))
    assert "over_sampling/waiting_mean_length" not in metrics


@pytest.mark.parametrize("mode", ["one_step_off", "in_flight"])
def test_further_groups_of_a_step_come_in_the_order_of_the_data(
    mode: str, folders: list[Path], streams: list[GroupStream]
):
    stream = make_stream(folders[2], configuration(mode=mode, steps=2), streams)
    seen = stream.take(1, 2) + stream.take(1, 3, first_place=2)
    assert [sample.group for sample in seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    weights = load_file(folders[2] / "model.safetensors")
    stream.update(1, lambda update: update.load(weights))
    seen += stream.take(2, 2) + stream.take(2, 1, first_place=2)
    assert stream.book.num_begun == len(seen) // GROUP_SIZE + len(stream.book.groups)
    tokens_of(seen)  # none is there twice
    assert all(sample.oldest_version <= 1 for sample in seen)


@pytest.mark.parametrize("mode", ["one_step_off", "in_flight"])
def test_an_error_of_the_sampler_is_the_trainers_next_call_and_closing_goes_on(
    mode: str, folders: list[Path], streams: list[GroupStream]
):
    stream = make_stream(folders[0], configuration(mode=mode), streams, PacedLLM)
    engine = stream.engine
    assert isinstance(engine, PacedLLM)
    stream.take(1, 2)
    engine.fails_with = OSError("the disk has gone")
    with pytest.raises(OSError, match="the disk has gone"):
        for step in (1, 2, 3):
            stream.update(step, lambda update: update.load(load_file(folders[0] / "model.safetensors")))
            stream.take(step + 1, 2)
    for call in (lambda: stream.take(9, 2), lambda: stream.update(9, lambda update: None), stream.state_dict):
        with pytest.raises(OSError, match="the disk has gone"):
            call()
    engine.fails_with = None
    stream.close()
    assert not samplers()
    assert engine.num_unfinished == 0


def test_a_prompt_that_does_not_fit_is_told_by_the_next_batch(folders: list[Path], streams: list[GroupStream]):
    engine = LLM(folders[0], kv_cache_memory="2MiB", max_model_len=32)
    stream = GroupStream(engine, [Example("too long " * 20)], configuration(mode="in_flight"))
    streams.append(stream)
    with pytest.raises(ValueError, match=r"prompts\[0\]: the prompt has 180 tokens and max_model_len is 32"):
        stream.take(1, 2)


def test_closing_in_the_midst_of_sampling_leaves_nothing_in_the_engine(folders: list[Path], streams: list[GroupStream]):
    config = configuration(max_tokens=60, mode="in_flight", max_staleness=2)
    stream = make_stream(folders[0], config, streams, PacedLLM)
    engine = stream.engine
    assert isinstance(engine, PacedLLM)
    engine.stops_at_ends = True
    stream.take(1, 2)
    stream.update(1, lambda update: update.load(load_file(folders[0] / "model.safetensors")))
    engine.allow_and_wait(3)
    assert engine.num_unfinished > 0
    threading.Timer(0.05, engine.open).start()
    stream.close()
    stream.close()
    assert engine.num_unfinished == 0
    assert not samplers()
    with pytest.raises(RuntimeError, match="closed"):
        stream.take(2, 2)
    assert len(engine.generate([[5, 6, 7]])) == 1  # the engine itself goes on


def test_the_trainer_can_be_interrupted_while_it_waits_for_samples(folders: list[Path], streams: list[GroupStream]):
    stream = make_stream(folders[0], configuration(mode="one_step_off"), streams, PacedLLM)
    engine = stream.engine
    assert isinstance(engine, PacedLLM)
    engine.allow(0)
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        stream.take(1, 2)
    timer.join()
    engine.open()
    assert len(stream.take(1, 2)) == 2 * GROUP_SIZE  # nothing was lost by it
