"""What the tests of the Triton kernels share: dtypes, and memory that is NaN until a kernel writes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.support import kernels

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {**kernels.TOLERANCE, torch.float16: 2**-11}  # relative, of one rounding or a short sum


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside the `with` block `torch.empty` gives NaN (integers: the largest), so that a value left unwritten shows."""
    torch.use_deterministic_algorithms(True)  # which fills new memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
