"""Choosing a backend."""

import os
import subprocess
import sys

import pytest
import torch

import rollout_kernels as rk
from rollout_kernels import reference
from rollout_kernels.cpu.build import openmp_runtimes
from rollout_kernels.cpu.ops import CpuKernels
from rollout_kernels.dispatch import backend_for
from tests.support.kernels import assert_close, randn


def test_settings_choose_the_backend_and_are_restored() -> None:
    x = randn(2, 3)
    with rk.use_backend("auto"):
        assert isinstance(backend_for(x), CpuKernels)
        with rk.use_backend("reference"):
            assert backend_for(x) is reference
            with rk.use_backend("cpu"):
                assert isinstance(backend_for(x), CpuKernels)
            assert backend_for(x) is reference
        with pytest.raises(KeyError), rk.use_backend("reference"):
            raise KeyError
        assert isinstance(backend_for(x), CpuKernels)


def test_float64_is_always_the_reference() -> None:
    with rk.use_backend("cpu"):
        assert backend_for(randn(2, dtype=torch.float64)) is reference


def test_float16_is_computed_by_the_reference_and_has_no_cpu_kernels() -> None:
    x, weight = randn(3, 40, dtype=torch.float16, seed=1), randn(8, 40, dtype=torch.float16, seed=2)
    heads = weight.view(8, 2, 20)
    calls = {
        "linear": lambda: rk.linear(x, weight),
        "rms_norm": lambda: rk.rms_norm(x, weight[0].contiguous(), 1e-5)[0],
        "silu_and_mul": lambda: rk.silu_and_mul(x),
        "varlen_attention": lambda: rk.varlen_attention(heads, heads, heads, torch.tensor([0, 5, 8]).int(), 0.3),
        "embedding": lambda: rk.embedding(torch.tensor([2, 0]), weight),
        "linear_silu_and_mul": lambda: rk.linear_silu_and_mul(x, weight),
        "lora_shrink": lambda: rk.lora_shrink(x, weight[None], torch.zeros(3, dtype=torch.int32)),
    }
    for name, call in calls.items():
        with rk.use_backend("reference"):
            half = call()
        assert half.isfinite().all() and half.abs().sum() > 0, name
        with pytest.raises(TypeError, match=r"torch.float16"), rk.use_backend("cpu"):
            call()
    with rk.use_backend("reference"):
        assert_close(rk.linear(x, weight), x.double() @ weight.double().T, 2**-11 + 4e-6)


def test_unknown_settings_and_devices_are_named() -> None:
    with pytest.raises(ValueError, match=r"backend='gpu' is not valid: .* one of 'auto', 'cpu', 'triton', 'reference'"):
        rk.set_backend("gpu")
    with pytest.raises(
        ValueError,
        match=r"no kernels for device 'meta' with backend 'auto'; there are: cpu with auto, .*, cuda with triton",
    ):
        rk.linear(torch.empty(1, 2, device="meta"), torch.empty(3, 2, device="meta"))


def test_info_names_compiler_library_and_the_one_openmp_runtime() -> None:
    rk.linear(randn(1, 2), randn(1, 2))
    info = rk.backend_info()
    assert info["cpu"] == "cpu"
    assert str(info["library"]).endswith("rollout_kernels.so")
    assert info["openmp"] == openmp_runtimes()
    with rk.use_backend("reference"):
        assert rk.backend_info()["cpu"] == "reference"


def run_python(code: str, **environment: str) -> str:
    paths = [path for path in sys.path if path]
    script = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_kernels_and_torch_share_one_openmp_runtime() -> None:
    """In a process of its own: here another package may have brought one along."""
    code = """
import os, torch
import rollout_kernels as rk
from rollout_kernels.cpu.build import openmp_runtimes
rk.set_backend("cpu")
rk.linear(torch.ones(1, 2), torch.ones(1, 2))
print(len(openmp_runtimes()), openmp_runtimes()[0].startswith(os.path.dirname(torch.__file__)))
"""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "ROLLOUT_CACHE") if name in os.environ}
    assert run_python(code, **environment).split() == ["1", "True"]


def test_without_a_compiler_the_reference_serves_with_one_warning(tmp_path) -> None:
    code = """
import warnings, torch
import rollout_kernels as rk
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    for _ in range(3):
        assert rk.linear(x, x).tolist() == [[3.0, 3.0], [3.0, 3.0]]
        rk.silu_and_mul(torch.ones(1, 2))
    rk.set_backend("auto")
    rk.linear(x, x)
print(len(caught), caught[0].category.__name__, rk.backend_info()["cpu"])
print(caught[0].message)
rk.set_backend("cpu")
try:
    rk.linear(x, x)
except rk.BuildError as error:
    print(error)
"""
    lines = run_python(code, PATH=str(tmp_path), ROLLOUT_CACHE=str(tmp_path), HOME=str(tmp_path)).splitlines()
    assert lines[0] == "1 RuntimeWarning reference"
    assert "no GNU C++ compiler (g++) on the path: install g++, or set ROLLOUT_CXX" in lines[1]
    assert "no GNU C++ compiler" in lines[2]


def test_triton_on_cpu_tensors_needs_the_interpreter() -> None:
    code = """
import torch, rollout_kernels as rk
rk.set_backend("triton")
try:
    rk.silu_and_mul(torch.ones(1, 2))
except ValueError as error:
    print(error)
"""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    assert "set TRITON_INTERPRET=1 before Python starts" in run_python(code, **environment)
