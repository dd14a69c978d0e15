"""Code that kernels are made of and Numba has no word for, emitted as LLVM and PTX."""
