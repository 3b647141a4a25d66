"""KV blocks: all made at start, counted by reference, and kept in a free queue with O(1) take, give back and remove."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollout.core.prefix_cache import PrefixIndex


class Block:
    """One KV block. A block in the free queue has `ref_count` 0; it may still carry the hash of what it holds."""

    __slots__ = ("block_hash", "block_id", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None  # set while the prefix index points here
        self.previous: Block = self  # neighbours in the free queue; a block outside points at itself
        self.next: Block = self

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, hashed={self.block_hash is not None})"


class FreeQueue:
    """A circular doubly linked list of blocks around a sentinel; the front is taken first."""

    __slots__ = ("_end", "_size")

    def __init__(self) -> None:
        self._end = Block(-1)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        block = self._end.next
        while block is not self._end:
            yield block
            block = block.next

    def push_back(self, block: Block) -> None:
        self._insert(self._end.previous, block, self._end)

    def push_front(self, block: Block) -> None:
        self._insert(self._end, block, self._end.next)

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        block.previous = before
        block.next = after
        before.next = block
        after.previous = block
        self._size += 1

    def pop_front(self) -> Block:
        """The block that has waited longest. Raises `IndexError` when the queue is empty."""
        block = self._end.next
        if block is self._end:
            raise IndexError("no free block is left")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Takes `block`, which must be in the queue, out of its middle."""
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block
        block.next = block
        self._size -= 1

    def check_integrity(self) -> None:
        """Walks the links both ways. Raises `AssertionError` where they disagree."""
        forward = [block.block_id for block in self]
        backward: list[int] = []
        block = self._end.previous
        while block is not self._end:
            assert block.next.previous is block, f"{block} is linked wrongly"
            assert block.previous.next is block, f"{block} is linked wrongly"
            backward.append(block.block_id)
            block = block.previous
        assert forward == backward[::-1], f"free queue reads {forward} forwards and {backward} backwards"
        assert len(forward) == self._size, f"free queue holds {len(forward)} blocks and counts {self._size}"


class BlockPool:
    """Hands out blocks and takes them back.

    A block that comes back with a hash goes to the back of the free queue and stays hittable until it reaches the
    front and is taken: least recently used first. One without a hash is worth nothing and goes to the front. Whoever
    releases a chain of blocks does so from its end, so that leaves are evicted before their roots.
    """

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks} is not valid: it must be at least 0")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.index = PrefixIndex()
        self.free_queue = FreeQueue()
        for block in self.blocks:
            self.free_queue.push_back(block)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, hittable ones included."""
        return len(self.free_queue)

    def take(self) -> Block:
        """A block for new content, held once; what it held before is no longer hittable. Raises `IndexError`."""
        block = self.free_queue.pop_front()
        if block.block_hash is not None:
            self.withdraw(block)
        block.ref_count = 1
        return block

    def share(self, block: Block) -> None:
        """One more holder of `block`, which may be free and hittable."""
        if block.ref_count == 0:
            self.free_queue.remove(block)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One holder of `block` less; the last one gives it back."""
        assert block.ref_count > 0, f"{block} is released and nobody holds it"
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.block_hash is None:
                self.free_queue.push_front(block)
            else:
                self.free_queue.push_back(block)

    def publish(self, block: Block, block_hash: bytes) -> Block:
        """Makes `block` hittable under `block_hash`; returns the block that already is, where there is one."""
        assert self.enable_caching, "caching is off"
        assert block.ref_count > 0, f"{block} is published and nobody holds it"
        assert block.block_hash is None, f"{block} is published already"
        known = self.index.find(block_hash)
        if known is not None:
            return known
        self.index.insert(block_hash, block)
        block.block_hash = block_hash
        return block

    def withdraw(self, block: Block) -> None:
        """Makes `block` not hittable; no-op where it is not."""
        if block.block_hash is not None:
            self.index.remove(block.block_hash)
            block.block_hash = None

    def withdraw_all(self) -> None:
        """Makes every block not hittable; who holds which block does not change.

        Free ones go to the front of the queue: their memory is warm, that of blocks never used is not there yet.
        """
        for block in self.index.clear():
            block.block_hash = None
            if block.ref_count == 0:
                self.free_queue.remove(block)
                self.free_queue.push_front(block)

    def check_integrity(self, expected_ref_counts: Mapping[int, int] | None = None) -> None:
        """Recounts everything: links, reference counts (against the holders' own list), free blocks and the index.

        `expected_ref_counts` maps block id to holders; ids that are missing have none. Raises `AssertionError`.
        """
        self.free_queue.check_integrity()
        free_ids = {block.block_id for block in self.free_queue}
        held_ids = {block.block_id for block in self.blocks if block.ref_count > 0}
        assert all(block.ref_count >= 0 for block in self.blocks), "a reference count is negative"
        assert not free_ids & held_ids, f"blocks {sorted(free_ids & held_ids)} are free and held"
        assert len(free_ids) + len(held_ids) == self.num_blocks, "blocks are lost: neither free nor held"
        if expected_ref_counts is not None:
            for block in self.blocks:
                expected = expected_ref_counts.get(block.block_id, 0)
                assert block.ref_count == expected, f"{block} should be held {expected} times"
        hashed = {block.block_hash: block for block in self.blocks if block.block_hash is not None}
        assert hashed == dict(self.index.items()), "the prefix index and the blocks' hashes disagree"
        assert len(hashed) == sum(block.block_hash is not None for block in self.blocks), "two blocks share a hash"
        assert self.enable_caching or not hashed, "caching is off and a block is hittable"
