"""What can go wrong with an engine, as exceptions. Each message says what happened and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.outputs import RequestOutput


class RolloutError(Exception):
    """The root of the engine's own errors. Bad arguments raise `ValueError` instead."""


class EngineAsleepError(RolloutError):
    """A forward pass was asked for while memory that it needs is given back (`sleep`)."""


class EngineBusyError(RolloutError):
    """Something was asked for that an engine does only without requests in flight and without an open update."""


class MemoryBudgetError(RolloutError):
    """Trainer and engine need more memory than the budget that they share."""


class WeightsNotLoadedError(RolloutError):
    """The weights' memory holds no policy: after `sleep(level=2)`, until a complete update or reload."""


class StaleWeightsError(RolloutError):
    """The tensors that the engine reads are not those of its last receipt."""


class EngineUnusableError(RolloutError):
    """A policy update failed after it had begun to write; a complete update makes the engine usable again."""


class EngineClosedError(RolloutError):
    """The engine's worker processes were ended by `close`."""


class WorkerDiedError(RolloutError):
    """A worker process ended that nobody had told to; the message says how, with the last lines that it wrote.

    `exit_code` is minus the signal's number where one killed it. `outputs` holds, where `generate` or its like raised
    the error, what every prompt has: finished ones whole, the others with the tokens that had arrived.
    """

    def __init__(self, message: str, rank: int, exit_code: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.outputs: list[RequestOutput] = []


class PolicyUpdateError(RolloutError):
    """A policy update failed. The subclasses say how; the engine's state is said in the message."""


class IllegalPhaseError(PolicyUpdateError):
    """A phase of a policy update was called out of order; the message names the legal next steps."""


class PolicyVersionError(PolicyUpdateError):
    """The version offered does not follow the engine's."""


class PolicyUpdateTimeoutError(PolicyUpdateError):
    """The time limit of a policy update passed."""


class AdapterTensorError(PolicyUpdateError):
    """A key of an adapter (`lora_A`, ...) came where whole weights are needed."""


class UnknownTensorError(PolicyUpdateError):
    """A tensor's name is not a parameter of the engine's model."""


class TensorShapeError(PolicyUpdateError):
    """A tensor's shape is not the engine's; the message names the parameter and both shapes."""


class TensorKindError(PolicyUpdateError):
    """A tensor is not plain floating-point weights: quantised, sharded, sparse or without storage."""


class DuplicateTensorError(PolicyUpdateError):
    """One parameter was sent twice in one update, with different values."""


class TiedTensorError(PolicyUpdateError):
    """Different values were sent for parameters that share one tensor in the engine."""


class UncoveredParametersError(PolicyUpdateError):
    """Parameters of the engine that no tensor of the update covered."""

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class FingerprintMismatchError(PolicyUpdateError):
    """The engine's memory is not, bit for bit, what the trainer sent."""


class RollBackError(PolicyUpdateError):
    """A policy update cannot be rolled back as it was asked for, or the old policy did not come back whole."""


class TransportError(PolicyUpdateError):
    """The way from the trainer broke: the other end failed, went away, or sent something else than it announced."""
