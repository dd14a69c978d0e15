"""md4 under PySCF's names: integrals, mean-field objects, geometries."""
