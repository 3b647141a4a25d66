"""What every transport has in common, with both ends in one process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rollout.errors import (
    FingerprintMismatchError,
    PolicyUpdateError,
    RolloutError,
    TensorKindError,
    TensorShapeError,
    TransportError,
    UncoveredParametersError,
    UnknownTensorError,
)
from rollout.weights.receipt import parameters_fingerprint
from rollout.weights.sparse_delta import SparseDeltaSender
from rollout.weights.transaction import PolicyUpdate
from rollout.weights.transport import HeldPolicy, NamedTensor, Transport
from tests.support.recording_engine import (
    EMBED,
    HEAD,
    NAMES,
    RecordingEngine,
    assert_holds,
    assert_old_policy_serves,
    assert_unusable_until_a_complete_update,
    new_policy,
    snapshot,
)
from tests.support.transports import (
    CONNECTED,
    TRANSPORTS,
    Counted,
    Ends,
    GatherError,
    ends_of,
    failing_to_send,
    overwriting,
    sending,
    transfer,
)


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short, since the path of a socket must be."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def ends(name: str, place: Path) -> Iterator[Ends]:
    with ends_of(name, place) as made:
        yield made


@pytest.mark.parametrize("bucket_bytes", [64, 2048, 1 << 20])
@pytest.mark.parametrize("tied", [True, False])
def test_policies_arrive_bit_for_bit_from_tensors_that_are_overwritten(
    name: str, place: Path, bucket_bytes: int, tied: bool
):  # case WS-10
    engine = RecordingEngine(tied=tied)
    with ends_of(name, place, bucket_bytes=bucket_bytes) as ends:
        for version in (1, 2, 5):
            policy = new_policy(engine, seed=version)
            update, report = transfer(engine, ends, overwriting(policy.items()), version)
            assert_holds(engine, policy)
            assert engine.policy_version == update.receipt.policy_version == version
            assert report.fingerprint == update.receipt.parameters_fingerprint
            assert report.fingerprint == parameters_fingerprint(policy.items(), torch.float32)
            assert report.num_tensors == len(policy)
            assert update.receipt.bytes_copied == update.receipt.num_bytes


def test_a_sender_that_casts_sends_half_the_bytes_and_both_sides_agree(name: str, place: Path):
    engine = RecordingEngine(torch.bfloat16)
    policy = new_policy(engine, dtype=torch.float32)
    rounded = {key: tensor.to(torch.bfloat16) for key, tensor in policy.items()}
    assert any(not torch.equal(policy[key], rounded[key].float()) for key in policy)
    with ends_of(name, place, dtype=torch.bfloat16) as ends:
        update, report = transfer(engine, ends, policy.items())
    assert_holds(engine, rounded)
    assert report.fingerprint == update.receipt.parameters_fingerprint
    assert report.num_bytes < sum(tensor.nbytes for tensor in policy.values())


def test_an_engine_in_another_dtype_casts_what_arrives(ends: Ends):
    engine = RecordingEngine(torch.bfloat16)
    policy = new_policy(engine, dtype=torch.float32)
    update, report = transfer(engine, ends, policy.items())
    assert_holds(engine, policy)
    assert report.fingerprint == parameters_fingerprint(policy.items(), torch.float32)
    assert update.receipt.parameters_fingerprint == parameters_fingerprint(policy.items(), torch.bfloat16)


def test_scalars_odd_sizes_and_strided_tensors_arrive(ends: Ends, name: str):
    wide = torch.randn(6, 10, dtype=torch.float64)
    policy: dict[str, torch.Tensor] = {
        "scalar": torch.tensor(1.5),
        "odd": torch.randn(3, dtype=torch.bfloat16),
        "after odd": torch.randn(2, 2, dtype=torch.float64),
        "nothing": torch.empty(0, dtype=torch.bfloat16),
        "strided": wide[:, ::3],
        "transposed": wide.T,
        "half": torch.randn(5).half(),
    }
    receiver = ends.receiver()
    receiver.prepare(3, HeldPolicy(0, {}))
    with sending(ends.sender, 3, policy.items()):
        arrived = {key: tensor.clone() for key, tensor in receiver.tensors()}
        fingerprints = dict(receiver.sent_fingerprints())
        receiver.close()
    assert list(arrived) == list(policy)
    assert fingerprints.keys() == policy.keys()
    for key, tensor in policy.items():
        assert arrived[key].dtype == tensor.dtype
        assert torch.equal(arrived[key], tensor), key


def test_a_receiver_can_be_sent_to_another_process(ends: Ends):
    engine = RecordingEngine()
    policy = new_policy(engine)
    receiver = pickle.loads(pickle.dumps(ends.receiver()))
    with sending(ends.sender, 1, policy.items()), PolicyUpdate(engine, 1) as update:
        update.load(receiver)
    assert_holds(engine, policy)


def _placeholder(policy: dict[str, torch.Tensor]) -> None:
    policy[NAMES[4]] = torch.empty(0)


def _narrow(policy: dict[str, torch.Tensor]) -> None:
    policy[NAMES[4]] = policy[NAMES[4]][:-1]


def _unknown(policy: dict[str, torch.Tensor]) -> None:
    policy["model.layers.7.mlp.down_proj.weight"] = torch.zeros(3)


def _missing(policy: dict[str, torch.Tensor]) -> None:
    del policy[NAMES[2]]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (_placeholder, TensorShapeError),
        (_narrow, TensorShapeError),
        (_unknown, UnknownTensorError),
        (_missing, UncoveredParametersError),
    ],
)
def test_a_policy_that_does_not_fit_is_never_served_and_the_next_one_is(
    ends: Ends, spoil: object, error: type[PolicyUpdateError]
):  # cases WS-08, WS-10
    engine = RecordingEngine()
    policy = new_policy(engine)
    assert callable(spoil)
    spoil(policy)
    named = Counted(policy.items())
    with pytest.raises(error) as raised, sending(ends.sender, 1, named), PolicyUpdate(engine, 1) as update:
        update.load(ends.receiver())
    assert named.is_consumed  # the trainer's other ranks are not left waiting in a gather
    assert engine.policy_version == 0
    assert engine.calls[-1] == "mark_unusable"
    assert "the engine refuses until" in str(raised.value.__notes__)
    if isinstance(ends.sender, SparseDeltaSender):
        ends.sender.send_whole_next()
    policy = new_policy(engine, seed=2)
    update, report = transfer(engine, ends, policy.items(), version=2)
    assert_holds(engine, policy)
    assert engine.unusable is None
    assert report.fingerprint == update.receipt.parameters_fingerprint


@pytest.mark.parametrize("tensors_before", [0, 2, 5])
def test_a_trainer_that_fails_half_way_leaves_an_engine_that_is_old_or_refuses(
    name: str, place: Path, tensors_before: int
):  # case WS-10
    engine = RecordingEngine()
    old = snapshot(engine)
    with ends_of(name, place, bucket_bytes=64) as ends:
        is_told = name in CONNECTED and tensors_before > 0  # it may come too late for a failure before the first bucket
        named = Counted(new_policy(engine).items(), fail_at=tensors_before)
        with (
            failing_to_send(ends.sender, 1, named) as errors,
            pytest.raises(TransportError),
            PolicyUpdate(engine, 1) as update,
        ):
            update.load(ends.receiver(timeout=120.0 if is_told else 0.3))
        assert isinstance(errors[0], GatherError)
        if name.endswith("folder") or tensors_before == 0:
            assert_old_policy_serves(engine, old)
        elif not name.startswith("sparse"):
            assert_unusable_until_a_complete_update(engine)
        policy = new_policy(engine, seed=3)
        transfer(engine, ends, policy.items(), version=7)
        assert_holds(engine, policy)


def test_a_trainer_that_fails_half_way_is_rolled_back_where_the_update_says_so(ends: Ends):  # case WS-10
    engine = RecordingEngine()
    old = snapshot(engine)
    named = Counted(new_policy(engine).items(), fail_at=5)
    with (
        failing_to_send(ends.sender, 1, named),
        pytest.raises(TransportError),
        PolicyUpdate(engine, 1, roll_back=True) as update,
    ):
        update.load(ends.receiver(timeout=0.3 if ends.name.endswith("folder") else 120.0))
    assert_old_policy_serves(engine, old)


def test_a_tensor_that_cannot_be_sent_is_refused_by_the_sender_by_name(ends: Ends):
    engine = RecordingEngine()
    old = snapshot(engine)
    policy = new_policy(engine)
    named = Counted([(EMBED, policy[EMBED].to("meta")), *policy.items()])
    with (
        failing_to_send(ends.sender, 1, named) as errors,
        pytest.raises(TransportError),
        PolicyUpdate(engine, 1) as update,
    ):
        update.load(ends.receiver(timeout=0.3))
    assert isinstance(errors[0], TensorKindError)
    assert EMBED in str(errors[0])
    assert named.is_consumed
    assert_old_policy_serves(engine, old)


@pytest.mark.parametrize("sent_version", [1, 3])
def test_another_version_than_the_updates_raises_before_anything_is_written(ends: Ends, sent_version: int):
    engine = RecordingEngine()
    old = snapshot(engine)
    named = Counted(new_policy(engine).items())
    if ends.name in CONNECTED:
        with (
            failing_to_send(ends.sender, sent_version, named) as errors,
            pytest.raises(TransportError, match="version"),
            PolicyUpdate(engine, 2) as update,
        ):
            update.load(ends.receiver())
        assert isinstance(errors[0], TransportError)
        assert named.is_consumed
    else:
        ends.sender.send(sent_version, named)
        with pytest.raises(TransportError, match=f"the newest is {sent_version}"), PolicyUpdate(engine, 2) as update:
            update.load(ends.receiver(timeout=0.2))
    assert_old_policy_serves(engine, old)


def test_an_engine_without_a_sender_waits_for_its_time_limit_and_keeps_its_policy(name: str, place: Path):
    engine = RecordingEngine()
    old = snapshot(engine)
    with ends_of(name, place, timeout=0.3) as ends:
        with pytest.raises(TransportError), PolicyUpdate(engine) as update:
            update.load(ends.receiver())
        assert_old_policy_serves(engine, old)
        ends.sender.close()
        with pytest.raises(TransportError, match=r"in 0\.3 s"), PolicyUpdate(engine) as update:
            update.load(ends.receiver())
    assert_old_policy_serves(engine, old)


@pytest.mark.parametrize("name", CONNECTED, indirect=True)
def test_a_sender_without_engines_raises_after_its_time_limit_and_gathers_to_the_end(name: str, place: Path):
    engine = RecordingEngine()
    with ends_of(name, place, timeout=0.3) as ends:
        named = Counted(new_policy(engine).items())
        with pytest.raises(TransportError, match=r"0 of 1 receivers came for policy 1 in 0\.3 s"):
            ends.sender.send(1, named)
        assert named.is_consumed


@pytest.mark.parametrize("name", CONNECTED, indirect=True)
def test_an_engine_that_gave_up_waiting_does_not_take_the_place_of_one_that_waits(name: str, place: Path):
    engine, policy = RecordingEngine(), new_policy(RecordingEngine())
    with ends_of(name, place) as ends:
        for _ in range(2):
            with pytest.raises(TransportError, match="silent"), PolicyUpdate(engine, 1) as update:
                update.load(ends.receiver(timeout=0.2))
        transfer(engine, ends, policy.items(), version=1)
    assert_holds(engine, policy)


@pytest.mark.parametrize("name", CONNECTED, indirect=True)
@pytest.mark.parametrize("fault", [None, "one engine gives up"])
def test_several_engines_get_one_policy_or_the_sender_hears_of_it(name: str, place: Path, fault: str | None):
    first, second = RecordingEngine(), RecordingEngine()
    policy = new_policy(first)
    with ends_of(name, place, bucket_bytes=1024, num_receivers=2) as ends:
        if fault is None:
            with (
                sending(ends.sender, 1, policy.items()) as report,
                _updating(second, ends) as updates,
                PolicyUpdate(first, 1) as update,
            ):
                update.load(ends.receiver())
            assert_holds(first, policy)
            assert_holds(second, policy)
            assert report[0].fingerprint == update.receipt.parameters_fingerprint
            assert updates[0].receipt.fingerprint == update.receipt.fingerprint
            return
        second.fail_at = "post_process"
        del second.tensors[NAMES[3]]  # an unknown tensor for this one, in the middle of the policy
        with (
            failing_to_send(ends.sender, 1, policy.items()) as errors,
            _failing_update(second, ends) as others,
            pytest.raises(RolloutError),
            PolicyUpdate(first, 1) as update,
        ):
            update.load(ends.receiver())
        assert isinstance(errors[0], TransportError)
        assert isinstance(others[0], UnknownTensorError)
        assert first.policy_version == second.policy_version == 0


@contextmanager
def _updating(engine: RecordingEngine, ends: Ends) -> Iterator[list[PolicyUpdate]]:
    """A second engine's update, in a thread."""
    updates: list[PolicyUpdate] = []

    def run() -> PolicyUpdate:
        with PolicyUpdate(engine, 1) as update:
            update.load(ends.receiver())
        return update

    with ThreadPoolExecutor(max_workers=1) as thread:
        running = thread.submit(run)
        yield updates
        updates.append(running.result(timeout=120))


@contextmanager
def _failing_update(engine: RecordingEngine, ends: Ends) -> Iterator[list[BaseException]]:
    errors: list[BaseException] = []
    with pytest.raises(PolicyUpdateError) as raised, _updating(engine, ends):
        yield errors
    errors.append(raised.value)


def test_a_rank_that_does_not_send_takes_part_in_gathering(name: str, place: Path):
    policy = new_policy(RecordingEngine())
    named = Counted(policy.items())
    with ends_of(name, place, sends=False) as ends:
        report = ends.sender.send(1, named)
    assert named.is_consumed
    assert (report.num_tensors, report.num_bytes) == (len(policy), 0)
    assert not any(path.is_file() for path in place.rglob("*"))


class _Flipping(Transport):
    """Loses one bit of one tensor on the way."""

    def __init__(self, carrier: Transport, name: str) -> None:
        self._carrier, self._name = carrier, name

    def prepare(self, version: int, held: HeldPolicy) -> None:
        self._carrier.prepare(version, held)

    def tensors(self) -> Iterator[NamedTensor]:
        for name, tensor in self._carrier.tensors():
            if name.endswith(self._name):
                tensor = tensor.clone()
                tensor.view(-1).view(torch.uint8)[-1] ^= 1
            yield name, tensor

    def sent_fingerprints(self) -> dict[str, int]:
        return dict(self._carrier.sent_fingerprints())

    def close(self) -> None:
        self._carrier.close()


def test_a_bit_that_is_lost_on_the_way_fails_the_update(ends: Ends):
    engine = RecordingEngine()
    with (
        sending(ends.sender, 1, new_policy(engine).items()),
        pytest.raises(FingerprintMismatchError, match=NAMES[3]),
        PolicyUpdate(engine, 1) as update,
    ):
        update.load(_Flipping(ends.receiver(), NAMES[3]))
    assert_unusable_until_a_complete_update(engine)


def test_a_tied_head_may_be_sent_if_it_is_equal(ends: Ends):  # case WS-05
    engine = RecordingEngine()
    policy = new_policy(engine)
    transfer(engine, ends, {**policy, HEAD: policy[EMBED].clone()}.items())
    assert_holds(engine, policy)
    policy = new_policy(engine, seed=2)
    update, _ = transfer(engine, ends, {**policy, HEAD: policy[EMBED].clone()}.items())
    assert_holds(engine, policy)
    assert update.receipt.tensors[HEAD] == update.receipt.tensors[EMBED]


def test_wrapped_names_arrive_under_their_own(ends: Ends):  # case WS-08
    engine = RecordingEngine()
    for seed in (1, 2):
        policy = new_policy(engine, seed=seed)
        named = [(f"module._orig_mod.{key}", tensor) for key, tensor in policy.items()]
        transfer(engine, ends, named)
        assert_holds(engine, policy)


@pytest.mark.parametrize("name", CONNECTED, indirect=True)
def test_a_sender_hears_why_a_receiver_gave_up(ends: Ends):
    engine = RecordingEngine()
    policy = new_policy(engine)
    _unknown(policy)
    with (
        failing_to_send(ends.sender, 1, policy.items()) as errors,
        pytest.raises(UnknownTensorError),
        PolicyUpdate(engine, 1) as update,
    ):
        update.load(ends.receiver())
    assert "the engine's policy update failed: UnknownTensorError: " in str(errors[0])
    assert "model.layers.7.mlp.down_proj.weight" in str(errors[0])
