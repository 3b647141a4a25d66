"""Bfloat16 with the tile registers of Intel's AMX and without them: either way right, and the same bits for a row
whatever stands beside it."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import torch

import rollout_kernels as rk
from rollout_kernels import operations
from rollout_kernels.cpu.build import SOURCE_DIR, compile_flags, find_compiler
from rollout_kernels.cpu.ops import CpuKernels
from rollout_kernels.reference.kv_cache import read_kv, sequence_slots
from tests.kernels.test_attention import Sequences, exact_attention
from tests.support.kernels import assert_close, assert_same_bits, num_threads, randn

CPU = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for instruction sets of x86-64")


@pytest.fixture(scope="module", params=["this machine", "without tiles", "without AVX512"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    """The CPU's kernels, with products and attention compiled for another instruction set."""
    kernels = CpuKernels()
    if request.param == "this machine":
        return kernels
    flags = [flag for flag in compile_flags() if not flag.startswith(("-march", "-O"))]
    if request.param == "without tiles":
        if "amx_bf16" not in CPU:
            pytest.skip("this CPU has no amx_bf16: its own kernels are those without tiles")
        flags += ["-march=native", "-mno-amx-tile", "-mno-amx-bf16"]
    elif all(f" {flag} " in CPU for flag in ("avx2", "fma", "bmi2")):
        flags += ["-march=x86-64-v3"]
    else:
        pytest.skip("this CPU has no AVX2")
    library = tmp_path_factory.mktemp("kernels") / "other.so"
    sources = [str(SOURCE_DIR / name) for name in ("gemm.cpp", "attention.cpp", "threads.cpp")]
    subprocess.run([find_compiler().path, *flags, "-O1", "-shared", *sources, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in ("linear", "linear_silu_and_mul", "paged_attention"):
        function, known = getattr(loaded, f"rk_{name}"), vars(kernels)[f"_{name}"]
        function.argtypes, function.restype = known.argtypes, known.restype
        setattr(kernels, f"_{name}", function)
    return kernels


@pytest.fixture(autouse=True)
def chosen(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "backend_for", lambda tensor: kernels)


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 32, 32), (40, 48, 96), (33, 1000, 576), (600, 70, 257), (1100, 96, 576)]
)
def test_products_equal_float64_and_a_row_is_alone(rows: int, columns: int, depth: int) -> None:
    x, weight = randn(rows, depth, dtype=torch.bfloat16, seed=1), randn(columns, depth, dtype=torch.bfloat16, seed=2)
    bias = randn(columns, dtype=torch.bfloat16, seed=3)
    whole = rk.linear(x, weight, bias, out_dtype=torch.float32)
    assert_close(whole, x.double() @ weight.double().T + bias.double(), 1e-5)
    assert_close(rk.linear(x, weight, bias), whole.double(), 1e-2)
    for first, end in ((0, 1), (rows - 1, rows), (rows // 3, rows // 2), (0, min(rows, 37))):
        for threads in (1, 2):
            with num_threads(threads):
                part = rk.linear(x[first:end], weight, bias, out_dtype=torch.float32)
            assert_same_bits(part, whole[first:end])


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight = randn(50, 100, dtype=torch.bfloat16, seed=4), randn(40, 100, dtype=torch.bfloat16, seed=5)
    clean = rk.linear(x, weight)
    x[7, 3], x[20, 99] = torch.nan, torch.inf
    out = rk.linear(x, weight)
    assert out[7].isnan().all() and not out[20].isfinite().any()
    others = [row for row in range(50) if row not in (7, 20)]
    assert_same_bits(out[others], clean[others])


def test_a_gated_product_is_its_parts() -> None:
    x, weight = randn(45, 96, dtype=torch.bfloat16, seed=6), randn(2 * 90, 96, dtype=torch.bfloat16, seed=7)
    gated = rk.linear_silu_and_mul(x, weight)
    assert_same_bits(gated, rk.silu_and_mul(rk.linear(x, weight)))
    assert_same_bits(rk.linear_silu_and_mul(x[30:31], weight), gated[30:31])


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 96), (20, 1, 32), (2, 1, 128), (2, 2, 256)])
def test_attention_equals_float64_and_prefill_is_decode(heads: tuple[int, int, int]) -> None:
    lengths = [1, 16, 63, 65, 200]
    sequences = Sequences(lengths, heads, torch.bfloat16, 16)
    out, _ = sequences.attend([(s, 0, n) for s, n in enumerate(lengths)])
    last, _ = sequences.attend([(s, n - 1, n) for s, n in enumerate(lengths)])
    ends = torch.tensor(lengths).cumsum(0)
    assert_same_bits(last, out[ends - 1])
    for s, n in enumerate(lengths):
        own = out[ends[s] - n : ends[s]]
        expected, _ = exact_attention(sequences.q[s], sequences.k[s], sequences.v[s], sequences.scale)
        assert_close(own, expected, 1e-2)
        chunks = [sequences.attend([(s, first, min(first + 27, n))])[0] for first in range(0, n, 27)]
        assert_same_bits(torch.cat(chunks), own)


def test_int8_keys_and_values_meet_the_same_products() -> None:
    sequences = Sequences([70, 100], (9, 3, 64), torch.bfloat16, 16, torch.int8)
    out, _ = sequences.attend([(0, 0, 70), (1, 0, 100)])
    assert_same_bits(sequences.attend([(1, 99, 100)])[0], out[-1:])
    keys, values = read_kv(sequences.cache, sequence_slots(sequences.tables[1], 100, 16), 64)
    assert_close(out[70:], exact_attention(sequences.q[1], keys, values, sequences.scale)[0], 1e-2)
