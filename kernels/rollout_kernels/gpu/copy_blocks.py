"""Copies of KV blocks: all layers and pairs in one launch on one device, torch's copies between devices (swap)."""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels import reference
from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.interpreter import is_interpreted
from rollout_kernels.gpu.sizes import ceil_div

_BLOCK = 2048  # words of 4 bytes that a program copies, 16 to a thread
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_tensors", "programs_per_block"])
def _copy_blocks_kernel(
    table,  # int64: addresses of the sources, of the destinations, words of a block, of each tensor; then the pairs
    num_tensors,
    programs_per_block,
    BLOCK: tl.constexpr,
):
    """Program (p, i) copies a part of one pair's block of tensor i."""
    pair = tl.program_id(0) // programs_per_block
    part = tl.program_id(0) % programs_per_block
    tensor = tl.program_id(1)
    words = tl.load(table + 2 * num_tensors + tensor)  # int64, so that offsets are too
    pairs = table + 3 * num_tensors
    first_word = tl.load(pairs + 2 * pair) * words
    first_word_there = tl.load(pairs + 2 * pair + 1) * words
    source = tl.load(table + tensor).to(tl.pointer_type(tl.int32)) + tl.multiple_of(first_word, 4)
    target = tl.load(table + num_tensors + tensor).to(tl.pointer_type(tl.int32)) + tl.multiple_of(first_word_there, 4)
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < tl.multiple_of(words, 4)
    source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    tl.store(target + offsets, tl.load(source + offsets, mask=mask, other=0), mask=mask)


def independent_runs(pairs: list[tuple[int, int]], same_pool: bool) -> list[list[tuple[int, int]]]:
    """The pairs (source, destination) cut into runs whose copies may happen in any order, or at once.

    >>> independent_runs([(0, 1), (2, 3), (1, 4)], same_pool=True)  # block 1 must be there before it is copied on
    [[(0, 1), (2, 3)], [(1, 4)]]
    """
    runs: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if not runs or destination in written or (same_pool and (source in written or destination in read)):
            runs.append([])
            read, written = set(), set()
        runs[-1].append((source, destination))
        read.add(source)
        written.add(destination)
    return runs


def copy_blocks(
    sources: list[torch.Tensor],
    destinations: list[torch.Tensor],
    pairs: list[tuple[int, int]],
    tiles_per_block: int,
) -> None:
    """Copies block `source` of each tensor to block `destination` of its partner, as if pair after pair."""
    if not sources or not pairs:
        return
    if sources[0].device != destinations[0].device:
        _copy_between_devices(sources, destinations, pairs, tiles_per_block)
        return
    words = [tensor[0].numel() * tensor.element_size() * tiles_per_block // 4 for tensor in sources]
    addresses = [tensor.data_ptr() for tensor in (*sources, *destinations)]
    if any(address % 16 for address in addresses) or any(count % 4 for count in words):
        reference.copy_blocks(sources, destinations, pairs, tiles_per_block)  # no pool of ours is cut like this
        return
    same_pool = sources[0].data_ptr() == destinations[0].data_ptr()
    programs_per_block = ceil_div(max(words), _BLOCK)
    for run in independent_runs(pairs, same_pool):
        table = _to_device([*addresses, *words, *(block for pair in run for block in pair)], sources[0].device)
        _copy_blocks_kernel[(len(run) * programs_per_block, len(sources))](
            *(table, len(sources), programs_per_block),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            **PINNED,
        )


def _to_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    """int64 on the device, without waiting for it."""
    if is_interpreted():
        return torch.tensor(numbers, dtype=torch.int64)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _copy_between_devices(
    sources: list[torch.Tensor],
    destinations: list[torch.Tensor],
    pairs: list[tuple[int, int]],
    tiles_per_block: int,
) -> None:
    """Gathers a tensor's blocks on their device, moves them in one transfer, and scatters them on the other.

    Waits for the device where the destination is the host, which may read the blocks at once.
    """
    latest = {destination: source for source, destination in pairs}  # a later pair overwrites an earlier one
    for source, destination in zip(sources, destinations, strict=True):
        source_ids = torch.tensor(list(latest.values()), dtype=torch.int64).to(source.device)
        target_ids = torch.tensor(list(latest), dtype=torch.int64).to(destination.device)
        moved = _blocks_of(source, tiles_per_block).index_select(0, source_ids).to(destination.device)
        _blocks_of(destination, tiles_per_block).index_copy_(0, target_ids, moved)


def _blocks_of(pool: torch.Tensor, tiles_per_block: int) -> torch.Tensor:
    """The pool's bytes, a block to a row: torch cannot gather every dtype."""
    num_blocks = pool.shape[0] // tiles_per_block
    return pool[: num_blocks * tiles_per_block].view(torch.uint8).view(num_blocks, -1)


def ahead_of_time_cases() -> list[KernelCase]:
    """One kernel for every model and dtype: it copies words."""
    sizes = {"num_tensors": "i32", "programs_per_block": "i32", "BLOCK": "constexpr"}
    return [
        KernelCase(
            name="copy_blocks",
            kernel=_copy_blocks_kernel,
            signature={"table": "*i64", **sizes},
            constants={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            num_stages=3,
            divisible_by_16=("table",),
        )
    ]
