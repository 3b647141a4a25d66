"""The phases of a policy update: faults in each of them, and the order in which they may be taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from rollout.errors import (
    FingerprintMismatchError,
    IllegalPhaseError,
    PolicyUpdateTimeoutError,
    PolicyVersionError,
    TensorShapeError,
)
from rollout.weights.transaction import Phase, PolicyUpdate
from tests.support.recording_engine import (
    COMPLETE,
    EMBED,
    NAMES,
    InjectedError,
    RecordingEngine,
    assert_holds,
    assert_old_policy_serves,
    assert_unusable_until_a_complete_update,
    new_policy,
    run_update,
    snapshot,
)

Q_PROJ = NAMES[1]


# Faults, at every phase


def test_a_fault_in_waking_keeps_the_old_policy():
    engine = RecordingEngine(fail_at="wake_weights")
    old = snapshot(engine)
    with pytest.raises(InjectedError), PolicyUpdate(engine):
        raise AssertionError("the block must not run")
    assert_old_policy_serves(engine, old)


def test_a_pause_that_fails_is_the_end_and_touches_nothing():
    engine = RecordingEngine(fail_at="pause")
    old = snapshot(engine)
    with pytest.raises(InjectedError), PolicyUpdate(engine):
        raise AssertionError("the block must not run")
    assert_holds(engine, old)
    assert engine.calls == ["pause"]


@pytest.mark.parametrize("step", ["post_process", "invalidate", "resume"])
def test_a_fault_after_writing_leaves_the_engine_unusable(step: str):
    engine = RecordingEngine(fail_at=step)
    update = PolicyUpdate(engine)
    with pytest.raises(InjectedError), update:
        update.load(new_policy(engine))
    with pytest.raises(IllegalPhaseError, match="no receipt"):
        _ = update.receipt
    assert f"InjectedError: {step}" in str(engine.unusable)
    assert_unusable_until_a_complete_update(engine)


def test_copies_that_are_not_those_of_the_new_parameters_leave_the_engine_unusable():
    engine = RecordingEngine()
    engine.copied = {"int8.embed": engine.tensors[EMBED].clone()}
    with pytest.raises(FingerprintMismatchError, match=r"copies of parameters .*: int8\.embed"):
        run_update(engine, new_policy(engine))
    engine.copied = {"int8.embed": engine.tensors[EMBED]}
    assert_unusable_until_a_complete_update(engine)
    assert engine.receipt is not None
    assert engine.receipt.copies == {"int8.embed": engine.receipt.tensors[EMBED]}


@pytest.mark.parametrize("count", range(len(NAMES) + 1))
def test_an_exception_after_any_number_of_tensors_is_raised_again(count: int):
    engine = RecordingEngine()
    old, policy = snapshot(engine), new_policy(engine)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(policy.items())[:count]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_update(engine, failing())
    if count == 0:
        assert_old_policy_serves(engine, old)
    else:
        assert_unusable_until_a_complete_update(engine)


def test_a_refused_collection_can_be_followed_by_the_right_one():
    engine = RecordingEngine()
    policy = new_policy(engine)
    with PolicyUpdate(engine) as update:
        with pytest.raises(TensorShapeError):
            update.load({**policy, Q_PROJ: torch.zeros(0)})
        update.load(policy)
    assert_holds(engine, policy)


def test_a_swallowed_error_of_the_only_load_does_not_pass_as_an_update():
    engine = RecordingEngine()

    def failing_at_the_end() -> Iterator[tuple[str, torch.Tensor]]:
        yield from new_policy(engine).items()
        raise InjectedError

    update = PolicyUpdate(engine)
    with pytest.raises(IllegalPhaseError, match=r"legal next steps: load\(\)"), update, suppress(InjectedError):
        update.load(failing_at_the_end())
    assert_unusable_until_a_complete_update(engine)


def test_memory_that_changes_between_copy_and_verification_is_found():
    engine = RecordingEngine()
    with pytest.raises(FingerprintMismatchError, match="q_proj"):
        run_update(engine, new_policy(engine), lambda: engine.tensors[Q_PROJ][0, 0].add_(1))
    assert_unusable_until_a_complete_update(engine)


def test_a_buffer_that_was_lost_in_sleep_is_found():  # case SW-01
    engine = RecordingEngine()
    before = engine.rotary.clone()
    with pytest.raises(FingerprintMismatchError, match=r"model\.rotary\.cos_sin"):
        run_update(engine, engine.rotary.zero_, new_policy(engine))
    engine.rotary.copy_(before)
    assert_unusable_until_a_complete_update(engine)


# The state machine


def test_the_steps_can_be_taken_one_by_one():
    engine = RecordingEngine()
    policy = new_policy(engine)
    update = PolicyUpdate(engine)
    update.pause()
    update.wake()
    update.load(policy)
    for step in (update.post_process, update.verify, update.invalidate, update.resume):
        with pytest.raises(IllegalPhaseError, match="no receipt"):
            _ = update.receipt
        step()
    assert update.phase is Phase.RESUMED
    assert engine.receipt is update.receipt
    assert_holds(engine, policy)


ORDER = ["pause", "wake", "load", "post_process", "verify", "invalidate", "resume"]
LEGAL = {0: "pause()", 1: "wake()", 2: "load()", 3: "load() or post_process()", 4: "verify()", 5: "invalidate()"}
LEGAL |= {6: "resume()", 7: "none: open a new policy_update"}


@pytest.mark.parametrize("done", range(len(ORDER) + 1))
@pytest.mark.parametrize("step", ORDER)
def test_an_illegal_step_names_the_legal_ones_and_changes_nothing(done: int, step: str):
    engine = RecordingEngine()
    policy = new_policy(engine)
    update = PolicyUpdate(engine)
    for name in ORDER[:done]:
        update.load(policy) if name == "load" else getattr(update, name)()
    if step in LEGAL[done].replace("()", "").split(" or "):
        return
    phase, calls = update.phase, list(engine.calls)
    with pytest.raises(IllegalPhaseError) as caught:
        update.load(policy) if step == "load" else getattr(update, step)()
    assert str(caught.value).endswith(f"legal next steps: {LEGAL[done]}")
    assert f"{step}() is not legal while the policy update is {phase.value}" in str(caught.value)
    assert update.phase is phase
    assert engine.calls == calls


def test_an_update_is_used_once():
    engine = RecordingEngine()
    with PolicyUpdate(engine) as update:
        update.load(new_policy(engine))
    for use in (update.pause, lambda: update.load({}), update.__enter__):
        with pytest.raises(IllegalPhaseError, match="none: open a new policy_update"):
            use()
    assert engine.calls == COMPLETE


@pytest.mark.parametrize("version", [3, 2, -1, True, 4.0, "4"])
def test_a_version_that_does_not_follow_is_refused_before_pausing(version: object):
    engine = RecordingEngine()
    engine.policy_version = 3
    with pytest.raises(PolicyVersionError, match=r"version=.*above the engine's policy version 3"):
        PolicyUpdate(engine, version=version)  # pyright: ignore[reportArgumentType]
    assert engine.calls == []


def test_the_version_counts_up_by_default():
    engine = RecordingEngine()
    for expected in (1, 2, 12, 13):
        with PolicyUpdate(engine, version=12 if expected == 12 else None) as update:
            update.load(new_policy(engine, seed=expected))
        assert engine.policy_version == update.receipt.policy_version == expected


def test_the_time_limit_stops_a_slow_trainer():
    engine = RecordingEngine()
    old = snapshot(engine)
    with pytest.raises(PolicyUpdateTimeoutError, match=r"limit of 0\.05 s"):
        run_update(engine, lambda: time.sleep(0.06), new_policy(engine), timeout=0.05)
    assert_old_policy_serves(engine, old)


def test_modes_and_limits_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="in_flight='kept' is not valid: it must be one of abort, wait, keep, recomp"):
        PolicyUpdate(RecordingEngine(), in_flight="kept")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="timeout=0 is not valid"):
        PolicyUpdate(RecordingEngine(), timeout=0)
