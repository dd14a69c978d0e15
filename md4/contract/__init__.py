"""AO tensors and Coulomb and exchange matrices, made of blocks of integrals."""
