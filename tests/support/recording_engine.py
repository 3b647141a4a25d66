"""A small engine side of a policy update that records the calls it gets and fails where it is told to."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from rollout.weights.guard import SharedWeightsGuard
from rollout.weights.receipt import Receipt, make_receipt
from rollout.weights.target import InFlightMode
from rollout.weights.transaction import PolicyUpdate
from rollout.weights.undo import UndoLog
from rollout.worker.slab import Slab, slab_bytes

HIDDEN, VOCAB = 16, 24
NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
)
EMBED, HEAD = NAMES[0], "lm_head.weight"
COMPLETE = ["pause", "wake_weights", "post_process", "invalidate", "resume"]  # the calls of an update that succeeds


class InjectedError(RuntimeError):
    """The fault that a test asked for."""


class RecordingEngine:
    """Fused q, k, v storage, an embedding with a tied or separate head, a rotary table; policy 0 is random."""

    def __init__(self, dtype: torch.dtype = torch.float32, tied: bool = True, fail_at: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self._qkv = torch.randn(2 * HIDDEN, HIDDEN, generator=generator).to(dtype)
        self.tensors = {
            EMBED: torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype),
            NAMES[1]: self._qkv[:HIDDEN],
            NAMES[2]: self._qkv[HIDDEN : HIDDEN + 8],
            NAMES[3]: self._qkv[HIDDEN + 8 :],
            NAMES[4]: torch.randn(HIDDEN, 2 * HIDDEN, generator=generator).to(dtype),
            NAMES[5]: torch.randn(HIDDEN, generator=generator).to(dtype),
        }
        if not tied:
            self.tensors[HEAD] = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
        self._ties = {HEAD: EMBED} if tied else {}
        self.rotary = torch.randn(32, 8, generator=generator)
        self.copied: dict[
            str, torch.Tensor
        ] = {}  # of the embedding, which a test puts there and keeps up to date or not
        self.remakes_copies = False  # in post_process
        self.fail_at = fail_at
        self.calls: list[str] = []
        self.policy_version = 0
        self.receipt: Receipt | None = make_receipt(0, self.tensors, self._ties, self.buffers())
        self.guard: SharedWeightsGuard | None = None
        self.holds_policy = True
        self.undo_bytes = 0  # held by an undo log
        self.unusable: str | None = None

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail_at:
            raise InjectedError(call)

    def pause(self, in_flight: InFlightMode, timeout: float | None) -> None:
        self._record("pause")

    def wake_weights(self) -> None:
        self._record("wake_weights")

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def tied(self) -> Mapping[str, str]:
        return self._ties

    def undo_log(self) -> UndoLog:
        self._record("undo_log")
        memory = Slab("undo_log", slab_bytes((tensor.shape, tensor.dtype) for tensor in self.tensors.values()))
        self.undo_bytes = memory.num_bytes

        def closed() -> None:
            self.undo_bytes = 0

        return UndoLog(self.tensors, memory, closed)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {"model.rotary.cos_sin": self.rotary}

    def copies(self) -> Mapping[str, torch.Tensor]:
        return self.copied

    def stale_copies(self) -> list[str]:
        return [name for name, tensor in self.copied.items() if not torch.equal(tensor, self.tensors[EMBED])]

    def adapters(self) -> None:
        return None

    def post_process(self) -> None:
        self._record("post_process")
        if self.remakes_copies:
            self.copied = {name: self.tensors[EMBED].clone() for name in self.copied}

    def invalidate(self, version: int) -> None:
        self._record("invalidate")
        self.policy_version = version

    def resume(self, receipt: Receipt, guard: SharedWeightsGuard) -> None:
        self._record("resume")
        self.receipt, self.guard, self.unusable, self.holds_policy = receipt, guard, None, True

    def cancel(self) -> None:
        self.calls.append("cancel")

    def restore(self, receipt: Receipt) -> None:
        self.calls.append("restore")
        self.receipt, self.policy_version = receipt, receipt.policy_version

    def orphans(self) -> frozenset[str]:
        return frozenset()

    def mark_unusable(self, reason: str, written: Collection[str] = ()) -> None:
        self.calls.append("mark_unusable")
        self.unusable, self.holds_policy = reason, False


def new_policy(engine: RecordingEngine, seed: int = 1, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Weights clearly different from the engine's, one tensor for each of its parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator).to(dtype or tensor.dtype)
        for name, tensor in engine.tensors.items()
    }


def snapshot(engine: RecordingEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.tensors.items()}


def run_update(engine: RecordingEngine, *steps: object, **options: float) -> PolicyUpdate:
    """An update that does the steps in its block: calls what can be called, loads the rest."""
    with PolicyUpdate(engine, **options) as update:  # pyright: ignore[reportArgumentType]
        for step in steps:
            step() if callable(step) else update.load(step)  # pyright: ignore[reportArgumentType]
    return update


def assert_holds(engine: RecordingEngine, policy: dict[str, torch.Tensor]) -> None:
    for name, tensor in engine.tensors.items():
        assert torch.equal(tensor, policy[name].to(tensor.dtype)), name


def assert_old_policy_serves(engine: RecordingEngine, old: dict[str, torch.Tensor]) -> None:
    assert_holds(engine, old)
    assert engine.calls[-1] == "cancel"
    assert engine.unusable is None
    assert engine.policy_version == 0


def assert_unusable_until_a_complete_update(engine: RecordingEngine) -> None:
    assert engine.calls[-1] == "mark_unusable"
    assert engine.unusable is not None
    engine.fail_at, policy = None, new_policy(engine, seed=9)
    with PolicyUpdate(engine) as update:
        update.load(policy)
    assert_holds(engine, policy)
    assert engine.unusable is None
    assert engine.receipt is update.receipt


def module_of(policy: dict[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters are these tensors, under these names."""
    root = nn.Module()
    for name, tensor in policy.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, nn.Parameter(tensor))
    return root
