"""What is made of blocks of integrals: AO tensors, Coulomb and exchange matrices."""
