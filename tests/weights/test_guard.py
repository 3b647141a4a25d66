"""The guard over shared parameters: which changes it sees, with real optimisers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollout.errors import StaleWeightsError
from rollout.weights.guard import SharedWeightsGuard, shared_versions


def _shared(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, SharedWeightsGuard]:
    torch.manual_seed(0)
    model = nn.Linear(48, 96, dtype=dtype)
    return model, SharedWeightsGuard(dict(model.named_parameters()))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_nothing_changed_passes():
    model, guard = _shared()
    model(torch.randn(2, 48)).sum().backward()
    assert guard.changed() == []
    guard.check()
    guard.check_counters()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_step_is_refused_until_a_new_guard(optimizer: type[torch.optim.SGD], foreach: bool):
    model, guard = _shared()
    before = shared_versions(model.parameters())
    _step(model, optimizer(model.parameters(), lr=1e-3, foreach=foreach))
    assert all(now > then for now, then in zip(shared_versions(model.parameters()), before, strict=True))
    assert guard.changed() == ["weight", "bias"]
    for check in (guard.check, guard.check_counters):
        with pytest.raises(StaleWeightsError, match=r"2 of 2 parameters .*\(first: weight\).*policy_update"):
            check()
    SharedWeightsGuard(dict(model.named_parameters())).check()


def test_a_fused_optimizer_step_escapes_the_counters_and_not_the_probes():
    model, guard = _shared()
    _step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    assert guard.changed() == ["weight", "bias"]


def test_an_edit_through_data_escapes_the_counters_and_not_the_probes():
    model, guard = _shared()
    before = shared_versions(model.parameters())
    model.weight.data.mul_(1.5)
    assert shared_versions(model.parameters()) == before
    guard.check_counters()
    with pytest.raises(StaleWeightsError, match="1 of 2"):
        guard.check()


def test_a_change_of_one_name_is_named_through_views_and_no_grad():
    model, guard = _shared()
    with torch.no_grad():
        model.bias[3:5] = 7
    assert guard.changed() == ["bias"]


def test_a_state_dict_watches_the_parameters_it_was_made_from():
    model, _ = _shared()
    guard = SharedWeightsGuard(model.state_dict())
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert guard.changed() == ["weight", "bias"]


def test_writing_the_same_values_still_counts_as_a_change():
    model, guard = _shared()
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
    assert guard.changed() == ["weight"]


def test_tensors_of_any_size_are_probed():
    tensors = {
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0),
        "wide": torch.zeros(1, 100_000),
        "tall": torch.zeros(100_000, 1),
        "deep": torch.zeros(3, 5, 4000),
    }
    guard = SharedWeightsGuard(tensors)
    assert guard.names == tuple(tensors)
    for tensor in tensors.values():
        tensor.data.add_(1)
    assert guard.changed() == ["scalar", "wide", "tall", "deep"]


def test_inference_tensors_are_watched_by_probes_alone():
    with torch.inference_mode():
        tensor = torch.zeros(8)
    guard = SharedWeightsGuard({"weight": tensor})
    guard.check()
    with torch.inference_mode():
        tensor.add_(1)
    assert guard.changed() == ["weight"]


def test_a_guard_over_nothing_always_passes():
    guard = SharedWeightsGuard({})
    guard.check()
    guard.check_counters()
    assert guard.names == ()


def test_of_parameters_in_one_storage_the_one_that_changed_is_named_first():
    fused = torch.randn(96, 48)  # torch counts changes of both halves together
    halves = {"gate": nn.Parameter(fused[:48], False), "up": nn.Parameter(fused[48:], False)}
    guard = SharedWeightsGuard(halves)
    halves["up"].mul_(1.01)
    assert guard.changed() == ["up", "gate"]
    for check in (guard.check, guard.check_counters):
        with pytest.raises(StaleWeightsError, match=r"2 of 2 parameters .*\(first: up\)"):
            check()
