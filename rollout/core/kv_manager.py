"""Which KV blocks a request holds: block tables, prefix hits, forks with copy-on-write, swap, and their accounting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from rollout.core.blocks import Block, BlockPool
from rollout.core.prefix_cache import chained_hash, root_hash


class KVHolder(Protocol):
    """Whose KV is managed: a request, in the engine's pool; in a drafter's, what that has computed of it."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def adapter_key(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None: ...


@dataclass(slots=True)
class RequestBlocks:
    """The blocks of one request. Between steps a table covers exactly its computed tokens."""

    block_ids: list[int] = field(default_factory=list)  # device blocks, by position
    host_block_ids: list[int] = field(default_factory=list)  # while the request is swapped out; then no device blocks
    hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks, extended when asked for
    num_published: int = 0  # leading blocks that need no publishing any more
    may_publish: bool = True  # False once the request's logits were not numbers
    is_mixed: bool = False  # holds KV from before a policy update: publishes nothing and takes no hits until released


class KVManager:
    """Block tables over one device pool and one host pool. Ids and counts only: the runner moves the data."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.host_pool = BlockPool(num_host_blocks, enable_caching=False)
        self._requests: dict[str, RequestBlocks] = {}
        self._copy_holds: Counter[int] = Counter()  # block id -> holds as a copy's source, until the step is done
        self._policy_version = 0
        # (adapter, cache salt) -> root hash, under the current policy
        self._roots: dict[tuple[str | None, str | None], bytes] = {}

    def block_ids(self, request: KVHolder) -> list[int]:
        """The request's block table; the caller does not change it."""
        return self._requests[request.request_id].block_ids

    def holds_blocks(self, request: KVHolder) -> bool:
        """Whether the request has blocks, on the device or on the host."""
        entry = self._requests.get(request.request_id)
        return entry is not None and bool(entry.block_ids or entry.host_block_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def hashes(self, request: KVHolder, num_blocks: int) -> list[bytes]:
        """The hashes of the request's leading full blocks, at least `num_blocks` of them (they must be full)."""
        entry = self._entry(request)
        known = entry.hashes
        if len(known) < num_blocks:
            size = self.block_size
            parent = known[-1] if known else self._root(request)
            for start in range(len(known) * size, num_blocks * size, size):
                parent = chained_hash(parent, request.token_ids[start : start + size])
                known.append(parent)
        return known

    def hashes_filled(self, request: KVHolder, start: int, end: int) -> list[bytes]:
        """The hashes of the blocks that become full, and then hittable, by computing tokens `start` to `end`."""
        first, last = start // self.block_size, end // self.block_size
        entry = self._entry(request)
        if first == last or entry.is_mixed or not entry.may_publish:
            return []
        return self.hashes(request, last)[first:last]

    def cached_prefix(self, request: KVHolder, limit: int) -> list[Block]:
        """The hittable blocks of the request's first `limit` full blocks, up to the first that is missing."""
        if not self.enable_prefix_caching or limit == 0 or not len(self.pool.index) or self.holds_older_kv(request):
            return []
        return self.pool.index.longest_prefix(self.hashes(request, limit), limit)

    def fits(self, request: KVHolder, hits: list[Block], reserve: int) -> bool:
        """Whether all known tokens of a request without device blocks fit beside `reserve` blocks left free."""
        num_new = self.num_blocks_for(len(request.token_ids)) - len(hits)
        num_free_hits = sum(block.ref_count == 0 for block in hits)
        return self.pool.num_free - num_free_hits - num_new >= reserve

    def fits_beside(self, request: KVHolder, num_shared: int, reserve: int) -> bool:
        """The same, where the KV of its first `num_shared` tokens is shared and a partial block of them is copied."""
        num_new = self.num_blocks_for(len(request.token_ids)) - num_shared // self.block_size
        return self.pool.num_free - num_new >= reserve

    def admit(self, request: KVHolder, hits: list[Block]) -> None:
        """Starts the request's block table with the prefix that was found."""
        entry = self._entry(request)
        assert not [*entry.block_ids, *entry.host_block_ids], f"{request.request_id} holds blocks already"
        self._take_hits(entry, hits)

    def allocate(self, request: KVHolder, num_new_tokens: int, copies: list[tuple[int, int]]) -> bool:
        """Slots for the next `num_new_tokens` tokens; False, with nothing changed, where blocks are short.

        A partial block that others hold, or that is hittable (a fork may begin within a block that its parent has
        filled), is replaced by a private one, and the copy appended to `copies` as (source, destination). The source
        stays held until `end_step`, so that no other copy or swap is written to it before it is read; its last user
        may write to it, since writes follow copies.
        """
        size = self.block_size
        table = self._requests[request.request_id].block_ids
        start = request.num_computed_tokens
        num_missing = -(-(start + num_new_tokens) // size) - len(table)
        pool = self.pool
        shared = None
        if start % size:
            last = pool.blocks[table[-1]]
            if last.block_hash is not None or (
                last.ref_count > 1 and last.ref_count - self._copy_holds[last.block_id] > 1
            ):
                shared = last
        if num_missing + (shared is not None) > len(pool.free_queue):
            return False
        if shared is not None:
            private = pool.take()
            copies.append((shared.block_id, private.block_id))
            table[-1] = private.block_id
            self._copy_holds[shared.block_id] += 1  # the request's hold becomes the copy's
        for _ in range(num_missing):
            table.append(pool.take().block_id)
        return True

    def extend(self, request: KVHolder, num_tokens: int, reserve: int) -> int:
        """Slots for up to `num_tokens` leading tokens, of which `allocate` has given some in this step already: takes
        blocks as long as `reserve` others stay free. Returns for how many tokens there are slots now."""
        table = self._requests[request.request_id].block_ids
        num_missing = self.num_blocks_for(num_tokens) - len(table)
        for _ in range(min(num_missing, self.pool.num_free - reserve)):
            table.append(self.pool.take().block_id)
        return min(num_tokens, len(table) * self.block_size)

    def trim(self, request: KVHolder) -> None:
        """Gives back blocks behind the computed tokens: what was written there is worth nothing."""
        table = self._requests[request.request_id].block_ids
        while len(table) > self.num_blocks_for(request.num_computed_tokens):
            self.pool.release(self.pool.blocks[table.pop()])

    def fork(self, parent: KVHolder, child: KVHolder, num_tokens: int | None = None) -> None:
        """Gives `child`, which holds nothing, a share of the blocks of `parent`, the partial one included.

        Of all of them, or of those of the first `num_tokens` tokens, which both requests begin with: then the last
        block may hold more of the parent's tokens, and the child gets a private copy before it writes there.
        """
        source = self._requests[parent.request_id]
        num_tokens = len(source.block_ids) * self.block_size if num_tokens is None else num_tokens
        block_ids, num_full = source.block_ids[: self.num_blocks_for(num_tokens)], num_tokens // self.block_size
        for block_id in block_ids:
            self.pool.share(self.pool.blocks[block_id])
        self._requests[child.request_id] = RequestBlocks(
            block_ids=block_ids,
            hashes=source.hashes[:num_full],
            num_published=min(source.num_published, num_full),
            may_publish=source.may_publish,
            is_mixed=source.is_mixed,
        )

    def may_be_forked(self, parent: KVHolder) -> bool:
        """Whether others may go on from the KV that `parent` holds: it is on the device, and of one policy alone."""
        entry = self._requests.get(parent.request_id)
        return entry is not None and bool(entry.block_ids) and entry.may_publish and not entry.is_mixed

    def swap_out(self, request: KVHolder) -> list[tuple[int, int]] | None:
        """Moves the request to host blocks: (device, host) pairs to copy; None where host blocks are short."""
        entry = self._requests[request.request_id]
        if len(entry.block_ids) > self.host_pool.num_free:
            return None
        entry.host_block_ids = [self.host_pool.take().block_id for _ in entry.block_ids]
        pairs = list(zip(entry.block_ids, entry.host_block_ids, strict=True))
        self._release_device(entry)
        return pairs

    def swap_in(self, request: KVHolder, hits: list[Block]) -> list[tuple[int, int]]:
        """Moves the request back: (host, device) pairs to copy, none for `hits`, its blocks that are still here."""
        entry = self._requests[request.request_id]
        host_ids = entry.host_block_ids
        self._take_hits(entry, hits)
        pairs = [(host_id, self.pool.take().block_id) for host_id in host_ids[len(hits) :]]
        entry.block_ids.extend(device_id for _, device_id in pairs)
        self._release_host(entry)
        return pairs

    def end_step(self) -> None:
        """The step's copies are done (or will never be): their sources are no longer held for it."""
        if self._copy_holds:
            for block_id in self._copy_holds.elements():
                self.pool.release(self.pool.blocks[block_id])
            self._copy_holds.clear()

    def publish(self, request: KVHolder) -> None:
        """Makes the full blocks of computed tokens hittable.

        Where another request has published the same content, its block replaces this one: so whoever holds a hittable
        block also holds its hittable parent, and leaves go before roots.
        """
        entry = self._requests[request.request_id]
        num_full = request.num_computed_tokens // self.block_size
        if entry.num_published >= num_full or not self.enable_prefix_caching:
            return
        if entry.is_mixed or not entry.may_publish:
            return
        hashes = self.hashes(request, num_full)
        for position in range(entry.num_published, num_full):
            block = self.pool.blocks[entry.block_ids[position]]
            published = self.pool.publish(block, hashes[position])
            if published is not block:
                self.pool.share(published)
                self.pool.release(block)
                entry.block_ids[position] = published.block_id
        entry.num_published = num_full

    def withdraw(self, request: KVHolder) -> None:
        """The request's KV is not to be trusted: none of its blocks stays hittable, and none becomes so."""
        entry = self._requests[request.request_id]
        entry.may_publish = False
        for block_id in entry.block_ids:
            self.pool.withdraw(self.pool.blocks[block_id])

    def release(self, request: KVHolder) -> None:
        """Gives back the request's blocks, on device and host; its hashes stay, for when it comes back."""
        entry = self._requests.get(request.request_id)
        if entry is not None:
            self._release_device(entry)
            self._release_host(entry)
            entry.is_mixed = False

    def forget(self, request: KVHolder) -> None:
        """Gives back the request's blocks and forgets it; no-op where it is not known."""
        self.release(request)
        self._requests.pop(request.request_id, None)

    def reset_prefix_cache(self) -> bool:
        """Makes no block hittable; False, with nothing changed, where a device block is in use."""
        if self.pool.num_free != self.pool.num_blocks:
            return False
        self.pool.withdraw_all()
        return True

    def set_policy_version(self, policy_version: int) -> None:
        """From now on every hash begins with this version, and no block from before can be hit.

        Requests that hold blocks keep them. What they compute from now on depends on KV of an older policy, so that
        none of their blocks becomes hittable until they have released them all.
        """
        self.pool.withdraw_all()
        self._policy_version = policy_version
        self._roots.clear()
        for entry in self._requests.values():
            entry.hashes.clear()
            entry.is_mixed = bool(entry.block_ids or entry.host_block_ids)

    def holds_older_kv(self, request: KVHolder) -> bool:
        """Whether the request holds KV that was computed before a policy update, or from such KV."""
        entry = self._requests.get(request.request_id)
        return entry is not None and entry.is_mixed

    def slots(self, requests: Iterable[KVHolder]) -> tuple[int, int]:
        """KV slots of the blocks that `requests` (all that hold any) use, and how many hold a token's KV.

        A shared block counts once. Only blocks behind a request's last full one have unused slots.
        """
        size = self.block_size
        filled: dict[int, int] = {}  # block id -> slots used, for blocks that are not full
        for request in requests:
            table = self._requests[request.request_id].block_ids
            num_full, rest = divmod(request.num_computed_tokens, size)
            for block_id in table[num_full:]:
                filled[block_id] = max(filled.get(block_id, 0), rest)
                rest = 0
        num_allocated = (self.pool.num_blocks - self.pool.num_free) * size
        return num_allocated, num_allocated - sum(size - used for used in filled.values())

    def check_integrity(self) -> None:
        """Recounts who holds which block. Raises `AssertionError` on a mismatch."""
        held: Counter[int] = Counter(self._copy_holds)
        held_on_host: Counter[int] = Counter()
        for request_id, entry in self._requests.items():
            assert len(set(entry.block_ids)) == len(entry.block_ids), f"{request_id} holds a block twice"
            assert not (entry.block_ids and entry.host_block_ids), f"{request_id} is on the device and on the host"
            assert entry.num_published <= len(entry.block_ids), f"{request_id} published more than it holds"
            if entry.is_mixed:
                hashed = [block_id for block_id in entry.block_ids if self.pool.blocks[block_id].block_hash is not None]
                assert not hashed, f"{request_id} holds KV of an older policy, and its blocks {hashed} can be hit"
            held.update(entry.block_ids)
            held_on_host.update(entry.host_block_ids)
        self.pool.check_integrity(held)
        self.host_pool.check_integrity(held_on_host)
        assert all(count == 1 for count in held_on_host.values()), "a host block is shared"

    def _entry(self, request: KVHolder) -> RequestBlocks:
        entry = self._requests.get(request.request_id)
        if entry is None:
            entry = self._requests[request.request_id] = RequestBlocks()
        return entry

    def _root(self, request: KVHolder) -> bytes:
        extras = (request.adapter_key, request.cache_salt)
        root = self._roots.get(extras)
        if root is None:
            root = self._roots[extras] = root_hash(self._policy_version, *extras)
        return root

    def _take_hits(self, entry: RequestBlocks, hits: list[Block]) -> None:
        for block in hits:
            self.pool.share(block)
        entry.block_ids = [block.block_id for block in hits]
        entry.num_published = len(hits)

    def _release_device(self, entry: RequestBlocks) -> None:
        for block_id in reversed(entry.block_ids):  # leaves first
            self.pool.release(self.pool.blocks[block_id])
        entry.block_ids = []
        entry.num_published = 0

    def _release_host(self, entry: RequestBlocks) -> None:
        for block_id in reversed(entry.host_block_ids):
            self.host_pool.release(self.host_pool.blocks[block_id])
        entry.host_block_ids = []
