"""The kernels, one step or one path a file, and the functions that launch them."""
