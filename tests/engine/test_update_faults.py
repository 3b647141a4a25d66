"""Faults in every phase of a policy update and at every tensor, for every mode, on one engine that survives them all:
the old policy serves, bit for bit, or the engine refuses; nobody loses what was sampled; no block is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rollout.engine.core
from rollout import LLM, RequestOutput, SamplingParams
from rollout.errors import EngineAsleepError, EngineUnusableError, PolicyUpdateError
from rollout.weights.target import IN_FLIGHT_MODES, InFlightMode
from rollout.weights.transaction import Outcome, PolicyUpdate
from tests.support.policies import GREEDY, Policies, assert_same_samples, push_mapping, random_prompt

PROMPTS = [random_prompt(17), random_prompt(9, seed=1)]
PARAMS = SamplingParams(n=2, seed=11, max_tokens=14, ignore_eos=True)
STEPS = 4
PHASES = ["wake", "undo log", "load", "post_process", "verify", "invalidate", "invalidated", "resume", "block"]
PHASES += ["resume and roll-back"]


class InjectedError(RuntimeError):
    """The fault that a test asked for."""


class Subject:
    """An engine on W0, what it samples undisturbed, and W1."""

    def __init__(self, policies: Policies, **options: Any) -> None:
        self.llm = policies.engine(**options)
        self.new, self.old = policies.weights(1), policies.weights(0)
        self.whole = self.llm.generate(PROMPTS, PARAMS)
        self.greedy = self.llm.generate(PROMPTS, GREEDY)

    def start(self) -> None:
        """Requests in flight; blocks of them, and of earlier ones, are cached."""
        self.llm.enqueue(PROMPTS, PARAMS)
        for _ in range(STEPS):
            self.llm.step()

    def check(self, outcome: Outcome, mode: InFlightMode) -> None:
        """What must hold after a failed update; leaves the engine on W0."""
        llm = self.llm
        outputs = llm.wait_for_completion()
        if outcome is Outcome.UNUSABLE:
            for call in (lambda: llm.generate(PROMPTS, GREEDY), lambda: llm.score(PROMPTS)):
                with pytest.raises(EngineUnusableError, match="policy update to version"):
                    call()
            ended = "length" if mode == "wait" else "abort"
        else:
            ended = "abort" if mode == "abort" else "length"
        self.check_outputs(outputs, ended)
        llm.engine.scheduler.check_integrity()
        stats = llm.engine.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert "undo_log" not in [entry.owner for entry in llm.memory_ledger().entries]
        if outcome is Outcome.UNUSABLE:
            push_mapping(llm, self.old)
        llm.verify()
        assert_same_samples(llm.generate(PROMPTS, GREEDY), self.greedy)

    def check_outputs(self, outputs: list[RequestOutput], ended: str) -> None:
        """Everything is of W0, and what was sampled is there."""
        for output, undisturbed in zip(outputs, self.whole, strict=True):
            for sample, same in zip(output.outputs, undisturbed.outputs, strict=True):
                count = len(sample.token_ids)
                assert sample.finish_reason == ended
                assert count == 14 if ended == "length" else 0 < count < 14
                assert sample.token_ids == same.token_ids[:count]
                np.testing.assert_array_equal(sample.raw_logprobs, same.raw_logprobs[:count])
                assert [(span.start, span.end) for span in sample.policy_versions] == [(0, count)]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("policies"), tie=False)


@pytest.fixture(scope="module")
def subject(policies: Policies) -> Subject:
    return Subject(policies)


@pytest.fixture(scope="module")
def quantised(policies: Policies) -> Subject:
    return Subject(policies, quantization="int8")


def failing_at(weights: dict[str, torch.Tensor], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:count]
    raise InjectedError


def raising(*_: object, **__: object) -> Any:
    raise InjectedError


def fail_once(patch: pytest.MonkeyPatch, holder: Any, name: str, afterwards: bool = False) -> None:
    """The next call raises, before or after the real thing; those that follow work."""
    real = getattr(holder, name)

    def failing(*args: Any, **keywords: Any) -> Any:
        patch.setattr(holder, name, real)
        if afterwards:
            real(*args, **keywords)
        raise InjectedError

    patch.setattr(holder, name, failing)


def inject(patch: pytest.MonkeyPatch, llm: LLM, phase: str) -> None:
    """Makes something that the phase relies on fail."""
    engine = llm.engine
    worker = engine.executor.worker
    if phase == "wake":
        patch.setattr(worker, "wake_up", raising)
    elif phase == "undo log":
        patch.setattr(worker.platform, "host_memory", raising)
    elif phase == "post_process":
        patch.setattr(worker, "remake_quantized_weights", raising)
    elif phase == "verify":
        fail_once(patch, worker, "buffers")
    elif phase == "invalidate":
        patch.setattr(engine.scheduler, "set_policy_version", raising)
    elif phase == "invalidated":
        fail_once(patch, engine.scheduler, "set_policy_version", afterwards=True)
    elif phase == "resume":
        fail_once(patch, rollout.engine.core, "shared_versions")
    elif phase == "resume and roll-back":
        patch.setattr(rollout.engine.core, "shared_versions", raising)


def attempt(subject: Subject, phase: str, mode: InFlightMode, roll_back: bool) -> tuple[PolicyUpdate, InjectedError]:
    """An update whose `phase` fails."""
    update = subject.llm.policy_update(in_flight=mode, roll_back=roll_back)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InjectedError) as caught:
        if phase in ("wake", "undo log"):
            inject(patch, subject.llm, phase)
        with update:
            names = list(subject.new)
            update.load({name: subject.new[name] for name in names[:5]})
            if phase == "block":
                raise InjectedError
            update.load(failing_at(subject.new, 7) if phase == "load" else subject.new)
            inject(patch, subject.llm, phase)
    return update, caught.value


@pytest.mark.parametrize("roll_back", [False, True])
@pytest.mark.parametrize("mode", IN_FLIGHT_MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_in_any_phase_leaves_the_old_policy_or_an_engine_that_refuses(
    subject: Subject, phase: str, mode: InFlightMode, roll_back: bool
):  # case WS-02
    if phase == "undo log" and not roll_back:
        return
    subject.start()
    version = subject.llm.policy_version
    if phase in ("wake", "undo log"):
        expected = Outcome.UNCHANGED
    else:
        expected = Outcome.ROLLED_BACK if roll_back and phase != "resume and roll-back" else Outcome.UNUSABLE
    update, error = attempt(subject, phase, mode, roll_back)
    assert update.outcome is expected
    word = {Outcome.UNCHANGED: "nothing was written", Outcome.ROLLED_BACK: "rolled back"}.get(expected, "half-way")
    assert word in error.__notes__[0]
    if expected is not Outcome.UNUSABLE:
        assert subject.llm.policy_version == version
    subject.check(expected, mode)


@pytest.mark.parametrize("roll_back", [False, True])
@pytest.mark.parametrize("mode", IN_FLIGHT_MODES)
def test_a_fault_at_any_tensor_leaves_the_old_policy_or_an_engine_that_refuses(
    subject: Subject, mode: InFlightMode, roll_back: bool
):  # case WS-10
    stride = 1 if mode == "keep" and roll_back else 6
    for count in range(0, len(subject.new) + 1, stride):
        subject.start()
        update = subject.llm.policy_update(in_flight=mode, roll_back=roll_back)
        with pytest.raises(InjectedError), update:
            update.load(failing_at(subject.new, count))
        outcome = Outcome.UNCHANGED if count == 0 else Outcome.ROLLED_BACK if roll_back else Outcome.UNUSABLE
        assert update.outcome is outcome
        subject.check(outcome, mode)


@pytest.mark.parametrize("fault", ["shape", "unknown", "kind"])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_wrong_tensor_late_in_a_stream_is_rolled_back(subject: Subject, mode: InFlightMode, fault: str):
    pairs = list(subject.new.items())
    name, tensor = pairs[-1]
    bad = {"shape": (name, tensor[..., :1]), "unknown": (name + "s", tensor)}.get(fault, (name, "not a tensor"))
    subject.start()
    with (
        pytest.raises(PolicyUpdateError) as caught,
        subject.llm.policy_update(in_flight=mode, roll_back=True) as update,
    ):
        update.load(iter([*pairs[:-1], bad]))  # pyright: ignore[reportArgumentType]
    assert "rolled back" in caught.value.__notes__[0]
    subject.check(Outcome.ROLLED_BACK, mode)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_int8_copies_are_rolled_back_where_they_can_be_made(quantised: Subject, mode: InFlightMode, once: bool):
    quantised.start()
    worker = quantised.llm.engine.executor.worker
    update = quantised.llm.policy_update(in_flight=mode, roll_back=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InjectedError), update:
        update.load(quantised.new)
        if once:
            fail_once(patch, worker, "remake_quantized_weights")
        else:
            patch.setattr(worker, "remake_quantized_weights", raising)
    assert update.outcome is (Outcome.ROLLED_BACK if once else Outcome.UNUSABLE)
    quantised.check(Outcome.ROLLED_BACK if once else Outcome.UNUSABLE, mode)


@pytest.mark.parametrize("phase", ["verify", "invalidated"])
def test_int8_copies_of_the_new_policy_do_not_survive_a_roll_back(quantised: Subject, phase: str):
    quantised.start()
    update, _ = attempt(quantised, phase, "keep", roll_back=True)
    assert update.outcome is Outcome.ROLLED_BACK
    quantised.check(Outcome.ROLLED_BACK, "keep")


def test_the_undo_log_is_in_the_ledger_while_it_lasts(subject: Subject):
    weights = subject.llm.memory_ledger()["weights"]
    with subject.llm.policy_update(roll_back=True) as update:
        update.load(subject.new)
        entry = subject.llm.memory_ledger()["undo_log"]
        assert weights.resident * 0.9 <= entry.resident <= entry.reserved <= weights.reserved * 1.1
    assert "undo_log" not in [entry.owner for entry in subject.llm.memory_ledger().entries]
    push_mapping(subject.llm, subject.old)


def test_a_second_update_inside_the_block_changes_nothing_for_the_first(subject: Subject):
    subject.start()
    with subject.llm.policy_update(in_flight="keep") as update:
        for mode in IN_FLIGHT_MODES:
            with pytest.raises(PolicyUpdateError, match="another policy update is open"):
                subject.llm.policy_update(in_flight=mode, roll_back=True).__enter__()
            with pytest.raises(PolicyUpdateError, match="the engine cannot sleep"):
                subject.llm.sleep(0, mode=mode)
        with pytest.raises(EngineAsleepError):
            subject.llm.generate(PROMPTS, GREEDY)
        update.load(subject.new)
    assert all(len(output.outputs[0].token_ids) == 14 for output in subject.llm.wait_for_completion())
    push_mapping(subject.llm, subject.old)
    assert_same_samples(subject.llm.generate(PROMPTS, GREEDY), subject.greedy)
