"""What the workers of an engine report, as one report: the owners of rank 1 are called "rank 1 weights" and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollout.worker.ledger import LedgerReport, SleepReport, WakeReport


def join_ledgers(reports: Sequence[LedgerReport]) -> LedgerReport:
    """Every entry of every rank, and the memory of all of them."""
    return LedgerReport(
        tuple(
            replace(entry, owner=_of_rank(rank, entry.owner))
            for rank, report in enumerate(reports)
            for entry in report.entries
        ),
        sum(report.process_resident for report in reports),
    )


def join_sleep_reports(reports: Sequence[SleepReport]) -> SleepReport:
    """What every owner of every rank gave back, and what that is together."""
    return SleepReport(
        _join([report.released for report in reports]),
        sum(report.resident_before for report in reports),
        sum(report.resident_after for report in reports),
        _join([report.released_on_host for report in reports]),
    )


def join_wake_reports(reports: Sequence[WakeReport]) -> WakeReport:
    """What every owner of every rank took into use again, and what that is together."""
    return WakeReport(
        _join([report.resumed for report in reports]),
        sum(report.resident_before for report in reports),
        sum(report.resident_after for report in reports),
        _join([report.resumed_on_host for report in reports]),
    )


def _join(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {_of_rank(rank, owner): count for rank, part in enumerate(parts) for owner, count in part.items()}


def _of_rank(rank: int, owner: str) -> str:
    return f"rank {rank} {owner}"
