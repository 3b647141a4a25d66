"""Building the library: cached, atomic, safe with several processes. The sources here are tiny ones."""

import ctypes
import multiprocessing
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from rollout_kernels.cpu import build as building


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder of two files, an empty cache, and a compiler that leaves a line in a log at each call."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "two.h"\nextern "C" int answer() { return two() + 40; }\n')
    (folder / "two.cpp").write_text('#include "two.h"\nint two() { return 2; }\n')
    (folder / "two.h").write_text("int two();\n")
    compiler = tmp_path / "logging-g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("ROLLOUT_CXX", str(compiler))
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "SOURCE_DIR", folder)
    return folder


def compilations(sources: Path) -> int:
    return (sources.parent / "log").read_text().count(" -c ")


def test_built_once_and_again_when_a_source_or_header_changes(sources: Path) -> None:
    first = building.build()
    assert ctypes.CDLL(str(first)).answer() == 42
    assert building.build() == first
    assert compilations(sources) == 2
    (sources / "two.h").write_text("int two();  // changed\n")
    second = building.build()
    assert second != first
    assert compilations(sources) == 4


def test_only_the_library_and_its_lock_are_left_in_the_cache(sources: Path) -> None:
    target = building.build()
    assert sorted(path.name for path in target.parent.iterdir()) == ["rollout_kernels.lock", "rollout_kernels.so"]


def _build(_: int) -> str:
    return str(building.build())


def test_concurrent_processes_compile_once(sources: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        paths = pool.map(_build, range(4), chunksize=1)
    assert len(set(paths)) == 1
    assert ctypes.CDLL(paths[0]).answer() == 42
    assert compilations(sources) == 2


def test_an_error_of_the_compiler_is_shown_and_leaves_no_library(sources: Path) -> None:
    (sources / "one.cpp").write_text("this is not C++;\n")
    with pytest.raises(building.BuildError, match="error:"):
        building.build()
    assert not list((sources.parent / "cache").rglob("*.so"))
    (sources / "one.cpp").write_text('extern "C" int answer() { return 1; }\n')
    assert ctypes.CDLL(str(building.build())).answer() == 1


def test_a_cache_that_cannot_be_written_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = sources.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("ROLLOUT_CACHE", str(blocked))
    with pytest.raises(building.BuildError, match=r"cannot write the kernel cache .*set ROLLOUT_CACHE"):
        building.build()


def test_a_compiler_that_is_not_gnu_is_refused(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_CXX", "true")
    with pytest.raises(building.BuildError, match=r"'true' of ROLLOUT_CXX or CXX is not a GNU C\+\+ compiler"):
        building.find_compiler()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this kind")
@pytest.mark.parametrize("processor", ["x86-64-v3", "sapphirerapids"])
def test_the_kernels_compile_for_processors_without_avx512_and_with_tiles(processor: str) -> None:
    compiler = building.find_compiler().path
    flags = [flag for flag in building.compile_flags() if not flag.startswith("-march")]
    for source in sorted(building.SOURCE_DIR.glob("*.cpp")):
        command = [compiler, *flags, "-O0", f"-march={processor}", "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
