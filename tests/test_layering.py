"""Imports go one way: rollout_kernels <- rollout <- rollout_trainers <- recipes; `rollout.core` knows no tensors."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "rollout_kernels": ROOT / "kernels" / "rollout_kernels",
    "rollout": ROOT / "rollout",
    "rollout_trainers": ROOT / "trainers" / "rollout_trainers",
}
ORDER = tuple(LAYERS)
# The command line is the one place that hands over to a layer above: it starts what the trainers do, by name.
UPWARD_IMPORTS = {
    (ROOT / "rollout/commands/train.py", "rollout_trainers.run"),
    (ROOT / "rollout/commands/report.py", "rollout_trainers.report"),
    (ROOT / "rollout/commands/report.py", "rollout_trainers.comparison"),
    (ROOT / "rollout/commands/dashboard.py", "rollout_trainers.workspace"),
    (ROOT / "rollout/commands/export.py", "rollout_trainers.export"),
}


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that the file imports anywhere, in functions too, as an absolute name."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute in this project"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def test_the_parser_sees_imports_inside_functions(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text("import a.b\ndef f():\n    from c import d\n    if f:\n        import e\n")
    assert set(imported_modules(file)) == {"a.b", "c", "c.d", "e"}


@pytest.mark.parametrize("layer", ORDER)
def test_no_layer_imports_one_above_it(layer: str) -> None:
    above = (*ORDER[ORDER.index(layer) + 1 :], "recipes", "tests")
    files = sources(LAYERS[layer])
    assert files, f"{layer} has no sources"
    upward = {
        (path, module)
        for path in files
        for module in imported_modules(path)
        if module.split(".")[0] in above and (path, module.rpartition(".")[0]) not in UPWARD_IMPORTS
    }
    assert upward - UPWARD_IMPORTS == set()


def test_nobody_imports_recipes() -> None:
    everything = [path for folder in (*LAYERS.values(), ROOT / "recipes", ROOT / "scripts") for path in sources(folder)]
    assert [path for path in everything for module in imported_modules(path) if module.split(".")[0] == "recipes"] == []


def test_the_folders_at_the_top_are_no_packages() -> None:
    for folder in ("kernels", "trainers", "recipes"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_the_core_names_no_tensor_library() -> None:
    allowed_from_rollout = {"rollout.core", "rollout.request", "rollout.sampling_params", "rollout.errors"}
    allowed_from_rollout |= {"rollout.sampling.state", "rollout.sampling_options"}
    for path in sources(ROOT / "rollout" / "core"):
        for module in imported_modules(path):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or top in {"msgspec", "numpy", "rollout"}, f"{path} imports {module}"
            if top == "rollout" and module != "rollout":
                assert any(module == name or module.startswith(name + ".") for name in allowed_from_rollout), (
                    f"{path} imports {module}"
                )


def test_importing_the_core_loads_no_torch() -> None:
    modules = ["rollout.core." + path.stem for path in sources(ROOT / "rollout" / "core") if path.stem != "__init__"]
    program = (
        "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"


def test_no_subfolder_of_the_kernels_is_called_triton() -> None:
    # `import triton` inside such a package could find the folder instead of the library.
    assert [path for path in LAYERS["rollout_kernels"].rglob("triton*") if path.stem == "triton"] == []


def test_every_module_belongs_to_an_importable_package() -> None:
    for name in ORDER:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None, f"{name} has no __init__.py"
        assert Path(spec.origin).parent == LAYERS[name]


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for layer in LAYERS.values() for path in sources(layer)}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
