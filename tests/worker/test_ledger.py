"""The ledger's numbers against memory that is really there."""

from __future__ import annotations

import gc

import pytest
import torch

from rollout.worker.ledger import MemoryLedger, SleepReport, format_bytes, process_resident_bytes, trim_heap
from rollout.worker.slab import Slab

MIB = 1 << 20


def _slab(owner: str, written: int, size: int = 64 * MIB) -> Slab:
    slab = Slab(owner, size)
    slab.carve((size,), torch.uint8)[:written] = 1
    return slab


def test_the_report_has_reserved_and_resident_bytes_of_every_owner():
    ledger = MemoryLedger()
    ledger.register("weights", _slab("weights", 64 * MIB))
    ledger.register("kv_cache", _slab("kv_cache", 8 * MIB))
    ledger.register("kv_cache", _slab("kv_cache", 2 * MIB, 4 * MIB))
    ledger.register("buffers", lambda: 12345)
    report = ledger.report()
    assert [(e.owner, e.reserved, e.resident) for e in report.entries] == [
        ("weights", 64 * MIB, 64 * MIB),
        ("kv_cache", 68 * MIB, 10 * MIB),
        ("buffers", 12345, 12345),
    ]
    assert report["kv_cache"].resident == 10 * MIB
    assert report.accounted == 74 * MIB + 12345
    assert report.unaccounted == report.process_resident - report.accounted > 0
    assert abs(report.process_resident - process_resident_bytes()) < MIB
    with pytest.raises(KeyError, match="'drafter' holds no memory; owners: weights, kv_cache, buffers"):
        _ = report["drafter"]


def _settle() -> None:
    """Returns what earlier tests left on the heap, which the ledger's own trim would else return in the middle."""
    gc.collect()
    trim_heap()


def test_release_reports_what_each_owner_gave_back_and_the_system_agrees():
    _settle()
    ledger = MemoryLedger()
    ledger.register("weights", _slab("weights", 64 * MIB))
    ledger.register("kv_cache", _slab("kv_cache", 32 * MIB))
    ledger.register("swap", _slab("swap", 16 * MIB))
    report = ledger.release(["kv_cache", "swap", "kv_cache"])
    assert report.released == {"kv_cache": 32 * MIB, "swap": 16 * MIB}
    assert report.total_released == 48 * MIB
    assert report.resident_before - report.resident_after == report.total_released + report.difference
    assert abs(report.difference) < 4 * MIB
    assert ledger.report()["weights"].resident == 64 * MIB
    assert ledger.release(["kv_cache", "swap"]).released == {"kv_cache": 0, "swap": 0}
    assert ledger.release(["weights"]).released == {"weights": 64 * MIB}


def test_counted_memory_is_released_by_its_function_and_stays_without_one():
    _settle()
    ledger = MemoryLedger()
    workspaces = [torch.ones(24 * MIB, dtype=torch.uint8)]
    ledger.register("workspaces", lambda: sum(w.nbytes for w in workspaces), workspaces.clear)
    ledger.register("buffers", lambda: 100)
    report = ledger.release(["workspaces", "buffers"])
    assert report.released == {"workspaces": 24 * MIB, "buffers": 0}
    assert abs(report.difference) < 4 * MIB
    assert ledger.report()["workspaces"].resident == 0


def test_unknown_owners_are_refused_before_anything_is_released():
    ledger = MemoryLedger()
    ledger.register("kv_cache", _slab("kv_cache", MIB, 2 * MIB))
    with pytest.raises(ValueError, match=r"unknown owners \['graphs'\]; registered: kv_cache"):
        ledger.release(["kv_cache", "graphs"])
    assert ledger.report()["kv_cache"].resident == 2 * MIB


def test_a_release_function_belongs_to_a_counting_function():
    with pytest.raises(ValueError, match="'kv_cache' was given Slab"):
        MemoryLedger().register("kv_cache", Slab("kv_cache", 4096), release=lambda: None)


def test_reports_print_as_tables():
    ledger = MemoryLedger()
    ledger.register("weights", lambda: 3 * MIB)
    lines = str(ledger.report()).splitlines()
    assert [line.split()[0] for line in lines] == ["owner", "weights", "(others)", "process"]
    assert lines[1].split() == ["weights", "3.0", "MiB", "3.0", "MiB"]
    report = SleepReport({"kv_cache": 512 * MIB}, 1024 * MIB, 513 * MIB)
    assert report.difference == -MIB
    assert str(report) == (
        "released 512.0 MiB (kv_cache 512.0 MiB); process 1.00 GiB -> 513.0 MiB, unexplained -1.0 MiB"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (-1536, "-1.5 KiB"), (MIB, "1.0 MiB"), (5 << 30, "5.00 GiB")],
)
def test_byte_counts_print_in_binary_units(count: int, text: str):
    assert format_bytes(count) == text
