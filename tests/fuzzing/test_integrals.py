"""Random integrals against libcint, and against the oracle where the two differ; see `strategies` for seeds."""

from dataclasses import dataclass

import numpy as np
import pytest
from arbitration import NEGLIGIBLE, ORACLE_TOLERANCE, agree, exactly, operator_of, pair_bounds, tensor
from hypothesis import strategies as st
from molecules import host
from strategies import GPU_EXAMPLES, GPU_KINDS, TALLY, Molecule, fuzz, memory_caps, molecules, range_separations, report

import md4

OUT_OF_MEMORY = "refused for its memory"


def beyond(aos, mine, exact, allowed):
    """The message of an error that is too large."""
    return f"AOs {aos.tolist()}: md4 {mine!r}, oracle {exact!r}, allowed {allowed:.1e}"


# tensors --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorCall:
    """A call of `md4.int2e` or `md4.intor`."""

    molecule: Molecule
    name: str = "int2e"
    aosym: str = "s1"
    omega: float = None
    zeta: float = 0.0
    shls_slice: tuple = None
    with_out: bool = False
    max_memory: float = None
    seed: int = 0
    backend: str = "cpu"

    def operator(self, mol):
        """(kind, parameter) for the oracle."""
        for name, kind in (("_yp", "yukawa"), ("_stg", "slater")):
            if name in self.name:
                return kind, self.zeta
        return operator_of(mol.omega if self.omega is None else float(self.omega))

    def ranges(self, mol):
        """First and last AO of each index."""
        loc = mol.ao_loc
        ends = self.shls_slice or (0, mol.nbas) * 4
        return [slice(int(loc[a]), int(loc[b])) for a, b in zip(ends[::2], ends[1::2])]

    def run(self, mol, out=None):
        options = {"shls_slice": self.shls_slice, "out": out, "max_memory": self.max_memory, "backend": self.backend}
        if self.name == "int2e":
            return md4.int2e(mol, self.aosym, self.omega, **options)
        return md4.intor(mol, self.name, self.aosym, self.omega, **options)


@st.composite
def slices(draw, nshell, aosym):
    """Shell ranges that a symmetry allows."""
    ends = st.lists(st.integers(0, nshell), min_size=2, max_size=2, unique=True).map(sorted)
    i, j, k, l = (draw(ends) for _ in range(4))
    if aosym == "s4":
        j, l = i, k
    same = draw(st.integers(0, 3)) == 0
    return (*i, *j, *(i if same else k), *(j if same else l))


@st.composite
def tensor_calls(draw, names=("int2e",), most=25, kinds=None, omegas=None, backend="cpu"):
    molecule = draw(molecules(most, kinds, omegas=(0.0, 0.0, 0.0) if backend == "cuda" else (0.0, 0.0, 0.3, -0.4)))
    aosym = draw(st.sampled_from(["s1", "s4", "s8"]))
    cut = aosym != "s8" and draw(st.booleans())
    return TensorCall(
        molecule, draw(st.sampled_from(names)), aosym, draw(range_separations() if omegas is None else omegas),
        draw(st.sampled_from([0.3, 0.7, 1.2, 3.0])), draw(slices(molecule.nshell, aosym)) if cut else None,
        draw(st.booleans()), draw(memory_caps()), draw(st.integers(0, 10**6)), backend,
    )  # fmt: skip


def lower(n):
    """(i, j), i >= j, of the pairs of an axis."""
    return np.tril_indices(n)


def unpacked(result, aosym, ranges, nao):
    """The result's elements at their places in a whole tensor, NaN elsewhere."""
    whole = np.full((nao,) * 4, np.nan)
    if aosym == "s1":
        whole[tuple(ranges)] = result
        return whole
    i, j = (x + ranges[0].start for x in lower(ranges[0].stop - ranges[0].start))
    k, l = (x + ranges[2].start for x in lower(ranges[2].stop - ranges[2].start))
    if aosym == "s8":
        square = np.empty((len(i), len(i)))
        square[lower(len(i))] = result
        square.T[lower(len(i))] = result
        result = square
    whole[i[:, None], j[:, None], k, l] = result
    return whole


def result_shape(aosym, ranges):
    """As PySCF's."""
    n = [r.stop - r.start for r in ranges]
    if aosym == "s1":
        return tuple(n)
    pairs = n[0] * (n[0] + 1) // 2, n[2] * (n[2] + 1) // 2
    return pairs if aosym == "s4" else (pairs[0] * (pairs[0] + 1) // 2,)


def computed(name, call):
    """The molecule, and md4's elements at their places in a whole tensor; None where refused for its memory."""
    mol = call.molecule.mol()
    mol.set_f12_zeta(call.zeta)
    ranges = call.ranges(mol)
    shape = result_shape(call.aosym, ranges)
    out = np.full(shape, np.nan) if call.with_out else None
    try:
        result = call.run(mol, out)
    except md4.MemoryLimitError:
        assert call.max_memory is not None
        TALLY[name, OUT_OF_MEMORY] += 1
        return mol, None
    assert result.shape == shape
    assert result.dtype == np.float64
    assert result is out or not call.with_out
    assert np.isfinite(result).all()
    return mol, unpacked(result, call.aosym, ranges, mol.nao)


def check_tensor(call):
    """md4's tensor is right, or refused for its memory."""
    mol, ours = computed(check_tensor.__qualname__, call)
    if ours is None:
        return
    omega = float(mol.omega if call.omega is None else call.omega)
    agree(check_tensor.__qualname__, mol, ours, tensor(mol, omega), pair_bounds(mol), call.operator(mol))


def small(backend, **options):
    """What a strategy takes for the short sample on a backend."""
    if backend == "cpu":
        return options
    few = st.sampled_from([None, 0.0, 0.3, 1e-3])
    return {**options, "kinds": GPU_KINDS, "backend": backend, "omegas": few, "most": 16}


def test_tensors(backend):
    fuzz(check_tensor, tensor_calls(**small(backend)), 25 if backend == "cpu" else GPU_EXAMPLES)
    report(check_tensor)


@pytest.mark.slow
def test_tensors_at_length():
    fuzz(check_tensor, tensor_calls(), 1500)
    report(check_tensor)


def check_geminal(call):
    """Yukawa's and Slater's integrals, by the oracle: PySCF's own builds are without them."""
    mol, ours = computed(check_geminal.__qualname__, call)
    if ours is None:
        return
    known, bounds, rng = np.argwhere(~np.isnan(ours)), pair_bounds(mol), np.random.default_rng(call.seed)
    for aos in rng.permutation(known)[:3]:
        mine, scale = ours[tuple(aos)], bounds[tuple(aos[:2])] * bounds[tuple(aos[2:])]
        exact = exactly(md4.Basis.from_mol(mol), aos, call.operator(mol))
        if exact is None:
            TALLY[check_geminal.__qualname__, "elements too dear"] += 1
            continue
        TALLY[check_geminal.__qualname__, "elements"] += 1
        allowed = ORACLE_TOLERANCE * scale * max(1.0, 1 / call.zeta) + NEGLIGIBLE
        assert abs(mine - exact) <= allowed, beyond(aos, mine, exact, allowed)


def geminal_calls():
    """Small, since the oracle takes long over them."""
    low = [(0, 2, 2), (1, 2, 2), (2, 1, 1)]
    return tensor_calls(("int2e_yp", "int2e_stg"), 12, low, st.just(0.0))


def test_geminals():
    fuzz(check_geminal, geminal_calls(), 8)
    report(check_geminal)


@pytest.mark.slow
def test_geminals_at_length():
    fuzz(check_geminal, geminal_calls(), 300)
    report(check_geminal)


# lists of pairs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListCall:
    """A call of `Engine.compute`; pairs are drawn by a seed from two classes of the basis."""

    molecule: Molecule
    omega: float = 0.0
    split: bool = False
    seed: int = 0
    with_out: bool = False
    max_memory: float = None
    backend: str = "cpu"

    def bases(self, mol):
        """Bra and ket basis, and the number of the first shell of the latter among all."""
        basis = md4.Basis.from_mol(mol)
        if not self.split or len(basis) < 2:
            return basis, basis, 0
        half = len(basis) // 2
        return md4.Basis(basis.shells[:half], basis.pure), md4.Basis(basis.shells[half:], basis.pure), half


@st.composite
def list_calls(draw, most=20, kinds=None, omegas=None, backend="cpu"):
    omega = draw(range_separations().filter(lambda x: x is not None) if omegas is None else omegas) or 0.0
    return ListCall(
        draw(molecules(most, kinds)), float(omega), draw(st.booleans()), draw(st.integers(0, 10**6)),
        draw(st.booleans()), draw(memory_caps()), backend,
    )  # fmt: skip


def random_pairs(basis, rng):
    """Up to 12 pairs of shells, of the classes of two random shells; pairs may occur twice."""
    one, two = (np.flatnonzero(basis.class_keys == basis.class_keys[rng.integers(len(basis))]) for _ in range(2))
    count = rng.integers(1, 13)
    return np.column_stack([rng.choice(one, count), rng.choice(two, count)])


def check_list(call):
    """Blocks of random lists of pairs are those of the tensor, or refused for their memory."""
    name, mol, rng = check_list.__qualname__, call.molecule.mol(), np.random.default_rng(call.seed)
    bra_basis, ket_basis, first = call.bases(mol)
    operator = md4.Operator.from_omega(call.omega)
    engine = md4.Engine(bra_basis, ket_basis, operator, call.backend, max_memory=call.max_memory)
    bra, ket = random_pairs(bra_basis, rng), random_pairs(ket_basis, rng)
    shape = (len(bra), len(ket), *(block_sizes(bra_basis, bra)), *(block_sizes(ket_basis, ket)))
    out = np.full(shape, np.nan) if call.with_out and call.backend == "cpu" else None
    try:
        result = engine.compute(bra, ket, out)
    except md4.MemoryLimitError:
        assert call.max_memory is not None
        TALLY[name, OUT_OF_MEMORY] += 1
        return
    assert result is out or out is None
    result = host(result)
    assert result.shape == shape
    assert np.isfinite(result).all()
    theirs, bounds = tensor(mol, call.omega), pair_bounds(mol)
    ours, loc = np.full(theirs.shape, np.nan), mol.ao_loc
    for n, k in np.ndindex(len(bra), len(ket)):
        place = tuple(slice(loc[s], loc[s + 1]) for s in (*bra[n], *(ket[k] + first)))
        again, size = ours[place], bounds[place[:2]].max() * bounds[place[2:]].max()
        assert np.isnan(again).all() or abs(again - result[n, k]).max() <= ORACLE_TOLERANCE * size + NEGLIGIBLE
        ours[place] = result[n, k]
    agree(name, mol, ours, theirs, bounds, operator_of(call.omega))


def block_sizes(basis, pairs):
    """AOs of the two shells of each pair of a list."""
    return np.diff(basis.ao_loc)[pairs[0]].tolist()


def test_lists(backend):
    options = small(backend)
    fuzz(check_list, list_calls(**options), 25 if backend == "cpu" else GPU_EXAMPLES)
    report(check_list)


@pytest.mark.slow
def test_lists_at_length():
    fuzz(check_list, list_calls(), 1500)
    report(check_list)


# the oracle alone -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OracleCall:
    """An operator, over a molecule of which a few elements are compared."""

    molecule: Molecule
    kind: str
    parameter: float
    seed: int


@st.composite
def oracle_calls(draw):
    kinds = ["gaussian", "gaussian", "gaussian_coulomb", "yukawa", "slater", "erf", "erfc", "coulomb"]
    kind = draw(st.sampled_from(kinds))
    power = draw(st.integers(-3000, 3000))
    parameter = 0.0 if kind == "coulomb" else 10 ** (power / 1000)
    low = [(0, 2, 2), (1, 2, 1), (2, 1, 1), (3, 1, 1)]
    return OracleCall(draw(molecules(20, low)), kind, parameter, draw(st.integers(0, 10**6)))


def check_oracle(call):
    """Random elements of any operator, relative to what rounding may do to the Coulomb integral."""
    mol, rng = call.molecule.mol(), np.random.default_rng(call.seed)
    basis, bounds = md4.Basis.from_mol(mol), pair_bounds(mol)
    engine = md4.Engine(basis, operator=md4.Operator(call.kind, call.parameter), backend="cpu")
    for _ in range(3):
        aos = rng.integers(mol.nao, size=4)
        exact = exactly(basis, aos, (call.kind, call.parameter or None))
        if exact is None:
            TALLY[check_oracle.__qualname__, "elements too dear"] += 1
            continue
        shells = np.searchsorted(basis.ao_loc, aos, side="right") - 1
        block = engine.compute([shells[:2]], [shells[2:]])[0, 0]
        mine = block[tuple(aos - basis.ao_loc[shells])]
        allowed = 1e-12 * abs(block).max() + 1e-13 * gaussian_bound(call, bounds, aos) + 1e-25
        TALLY[check_oracle.__qualname__, "elements"] += 1
        assert abs(mine - exact) <= allowed, beyond(aos, mine, exact, allowed)


def gaussian_bound(call, bounds, aos):
    """Scale of the integral: Coulomb's; a kernel that is bounded itself, exp(-x), is below 1/r nearby only."""
    i, j, k, l = aos
    size = call.parameter or 1.0
    return bounds[i, j] * bounds[k, l] * max(1.0, {"slater": 1 / size, "gaussian": size**-0.5}.get(call.kind, 1.0))


@pytest.mark.thorough
def test_oracle():
    fuzz(check_oracle, oracle_calls(), 10)
    report(check_oracle)


@pytest.mark.slow
def test_oracle_at_length():
    fuzz(check_oracle, oracle_calls(), 400)
    report(check_oracle)
