"""The optimiser against torch's own AdamW, its gradient sums against float32, and the schedules by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout_trainers.config import OptimizerSection
from rollout_trainers.optimizer import MasterAdamW, learning_rate

CONFIG = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9)


def parameters(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (7, 5), "vector": (5,)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()
    }


def loss_of(named: dict[str, torch.nn.Parameter], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    inputs = torch.randn(3, 7, generator=generator).to(named["matrix"].dtype)
    return ((inputs @ named["matrix"] + named["vector"]).float() ** 2).mean()


def test_float32_steps_equal_torchs_adamw():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer = MasterAdamW(ours.items(), CONFIG)
    reference = torch.optim.AdamW(
        [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["vector"]], "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
        foreach=False,
    )
    for step in range(5):
        loss_of(ours, step).backward()
        optimizer.step(1e-2)
        loss_of(theirs, step).backward()
        reference.step()
        reference.zero_grad()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_bfloat16_parameters_are_float32_masters_rounded_once():
    named = parameters(torch.bfloat16)
    exact = {name: parameter.detach().float() for name, parameter in named.items()}
    optimizer = MasterAdamW(named.items(), OptimizerSection(learning_rate=1e-4))
    for step in range(3):
        loss_of(named, step).backward()
        assert all(parameter.grad is None for parameter in named.values())
        optimizer.step(1e-4)
    for name, master in optimizer.masters.items():
        assert master.dtype == torch.float32
        assert not torch.equal(master, exact[name])
        assert torch.equal(named[name].detach(), master.to(torch.bfloat16))


def test_updates_below_a_bfloat16_step_add_up():
    parameter = torch.nn.Parameter(torch.ones(1, 4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("weight", parameter)], OptimizerSection(max_grad_norm=1e9))
    for _ in range(100):
        parameter.sum().backward()
        optimizer.step(1e-4)  # each moves the weight by 1e-4; a bfloat16 step at 1 is 4e-3
    assert parameter[0, 0].item() == pytest.approx(1 - 100 * 1e-4, abs=4e-3)
    assert parameter[0, 0].item() != 1.0


def test_gradients_of_several_backward_passes_are_summed_in_float32():
    parameter = torch.nn.Parameter(torch.zeros(1, 2, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("weight", parameter)], CONFIG)
    for value in (256.0, 1.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        (parameter * value).sum().backward()
    gradient = optimizer.masters["weight"].grad
    assert gradient is not None
    assert gradient.tolist() == [[259.0, 259.0]]


def test_clipping_scales_to_the_largest_norm_and_reports_the_norm_before():
    parameter = torch.nn.Parameter(torch.zeros(1, 2))
    optimizer = MasterAdamW([("weight", parameter)], OptimizerSection(max_grad_norm=1.0, epsilon=1.0))
    (parameter * torch.tensor([[3.0, 4.0]])).sum().backward()
    assert optimizer.step(1.0) == pytest.approx(5.0)
    torch.testing.assert_close(parameter.detach(), -torch.tensor([[0.6 / 1.6, 0.8 / 1.8]]))


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing():
    named = parameters(torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = MasterAdamW(named.items(), CONFIG)
    (loss_of(named, 0) * float("nan")).backward()
    with pytest.raises(FloatingPointError, match="norm is nan"):
        optimizer.step(1e-2)
    for name, parameter in named.items():
        assert torch.equal(parameter.detach(), before[name])
    loss_of(named, 0).backward()
    optimizer.step(1e-2)


def test_a_step_without_gradients_is_refused():
    with pytest.raises(ValueError, match="without a gradient"):
        MasterAdamW(parameters(torch.float32).items(), CONFIG).step(1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_bit_for_bit(dtype: torch.dtype):
    unbroken = parameters(dtype)
    first = MasterAdamW(unbroken.items(), CONFIG)
    for step in range(2):
        loss_of(unbroken, step).backward()
        first.step(1e-2)
    state = {
        part: {name: _copy(value) for name, value in values.items()} for part, values in first.state_dict().items()
    }
    for step in range(2, 4):
        loss_of(unbroken, step).backward()
        first.step(1e-2)

    resumed = parameters(dtype, seed=9)
    second = MasterAdamW(resumed.items(), CONFIG)
    second.load_state_dict(state)
    for step in range(2, 4):
        loss_of(resumed, step).backward()
        second.step(1e-2)
    for name in unbroken:
        assert torch.equal(unbroken[name], resumed[name])
        assert torch.equal(first.masters[name], second.masters[name])


def _copy(value):
    return {key: part.clone() for key, part in value.items()} if isinstance(value, dict) else value.clone()


def test_the_state_of_other_parameters_is_refused():
    optimizer = MasterAdamW(parameters(torch.float32).items(), CONFIG)
    with pytest.raises(ValueError, match="first difference: 'matrix'"):
        optimizer.load_state_dict({"masters": {"vector": torch.zeros(5)}, "moments": {}})
    wrong = {"matrix": torch.zeros(5, 7), "vector": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"matrix has shape \(5, 7\) in the checkpoint, not \(7, 5\)"):
        optimizer.load_state_dict({"masters": wrong, "moments": {}})


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_schedules_warm_up_and_fall_to_the_final_fraction(schedule: str, expected: list[float]):
    config = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_steps=2, final_fraction=0.1)  # type: ignore[arg-type]
    rates = [learning_rate(step, 6, config) for step in range(6)]
    assert rates == pytest.approx(expected, abs=1e-6)
    assert learning_rate(6, 6, config) == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_hold_memory_only_until_the_step_is_made(dtype: torch.dtype):
    named = {name: torch.nn.Parameter(torch.ones(64, 64, dtype=dtype)) for name in ("one", "other")}
    optimizer = MasterAdamW(named.items(), CONFIG)
    memory = optimizer.gradient_memory
    assert memory is not None
    for _ in range(2):
        assert memory.resident_bytes() == 0
        for parameter in named.values():
            for _ in range(2):
                (3 * parameter.float()).sum().backward()
        assert memory.resident_bytes() == 2 * 64 * 64 * 4
        assert all((master.grad == 6).all() for master in optimizer.masters.values())  # type: ignore[union-attr]
        optimizer.step(1e-2)
        assert all(master.grad is None for master in optimizer.masters.values())


def test_states_that_were_away_come_back_bit_for_bit_and_training_goes_on():
    def trained(goes_away: bool) -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).to(torch.bfloat16))
        own = torch.nn.Parameter(torch.linspace(1, 2, 5))  # float32: its own master
        optimizer = MasterAdamW([("weight", weight), ("own", own)], CONFIG)
        for _ in range(3):
            if goes_away:
                before = optimizer.masters["weight"].data_ptr()
                optimizer.offload()
                assert optimizer.masters["weight"].data_ptr() != before  # memory of its own
                assert optimizer.masters["own"] is own
                optimizer.fetch()
            (weight.float().square().sum() + own.pow(3).sum()).backward()
            optimizer.step(1e-2)
        return optimizer.state_dict() | {"weight": weight.detach(), "own": own.detach()}

    away, there = trained(True), trained(False)
    assert torch.equal(away["weight"], there["weight"])
    assert torch.equal(away["own"], there["own"])
    for name in ("weight", "own"):
        assert torch.equal(away["masters"][name], there["masters"][name])
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(away["moments"][name][key], there["moments"][name][key])
