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

The time of md4 is that of a call with compiled kernels, including the transfer of the result to the host: of two calls
the faster one. What the first one took longer, mostly to compile, is kept apart. That of libcint does not include the
set-up of its optimizer, and is the faster one of two calls, too, if the first one took less than `REPEATED` seconds.

`md4.validation.fitting` does the same for integrals of three and of two centres. So the functions below that are given
shells, one array of indices for each centre, take four, three or two of them: (ab|cd), (ab|c) or (a|b).
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from math import prod
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
INTORS = {2: "int2c2e", 3: "int3c2e", 4: "int2e"}  # libcint's names of the integrals of so many centres
REPEATED = 1.0  # seconds up to which libcint computes a second time
WORST = 3  # number of quartets of a class that a record keeps


@dataclass(frozen=True)
class Quartet:
    """One shell quartet, and its element with the largest difference between md4 and libcint.

    Likewise three shells (ab|c), or two (a|b).

    Attributes
    ----------
    shells : tuple of int
        Numbers of the shells.
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
    first_seconds : float
        How much longer the first calls of md4 took, in which kernels are compiled.
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
    first_seconds: float = 0.0
    passed: bool = True
    disputed: int = 0
    worst: list = field(default_factory=list, repr=False)

    def add(self, quartets, max_abs, max_rel, floor, md4_seconds, libcint_seconds, first_seconds, disputed=0, worst=()):
        """Adds a part of the class. NaN propagates through np.maximum, and no comparison with a tolerance passes it."""
        self.quartets += quartets
        self.max_abs = float(np.maximum(self.max_abs, max_abs))
        self.max_rel = float(np.maximum(self.max_rel, max_rel))
        self.floor += floor
        self.md4_seconds += md4_seconds
        self.libcint_seconds += libcint_seconds
        self.first_seconds += first_seconds
        self.disputed += disputed
        self.worst = sorted([*self.worst, *worst], key=lambda q: -q.excess)[:WORST]


def validate(
    mol, backend="auto", tolerance=1e-12, abs_tolerance=1e-10, omega=None, max_quartets_per_class=1000, seed=0,
    max_memory=None, progress=None,
):  # fmt: skip
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
    tolerances, most, seed, omega = checked_options(
        mol, tolerance, abs_tolerance, omega, max_quartets_per_class, seed, progress
    )
    basis = Basis.from_mol(mol)
    check_order(4 * basis.lmax)
    engine = Engine(basis, basis, operator=Operator.from_omega(omega), backend=backend, max_memory=max_memory)
    libcint = Libcint(mol, float(omega))
    classes = [(class_label(ls), samples(basis, ls, most, seed)) for ls in quartet_classes(basis)]
    return compare_classes(engine, libcint, classes, *tolerances, progress)


def checked_options(mol, tolerance, abs_tolerance, omega, most, seed, progress):
    """(both tolerances, quartets of a class, seed, omega) of `validate`; ArgumentError if one cannot be used."""
    tolerances = checked_real("tolerance", tolerance, 0), checked_real("abs_tolerance", abs_tolerance, 0)
    most, seed = checked_integer("max_quartets_per_class", most, 1), checked_integer("seed", seed, 0)
    checked_progress(progress)
    return tolerances, most, seed, checked_mol(mol).omega if omega is None else omega


def compare_classes(engine, libcint, classes, tolerance, abs_tolerance, progress):
    """One `Record` for each class, a pair of its label and of what `samples` yields."""
    records = []
    with Progress(len(classes), enabled=progress, label="validate", unit="class") as bar:
        for label, sample in classes:
            record = Record(label)
            for shells in sample:
                record.add(*compare(engine, libcint, shells, tolerance, abs_tolerance))
            record.passed = bool(record.max_abs <= abs_tolerance and record.max_rel <= tolerance)
            records.append(record)
            bar.update()
    return records


def quartet_classes(basis):
    """The distinct (la, lb, lc, ld) of a basis, one for its eight permutations."""
    pairs = [(a, b) for b, a in combinations_with_replacement(sorted({s.l for s in basis.shells}), 2)]
    return [(*bra, *ket) for ket, bra in combinations_with_replacement(sorted(pairs), 2)]


def sides(items):
    """The bra's and the ket's of two, three or four items, which belong to the shells of (a|b), (ab|c) or (ab|cd)."""
    first = (len(items) + 1) // 2
    return items[:first], items[first:]


def class_label(ls):
    """(la, lb, lc, ld) as '(ab|cd)'; three as '(ab|c)', two as '(a|b)'."""
    bra, ket = sides([shell_letter(l) for l in ls])
    return f"({''.join(bra)}|{''.join(ket)})"


def samples(basis, ls, limit, seed, ranges=None):
    """Yields an array of shell indices for each centre, for each combination of contractions in the class.

    All quartets of these shells are to be compared. They are at most `limit` for the class, but at least one for each
    combination. `ranges` has the shells that each centre may take, by default all.
    """
    groups = [shells_by_class(basis, shells) for shells in ranges or [range(basis.nshell)] * len(ls)]
    contractions = [[n for l, n in sorted(group) if l == wanted] for group, wanted in zip(groups, ls)]
    combinations = list(product(*contractions))
    rng = np.random.default_rng([seed, *ls])
    for nctr in combinations:
        pools = [group[key] for group, key in zip(groups, zip(ls, nctr))]
        size = int(np.prod([basis.ncomp(l) * n for l, n in zip(ls, nctr)]))
        most = min(limit // len(combinations), MAX_BLOCK_ELEMENTS // size)
        counts = sample_counts([len(pool) for pool in pools], max(1, most))
        yield [np.sort(rng.choice(pool, count, replace=False)) for pool, count in zip(pools, counts)]


def shells_by_class(basis, shells):
    """Those numbers `shells` of shells that have the same (l, nctr), by it."""
    groups = defaultdict(list)
    for i in shells:
        groups[basis.shells[i].l, basis.shells[i].nctr].append(i)
    return groups


def sample_counts(counts, limit):
    """Numbers of shells for the centres, reduced evenly until their product is at most `limit`."""
    counts = list(counts)
    while np.prod(counts, dtype=float) > limit:
        counts[int(np.argmax(counts))] -= 1
    return counts


def compare(engine, libcint, shells, tolerance, abs_tolerance):
    """The arguments of `Record.add` for all quartets of the lists of shells."""
    bra, ket = (np.array(list(product(*side))) if len(side) == 2 else side[0] for side in sides(shells))
    optimizer = libcint.optimizer(shells)
    ours, *both = timed(lambda: host(engine.compute(bra, ket)))
    theirs, *others = timed(lambda: libcint.blocks(shells, optimizer), REPEATED)
    bounds = np.multiply.outer(libcint.schwarz(bra), libcint.schwarz(ket))
    counted = errors(ours, theirs, bounds, tolerance)
    disputed, worst = worst_quartets(ours, theirs, bounds, bra, ket, tolerance, abs_tolerance)
    return len(bra) * len(ket), *counted, min(both), min(others), both[0] - min(both), disputed, worst


def timed(work, longest=np.inf):
    """What `work()` returns, and the seconds of its calls: two, or one if that takes longer than `longest`."""
    start = perf_counter()
    result = work()
    seconds = [perf_counter() - start]
    if seconds[0] < longest:
        work()
        seconds.append(perf_counter() - start - seconds[0])
    return result, *seconds


def host(result):
    """A result of the engine as an ndarray on the host."""
    return result.copy_to_host() if hasattr(result, "copy_to_host") else np.asarray(result)


def errors(ours, theirs, bounds, tolerance):
    """Largest absolute error, largest relative one of the blocks above the floor, and number of those at it.

    `ours` and `theirs` have shape (ij, kl, a, b, c, d), or fewer axes of functions, and `bounds` (ij, kl) is the
    Schwarz bound of each block.
    """
    error, relative, at_floor = quartet_errors(ours, theirs, bounds, tolerance)
    return error.max(), np.max(relative[~at_floor], initial=0.0), int(at_floor.sum())


def quartet_errors(ours, theirs, bounds, tolerance):
    """Absolute and relative error of each quartet, and whether it is at the floor; all of shape (ij, kl)."""
    if ours.shape != theirs.shape:
        raise ArgumentError(f"the engine's result has shape {ours.shape}, libcint's {theirs.shape}.")
    functions = tuple(range(2, ours.ndim))
    error = np.abs(ours - theirs).max(axis=functions)
    largest = np.abs(theirs).max(axis=functions)
    relative = error / np.maximum(largest, np.finfo(float).tiny)
    at_floor = (error <= FLOOR * bounds) | (np.maximum(largest, error) <= NEGLIGIBLE)
    return error, relative, at_floor & (relative > tolerance)


def worst_quartets(ours, theirs, bounds, bra, ket, tolerance, abs_tolerance):
    """Number of quartets beyond a tolerance, and a `Quartet` for each of the worst.

    `bra` and `ket` are the shell pairs of `ours` and `theirs`, shapes (ij, 2) and (kl, 2), or single shells.
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
        shells = *np.ravel(bra[place[0]]).tolist(), *np.ravel(ket[place[1]]).tolist()
        worst.append(Quartet(
            shells=shells, element=tuple(map(int, element)),
            ours=float(mine[element]), theirs=float(other[element]), largest=float(np.abs(other).max()),
            bound=float(bounds[place]), excess=float(excess[place]),
        ))  # fmt: skip
    return int((excess > 1).sum()), worst


class Libcint:
    """libcint's integrals over lists of shells of a molecule, or of two, through PySCF."""

    def __init__(self, mol, omega, auxmol=None):
        from pyscf.gto import PTR_RANGE_OMEGA, conc_env

        arrays = mol._atm, mol._bas, mol._env
        if auxmol is not None:
            arrays = conc_env(*arrays, auxmol._atm, auxmol._bas, auxmol._env)
        self.suffix = "cart" if mol.cart else "sph"
        self.atm, self.bas, self.env = arrays
        self.env, self.coulomb_env = self.env.copy(), self.env.copy()
        self.env[PTR_RANGE_OMEGA], self.coulomb_env[PTR_RANGE_OMEGA] = omega, 0
        self._schwarz = {}

    def intor(self, centres):
        """The name of the integrals of two, three or four centres."""
        return f"{INTORS[centres]}_{self.suffix}"

    def optimizer(self, shells):
        """libcint's tables for index arrays, which take longer than a few integrals of high l."""
        from pyscf.gto.moleintor import make_cintopt

        return make_cintopt(self.atm, self.bas[np.concatenate(shells)], self.env, self.intor(len(shells)))

    def blocks(self, shells, optimizer=None):
        """All quartets of four index arrays, each of one (l, nctr); shape (ij, kl, a, b, c, d).

        Of three arrays the shape is (ij, k, a, b, c), and of two (i, j, a, b).
        """
        from pyscf.gto.moleintor import getints

        counts = [len(group) for group in shells]
        ends = np.cumsum(counts)
        slices = [int(edge) for n, end in zip(counts, ends) for edge in (end - n, end)]
        bas = self.bas[np.concatenate(shells)]
        tensor = getints(self.intor(len(shells)), self.atm, bas, self.env, tuple(slices), cintopt=optimizer)
        sizes = [side // n for n, side in zip(counts, tensor.shape)]
        split = tensor.reshape([extent for pair in zip(counts, sizes) for extent in pair])
        axes = *range(0, split.ndim, 2), *range(1, split.ndim, 2)
        return split.transpose(axes).reshape(*(prod(side) for side in sides(counts)), *sizes)

    def schwarz(self, pairs):
        """sqrt(max |(ab|ab)|) of each shell pair with 1/r, or sqrt(max |(a|a)|) of each shell; each computed once."""
        return np.array([self._bound(tuple(sorted(np.ravel(pair).tolist()))) for pair in pairs])

    def _bound(self, shells):
        from pyscf.gto.moleintor import getints_by_shell

        if shells not in self._schwarz:
            name = self.intor(2 * len(shells))
            block = getints_by_shell(name, shells * 2, self.atm, self.bas, self.coulomb_env)
            self._schwarz[shells] = np.sqrt(np.abs(block).max())
        return self._schwarz[shells]


def format_table(records, counted="quartets"):
    """The records as a table, one line a class, and a closing line; `counted` is what is compared."""
    head = f"{'class':<10}{counted:>10}{'max abs':>11}{'max rel':>11}{'floor':>7}{'md4 / s':>10}{'libcint / s':>13}"
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
    lines.append(f"{len(records)} classes, {sum(r.quartets for r in records)} {counted}: {verdict}")
    return "\n".join(lines)
