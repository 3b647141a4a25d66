"""Memory that shrinks to nothing under its tensors, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rollout.worker.device_slab import SavedSlab, StorageSlab
from rollout.worker.ledger import MemoryLedger

CPU = torch.device("cpu")


class FakeSaver:
    """Records what torch_memory_saver would be told; paused memory holds garbage."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        self.calls.append(("enter", tag))
        yield
        self.calls.append(("leave", tag))

    def pause(self, tag: str) -> None:
        self.calls.append(("pause", tag))

    def resume(self, tag: str) -> None:
        self.calls.append(("resume", tag))


def test_carved_tensors_are_zeros_side_by_side_and_aligned() -> None:
    slab = StorageSlab("weights", 1000, CPU)
    first, second = slab.carve((3, 5), torch.bfloat16), slab.carve((2,), torch.float32)
    assert first.abs().sum() == 0 and second.abs().sum() == 0
    assert second.data_ptr() - first.data_ptr() == 64 and slab.free_bytes == 1000 - 72
    first.fill_(1)
    assert second.tolist() == [0.0, 0.0]


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    slab = StorageSlab("kv_cache", 100, CPU)
    slab.carve((10,), torch.uint8)
    with pytest.raises(
        ValueError, match=r"memory of 'kv_cache' has 36 of 100 bytes left, \(5, 2\) of .*float32 needs 40"
    ):
        slab.carve((5, 2), torch.float32)
    with pytest.raises(ValueError, match="num_bytes=0 is not valid"):
        StorageSlab("kv_cache", 0, CPU)


def test_a_released_storage_holds_nothing_and_its_tensors_come_back_as_zeros() -> None:
    slab = StorageSlab("weights", 4096, CPU)
    tensor = slab.carve((64,), torch.float32)
    parameter = torch.nn.Parameter(
        slab.carve((4, 4), torch.bfloat16)[1:3], requires_grad=False
    )  # a view, as fused ones
    tensor.fill_(3)
    parameter.data.fill_(5)
    assert slab.resident_bytes() == 4096
    slab.release()
    assert slab.resident_bytes() == 0 and tensor.untyped_storage().nbytes() == 0 and tensor.shape == (64,)
    slab.release()
    slab.resume()
    assert slab.resident_bytes() == 4096
    assert tensor.abs().sum() == 0 and parameter.abs().sum() == 0
    tensor.fill_(7)
    slab.resume()  # awake already: nothing changes
    assert tensor.tolist() == [7.0] * 64


def test_a_storage_made_in_inference_mode_can_sleep_outside_of_it() -> None:
    with torch.inference_mode():
        slab = StorageSlab("kv_cache", 256, CPU)
        tensor = slab.carve((8,), torch.float32)
        tensor.fill_(1)
    slab.release()
    slab.resume()
    assert tensor.tolist() == [0.0] * 8


def test_saved_memory_is_paused_by_a_tag_of_its_own_and_keeps_its_addresses() -> None:
    saver = FakeSaver()
    slabs = [SavedSlab("kv_cache", 256, CPU, saver) for _ in range(2)]
    tags = [tag for call, tag in saver.calls if call == "enter"]
    assert len(set(tags)) == 2 and all("kv_cache" in tag for tag in tags)
    saver.calls.clear()
    tensor = slabs[0].carve((8,), torch.float32)
    address = tensor.data_ptr()
    tensor.fill_(4)
    slabs[0].release()
    slabs[0].release()
    assert (slabs[0].resident_bytes(), slabs[1].resident_bytes()) == (0, 256)
    slabs[0].resume()
    slabs[0].resume()
    assert saver.calls == [("pause", tags[0]), ("resume", tags[0])]
    assert tensor.data_ptr() == address and tensor.tolist() == [0.0] * 8


def test_the_ledger_counts_device_memory_by_the_driver_and_host_memory_beside_it() -> None:
    slabs = [StorageSlab(owner, size, CPU) for owner, size in (("weights", 3000), ("kv_cache", 5000), ("swap", 700))]
    trims: list[int] = []

    def driver() -> int:
        return 100 + sum(slab.resident_bytes() for slab in slabs[:2])

    ledger = MemoryLedger(driver, lambda: trims.append(1))
    for slab in slabs:
        ledger.register(slab.owner, slab, on_host=slab.owner == "swap")
    report = ledger.report()
    assert (report.process_resident, report.accounted, report.unaccounted) == (8100, 8000, 100)
    assert report["swap"].on_host and report["swap"].resident == 700
    asleep = ledger.release(["kv_cache", "swap"])
    assert asleep.released == {"kv_cache": 5000} and asleep.released_on_host == {"swap": 700}
    assert (asleep.resident_before, asleep.resident_after, asleep.difference) == (8100, 3100, 0)
    assert len(trims) == 2  # before, so that nothing else is counted, and after
    awake = ledger.resume(["kv_cache", "swap"])
    assert awake.resumed == {"kv_cache": 5000} and awake.resumed_on_host == {"swap": 700}
    assert (awake.resident_before, awake.resident_after, awake.difference) == (3100, 8100, 0)
    assert ledger.report().process_resident == 8100
    with pytest.raises(ValueError, match=r"unknown owners \['drafter'\]"):
        ledger.resume(["drafter"])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_ledger_that_cannot_resume_one_holder_gives_back_those_it_has_resumed(failing: int) -> None:
    # case SW-07
    slabs = [StorageSlab(owner, 1000, CPU) for owner in ("weights", "kv_cache", "kv_cache", "swap")]
    trims: list[int] = []
    ledger = MemoryLedger(lambda: sum(slab.resident_bytes() for slab in slabs), lambda: trims.append(1))
    for slab in slabs:
        ledger.register(slab.owner, slab)
    tensor = slabs[0].carve((8,), torch.float32)
    tensor.fill_(3)
    ledger.release(["kv_cache", "swap"])
    victim = slabs[1 + failing]
    resume, num_trims = victim.resume, len(trims)

    def out_of_memory() -> int:
        raise torch.OutOfMemoryError("injected")

    victim.resume = out_of_memory  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        ledger.resume(["weights", "kv_cache", "swap"])
    assert [slab.resident_bytes() for slab in slabs] == [1000, 0, 0, 0]
    assert tensor.tolist() == [3.0] * 8  # what was awake was not touched
    assert len(trims) == num_trims + 1
    victim.resume = resume  # type: ignore[method-assign]
    assert ledger.resume(["weights", "kv_cache", "swap"]).resumed == {"weights": 0, "kv_cache": 2000, "swap": 1000}


def test_memory_that_comes_and_cannot_be_cleared_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # case SW-07
    saver = FakeSaver()
    slabs = [StorageSlab("kv_cache", 1000, CPU), SavedSlab("kv_cache", 1000, CPU, saver)]
    for slab in slabs:
        slab.release()

        def failing(tensor: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("injected")

        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(torch.Tensor, "zero_", failing)
            slab.resume()
        assert slab.resident_bytes() == 0
        assert (slab.resume(), slab.resume(), slab.resident_bytes()) == (1000, 0, 1000)


def test_an_owner_that_has_gone_is_no_longer_counted() -> None:
    ledger = MemoryLedger(lambda: 0, lambda: None)
    ledger.register("undo_log", lambda: 5, on_host=True)
    ledger.unregister("undo_log")
    assert ledger.owners == ()
    with pytest.raises(ValueError, match=r"unknown owners \['undo_log'\]"):
        ledger.unregister("undo_log")
