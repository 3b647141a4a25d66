"""Every configuration of every GPU kernel compiles for the devices, into what makes it fast. No GPU is needed."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from triton.backends.nvidia.compiler import CUDAOptions

from rollout_kernels.gpu import aot
from rollout_kernels.gpu.aot import CAPABILITIES, KernelReport, all_cases, compile_case

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What scripts/kernel_table.py finds, in a process where kernels are compiled instead of interpreted."""
    file = tmp_path_factory.mktemp("ahead_of_time") / "rows.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "kernel_table.py"), "--json", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert file.is_file(), done.stdout + done.stderr
    return json.loads(file.read_text())


def kernel_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_table", ROOT / "scripts" / "kernel_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_table"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_configuration_compiles_without_spills_within_shared_memory_and_with_tensor_cores(
    rows: list[dict[str, Any]],
) -> None:
    problems = [f"{row['module']}: {row['name']} sm_{row['capability']} {row['problems']}" for row in rows]
    assert [line for line, row in zip(problems, rows, strict=True) if row["problems"]] == []
    wanted = {
        (module, case.name, cap) for module, cases in all_cases().items() for case in cases for cap in CAPABILITIES
    }
    assert {(row["module"], row["name"], row["capability"]) for row in rows} == wanted


@pytest.mark.slow
def test_matrix_products_in_half_precision_use_tensor_cores(rows: list[dict[str, Any]]) -> None:
    """Beside what each case asks for: no product of halves may have been declared to need none."""
    products = [row for row in rows if row["name"].startswith(("linear ", "paged_attention "))]
    halves = [row for row in products if "bf16" in row["name"] or "fp16" in row["name"]]
    assert {row["module"] for row in halves} == {"linear", "attention"}
    for row in halves:
        assert row["report"]["matrix_instruction"] in ("mma", "wgmma"), row["name"]


def test_configurations_have_names_of_their_own() -> None:
    for module, cases in all_cases().items():
        assert [name for name, count in Counter(case.name for case in cases).items() if count > 1] == [], module
        assert cases, module


def test_every_file_with_kernels_lists_configurations_for_each_of_them() -> None:
    folder = Path(aot.__file__).parent
    for path in folder.glob("*.py"):
        launched = path.read_text().count("[grid]") + path.read_text().count("_kernel[")
        assert not launched or path.stem in all_cases(), f"{path.name} launches kernels and lists no configurations"


def test_every_launch_says_what_the_environment_would_decide_otherwise() -> None:
    launches = 0
    for path in Path(aot.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Subscript):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id.endswith("_kernel"):
                unpacked = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
                assert "PINNED" in unpacked, f"{path.name}:{node.lineno}"
                launches += 1
    assert launches == sum(path.read_text().count("_kernel[") for path in Path(aot.__file__).parent.glob("*.py")) > 30
    assert aot.PINNED.keys() <= {field.name for field in fields(CUDAOptions)}


def test_the_document_lists_exactly_the_configurations() -> None:
    listed = kernel_table().listed_cases((ROOT / "docs" / "kernels.md").read_text())
    wanted = [
        (module, case.name, f"sm_{capability}")
        for module, cases in all_cases().items()
        for case in cases
        for capability in CAPABILITIES
    ]
    assert listed == wanted, "run scripts/kernel_table.py"


def test_what_would_be_slow_or_impossible_is_said() -> None:
    def report(**changed: Any) -> KernelReport:
        facts = {"registers": 64, "spill_bytes": 0, "shared_bytes": 1024, "matrix_instruction": "mma"}
        return KernelReport("x", 80, **(facts | changed), num_warps=4, num_stages=3)

    assert report().problems(True) == []
    assert report(matrix_instruction="none").problems(False) == []
    assert report(matrix_instruction="none").problems(True) == ["uses no tensor cores"]
    assert report(spill_bytes=8).problems(False) == ["spills 8 bytes of registers"]
    assert report(shared_bytes=166912).problems(False) == []
    assert report(shared_bytes=166913).problems(False) == ["needs 166913 bytes of shared memory of 166912"]


def test_resource_usage_and_instructions_are_read_from_what_the_tools_print() -> None:
    text = "Fatbin elf code:\n Function f:\n  REG:40 STACK:24 SHARED:0 LOCAL:0 CONSTANT[0]:428 TEXTURE:0 SURFACE:0"
    usage = aot.parse_resource_usage(text)
    assert (usage["REG"], usage["STACK"], usage["CONSTANT[0]"]) == (40, 24, 428)
    with pytest.raises(ValueError, match="no resource usage"):
        aot.parse_resource_usage("cuobjdump: no kernels")
    assert aot.matrix_instruction("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16") == "wgmma"
    assert aot.matrix_instruction("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == "mma"
    assert aot.matrix_instruction("fma.rn.f32 %f1, %f2") == "none"


def test_nothing_is_compiled_in_the_interpreter() -> None:
    case = next(iter(all_cases().values()))[0]
    with pytest.raises(RuntimeError, match="cannot be compiled under TRITON_INTERPRET=1"):
        compile_case(case, 80)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"signature": {"ids": "*i64"}}, "but the kernel's parameters are"),
        (lambda case: {"constants": {}}, "gives values for"),
        (lambda case: {"divisible_by_16": ("BLOCK",)}, "no runtime parameters"),
    ],
)
def test_a_case_that_does_not_fit_its_kernel_is_refused(change: Callable[..., dict[str, Any]], message: str) -> None:
    case = all_cases()["embedding"][0]
    with pytest.raises(ValueError, match=message):
        aot._check_signature(replace(case, **change(case)))
