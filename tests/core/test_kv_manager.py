import pytest

from rollout.core.kv_manager import KVManager
from rollout.request import Request
from tests.support.core_requests import make_family, make_request


def ref_counts(kv: KVManager) -> dict[int, int]:
    return {block.block_id: block.ref_count for block in kv.pool.blocks if block.ref_count}


def free_ids(kv: KVManager) -> list[int]:
    return [block.block_id for block in kv.pool.free_queue]


def computed(kv: KVManager, request: Request, num_new: int) -> list[tuple[int, int]]:
    """Allocates and, as after a step, publishes; returns the copies."""
    copies: list[tuple[int, int]] = []
    assert kv.allocate(request, num_new, copies)
    kv.end_step()
    request.num_computed_tokens += num_new
    kv.publish(request)
    return copies


def admitted(kv: KVManager, request: Request, num_new: int) -> list[int]:
    """Looks up, admits and computes; returns the ids of the blocks that were hit."""
    hits = kv.cached_prefix(request, (request.num_tokens - 1) // kv.block_size)
    kv.admit(request, hits)
    request.num_computed_tokens = len(hits) * kv.block_size
    computed(kv, request, num_new)
    return [block.block_id for block in hits]


def test_slots_are_allocated_only_for_what_is_scheduled():
    kv = KVManager(8, 4, enable_prefix_caching=True)
    request = make_request("a", range(11))
    kv.admit(request, [])
    computed(kv, request, 3)
    assert kv.block_ids(request) == [0]
    assert kv.slots([request]) == (4, 3)
    computed(kv, request, 2)
    assert kv.block_ids(request) == [0, 1]
    assert kv.slots([request]) == (8, 5)
    assert not kv.allocate(request, 28, [])
    assert kv.block_ids(request) == [0, 1]
    kv.check_integrity()
    kv.forget(request)
    kv.forget(request)
    assert free_ids(kv) == [1, 2, 3, 4, 5, 6, 7, 0]  # 0 holds a full block that may be hit again


def test_a_prompt_is_hit_up_to_its_last_token():
    kv = KVManager(8, 4, enable_prefix_caching=True)
    first = make_request("a", range(12))
    assert admitted(kv, first, 12) == []
    assert kv.block_ids(first) == [0, 1, 2]
    same = make_request("b", range(12))
    assert admitted(kv, same, 4) == [0, 1]  # the third would leave no token to compute
    assert kv.block_ids(same) == [0, 1, 2]  # and once computed, its content was there already
    assert ref_counts(kv) == {0: 2, 1: 2, 2: 2}
    assert free_ids(kv)[0] == 3
    longer = make_request("c", [*range(12), 99])
    assert admitted(kv, longer, 1) == [0, 1, 2]
    other = make_request("d", [*range(4), 77, *range(5, 12)])
    assert admitted(kv, other, 8) == [0]
    kv.check_integrity()


@pytest.mark.parametrize("salts", [("x", None), (None, "x"), ("x", "y")])
def test_a_salt_separates(salts: tuple[str | None, str | None]):
    kv = KVManager(8, 4, enable_prefix_caching=True)
    assert admitted(kv, make_request("a", range(9), cache_salt=salts[0]), 9) == []
    assert admitted(kv, make_request("b", range(9), cache_salt=salts[1]), 9) == []
    assert admitted(kv, make_request("c", range(9), cache_salt=salts[1]), 1) == [3, 4]


def test_leaves_are_evicted_before_their_roots():
    kv = KVManager(6, 4, enable_prefix_caching=True)
    trunk = make_request("a", range(8))
    admitted(kv, trunk, 8)
    branches = [make_request(name, [*range(8), *[value] * 4, 0]) for name, value in (("b", 50), ("c", 60))]
    for branch in branches:
        assert admitted(kv, branch, 4) == [0, 1]
    assert [kv.block_ids(branch) for branch in branches] == [[0, 1, 2], [0, 1, 3]]
    for request in (trunk, *branches):
        kv.forget(request)
    assert free_ids(kv) == [4, 5, 2, 3, 1, 0]
    survivors: list[int] = []
    probe = make_request("p", [*range(8), *[60] * 4, 0])
    for _ in range(6):
        kv.pool.take()
        survivors.append(len(kv.cached_prefix(probe, 3)))
    assert survivors == [3, 3, 3, 2, 1, 0]


def test_forks_share_every_block_and_copy_the_partial_one_on_the_first_write():
    kv = KVManager(8, 4, enable_prefix_caching=True)
    leader, *siblings = make_family("a", range(6), n=3)
    admitted(kv, leader, 6)
    for sibling in siblings:
        kv.fork(leader, sibling)
        sibling.num_computed_tokens = 6
    assert ref_counts(kv) == {0: 3, 1: 3}
    assert kv.slots([leader, *siblings]) == (8, 6)
    copies: list[tuple[int, int]] = []
    for request in (leader, *siblings):
        assert kv.allocate(request, 1, copies)
    assert copies == [(1, 2), (1, 3)]  # the last one writes in place
    assert [kv.block_ids(request) for request in (leader, *siblings)] == [[0, 2], [0, 3], [0, 1]]
    assert ref_counts(kv) == {0: 3, 1: 3, 2: 1, 3: 1}  # both copies hold their source
    kv.check_integrity()
    kv.end_step()
    assert ref_counts(kv) == {0: 3, 1: 1, 2: 1, 3: 1}
    kv.check_integrity()


@pytest.mark.parametrize("parent_ends", [False, True])
@pytest.mark.parametrize("num_tokens", [5, 6, 8, 9])
def test_a_fork_of_a_leading_part_never_writes_into_the_parents_tokens(num_tokens: int, parent_ends: bool):
    kv = KVManager(8, 4, enable_prefix_caching=True)
    parent, child = make_request("a", range(11)), make_request("b", [*range(num_tokens), 77, 78])
    admitted(kv, parent, 11)
    assert kv.may_be_forked(parent)
    kv.fork(parent, child, num_tokens)
    child.num_computed_tokens = num_tokens
    num_shared = -(-num_tokens // 4)
    assert kv.block_ids(child) == [0, 1, 2][:num_shared]
    kv.check_integrity()
    if parent_ends:
        kv.forget(parent)
    copies: list[tuple[int, int]] = []
    assert kv.allocate(child, 2, copies)
    # Blocks 0 and 1 are full and hittable, 2 is the parent's partial one: written in place once the parent is gone.
    needs_copy = num_tokens % 4 and (num_tokens < 8 or not parent_ends)
    assert copies == ([(num_shared - 1, 2 if parent_ends else 3)] if needs_copy else [])
    kv.check_integrity()
    kv.end_step()
    child.num_computed_tokens += 2
    kv.publish(child)
    kv.check_integrity()
    hits = kv.cached_prefix(make_request("c", range(12)), 2)
    assert [block.block_id for block in hits] == [0, 1]  # what the parent has published is still there
    kv.forget(parent)
    kv.forget(child)
    kv.check_integrity()
    assert kv.pool.num_free == 8


def test_a_copys_source_is_not_handed_out_in_the_same_step():
    kv = KVManager(4, 4, enable_prefix_caching=False)
    leader, sibling = make_family("a", range(2), n=2)
    admitted(kv, leader, 2)
    kv.fork(leader, sibling)
    sibling.num_computed_tokens = 2
    copies: list[tuple[int, int]] = []
    assert kv.allocate(leader, 1, copies)
    kv.release(sibling)  # preempted in the same schedule
    assert copies == [(0, 1)]
    assert free_ids(kv) == [2, 3]
    kv.end_step()
    assert free_ids(kv) == [0, 2, 3]
    kv.check_integrity()


def test_swapping_out_and_in_keeps_what_is_still_hittable():
    kv = KVManager(6, 4, enable_prefix_caching=True, num_host_blocks=3)
    request = make_request("a", range(10))
    admitted(kv, request, 10)
    assert kv.swap_out(request) == [(0, 0), (1, 1), (2, 2)]
    assert kv.host_pool.num_free == 0
    other = make_request("b", [90])
    admitted(kv, other, 1)
    assert kv.block_ids(other) == [2]  # the partial block, worth nothing once it was swapped out
    assert kv.swap_out(other) is None  # no host block is left
    kv.check_integrity()
    taken = [kv.pool.take() for _ in range(4)]
    assert [block.block_id for block in taken] == [3, 4, 5, 1]  # evicts block 1, the leaf; block 0 survives
    for block in taken[:3]:
        kv.pool.release(block)
    hits = kv.cached_prefix(request, 2)
    assert [block.block_id for block in hits] == [0]
    assert kv.swap_in(request, hits) == [(1, 5), (2, 4)]
    assert kv.block_ids(request) == [0, 5, 4]
    assert kv.host_pool.num_free == 3
    kv.publish(request)
    assert {block.block_id for _, block in kv.pool.index.items()} == {0, 5}


def test_a_policy_version_ends_every_hit_even_when_it_comes_back():
    # case SW-03, WS-02
    kv = KVManager(6, 4, enable_prefix_caching=True)
    first = make_request("a", range(9))
    admitted(kv, first, 9)
    assert not kv.reset_prefix_cache()  # in use
    assert len(kv.pool.index) == 2
    waiting = make_request("b", range(9))
    assert len(kv.cached_prefix(waiting, 2)) == 2
    kv.forget(first)
    kv.set_policy_version(1)
    assert kv.cached_prefix(waiting, 2) == []
    kv.set_policy_version(0)
    assert kv.cached_prefix(waiting, 2) == []
    assert admitted(kv, waiting, 9) == []
    assert len(kv.cached_prefix(make_request("c", range(9)), 2)) == 2
    kv.forget(waiting)
    assert kv.reset_prefix_cache()
    assert kv.cached_prefix(make_request("c", range(9)), 2) == []
    kv.check_integrity()


def test_withdrawn_kv_is_never_hit():
    # case SP-05
    kv = KVManager(6, 4, enable_prefix_caching=True)
    request = make_request("a", range(12))
    admitted(kv, request, 8)
    kv.withdraw(request)
    computed(kv, request, 4)
    assert len(kv.pool.index) == 0
    kv.check_integrity()


def test_without_caching_nothing_is_published():
    kv = KVManager(6, 4, enable_prefix_caching=False)
    assert admitted(kv, make_request("a", range(9)), 9) == []
    assert admitted(kv, make_request("b", range(9)), 9) == []
    assert len(kv.pool.index) == 0


def test_kv_from_before_a_policy_version_is_kept_apart_until_it_is_released():
    # case WS-01, WS-02
    kv = KVManager(8, 4, enable_prefix_caching=True, num_host_blocks=4)
    kept, fresh = make_request("a", range(12)), make_request("b", range(12))
    admitted(kv, kept, 6)
    kv.set_policy_version(1)
    assert kv.holds_older_kv(kept)
    assert kv.hashes_filled(kept, 6, 12) == []  # nobody waits for a block that will not be hittable
    computed(kv, kept, 6)
    assert len(kv.pool.index) == 0
    fork = make_request("c", range(12))
    kv.fork(kept, fork)
    assert kv.holds_older_kv(fork)
    kv.forget(fork)
    admitted(kv, fresh, 12)
    assert len(kv.pool.index) == 3
    assert not kv.holds_older_kv(fresh)
    kv.swap_out(kept)
    assert kv.holds_older_kv(kept)
    assert kv.cached_prefix(kept, 3) == []  # its own KV comes back, not a mixture
    assert len(kv.swap_in(kept, [])) == 3
    kv.check_integrity()
    kv.release(kept)
    assert not kv.holds_older_kv(kept)
    assert len(kv.cached_prefix(kept, 3)) == 3
