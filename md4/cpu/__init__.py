"""The CPU backend: the steps of the method with NumPy, loops compiled by Numba, and BLAS."""
