"""The Triton kernels run in the interpreter, on CPU tensors: set before any kernel module is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
