import json
import os

import numpy as np
import pytest
from places import EXAMPLES

from md4.errors import ArgumentError
from md4.pyscf.geometry import auxiliary_text, load_auxiliary, load_molecule, parse_qcschema, parse_xyz

gto = pytest.importorskip("pyscf.gto")

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


def test_ghost_atoms_may_be_anywhere():
    assert load_molecule("ghost-H 0 0 0; H 0 0 0; X-H 0 0 0", "sto-3g").nao == 3


def test_ghost_atom_in_a_string():
    mol = load_molecule("ghost-O 0 0 0; He 0 0 2", "sto-3g")
    assert mol.atom_charges().tolist() == [0, 2]
    assert mol.nao == 6


@pytest.mark.parametrize(
    "text",
    ["H 0 0 0; F 0 0 .92", "H,0,0,0;F,0,0,9.2E-1", "\n# HF\nH\t0 0 0\n\nF 0 0 +0.92\n", "1 0 0 0; 9 0 0 0.92",
     "h 0. 0 0;f 0 0 0.92;", "H 0 0 0\r\nF 0 0 0.92"],
)  # fmt: skip
def test_separators_of_pyscf(text):
    theirs = gto.M(atom=text, basis="sto-3g", verbose=0)
    mol = load_molecule(text, "sto-3g")
    assert mol.elements == theirs.elements == ["H", "F"]
    np.testing.assert_allclose(mol.atom_coords(), theirs.atom_coords(), atol=1e-14)


def test_zmatrix():
    text = "O; H 1 0.96; H 1 0.96 2 104.5; ghost-H 1 0.96 2 104.5 3 120"
    theirs = gto.M(atom=text, basis="sto-3g", verbose=0)
    np.testing.assert_allclose(load_molecule(text, "sto-3g").atom_coords(), theirs.atom_coords(), atol=1e-14)


@pytest.mark.parametrize(
    "text",
    ["H 0 0 {}", "H {} 0 0", "H; H 1 {}", "H; H {} 1", "H; H 1 1; H 1 1 2 {}", "{} 0 0 0", "H 0 0 0; {}", "[('H',{})]"],
)
def test_text_is_never_evaluated(text, tmp_path):
    code = f"open({str(tmp_path / 'seen')!r},'w').write('0')"
    with pytest.raises(ArgumentError):
        load_molecule(text.format(code), "sto-3g")
    assert not list(tmp_path.iterdir())


def test_a_basis_file_is_never_evaluated(tmp_path):
    (tmp_path / "basis.nw").write_text(f"H S\n 1.0 open({str(tmp_path / 'seen')!r},'w').write('0')\n")
    with pytest.raises(ArgumentError):
        load_molecule("H 0 0 0", str(tmp_path / "basis.nw"))
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize("text", ["H 0 0 0 H 0 0 1", "H 0 0 nan", "H 0 0 1e9", "H; H 0 1", "H; H 1 1; H 1 1 1 90"])
def test_atom_strings_that_are_refused(text):
    with pytest.raises(ArgumentError, match=r"atom|coordinate"):
        load_molecule(text, "sto-3g")


@pytest.mark.parametrize("n", [30, 600])
def test_long_atom_strings(n):
    text = "; ".join(f"He 0 0 {i}" for i in range(n))
    assert load_molecule(text, "sto-3g").natm == n


@pytest.mark.parametrize("content", [b"1\n\nH 0 0 \xff", b"", b"\0", b"{" + b'"a":[' * 100000])
def test_files_that_are_no_molecules(tmp_path, content):
    (tmp_path / "a.xyz").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"a\.xyz"):
        load_molecule(tmp_path / "a.xyz", "sto-3g")


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "a.xyz"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ArgumentError, match="larger than 64 MB"):
        load_molecule(path, "sto-3g")


def test_basis_set_exchange():
    pytest.importorskip("basis_set_exchange")
    assert load_molecule("H 0 0 0", "cc-pv6z").nao == 91


@pytest.mark.parametrize(
    ("source", "basis", "options", "message"),
    [
        ("nowhere.xyz", "sto-3g", {}, "no geometry file 'nowhere.xyz'"),
        ("water", "sto-3g", {}, "no geometry file 'water'"),
        ("", "sto-3g", {}, "cannot build|no basis functions"),
        ("H 0 0 0; Zz 0 0 1", "sto-3g", {}, "atom 2: 'Zz' is no element"),
        ("H 0 0 0; Xx 0 0 1", "sto-3g", {}, "atom 2: 'Xx' is no element; write a symbol such as O, or ghost-O"),
        ("H; ghost 1 1", "sto-3g", {}, "atom 2: 'ghost' is no element"),
        ("1 0 0 0; 200 0 0 1", "sto-3g", {}, "atom 2: '200' is no element"),
        ("U 0 0 0", "cc-pvdz", {}, "the basis set 'cc-pvdz' for U; U is in cc-pvdz-"),
        ("O 0 0 0; H 0 0 1; H 0 0 1.000001", "sto-3g", {}, r"atoms 2 \(H\) and 3 \(H\) are at the same place"),
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
        ("1\n\nH 0 0 0\nH 0 0 1\n", "promises 1 atoms, but 2"),
        ("2\n\nH 0 0 0\nXx 0 0 1", "a.xyz, line 4: 'Xx' is no element"),
        ("1\n\nH 0 0", "line 3: expected 'symbol x y z'"),
        ("1\n\nH 0 0 zero", "line 3"),
        ("1\n\nH 0 0 inf", "line 3"),
        ("1\n\nH 0 nan 0", "line 3"),
        ("999999999999999999999\n\nH 0 0 0", "promises 999999999999999999999 atoms, but 1"),
        ("-1\n\nH 0 0 0", "promises -1 atoms"),
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
        ('{"symbols": ["H"], "geometry": [0, 0, 0], "molecular_charge": 1e400}', "not a whole number"),
        ('{"symbols": ["H"], "geometry": [0, 0, 0], "molecular_charge": NaN}', "not a whole number"),
        ('{"symbols": ["H"], "geometry": [0, 0, 1e400]}', "coordinate inf"),
        ('{"symbols": ["H"], "geometry": [0, 0, %s]}' % ("9" * 400), "OverflowError"),
        ('{"symbols": ["H"], "geometry": [0, 0, %s]}' % ("9" * 5000), "not valid JSON"),
        ('{"symbols": ["H", "Xx"], "geometry": [0, 0, 0, 0, 0, 1]}', "a.json, atom 2: 'Xx' is no element"),
        ('{"symbols": "H", "geometry": [0, 0, 0]}', "expected a list"),
        ('{"a": ' * 100000, "nested too deeply"),
    ],
)
def test_bad_qcschema(text, message):
    with pytest.raises(ArgumentError, match=message):
        parse_qcschema(text, "a.json")


@pytest.mark.parametrize("cart", [False, True])
def test_auxiliary_molecule(cart):
    """By name, and PySCF's choice: optimised for the orbital basis, or even-tempered."""
    df = pytest.importorskip("pyscf.df")
    mol = load_molecule(f"ghost-{WATER}", "cc-pvdz", cart=cart)
    for name, text in (("cc-pvtz-ri", "cc-pvtz-ri"), (None, "cc-pvdz-jkfit")):
        auxmol, found = load_auxiliary(mol, name)
        assert (found, auxmol.cart) == (text, cart)
        np.testing.assert_array_equal(auxmol.intor("int2c2e"), df.make_auxmol(mol, text).intor("int2c2e"))
    auxmol, found = load_auxiliary(load_molecule(WATER, "pc-1"))
    assert found == "even-tempered"
    assert auxmol.nao == df.make_auxmol(load_molecule(WATER, "pc-1")).nao
    assert auxiliary_text({"O": "cc-pvdz-jkfit", "U": [[0, [1.0, 1.0]]]}) == "cc-pvdz-jkfit (O), even-tempered (U)"


@pytest.mark.parametrize("name", ["no-such", "cc-pvtz-ri", "__import__('os').abort()"])
def test_unknown_auxiliary_basis(name, capsys):
    """PySCF prints a page in this case, and md4 raises an error."""
    with pytest.raises(ArgumentError, match="Without a name PySCF's choice is taken"):
        load_auxiliary(load_molecule("Xe 0 0 0", "def2-svp"), name)
    assert capsys.readouterr().out == ""


def test_a_charge_of_null(tmp_path):
    assert load_molecule(write(tmp_path, qcschema(molecular_charge=None)), "sto-3g").charge == 0
