"""Peaks of memory by phase, for sampler and trainer that take turns with one machine.

phases = MemoryPhases.of(llm)
with phases.phase("sampling"):
    outputs = llm.generate(prompts, params)
print(phases.measured["sampling"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.platform.platform import Platform, platform_for
from rollout.worker.ledger import LedgerReport, format_bytes

if TYPE_CHECKING:
    from rollout.llm import LLM

OTHERS = "others"  # what the engine's ledger does not own: interpreter, libraries, the trainer


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Bytes in use on the engine's device: at most during a phase, and at its end, by owner."""

    phase: str
    peak: int
    resident: int
    owners: dict[str, int]  # resident bytes of each owner of the ledger, and of `OTHERS`; empty where not counted

    @property
    def others(self) -> int:
        """Bytes that are not the engine's at the end."""
        return self.owners[OTHERS]

    @property
    def engine(self) -> int:
        """Bytes that are the engine's at the end."""
        return self.resident - self.others

    def __str__(self) -> str:
        owners = ", ".join(f"{owner} {format_bytes(count)}" for owner, count in self.owners.items() if count)
        return f"{self.phase}: peak {format_bytes(self.peak)}, then {format_bytes(self.resident)} ({owners})"


class MemoryPhases:
    """Measures phases, one at a time; `measured` has the last measurement of each.

    On a CPU the numbers are this process's resident memory as the operating system counts it (`VmHWM`, `VmRSS`), on
    CUDA what torch's allocator gave out at most and what the driver says is taken besides. Measuring starts the
    process's peak anew: `getrusage`'s `ru_maxrss` then counts from there as well. It costs next to nothing, but to
    count the owners' bytes the kernel walks all pages of the process: about 95 ms in a run of the quickstart.
    """

    def __init__(self, platform: Platform, report: Callable[[], LedgerReport]) -> None:
        self.measured: dict[str, PhaseMemory] = {}
        self.largest = platform.used_memory()  # peak over all phases
        self._platform = platform
        self._report = report

    @classmethod
    def of(cls, llm: LLM) -> MemoryPhases:
        """Over the device and the ledger of an engine in this process."""
        return cls(platform_for(llm.config.device), llm.memory_ledger)

    @contextmanager
    def phase(self, name: str, by_owner: bool = True) -> Iterator[None]:
        """Measures what runs inside; nothing is recorded where it raises, or where the kernel lets no peak be reset.

        `by_owner` counts the bytes of each owner at the end, too.
        """
        resettable = self._platform.reset_peak()
        yield
        if not resettable:
            return
        peak, resident, owners = self._platform.peak_memory(), self._platform.used_memory(), {}
        if by_owner:
            report = self._report()
            resident = report.process_resident
            owners = {entry.owner: entry.resident for entry in report.entries if not entry.on_host}
            owners[OTHERS] = report.unaccounted
        peak = max(peak, resident)
        self.measured[name] = PhaseMemory(name, peak, resident, owners)
        self.largest = max(self.largest, peak)
