"""Receipts: what their fingerprints depend on, and that a changed byte is named."""

from __future__ import annotations

import pytest
import torch

from rollout.errors import StaleWeightsError
from rollout.weights.receipt import (
    Receipt,
    changed_tensors,
    combine,
    fingerprint_of,
    fingerprint_tensors,
    make_receipt,
    parameters_fingerprint,
    verify_receipt,
)

TIED = {"lm_head.weight": "embed.weight"}


def _memory() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    parameters = {
        "embed.weight": torch.randn(6, 4, generator=generator).bfloat16(),
        "norm.weight": torch.randn(4, generator=generator).bfloat16(),
    }
    return parameters, {"cos_sin": torch.randn(5, 4, generator=generator)}


def _receipt(version: int = 0, **changes: torch.Tensor) -> Receipt:
    parameters, buffers = _memory()
    for name, tensor in changes.items():
        (buffers if name == "cos_sin" else parameters)[name.replace("__", ".")] = tensor
    return make_receipt(version, parameters, TIED, buffers)


def test_copies_are_part_of_the_fingerprint_and_named_where_they_change():
    parameters, buffers = _memory()
    copies = {"int8.embed.values": torch.arange(64, dtype=torch.uint8)}
    receipt = make_receipt(4, parameters, TIED, buffers, copies=copies)
    plain = make_receipt(4, parameters, TIED, buffers)
    assert receipt.fingerprint != plain.fingerprint
    assert receipt.parameters_fingerprint == plain.parameters_fingerprint
    verify_receipt(receipt, parameters, TIED, buffers, copies)
    assert changed_tensors(receipt, parameters, TIED, buffers) == ["int8.embed.values"]
    copies["int8.embed.values"][5] ^= 1
    with pytest.raises(StaleWeightsError, match=r"1 tensors .*: int8\.embed\.values"):
        verify_receipt(receipt, parameters, TIED, buffers, copies)
    parameters["norm.weight"][0] += 1
    with pytest.raises(StaleWeightsError, match=r"2 tensors .*: norm\.weight, int8\.embed\.values"):
        verify_receipt(receipt, parameters, TIED, buffers, copies)


def test_the_same_memory_gives_the_same_receipt():
    assert _receipt() == _receipt()
    assert len(_receipt().id) == 12
    assert len(_receipt().fingerprint) == 32


def test_the_id_follows_the_version_and_the_fingerprint_does_not():
    assert _receipt(1).id != _receipt(2).id
    assert _receipt(1).fingerprint == _receipt(2).fingerprint


@pytest.mark.parametrize("name", ["embed.weight", "norm.weight", "cos_sin"])
def test_one_flipped_bit_changes_the_fingerprint_and_is_named(name: str):
    parameters, buffers = _memory()
    receipt = make_receipt(4, parameters, TIED, buffers)
    verify_receipt(receipt, parameters, TIED, buffers)
    memory = (buffers if name == "cos_sin" else parameters)[name]
    memory.view(-1).view(torch.uint8)[-1] ^= 1
    assert make_receipt(4, parameters, TIED, buffers).fingerprint != receipt.fingerprint
    expected = sorted([name, "lm_head.weight"]) if name == "embed.weight" else [name]
    assert changed_tensors(receipt, parameters, TIED, buffers) == expected
    with pytest.raises(StaleWeightsError, match=rf"{len(expected)} tensors .*{receipt.id} \(policy 4\): {expected[0]}"):
        verify_receipt(receipt, parameters, TIED, buffers)


def test_a_head_that_is_no_longer_tied_is_found():
    parameters, buffers = _memory()
    receipt = make_receipt(0, parameters, TIED, buffers)
    separate = {**parameters, "lm_head.weight": parameters["embed.weight"].clone()}
    assert changed_tensors(receipt, separate, {}, buffers) == []
    separate["lm_head.weight"] += 1
    assert changed_tensors(receipt, separate, {}, buffers) == ["lm_head.weight"]
    assert changed_tensors(receipt, parameters, {}, buffers) == ["lm_head.weight"]


def test_names_shapes_and_dtypes_are_part_of_the_fingerprint():
    tensor = torch.zeros(4, 2)
    digest = {"a": fingerprint_of(tensor)}
    whole = combine({"a": tensor}, digest)
    assert combine({"b": tensor}, {"b": digest["a"]}) != whole
    assert combine({"a": tensor.view(2, 4)}, digest) != whole
    assert combine({"a": tensor.to(torch.int32)}, digest) != whole
    assert combine({"a": tensor.clone()}, digest) == whole


def test_order_does_not_matter_and_values_that_change_places_do():
    one, two = torch.randn(8), torch.randn(8)
    tensors = {"a": one, "b": two}
    turned = {"b": two, "a": one}
    swapped = {"a": two, "b": one}
    whole = combine(tensors, fingerprint_tensors(tensors))
    assert combine(turned, fingerprint_tensors(turned)) == whole
    assert combine(swapped, fingerprint_tensors(swapped)) != whole


def test_a_fingerprint_sees_logical_order_not_strides():
    matrix = torch.randn(7, 12)
    for view in (matrix.t(), matrix[:, 3:9], matrix[::2], matrix[2], matrix[:, 0]):
        assert fingerprint_of(view) == fingerprint_of(view.clone(memory_format=torch.contiguous_format))
    assert fingerprint_of(matrix.t()) != fingerprint_of(matrix)


def test_a_trainer_in_float32_gets_the_fingerprint_of_a_bfloat16_engine():
    parameters, _ = _memory()
    exact = [(name, tensor.float()) for name, tensor in parameters.items()]
    assert parameters_fingerprint(iter(exact), torch.bfloat16) == _receipt().parameters_fingerprint
    assert parameters_fingerprint(iter(exact), torch.float32) != _receipt().parameters_fingerprint


def test_tied_names_are_in_the_receipt_and_not_in_the_trainers_fingerprint():
    parameters, buffers = _memory()
    untied = make_receipt(0, parameters, {}, buffers)
    assert set(_receipt().tensors) == {"embed.weight", "norm.weight", "lm_head.weight"}
    assert _receipt().parameters_fingerprint == untied.parameters_fingerprint
    assert _receipt().fingerprint != untied.fingerprint
    assert _receipt().num_bytes == untied.num_bytes == 2 * (24 + 4)
