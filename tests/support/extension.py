"""User-defined worker extensions, named by their import path in tests."""

from __future__ import annotations

from rollout.worker.worker import Worker


class WorkerExtension:
    def scaled_layers(self: Worker, factor: int, plus: int = 0) -> int:  # type: ignore[misc]
        """Reads the worker that it is mixed into."""
        return self.model.shape.num_hidden_layers * factor + plus


class ClashingExtension:
    def execute(self) -> None:
        """Has the name of a method that the worker needs."""
