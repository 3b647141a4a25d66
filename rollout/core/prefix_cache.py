"""What makes a KV block findable: hashes chained from the root of a prefix, and the index from hash to block.

A block's hash covers every token before it and everything else that its KV depends on. So two blocks with one hash hold
the same KV, and a hit across a policy update cannot be expressed.
"""

from __future__ import annotations

from array import array
from collections.abc import ItemsView, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.core.blocks import Block

HASH_BYTES = 16


def root_hash(policy_version: int, adapter: str | None, cache_salt: str | None) -> bytes:
    """The parent of a first block: what KV depends on besides tokens. `adapter` names a LoRA adapter's content."""
    extras = repr((policy_version, adapter, cache_salt)).encode()
    return blake2b(extras, digest_size=HASH_BYTES).digest()


def chained_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block that holds `token_ids` and follows the block with hash `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


class PrefixIndex:
    """The hittable blocks by their hash, one block a hash."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def items(self) -> ItemsView[bytes, Block]:
        return self._blocks.items()

    def find(self, block_hash: bytes) -> Block | None:
        return self._blocks.get(block_hash)

    def longest_prefix(self, hashes: Sequence[bytes], limit: int) -> list[Block]:
        """The blocks of the first hashes, up to the first that is not known and at most `limit`."""
        found: list[Block] = []
        blocks = self._blocks
        for block_hash in hashes[:limit]:
            block = blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, block_hash: bytes, block: Block) -> None:
        assert block_hash not in self._blocks, "the index holds this hash already"
        self._blocks[block_hash] = block

    def remove(self, block_hash: bytes) -> None:
        del self._blocks[block_hash]

    def clear(self) -> list[Block]:
        """Forgets every block; returns them."""
        blocks = list(self._blocks.values())
        self._blocks.clear()
        return blocks
