"""Good and bad values of arguments, with what each means, for fuzzing/test_arguments.py.

A `Value` is 'good' (must be taken, as `same`), 'bad' (must be refused) or 'either': it may be refused, but if it is
taken, it must mean the same as `same`. Makers give fresh objects, so that no call can spoil those of the next.
"""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
from pyscf import dft, gto, scf

import md4


@dataclass(frozen=True)
class Value:
    """One value of an argument.

    Attributes
    ----------
    verdict : {'good', 'bad', 'either'}
    make : callable
        () -> the value
    same : callable
        () -> a plain value of the same meaning; None for bad ones.
    """

    verdict: str
    make: object
    same: object = None


def good(make, same=None):
    return Value("good", make, same or make)


def either(make, same):
    return Value("either", make, same)


def bad(make):
    return Value("bad", make)


def plain(verdict, *values):
    """Values that mean themselves, by their repr."""
    found = {}
    for v in values:
        text = "10**400" if isinstance(v, int) and v == 10**400 else repr(v)
        found[text] = Value(verdict, lambda v=v: v, None if verdict == "bad" else lambda v=v: v)
    return found


def read_only(array):
    array.flags.writeable = False
    return array


def zoo(*others, **named):
    """The common zoo, all of it bad but where dictionaries of values say otherwise."""
    found = {
        **plain("bad", None, float("nan"), float("inf"), -float("inf"), -1, 0, 1, 1.9, 10**400, "", "x", "1", b"x", 1j),
        **plain("bad", True, False, [], {}, (), set(), Decimal("0.3"), Decimal("sNaN"), Fraction(1, 3), ..., int,
        [1, [2]]),
        "object()": bad(object), "lambda": bad(lambda: lambda: 1),
        "generator": bad(lambda: (n for n in range(3))), "zeros((2, 3))": bad(lambda: np.zeros((2, 3))),
        "array('a')": bad(lambda: np.array(["a"])), "array(0.3)": bad(lambda: np.array(0.3)),
        "array([0.3])": bad(lambda: np.array([0.3])), "array(None)": bad(lambda: np.array(None)),
        "masked": bad(lambda: np.ma.masked), "datetime64": bad(lambda: np.datetime64("2026-01-01")),
        "float32": bad(lambda: np.float32(0.3)), "int64(1)": bad(lambda: np.int64(1)),
        "bool_": bad(lambda: np.bool_(True)), "float64(nan)": bad(lambda: np.float64("nan")),
        "longdouble(1e4000)": bad(lambda: np.longdouble("1e4000")), "'\\ud800'": bad(lambda: "\ud800"),
        "read-only": bad(lambda: read_only(np.zeros(3))), "'s1\\0'": bad(lambda: "s1\0"),
    }  # fmt: skip
    for values in (*others, named):
        found.update(values)
    return found


def numbers(*texts):
    """Those of the zoo that are real numbers, as good, and those that may be taken for one."""
    found = {}
    for value in (-1, 0, 1, 1.9):
        found.update(plain("good", value))
    found["float32"] = good(lambda: np.float32(0.3), lambda: float(np.float32(0.3)))
    found["int64(1)"] = good(lambda: np.int64(1), lambda: 1)
    found["array(0.3)"] = either(lambda: np.array(0.3), lambda: 0.3)
    found["array([0.3])"] = either(lambda: np.array([0.3]), lambda: 0.3)
    found["True"], found["bool_"] = either(lambda: True, lambda: 1), either(lambda: np.bool_(True), lambda: 1)
    found["False"] = either(lambda: False, lambda: 0)
    found[repr(Decimal("0.3"))] = either(lambda: Decimal("0.3"), lambda: 0.3)
    found[repr(Fraction(1, 3))] = either(lambda: Fraction(1, 3), lambda: 1 / 3)
    return {text: value for text, value in found.items() if not texts or text in texts}


def without(values, *texts):
    return {text: value for text, value in values.items() if text not in texts}


# Arguments that many functions have -----------------------------------------------------------------------------------

ATOMS = "He 0 0 0; H 0 0 0.9"
BASIS = {"He": [[0, [1.2, 1.0]], [1, [0.8, 1.0]]], "H": [[0, [0.6, 0.5], [2.0, 0.6]]]}
NAO, NSHELL = 5, 3


def molecule(**options):
    return gto.M(**{"atom": ATOMS, "basis": BASIS, "charge": 1, "verbose": 0, **options})


def basis():
    return md4.Basis.from_mol(molecule())


def high_basis():
    """Four shells of l = 9 exceed the tables."""
    return md4.Basis.from_arrays([9], [[1.0]], [[1.0]], [[0.0, 0.0, 0.0]])


def cell():
    from pyscf.pbc import gto as periodic

    return periodic.M(atom=ATOMS, basis=BASIS, charge=1, a=np.eye(3) * 4, verbose=0)


class CellLike:
    """Has a few of a molecule's names."""

    nbas, cart, omega = 3, False, 0.0

    def lattice_vectors(self):
        return np.eye(3)


def spoilt(offset, value):
    """A molecule whose exponents (of the first shell) or coordinates were overwritten."""
    mol = molecule()
    place = mol._bas[0, 5] if offset == "exponent" else mol._atm[0, 1]
    mol._env[place] = value
    return mol


def molecules():
    return zoo(
        {
            "mol": good(molecule), "cartesian": good(lambda: molecule(cart=True)), "unbuilt": bad(gto.Mole),
            "Mole": bad(lambda: gto.Mole), "Cell": bad(cell), "CellLike": bad(CellLike),
            "mf": bad(lambda: scf.RHF(molecule())),
            "without shells": bad(lambda: gto.M(atom="ghost-H 0 0 0", basis={}, verbose=0)),
            "NaN exponent": bad(lambda: spoilt("exponent", np.nan)),
            "exponent -1": bad(lambda: spoilt("exponent", -1.0)),
            "exponent 1e300": bad(lambda: spoilt("exponent", 1e300)),
            "NaN centre": bad(lambda: spoilt("centre", np.nan)),
            "unbuilt with atoms": bad(lambda: gto.Mole(atom=ATOMS, basis=BASIS, charge=1)),
        }
    )  # fmt: skip


def omegas():
    return zoo(
        numbers(), {"None": good(lambda: None), "-0.0": good(lambda: -0.0, lambda: 0), "1e300": bad(lambda: 1e300)}
    )


def flags():
    """Truth values; what is true or false to Python may be taken for it."""
    other = {
        t: either(v.make, lambda v=v: bool(v.make()))
        for t, v in zoo().items()
        if t != "zeros((2, 3))"
    }
    return zoo(without(other, "'s1\\0'", "read-only", "masked"), plain("good", True, False), {
        "bool_": good(lambda: np.bool_(True), lambda: True), "read-only": bad(lambda: read_only(np.zeros(3))),
        "masked": either(lambda: np.ma.masked, lambda: False),
        "int64(1)": either(lambda: np.int64(1), lambda: True),
        "array(None)": either(lambda: np.array(None), lambda: False),
    })  # fmt: skip


def ignored(value):
    """What the CPU backend may ignore, but not stumble over."""
    return {text: either(v.make, lambda: value) for text, v in zoo(none=good(lambda: None)).items()} | {
        "None": good(lambda: None, lambda: value)
    }


def progress():
    return ignored(None) | plain("good", False)


def memories():
    enough = {t: Value(v.verdict, v.make, lambda: None) for t, v in without(numbers(), "-1", "0", "False").items()}
    huge = {"10**400": either(lambda: 10**400, lambda: None)}
    inf = {"inf": either(lambda: float("inf"), lambda: None)}
    return zoo(
        enough,
        huge,
        inf,
        {"None": good(lambda: None), "1e-9": bad(lambda: 1e-9), "1000": good(lambda: 1000, lambda: None)},
    )


def backends():
    return zoo(
        plain("good", "cpu"),
        plain("bad", "CPU", "abacus", ["cpu"], b"cpu"),
        {"np.str_": either(lambda: np.str_("cpu"), lambda: "cpu")},
    )


def tolerances():
    return zoo(without(numbers(), "-1"), plain("good", 1e-13, 0.0), plain("bad", -1e-9))


def densities():
    d = np.arange(25.0).reshape(5, 5)
    d = d + d.T
    zero = {t: bad(v.make) for t, v in zoo().items()}
    return zoo(zero, {
        "dm": good(d.copy), "stack": good(lambda: np.stack([d, d])), "list": good(d.tolist, lambda: d),
        "F": good(lambda: np.asfortranarray(d), lambda: d), "float32": good(lambda: d.astype(np.float32), lambda: d),
        "int8": good(lambda: d.astype(np.int8), lambda: d),
        "complex64": good(lambda: d.astype(np.complex64), lambda: d + 0j),
        "read-only": good(lambda: read_only(d.copy()), lambda: d),
        "matrix": either(lambda: d.view(np.matrix), lambda: d),
        "masked array": either(lambda: np.ma.array(d, mask=d > 9), lambda: d),
        "bool": either(lambda: d > 9, lambda: (d > 9) * 1.0),
        "object": either(lambda: d.astype(object), lambda: d), "4-D": bad(lambda: d[None, None]),
        "empty": bad(lambda: np.zeros((0, 5, 5))),
        "4 x 4": bad(lambda: np.eye(4)), "5 x 4": bad(lambda: d[:, :4]), "nan": bad(lambda: d * np.nan),
        "inf": bad(lambda: d + np.inf),
        "str": bad(lambda: d.astype(str)), "ragged": bad(lambda: [[1.0] * 5] * 4 + [[1.0]]),
        "None inside": bad(lambda: [[None] * 5] * 5),
        "1e4000": bad(lambda: np.full((5, 5), np.longdouble("1e4000"))),
        "datetime": bad(lambda: d.astype(int).astype("M8[s]")),
        "record": bad(lambda: np.zeros((5, 5), dtype=[("x", "f8")])),
        "timedelta": bad(lambda: d.astype(int).astype("m8[s]")),
        "nan imaginary": bad(lambda: d + 1j * np.nan),
    })  # fmt: skip


def hermis():
    return zoo(plain("good", 0, 1, 2), plain("bad", 3, "2", [1]), {
        "True": either(lambda: True, lambda: 1), "False": either(lambda: False, lambda: 0),
        "bool_": either(lambda: np.bool_(1), lambda: 1),
        "int64(1)": good(lambda: np.int64(1), lambda: 1), "1.0": either(lambda: 1.0, lambda: 1),
        "array(1)": either(lambda: np.array(1), lambda: 1),
        "1+0j": either(lambda: 1 + 0j, lambda: 1), "array([1])": either(lambda: np.array([1]), lambda: 1),
    })  # fmt: skip


def fields():
    """Mean-field objects for `attach`."""
    return zoo({
        "RHF": good(lambda: scf.RHF(molecule())), "UHF": good(lambda: scf.UHF(molecule())),
        "RKS": good(lambda: dft.RKS(molecule())),
        "GHF": good(lambda: scf.GHF(molecule())), "mol": bad(molecule), "RHF class": bad(lambda: scf.hf.RHF),
        "fitted": good(lambda: scf.RHF(molecule()).density_fit()), "four components": bad(lambda: scf.DHF(molecule())),
        "with _eri": bad(with_eri), "of a cell": bad(lambda: __import__("pyscf.pbc.scf").pbc.scf.RHF(cell())),
    })  # fmt: skip


def with_eri():
    mol = molecule()
    mol.incore_anyway = True
    mf = scf.RHF(mol)
    mf._eri = mf.mol.intor("int2e", aosym="s8")
    return mf
