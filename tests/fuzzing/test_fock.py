"""Random densities of every dtype, layout and symmetry: J and K against PySCF; see `strategies` for seeds."""

from dataclasses import dataclass

import numpy as np
import pytest
from arbitration import NEGLIGIBLE, TOLERANCE, agree, operator_of, pair_bounds, tensor
from hypothesis import strategies as st
from pyscf.scf.hf import dot_eri_dm
from strategies import GPU_EXAMPLES, GPU_KINDS, TALLY, Molecule, fuzz, memory_caps, molecules, range_separations, report

import md4

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint64", ">i2"]
REALS = ["float16", "float32", "float64", "longdouble", ">f8"]
DTYPES = [*INTEGERS, *REALS, "complex64", "complex128", "clongdouble", ">c8"]
LAYOUTS = ["C", "F", "transposed", "strided", "reversed", "read-only", "broadcast", "offset", "list"]


@dataclass(frozen=True)
class Density:
    """How a density matrix is made: elements from a seed, as an array of a dtype and a layout.

    Attributes
    ----------
    count : int
        Matrices; 0 for one of two dimensions.
    size : float
        Largest element about; of integers at most what the dtype holds.
    sparse : bool
        Most blocks zero.
    """

    dtype: str = "float64"
    layout: str = "C"
    count: int = 0
    seed: int = 0
    size: float = 1.0
    sparse: bool = False

    def array(self, nao, hermi):
        shape = (self.count, nao, nao) if self.count else (nao, nao)
        return laid_out(self.symmetric(shape, hermi), self.layout)

    def symmetric(self, shape, hermi):
        """Elements of the dtype with the symmetry that hermi promises, exactly."""
        rng, dtype = np.random.default_rng(self.seed), np.dtype(self.dtype)
        d = elements(rng, shape, dtype, self.size)
        if self.sparse:
            d[rng.random(shape) < 0.8] = 0
        if hermi == 0:
            return d
        low, swapped = np.tril(np.ones(shape[-2:], dtype=bool), -1), d.swapaxes(-1, -2).conj()
        out = np.where(low, d, swapped if hermi == 1 else -swapped)
        diagonal = np.arange(shape[-1])
        on = d[..., diagonal, diagonal]
        out[..., diagonal, diagonal] = on.real if hermi == 1 else 1j * on.imag if dtype.kind == "c" else 0
        return out.astype(dtype)


def elements(rng, shape, dtype, size):
    """Random numbers of a dtype; the most negative integer is left out, for it has no opposite."""
    if dtype.kind in "iu":
        most = min(np.iinfo(dtype).max, 2**40)
        top = int(min(most, max(1, size * 128)))
        return rng.integers(0 if dtype.kind == "u" else -top, top, shape, endpoint=True).astype(dtype)
    x = size * rng.normal(size=shape)
    return (x + 1j * size * rng.normal(size=shape) if dtype.kind == "c" else x).astype(dtype)


def laid_out(d, layout):
    """The same numbers in another place of memory."""
    if layout == "broadcast":
        return np.broadcast_to(d[0], d.shape) if d.ndim == 3 else np.broadcast_to(d, (2, *d.shape))
    if layout == "list":
        return d.tolist()
    wide = np.full((*d.shape[:-2], 2 * d.shape[-2], 3 * d.shape[-1]), 77, dtype=d.dtype)
    place = {
        "C": np.empty_like(d, order="C"), "read-only": np.empty_like(d, order="C"), "F": np.empty_like(d, order="F"),
        "transposed": np.empty_like(d, order="C").swapaxes(-1, -2), "strided": wide[..., ::2, ::3],
        "reversed": np.empty_like(d, order="C")[..., ::-1, ::-1],
        "offset": np.zeros(d.nbytes + 1, dtype=np.uint8)[1:].view(d.dtype).reshape(d.shape),
    }[layout]  # fmt: skip
    place[...] = d
    place.flags.writeable = layout != "read-only"
    return place


@dataclass(frozen=True)
class Build:
    """One call of `JK.update`, `JK.get_jk` or `md4.get_jk`."""

    density: Density
    hermi: int = 1
    with_j: bool = True
    with_k: bool = True
    omega: float = None


@dataclass(frozen=True)
class Sequence:
    """Builds of one `md4.JK`, or a single one of `md4.get_jk`."""

    molecule: Molecule
    builds: tuple
    how: str = "get_jk"
    tolerance: float = 1e-13
    max_memory: float = None
    backend: str = "cpu"


def densities(count=None):
    return st.builds(
        Density, st.sampled_from(DTYPES), st.sampled_from(LAYOUTS),
        st.sampled_from([0, 1, 2, 3]) if count is None else st.just(count), st.integers(0, 10**6),
        st.sampled_from([1.0, 1.0, 1e-3, 30.0, 1e-6]), st.booleans(),
    )  # fmt: skip


def allowed_symmetries(density):
    """Unsigned numbers have no opposites."""
    return st.sampled_from([0, 1] if np.dtype(density.dtype).kind == "u" else [0, 1, 2])


@st.composite
def sequences(draw, most=25, kinds=None, omegas=None, backend="cpu"):
    molecule = draw(molecules(most, kinds, (0.0, 0.0, 0.0, 0.3, -0.2) if backend == "cpu" else (0.0,)))
    how = draw(st.sampled_from(["function", "get_jk", "update", "update"]))
    omegas = range_separations() if omegas is None else omegas
    builds = []
    for _ in range(1 if how == "function" else draw(st.integers(1, 4))):
        if builds and draw(st.integers(0, 2)):  # as the last, so that `update` takes a difference
            last = builds[-1]
            density = draw(densities(last.density.count))
            hermi = last.hermi if np.dtype(density.dtype).kind != "u" or last.hermi < 2 else 0
            builds.append(Build(density, hermi, last.with_j, last.with_k, last.omega))
        else:
            density = draw(densities())
            which = draw(st.sampled_from([(True, True), (True, True), (True, False), (False, True), (False, False)]))
            builds.append(Build(density, draw(allowed_symmetries(density)), *which, draw(omegas)))
    tolerance = draw(st.sampled_from([0, 1e-13, 1e-10, 1e-6]))
    return Sequence(molecule, tuple(builds), how, tolerance, draw(memory_caps()), backend)


def numbers(dm):
    """A density as PySCF takes it."""
    dm = np.asarray(dm)
    return dm.astype(np.complex128 if np.iscomplexobj(dm) else np.float64)


def from_tensor(eri, dm):
    """J and K by PySCF, real and imaginary part apart."""
    if np.iscomplexobj(dm):
        return tuple(a + 1j * b for a, b in zip(from_tensor(eri, dm.real.copy()), from_tensor(eri, dm.imag.copy())))
    return dot_eri_dm(eri, np.ascontiguousarray(dm), hermi=0)


def allowed_errors(bounds, dm, lost):
    """What elements of J and K may be off: `TOLERANCE` of each integral's bound, and `lost` by screening."""
    size = abs(dm)
    floor = NEGLIGIBLE * size.sum(axis=(-2, -1), keepdims=True) + lost
    j = bounds * (bounds * size).sum(axis=(-2, -1), keepdims=True)
    return TOLERANCE * j + floor, TOLERANCE * (bounds @ size @ bounds) + floor


def excess(ours, theirs, allowed):
    """The largest error over what is allowed; infinite for NaN."""
    ratio = np.max(abs(ours - theirs) / np.maximum(allowed, np.finfo(float).tiny), initial=0.0)
    return np.inf if np.isnan(ratio) else ratio


def call(sequence, mol, jk, build, dm):
    """J and K by the call that is meant."""
    options = {"hermi": build.hermi, "with_j": build.with_j, "with_k": build.with_k, "omega": build.omega}
    if sequence.how == "function":
        return md4.get_jk(
            mol, dm, **options, backend=sequence.backend, max_memory=sequence.max_memory,
            direct_scf_tol=sequence.tolerance,
        )  # fmt: skip
    return getattr(jk, sequence.how)(dm, **options)


def check_builds(sequence):
    """Every J and K is right, or refused for its memory, and the density is as it was."""
    mol = sequence.molecule.mol()
    bounds, functions = pair_bounds(mol), sum(mol.bas_nctr(i) for i in range(mol.nbas))
    jk = md4.JK(
        mol, backend=sequence.backend, max_memory=sequence.max_memory, direct_scf_tol=sequence.tolerance
    )
    past = np.zeros(bounds.shape)
    for n, build in enumerate(sequence.builds):
        dm = build.density.array(mol.nao, build.hermi)
        before = numbers(dm)
        try:
            result = call(sequence, mol, jk, build, dm)
        except md4.MemoryLimitError:
            assert sequence.max_memory is not None
            TALLY[check_builds.__qualname__, "builds refused for their memory"] += 1
            continue
        TALLY[check_builds.__qualname__, "builds"] += 1
        assert np.array_equal(before, numbers(dm))
        past = np.maximum(past, abs(before).reshape(-1, *bounds.shape).max(axis=0))  # `update` sums over differences
        judge_build(sequence, mol, build, before, result, bounds, (n + 1, 2 * functions**2, past))


def judge_build(sequence, mol, build, dm, result, bounds, history):
    """Dtype, shape and elements of J and K; the oracle is asked of the tensor where PySCF says otherwise."""
    builds, quartets, past = history
    omega = float(mol.omega if build.omega is None else build.omega)
    theirs = tensor(mol, omega)
    lost = 2 * builds * quartets * sequence.tolerance
    errors = allowed_errors(bounds, 2 * builds * past, lost)
    assert [v is not None for v in result] == [build.with_j, build.with_k]
    references = from_tensor(theirs, dm)
    found = 0.0
    for mine, reference, allowed in zip(result, references, errors):
        if mine is not None:
            assert mine.shape == dm.shape
            assert mine.dtype == dm.dtype
            found = max(found, excess(mine, reference, allowed))
    if found <= 1:
        return
    name = check_builds.__qualname__
    own = md4.int2e(mol, omega=omega, backend="cpu")
    agree(name, mol, own, theirs, bounds, operator_of(omega))
    TALLY[name, "builds by md4's tensor"] += 1
    for mine, reference, allowed in zip(result, from_tensor(own, dm), errors):
        if mine is not None:
            assert excess(mine, reference, allowed) <= 1, f"{build}: off by {abs(mine - reference).max():.1e}"


def small(backend):
    """What the strategy takes for the short sample on a backend."""
    if backend == "cpu":
        return {}
    return {"kinds": GPU_KINDS, "backend": backend, "omegas": st.sampled_from([None, 0.0]), "most": 16}


@pytest.mark.thorough
def test_builds(backend):
    fuzz(check_builds, sequences(**small(backend)), 25 if backend == "cpu" else GPU_EXAMPLES)
    report(check_builds)


@pytest.mark.slow
def test_builds_at_length():
    fuzz(check_builds, sequences(), 1500)
    report(check_builds)


# each dtype for itself ------------------------------------------------------------------------------------------------

HELIUM = Molecule(
    (("He0", (0.0, 0.0, 0.0)), ("H1", (0.0, 0.0, 1.4))),
    {"He0": [[0, [1.0, 1.0]], [1, [0.7, 1.0]]], "H1": [[0, [0.5, 1.0]]]},
)


@pytest.mark.parametrize("how", ["get_jk", "update"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_layout(backend, dtype, how):
    """One of each, where a random sample might miss it; all but the first `update` take differences."""
    builds = tuple(Build(Density(dtype, layout, 2, seed), 0) for seed, layout in enumerate(LAYOUTS))
    check_builds(Sequence(HELIUM, builds, how, backend=backend))


@pytest.mark.skipif(np.finfo(np.longdouble).max == np.finfo(float).max, reason="long doubles are doubles here")
@pytest.mark.parametrize("how", ["get_jk", "update"])
@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_densities_beyond_doubles_are_refused(backend, how, dtype):
    mol = HELIUM.mol()
    dm = np.full((mol.nao, mol.nao), np.longdouble("1e4000"), dtype=dtype)
    with pytest.raises(md4.ArgumentError, match="finite"):
        getattr(md4.JK(mol, backend=backend), how)(dm)
