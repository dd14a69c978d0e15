"""Molecules from files and strings: xyz, QCSchema JSON or an atom string, to a built `pyscf.gto.Mole`.

Atom strings are those of PySCF, as long as they are lists of atoms or Z-matrices with plain numbers. PySCF evaluates
anything that is not a number as Python code; this module refuses it.
"""

import json
import os
import re
import threading
import warnings
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile
from math import isfinite
from pathlib import Path

import numpy as np

from md4.errors import ArgumentError
from md4.pyscf import check_pyscf
from md4.support.display import size_text

LARGEST_FILE = 64_000_000  # bytes; more than any molecule needs that can be computed
LARGEST_COORDINATE = 1e8
LARGEST_CHARGE = 10**6
SAME_PLACE = 1e-5  # Bohr; PySCF refuses to compute the energy of nuclei that are nearer
# Numbers that PySCF (which may evaluate them) and `float` read in the same way: no underscores, nan or inf.
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
EXAMPLE = "an .xyz or QCSchema .json file, or an atom string like 'H 0 0 0; F 0 0 0.92'"
# Modules of PySCF that evaluate text unless their DISABLE_EVAL is set.
EVALUATING = ("mole", "basis.parse_nwchem", "basis.parse_nwchem_ecp", "basis.parse_cp2k", "basis.parse_molpro")
eval_lock = threading.Lock()


def load_molecule(source, basis, charge=None, spin=None, cart=False):
    """A built `pyscf.gto.Mole`.

    Parameters
    ----------
    source : str or path
        A file (.xyz in Angstrom; .json in QCSchema, molecule or input, in Bohr) or a PySCF atom string
        such as ``"O 0 0 0; H 0 0.76 0.59; H 0 -0.76 0.59"`` in Angstrom. ``ghost-O`` is a ghost atom, as in PySCF.
    basis : str or anything that `Mole.basis` takes
        Names are resolved by PySCF, which asks the Basis Set Exchange for those that it does not know.
    charge : int, optional
        Default: the file's, or 0.
    spin : int, optional
        Number of unpaired electrons, 2S. Default: the file's, or the parity of the number of electrons.
    cart : bool
        Cartesian functions in place of spherical ones.

    Raises
    ------
    ArgumentError
        The file or string cannot be read, an element or a basis name is unknown, two nuclei are at the same place, or
        the spin is impossible.
    """
    check_pyscf("a molecule from a file or a string")
    atoms, unit, file_charge, file_spin = read_geometry(source)
    charge = file_charge if charge is None else charge
    spin = file_spin if spin is None else spin
    return build_molecule(atoms, unit, basis, charge, spin, cart)


def read_geometry(source):
    """(atoms, unit, charge, spin) of a file or an atom string; the spin is None if it is not given."""
    text = str(source)
    if os.path.isfile(text):  # unlike Path.is_file, it is False for text that cannot be a name
        return read_file(Path(text))
    if os.path.exists(text):
        what = "a folder" if os.path.isdir(text) else "a device, a pipe or the like"
        raise ArgumentError(f"{text!r} is {what}; give {EXAMPLE}.")
    if text.lower().endswith((".xyz", ".json")) or len(re.findall(r"[^\s,;]+", text)) == 1:
        raise ArgumentError(f"no geometry file {shortened(text)}; give {EXAMPLE}.")
    return parse_atom_string(text), "Angstrom", 0, None


def shortened(text):
    """`text` in quotes, shortened to a length that fits a message."""
    return repr(text if len(text) <= 200 else text[:200] + " ...")


def read_file(path):
    """Reads an xyz or a QCSchema file. They are distinguished by their content: JSON begins with a brace."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ArgumentError(f"{str(path)!r} is larger than {size_text(LARGEST_FILE)}, so that it is no molecule.")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {str(path)!r}: {error}.") from error
    if text.lstrip().startswith("{"):
        return parse_qcschema(text, path)
    return parse_xyz(text, path), "Angstrom", 0, None


def parse_atom_string(text):
    """Atoms [(symbol, (x, y, z))] of a string; if it is a Z-matrix, its checked text.

    Atoms are separated by semicolons or new lines, and their fields by blanks, tabs or commas. A line that begins with
    # is a comment.
    """
    lines = (line.strip() for line in text.replace(";", "\n").replace(",", " ").split("\n"))
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    if not rows:
        raise ArgumentError(f"cannot build a molecule from {shortened(text)}, which names no atom; give {EXAMPLE}.")
    if len(rows[0]) < 4:
        return checked_zmatrix(rows)
    return [plain_atom(row, n) for n, row in enumerate(rows, start=1)]


def plain_atom(fields, n):
    """(symbol, (x, y, z)) of the fields of atom `n` of a string."""
    if len(fields) != 4 or not all(NUMBER.fullmatch(field) for field in fields[1:]):
        raise ArgumentError(
            f"cannot build the molecule: atom {n} must be 'symbol x y z', three plain numbers, "
            f"not {shortened(' '.join(fields))}."
        )
    return parse_atom(fields, f"atom {n}")


def checked_zmatrix(rows):
    """The text of a Z-matrix. Rows are: symbol, atom, distance, atom, angle, atom, dihedral."""
    for n, row in enumerate(rows):
        atoms, values = row[1::2], row[2::2]
        earlier = {str(i) for i in range(1, n + 1)}
        numbers = all(NUMBER.fullmatch(value) for value in values)
        if len(row) != 1 + 2 * min(n, 3) or not numbers or not set(atoms) <= earlier or len(set(atoms)) < len(atoms):
            raise ArgumentError(
                f"cannot build the molecule: atom {n + 1}, {shortened(' '.join(row))}, is neither 'symbol x y z' nor "
                "a line of a Z-matrix, with plain numbers and each reference to another, earlier atom."
            )
        check_element(row[0], f"atom {n + 1}")
    return "\n".join(" ".join(row) for row in rows)


def parse_xyz(text, name):
    """Atoms [(symbol, (x, y, z))] of an xyz file: a count, a comment, one atom a line; further columns are ignored.

    Of several geometries one after the other, the first is read.
    """
    lines = text.splitlines()
    try:
        count = int(lines[0])
    except (IndexError, ValueError):
        raise ArgumentError(f"{name}: the first line of an xyz file must be the number of atoms.") from None
    rest, most = [line.split() for line in lines[2:]], max(count, 0)
    rows = rest[:most] + list(takewhile(lambda row: len(row) > 3, rest[most:]))  # atoms beyond the count, too
    if count < 1 or len(rows) != count:
        raise ArgumentError(f"{name}: the first line promises {count} atoms, but {len(rows)} lines follow the comment.")
    return [parse_atom(row, f"{name}, line {i}") for i, row in enumerate(rows, start=3)]


def parse_atom(fields, where):
    """(symbol, (x, y, z)) of one line."""
    try:
        x, y, z = (float(value) for value in fields[1:4])
    except ValueError:
        raise ArgumentError(f"{where}: expected 'symbol x y z', not {shortened(' '.join(fields))}.") from None
    check_coordinates((x, y, z), where)
    check_element(fields[0], where)
    return fields[0], (x, y, z)


def check_element(symbol, where):
    """ArgumentError for a symbol or a number of no element, and for a ghost atom of none, which has no functions."""
    from pyscf.gto import mole

    try:
        name = mole._std_symbol(int(symbol) if symbol.isdecimal() else symbol)
    except (KeyError, IndexError, RuntimeError):
        name = "X"
    if name.rpartition("-")[2].upper() in ("X", "GHOST"):
        raise ArgumentError(
            f"{where}: {shortened(symbol)} is no element; write a symbol such as O, or ghost-O for a ghost atom that "
            "has the functions of O."
        )


def check_coordinates(values, where):
    """ArgumentError for coordinates that are not finite, or so large that r^2 would lose its digits."""
    for value in values:
        if not abs(value) <= LARGEST_COORDINATE:
            raise ArgumentError(f"{where}: the coordinate {value} is not a number below {LARGEST_COORDINATE:g}.")


def parse_qcschema(text, name):
    """Atoms, unit, charge and spin of a QCSchema molecule, or of the molecule of a QCSchema input or result."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ArgumentError(f"{name}: not valid JSON (nested too deeply).") from None
    except ValueError as error:  # a syntax error, or a number with thousands of digits
        raise ArgumentError(f"{name}: not valid JSON ({error}).") from None
    try:
        data = data.get("molecule", data)
        symbols = [str(symbol) for symbol in listed(data["symbols"])]
        flat = [float(value) for value in flattened(listed(data["geometry"]))]
        charge = whole(data.get("molecular_charge") or 0)
        multiplicity = data.get("molecular_multiplicity")
        spin = None if multiplicity is None else whole(multiplicity) - 1
        real = listed(data.get("real") or [True] * len(symbols))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{name}: not a QCSchema molecule ({type(error).__name__}: {error}).") from None
    if not symbols or len(flat) != 3 * len(symbols) or len(real) != len(symbols):
        raise ArgumentError(
            f"{name}: {len(symbols)} symbols need {3 * len(symbols)} coordinates and as many 'real' flags, "
            f"but there are {len(flat)} and {len(real)}."
        )
    check_coordinates(flat, name)
    for n, symbol in enumerate(symbols, start=1):
        check_element(symbol, f"{name}, atom {n}")
    names = [symbol if is_real else f"ghost-{symbol}" for symbol, is_real in zip(symbols, real)]
    atoms = [(symbol, tuple(flat[3 * i : 3 * i + 3])) for i, symbol in enumerate(names)]
    return atoms, "Bohr", charge, spin


def listed(value):
    """`value` if it is a list; TypeError for text and objects, over which one can iterate as well."""
    if not isinstance(value, list):
        raise TypeError(f"expected a list, not {type(value).__name__}")
    return value


def flattened(geometry):
    """Coordinates one after the other, from a flat list or from a list of triples."""
    return [value for row in geometry for value in (row if isinstance(row, list) else [row])]


def whole(value):
    """`value` as an int; QCSchema writes charges as floats."""
    if not isfinite(value) or int(value) != value:
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


@contextmanager
def no_evaluation():
    """Inside this context PySCF refuses text that is not a number, instead of evaluating it as Python code."""
    modules = [import_module(f"pyscf.gto.{name}") for name in EVALUATING]
    with eval_lock:
        before = [(module, module.DISABLE_EVAL) for module in modules if hasattr(module, "DISABLE_EVAL")]
        try:
            for module, _ in before:
                module.DISABLE_EVAL = True
            yield
        finally:
            for module, value in before:
                module.DISABLE_EVAL = value


def build_molecule(atoms, unit, basis, charge=0, spin=None, cart=False):
    """Calls `pyscf.gto.M` without output, and turns its many exceptions into one that says what to do."""
    from pyscf import gto
    from pyscf.lib.exceptions import BasisNotFoundError

    check_electrons(charge, spin)
    options = {"unit": unit, "charge": charge, "spin": spin, "cart": cart, "verbose": 0}
    try:
        with warnings.catch_warnings(), no_evaluation():
            # PySCF warns that the Basis Set Exchange is missing and then raises; the error below says both.
            warnings.simplefilter("ignore")
            mol = gto.M(atom=atoms, basis=basis, dump_input=False, parse_arg=False, **options)
    except BasisNotFoundError as error:
        raise ArgumentError(basis_message(basis, error, "orbital")) from error
    except MemoryError:
        raise
    except Exception as error:  # PySCF checks little, so it may raise anything
        reason = " ".join(str(error).split()).rstrip(".") or f"charge {charge} and spin {spin} do not go together"
        raise ArgumentError(f"PySCF cannot build the molecule: {reason}.") from error
    if mol.nbas == 0:
        raise ArgumentError(f"the molecule has no basis functions in {basis!r}; check its atoms and the basis name.")
    if mol.nelectron < 0:
        raise ArgumentError(f"charge {charge} leaves the molecule {mol.nelectron} electrons; check the charge.")
    check_coordinates(mol.atom_coords().ravel(), "the molecule")
    check_distances(mol)
    return mol


def check_distances(mol):
    """ArgumentError if two nuclei are at the same place. Ghost atoms, which have no charge, may be anywhere."""
    real = np.flatnonzero(mol.atom_charges())
    places = mol.atom_coords()[real]
    for n, place in enumerate(places[:-1]):
        near = np.flatnonzero(np.linalg.norm(places[n + 1 :] - place, axis=1) < SAME_PLACE)
        if len(near):
            one, two = real[n], real[n + 1 + near[0]]
            raise ArgumentError(
                f"the nuclei of atoms {one + 1} ({mol.atom_symbol(one)}) and {two + 1} ({mol.atom_symbol(two)}) are at "
                "the same place; check the coordinates, or write "
                f"ghost-{mol.atom_pure_symbol(two)} for its functions without its nucleus."
            )


def load_auxiliary(mol, basis=None):
    """The auxiliary molecule of a molecule for density fitting.

    Parameters
    ----------
    mol : pyscf.gto.Mole
    basis : str, optional
        Name of an auxiliary basis set. By default those are taken that PySCF takes for the orbital basis of each
        element: the set that was optimised for it, or even-tempered functions where there is none.

    Returns
    -------
    auxmol : pyscf.gto.Mole
    text : str
        The name of the basis, or what was taken for each element.

    Raises
    ------
    ArgumentError
        The basis set is unknown, or it lacks an element.
    """
    from pyscf import df, gto
    from pyscf.lib.exceptions import BasisNotFoundError

    symbols = sorted({atom[0] for atom in mol._atom})
    with warnings.catch_warnings(), no_evaluation():
        warnings.simplefilter("ignore")
        if basis is None:
            names = df.make_auxbasis(mol)
            return df.make_auxmol(mol, names), auxiliary_text(names)
        try:
            return df.make_auxmol(mol, gto.format_basis(dict.fromkeys(symbols, basis))), basis
        except BasisNotFoundError as error:
            text = basis_message(basis, error, "jkfit")
            raise ArgumentError(f"{text} Without a name PySCF's choice is taken.") from error


def auxiliary_text(names):
    """What PySCF has chosen for each element, as one name if it is the same."""
    texts = {symbol: name if isinstance(name, str) else "even-tempered" for symbol, name in names.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{text} ({symbol})" for symbol, text in sorted(texts.items()))


def check_electrons(charge, spin):
    """ArgumentError for a charge or a spin that no molecule has. PySCF checks whether they fit together."""
    if abs(charge) > LARGEST_CHARGE:
        raise ArgumentError(f"a charge beyond {LARGEST_CHARGE} is no molecule's; check the file and --charge.")
    if spin is not None and spin < 0:
        raise ArgumentError(
            f"spin {spin} (multiplicity {spin + 1}): the number of unpaired electrons must be 0 or more."
        )


def basis_message(basis, error, role):
    """The message about a basis set that was not found, or that lacks an element, with the remedy.

    `role` is that of the Basis Set Exchange, such as 'orbital'.
    """
    lacking = re.search(r"not found for (\S+) in", str(error))
    what = f"basis set {basis!r} for {lacking[1]}" if lacking else f"basis set {basis!r} ({last_line(error)})"
    try:
        import basis_set_exchange
    except ImportError:
        remedy = "it may be in the Basis Set Exchange: pip install basis_set_exchange"
        return f"PySCF has no {what}; {remedy}{', or take a set that has this element.' if lacking else '.'}"
    missing = f"neither PySCF nor the Basis Set Exchange has the {what}"
    if lacking:
        names = basis_set_exchange.filter_basis_sets(elements=[lacking[1].rpartition("-")[2]], role=role)
        nearest = get_close_matches(str(basis).lower(), names, 4, 0.0)
        return f"{missing}; {lacking[1]} is in {', '.join(nearest) or 'no set of this kind'}."
    return f"{missing}{', nor is there such a file' if isinstance(basis, str) and os.sep in basis else ''}."


def last_line(error):
    """The last line of an exception's text, where PySCF puts the name that it looked for."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
