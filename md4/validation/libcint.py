"""Comparison of md4 with PySCF's libcint, class by class.

A class (la lb|lc ld) represents its eight permutations: la >= lb, lc >= ld, (la, lb) >= (lc, ld). Of a large class a
random sample with a fixed seed is taken: a few shells for each of the four centres. All quartets of these shells are
compared, so that libcint computes them in one call. Two errors are shown:

- absolute: the largest |md4 - libcint| of the class;
- relative: the largest error of a shell quartet divided by its largest |element|, for the worst quartet of the class.

If a quartet is small because large terms cancel (for example because it vanishes by symmetry), double precision sets a
floor to the absolute error of both programs. The floor is some ulps of the scale of these terms, which is the Schwarz
bound sqrt((ab|ab) (cd|cd)) of the Coulomb operator. Quartets beyond the relative tolerance whose error is within 32
ulps of that bound are left out of the relative error and counted in the column 'floor'. The same is done with quartets
that are below 1e-15 in both programs, because libcint drops primitive pairs with an overlap factor below exp(-60).

With erfc (omega = -0.3) md4 and libcint differ by up to 2e-11 in water in cc-pVTZ, from (dd|dd) and (ff|pp) on. In five
of these quartets the worst element was compared with `md4.validation.oracle`: md4 was right to 1e-15, and the
difference was the error of libcint. Use a tolerance of 1e-10 there.

The time of md4 is that of a call with compiled kernels, including the transfer of the result to the host. The time of
libcint does not include the set-up of its optimizer.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from time import perf_counter

import numpy as np

from md4.engine import Engine
from md4.errors import ArgumentError
from md4.method.operators import Operator, check_order
from md4.shells.basis import Basis
from md4.support.arguments import checked_integer, checked_mol, checked_progress, checked_real
from md4.support.display import shell_letter
from md4.support.progress import Progress

FLOOR = 32 * np.finfo(float).eps  # relative to the Schwarz bound
NEGLIGIBLE = 1e-15  # in Hartree
MAX_BLOCK_ELEMENTS = 2**24  # 128 MB for a tensor
WORST = 3  # number of quartets of a class that a record keeps


@dataclass(frozen=True)
class Quartet:
    """One shell quartet, and its element with the largest difference between md4 and libcint.

    Attributes
    ----------
    shells : tuple of int
        Numbers of the four shells.
    element : tuple of int
        (a, b, c, d) within the shells, [contraction][component].
    ours, theirs : float
        This element by md4 and by libcint, in Hartree.
    largest, bound : float
        The quartet's largest |element| and its Schwarz bound, in Hartree.
    excess : float
        The larger of the two errors divided by their tolerances. A quartet with more than 1 is disputed.
    """

    shells: tuple
    element: tuple
    ours: float
    theirs: float
    largest: float
    bound: float
    excess: float


@dataclass
class Record:
    """The comparison of one class.

    Attributes
    ----------
    label : str
        The class, e.g. '(dp|ss)'.
    quartets : int
        Number of shell quartets that were compared.
    max_abs : float
        Largest absolute error.
    max_rel : float
        Largest error of a quartet relative to its largest |element|, without the quartets of `floor`.
    floor : int
        Number of quartets beyond the relative tolerance, but at the floor set by rounding.
    md4_seconds, libcint_seconds : float
        Wall times of the same quartets. libcint uses as many threads as PySCF.
    passed : bool
        Whether both errors are within their tolerances.
    disputed : int
        Number of quartets beyond a tolerance.
    worst : list of Quartet
        Some quartets with the largest excess, in falling order.
    """

    label: str
    quartets: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    floor: int = 0
    md4_seconds: float = 0.0
    libcint_seconds: float = 0.0
    passed: bool = True
    disputed: int = 0
    worst: list = field(default_factory=list, repr=False)

    def add(self, quartets, max_abs, max_rel, floor, md4_seconds, libcint_seconds, disputed=0, worst=()):
        """Adds a part of the class. NaN propagates through np.maximum, and no comparison with a tolerance passes it."""
        self.quartets += quartets
        self.max_abs = float(np.maximum(self.max_abs, max_abs))
        self.max_rel = float(np.maximum(self.max_rel, max_rel))
        self.floor += floor
        self.md4_seconds += md4_seconds
        self.libcint_seconds += libcint_seconds
        self.disputed += disputed
        self.worst = sorted([*self.worst, *worst], key=lambda q: -q.excess)[:WORST]


def validate(
    mol,
    backend="auto",
    tolerance=1e-12,
    abs_tolerance=1e-10,
    omega=None,
    max_quartets_per_class=1000,
    seed=0,
    max_memory=None,
    progress=None,
):
    """Compares md4 with libcint for every class of shell quartets of a molecule.

    Parameters
    ----------
    mol : pyscf.gto.Mole
    backend : {'auto', 'cuda', 'cpu'}
    tolerance : float
        Tolerance of the relative error; see the head of this module.
    abs_tolerance : float
        Tolerance of the absolute error.
    omega : float, optional
        Range separation as in `int2e`; default `mol.omega`.
    max_quartets_per_class : int
        Classes with more quartets are sampled.
    seed : int
        Seed of the sample.
    max_memory : float, optional
        Cap in MB on the memory of the engine.
    progress : bool, optional
        See `md4.support.progress.Progress`.

    Returns
    -------
    list of Record
        One record for each class, in order of angular momentum.

    Raises
    ------
    ArgumentError, BasisError, UnsupportedError
        The input cannot be used; this is found before anything is computed.
    """
    tolerance = checked_real("tolerance", tolerance, 0)
    abs_tolerance = checked_real("abs_tolerance", abs_tolerance, 0)
    max_quartets_per_class = checked_integer("max_quartets_per_class", max_quartets_per_class, 1)
    seed = checked_integer("seed", seed, 0)
    checked_progress(progress)
    omega = checked_mol(mol).omega if omega is None else omega
    basis = Basis.from_mol(mol)
    check_order(4 * basis.lmax)
    engine = Engine(basis, basis, operator=Operator.from_omega(omega), backend=backend, max_memory=max_memory)
    libcint = Libcint(mol, basis, float(omega))
    classes = quartet_classes(basis)
    records = []
    with Progress(len(classes), enabled=progress, label="validate", unit="class") as bar:
        for ls in classes:
            record = Record(class_label(ls))
            for shells in samples(basis, ls, max_quartets_per_class, seed):
                record.add(*compare(engine, libcint, shells, tolerance, abs_tolerance))
            record.passed = bool(record.max_abs <= abs_tolerance and record.max_rel <= tolerance)
            records.append(record)
            bar.update()
    return records


def quartet_classes(basis):
    """The distinct (la, lb, lc, ld) of a basis, one for its eight permutations."""
    pairs = [(a, b) for b, a in combinations_with_replacement(sorted({s.l for s in basis.shells}), 2)]
    return [(*bra, *ket) for ket, bra in combinations_with_replacement(sorted(pairs), 2)]


def class_label(ls):
    """(la, lb, lc, ld) as '(ab|cd)'."""
    a, b, c, d = map(shell_letter, ls)
    return f"({a}{b}|{c}{d})"


def samples(basis, ls, limit, seed):
    """Yields four arrays of shell indices for each combination of contractions in the class.

    All quartets of these shells are to be compared. They are at most `limit` for the class, but at least one for each
    combination.
    """
    groups = defaultdict(list)
    for i, shell in enumerate(basis.shells):
        groups[shell.l, shell.nctr].append(i)
    contractions = [[n for l, n in sorted(groups) if l == wanted] for wanted in ls]
    combinations = list(product(*contractions))
    rng = np.random.default_rng([seed, *ls])
    for nctr in combinations:
        pools = [groups[key] for key in zip(ls, nctr)]
        size = int(np.prod([basis.ncomp(l) * n for l, n in zip(ls, nctr)]))
        most = min(limit // len(combinations), MAX_BLOCK_ELEMENTS // size)
        counts = sample_counts([len(pool) for pool in pools], max(1, most))
        yield [np.sort(rng.choice(pool, count, replace=False)) for pool, count in zip(pools, counts)]


def sample_counts(counts, limit):
    """Numbers of shells for the four centres, reduced evenly until their product is at most `limit`."""
    counts = list(counts)
    while np.prod(counts, dtype=float) > limit:
        counts[int(np.argmax(counts))] -= 1
    return counts


def compare(engine, libcint, shells, tolerance, abs_tolerance):
    """The arguments of `Record.add` for all quartets of four lists of shells."""
    bra, ket = (np.array(list(product(*pair))) for pair in (shells[:2], shells[2:]))
    host(engine.compute(bra[:1], ket[:1]))  # compiles
    optimizer = libcint.optimizer(shells)
    start = perf_counter()
    ours = host(engine.compute(bra, ket))
    middle = perf_counter()
    theirs = libcint.blocks(shells, optimizer)
    end = perf_counter()
    bounds = np.multiply.outer(libcint.schwarz(bra), libcint.schwarz(ket))
    counted = errors(ours, theirs, bounds, tolerance)
    disputed, worst = worst_quartets(ours, theirs, bounds, bra, ket, tolerance, abs_tolerance)
    return len(bra) * len(ket), *counted, middle - start, end - middle, disputed, worst


def host(result):
    """A result of the engine as an ndarray on the host."""
    return result.copy_to_host() if hasattr(result, "copy_to_host") else np.asarray(result)


def errors(ours, theirs, bounds, tolerance):
    """Largest absolute error, largest relative one of the blocks above the floor, and number of those at it.

    `ours` and `theirs` have shape (ij, kl, a, b, c, d), `bounds` (ij, kl) is the Schwarz bound of each block.
    """
    error, relative, at_floor = quartet_errors(ours, theirs, bounds, tolerance)
    return error.max(), np.max(relative[~at_floor], initial=0.0), int(at_floor.sum())


def quartet_errors(ours, theirs, bounds, tolerance):
    """Absolute and relative error of each quartet, and whether it is at the floor; all of shape (ij, kl)."""
    if ours.shape != theirs.shape:
        raise ArgumentError(f"the engine's result has shape {ours.shape}, libcint's {theirs.shape}.")
    error = np.abs(ours - theirs).max(axis=(2, 3, 4, 5))
    largest = np.abs(theirs).max(axis=(2, 3, 4, 5))
    relative = error / np.maximum(largest, np.finfo(float).tiny)
    at_floor = (error <= FLOOR * bounds) | (np.maximum(largest, error) <= NEGLIGIBLE)
    return error, relative, at_floor & (relative > tolerance)


def worst_quartets(ours, theirs, bounds, bra, ket, tolerance, abs_tolerance):
    """Number of quartets beyond a tolerance, and a `Quartet` for each of the worst.

    `bra` and `ket` are the shell pairs of `ours` and `theirs`, shapes (ij, 2) and (kl, 2).
    """
    tiny = np.finfo(float).tiny
    error, relative, at_floor = quartet_errors(ours, theirs, bounds, tolerance)
    relative[at_floor] = 0.0
    with np.errstate(over="ignore"):
        excess = np.maximum(relative / max(tolerance, tiny), error / max(abs_tolerance, tiny))
    excess[np.isnan(excess)] = np.inf
    worst = []
    for n in np.argsort(-excess, axis=None)[:WORST]:
        place = np.unravel_index(n, excess.shape)
        mine, other = ours[place], theirs[place]
        difference = np.abs(mine - other)
        difference[np.isnan(difference)] = np.inf
        element = np.unravel_index(np.argmax(difference), mine.shape)
        worst.append(Quartet(
            shells=(*bra[place[0]].tolist(), *ket[place[1]].tolist()), element=tuple(map(int, element)),
            ours=float(mine[element]), theirs=float(other[element]), largest=float(np.abs(other).max()),
            bound=float(bounds[place]), excess=float(excess[place]),
        ))  # fmt: skip
    return int((excess > 1).sum()), worst


class Libcint:
    """libcint's integrals over lists of shells of one molecule, through PySCF."""

    def __init__(self, mol, basis, omega):
        from pyscf.gto import PTR_RANGE_OMEGA

        self.basis = basis
        self.intor = "int2e_cart" if mol.cart else "int2e_sph"
        self.atm, self.bas, self.env = mol._atm, mol._bas, mol._env.copy()
        self.env[PTR_RANGE_OMEGA] = omega
        self.coulomb_env = mol._env.copy()
        self.coulomb_env[PTR_RANGE_OMEGA] = 0
        self._schwarz = {}

    def optimizer(self, shells):
        """libcint's tables for four index arrays, which take longer than a few integrals of high l."""
        from pyscf.gto.moleintor import make_cintopt

        return make_cintopt(self.atm, self.bas[np.concatenate(shells)], self.env, self.intor)

    def blocks(self, shells, optimizer=None):
        """All quartets of four index arrays, each of one (l, nctr); shape (ij, kl, a, b, c, d)."""
        from pyscf.gto.moleintor import getints

        counts = [len(group) for group in shells]
        ends = np.cumsum(counts)
        slices = [int(edge) for n, end in zip(counts, ends) for edge in (end - n, end)]
        bas = self.bas[np.concatenate(shells)]
        tensor = getints(self.intor, self.atm, bas, self.env, tuple(slices), cintopt=optimizer)
        sizes = [side // n for n, side in zip(counts, tensor.shape)]
        split = tensor.reshape([extent for pair in zip(counts, sizes) for extent in pair])
        i, j, k, l = counts
        return split.transpose(0, 2, 4, 6, 1, 3, 5, 7).reshape(i * j, k * l, *sizes)

    def schwarz(self, pairs):
        """sqrt(max |(ab|ab)|) of each shell pair with 1/r, shape (npair,); each pair is computed once."""
        return np.array([self._bound(int(i), int(j)) for i, j in pairs])

    def _bound(self, i, j):
        from pyscf.gto.moleintor import getints_by_shell

        key = (max(i, j), min(i, j))
        if key not in self._schwarz:
            block = getints_by_shell(self.intor, (i, j, i, j), self.atm, self.bas, self.coulomb_env)
            self._schwarz[key] = np.sqrt(np.abs(block).max())
        return self._schwarz[key]


def format_table(records):
    """The records as a table, one line a class, and a closing line."""
    head = f"{'class':<10}{'quartets':>10}{'max abs':>11}{'max rel':>11}{'floor':>7}{'md4 / s':>10}{'libcint / s':>13}"
    lines = [head, "-" * len(head)]
    for r in records:
        lines.append(
            f"{r.label:<10}{r.quartets:>10}{r.max_abs:>11.1e}{r.max_rel:>11.1e}{r.floor or '':>7}"
            f"{r.md4_seconds:>10.4f}{r.libcint_seconds:>13.4f}{'' if r.passed else '  FAILED'}"
            f"{'  libcint off, by the oracle' if r.passed and r.disputed else ''}"
        )
    failed, settled = sum(not r.passed for r in records), sum(r.passed and r.disputed > 0 for r in records)
    verdict = "all within tolerance" if not failed else f"{failed} beyond tolerance"
    if settled:
        verdict = f"{verdict}; {settled} where the oracle found libcint off"
    lines.append(f"{len(records)} classes, {sum(r.quartets for r in records)} quartets: {verdict}")
    return "\n".join(lines)
