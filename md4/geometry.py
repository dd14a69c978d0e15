"""Molecules from files and strings: xyz, QCSchema JSON or a PySCF atom string, to a built `pyscf.gto.Mole`."""

import json
import warnings
from pathlib import Path

from md4.errors import ArgumentError


def load_molecule(source, basis, charge=None, spin=None, cart=False):
    """A built `pyscf.gto.Mole`.

    Parameters
    ----------
    source : str or path
        A file (.xyz in Angstrom; .json in QCSchema, molecule or input, in Bohr) or a PySCF atom string
        such as ``"O 0 0 0; H 0 0.76 0.59; H 0 -0.76 0.59"`` in Angstrom. ``ghost-O`` is a ghost atom, as in PySCF.
    basis : str or anything that `Mole.basis` takes
        Names are resolved as PySCF does; it asks the Basis Set Exchange for those that it does not know.
    charge : int, optional
        Default: the file's, or 0.
    spin : int, optional
        Number of unpaired electrons, 2S. Default: the file's, or the parity of the number of electrons.
    cart : bool
        Cartesian functions in place of spherical ones.

    Raises
    ------
    ArgumentError
        A file or string that cannot be read, an unknown element or basis name, or an impossible spin.
    """
    atoms, unit, file_charge, file_spin = read_geometry(source)
    charge = file_charge if charge is None else charge
    spin = file_spin if spin is None else spin
    return build_molecule(atoms, unit, basis, charge, spin, cart)


def read_geometry(source):
    """(atoms, unit, charge, spin) of a file or an atom string; spin None where it is not said."""
    text = str(source)
    path = Path(text)
    if "\n" not in text and len(text) < 4096 and path.is_file():
        return read_file(path)
    if path.suffix.lower() in (".xyz", ".json") or len(text.split()) == 1:
        raise ArgumentError(
            f"no geometry file {text!r}; give an .xyz or QCSchema .json file, "
            "or an atom string like 'H 0 0 0; F 0 0 0.92'."
        )
    return text, "Angstrom", 0, None


def read_file(path):
    """Read an xyz or a QCSchema file, told apart by content: JSON begins with a brace."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {str(path)!r}: {error}.") from error
    if text.lstrip().startswith("{"):
        return parse_qcschema(text, path)
    return parse_xyz(text, path), "Angstrom", 0, None


def parse_xyz(text, name):
    """Atoms [(symbol, (x, y, z))] of an xyz file: a count, a comment, one atom a line; further columns are ignored."""
    lines = text.splitlines()
    try:
        count = int(lines[0])
    except (IndexError, ValueError):
        raise ArgumentError(f"{name}: the first line of an xyz file must be the number of atoms.") from None
    rows = [line.split() for line in lines[2 : 2 + count]]
    if count < 1 or len(rows) != count:
        raise ArgumentError(f"{name}: the first line promises {count} atoms, but {len(rows)} lines follow the comment.")
    return [parse_atom(row, f"{name}, line {i}") for i, row in enumerate(rows, start=3)]


def parse_atom(fields, where):
    """(symbol, (x, y, z)) of one line."""
    try:
        x, y, z = (float(value) for value in fields[1:4])
    except ValueError:
        raise ArgumentError(f"{where}: expected 'symbol x y z', not {' '.join(fields)!r}.") from None
    return fields[0], (x, y, z)


def parse_qcschema(text, name):
    """Atoms, unit, charge and spin of a QCSchema molecule, or of the molecule of a QCSchema input or result."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{name}: not valid JSON ({error}).") from None
    data = data.get("molecule", data)
    try:
        symbols = [str(symbol) for symbol in data["symbols"]]
        flat = [float(value) for value in flattened(data["geometry"])]
        charge = whole(data.get("molecular_charge", 0))
        multiplicity = data.get("molecular_multiplicity")
        spin = None if multiplicity is None else whole(multiplicity) - 1
        real = list(data.get("real") or [True] * len(symbols))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name}: not a QCSchema molecule ({type(error).__name__}: {error}).") from None
    if not symbols or len(flat) != 3 * len(symbols) or len(real) != len(symbols):
        raise ArgumentError(
            f"{name}: {len(symbols)} symbols need {3 * len(symbols)} coordinates and as many 'real' flags, "
            f"but there are {len(flat)} and {len(real)}."
        )
    names = [symbol if is_real else f"ghost-{symbol}" for symbol, is_real in zip(symbols, real)]
    atoms = [(symbol, tuple(flat[3 * i : 3 * i + 3])) for i, symbol in enumerate(names)]
    return atoms, "Bohr", charge, spin


def flattened(geometry):
    """Coordinates one after the other, from a flat list or one of triples."""
    return [value for row in geometry for value in (row if isinstance(row, list) else [row])]


def whole(value):
    """`value` as an int; QCSchema writes charges as floats."""
    if int(value) != value:
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def build_molecule(atoms, unit, basis, charge=0, spin=None, cart=False):
    """`pyscf.gto.M`, quiet, with its many exceptions turned into one that says what to do."""
    try:
        from pyscf import gto
        from pyscf.lib.exceptions import BasisNotFoundError
    except ImportError:
        raise ArgumentError("molecules need PySCF; pip install 'md4[pyscf]'.") from None
    options = {"unit": unit, "charge": charge, "spin": spin, "cart": cart, "verbose": 0}
    try:
        with warnings.catch_warnings():
            # PySCF warns that the Basis Set Exchange is missing, then raises; the error below says both.
            warnings.simplefilter("ignore")
            mol = gto.M(atom=atoms, basis=basis, dump_input=False, parse_arg=False, **options)
    except BasisNotFoundError as error:
        raise ArgumentError(basis_message(basis, error)) from error
    except Exception as error:  # PySCF evaluates atom strings as Python, so that anything may come out of it
        reason = " ".join(str(error).split()).rstrip(".") or f"charge {charge} and spin {spin} do not go together"
        raise ArgumentError(f"PySCF cannot build the molecule: {reason}.") from error
    if mol.nbas == 0:
        raise ArgumentError(f"the molecule has no basis functions in {basis!r}; check its atoms and the basis name.")
    return mol


def basis_message(basis, error):
    """What to do about a basis set that was not found."""
    try:
        import basis_set_exchange  # noqa: F401
    except ImportError:
        return (
            f"PySCF has no basis set {basis!r} ({last_line(error)}); it may be in the Basis Set Exchange: "
            "pip install basis_set_exchange."
        )
    return f"neither PySCF nor the Basis Set Exchange has the basis set {basis!r} ({last_line(error)})."


def last_line(error):
    """The last line of an exception's text, where PySCF puts the name that it looked for."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
