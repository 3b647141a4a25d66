"""The ceiling of the matrix products: which products count, and how a workload's steps add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout import LLM, SamplingParams
from rollout.commands.roofline import Roofline
from rollout.models.products import matrix_products
from tests.support.tiny import make_tiny_llama

PARAMS = SamplingParams(seed=1, max_tokens=9)
LINEAR = Roofline(rows=(1, 10), body_seconds=[1.0, 10.0], head_seconds=[0.5, 5.0], num_bytes=1, flops_per_row=1)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_every_weight_of_a_product_counts_once(tie: bool, quantization: str | None, tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path, tie=tie, num_layers=3), kv_cache_memory="8MiB", quantization=quantization)
    model = llm.collective_rpc(lambda worker: worker.model)[0]
    *body, head = matrix_products(model)
    assert head.weight is model.output_weight
    projections = [p.numel() for name, p in model.named_parameters() if "proj.weight" in name]
    assert sum(product.weight.numel() for product in body) == sum(projections)
    assert len(body) == 3 * 4  # qkv, o, gate_up, down
    roofline = Roofline.measure(model, rows=(1,))
    copies = [product.holder.int8 for product in (*body, head)]
    read = [copy.values for copy in copies if copy is not None] or [product.weight for product in (*body, head)]
    assert (copies[0] is None) == (quantization is None)
    assert roofline.num_bytes == sum(tensor.nbytes for tensor in read)
    assert roofline.flops_per_row == 2 * (sum(projections) + head.weight.numel())


def test_seconds_are_interpolated_between_measured_rows() -> None:
    uneven = Roofline((1, 2, 4), [1.0, 1.5, 4.0], [0.0, 0.0, 0.0], 1, 1)
    assert [uneven.step_seconds(rows, 0) for rows in (0, 1, 2, 3, 4, 8)] == [0.0, 1.0, 1.5, 2.75, 4.0, 8.0]


def test_a_workload_is_its_different_prompt_tokens_and_its_decode_steps() -> None:
    requests = [
        {"prompt_token_ids": [1, 2, 3, 4], "max_tokens": 3},
        {"prompt_token_ids": [1, 2, 9], "max_tokens": 1},
        {"prompt_token_ids": [5], "max_tokens": 2},
    ]
    # 4 + 1 + 1 prompt tokens and 3 first draws; then 2 rows, then 1
    expected = (6 * 1.0 + 3 * 0.5) + 2 * 1.5 + 1 * 1.5
    assert LINEAR.workload_seconds({"requests": requests}, max_num_seqs=8) == pytest.approx(expected)


def test_a_profile_splits_all_seconds_into_parts(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    with llm.profile() as profiles:
        outputs = llm.generate([[1, 2, 3], [4, 5]], PARAMS, use_tqdm=False)
    (profile,) = profiles
    assert profile.num_tokens == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert sum(profile.parts.values()) == pytest.approx(profile.seconds)
    assert all(seconds > 0 for seconds in profile.parts.values())
    assert sum(profile.share(part) for part in profile.parts) == pytest.approx(1)
    assert llm.generate([[1, 2, 3], [4, 5]], PARAMS)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
