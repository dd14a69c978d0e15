"""Attributes of the datasets that `md4 eri` writes: from them alone PySCF makes the same integrals."""

import numpy as np
import pytest
from pyscf import df, gto

import md4
from md4.__main__ import main
from md4.cli.attributes import attributes_of
from md4.cli.commands import parser
from md4.cli.tensor_files import tensor_file

h5py = pytest.importorskip("h5py")
ATOMS = "O 0 0 0; H 0 0.76 0.59; ghost-H 0 -0.76 0.59"
BASIS = ["--basis", "6-31g*", "--backend", "cpu"]


def described(attributes):
    """The molecule and the omega of attributes."""
    unit, cart = attributes["geometry_unit"], attributes["functions"] == "Cartesian"
    atoms = list(zip(attributes["symbols"], attributes["geometry"]))
    numbers = {name: int(attributes[name]) for name in ("charge", "spin")}
    mol = gto.M(atom=atoms, unit=unit, basis=attributes["basis"], cart=cart, verbose=0, **numbers)
    return mol, {"coulomb": 0.0, "erf": 1.0, "erfc": -1.0}[attributes["operator"]] * attributes["omega"]


@pytest.mark.parametrize("options", [[], ["--aosym", "s8", "--omega", "-0.3", "--cart"], ["--omega", "0.4"]])
@pytest.mark.parametrize("large", [False, True])
def test_tensor(tmp_path, options, large, monkeypatch):
    monkeypatch.setattr("md4.cli.eri.LARGE", 0.0 if large else 0.5)
    path = tmp_path / "eri.h5"
    assert main(["eri", ATOMS, *BASIS, "--charge", "1", "--spin", "2", *options, "-o", str(path)]) == 0
    with h5py.File(path) as file:
        attributes, found = dict(file["eri"].attrs), file["eri"][:]
    mol, omega = described(attributes)
    assert attributes["md4_version"] == md4.__version__
    assert (attributes["unit"], attributes["order"]) == ("Hartree", "that of PySCF's mol.ao_labels()")
    assert (mol.charge, mol.spin) == (1, 2)
    with mol.with_range_coulomb(omega):
        np.testing.assert_allclose(found, mol.intor("int2e", aosym=attributes["aosym"]), atol=1e-12)


def test_fitting(tmp_path):
    path = tmp_path / "eri.h5"
    assert main(["eri", ATOMS, *BASIS, "--spin", "1", "--df", "cc-pvdz-ri", "--omega", "0.4", "-o", str(path)]) == 0
    with h5py.File(path) as file:
        three, two = (dict(file[name].attrs) for name in ("int3c2e", "int2c2e"))
        found = file["int3c2e"][:]
    mol, omega = described(three)
    auxmol = df.make_auxmol(mol, three["auxiliary_basis"])
    with mol.with_range_coulomb(omega), auxmol.with_range_coulomb(omega):
        np.testing.assert_allclose(found, df.incore.aux_e2(mol, auxmol, aosym=three["aosym"]), atol=1e-12)
    assert two.pop("aosym") == "s1"
    assert all(np.array_equal(value, three[name]) for name, value in two.items())


def test_attributes_of_many_atoms(tmp_path):
    """HDF5 keeps 64 kB of attributes with a dataset, unless it is told that there are more."""
    atoms = "; ".join(f"He 0 0 {n}" for n in range(3000))
    mol = gto.M(atom=atoms, basis="sto-3g", verbose=0)
    args = parser().parse_args(["eri", atoms, "--basis", "sto-3g"])
    tensor_file(str(tmp_path / "eri.h5"), 8, False, {"eri": attributes_of(mol, args, "s8")}).write(np.ones(1))
    with h5py.File(tmp_path / "eri.h5") as file:
        np.testing.assert_array_equal(file["eri"].attrs["geometry"], mol.atom_coords())
