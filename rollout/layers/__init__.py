"""Building blocks of the models: thin modules that name parameters and call kernels."""
