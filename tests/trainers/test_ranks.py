"""What the processes of a run tell each other; and that one process alone is the same thing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_trainers.distributed_config import DistributedSection
from rollout_trainers.launch import joined
from rollout_trainers.losses import Denominators, log_ratios
from rollout_trainers.objective import micro_batch_loss
from rollout_trainers.packing import PackedBatch
from rollout_trainers.padding import pad
from rollout_trainers.ranks import Ranks
from tests.support.data_parallel_ranks import configuration, loss_and_gradient
from tests.support.distributed import run_ranks

ROWS = ([1, 1, 1, 1], [3])
DENOMINATORS = Denominators(num_tokens=5, num_sequences=2, normalizer=4)
RIGHT = {"token_mean": 1.4, "sequence_mean": 2.0, "constant": 0.875}  # loss and gradient


@pytest.mark.parametrize(("aggregation", "right"), RIGHT.items())
@pytest.mark.parametrize("budget", [1, 100])
def test_the_loss_is_the_same_in_one_micro_batch_or_two(aggregation: str, right: float, budget: int):  # case TR-03
    assert loss_and_gradient(ROWS, aggregation, budget, Ranks()) == pytest.approx((right, right))


@pytest.mark.slow
def test_three_ranks(tmp_path: Path):  # case TR-03, with a third rank that has nothing
    run_ranks("tests.support.data_parallel_ranks:between_ranks", tmp_path, num_ranks=3)
    found = [json.loads((tmp_path / f"between.rank{rank}.json").read_text()) for rank in range(3)]
    for each in found:
        assert each["parts"] == [[0, 1], [2, 3], [4, 5, 6]]
        assert (each["sum"], each["most"], each["from main"]) == ([3, 30], 0, {"rank": 0})
        assert each["all"] == list("ababab")
        assert each["added"] == [[6.0] * 4, [3.0, 3.0], [3.0, 3.0]]
        assert each["shared"] == [7.0] * 3
        for aggregation, right in RIGHT.items():
            assert each["losses"][aggregation] == pytest.approx([right, right])
    for each in found[:2]:
        assert each["died"].startswith("RankFailedError: another rank has ended or does not answer: ")
    assert [each["own"] for each in found] == [[], ["a", "b"], ["a", "b", "a", "b"]]


def test_one_process_has_everything_and_waits_for_nobody():
    ranks, tensor = Ranks(), torch.ones(3)
    ranks.add_up([tensor])
    ranks.copy_from_main(tensor)
    assert torch.equal(tensor, torch.ones(3))
    assert ranks.is_main and ranks.part(5) == range(5)
    assert ranks.gather("a") == ["a"] and ranks.gather_all([1, 2]) == ([1, 2], slice(0, 2))
    assert ranks.sum(1, 2) == [1, 2] and ranks.most(4) == 4 and ranks.from_main("b") == "b"
    assert ranks.lead(lambda: "result") == "result"
    with pytest.raises(KeyError, match="mine"), ranks.together(), ranks.calling("step", 1):
        raise KeyError("mine")


@given(st.integers(0, 50), st.integers(1, 9))
def test_the_ranks_shares_are_all_places_once_and_in_order(count: int, size: int):
    shares: list[Sequence[int]] = []
    for rank in range(size):
        ranks = Ranks()
        ranks.rank, ranks.size = rank, size
        shares.append(ranks.part(count))
    assert [place for share in shares for place in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("ratio", ["token", "sequence", "geometric_mean", "gspo_token"])
def test_a_batch_that_fills_up_has_a_gradient_of_zeros(ratio: str):
    batch = PackedBatch.filler()
    assert pad(batch).rows.shape == (0,) and pad(batch).input_ids.shape == (1, 1)
    weight = torch.ones(2, requires_grad=True)
    logprobs = (torch.zeros(0, 2) * weight).sum(-1)
    assert log_ratios(logprobs, batch.old_logprobs, batch.lengths, ratio).shape == (0,)  # type: ignore[arg-type]
    config = configuration(Path("none"), Path("none"), f"loss.ratio={ratio}", "loss.kl_coefficient=0.1")
    micro_batch_loss(logprobs, logprobs.detach(), batch, DENOMINATORS, config.loss).loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 0.0]


def test_processes_and_recipe_that_do_not_fit_are_refused(tmp_path: Path):
    alone = configuration(tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"distributed.kind='none' is not valid in 2 processes"):
        joined(alone, {"WORLD_SIZE": "2"}).__enter__()
    ddp = configuration(tmp_path, tmp_path, "distributed.kind=ddp")
    with pytest.raises(ValueError, match=r"'ddp' is not valid without RANK in the environment"):
        joined(ddp, {}).__enter__()
    with pytest.raises(ValueError, match=r"prompts_per_step=5 is not valid: it must be at least 6"):
        joined(ddp, {"WORLD_SIZE": "6"}).__enter__()
    with pytest.raises(ValueError, match=r"distributed.persistent_elements=3 is not valid: it must be 0"):
        DistributedSection("ddp", persistent_elements=3)
    with pytest.raises(ValueError, match=r"distributed.timeout=0 is not valid"):
        DistributedSection("ddp", timeout=0)
    with pytest.raises(ValueError, match=r"distributed.kind='fsdp1' is not valid"):
        configuration(tmp_path, tmp_path, "distributed.kind=fsdp1")
