"""GPU kernels, one step of the method a file: device code first, then the variant that the dispatcher compiles."""
