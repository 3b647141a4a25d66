"""What a policy update needs of an engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, Protocol, get_args

import torch

from rollout.lora.manager import AdapterManager
from rollout.weights.guard import SharedWeightsGuard
from rollout.weights.receipt import Receipt
from rollout.weights.undo import UndoLog

InFlightMode = Literal["abort", "wait", "keep", "recompute"]
IN_FLIGHT_MODES: tuple[InFlightMode, ...] = get_args(InFlightMode)


class UpdateTarget(Protocol):
    """The engine's side of a policy update. Each method is called at most once, in the order given here.

    `parameters` has the engine's own tensors under Hugging Face names, views of fused storage included, without the
    names in `tied`, which share the tensor of the name that they map to. `receipt` is the last one, kept through sleep.
    """

    @property
    def policy_version(self) -> int: ...

    @property
    def receipt(self) -> Receipt | None: ...

    @property
    def holds_policy(self) -> bool:
        """Whether the weights hold one whole policy, that of `receipt`: not after `sleep(2)`, nor while unusable."""
        ...

    def pause(self, in_flight: InFlightMode, timeout: float | None) -> None:
        """Stops stepping, once the requests in flight are where the mode wants them.

        Legal on an unusable engine. Raises, and leaves the engine unpaused or to its other user, if it cannot;
        `PolicyUpdateTimeoutError` if requests that are waited for have not ended after `timeout` seconds.
        """
        ...

    def wake_weights(self) -> None:
        """Makes the weights' memory writable if it sleeps."""
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]: ...

    def tied(self) -> Mapping[str, str]: ...

    def undo_log(self) -> UndoLog:
        """Host memory for what the update overwrites, which the engine's ledger counts until the log is closed."""
        ...

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """What the forward pass reads and the engine computes itself; asked for after `post_process`."""
        ...

    def copies(self) -> Mapping[str, torch.Tensor]:
        """What the forward pass reads instead of parameters, made of them by `post_process` (int8); often nothing."""
        ...

    def stale_copies(self) -> list[str]:
        """Names of the copies that are not, bit for bit, what the parameters give when they are made once more."""
        ...

    def adapters(self) -> AdapterManager | None:
        """The LoRA adapters in memory, and their slots; None where the engine has no memory for any."""
        ...

    def post_process(self) -> None:
        """Rebuilds whatever depends on the weights or was lost in sleep (buffers, packed copies). A second call comes
        only in a roll-back."""
        ...

    def invalidate(self, version: int) -> None:
        """Takes the version over: from here on no KV of an older policy can be hit."""
        ...

    def resume(self, receipt: Receipt, guard: SharedWeightsGuard) -> None:
        """Keeps receipt and guard, clears 'unusable' and 'not loaded', and serves. All of it, or it raises."""
        ...

    def cancel(self) -> None:
        """Nothing was written: takes up again where `pause` stopped, with the old policy."""
        ...

    def restore(self, receipt: Receipt) -> None:
        """What was written has been taken back, and the weights are again those of the old `receipt`: takes up again
        where `pause` stopped, under the receipt's version, also after `invalidate`."""
        ...

    def orphans(self) -> frozenset[str]:
        """Names of the parameters whose memory holds no policy, and that torch has not seen change in place since:
        given back by sleep, or written by an update that failed. Asked for after `wake_weights`."""
        ...

    def mark_unusable(self, reason: str, written: Collection[str] = ()) -> None:
        """The weights are a mixture: refuses to generate, saying why, until a later `resume`. Requests that were kept
        end with what they have."""
        ...
