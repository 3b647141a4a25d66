"""Our import names stand in nobody's way: transformers sees Hugging Face's real `kernels` package, or none."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rollout", "rollout_kernels", "rollout_trainers")
FOLDERS = {
    "rollout": "rollout",
    "rollout_kernels": "kernels/rollout_kernels",
    "rollout_trainers": "trainers/rollout_trainers",
}

REPORT = """
import importlib.util, sys
spec = importlib.util.find_spec("kernels")
print(spec.origin if spec else None)
from transformers.utils.import_utils import is_kernels_available
print(is_kernels_available())
import transformers.integrations.hub_kernels
"""


def is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize("directory", ["root", "elsewhere"])
def test_transformers_sees_the_real_kernels_package_or_none(directory: str, tmp_path: Path) -> None:
    # From the root, a bare folder `kernels/` lies on the path: it may be seen as a namespace without an origin, never
    # as a package, and transformers must not take it for Hugging Face's.
    done = subprocess.run(
        [sys.executable, "-c", REPORT], capture_output=True, text=True, cwd=ROOT if directory == "root" else tmp_path
    )
    assert done.returncode == 0, done.stderr
    origin, available = done.stdout.split()
    if is_installed("kernels"):
        assert "site-packages" in origin
    else:
        assert (origin, available) == ("None", "False")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_marked_as_typed(package: str) -> None:
    assert (ROOT / FOLDERS[package] / "py.typed").is_file()


def test_no_package_has_a_generic_name() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packages = [path.split("/")[-1] for path in build["targets"]["wheel"]["packages"]]
    assert packages == list(PACKAGES)
    assert all(package.startswith("rollout") for package in packages)


@pytest.mark.parametrize("name", ["kernels", "trainers", "recipes", "tests"])
def test_the_folders_at_the_top_do_not_import_as_packages(name: str, tmp_path: Path) -> None:
    program = f"import importlib.util; spec = importlib.util.find_spec({name!r}); print(spec.origin if spec else None)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert str(ROOT) not in done.stdout


def test_the_packages_import_away_from_the_root(tmp_path: Path) -> None:
    program = f"import {', '.join(PACKAGES)}; print({', '.join(f'{name}.__file__' for name in PACKAGES)})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(ROOT / FOLDERS[name] / "__init__.py") for name in PACKAGES]
