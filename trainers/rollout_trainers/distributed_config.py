"""Several processes that train one policy: how its weights lie on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rollout_trainers.checks import check_choice, check_integer, check_real, fail

DistributedKind = Literal["none", "ddp", "fsdp2", "zero1", "zero2", "zero3", "accelerate"]

_TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True)
class DistributedSection:
    """Under `torchrun`, every process samples and learns from its share of a step's groups, with an engine of its own.
    The loss and its gradient are those of one process that has all samples.

    `kind` says where the policy's weights, gradients and moments are: "ddp" whole on each; "fsdp2" (torch's
    `fully_shard`) and "zero3" (DeepSpeed's ZeRO, stage 3) a part of each on every process; "zero2" all weights, and
    parts of the others; "zero1" parts of the moments alone; "accelerate" what accelerate's own configuration says. All
    but "ddp" are for a policy of kind "transformers". "none" is one process.

    A process that waits for another for more than `timeout` seconds, for example while its rewards are computed, ends
    the run. `persistent_elements`, of "zero3": parameters of at most so many elements stay whole.
    """

    kind: DistributedKind = "none"
    timeout: float = _TIMEOUT
    persistent_elements: int = 0

    def __post_init__(self) -> None:
        check_choice("distributed", "kind", self.kind, get_args(DistributedKind))
        check_real("distributed", "timeout", self.timeout, 0.0, open_low=True)
        check_integer("distributed", "persistent_elements", self.persistent_elements, 0)
        if self.kind == "none" and self.timeout != _TIMEOUT:
            fail("distributed", "timeout", self.timeout, f"{_TIMEOUT:g} where kind is 'none': nobody waits")
        if self.persistent_elements and self.kind != "zero3":
            fail("distributed", "persistent_elements", self.persistent_elements, "0 where kind is not 'zero3'")

    @property
    def is_sharded(self) -> bool:
        """Whether a library wraps the policy, and makes its optimiser's step."""
        return self.kind not in ("none", "ddp")
