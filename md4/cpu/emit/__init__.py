"""Code for vectors of LANES shell quartets, which is generated with LLVM: operations, [0]^(m), and the recurrence."""
