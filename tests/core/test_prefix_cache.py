from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from rollout.core.blocks import BlockPool
from rollout.core.prefix_cache import PrefixIndex, chained_hash, root_hash


def test_a_hash_is_blake2b_of_the_parent_and_the_tokens_as_64_bit_integers():
    root = blake2b(b"(3, None, None)", digest_size=16).digest()
    assert root_hash(3, None, None) == root
    first = blake2b(root + bytes([1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]), digest_size=16).digest()
    assert chained_hash(root, [1, 258]) == first


def test_everything_that_kv_depends_on_is_part_of_the_root():
    roots = [root_hash(version, adapter, salt) for version in (0, 1) for adapter in (None, "a") for salt in (None, "a")]
    assert len(set(roots)) == 8
    assert root_hash(0, None, "None") != root_hash(0, None, None)


tokens = st.lists(st.integers(0, 3), min_size=2, max_size=2)


@given(st.lists(tokens, max_size=4), st.lists(tokens, max_size=4))
def test_chains_are_equal_only_for_equal_prefixes(one: list[list[int]], other: list[list[int]]):
    def chain(blocks: list[list[int]]) -> bytes:
        value = root_hash(0, None, None)
        for block in blocks:
            value = chained_hash(value, block)
        return value

    assert (chain(one) == chain(other)) == (one == other)


def test_the_longest_prefix_ends_at_the_first_gap():
    blocks = BlockPool(3, enable_caching=True).blocks
    index = PrefixIndex()
    for block in blocks:
        index.insert(bytes([block.block_id]), block)
    hashes = [bytes([0]), bytes([1]), b"unknown", bytes([2])]
    assert index.longest_prefix(hashes, 4) == blocks[:2]
    assert index.longest_prefix(hashes, 1) == blocks[:1]
    assert index.longest_prefix(hashes[2:], 2) == []
