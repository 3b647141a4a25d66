"""What a policy update may be made of, and under which version: nothing that only looks like a policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout import LLM
from rollout.errors import (
    EngineUnusableError,
    PolicyUpdateTimeoutError,
    PolicyVersionError,
    TensorKindError,
    UncoveredParametersError,
)
from rollout.weights.broadcast import BroadcastReceiver
from rollout.weights.channel import listen
from rollout.weights.safetensors_folder import SafetensorsFolderReceiver
from rollout.weights.shared_memory import SharedMemoryReceiver
from rollout.weights.transport import Transport
from tests.support.policies import GREEDY, Policies, assert_same_samples, random_prompt


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("policies"))


def broken(weights: dict[str, torch.Tensor], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:count]
    raise RuntimeError("the trainer has failed")


def test_memory_that_sleep_has_taken_is_no_policy_until_somebody_writes_to_it(policies: Policies):  # case SW-02
    llm, prompt = policies.engine(), random_prompt(12)
    before = llm.generate(prompt, GREEDY)
    llm.sleep(2)
    llm.wake_up(["weights"])
    shared = llm.shared_model()
    for named in (shared, dict(shared.named_parameters()), iter(list(shared.named_parameters()))):
        refused = pytest.raises(UncoveredParametersError, match="holds no policy: it was given back")
        with refused, llm.policy_update() as update:
            update.load(named)
    weights = policies.weights(0)
    with torch.no_grad():
        for name, parameter in shared.named_parameters():
            parameter.copy_(weights[name])
    with llm.policy_update() as update:
        update.load(shared.named_parameters())
    assert update.receipt.bytes_copied == 0
    llm.wake_up()
    assert_same_samples(llm.generate(prompt, GREEDY), before)


def test_a_mixture_left_by_a_failed_update_is_no_policy(policies: Policies):
    llm, prompt = policies.engine(), random_prompt(12)
    with pytest.raises(RuntimeError, match="has failed"), llm.policy_update() as update:
        update.load(broken(policies.weights(1), 6))
    refused = pytest.raises(UncoveredParametersError, match="an update that failed has written to it")
    with refused, llm.policy_update() as update:
        update.load(llm.shared_model().named_parameters())
    with pytest.raises(EngineUnusableError):
        llm.generate(prompt, GREEDY)
    with llm.policy_update() as update:
        update.load(policies.weights(1))
    assert_same_samples(llm.generate(prompt, GREEDY), policies.engine(1).generate(prompt, GREEDY))


def test_a_trainer_may_send_its_own_memory_again_after_an_update_that_failed(policies: Policies):
    llm, prompt = policies.engine(), random_prompt(12)
    shared = llm.shared_model()
    weights = policies.weights(1)
    with torch.no_grad():
        for name, parameter in shared.named_parameters():
            parameter.copy_(weights[name])
    with pytest.raises(RuntimeError, match="has failed"), llm.policy_update() as update:
        update.load(shared.named_parameters())
        raise RuntimeError("the trainer has failed")
    with llm.policy_update() as update:
        update.load(shared.named_parameters())
    assert_same_samples(llm.generate(prompt, GREEDY), policies.engine(1).generate(prompt, GREEDY))


def test_of_updates_that_were_made_side_by_side_each_gets_a_version_of_its_own(policies: Policies):
    llm = policies.engine()
    first, second = llm.policy_update(), llm.policy_update()
    for update in (first, second):
        with update:
            update.load(policies.weights(1))
    assert (first.receipt.policy_version, second.receipt.policy_version) == (1, 2)


@pytest.mark.parametrize("versions", [(10, 5), (7, 7)])
def test_a_version_that_has_been_passed_meanwhile_is_refused(policies: Policies, versions: tuple[int, int]):
    llm, prompt = policies.engine(), random_prompt(12)
    first, second = (llm.policy_update(version) for version in versions)
    with first:
        first.load(policies.weights(1))
    with pytest.raises(PolicyVersionError, match=f"version={versions[1]} is not valid"), second:
        second.load(policies.weights(0))
    assert llm.policy_version == versions[0]
    assert_same_samples(llm.generate(prompt, GREEDY), policies.engine(1).generate(prompt, GREEDY))
    with llm.policy_update(versions[0] + 1) as third:
        third.load(policies.weights(0))


def test_a_version_that_failed_at_the_very_end_can_be_sent_again(policies: Policies, monkeypatch: pytest.MonkeyPatch):
    llm = policies.engine()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "resume", lambda receipt, guard: 1 / 0)
        with pytest.raises(ZeroDivisionError), llm.policy_update(3) as update:
            update.load(policies.weights(1))
    assert llm.policy_version == 0
    with llm.policy_update(3) as update:
        update.load(policies.weights(1))
    assert llm.policy_version == update.receipt.policy_version == 3


@pytest.mark.parametrize("way", ["shared memory", "broadcast", "safetensors folder"])
def test_the_time_limit_of_an_update_is_that_of_a_silent_transport_too(policies: Policies, tmp_path: Path, way: str):
    llm, prompt = policies.engine(), random_prompt(12)
    before = llm.generate(prompt, GREEDY)
    with listen("127.0.0.1") as listener:  # somebody who never says a word
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        receivers: dict[str, Transport] = {
            "shared memory": SharedMemoryReceiver(tmp_path / "nobody"),
            "broadcast": BroadcastReceiver(address),
            "safetensors folder": SafetensorsFolderReceiver(tmp_path / "nothing"),
        }
        with (
            pytest.raises(PolicyUpdateTimeoutError, match=r"limit of 0\.5 s"),
            llm.policy_update(timeout=0.5) as update,
        ):
            update.load(receivers[way])
    assert_same_samples(llm.generate(prompt, GREEDY), before)


@pytest.mark.parametrize("wrong", ["model", b"model", 3, None, [("a", 1, 2)], [(1, torch.zeros(2))], ["ab"], [None]])
def test_what_is_no_policy_at_all_is_named(policies: Policies, wrong: object):
    llm: LLM = policies.engine()
    with pytest.raises(TensorKindError, match=r"is not a pair|load\(\) got"), llm.policy_update() as update:
        update.load(wrong)  # type: ignore[arg-type]
    assert not llm.engine.is_held
