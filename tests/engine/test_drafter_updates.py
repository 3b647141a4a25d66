"""The weights of a drafter in policy updates, sleep and verification, where that is a draft model.

The draft model has the architecture of the policy, so that it can be given the policy's weights: then every guess is
right. Whatever it holds, outputs are those of an engine without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.errors import (
    EngineUnusableError,
    StaleWeightsError,
    TensorShapeError,
    UncoveredParametersError,
    UnknownTensorError,
    WeightsNotLoadedError,
)
from rollout.weights.broadcast import BroadcastReceiver, BroadcastSender
from rollout.weights.receipt import parameters_fingerprint
from rollout.weights.safetensors_folder import SafetensorsFolderReceiver, SafetensorsFolderSender
from rollout.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from rollout.weights.sparse_delta import SparseDeltaReceiver, SparseDeltaSender
from rollout.weights.transport import Sender, Transport
from tests.support.policies import PUSHES, Policies, assert_same_samples, random_prompt

PROMPTS = [random_prompt(30, seed) for seed in range(3)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
NORM = "drafter.model.norm.weight"


def drafting(policies: Policies, number: int, **options: Any) -> LLM:
    """An engine with policy W0 whose draft model holds W<number>."""
    speculative = {"method": "draft_model", "model": str(policies.folders[number]), "only_if_faster": False}
    return policies.engine(speculative_config={**speculative, "max_batch_for_speculation": 9}, **options)


@dataclass
class Engines:
    policies: Policies
    plain: LLM
    llm: LLM

    def drafter(self, number: int) -> dict[str, torch.Tensor]:
        return {f"drafter.{name}": tensor for name, tensor in self.policies.weights(number).items()}

    def update(self, weights: object) -> None:
        with self.llm.policy_update() as update:
            update.load(weights)  # pyright: ignore[reportArgumentType]

    def assert_serves(self, number: int, draft: int, llm: LLM | None = None) -> None:
        """Samples are those of W<number>, and the guesses those of W<draft>."""
        llm = self.llm if llm is None else llm
        with self.plain.policy_update() as update:
            update.load(self.policies.weights(number))
        before = llm.get_metrics()
        assert_same_samples(llm.generate(PROMPTS, PARAMS), self.plain.generate(PROMPTS, PARAMS))
        now = llm.get_metrics()
        drafted, accepted = (now[name] - before[name] for name in ("draft_tokens_total", "accepted_draft_tokens_total"))
        assert drafted > 0
        assert (accepted == drafted) == (number == draft)
        tensors, own = llm.verify().tensors, self.policies.weights(draft)
        assert {name for name in tensors if name.startswith("drafter.")} >= {f"drafter.{name}" for name in own}
        assert llm.receipt is not None
        assert llm.receipt.drafter_fingerprint == parameters_fingerprint(own.items(), torch.float32)
        wanted = parameters_fingerprint(self.policies.weights(number).items(), torch.float32)
        assert llm.receipt.parameters_fingerprint == wanted


@pytest.fixture(scope="module")
def module_engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    policies = Policies.make(tmp_path_factory.mktemp("policies"))
    return Engines(policies, policies.engine(), drafting(policies, 1))


@pytest.fixture
def engines(module_engines: Engines) -> Iterator[Engines]:
    """Policy W0, and a draft model that holds W1."""
    module_engines.llm.reload_weights()
    yield module_engines
    module_engines.llm.wake_up()
    module_engines.llm.engine.scheduler.check_integrity()


def test_an_update_of_the_policy_alone_leaves_the_draft_model_as_it_is(engines: Engines) -> None:
    # case WS-01
    engines.assert_serves(0, draft=1)
    engines.update(engines.policies.weights(1))
    engines.assert_serves(1, draft=1)
    engines.update(engines.policies.weights(2))
    engines.assert_serves(2, draft=1)


@pytest.mark.parametrize("way", ["mapping", "generator", "buckets"])
def test_every_way_brings_both(engines: Engines, way: str) -> None:
    # cases WS-01, WS-08
    engines.assert_serves(0, draft=1)  # leaves blocks of the old weights in both pools
    receipt = PUSHES[way](engines.llm, engines.policies.weights(2) | engines.drafter(2))
    assert receipt.bytes_copied == receipt.num_bytes
    engines.assert_serves(2, draft=2)
    engines.update({**engines.policies.weights(0), **engines.drafter(1)})
    engines.assert_serves(0, draft=1)


def test_the_draft_model_can_be_updated_alone(engines: Engines) -> None:
    version = engines.llm.policy_version
    engines.update((f"drafter.module._orig_mod.{name}", tensor) for name, tensor in engines.policies.weights(0).items())
    assert engines.llm.policy_version == version + 1
    engines.assert_serves(0, draft=0)


@pytest.mark.parametrize("name", ["shared memory", "broadcast", "safetensors folder", "sparse delta"])
def test_transports_bring_both(engines: Engines, tmp_path: Path, name: str) -> None:
    # case WS-08
    llm = engines.llm
    sender: Sender
    receiver: Callable[[], Transport]
    if name == "shared memory":
        sender, receiver = SharedMemorySender(tmp_path), lambda: SharedMemoryReceiver(tmp_path)
    elif name == "broadcast":
        sender = broadcast = BroadcastSender()
        receiver = lambda: BroadcastReceiver(broadcast.address)  # noqa: E731
    else:
        sender, receiver = SafetensorsFolderSender(tmp_path), lambda: SafetensorsFolderReceiver(tmp_path)
        if name == "sparse delta":
            sender, receiver = (
                SparseDeltaSender(sender),
                lambda: SparseDeltaReceiver(SafetensorsFolderReceiver(tmp_path)),
            )
    try:
        # (policy that is sent or None, drafter that is sent or None), what is held afterwards
        for sent, held in (((2, 2), (2, 2)), ((2, 0), (2, 0)), ((None, 1), (2, 1)), ((0, None), (0, 1))):
            policy = {} if sent[0] is None else engines.policies.weights(sent[0])
            drafter = {} if sent[1] is None else engines.drafter(sent[1])
            with ThreadPoolExecutor(1) as threads, llm.policy_update() as update:
                sending = threads.submit(sender.send, update.version, {**policy, **drafter}.items())
                update.load(receiver())
                report = sending.result()
            own = engines.policies.weights(sent[1] or 0)
            expected = [
                parameters_fingerprint(weights.items(), torch.float32) if is_sent else None
                for weights, is_sent in ((policy, policy), (own, drafter))
            ]
            assert [report.fingerprint, report.drafter_fingerprint] == expected
            receipt = update.receipt
            assert report.fingerprint in (None, receipt.parameters_fingerprint)
            assert report.drafter_fingerprint in (None, receipt.drafter_fingerprint)
            engines.assert_serves(held[0], draft=held[1])
    finally:
        sender.close()


def test_a_part_of_the_draft_model_is_not_enough(engines: Engines) -> None:
    part = engines.drafter(0)
    del part[NORM]
    with pytest.raises(UncoveredParametersError, match=NORM) as error:
        engines.update({**engines.policies.weights(0), **part})
    assert error.value.names == (NORM,)
    with pytest.raises(EngineUnusableError):
        engines.llm.generate(PROMPTS, PARAMS)
    with pytest.raises(UncoveredParametersError, match=r"no parameter of the drafter was loaded.*drafter"):
        engines.update(engines.policies.weights(0))  # the draft model is a mixture
    engines.update({**engines.policies.weights(0), **engines.drafter(1)})
    engines.assert_serves(0, draft=1)


def test_names_and_shapes_are_checked_before_anything_is_written(engines: Engines) -> None:
    with pytest.raises(UnknownTensorError, match=r"'drafter\.model\.norms\.weight'.*did you mean"):
        engines.update({**engines.policies.weights(1), "drafter.model.norms.weight": torch.zeros(64)})
    with pytest.raises(TensorShapeError, match=NORM):
        engines.update({**engines.policies.weights(1), **engines.drafter(1), NORM: torch.zeros(65)})
    engines.assert_serves(0, draft=1)


def test_a_failed_update_is_rolled_back_in_both(engines: Engines) -> None:
    weights = {**engines.policies.weights(2), **engines.drafter(2)}
    with pytest.raises(RuntimeError, match="lost"), engines.llm.policy_update(roll_back=True) as update:
        update.load(weights)
        raise RuntimeError("lost")
    engines.assert_serves(0, draft=1)


def test_weights_that_are_not_numbers_guess_nothing(engines: Engines) -> None:
    engines.update({name: torch.full_like(tensor, torch.nan) for name, tensor in engines.drafter(1).items()})
    before = engines.llm.get_metrics()["draft_tokens_total"]
    expected = engines.plain
    with expected.policy_update() as update:
        update.load(engines.policies.weights(0))
    assert_same_samples(engines.llm.generate(PROMPTS, PARAMS), expected.generate(PROMPTS, PARAMS))
    assert engines.llm.get_metrics()["draft_tokens_total"] == before
    engines.update(engines.drafter(0))
    engines.assert_serves(0, draft=0)


def test_a_change_outside_an_update_is_noticed_and_named(engines: Engines) -> None:
    with torch.no_grad():
        engines.llm.engine.parameters()[NORM].add_(1)
    with pytest.raises(StaleWeightsError):
        engines.llm.generate(PROMPTS, PARAMS)
    with pytest.raises(StaleWeightsError, match=NORM):
        engines.llm.verify()
    engines.llm.reload_weights()
    engines.assert_serves(0, draft=1)


def test_another_module_in_its_place_is_noticed_and_named(module_engines: Engines) -> None:
    llm = drafting(module_engines.policies, 1)
    norm = llm.shared_drafter().get_parameter("model.norm.weight")
    norm.data = norm.data.clone()
    with pytest.raises(StaleWeightsError, match=NORM.replace(".", r"\.")):
        llm.generate(PROMPTS, PARAMS)


def test_a_trainer_may_own_the_tensors_of_both(module_engines: Engines) -> None:
    engines = Engines(module_engines.policies, module_engines.plain, drafting(module_engines.policies, 1))
    llm = engines.llm
    policy, drafter = llm.shared_model(), llm.shared_drafter()
    with torch.no_grad():
        for module in (policy, drafter):
            for name, parameter in module.named_parameters():
                parameter.copy_(engines.policies.weights(2)[name])
    with pytest.raises(StaleWeightsError):
        llm.generate(PROMPTS, PARAMS)
    with llm.policy_update() as update:
        update.load(policy.named_parameters())
        update.load((f"drafter.{name}", parameter) for name, parameter in drafter.named_parameters())
    assert (update.bytes_copied, update.bytes_shared) == (0, update.receipt.num_bytes)
    engines.assert_serves(2, draft=2)
    report = llm.sleep(level=2)
    assert "drafter" not in report.released and "weights" not in report.released  # the trainer has them
    llm.wake_up()
    engines.assert_serves(2, draft=2)


@pytest.mark.parametrize("share", [LLM.shared_model, LLM.shared_drafter])
def test_level_2_keeps_both_where_either_is_shared(module_engines: Engines, share: Callable[[LLM], object]) -> None:
    engines = Engines(module_engines.policies, module_engines.plain, drafting(module_engines.policies, 1))
    share(engines.llm)
    report = engines.llm.sleep(level=2)
    assert "drafter" not in report.released and "weights" not in report.released
    assert "weights" not in engines.llm.sleeping_tags
    engines.llm.wake_up()
    engines.assert_serves(0, draft=1)


def test_the_drafters_pool_stays_as_large_as_it_was(module_engines: Engines) -> None:
    engines = Engines(module_engines.policies, module_engines.plain, drafting(module_engines.policies, 0))
    llm = engines.llm
    blocks, reserved = llm.get_metrics()["drafter_kv_cache_blocks"], llm.memory_ledger()["drafter_kv_cache"].reserved
    llm.resize_kv_cache(llm.memory_ledger()["kv_cache"].reserved // 2)
    assert llm.get_metrics()["drafter_kv_cache_blocks"] == blocks
    assert llm.memory_ledger()["drafter_kv_cache"].reserved == reserved
    engines.assert_serves(0, draft=0)


def test_an_engine_without_a_drafter_has_none_to_share(module_engines: Engines) -> None:
    with pytest.raises(ValueError, match="no drafter with weights"):
        module_engines.plain.shared_drafter()
    with pytest.raises(UnknownTensorError, match="drafter"), module_engines.plain.policy_update() as update:
        update.load(module_engines.drafter(0))


def test_level_2_loses_both_and_takes_an_update_of_both(module_engines: Engines) -> None:
    # cases SW-01, SW-02, SW-03
    engines = Engines(module_engines.policies, module_engines.plain, drafting(module_engines.policies, 1))
    llm = engines.llm
    with pytest.raises(ValueError, match=r"'drafter'.* wake with 'weights', its KV pool with 'kv_cache'"):
        llm.wake_up(["drafter"])
    buffers = {name: buffer.clone() for name, buffer in llm.engine.buffers().items()}
    assert any(name.startswith("drafter.") for name in buffers)
    for cycle in range(2):
        engines.assert_serves(0, draft=1)
        report = llm.sleep(level=2)
        assert report.released["drafter"] > 0 and report.released["drafter_kv_cache"] > 0
        ledger = llm.memory_ledger()
        assert all(ledger[owner].resident == 0 for owner in ("drafter", "drafter_kv_cache", "drafter_workspace"))
        llm.wake_up()
        with pytest.raises(WeightsNotLoadedError):
            llm.generate(PROMPTS, PARAMS)
        if cycle:
            llm.reload_weights()
        else:
            with pytest.raises(UncoveredParametersError, match=r"drafter\.model"):
                engines.update(engines.policies.weights(0))
            engines.update({**engines.policies.weights(0), **engines.drafter(1)})
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in llm.engine.buffers().items())
    engines.assert_serves(0, draft=1)


def test_level_1_keeps_the_weights_and_no_keys(engines: Engines) -> None:
    # case SW-03
    engines.update(engines.drafter(0))
    engines.assert_serves(0, draft=0)
    report = engines.llm.sleep(level=1)
    assert report.released["drafter_kv_cache"] > 0 and "drafter" not in report.released
    assert engines.llm.memory_ledger()["drafter"].resident > 0
    engines.llm.wake_up()
    engines.assert_serves(0, draft=0)


@pytest.mark.slow
def test_two_ranks_guess_and_are_updated_alike(module_engines: Engines) -> None:
    engines = module_engines
    with drafting(engines.policies, 0, data_parallel_size=2) as two:
        engines.assert_serves(0, draft=0, llm=two)
        with two.policy_update() as update:
            update.load(engines.policies.weights(1))
        engines.assert_serves(1, draft=0, llm=two)
        with two.policy_update() as update:
            update.load({**engines.policies.weights(2), **engines.drafter(2)})
        engines.assert_serves(2, draft=2, llm=two)
        released = two.sleep(level=2).released
        assert all(released[f"rank {rank} drafter"] > 0 for rank in (0, 1))
        two.wake_up()
        with pytest.raises(UncoveredParametersError, match=r"drafter\.model"), two.policy_update() as update:
            update.load(engines.policies.weights(0))
        two.reload_weights()
        engines.assert_serves(0, draft=0, llm=two)
        with pytest.raises(ValueError, match="shared_drafter"):
            two.shared_drafter()
