#!/usr/bin/env python
"""Compiles every GPU kernel ahead of time, and writes what became of it into the table of docs/kernels.md.

    python scripts/kernel_table.py              # the document
    python scripts/kernel_table.py --json FILE  # the same facts for a program; the document stays as it is

Needs triton (the extra `gpu`), no GPU. Compiled kernels are kept in triton's cache.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from rollout_kernels.gpu.aot import CAPABILITIES, KernelReport, all_cases, compile_case

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
BEGIN = "<!-- begin of the table that scripts/kernel_table.py writes -->"
END = "<!-- end of the table -->"


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel file's case on one device: its report, or why it did not compile."""

    module: str
    name: str
    capability: int
    tensor_cores: bool  # are asked for
    report: KernelReport | None
    error: str | None = None

    @property
    def problems(self) -> list[str]:
        return [self.error or "no report"] if self.report is None else self.report.problems(self.tensor_cores)


def compiled(key: tuple[str, int, int]) -> Row:
    """The row of case `index` of a kernel file."""
    module, index, capability = key
    case = all_cases()[module][index]
    try:
        report, error = compile_case(case, capability), None
    except Exception as failure:  # noqa: BLE001  # whatever the compiler raises is this case's result
        report, error = None, f"{type(failure).__name__}: {failure}"
    return Row(module, case.name, capability, case.tensor_cores, report, error)


def rows(processes: int) -> list[Row]:
    """Every case on every device, files in alphabetical order, cases in their own."""
    cases = all_cases()
    keys = [
        (m, i, capability) for m, listed in cases.items() for i in range(len(listed)) for capability in CAPABILITIES
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compiled, keys, chunksize=4))


def table(found: list[Row]) -> Iterator[str]:
    """The lines of the document's tables, one table a kernel file."""
    for module in dict.fromkeys(row.module for row in found):
        yield f"### `gpu/{module}.py`"
        yield ""
        yield "| configuration | device | registers | spilled | shared memory | matrix instruction | warps | stages |"
        yield "|---|---|---:|---:|---:|---|---:|---:|"
        for row in found:
            report = row.report
            if row.module == module and report is not None:
                yield (
                    f"| {row.name} | sm_{row.capability} | {report.registers} | {report.spill_bytes} | "
                    f"{report.shared_bytes} | {report.matrix_instruction} | {report.num_warps} | {report.num_stages} |"
                )
        yield ""


def write_document(found: list[Row]) -> None:
    """Replaces the part of the document between the two marks."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text("\n".join([before + BEGIN, "", *table(found), END + after]))


def listed_cases(text: str) -> list[tuple[str, str, str]]:
    """(kernel file, configuration, device) of every line of the document's tables."""
    module, listed = "", []
    for line in text.partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("### "):
            module = line.removeprefix("### `gpu/").removesuffix(".py`")
        elif line.startswith("| ") and not line.startswith("| configuration"):
            name, device = (cell.strip() for cell in line.split("|")[1:3])
            listed.append((module, name, device))
    return listed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the facts to FILE instead of the document")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    args = parser.parse_args()
    found = rows(args.processes)
    problems = [f"{row.module}: {row.name} on sm_{row.capability} {text}" for row in found for text in row.problems]
    print("\n".join([*problems, f"{len(found)} compiled, {len(problems)} problems"]))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) | {"problems": row.problems} for row in found], indent=1))
    elif not problems:
        write_document(found)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
