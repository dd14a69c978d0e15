"""Derivatives of AO tensors under PySCF's names, on the CPU and on a GPU."""

import numpy as np
import pytest
from molecules import CENTRES, WATER, molecule, relative_error
from mpmath import mp, mpf
from pyscf import gto, mcscf, scf
from traced_memory import OBJECTS_MB, named, traced

import md4
from md4.contract.derivatives import DerivativeRequest
from md4.contract.tensor import locked_tensor
from md4.cpu.derivatives import DerivativeTensor
from md4.cpu.emit.vectors import LANES
from md4.engine import Engine
from md4.errors import ArgumentError, DeviceError, MemoryLimitError, UnsupportedError
from md4.method.operators import Operator
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.validation import oracle

# Functions s to f, general contractions, one of which is split, and a ghost; no symmetry.
ATOMS = "O 0 0 0; H 0.1 0.7 -0.4; ghost-He 0.5 -0.3 0.8"
SHELLS = {
    "O": [[0, [8.0, 0.3, 0.1], [2.0, 0.5, -0.2], [0.5, 0.4, 0.9]], [1, [2.0, 0.4, 0.2], [0.6, 0.7, -0.5]],
          [2, [1.1, 1.0]]],
    "H": [[0, [1.2, 1, 0], [0.3, 0, 1]], [3, [0.9, 1.0]]],
    "ghost-He": [[1, [0.7, 1.0]]],
}  # fmt: skip
AUXILIARY = {"O": [[0, [3.0, 1]], [1, [1.0, 1]], [4, [0.8, 1]]], "H": [[2, [0.7, 1]]], "ghost-He": [[0, [0.5, 1]]]}
# The second one is for erfc(omega r)/r in libcint, which is less exact.
TOLERANCE, OF_LIBCINT = 1e-12, 1e-11


@pytest.fixture(scope="module", params=[False, True], ids=["spherical", "Cartesian"])
def mol(request):
    return molecule(ATOMS, SHELLS, cart=request.param)


@pytest.fixture(scope="module")
def both(mol):
    """A molecule with its auxiliary functions, which come after its own."""
    return gto.conc_mol(mol, molecule(ATOMS, AUXILIARY, cart=mol.cart))


def assert_pyscf(mol, name, aosym="s1", shls_slice=None, backend="cpu"):
    theirs = mol.intor(name, aosym=aosym, shls_slice=shls_slice)
    ours = md4.intor(mol, name, aosym, shls_slice=shls_slice, backend=backend)
    assert ours.shape == theirs.shape
    assert ours.flags.c_contiguous
    assert relative_error(ours, theirs) < (OF_LIBCINT if mol.omega < 0 else TOLERANCE)


@pytest.mark.parametrize("aosym", ["s1", "s2kl"])
def test_four_centres(mol, aosym, backend):
    assert_pyscf(mol, "int2e_ip1", aosym, backend=backend)


@pytest.mark.parametrize("omega", [0.3, -0.3])
def test_omega_is_the_molecules_by_default(mol, both, omega):
    with mol.with_range_coulomb(omega), both.with_range_coulomb(omega):
        assert_pyscf(mol, "int2e_ip1", "s2kl")
        assert_pyscf(both, "int3c2e_ip2", "s2ij", (0, mol.nbas, 0, mol.nbas, mol.nbas, both.nbas))
        other = md4.intor(mol, "int2e_ip1", omega=0.0, backend="cpu")
    np.testing.assert_array_equal(other, md4.intor(mol, "int2e_ip1", backend="cpu"))


SLICES = [(0, 2, 0, 6, 0, 6, 0, 6), (1, 4, 2, 5, 0, 3, 2, 6), (4, 6, 0, 1, 5, 6, 1, 2), (3, 4, 3, 4, 2, 6, 3, 4)]


@pytest.mark.parametrize("shells", SLICES)
def test_slices(mol, shells, backend):
    assert mol.nbas == 6
    assert_pyscf(mol, "int2e_ip1", shls_slice=shells, backend=backend)
    assert_pyscf(mol, "int2e_ip1", "s2kl", (*shells[:4], *shells[4:6] * 2), backend)


@pytest.mark.parametrize("ends", [(0, 6, 0, 6, 6, 11), (1, 4, 2, 6, 7, 10), (3, 5, 0, 3, 10, 11), (0, 6, 0, 6, 8, 9)])
def test_three_centres(both, ends, backend):
    assert both.nbas == 11
    for name in ("int3c2e_ip1", "int3c2e_ip2"):
        assert_pyscf(both, name, shls_slice=ends, backend=backend)


@pytest.mark.parametrize("ends", [(0, 6, 0, 6, 6, 11), (2, 5, 0, 6, 7, 9), (4, 6, 0, 6, 6, 11)])
def test_rows_of_a_triangle(both, ends, backend):
    assert_pyscf(both, "int3c2e_ip2", "s2ij", ends, backend)


@pytest.mark.parametrize("ends", [None, (6, 11, 6, 11), (0, 6, 6, 11), (8, 9, 2, 7)])
def test_two_centres(both, ends, backend):
    assert_pyscf(both, "int2c2e_ip1", shls_slice=ends, backend=backend)


@pytest.mark.parametrize("name", ["int2e_ip1", "int3c2e_ip1", "int3c2e_ip2", "int2c2e_ip1"])
@pytest.mark.parametrize("suffix", ["_sph", "_cart"])
def test_names(name, suffix):
    assert_pyscf(molecule("O 0 0 0; H 0.1 0.7 -0.4", {"O": [[2, [1.0, 1.0]]], "H": [[1, [0.7, 1.0]]]}), name + suffix)


def test_i_functions(backend):
    """To what libcint can do with them."""
    high = molecule("O 0 0 0; H 0.3 0.7 -0.4", {"O": [[6, [1.1, 1.0]], [1, [0.6, 1.0]]], "H": [[6, [0.9, 1.0]]]})
    for ends in ((0, 3, 0, 3, 2, 3, 0, 1), (2, 3, 0, 1, 0, 1, 2, 3)):
        assert_pyscf(high, "int2e_ip1", shls_slice=ends, backend=backend)
    assert_pyscf(high, "int2c2e_ip1", backend=backend)


def test_translations_change_nothing(mol, both):
    """The nablas of all indices add up to zero."""
    four = md4.intor(mol, "int2e_ip1", backend="cpu")
    total = four + four.transpose(0, 2, 1, 3, 4) + four.transpose(0, 3, 4, 1, 2) + four.transpose(0, 3, 4, 2, 1)
    assert abs(total).max() < 1e-13 * abs(four).max()
    one, two = (md4.intor(both, f"int3c2e_ip{n}", shls_slice=(0, 6, 0, 6, 6, 11), backend="cpu") for n in (1, 2))
    assert abs(one + one.transpose(0, 2, 1, 3) + two).max() < 1e-13 * abs(two).max()
    metric = md4.intor(both, "int2c2e_ip1", backend="cpu")
    assert abs(metric + metric.transpose(0, 2, 1)).max() < 1e-13 * abs(metric).max()


def nabla(component, axis, exponent):
    """The derivative of a component {(x, y, z): c} of a Gaussian, as another one."""
    made = {}
    for powers, c in component.items():
        for step, factor in ((-1, powers[axis]), (1, -2 * exponent)):
            moved = tuple(n + step * (k == axis) for k, n in enumerate(powers))
            if factor:
                made[moved] = made.get(moved, 0) + c * factor
    return made


def exact(shells, axis, element, operator=("coulomb", None)):
    """An element of (nabla a b|cd) of four shells of one primitive each, by the oracle."""
    given = [oracle.One(shells[n ^ 1]) if s is None else s for n, s in enumerate(shells)]
    with mp.workdps(60):
        parts = [
            {(0, 0, 0): mpf(1)} if isinstance(s, oracle.One) else oracle.components(s.l, True)[n]
            for s, n in zip(given, element)
        ]
        exponents = [mpf(float(s.exponents[0])) for s in given]
        parts[0] = nabla(parts[0], axis, exponents[0])
        centres = [[mpf(float(x)) for x in s.centre] for s in given]
        quartet = oracle.PrimitiveQuartet(exponents, centres, sum(s.l for s in given) + 1, operator)
        factor = np.prod([mpf(float(s.coefficients[0][0])) for s in given])
        return float(factor * mp.fsum(c * quartet(t) for c, t in oracle.expand(parts)))


def one_primitive(ls, exponents=(0.9, 1.3, 0.7, 1.1)):
    return [Shell(l, [z], [[1.0]], centre) for l, z, centre in zip(ls, exponents, CENTRES)]


def tensor(basis, name, shls_slice, operator=None, backend="cpu"):
    request = DerivativeRequest.of_name(basis, name, "s1", shls_slice)
    return locked_tensor(Engine(basis, None, operator, backend), request)


@pytest.mark.sample("cpu-ls1-*", "cpu-ls2-*")
@pytest.mark.parametrize("operator", [("coulomb", 0.0), ("erfc", 0.3)], ids=["coulomb", "erfc"])
@pytest.mark.parametrize("ls", [(8, 7, 8, 8), (0, 10, 3, 9), (2, 1, 3, 2)])
def test_any_l(ls, operator, backend):
    """Up to the limit, against the oracle."""
    shells = one_primitive(ls)
    ours = tensor(Basis(shells), "int2e_ip1", (0, 1, 1, 2, 2, 3, 3, 4), Operator(*operator), backend)
    for axis, ends in ((0, (0, -1, -1, 0)), (1, (-1, 0, -1, -1)), (2, (0, 0, 0, -1))):
        element = tuple(n % (2 * l + 1) for n, l in zip(ends, ls))
        assert abs(ours[(axis, *element)] - exact(shells, axis, element, operator)) < TOLERANCE * abs(ours).max()


def test_any_l_of_single_shells(backend):
    shells = one_primitive((16, 0, 15, 0))
    basis = Basis.joined([Basis(shells)])
    ours = tensor(basis, "int2c2e_ip1", (0, 1, 2, 3), backend=backend)
    assert ours.shape == (3, 33, 31)
    for axis in range(3):
        these = shells[0], None, shells[2], None
        assert abs(ours[axis, 0, -1] - exact(these, axis, (0, 0, 30, 0))) < TOLERANCE * abs(ours).max()


@pytest.mark.parametrize("name, kind", [("int2e_yp_ip1", "yukawa"), ("int2e_stg_ip1_sph", "slater")])
def test_geminals(name, kind):
    mol = molecule("O 0 0 0; H 0.1 0.7 -0.4", {"O": [[1, [1.0, 1.0]]], "H": [[0, [0.7, 1.0]]]})
    mol.set_f12_zeta(1.2)
    ours, (p, s) = md4.intor(mol, name, backend="cpu"), md4.Basis.from_mol(mol).shells
    for axis in range(3):
        expected = exact([p, s, p, s], axis, (1, 0, 2, 0), (kind, 1.2))
        assert abs(ours[axis, 1, 3, 2, 3] - expected) < 1e-14


def test_results_go_where_they_should(mol, tmp_path):
    out = np.empty((3, mol.nao, mol.nao, mol.nao * (mol.nao + 1) // 2))
    assert md4.intor(mol, "int2e_ip1", "s2kl", out=out, backend="cpu") is out
    file = np.lib.format.open_memmap(tmp_path / "ip1.npy", "w+", "f8", out.shape)
    assert md4.intor(mol, "int2e_ip1", "s2kl", out=file, backend="cpu") is file
    np.testing.assert_array_equal(file, out)
    square = md4.intor(mol, "int2e_ip1", backend="cpu")
    rows, cols = np.tril_indices(mol.nao)
    np.testing.assert_array_equal(square[..., rows, cols], out)
    np.testing.assert_array_equal(square, square.transpose(0, 1, 2, 4, 3))


def test_little_memory_and_several_threads(mol, two_threads, monkeypatch):
    plain = md4.intor(mol, "int2e_ip1", "s2kl", backend="cpu")
    take, batches = DerivativeTensor.take, []
    monkeypatch.setattr(DerivativeTensor, "take", lambda *args, **kw: batches.append(args[1]) or take(*args, **kw))
    room = 2 + 5 * LANES / 8  # most of it is for lanes
    made = md4.intor(mol, "int2e_ip1", "s2kl", backend="cpu", max_memory=plain.nbytes / 1e6 + room)
    assert len(batches) > 1
    assert relative_error(made, plain) < 1e-14


def test_memory_is_refused_before_it_is_taken(mol, both):
    with pytest.raises(MemoryLimitError, match=r"shape \(3, .* takes .* but .* may be used; .* use aosym='s2kl'"):
        md4.intor(mol, "int2e_ip1", backend="cpu", max_memory=1)
    with pytest.raises(MemoryLimitError, match=r"use aosym='s2ij', .* by out \(numpy\.memmap\)"):
        md4.intor(both, "int3c2e_ip2", backend="cpu", max_memory=0.5)
    out = np.empty((3, mol.nao, mol.nao, mol.nao * (mol.nao + 1) // 2))
    with pytest.raises(MemoryLimitError, match="the least workspace for"):
        md4.intor(mol, "int2e_ip1", "s2kl", out=out, backend="cpu", max_memory=0.05)


WRONG = [
    ("int2e_ip1", {"aosym": "s4"}, ArgumentError, "aosym 's4' is unknown; use one of s1, s2kl"),
    ("int3c2e_ip1", {"aosym": "s2ij"}, ArgumentError, "aosym 's2ij' is unknown; use one of s1"),
    ("int2e_ip1", {"aosym": "s2kl", "shls_slice": (0, 1, 0, 1, 0, 2, 0, 1)}, ArgumentError, "equal ranges for k and l"),
    ("int2e_ip1", {"shls_slice": (0, 1, 0, 1)}, ArgumentError, "must hold 8 shell numbers"),
    ("int2e_ip1", {"out": np.empty(3)}, ArgumentError, "out must be"),
    ("int2e_ip1", {"device": "yes"}, ArgumentError, "device must be"),
    ("int2e_ip1", {"gather": True}, ArgumentError, "leave out devices, comm and gather"),
    ("int2c2e_ip1", {"device": True}, DeviceError, "it needs backend='cuda'"),
]  # fmt: skip


@pytest.mark.parametrize("name, options, error, message", WRONG)
def test_wrong_arguments(name, options, error, message):
    with pytest.raises(error, match=message):
        md4.intor(molecule(WATER, "sto-3g"), name, **{"backend": "cpu", **options})


@pytest.mark.parametrize("basis", [SHELLS, "general contractions"], ids=["mixed", "general"])
@pytest.mark.parametrize("name", ["int2e_ip1", "int3c2e_ip1", "int3c2e_ip2", "int2c2e_ip1", "int3c2e"])
def test_the_least_memory_is_enough(name, basis):
    """What the refusal names is enough, not much less is, and it is not exceeded."""
    general = {"He": [[3, [1.0, 1.0], [0.4, 0.3], [0.2, 0.1]], [0, [1.0, 1.0]]]}
    mol = molecule(ATOMS, basis) if basis is SHELLS else molecule("He 0 0 0; He 0 0 2", general)
    shells = (0, 2) * (4 if name == "int2e_ip1" else int(name[3]))

    def work(cap=None):
        return md4.intor(mol, name, shls_slice=shells, backend="cpu", max_memory=cap)

    want, (error, _) = work(), traced(lambda: work(1e-4))
    least = named(error)
    found, peak = traced(lambda: work(least))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13)
    assert peak < least + OBJECTS_MB
    with pytest.raises(MemoryLimitError):
        work(0.97 * least)


def test_limit_of_l():
    basis = Basis(one_primitive((8, 8, 8, 8)))
    with pytest.raises(UnsupportedError, match="L = 32, beyond the limit of 31 for derivatives"):
        DerivativeRequest.of_name(basis, "int2e_ip1", "s1", None)


def test_a_gradient_of_casscf(monkeypatch):
    """PySCF's, with tensors of md4."""
    mf = scf.RHF(molecule("Li 0 0 0.1; H 0.3 0 1.6", "6-31g")).run(conv_tol=1e-12)
    gradient = mcscf.CASSCF(mf, 2, 2).run(conv_tol=1e-11).nuc_grad_method()
    expected, intor, made = gradient.kernel(), gto.Mole.intor, []

    def ours(mol, name, *args, **options):
        if name != "int2e_ip1":
            return intor(mol, name, *args, **options)
        assert options.pop("comp") == 3
        made.append(options)
        return md4.intor(mol, name, backend="cpu", **options)

    monkeypatch.setattr(gto.Mole, "intor", ours)
    np.testing.assert_allclose(gradient.kernel(), expected, rtol=0, atol=1e-11)
    assert made
