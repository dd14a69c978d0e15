"""The GPU backend: device and memory, compiled kernels, and the paths by which classes are computed."""
