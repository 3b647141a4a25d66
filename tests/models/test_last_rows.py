"""Asked for the last rows alone, a model returns the bits that it has for them among all rows."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout import LLM
from rollout.worker.batch import ForwardBatch, LastRows, PagedContext
from rollout_kernels import KVCache, kv_cache_shapes
from tests.support.kernels import assert_same_bits
from tests.support.tiny import make_tiny_llama


def test_the_last_rows_have_the_bits_that_they_have_among_all(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    model = llm.collective_rpc(lambda worker: worker.model)[0]
    lengths = [5, 1, 9]  # the second sequence draws nothing
    starts = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = torch.randint(0, 131, (15,), generator=torch.Generator().manual_seed(1))
    keys, values = kv_cache_shapes(3, 16, 2, 16, torch.float32)

    def forward(last: LastRows | None) -> tuple[torch.Tensor, list[KVCache]]:
        caches = [KVCache(torch.zeros(keys), torch.zeros(values)) for _ in range(2)]
        paged = PagedContext(
            kv_caches=caches,
            block_tables=torch.tensor([[0], [1], [2]], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            slot_mapping=torch.repeat_interleave(torch.arange(3) * 16, torch.tensor(lengths)) + positions,
            block_size=16,
        )
        with torch.inference_mode():
            return model(ids, positions, ForwardBatch(starts, paged, last_rows=last)), caches

    every, all_caches = forward(None)
    several = ([2, 3, 4, 5, 13, 14], [0, 3, 4, 6])  # of each sequence, as where forced tokens are drawn
    for wanted, first in (([4, 14], [0, 1, 1, 2]), several, ([12, 13, 14], [0, 0, 0, 3])):
        rows = torch.tensor(wanted)
        some, some_caches = forward(LastRows(rows, torch.tensor(first, dtype=torch.int32)))
        assert some.shape == (len(wanted), 64)
        assert_same_bits(some, every[rows])
        for a, b in zip(all_caches, some_caches, strict=True):
            assert_same_bits(a.keys, b.keys)
            assert_same_bits(a.values, b.values)
