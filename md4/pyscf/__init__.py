"""PySCF's side of md4: integrals under PySCF's names, mean-field objects, molecules from files."""
