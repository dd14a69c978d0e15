"""Bad arguments of every public function: each is refused by an error of md4, before any work.

`idle` makes the first steps of all work fail: preparing pair lists, H matrices, memory of threads. A refusal comes
before them.
"""

from decimal import Decimal
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from molecules import molecule
from pyscf import gto, scf

import md4
from md4 import ArgumentError, BasisError, MD4Error, UnsupportedError
from md4.contract.warmup import warmup
from md4.cpu.backend import CpuBackend
from md4.cpu.sums import HostSums
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.validation.libcint import validate

nan, inf = np.nan, np.inf


@pytest.fixture
def idle(monkeypatch):
    """The CPU backend cannot do anything."""

    def work(*args, **kwargs):
        raise AssertionError("work was begun")

    for step in ("prepare", "hermite", "scratch", "workspaces"):
        monkeypatch.setattr(CpuBackend, step, work)
    for step in ("digest", "coulomb"):
        monkeypatch.setattr(HostSums, step, work)
    monkeypatch.setattr("md4.contract.tensor.least_block", work)
    monkeypatch.setattr("md4.contract.worker.least_block", work)


@cache
def hydrogen():
    return molecule("H 0 0 0; H 0 0 1", "sto-3g")


@cache
def basis():
    return Basis.from_mol(hydrogen())


def engine():
    return md4.Engine(basis(), backend="cpu")


def jk():
    return md4.JK(hydrogen(), backend="cpu")


@cache
def first_solver():
    return scf.RHF(hydrogen())


def solver():
    """A copy, which shares its checkpoint file with the first: PySCF makes a temporary one for each solver."""
    return first_solver().copy()


SHELL = {"l": 0, "exponents": [1.0], "coefficients": [[1.0]], "centre": [0, 0, 0]}
ARRAYS = {"l": [0], "exponents": [[1.0]], "coefficients": [[1.0]], "centres": [[0.0, 0.0, 0.0]]}
ONE = {"bra_pairs": [[0, 0]], "ket_pairs": [[0, 0]]}
# name -> function of the bad arguments
CALLS = {
    "int2e": lambda bad: md4.int2e(**{"mol": hydrogen(), "backend": "cpu", **bad}),
    "intor": lambda bad: md4.intor(**{"mol": hydrogen(), "backend": "cpu", **bad}),
    "Engine": lambda bad: md4.Engine(**{"bra_basis": basis(), "backend": "cpu", **bad}),
    "compute": lambda bad: engine().compute(**{**ONE, **bad}),
    "prepare": lambda bad: engine().prepare(**{"pairs": [[0, 0]], **bad}),
    "with_operator": lambda bad: engine().with_operator(**bad),
    "JK": lambda bad: md4.JK(**{"mol": hydrogen(), "backend": "cpu", **bad}),
    "JK.get_jk": lambda bad: jk().get_jk(**{"dm": np.eye(2), **bad}),
    "JK.update": lambda bad: jk().update(**{"dm": np.eye(2), **bad}),
    "JK.reset": lambda bad: jk().reset(**bad),
    "get_jk": lambda bad: md4.get_jk(**{"mol": hydrogen(), "dm": np.eye(2), "backend": "cpu", **bad}),
    "attach": lambda bad: md4.attach(**{"mf": solver(), "backend": "cpu", **bad}),
    "attached get_jk": lambda bad: md4.attach(solver(), "cpu").get_jk(**{"dm": np.eye(2), **bad}),
    "detach": lambda bad: md4.detach(**bad),
    "Basis": lambda bad: Basis(**{"shells": basis().shells, **bad}),
    "from_mol": lambda bad: Basis.from_mol(**bad),
    "from_arrays": lambda bad: Basis.from_arrays(**{**ARRAYS, **bad}),
    "Shell": lambda bad: Basis([Shell(**{**SHELL, **bad})]),
    "Operator": lambda bad: md4.Operator(**bad),
    "erf": lambda bad: md4.Operator.erf(**bad),
    "slater": lambda bad: md4.Operator.slater(**bad),
    "from_omega": lambda bad: md4.Operator.from_omega(**bad),
    "validate": lambda bad: validate(**{"mol": hydrogen(), "backend": "cpu", **bad}),
    "warmup": lambda bad: warmup(**{"lmax": 1, **bad}),
}


# values ---------------------------------------------------------------------------------------------------------------

REFUSALS = [
    *[(name, {"max_memory": value}, ArgumentError, "max_memory must be a positive, finite number of MB")
      for name in ("int2e", "intor", "Engine", "JK", "get_jk", "attach", "validate")
      for value in (nan, inf, -inf, 0, -5, "500", b"1", True, 1j, [100], np.array([1.0, 2.0]), 10**400, 1e308)],
    *[(name, {"backend": value}, ArgumentError, "is unknown; use one of auto, cuda, cpu")
      for name in ("int2e", "Engine", "JK", "attach", "validate") for value in (None, ["cpu"], "CPU", b"cpu", 0)],
    *[(name, {"stream": value}, ArgumentError, "stream must be an integer handle")
      for name in ("int2e", "Engine", "JK", "attach") for value in ("0", 1.5, -1, True, object(), 2**64)],
    *[(name, {"progress": value}, ArgumentError, "progress must be True or False")
      for name in ("int2e", "JK", "validate", "warmup") for value in ("x", 2, 0.5, [])],
    *[(name, {"omega": value}, ArgumentError, "omega must be a finite real number")
      for name in ("int2e", "JK", "JK.get_jk", "JK.update", "get_jk", "attached get_jk", "validate", "from_omega")
      for value in (nan, inf, "x", "0.3", "", 1j, True, [0.1], np.array([0.1, 0.2]), np.complex128(1))],
    *[(name, {"direct_scf_tol": value}, ArgumentError, "direct_scf_tol must be a finite real number, not negative")
      for name in ("JK", "JK.get_jk", "get_jk") for value in (nan, inf, -1e-10, "1e-10", 1j, [1e-10], True)],
    ("JK", {"direct_scf_tol": None}, ArgumentError, "direct_scf_tol"),
    *[("int2e", {"aosym": value}, ArgumentError, "use one of s1, s4, s8") for value in (None, "S8", ["s1"], {}, 1)],
    *[("int2e", {"shls_slice": value}, ArgumentError, message) for value, message in [
        ((0, 1.9, 0, 2, 0, 2, 0, 2), r"must hold integers, not 1\.9"), ((0, 1.0) * 4, r"must hold integers, not 1\.0"),
        (("0", "1") * 4, "must hold integers, not '0'"), ((0, True) * 4, "integers, not True"),
        ("01010101", "8 shell numbers"), (5, "8 shell numbers .*, not 5"), ((0, 1), "8 shell numbers .*, not 2"),
        (((0, 1),) * 4, "8 shell numbers .*, not 4"), (np.array([[0, 1]] * 8), "must hold integers"),
        ((-1, 1) * 4, "non-empty ranges"), ((0, 10**30) * 4, "non-empty ranges"), ((0, None) * 4, "integers, not None"),
    ]],
    *[("int2e", {"device": value}, ArgumentError, "device must be True or False") for value in ("yes", None, 2, [1])],
    *[(name, {"name": value}, UnsupportedError, "is not offered")
      for name in ("intor",) for value in (None, ["int2e"], np.array(["int2e", "int2e"]), b"int2e")],
    *[(name, {"hermi": value}, ArgumentError, "hermi")
      for name in ("JK.get_jk", "JK.update", "get_jk", "attached get_jk")
      for value in (True, "1", 1.0, 3, -1, np.array([1, 1]))],
    *[(name, {flag: value}, ArgumentError, f"{flag} must be True or False")
      for name in ("JK.get_jk", "JK.update", "get_jk", "attached get_jk") for flag in ("with_j", "with_k")
      for value in ("no", None, 2, [True])],
    *[(name, {"dm": value}, ArgumentError, "densit")
      for name in ("JK.get_jk", "JK.update", "get_jk", "attached get_jk")
      for value in ("x", [[1, 0], [0]], np.eye(3), np.eye(2, dtype=bool), np.eye(2).astype(object),
                    np.zeros((0, 2, 2)), 1.0, [["a", "b"], ["c", "d"]], nan * np.eye(2))],
    *[("compute", {side: value}, ArgumentError, f"the {side[:3]} pair list") for side in ONE for value in (
        None, 1, "00", [[0, 1], [1]], [[0.0, 1.0]], [[0, 1, 1]], [], [[True, False]], np.array([[0, 1]], object))],
    *[("compute", {"bra_pairs": value}, ArgumentError, "names shell") for value in (
        [[0, 2]], [[-1, 0]], np.array([[0, 2**63]], np.uint64))],
    ("prepare", {"basis": "x"}, ArgumentError, "must be an md4.Basis"),
    *[("prepare", {"cutoff": value}, ArgumentError, "cutoff must be a finite") for value in (nan, -1.0, "x", None)],
    *[(name, {"operator": value}, ArgumentError, "operator") for name in ("Engine", "with_operator") for value in (
        "dirac", 0.3, ("erf",), ("erf", "0.3"), ("erf", nan), ["coulomb", 1], b"erf", object())],
    ("with_operator", {"operator": None}, ArgumentError, "pass an Operator"),
    *[("Operator", {"kind": value}, ArgumentError, "unknown operator") for value in (None, [], "Erf", 1)],
    *[("Operator", {"kind": "erf", "parameter": value}, ArgumentError, "parameter") for value in (
        None, "0.3", True, 0, -1, nan, inf, 1j, [0.3], 1e-21, 1e21)],
    ("erf", {"omega": "0.3"}, ArgumentError, "parameter"), ("slater", {"zeta": True}, ArgumentError, "parameter"),
    *[(name, {"bra_basis": value}, ArgumentError, "must be an md4.Basis")
      for name in ("Engine",) for value in (None, "sto-3g", [], Basis)],
    *[("validate", {name: value}, ArgumentError, name)
      for name in ("tolerance", "abs_tolerance") for value in (nan, -1e-9, "1e-9", None, 1j, inf)],
    *[("validate", {name: value}, ArgumentError, f"{name} must be an integer")
      for name in ("max_quartets_per_class", "seed") for value in (-1, 1.5, "1", None, True)],
    *[("warmup", {"lmax": value}, ArgumentError, "lmax must be between 0 and 8") for value in (
        None, "2", 2.0, nan, True, -1, 9, [1])],
    *[("warmup", {"jobs": value}, ArgumentError, "jobs must be an integer of 1") for value in (0, 1.5, "2", True)],
    *[("warmup", {"kinds": value}, ArgumentError, "kinds must be a sequence") for value in ("coulomb", None, 1)],
    *[("warmup", {"kinds": value}, ArgumentError, "unknown operator") for value in (["dirac"], [None], [["erf"]])],
    ("warmup", {"pure": "x"}, ArgumentError, "pure must be"),
    ("warmup", {"basis": "sto-3g"}, ArgumentError, "basis must be an md4.Basis"),
    *[("attach", {"mf": value}, ArgumentError, "mean-field object") for value in (None, "RHF", scf.RHF, 1)],
    *[("detach", {"mf": value}, ArgumentError, "not attached") for value in (None, "RHF", scf.RHF)],
    # bases
    *[("Basis", {"shells": value}, BasisError, "md4.Shell") for value in (
        None, "abc", 5, [None], [(0, [1.0])], Shell(0, [1.0], [[1.0]], [0, 0, 0]))],
    ("Basis", {"shells": []}, BasisError, "no shells"),
    *[("Basis", {"pure": value}, ArgumentError, "pure must be") for value in ("no", None, 2)],
    *[("from_arrays", {"normalise": value}, ArgumentError, "normalise must be") for value in ("no", None, 2)],
    *[("from_arrays", {name: value}, BasisError, f"{name} must be a sequence|one entry for each")
      for name in ARRAYS for value in (None, "x", 1, {}, np.array(1.0), [])],
    *[("from_arrays", {"l": [value]}, BasisError, "non-negative integer") for value in ("0", 0.0, True, None, [0])],
    *[("from_arrays", {"l": [value]}, UnsupportedError, "add up to 32") for value in (33, 10**9)],
    *[("from_arrays", {name: [value]}, BasisError, message) for name, what in (
        ("exponents", "the exponents"), ("coefficients", "the coefficients"), ("centres", "the centre"))
      for value, message in ((["x"], f"{what} must be real numbers"), ([1j], f"{what} must be real numbers"),
                             ([True], f"{what} must be real numbers"), ([[1.0], [1.0, 2.0]], "must be real numbers"))],
    ("from_arrays", {"exponents": [[[1.0, 2.0]]], "coefficients": [[[1.0, 2.0]]]}, BasisError, "shapes must be"),
    ("from_arrays", {"coefficients": [[[[1.0, 2.0]]]]}, BasisError, "shapes must be"),
    ("from_arrays", {"exponents": [[None]]}, BasisError, "not a positive finite number"),
    ("Shell", {"exponents": "x"}, BasisError, "must be real numbers"),
    ("Shell", {"coefficients": [[1e200]]}, BasisError, "times that of a normalised primitive"),
    ("Shell", {"centre": None}, BasisError, "three finite coordinates"),
    ("Shell", {"centre": [0, 0, 1e200]}, BasisError, "check its unit"),
    ("Shell", {"exponents": [1e-300]}, BasisError, "below"), ("Shell", {"exponents": [1e300]}, BasisError, "beyond"),
]  # fmt: skip


def case_name(value):
    return value if isinstance(value, str) else ",".join(map(str, value)) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("name", "bad", "error", "message"), REFUSALS, ids=case_name)
def test_refused_before_any_work(idle, name, bad, error, message):
    with pytest.raises(error, match=message) as caught:
        CALLS[name](bad)
    assert isinstance(caught.value, MD4Error)


# molecules ------------------------------------------------------------------------------------------------------------


def cell():
    from pyscf.pbc import gto as periodic

    return periodic.M(atom="He 0 0 0", a=np.eye(3) * 5, basis="sto-3g", verbose=0)


def unbuilt():
    mol = gto.Mole()
    mol.atom, mol.basis = "H 0 0 0; H 0 0 1", "sto-3g"
    return mol


MOLECULES = {
    "nothing": (lambda: None, ArgumentError, r"must be a pyscf.gto.Mole, not None; pass a built molecule"),
    "atoms": (lambda: "H 0 0 0; H 0 0 1", ArgumentError, r"by pyscf\.M\(atom='H 0 0 0; H 0 0 1', basis="),
    "class": (lambda: gto.Mole, ArgumentError, "must be a pyscf.gto.Mole"),
    "number": (lambda: 5, ArgumentError, "must be a pyscf.gto.Mole, not 5"),
    "solver": (solver, ArgumentError, r"not an object of type RHF; pass its molecule, mf\.mol; md4\.attach\(mf\)"),
    "cell": (cell, UnsupportedError, "Cell of PySCF is periodic; md4 has the integrals of molecules only"),
    "not built": (unbuilt, BasisError, r"no shells; give it a basis set and call mol\.build"),
    "no basis": (lambda: molecule("ghost-He 0 0 0", {}), BasisError, "has no shells"),
}


@pytest.mark.parametrize("what", MOLECULES)
@pytest.mark.parametrize("name", ["int2e", "intor", "JK", "get_jk", "from_mol", "validate", "attached get_jk"])
def test_what_is_no_molecule(idle, name, what):
    make, error, message = MOLECULES[what]
    if (name, what) == ("attached get_jk", "nothing"):
        pytest.skip("None is the object's own molecule")
    with pytest.raises(error, match=message):
        CALLS[name]({"mol": make()})


@pytest.mark.parametrize("what", ["atoms", "solver", "cell", "not built"])
def test_reset_to_what_is_no_molecule(idle, what):
    """The old molecule stays."""
    make, error, message = MOLECULES[what]
    builder = jk()
    with pytest.raises(error, match=message):
        builder.reset(make())
    assert builder.mol is hydrogen()
    assert builder.basis.nao == 2


@pytest.mark.parametrize("name", ["JK.get_jk", "JK.update", "get_jk", "attached get_jk"])
def test_a_solver_is_no_density(idle, name):
    with pytest.raises(ArgumentError, match=r"must be arrays, not an object of type RHF; pass mf\.make_rdm1\(\)"):
        CALLS[name]({"dm": solver()})


def test_the_name_of_an_integral_is_no_molecule(idle):
    with pytest.raises(ArgumentError, match=r"the molecule comes first: md4\.intor\(mol, 'int2e'\)"):
        md4.intor("int2e", hydrogen())


@pytest.mark.parametrize("name", ["int2e", "validate"])
def test_a_basis_is_no_molecule(idle, name):
    with pytest.raises(ArgumentError, match=r"an md4\.Basis goes to md4\.JK or md4\.Engine"):
        CALLS[name]({"mol": basis()})


@pytest.mark.parametrize(("change", "kind"), [
    ({"ecp": {"Cu": "lanl2dz"}, "basis": {"Cu": [[0, [1.0, 1.0]]]}, "atom": "Cu 0 0 0"}, gto.Mole),
    ({"nucmod": "G"}, gto.Mole),
    ({}, type("Own", (gto.Mole,), {})),
])  # fmt: skip
def test_other_molecules_are_welcome(change, kind):
    mol = kind(**{"atom": "H 0 0 0; H 0 0 1", "basis": "sto-3g", "verbose": 0, "spin": None, **change}).build()
    assert Basis.from_mol(mol).nao == mol.nao


# total angular momentum -----------------------------------------------------------------------------------------------


@cache
def high():
    return molecule("He 0 0 0", {"He": [[0, [1.0, 1.0]], [9, [1.0, 1.0]]]})


@pytest.mark.parametrize("name", ["int2e", "JK", "get_jk", "validate", "warmup", "attach"])
def test_angular_momentum_is_refused_at_once(idle, name):
    given = {"mf": scf.RHF(high())} if name == "attach" else {"basis": Basis.from_mol(high())}
    with pytest.raises(UnsupportedError, match="add up to L = 36, beyond the limit of 32"):
        CALLS[name](given if name in ("attach", "warmup") else {"mol": high()})


def test_angular_momentum_of_a_slice(idle, monkeypatch):
    """Only the shells that are asked for count."""
    with pytest.raises(UnsupportedError, match="L = 36"):
        CALLS["int2e"]({"mol": high(), "shls_slice": (0, 2, 1, 2, 1, 2, 0, 2)})
    with pytest.raises(AssertionError, match="work was begun"):
        CALLS["int2e"]({"mol": high(), "shls_slice": (0, 2, 1, 2, 1, 2, 0, 1)})


def test_angular_momentum_of_two_lists(idle):
    engine = md4.Engine(Basis.from_mol(high()), backend="cpu")
    with pytest.raises(UnsupportedError, match="L = 36"):
        engine.compute([[1, 1]], [[1, 1]])
    with pytest.raises(AssertionError, match="work was begun"):
        engine.compute([[1, 1]], [[1, 0]])


# out ------------------------------------------------------------------------------------------------------------------


def read_only(shape):
    array = np.empty(shape)
    array.flags.writeable = False
    return array


def misaligned(shape):
    return np.empty(8 * int(np.prod(shape)) + 1, np.uint8)[1:].view(np.float64).reshape(shape)


OUTS = {
    "read-only": (read_only, "out is not writeable"),
    "misaligned": (misaligned, "out is not aligned"),
    "big-endian": (lambda shape: np.empty(shape, ">f8"), "must be a C-contiguous float64 NumPy array"),
    "single": (lambda shape: np.empty(shape, np.float32), "must be a C-contiguous float64 NumPy array"),
    "Fortran": (lambda shape: np.empty(shape, order="F"), "must be a C-contiguous float64 NumPy array"),
    "shape": (lambda shape: np.empty((*shape, 1)), "must be a C-contiguous float64 NumPy array"),
    "masked": (np.ma.empty, "must be a C-contiguous float64 NumPy array .* not MaskedArray"),
    "list": (lambda shape: [0.0] * 16, "must be a C-contiguous float64 NumPy array .* not list"),
    "name": (lambda shape: "out.npy", "must be a C-contiguous float64 NumPy array .* not str"),
}


@pytest.mark.parametrize("what", OUTS)
@pytest.mark.parametrize(("name", "shape"), [("int2e", (2, 2, 2, 2)), ("compute", (2, 2, 1, 1, 1, 1))])
def test_out(idle, name, shape, what):
    make, message = OUTS[what]
    lists = {side: [[0, 0], [1, 1]] for side in ONE} if name == "compute" else {}
    with pytest.raises(ArgumentError, match=message):
        CALLS[name]({"out": make(shape), **lists})


def test_out_may_be_a_file_in_memory(tmp_path):
    out = np.memmap(tmp_path / "eri", np.float64, "w+", shape=(2, 2, 2, 2))
    assert CALLS["int2e"]({"out": out}) is out
    np.testing.assert_array_equal(out, CALLS["int2e"]({}))


# integrals of an attached object --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [scf.RHF, scf.UHF, scf.GHF])
def test_integrals_set_after_attach(idle, kind):
    mf = md4.attach(kind(hydrogen()), backend="cpu")
    mf._eri, dm = np.zeros((3, 3)), mf.get_init_guess(key="1e")
    with pytest.raises(UnsupportedError, match=r"set after md4\.attach.* md4\.detach\(mf\).* mf\._eri = None"):
        mf.get_veff(dm=dm)
    with pytest.raises(AssertionError, match="work was begun"):
        mf.get_k(dm=dm, omega=0.3)  # PySCF does not use them for this operator, either


# numbers of all kinds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [100, 100.0, np.float32(100), np.int16(100), Decimal(100), Fraction(100), np.array(100)]
)
def test_numbers_of_all_kinds(number):
    engine = md4.Engine(basis(), backend="cpu", max_memory=number)
    assert 0 < engine.backend.memory_left() <= 100e6
    assert md4.Operator("erf", number).parameter == 100
    assert md4.Operator.from_omega(-number).kind == "erfc"
    assert jk()._operator(number).parameter == 100


@pytest.mark.parametrize("kind", [int, np.int8, np.uint64, np.array])
def test_integers_of_all_kinds(kind):
    ends = [kind(end) for end in (0, 1, 0, 2, 1, 2, 0, 2)]
    assert CALLS["int2e"]({"shls_slice": ends}).shape == (1, 2, 1, 2)
    vj, vk = jk().get_jk(np.eye(2), hermi=kind(1), with_j=kind(1), with_k=np.bool_(False))
    assert vj.shape == (2, 2)
    assert vk is None
    assert Basis.from_arrays([kind(1)], [[1.0]], [[1.0]], [[0, 0, 0]]).nao == 3
