import json
from pathlib import Path

import numpy as np
import pytest

from md4.errors import ArgumentError
from md4.geometry import load_molecule, parse_qcschema, parse_xyz

gto = pytest.importorskip("pyscf.gto")

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
WATER = "O 0 0 0.11779; H 0 0.755453 -0.471161; H 0 -0.755453 -0.471161"


def qcschema(**changes):
    """A QCSchema water molecule, in Bohr."""
    coords = gto.M(atom=WATER, basis="sto-3g", verbose=0).atom_coords()
    molecule = {"schema_name": "qcschema_molecule", "symbols": ["O", "H", "H"], "geometry": coords.ravel().tolist()}
    return molecule | changes


def write(folder, data):
    path = folder / "molecule.json"
    path.write_text(json.dumps(data))
    return path


def test_xyz_equals_atom_string():
    mol, other = load_molecule(EXAMPLES / "water.xyz", "cc-pvdz"), load_molecule(WATER, "cc-pvdz")
    assert mol.nao == other.nao == 24
    assert mol.elements == ["O", "H", "H"]
    assert (mol.charge, mol.spin, mol.cart) == (0, 0, False)
    np.testing.assert_allclose(mol.atom_coords(), other.atom_coords(), atol=1e-14)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.xyz")), ids=lambda path: path.stem)
def test_every_example_loads(path):
    assert load_molecule(path, "sto-3g").nelectron > 0


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"schema_name": "qcschema_input", "molecule": m}])
def test_qcschema_is_in_bohr(tmp_path, wrap):
    path = write(tmp_path, wrap(qcschema(molecular_charge=1.0, molecular_multiplicity=2)))
    mol = load_molecule(path, "sto-3g")
    assert (mol.charge, mol.spin, mol.nelectron) == (1, 1, 9)
    np.testing.assert_allclose(mol.atom_coords(), load_molecule(WATER, "sto-3g").atom_coords(), atol=1e-14)


def test_qcschema_triples_and_ghosts(tmp_path):
    nested = np.reshape(qcschema()["geometry"], (3, 3)).tolist()
    path = write(tmp_path, qcschema(geometry=nested, real=[True, False, True], molecular_charge=1))
    mol = load_molecule(path, "sto-3g")
    assert mol.nao == 7
    assert mol.atom_charges().tolist() == [8, 0, 1]


def test_options_override_the_file(tmp_path):
    mol = load_molecule(write(tmp_path, qcschema(molecular_charge=1)), "cc-pvdz", charge=0, spin=2, cart=True)
    assert (mol.charge, mol.spin, mol.cart, mol.nao) == (0, 2, True, 25)


def test_spin_follows_parity():
    assert load_molecule("N 0 0 0", "sto-3g").spin == 1
    assert load_molecule("N 0 0 0", "sto-3g", charge=1).spin == 0


def test_ghost_atom_in_a_string():
    mol = load_molecule("ghost-O 0 0 0; He 0 0 2", "sto-3g")
    assert mol.atom_charges().tolist() == [0, 2]
    assert mol.nao == 6


def test_basis_set_exchange():
    pytest.importorskip("basis_set_exchange")
    assert load_molecule("H 0 0 0", "cc-pv6z").nao == 91


@pytest.mark.parametrize(
    ("source", "basis", "options", "message"),
    [
        ("nowhere.xyz", "sto-3g", {}, "no geometry file 'nowhere.xyz'"),
        ("water", "sto-3g", {}, "no geometry file 'water'"),
        ("", "sto-3g", {}, "cannot build|no basis functions"),
        ("Zz 0 0 0", "sto-3g", {}, "Unsupported atom symbol"),
        ("H 0 0 0; H 0 0", "sto-3g", {}, "cannot build the molecule"),
        ("H 0 0 0; H 0 0 a", "sto-3g", {}, "cannot build the molecule"),
        ("H 0 0 0", "sto-3g", {"spin": 2}, "spin"),
        ("H 0 0 0", "no-such-basis", {}, "no-such-basis"),
        ("Og 0 0 0", "sto-3g", {}, "Og"),
    ],
)
def test_what_cannot_be_built(source, basis, options, message):
    with pytest.raises(ArgumentError, match=message):
        load_molecule(source, basis, **options)


def test_missing_basis_set_exchange_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "basis_set_exchange", None)
    monkeypatch.setattr("pyscf.gto.basis.bse.basis_set_exchange", None)
    with pytest.raises(ArgumentError, match="pip install basis_set_exchange"):
        load_molecule("H 0 0 0", "cc-pv6z")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "number of atoms"),
        ("two\n\nH 0 0 0", "number of atoms"),
        ("2\n\nH 0 0 0", "promises 2 atoms, but 1"),
        ("1\n\nH 0 0", "line 3: expected 'symbol x y z'"),
        ("1\n\nH 0 0 zero", "line 3"),
    ],
)
def test_bad_xyz(text, message):
    with pytest.raises(ArgumentError, match=message):
        parse_xyz(text, "a.xyz")


def test_extended_xyz_columns_are_ignored():
    assert parse_xyz("1\nProperties=...\nH 0 0 1 0.5 0.5 0.5\n", "a.xyz") == [("H", (0.0, 0.0, 1.0))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "not a QCSchema molecule"),
        ('{"molecule": 3}', "not a QCSchema molecule"),
        ('{"symbols": ["H"], "geometry": [0, 0]}', "1 symbols need 3 coordinates"),
        ('{"symbols": ["H"], "geometry": [0, 0, 0], "molecular_charge": 0.5}', "not a whole number"),
    ],
)
def test_bad_qcschema(text, message):
    with pytest.raises(ArgumentError, match=message):
        parse_qcschema(text, "a.json")
