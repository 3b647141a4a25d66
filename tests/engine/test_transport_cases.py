"""Policies from a trainer in another process, over every transport, against transformers with the weights sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import LLM, SamplingParams
from rollout.errors import (
    EngineUnusableError,
    PolicyUpdateError,
    TensorShapeError,
    TransportError,
    UncoveredParametersError,
    WeightsNotLoadedError,
)
from rollout.weights.receipt import Receipt, parameters_fingerprint
from tests.support.policies import (
    GREEDY,
    LONG,
    InFlight,
    Policies,
    assert_is_beginning,
    assert_same_samples,
    assert_sampled_by,
    random_prompt,
)
from tests.support.transport_process import PeerProcess
from tests.support.transports import CONNECTED, TRANSPORTS, receiver_of

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("untied"), tie=False, bias=True)


@pytest.fixture(scope="module")
def process() -> Iterator[PeerProcess]:
    """One trainer for all cases; each case opens a sender of its own there."""
    with PeerProcess() as running:
        yield running


class Trainer:
    """A trainer in `process` with a sender of one transport. `where` is what receivers need to know."""

    def __init__(self, process: PeerProcess, name: str, folder: Path, **options: Any) -> None:
        self.process, self.name = process, name
        self.where = process.ask("open", transport=name, folder=str(folder), options=options)["where"]

    def tell(self, policies: Policies, number: int, version: int, **how: Any) -> None:
        weights = str(policies.folders[number])
        self.process.tell("send", transport=self.name, version=version, weights=weights, **how)

    def push(self, llm: LLM, policies: Policies, number: int, version: int | None = None, **how: Any) -> Receipt:
        """A whole update; both sides know the same fingerprint afterwards."""
        version = llm.policy_version + 1 if version is None else version
        self.tell(policies, number, version, **how)
        with llm.policy_update(version=version) as update:
            loaded = update.load(receiver_of(self.name, self.where))
        assert sorted(loaded) == sorted(policies.weights(number))
        answer = self.process.answer()
        if how.get("form") != "wrapped":
            assert answer["fingerprint"] == update.receipt.parameters_fingerprint
        dtype = next(iter(llm.engine.parameters().values())).dtype
        expected = parameters_fingerprint(policies.weights(number).items(), dtype)
        assert update.receipt.parameters_fingerprint == expected
        return update.receipt


@pytest.fixture(params=TRANSPORTS)
def trainer(request: pytest.FixtureRequest, process: PeerProcess, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(process, request.param, tmp_path_factory.mktemp("t"), bucket_bytes=16384)


def test_no_block_of_the_old_policy_is_hit_after_an_update(tied: Policies, trainer: Trainer):  # case WS-01
    llm, prompt = tied.engine(), random_prompt(50)
    group = SamplingParams(n=8, seed=5, max_tokens=10, ignore_eos=True, top_p=0.9)
    before = llm.generate(prompt, GREEDY)[0]
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 48
    receipt = trainer.push(llm, tied, 1)
    updated = llm.generate(prompt, GREEDY)[0]
    assert updated.num_cached_tokens == 0
    assert updated.receipt_id == receipt.id
    samples = llm.generate(prompt, group)
    assert llm.reset_prefix_cache() is True
    cold = llm.generate(prompt, GREEDY)[0]
    fresh = tied.engine(1)
    assert_same_samples([updated, cold], fresh.generate([prompt, prompt], GREEDY))
    assert_same_samples(samples, tied.engine(1, seed=llm.config.seed).generate(prompt, group))
    assert_sampled_by(tied.reference(1), updated)
    assert before.outputs[0].token_ids != updated.outputs[0].token_ids


def test_an_update_returns_what_running_requests_have(tied: Policies, trainer: Trainer):  # case WS-02
    prompts = [random_prompt(20 + 7 * index, seed=index) for index in range(8)]
    llm = tied.engine(max_num_seqs=6)
    whole = llm.generate(prompts[0], LONG)[0]
    llm.reset_prefix_cache()
    idle = llm.engine.scheduler.stats().num_free_blocks
    with InFlight(llm, prompts, LONG) as flight:
        flight.wait_for_steps(3)
        assert llm.reset_prefix_cache() is False
        trainer.push(llm, tied, 1)
    assert {output.outputs[0].finish_reason for output in flight.outputs} == {"abort"}
    assert_is_beginning(flight.outputs[0].outputs[0], whole.outputs[0])
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.stats().num_free_blocks == idle
    updated = llm.generate(prompts, GREEDY)
    assert [output.num_cached_tokens for output in updated] == [0] * 8
    assert_same_samples(updated, tied.engine(1).generate(prompts, GREEDY))


def test_waking_never_brings_the_checkpoint_back(tmp_path: Path, trainer: Trainer):  # case WS-03
    policies = Policies.make(tmp_path, tie=False)
    llm, prompt = LLM(policies.folders[0], kv_cache_memory="2MiB", block_size=4), random_prompt(17)
    moved = policies.folders[0] / "moved.safetensors"
    for number in (1, 2, 1):
        llm.sleep(2)
        llm.wake_up(["weights"])
        trainer.push(llm, policies, number, whole=True)
        (policies.folders[0] / "model.safetensors").rename(moved)  # a reload from disk would raise
        llm.wake_up(["kv_cache"])
        output = llm.generate(prompt, GREEDY)[0]
        moved.rename(policies.folders[0] / "model.safetensors")
        assert output.num_cached_tokens == 0
        assert_sampled_by(policies.reference(number), output)
        assert llm.verify().policy_version == llm.policy_version


def test_a_tied_head_follows_and_an_untied_one_stays(tied: Policies, untied: Policies, trainer: Trainer):  # case WS-05
    llm = tied.engine()
    for number in (1, 2):
        receipt = trainer.push(llm, tied, number)
        assert receipt.tensors[HEAD] == receipt.tensors[EMBED]
        assert_sampled_by(tied.reference(number), llm.generate(random_prompt(11), GREEDY)[0])
    llm = untied.engine()
    receipt = trainer.push(llm, untied, 1, version=3, whole=True)
    assert receipt.tensors[HEAD] != receipt.tensors[EMBED]
    assert_sampled_by(untied.reference(1), llm.generate(random_prompt(11), GREEDY)[0])


def test_wrapped_names_change_every_parameter(untied: Policies, trainer: Trainer):  # case WS-08
    llm = untied.engine()
    before = llm.receipt
    assert before is not None
    receipt = trainer.push(llm, untied, 1, form="wrapped")
    assert all(value != before.tensors[name] for name, value in receipt.tensors.items())
    fresh = untied.engine(1).receipt
    assert fresh is not None
    assert receipt.fingerprint == fresh.fingerprint
    trainer.push(llm, untied, 2, form="wrapped")
    assert_sampled_by(untied.reference(2), llm.generate(random_prompt(13), GREEDY)[0])


@pytest.mark.parametrize(
    ("form", "error"),
    [("placeholder", TensorShapeError), ("narrow", TensorShapeError), ("missing", UncoveredParametersError)],
)
def test_a_spoilt_policy_is_refused_by_name_and_the_next_one_is_served(
    untied: Policies, trainer: Trainer, form: str, error: type[PolicyUpdateError]
):  # case WS-10
    llm, prompt = untied.engine(), random_prompt(13)
    trainer.tell(untied, 1, 1, form=form)
    with pytest.raises(error, match=r"layers\.1\.self_attn\.q_proj"), llm.policy_update(version=1) as update:
        update.load(receiver_of(trainer.name, trainer.where))
    answer = trainer.process.answer()
    if trainer.name in CONNECTED and error is TensorShapeError:
        assert answer["error"] == "TransportError"  # the trainer hears of it
    with pytest.raises(EngineUnusableError, match=error.__name__):
        llm.generate(prompt, GREEDY)
    version = 2
    trainer.tell(untied, 2, version, whole=True)
    with llm.policy_update(version=version) as update:
        update.load(receiver_of(trainer.name, trainer.where))
    assert trainer.process.answer()["fingerprint"] == update.receipt.parameters_fingerprint
    assert_sampled_by(untied.reference(2), llm.generate(prompt, GREEDY)[0])


@pytest.mark.parametrize("name", ["shared_memory", "broadcast", "folder", "sparse_over_shared_memory"])
def test_a_trainer_that_is_killed_half_way_leaves_an_old_or_unusable_engine(
    tied: Policies, name: str, process: PeerProcess, tmp_path_factory: pytest.TempPathFactory
):  # case WS-10
    llm, prompt, folder = tied.engine(), random_prompt(13), tmp_path_factory.mktemp("t")
    old = llm.generate(prompt, GREEDY)
    with PeerProcess() as mortal:
        trainer = Trainer(mortal, name, folder, bucket_bytes=4096)
        trainer.tell(tied, 1, 1, stop_after=9)
        with pytest.raises(TransportError), llm.policy_update(version=1) as update:
            update.load(receiver_of(name, trainer.where, timeout=120.0 if name in CONNECTED else 3.0))
    assert llm.policy_version == 0
    if name in CONNECTED:
        with pytest.raises(EngineUnusableError, match="TransportError"):
            llm.generate(prompt, GREEDY)
    else:
        llm.reset_prefix_cache()
        assert_same_samples(old, llm.generate(prompt, GREEDY))
        llm.verify()
    Trainer(process, name, folder).push(llm, tied, 2)  # it comes again, at the same place
    assert_sampled_by(tied.reference(2), llm.generate(prompt, GREEDY)[0])


@pytest.mark.parametrize("name", ["shared_memory", "broadcast"])
def test_a_trainer_that_hangs_half_way_ends_the_update_at_the_time_limit(
    tied: Policies, name: str, process: PeerProcess, tmp_path_factory: pytest.TempPathFactory
):  # case WS-10
    llm = tied.engine()
    trainer = Trainer(process, name, tmp_path_factory.mktemp("t"), bucket_bytes=4096)
    trainer.tell(tied, 1, 1, stop_after=9, stop_by="SIGSTOP")
    silence = pytest.raises(TransportError, match=r"silent for 2\.0 s|[tT]imed out")
    try:
        with silence, llm.policy_update(version=1) as update:
            update.load(receiver_of(name, trainer.where, timeout=2.0))
    finally:
        process.resume()
    with pytest.raises(EngineUnusableError, match="TransportError"):
        llm.generate(random_prompt(5), GREEDY)
    assert process.answer()["error"] == "TransportError"  # nor does the trainer hang
    trainer.push(llm, tied, 1)
    assert_sampled_by(tied.reference(1), llm.generate(random_prompt(5), GREEDY)[0])


def test_level_two_cycles_end_with_the_outputs_and_buffers_of_before(tied: Policies, trainer: Trainer):  # case SW-01
    llm, prompt = tied.engine(), random_prompt(19)
    before = llm.generate(prompt, GREEDY)
    buffers = {name: tensor.clone() for name, tensor in llm.engine.buffers().items()}
    for level in (2, 1, 2):
        llm.sleep(level)
        llm.wake_up()
        trainer.push(llm, tied, 0, whole=level == 2)
        assert_same_samples(before, llm.generate(prompt, GREEDY))
        assert buffers.keys() == llm.engine.buffers().keys()
        assert all(bool((tensor == buffers[name]).all()) for name, tensor in llm.engine.buffers().items())


def test_after_level_two_only_a_whole_policy_lets_the_engine_run(tied: Policies, trainer: Trainer):  # case SW-02
    llm, prompt = tied.engine(), random_prompt(19)
    trainer.push(llm, tied, 1)
    llm.sleep(2)
    llm.wake_up()
    with pytest.raises(WeightsNotLoadedError):
        llm.generate(prompt, GREEDY)
    trainer.tell(tied, 2, 2, form="missing")
    is_sparse = trainer.name.startswith("sparse")  # changes to weights that were given back are refused at once
    with pytest.raises(TransportError if is_sparse else UncoveredParametersError), llm.policy_update(2) as update:
        update.load(receiver_of(trainer.name, trainer.where))
    trainer.process.answer()
    with pytest.raises((WeightsNotLoadedError, EngineUnusableError)):
        llm.generate(prompt, GREEDY)
    trainer.tell(tied, 2, 3, whole=not (is_sparse and trainer.name in CONNECTED))  # who heard of it sends all by itself
    with llm.policy_update(3) as update:
        update.load(receiver_of(trainer.name, trainer.where))
    assert trainer.process.answer()["fingerprint"] == update.receipt.parameters_fingerprint
    assert_sampled_by(tied.reference(2), llm.generate(prompt, GREEDY)[0])
