"""Whether this process's Triton kernels run in the interpreter. Triton decides it once, when a kernel is defined."""

from __future__ import annotations

import triton


@triton.jit
def _probe():
    pass


def is_interpreted() -> bool:
    """Kernels are Python functions over CPU memory (`TRITON_INTERPRET=1` was set when they were imported)."""
    return not isinstance(_probe, triton.JITFunction)
