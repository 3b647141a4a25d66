"""C++ kernels for CPUs: `build.py` compiles them on first use, `ops.py` calls them."""
