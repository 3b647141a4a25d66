"""What policy updates accept, refuse and leave behind, against an engine side that records calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rollout.errors import (
    AdapterTensorError,
    DuplicateTensorError,
    FingerprintMismatchError,
    TensorKindError,
    TensorShapeError,
    TiedTensorError,
    UncoveredParametersError,
    UnknownTensorError,
)
from rollout.weights.receipt import fingerprint_of, parameters_fingerprint, receipt_id, verify_receipt
from rollout.weights.transaction import PolicyUpdate
from rollout.weights.transport import Transport
from tests.support.recording_engine import (
    COMPLETE,
    EMBED,
    HEAD,
    NAMES,
    RecordingEngine,
    assert_holds,
    assert_old_policy_serves,
    assert_unusable_until_a_complete_update,
    new_policy,
    run_update,
    snapshot,
)

Q_PROJ = NAMES[1]


# What a complete update does


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_complete_update_leaves_the_new_policy_and_a_true_receipt(dtype: torch.dtype, tied: bool):
    engine = RecordingEngine(dtype, tied=tied)
    policy = new_policy(engine, dtype=torch.float32)
    with PolicyUpdate(engine, version=5) as update:
        loaded = update.load(policy)
    assert sorted(loaded) == sorted(engine.tensors)
    assert_holds(engine, policy)
    assert engine.calls == COMPLETE
    receipt = update.receipt
    assert engine.policy_version == receipt.policy_version == 5
    assert set(receipt.tensors) == {*engine.tensors, HEAD}
    assert receipt.tensors[HEAD] == receipt.tensors[EMBED] or not tied
    assert list(receipt.buffers) == ["model.rotary.cos_sin"]
    assert receipt.id == receipt_id(5, receipt.fingerprint)
    assert receipt.bytes_copied == receipt.num_bytes == sum(tensor.nbytes for tensor in engine.tensors.values())
    assert receipt.bytes_shared == 0
    assert set(receipt.phase_seconds) == {"pause", "wake", "load", "post_process", "verify", "invalidate"}
    verify_receipt(receipt, engine.parameters(), engine.tied(), engine.buffers())
    assert f"receipt {receipt.id}: policy 5" in str(receipt)


def test_the_trainer_computes_the_same_fingerprint_from_its_side():
    engine = RecordingEngine(torch.bfloat16)
    policy = new_policy(engine, dtype=torch.float32)
    with PolicyUpdate(engine) as update:
        update.load(policy)
    assert update.receipt.parameters_fingerprint == parameters_fingerprint(policy.items(), torch.bfloat16)
    policy[Q_PROJ][0, 0] += 1
    assert update.receipt.parameters_fingerprint != parameters_fingerprint(policy.items(), torch.bfloat16)


@given(order=st.permutations(NAMES), cuts=st.lists(st.integers(0, len(NAMES)), max_size=5), lazy=st.booleans())
def test_any_order_and_bucket_split_gives_the_same_policy(order: list[str], cuts: list[int], lazy: bool):
    engine = RecordingEngine(torch.bfloat16)
    policy = new_policy(engine)
    bounds = [0, *sorted(cuts), len(order)]
    with PolicyUpdate(engine) as update:
        for low, high in itertools.pairwise(bounds):
            bucket = [(name, policy[name]) for name in order[low:high]]
            assert update.load(iter(bucket) if lazy else bucket) == order[low:high]
    assert_holds(engine, policy)
    assert update.receipt.parameters_fingerprint == parameters_fingerprint(policy.items(), torch.bfloat16)


def test_a_generator_that_overwrites_its_tensor_after_each_yield_works():  # case WS-10
    engine = RecordingEngine()
    policy = new_policy(engine)

    def overwriting() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(max(tensor.numel() for tensor in policy.values()))
        for name, tensor in policy.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view
            buffer.fill_(float("nan"))

    with PolicyUpdate(engine) as update:
        update.load(overwriting())
    assert_holds(engine, policy)


def test_wrapped_names_are_loaded_under_their_plain_names():  # case WS-08
    engine = RecordingEngine()
    policy = new_policy(engine)
    wrapped = {f"module._orig_mod.base_model.model.{name}": tensor for name, tensor in policy.items()}
    wrapped["base_model.model.lm_head.original_module.weight"] = torch.zeros(3)
    with PolicyUpdate(engine) as update:
        assert sorted(update.load(wrapped)) == sorted(NAMES)
    assert_holds(engine, policy)


def test_strided_and_float64_sources_are_cast_and_copied():
    engine = RecordingEngine(torch.bfloat16)
    policy = {name: tensor.double() for name, tensor in new_policy(engine, dtype=torch.float32).items()}
    policy[Q_PROJ] = policy[Q_PROJ].t().contiguous().t()
    with PolicyUpdate(engine) as update:
        update.load(policy)
    assert_holds(engine, policy)


# Transports


class _Wire(Transport):
    """Brings `tensors` and says that `fingerprints` were sent."""

    def __init__(self, tensors: dict[str, torch.Tensor], fingerprints: dict[str, int]) -> None:
        self.pairs, self.fingerprints, self.num_closed = tensors, fingerprints, 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.pairs.items()

    def sent_fingerprints(self) -> dict[str, int]:
        return self.fingerprints

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transport_is_read_closed_and_held_to_what_its_sender_says(dtype: torch.dtype):
    engine = RecordingEngine(torch.bfloat16)
    policy = new_policy(engine, dtype=dtype)
    wire = _Wire(policy, {name: fingerprint_of(tensor) for name, tensor in policy.items()})
    with PolicyUpdate(engine) as update:
        assert sorted(update.load(wire)) == sorted(policy)
    assert wire.num_closed == 1
    assert_holds(engine, policy)


@pytest.mark.parametrize("fault", ["changed on the way", "missing here", "unknown there"])
def test_a_difference_between_sender_and_receiver_fails_the_update(fault: str):
    engine = RecordingEngine(torch.bfloat16)
    policy = new_policy(engine)
    told = {name: fingerprint_of(tensor) for name, tensor in policy.items()}
    if fault == "changed on the way":
        policy[Q_PROJ].view(torch.uint8)[0, 0] ^= 1
    elif fault == "missing here":
        told["model.layers.9.self_attn.q_proj.weight"] = 1
    else:
        del told[Q_PROJ]
    wire = _Wire(policy, told)
    with pytest.raises(FingerprintMismatchError, match="is not what the trainer sent"), PolicyUpdate(engine) as update:
        update.load(wire)
    assert wire.num_closed == 1
    assert_unusable_until_a_complete_update(engine)


# Memory that trainer and engine share


def test_shared_parameters_are_covered_without_a_copy():
    engine = RecordingEngine()
    trainer = {name: nn.Parameter(tensor) for name, tensor in engine.tensors.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in engine.tensors.items()}
    with torch.no_grad():
        for parameter in trainer.values():
            parameter.mul_(2)
    with PolicyUpdate(engine) as update:
        update.load(trainer)
    assert update.receipt.bytes_copied == 0
    assert update.receipt.bytes_shared == update.receipt.num_bytes
    assert {name: tensor.data_ptr() for name, tensor in engine.tensors.items()} == addresses
    assert engine.guard is not None
    assert set(engine.guard.names) == set(NAMES)
    assert update.receipt.parameters_fingerprint == parameters_fingerprint(trainer.items(), torch.float32)


def test_a_mix_of_shared_and_separate_parameters_copies_only_the_separate():
    engine = RecordingEngine()
    policy = {**new_policy(engine), EMBED: engine.tensors[EMBED]}
    with PolicyUpdate(engine) as update:
        update.load(policy)
    shared = engine.tensors[EMBED].nbytes
    assert update.receipt.bytes_shared == shared
    assert update.receipt.bytes_copied == update.receipt.num_bytes - shared
    assert engine.guard is not None
    assert engine.guard.names == (EMBED,)


def test_shared_memory_under_the_wrong_name_is_refused():
    engine = RecordingEngine()
    old = snapshot(engine)
    with pytest.raises(TensorKindError, match=r"k_proj.* lies in the engine's own memory"):
        run_update(engine, {**new_policy(engine), NAMES[2]: engine.tensors[NAMES[3]]})
    assert_old_policy_serves(engine, old)


def test_a_failed_update_of_shared_parameters_that_changed_leaves_the_engine_unusable():
    engine = RecordingEngine()
    trainer = dict(engine.tensors)
    with pytest.raises(UncoveredParametersError):
        run_update(engine, lambda: trainer[Q_PROJ].data.add_(1), {Q_PROJ: trainer[Q_PROJ]})
    assert_unusable_until_a_complete_update(engine)


def test_a_failed_update_of_shared_parameters_that_did_not_change_keeps_serving():
    engine = RecordingEngine()
    old = snapshot(engine)
    with pytest.raises(UncoveredParametersError):
        run_update(engine, {Q_PROJ: engine.tensors[Q_PROJ]})
    assert_old_policy_serves(engine, old)


# Tied embeddings


def test_a_tied_model_takes_the_embedding_the_head_or_both_if_equal():  # case WS-05
    for names in ([EMBED], [HEAD], [EMBED, HEAD], [HEAD, EMBED]):
        for as_list in (True, False):
            engine = RecordingEngine(torch.bfloat16)
            policy = new_policy(engine, dtype=torch.float32)
            rest = [(name, tensor) for name, tensor in policy.items() if name != EMBED]
            pairs = [(name, policy[EMBED].clone()) for name in names] + rest
            with PolicyUpdate(engine) as update:
                assert update.load(pairs if as_list else iter(pairs)) == [name for name, _ in pairs]
            assert_holds(engine, policy)
            assert update.receipt.tensors[HEAD] == update.receipt.tensors[EMBED]


@pytest.mark.parametrize("first", [EMBED, HEAD])
def test_a_different_head_for_a_tied_model_raises_before_writing(first: str):  # case WS-05
    engine = RecordingEngine()
    old, policy = snapshot(engine), new_policy(engine)
    second = HEAD if first == EMBED else EMBED
    pairs = {first: policy[EMBED], second: policy[EMBED] + 1e-3}
    with pytest.raises(TiedTensorError, match=r"lm_head\.weight.*tied"):
        run_update(engine, pairs)
    assert_old_policy_serves(engine, old)


def test_an_untied_model_needs_its_head():  # case WS-05
    engine = RecordingEngine(tied=False)
    policy = new_policy(engine)
    del policy[HEAD]
    with pytest.raises(UncoveredParametersError, match=r"6 of 7 .*missing: lm_head\.weight") as caught:
        run_update(engine, policy)
    assert caught.value.names == (HEAD,)
    assert_unusable_until_a_complete_update(engine)


# Refusals

BAD = {
    "unknown": ("model.norm.wait", torch.zeros(16), UnknownTensorError, "did you mean 'model.norm.weight'"),
    "adapter": ("model.norm.lora_A.default.weight", torch.zeros(16), AdapterTensorError, "lora_A"),
    "shape": (Q_PROJ, torch.zeros(16, 8), TensorShapeError, r"q_proj.*\(16, 8\).*\(16, 16\)"),
    "transposed": (NAMES[4], torch.zeros(32, 16), TensorShapeError, r"\(32, 16\).*\(16, 32\)"),
    "placeholder": (Q_PROJ, torch.zeros(0), TensorShapeError, r"q_proj.*\(0,\).*\(16, 16\).*gather it first"),
    "integers": (Q_PROJ, torch.zeros(16, 16, dtype=torch.uint8), TensorKindError, "uint8.*dequantise"),
    "meta": (Q_PROJ, torch.zeros(16, 16, device="meta"), TensorKindError, "no dense storage"),
    "array": (Q_PROJ, torch.zeros(16, 16).numpy(), TensorKindError, "ndarray"),
    "twice": (NAMES[5], torch.zeros(16), DuplicateTensorError, "model.norm.weight was sent twice"),
}


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("container", [dict, list, tuple, "items"])
def test_a_bad_tensor_in_a_collection_raises_before_anything_is_written(fault: str, container):  # cases WS-08, WS-10
    engine = RecordingEngine()
    old, policy = snapshot(engine), new_policy(engine)
    name, tensor, error, message = BAD[fault]
    pairs = [*policy.items(), (f"module.{name}", tensor)]
    named = dict(pairs).items() if container == "items" else container(pairs)
    with pytest.raises(error, match=message):
        run_update(engine, named)
    assert_old_policy_serves(engine, old)


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_tensor_late_in_a_generator_leaves_the_engine_unusable(fault: str):  # cases WS-08, WS-10
    engine = RecordingEngine()
    name, tensor, error, message = BAD[fault]
    policy = new_policy(engine)
    with pytest.raises(error, match=message) as caught:
        run_update(engine, iter([*policy.items(), (name, tensor)]))
    assert error.__name__ in str(engine.unusable)
    assert "half-way" in caught.value.__notes__[0]
    assert_unusable_until_a_complete_update(engine)


def test_a_bad_first_tensor_of_a_generator_leaves_the_old_policy():  # case WS-10
    engine = RecordingEngine()
    old = snapshot(engine)
    with pytest.raises(TensorShapeError):
        run_update(engine, iter([(Q_PROJ, torch.zeros(0))]))
    assert_old_policy_serves(engine, old)


@pytest.mark.parametrize("missing", NAMES)
def test_one_missing_parameter_raises_and_is_named(missing: str):  # case WS-08
    engine = RecordingEngine()
    policy = new_policy(engine)
    del policy[missing]
    with pytest.raises(UncoveredParametersError, match=f"5 of 6 parameters .*missing: {missing}"):
        run_update(engine, policy)
    assert_unusable_until_a_complete_update(engine)


def test_nothing_loaded_is_an_error_and_keeps_the_old_policy():  # case WS-08
    for load in ([], {}, iter([("lm_head.original_module.weight", torch.zeros(1))]), None):
        engine = RecordingEngine()
        old = snapshot(engine)
        with pytest.raises(UncoveredParametersError, match="0 of 6 parameters"):
            run_update(engine, *(() if load is None else (load,)))
        assert_old_policy_serves(engine, old)


def test_a_parameter_sent_again_with_equal_values_is_accepted():
    engine = RecordingEngine()
    policy = new_policy(engine)
    with PolicyUpdate(engine) as update:
        update.load(policy)
        assert update.load({Q_PROJ: policy[Q_PROJ].clone()}) == [Q_PROJ]
    assert_holds(engine, policy)
    assert update.receipt.bytes_copied == update.receipt.num_bytes


@pytest.mark.parametrize("shared_first", [True, False])
def test_a_shared_parameter_sent_again_from_elsewhere_must_be_equal(shared_first: bool):
    engine = RecordingEngine()
    rest = {name: tensor for name, tensor in engine.tensors.items() if name != Q_PROJ}
    shared = engine.tensors[Q_PROJ]
    with PolicyUpdate(engine) as update:
        update.load(rest)
        for tensor in (shared, shared.clone()) if shared_first else (shared.clone(), shared):
            update.load({Q_PROJ: tensor})
    with pytest.raises(DuplicateTensorError):
        run_update(engine, {Q_PROJ: shared}, {Q_PROJ: shared + 1})
