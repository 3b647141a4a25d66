import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.core.blocks import BlockPool, FreeQueue


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue]


def test_blocks_are_taken_in_order_and_come_back_to_the_front():
    pool = BlockPool(4, enable_caching=True)
    taken = [pool.take() for _ in range(3)]
    assert [block.block_id for block in taken] == [0, 1, 2]
    assert free_ids(pool) == [3]
    pool.release(taken[1])
    assert free_ids(pool) == [1, 3]
    pool.release(taken[0])
    assert free_ids(pool) == [0, 1, 3]
    assert [block.ref_count for block in pool.blocks] == [0, 0, 1, 0]
    pool.check_integrity({2: 1})


def test_hashed_blocks_wait_at_the_back_and_are_evicted_oldest_first():
    pool = BlockPool(3, enable_caching=True)
    first, second, third = (pool.take() for _ in range(3))
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    for block in (second, first, third):
        pool.release(block)
    assert free_ids(pool) == [2, 1, 0]  # nothing to lose in 2, then least recently used first
    assert pool.take() is third
    assert len(pool.index) == 2
    assert pool.take() is second
    assert pool.index.find(b"second") is None
    assert pool.index.find(b"first") is first
    pool.check_integrity({2: 1, 1: 1})


def test_a_free_block_is_shared_out_of_the_middle_of_the_queue():
    pool = BlockPool(4, enable_caching=True)
    blocks = [pool.take() for _ in range(3)]
    for block in blocks:
        pool.publish(block, bytes([block.block_id]))
        pool.release(block)
    assert free_ids(pool) == [3, 0, 1, 2]
    pool.share(blocks[1])
    pool.share(blocks[1])
    assert free_ids(pool) == [3, 0, 2]
    pool.check_integrity({1: 2})
    pool.release(blocks[1])
    assert free_ids(pool) == [3, 0, 2]
    pool.release(blocks[1])
    assert free_ids(pool) == [3, 0, 2, 1]  # used last, evicted last
    pool.check_integrity({})


def test_publishing_known_content_returns_the_block_that_has_it():
    pool = BlockPool(2, enable_caching=True)
    first, second = pool.take(), pool.take()
    assert pool.publish(first, b"same") is first
    assert pool.publish(second, b"same") is first
    assert second.block_hash is None
    pool.check_integrity({0: 1, 1: 1})


def test_an_empty_pool_raises():
    pool = BlockPool(1, enable_caching=False)
    pool.take()
    with pytest.raises(IndexError, match="no free block is left"):
        pool.take()
    with pytest.raises(AssertionError, match="nobody holds it"):
        BlockPool(1, enable_caching=False).release(pool.blocks[0].__class__(0))


def test_integrity_notices_a_wrong_count_a_lost_block_and_a_broken_link():
    pool = BlockPool(3, enable_caching=True)
    block = pool.take()
    with pytest.raises(AssertionError, match="should be held 2 times"):
        pool.check_integrity({0: 2})
    block.ref_count = 0
    with pytest.raises(AssertionError, match="blocks are lost"):
        pool.check_integrity()
    block.ref_count = 1
    block.block_hash = b"never published"
    with pytest.raises(AssertionError, match="disagree"):
        pool.check_integrity()
    block.block_hash = None
    pool.blocks[1].previous = block
    with pytest.raises(AssertionError, match="linked wrongly"):
        pool.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["back", "front", "pop", "remove"]), st.integers(0, 9)), max_size=60))
def test_the_queue_behaves_like_a_list(operations: list[tuple[str, int]]):
    blocks = BlockPool(10, enable_caching=False).blocks
    for block in blocks:
        block.previous = block.next = block
    queue, model = FreeQueue(), []
    for operation, block_id in operations:
        block = blocks[block_id]
        if operation == "pop" and model:
            assert queue.pop_front() is model.pop(0)
        elif operation == "remove" and block in model:
            queue.remove(block)
            model.remove(block)
        elif operation == "back" and block not in model:
            queue.push_back(block)
            model.append(block)
        elif operation == "front" and block not in model:
            queue.push_front(block)
            model.insert(0, block)
        assert list(queue) == model
        assert len(queue) == len(model)
        queue.check_integrity()
