"""The CPU backend: the steps of the method on NumPy, Numba's loops and BLAS."""
