"""The operations in Triton, for CUDA devices. `ops.py` is the backend; `aot.py` compiles every kernel without a GPU."""
