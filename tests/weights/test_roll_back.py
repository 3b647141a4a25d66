"""Roll-back: whatever goes wrong, the old policy comes back, verified, or the engine refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rollout.errors import FingerprintMismatchError, IllegalPhaseError, RollBackError, UncoveredParametersError
from rollout.weights.receipt import verify_receipt
from rollout.weights.transaction import Outcome, PolicyUpdate
from tests.support.recording_engine import (
    EMBED,
    NAMES,
    InjectedError,
    RecordingEngine,
    assert_holds,
    assert_unusable_until_a_complete_update,
    new_policy,
    run_update,
    snapshot,
)

Q_PROJ = NAMES[1]


def assert_rolled_back(engine: RecordingEngine, old: dict[str, torch.Tensor], error: BaseException) -> None:
    """The old policy is there, bit for bit, and serves; the undo log is gone; a later update works."""
    assert_holds(engine, old)
    assert engine.calls[-1] == "restore"
    assert (engine.unusable, engine.policy_version, engine.undo_bytes) == (None, 0, 0)
    assert error.__notes__ == ["policy update to 1 rolled back; the old policy stays, verified"]
    assert engine.receipt is not None
    verify_receipt(engine.receipt, engine.parameters(), engine.tied(), engine.buffers())
    engine.fail_at, policy = None, new_policy(engine, seed=9)
    with PolicyUpdate(engine, roll_back=True) as update:
        update.load(policy)
    assert_holds(engine, policy)
    assert (update.outcome, engine.undo_bytes) == (Outcome.SUCCEEDED, 0)


def failing_after(policy: dict[str, torch.Tensor], count: int, error: BaseException) -> Iterator[Any]:
    yield from list(policy.items())[:count]
    raise error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_fault_after_any_number_of_tensors_is_rolled_back(dtype: torch.dtype, tied: bool):
    for count in range(1, len(RecordingEngine(dtype, tied).tensors) + 1):
        engine = RecordingEngine(dtype, tied)
        old = snapshot(engine)
        update = PolicyUpdate(engine, roll_back=True)
        with pytest.raises(KeyboardInterrupt) as caught, update:
            update.load(failing_after(new_policy(engine), count, KeyboardInterrupt()))
        assert update.outcome is Outcome.ROLLED_BACK
        with pytest.raises(IllegalPhaseError, match="no receipt"):
            _ = update.receipt
        assert_rolled_back(engine, old, caught.value)


@pytest.mark.parametrize("step", ["post_process", "invalidate", "resume"])
def test_a_fault_of_a_phase_after_writing_is_rolled_back(step: str):
    engine = RecordingEngine(fail_at=step)
    old = snapshot(engine)
    with pytest.raises(InjectedError) as caught:
        run_update(engine, new_policy(engine), roll_back=True)
    assert_rolled_back(engine, old, caught.value)


def test_a_fault_of_verification_is_rolled_back():
    engine = RecordingEngine()
    old = snapshot(engine)
    with pytest.raises(FingerprintMismatchError, match="q_proj") as caught:
        run_update(engine, new_policy(engine), lambda: engine.tensors[Q_PROJ][0, 0].add_(1), roll_back=True)
    assert_rolled_back(engine, old, caught.value)


def test_missing_tensors_are_rolled_back():
    engine = RecordingEngine()
    old, policy = snapshot(engine), new_policy(engine)
    del policy[NAMES[-1]]
    with pytest.raises(UncoveredParametersError) as caught:
        run_update(engine, policy, roll_back=True)
    assert_rolled_back(engine, old, caught.value)


def test_an_error_from_elsewhere_ends_the_update_as_one_in_the_block_does():
    engine = RecordingEngine()
    old = snapshot(engine)
    update = PolicyUpdate(engine, roll_back=True)
    update.pause()
    update.wake()
    update.load(new_policy(engine))
    update.post_process()
    update.verify()
    error = InjectedError("another rank failed")
    update.give_up(error)
    update.give_up(error)  # once is enough
    with pytest.raises(IllegalPhaseError, match="none: open a new policy_update"):
        update.invalidate()
    assert update.outcome is Outcome.ROLLED_BACK
    assert_rolled_back(engine, old, error)


def test_nothing_written_is_not_called_a_roll_back():
    engine = RecordingEngine()
    old = snapshot(engine)
    update = PolicyUpdate(engine, roll_back=True)
    with pytest.raises(InjectedError) as caught, update:
        update.load(failing_after(new_policy(engine), 0, InjectedError()))
    assert_holds(engine, old)
    assert (update.outcome, engine.calls[-1], engine.undo_bytes) == (Outcome.UNCHANGED, "cancel", 0)
    assert caught.value.__notes__ == ["policy update to 1 given up; nothing was written, the old policy stays"]


def test_the_undo_log_that_cannot_be_made_leaves_everything_as_it_was():
    engine = RecordingEngine(fail_at="undo_log")
    old = snapshot(engine)
    with pytest.raises(InjectedError), PolicyUpdate(engine, roll_back=True):
        raise AssertionError("the block must not run")
    assert_holds(engine, old)
    assert engine.calls[-1] == "cancel"


def test_without_roll_back_no_old_value_is_kept():
    engine = RecordingEngine()
    run_update(engine, new_policy(engine))
    assert "undo_log" not in engine.calls


def test_shared_memory_is_refused_since_its_old_value_is_gone():
    engine = RecordingEngine()
    old, policy = snapshot(engine), new_policy(engine)
    shared = nn.Parameter(engine.tensors[EMBED])
    rest = [(name, tensor) for name, tensor in policy.items() if name != EMBED]
    with pytest.raises(RollBackError, match=r"roll_back=True cannot keep .*embed_tokens\.weight.*Use roll_back=False"):
        run_update(engine, [(EMBED, shared), *rest], roll_back=True)
    assert_holds(engine, old)
    with pytest.raises(RollBackError) as caught:
        run_update(engine, iter([*rest, (EMBED, shared)]), roll_back=True)
    assert_rolled_back(engine, old, caught.value)


def test_shared_memory_that_the_trainer_changed_meanwhile_cannot_be_rolled_back():
    engine = RecordingEngine()
    policy = new_policy(engine)
    rest = {name: tensor for name, tensor in policy.items() if name != EMBED}
    update = PolicyUpdate(engine, roll_back=True)
    with pytest.raises(UncoveredParametersError) as caught, update:
        engine.tensors[EMBED].data.add_(1)  # the engine's memory, by somebody who owns it too
        update.load(rest)
    assert update.outcome is Outcome.UNUSABLE
    assert "the roll-back failed too: StaleWeightsError" in caught.value.__notes__[0]
    assert "embed_tokens" in str(engine.unusable)
    assert engine.undo_bytes == 0
    assert_unusable_until_a_complete_update(engine)


def test_an_engine_without_a_policy_has_none_to_go_back_to():
    engine = RecordingEngine()
    engine.holds_policy = False  # as after sleep(2), or an update that failed
    update = PolicyUpdate(engine, roll_back=True)
    with pytest.raises(InjectedError) as caught, update:
        update.load(failing_after(new_policy(engine), 3, InjectedError()))
    assert update.outcome is Outcome.UNUSABLE
    assert "there was no policy to roll back to" in caught.value.__notes__[0]
    assert "undo_log" not in engine.calls
    assert_unusable_until_a_complete_update(engine)


def test_copies_of_parameters_come_back_with_them():
    engine = RecordingEngine()
    engine.copied = {"int8.embed": engine.tensors[EMBED].clone()}
    engine.receipt = None
    engine.remakes_copies = True
    run_update(engine, new_policy(engine, seed=5))
    old, version = snapshot(engine), engine.policy_version
    engine.fail_at = "invalidate"
    with pytest.raises(InjectedError):
        run_update(engine, new_policy(engine), roll_back=True)
    assert_holds(engine, old)
    assert torch.equal(engine.copied["int8.embed"], old[EMBED])
    assert (engine.unusable, engine.policy_version) == (None, version)


def test_copies_that_cannot_be_remade_leave_the_engine_unusable():
    engine = RecordingEngine(fail_at="post_process")
    engine.copied = {"int8.embed": engine.tensors[EMBED]}
    with pytest.raises(InjectedError) as caught:
        run_update(engine, new_policy(engine), roll_back=True)
    assert "the roll-back failed too: InjectedError" in caught.value.__notes__[0]
    assert_unusable_until_a_complete_update(engine)


def test_a_roll_back_that_is_interrupted_leaves_the_engine_unusable(monkeypatch: pytest.MonkeyPatch):
    engine = RecordingEngine()

    def interrupted(receipt: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_update(engine, failing_after(new_policy(engine), 2, InjectedError()), roll_back=True)
    assert engine.undo_bytes == 0
    assert_unusable_until_a_complete_update(engine)
