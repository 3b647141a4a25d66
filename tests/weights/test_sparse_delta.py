"""Changes between policies: what they hold, what they are made against, and what happens when that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import TransportError
from rollout.weights.in_process import InProcess
from rollout.weights.safetensors_folder import SafetensorsFolderSender
from rollout.weights.sparse_delta import SparseDeltaReceiver, SparseDeltaSender, apply, encode
from rollout.weights.transaction import PolicyUpdate
from tests.support.recording_engine import (
    EMBED,
    NAMES,
    RecordingEngine,
    assert_holds,
    assert_old_policy_serves,
    new_policy,
    snapshot,
)
from tests.support.transports import Ends, ends_of, failing_to_send, sending, transfer

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@given(
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 3000),
    fraction=st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 1000),
)
def test_changes_put_into_the_base_give_the_new_tensor_bit_for_bit(
    dtype: torch.dtype, size: int, fraction: float, seed: int
):
    generator = np.random.default_rng(seed)
    base = torch.from_numpy(generator.integers(0, 256, size * dtype.itemsize, dtype=np.uint8)).view(dtype)
    new = base.clone()  # any bits: not-a-numbers, infinities and signed zeros too
    values = generator.integers(0, 256, (size, dtype.itemsize), dtype=np.uint8)
    where = torch.from_numpy(generator.random(size) < fraction)
    new.view(torch.uint8).view(size, dtype.itemsize)[where] = torch.from_numpy(values)[where]
    delta = encode(base, new)
    if delta is None:
        assert fraction > 0.2 or size < 200
        return
    assert delta.numel() <= new.nbytes
    apply(base, delta)
    assert bits(base) == bits(new)


def test_scalars_and_matrices_change_too():
    for shape in ((), (7, 500)):
        base = torch.zeros(shape, dtype=torch.float64) if shape else torch.tensor(1.0)
        new = base + 0
        new.view(-1)[-1] = -0.0
        delta = encode(base, new, max_fraction=10.0)
        assert delta is not None
        apply(base, delta)
        assert bits(base) == bits(new)


@pytest.mark.parametrize(("step", "bytes_a_change"), [(1000, 2 + 2), (100, 2 + 1), (4, 2 + 0.5), (100_000, 2 + 4)])
def test_positions_take_the_fewest_bytes(step: int, bytes_a_change: float):
    base = torch.zeros(400_000, dtype=torch.bfloat16)
    new = base.clone()
    new[step - 1 :: step] = 1.0
    delta = encode(base, new)
    assert delta is not None
    assert delta.numel() == 16 + bytes_a_change * (400_000 // step)


def test_too_many_changes_are_not_encoded():
    base = torch.zeros(1000, dtype=torch.bfloat16)
    new = base.clone()
    new[::2] = 1.0
    assert encode(base, new, max_fraction=0.5) is None
    assert encode(base, new, max_fraction=0.6) is not None
    assert encode(base, torch.ones_like(base)) is None


@pytest.mark.parametrize("fault", ["cut short", "another form", "another tensor", "empty"])
def test_changes_that_do_not_fit_raise(fault: str):
    base = torch.zeros(1000)
    new = base.clone()
    new[990] = 1.0
    delta = encode(base, new)
    assert delta is not None
    if fault == "cut short":
        delta = delta[:-1]
    elif fault == "another form":
        delta[0] = 65
    elif fault == "empty":
        delta = delta[:0]
    target = torch.zeros(500) if fault == "another tensor" else base
    with pytest.raises(TransportError, match=r"changes came|do not fit"):
        apply(target, delta)
    assert not target.any()


@pytest.fixture(params=["sparse_over_shared_memory", "sparse_over_broadcast", "sparse_over_folder"])
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    with ends_of(request.param, tmp_path_factory.mktemp("t")) as made:
        yield made


def large_engine() -> RecordingEngine:
    """Large enough that what is said beside the values does not count."""
    engine = RecordingEngine(torch.bfloat16)
    engine.tensors[NAMES[4]] = torch.randn(200_000).bfloat16()
    return engine


def step(policy: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """A few values of some tensors change; the others stay as they are."""
    policy = {name: tensor.clone() for name, tensor in policy.items()}
    for name in names:
        policy[name].view(-1)[::97] += 1
    return policy


def test_a_few_changed_values_move_few_bytes_and_every_byte_is_verified(ends: Ends):
    engine = large_engine()
    policy = new_policy(engine)
    _, whole = transfer(engine, ends, policy.items())
    assert whole.num_bytes > 400_000
    for names in ([NAMES[4]], [], [EMBED, NAMES[4]]):
        policy = step(policy, names)
        update, report = transfer(engine, ends, policy.items())
        assert_holds(engine, policy)
        assert report.num_bytes < 20_000
        assert report.fingerprint == update.receipt.parameters_fingerprint
        assert update.receipt.bytes_shared == 0  # the trainer owns none of the engine's memory


def test_bytes_that_were_not_sent_are_verified_too(ends: Ends):
    engine = large_engine()
    policy = new_policy(engine)
    transfer(engine, ends, policy.items())
    engine.tensors[NAMES[5]][3] += 1  # somebody else's doing, in a tensor that does not change
    held = snapshot(engine)
    sends = sending if ends.name == "sparse_over_folder" else failing_to_send
    refused = pytest.raises(TransportError, match=rf"{NAMES[5]}.*holds other values")
    with sends(ends.sender, 2, step(policy, [EMBED]).items()), refused, PolicyUpdate(engine, 2) as update:
        update.load(ends.receiver())
    assert_holds(engine, held)
    assert engine.calls[-1] == "cancel"


@pytest.mark.parametrize("lag", [-1, 1])
def test_changes_to_another_version_are_refused_before_anything_is_written(ends: Ends, lag: int):
    engine, other = large_engine(), large_engine()
    policy = new_policy(engine)
    transfer(engine, ends, policy.items(), version=5)
    old = snapshot(other)
    other.policy_version = 5 + lag
    version = 8
    sends = sending if ends.name == "sparse_over_folder" else failing_to_send
    refused = pytest.raises(TransportError, match=rf"made against policy 5, but the engine holds policy {5 + lag}")
    with sends(ends.sender, version, step(policy, [EMBED]).items()), refused, PolicyUpdate(other, version) as update:
        update.load(ends.receiver())
    if ends.name == "sparse_over_folder":  # files bring no answer
        assert isinstance(ends.sender, SparseDeltaSender)
        ends.sender.send_whole_next()
    assert_holds(other, old)
    assert other.calls[-1] == "cancel"
    policy = step(policy, [EMBED])
    transfer(other, ends, policy.items(), version=9)  # whole again
    assert_holds(other, policy)


def test_an_engine_in_another_dtype_than_the_senders_is_told_why(ends: Ends):
    engine = RecordingEngine(torch.bfloat16)
    policy = new_policy(engine, dtype=torch.float32)
    transfer(engine, ends, policy.items())
    sends = sending if ends.name == "sparse_over_folder" else failing_to_send
    refused = pytest.raises(TransportError, match="must send in the engine's dtype")
    with sends(ends.sender, 2, policy.items()), refused, PolicyUpdate(engine, 2) as update:
        update.load(ends.receiver())


def test_a_stream_that_no_sparse_sender_sent_is_refused(tmp_path_factory: pytest.TempPathFactory):
    engine = RecordingEngine()
    old = snapshot(engine)
    with pytest.raises(TransportError, match="SparseDeltaSender"), PolicyUpdate(engine) as update:
        update.load(SparseDeltaReceiver(InProcess(new_policy(engine))))
    assert_old_policy_serves(engine, old)


@pytest.mark.parametrize("max_fraction", [0, -1, 1.5])
def test_a_fraction_that_makes_no_sense_is_refused(max_fraction: float, tmp_path: Path):
    with pytest.raises(ValueError, match=r"max_fraction=.* must be above 0 and at most 1"):
        SparseDeltaSender(SafetensorsFolderSender(tmp_path), max_fraction=max_fraction)
