"""The most likely tokens at each of a sample's positions, kept compactly while the sample grows."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from rollout.core.schedule import TopLogprobs


@dataclass(slots=True)
class LogprobColumns:
    """`TopLogprobs` of consecutive positions in one array: no object a token.

    `num_top` and `num_chosen`, of all rows, are told by the first rows that come. The first `num_skipped` positions
    count, and are not kept: those of a sample's beginning, where nobody asks for them.
    """

    num_top: int = 0
    num_chosen: int = 0
    num_skipped: int = 0
    packed: array[int] = field(default_factory=lambda: array("i"))  # [positions, width], row by row

    @property
    def width(self) -> int:
        """Numbers a position."""
        return 2 * self.num_top + self.num_chosen + 1

    def __len__(self) -> int:
        return self.num_skipped + len(self.packed) // self.width

    def append(self, rows: TopLogprobs) -> None:
        """Adds these positions."""
        self.num_top, self.num_chosen = rows.num_top, rows.num_chosen
        self.packed.frombytes(rows.packed.tobytes())

    def truncate(self, num_positions: int) -> None:
        """Forgets all positions from `num_positions` on."""
        del self.packed[max(0, num_positions - self.num_skipped) * self.width :]

    def copy(self) -> LogprobColumns:
        return LogprobColumns(self.num_top, self.num_chosen, self.num_skipped, self.packed[:])

    def packed_rows(self, first: int = 0) -> array[int]:
        """The positions from `first` on, which are kept."""
        assert first >= self.num_skipped
        return self.packed[(first - self.num_skipped) * self.width :]

    def rows(self, first: int = 0) -> TopLogprobs:
        """The positions from `first` on, which are kept, as an array of their own."""
        packed = np.array(self.packed_rows(first) if first else self.packed, np.int32)
        return TopLogprobs(packed.reshape(-1, self.width), self.num_top, self.num_chosen)
