"""Policy updates of `LLM(data_parallel_size=2)`: both ranks hold the new policy, or neither does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.engine import update_over_ranks
from rollout.engine.messages import Call, LoadBucket
from rollout.engine.replicas import EngineReplicas
from rollout.errors import (
    EngineAsleepError,
    EngineUnusableError,
    FingerprintMismatchError,
    IllegalPhaseError,
    PolicyUpdateError,
    PolicyUpdateTimeoutError,
    PolicyVersionError,
    StaleWeightsError,
    TensorShapeError,
    TransportError,
    UncoveredParametersError,
    UnknownTensorError,
    WeightsNotLoadedError,
)
from rollout.weights.broadcast import BroadcastReceiver, BroadcastSender
from rollout.weights.in_process import InProcess
from rollout.weights.receipt import Receipt, parameters_fingerprint
from rollout.weights.safetensors_folder import SafetensorsFolderReceiver, SafetensorsFolderSender
from rollout.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from rollout.weights.sparse_delta import SparseDeltaReceiver, SparseDeltaSender
from rollout.weights.transaction import Outcome, PolicyUpdate
from rollout.weights.transport import Sender, Transport
from tests.support.extension import add_to_parameter, fail_engine_once, fail_once
from tests.support.file_transport import FileTransport
from tests.support.policies import (
    GREEDY,
    LONG,
    PUSHES,
    InFlight,
    Policies,
    assert_is_beginning,
    assert_same_samples,
    random_prompt,
    slow_steps,
)

PROMPTS = [random_prompt(20, seed) for seed in range(4)]
EMBED = "model.embed_tokens.weight"


@dataclass
class Engines:
    """One engine in this process and two in others, which hold policy W0 whenever a test begins."""

    policies: Policies
    one: LLM
    two: LLM

    @property
    def replicas(self) -> EngineReplicas:
        engine = self.two._engine
        assert isinstance(engine, EngineReplicas)
        return engine

    def assert_both_hold(self, number: int) -> None:
        """Both ranks serve policy W<number>, whole, under the version that the engine names."""
        with self.one.policy_update() as update:
            update.load(self.policies.weights(number))
        expected = self.one.generate(PROMPTS, GREEDY)
        outputs = self.two.generate(PROMPTS, GREEDY)
        assert_same_samples(outputs, expected)
        assert {output.policy_version for output in outputs} == {self.two.policy_version}
        receipt = self.two.verify()
        assert receipt is self.two.receipt and receipt.policy_version == self.two.policy_version
        assert receipt.tensors == update.receipt.tensors
        assert {output.receipt_id for output in outputs} == {receipt.id}
        snapshots = self.replicas.snapshots()
        assert [snapshot.policy_version for snapshot in snapshots] == [self.two.policy_version] * 2
        assert all(snapshot.stats.num_free_blocks == snapshot.stats.num_blocks for snapshot in snapshots)

    def assert_both_refuse(self, reason: str) -> None:
        """Neither rank generates, for this reason, before a complete update; after one both do."""
        with pytest.raises(EngineUnusableError, match=reason):
            self.two.generate(PROMPTS, GREEDY)
        for rank in (0, 1):
            group = self.replicas._group
            with pytest.raises(EngineUnusableError, match=reason):
                group.ask({rank: Call(group.number(), "check_ready")}, type(None))
        self.two.reload_weights()
        self.assert_both_hold(0)


@pytest.fixture(scope="module")
def module_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    policies = Policies.make(tmp_path_factory.mktemp("policies"), tokenizer=True)
    with policies.engine() as one, policies.engine(data_parallel_size=2) as two:
        yield Engines(policies, one, two)


@pytest.fixture
def engines(module_engines: Engines) -> Engines:
    module_engines.two.wake_up()
    module_engines.two.reload_weights()
    return module_engines


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as the largest tensor allows."""
    monkeypatch.setattr(update_over_ranks, "BUCKET_BYTES", 1)


# Complete updates


def push_transport(llm: LLM, folder: Any) -> Receipt:
    with llm.policy_update() as update:
        update.load(FileTransport(folder))
    return update.receipt


@pytest.mark.parametrize("way", ["mapping", "generator", "buckets", "transport", "in process"])
def test_a_complete_update_gives_both_ranks_what_one_engine_gets(engines: Engines, way: str) -> None:
    # cases WS-01, WS-08, WS-10
    engines.two.generate(PROMPTS * 2, GREEDY)  # prefixes that may not be hit afterwards
    weights, version = engines.policies.weights(1), engines.two.policy_version
    if way == "transport":
        receipt = push_transport(engines.two, engines.policies.folders[1])
    elif way == "in process":
        with engines.two.policy_update() as update:
            assert sorted(update.load(InProcess(weights))) == sorted(weights)
        receipt = update.receipt
    else:
        receipt = PUSHES[way](engines.two, weights)
    assert engines.two.policy_version == version + 1
    assert receipt.parameters_fingerprint == parameters_fingerprint(weights.items(), torch.float32)
    assert receipt.bytes_copied == receipt.num_bytes
    assert set(receipt.phase_seconds) == {"pause", "wake", "load", "post_process", "verify", "invalidate", "resume"}
    outputs = engines.two.generate(PROMPTS, GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
    engines.assert_both_hold(1)


def both_ends(name: str, folder: Path) -> tuple[Sender, Callable[[], Transport]]:
    """A sender to two ranks, and what makes their receivers."""
    if name == "shared memory":
        return SharedMemorySender(folder, num_receivers=2, bucket_bytes=4096), lambda: SharedMemoryReceiver(folder)
    if name == "broadcast":
        sender = BroadcastSender(num_receivers=2, bucket_bytes=4096)
        return sender, lambda: BroadcastReceiver(sender.address)
    if name == "safetensors folder":
        return SafetensorsFolderSender(folder), lambda: SafetensorsFolderReceiver(folder)
    carrier = SharedMemorySender(folder, num_receivers=2)
    return SparseDeltaSender(carrier), lambda: SparseDeltaReceiver(SharedMemoryReceiver(folder))


@pytest.mark.parametrize("name", ["shared memory", "broadcast", "safetensors folder", "sparse delta"])
def test_each_rank_reads_a_transport_by_itself(engines: Engines, name: str, tmp_path: Path) -> None:
    sender, receiver = both_ends(name, tmp_path / "way")
    try:
        for number in (1, 2):
            weights, version = engines.policies.weights(number), engines.two.policy_version + 1
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(sender.send, version, weights.items())
                with engines.two.policy_update(version) as update:
                    assert sorted(update.load(receiver())) == sorted(weights)
                assert sending.result().fingerprint == update.receipt.parameters_fingerprint
            engines.assert_both_hold(number)
    finally:
        sender.close()


def test_many_buckets_bring_the_same_policy(
    engines: Engines, small_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets: list[int] = []
    ask_all = engines.replicas.ask_all

    def noting(command: Callable[[int], Any], kind: type, timeout: float | None) -> list[Any]:
        message = command(-1)
        if isinstance(message, LoadBucket):
            buckets.append(len(message.tensors))
        return ask_all(command, kind, timeout)

    monkeypatch.setattr(engines.replicas, "ask_all", noting)
    weights = engines.policies.weights(2)
    with engines.two.policy_update() as update:
        update.load(weights)
    assert len(buckets) > 4 and sum(buckets) == len(weights)
    engines.assert_both_hold(2)


def test_the_bucket_takes_no_memory_between_updates(engines: Engines) -> None:
    descriptor = engines.replicas.bucket.descriptor
    with engines.two.policy_update() as update:
        update.load(engines.policies.weights(1))
        assert os.fstat(descriptor).st_blocks > 0
    assert os.fstat(descriptor).st_blocks == 0


def test_an_update_wakes_weights_that_sleep_on_both_ranks(engines: Engines) -> None:
    # cases SW-01, SW-02, WS-03
    engines.two.sleep(2)
    engines.two.wake_up()
    with pytest.raises(WeightsNotLoadedError):
        engines.two.generate(PROMPTS, GREEDY)
    with engines.two.policy_update() as update:
        update.load(engines.policies.weights(2))
    engines.assert_both_hold(2)


def test_a_tied_head_may_come_under_its_own_name(engines: Engines) -> None:
    # case WS-05
    weights = engines.policies.weights(1)
    with engines.two.policy_update() as update:
        update.load([*weights.items(), ("lm_head.weight", weights[EMBED].clone())])
    engines.assert_both_hold(1)


# Refusals before anything is written


def test_a_bad_tensor_in_a_mapping_reaches_no_rank(engines: Engines) -> None:
    # cases WS-08, WS-10
    weights = engines.policies.weights(1)
    for name, tensor, error in (
        (EMBED, torch.zeros(3, 5), TensorShapeError),
        (EMBED, torch.zeros(0), TensorShapeError),
        ("model.norm.wait", torch.zeros(64), UnknownTensorError),
    ):
        version = engines.two.policy_version
        with pytest.raises(error, match=name) as caught, engines.two.policy_update() as update:
            update.load({**weights, name: tensor})
        assert "nothing was written on any rank" in caught.value.__notes__[-1]
        assert update.outcome is Outcome.UNCHANGED and engines.two.policy_version == version
    engines.assert_both_hold(0)


def test_illegal_steps_and_versions_raise_with_what_is_legal(engines: Engines) -> None:
    message = r"verify\(\) is not legal while .* awake; legal next steps: load\(\)"
    with pytest.raises(IllegalPhaseError, match=message), engines.two.policy_update() as update:
        update.verify()
    with pytest.raises(IllegalPhaseError, match="there is no receipt"):
        _ = update.receipt
    with pytest.raises(PolicyVersionError, match="version=0"):
        engines.two.policy_update(0)
    engines.assert_both_hold(0)


def test_nobody_else_is_let_in_while_an_update_is_open(engines: Engines) -> None:
    with engines.two.policy_update() as update:
        with pytest.raises(EngineAsleepError, match="a policy update is in progress"):
            engines.two.generate(PROMPTS, GREEDY)
        with pytest.raises(PolicyUpdateError, match="a policy update is in progress"), engines.two.policy_update():
            pass
        with pytest.raises(PolicyUpdateError, match="a policy update is in progress"):
            engines.two.sleep(1)
        update.load(engines.policies.weights(1))
    engines.assert_both_hold(1)


# Faults, on one rank or here


def fail_here(engines: Engines, update: PolicyUpdate) -> None:
    def stops() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(engines.policies.weights(1).items())[:12]
        raise OSError("the trainer stops")

    update.load(stops())


def fail_at(method: str, rank: int) -> Callable[[Engines, PolicyUpdate], None]:
    def load(engines: Engines, update: PolicyUpdate) -> None:
        engines.two.collective_rpc(fail_once, args=(rank, method))
        update.load(engines.policies.weights(1))

    return load


def fail_engine_at(method: str, rank: int) -> Callable[[Engines, PolicyUpdate], None]:
    def load(engines: Engines, update: PolicyUpdate) -> None:
        engines.two.collective_rpc(fail_engine_once, args=(rank, method))
        update.load(engines.policies.weights(1))

    return load


def fail_in_transport(rank: int, num_good: int) -> Callable[[Engines, PolicyUpdate], None]:
    def load(engines: Engines, update: PolicyUpdate) -> None:
        process = engines.replicas.process_ids[rank]
        update.load(FileTransport(engines.policies.folders[1], process, num_good))

    return load


def differ_in_transport(engines: Engines, update: PolicyUpdate) -> None:
    folders = engines.policies.folders
    update.load(FileTransport(folders[1], engines.replicas.process_ids[1], other=folders[2]))


def leave_out(engines: Engines, update: PolicyUpdate) -> None:
    update.load(list(engines.policies.weights(1).items())[:-1])


FAULTS: dict[str, tuple[Callable[[Engines, PolicyUpdate], None], type[Exception]]] = {
    "generator here": (fail_here, OSError),
    "left out": (leave_out, UncoveredParametersError),
    "post_process on rank 0": (fail_at("remake_quantized_weights", 0), OSError),
    "post_process on rank 1": (fail_at("remake_quantized_weights", 1), OSError),
    "verify on rank 1": (fail_at("buffers", 1), OSError),
    "invalidate on rank 0": (fail_engine_at("invalidate", 0), OSError),
    "invalidate on rank 1": (fail_engine_at("invalidate", 1), OSError),
    "transport on rank 0": (fail_in_transport(0, 3), TransportError),
    "transport on rank 1, before the first tensor": (fail_in_transport(1, 0), TransportError),
    "another policy on rank 1": (differ_in_transport, FingerprintMismatchError),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("roll_back", [False, True])
def test_a_fault_on_one_rank_leaves_both_with_the_old_policy_or_unusable(
    engines: Engines, small_buckets: None, fault: str, roll_back: bool
) -> None:
    load, error = FAULTS[fault]
    with pytest.raises(error) as caught, engines.two.policy_update(roll_back=roll_back) as update:
        load(engines, update)
    notes = "\n".join(caught.value.__notes__)
    if roll_back:
        assert update.outcome is Outcome.ROLLED_BACK and "rolled back on all ranks" in notes
        engines.assert_both_hold(0)
    else:
        assert update.outcome is Outcome.UNUSABLE and "no rank generates" in notes
        engines.assert_both_refuse(f"the policy update to version {update.version} failed")


@pytest.mark.parametrize("roll_back", [False, True])
def test_where_one_rank_serves_the_new_policy_already_and_the_other_fails_neither_serves(
    engines: Engines, roll_back: bool
) -> None:
    with pytest.raises(OSError, match="resume fails"), engines.two.policy_update(roll_back=roll_back) as update:
        fail_engine_at("resume", 1)(engines, update)
    assert update.outcome is Outcome.UNUSABLE
    engines.assert_both_refuse("resume fails on rank 1")


def test_a_rank_whose_weights_cannot_wake_leaves_both_as_they_were(engines: Engines) -> None:
    engines.two.collective_rpc(fail_once, args=(1, "wake_up"))
    with pytest.raises(OSError, match="wake_up fails on rank 1"), engines.two.policy_update():
        pass
    engines.assert_both_hold(0)


def test_weights_changed_on_one_rank_are_found(engines: Engines) -> None:
    engines.two.collective_rpc(add_to_parameter, args=(1, EMBED))
    with pytest.raises(StaleWeightsError, match=EMBED) as caught:
        engines.two.verify()
    assert "rank 1" in caught.value.__notes__[0]
    with pytest.raises(StaleWeightsError, match="changed outside a policy update"):
        engines.two.generate(PROMPTS, GREEDY)
    engines.two.reload_weights()
    engines.assert_both_hold(0)


# Requests in flight


def test_abort_returns_what_was_sampled(engines: Engines) -> None:
    # case WS-02
    whole = engines.two.generate(PROMPTS, LONG)
    with slow_steps(engines.two) as at_full_speed, InFlight(engines.two, PROMPTS, LONG) as flight:
        flight.wait_for_steps(10)
        with engines.two.policy_update() as update:
            update.load(engines.policies.weights(1))
        at_full_speed()
    for part, full in zip(flight.outputs, whole, strict=True):
        assert_is_beginning(part.outputs[0], full.outputs[0])
    engines.assert_both_hold(1)


def test_wait_runs_requests_to_their_end_under_the_old_policy(engines: Engines) -> None:
    # Stop strings are found in this process while the ranks drain.
    params = SamplingParams(n=2, max_tokens=200, seed=4, stop=["zq"], ignore_eos=True)
    whole = engines.two.generate(PROMPTS, params)
    with InFlight(engines.two, PROMPTS, params) as flight:
        flight.wait_for_steps(5)
        with engines.two.policy_update(in_flight="wait") as update:
            update.load(engines.policies.weights(1))
    assert_same_samples(flight.outputs, whole)
    engines.assert_both_hold(1)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_kept_requests_go_on_under_the_new_policy_and_say_so(engines: Engines, mode: Any) -> None:
    old, version = engines.two.generate(PROMPTS, LONG), engines.two.policy_version
    with slow_steps(engines.two) as at_full_speed, InFlight(engines.two, PROMPTS, LONG) as flight:
        flight.wait_for_steps(10)
        with engines.two.policy_update(in_flight=mode) as update:
            update.load(engines.policies.weights(1))
        at_full_speed()
    for output, before in zip(flight.outputs, old, strict=True):
        (completion,) = output.outputs
        spans = completion.policy_versions
        assert [span.version for span in spans] == [version, version + 1]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, 400)
        assert completion.token_ids[: spans[0].end] == before.outputs[0].token_ids[: spans[0].end]
        assert completion.token_ids != before.outputs[0].token_ids
        assert output.receipt_ids[version + 1] == update.receipt.id
        if mode == "recompute":  # what W1 samples after the same tokens
            prompt = output.prompt_token_ids + completion.token_ids[: spans[0].end]
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            (again,) = engines.two.generate(prompt, params)[0].outputs
            assert completion.token_ids[spans[0].end :][:20] == again.token_ids
    engines.assert_both_hold(1)


def test_kept_requests_go_on_where_the_update_is_rolled_back(engines: Engines, small_buckets: None) -> None:
    whole = engines.two.generate(PROMPTS, LONG)
    with slow_steps(engines.two) as at_full_speed, InFlight(engines.two, PROMPTS, LONG) as flight:
        flight.wait_for_steps(10)
        with (
            pytest.raises(OSError, match="the trainer stops"),
            engines.two.policy_update(in_flight="keep", roll_back=True) as update,
        ):
            fail_here(engines, update)
        at_full_speed()
    assert_same_samples(flight.outputs, whole)
    engines.assert_both_hold(0)


def test_kept_requests_end_with_what_they_have_where_the_engine_becomes_unusable(
    engines: Engines, small_buckets: None
) -> None:
    whole = engines.two.generate(PROMPTS, LONG)
    with slow_steps(engines.two) as at_full_speed, InFlight(engines.two, PROMPTS, LONG) as flight:
        flight.wait_for_steps(10)
        with pytest.raises(OSError, match="the trainer stops"), engines.two.policy_update(in_flight="keep") as update:
            fail_here(engines, update)
        at_full_speed()
    for part, full in zip(flight.outputs, whole, strict=True):
        assert_is_beginning(part.outputs[0], full.outputs[0])
    engines.assert_both_refuse("the trainer stops")


def test_a_time_limit_that_passes_while_waiting_lets_requests_go_on(engines: Engines) -> None:
    params = SamplingParams(n=4, max_tokens=450, seed=4, ignore_eos=True)
    whole = engines.two.generate(PROMPTS, params)
    with slow_steps(engines.two) as at_full_speed, InFlight(engines.two, PROMPTS, params) as flight:
        flight.wait_for_steps(5)
        limited = engines.two.policy_update(in_flight="wait", timeout=1e-6)
        with pytest.raises(PolicyUpdateTimeoutError, match="had not ended after 1e-06 s"), limited:
            pass
        at_full_speed()
    assert_same_samples(flight.outputs, whole)
    engines.assert_both_hold(0)


def test_sleep_that_keeps_requests_lets_them_go_on_after_waking(engines: Engines) -> None:
    # case SW-05
    whole = engines.two.generate(PROMPTS, LONG)
    with slow_steps(engines.two) as at_full_speed, InFlight(engines.two, PROMPTS, LONG) as flight:
        flight.wait_for_steps(10)
        engines.two.sleep(1, mode="recompute")
        assert engines.two.is_sleeping
        engines.two.wake_up()
        at_full_speed()
    assert_same_samples(flight.outputs, whole)
    engines.assert_both_hold(0)
