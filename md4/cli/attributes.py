"""What a dataset of HDF5 says about the integrals that it holds: their molecule, basis set, operator and order."""

import md4
from md4.method.operators import Operator


def attributes_of(mol, args, aosym, auxiliary=None):
    """The attributes of a tensor, a dict.

    Parameters
    ----------
    mol : pyscf.gto.Mole
    args : argparse.Namespace
        Options of the command.
    aosym : str
        Symmetry of the tensor.
    auxiliary : str, optional
        The name of the auxiliary basis set, or what was taken for each element.
    """
    operator = Operator.from_omega(mol.omega if args.omega is None else args.omega)
    more = {} if auxiliary is None else {"auxiliary_basis": auxiliary}
    return {
        "symbols": [mol.atom_symbol(n) for n in range(mol.natm)], "geometry": mol.atom_coords(),
        "geometry_unit": "Bohr", "charge": mol.charge, "spin": mol.spin, "basis": args.basis, **more,
        "functions": "Cartesian" if mol.cart else "spherical", "operator": operator.kind,
        "omega": operator.parameter if operator.kind != "coulomb" else 0.0, "aosym": aosym,
        "order": "that of PySCF's mol.ao_labels()", "unit": "Hartree", "md4_version": md4.__version__,
    }  # fmt: skip
