"""How exact md4 and libcint are, by the oracle: random contracted shell quartets, and tight beside diffuse functions.

    python bench/lab/exact.py                                 random quartets until 300 s have passed, on the CPU or GPU
    python bench/lab/exact.py --backend cuda --limit 100 --jobs 16 --csv exact.csv
    python bench/lab/exact.py --search 100                    also the worst of 100 quartets a class for libcint
    python bench/lab/exact.py --distance                      also tight beside diffuse functions, at growing distance
    python bench/lab/exact.py --limit 0 --primitive 100       also the worst of 100 uncontracted quartets of mixed l

A shell of angular momentum l has K primitives, K = 1 to 4, with exponents from 0.1 to 300 (their logarithms are
uniform) and coefficients of either sign; its centre lies in a cube of edge 3 Bohr. Quartet n of a class depends on the
seed, the class and n only, so a longer run repeats the quartets of a shorter one and adds some. A round is one quartet
of each class, and a new round begins as long as there is time. Quartets whose largest element is below 1e-10 Hartree
are drawn again: no program that screens would compute them.

The oracle (`md4.validation.oracle`, mpmath) takes up to a minute an element, so it judges three elements of each
quartet: where md4 and libcint differ most, where md4 differs most from its own (dc|ba), and one at random. An error is
the largest of the three over the largest element of the block. libcint runs through PySCF, with its optimizer. md4
computes each quartet several times at once, so that the kernels of many quartets run; the errors are those of the worst
copy.
"""

import argparse
import sys
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
import numpy as np
from cases import Case
from clock import describe, write_csv
from libcint import Libcint

import md4
from md4.support.display import SPDF
from md4.validation import oracle
from md4.validation.libcint import host

EXPONENTS = 0.1, 300.0  # Bohr^-2
EDGE = 3.0  # Bohr
MOST_PRIMITIVES = 4
NEGLIGIBLE = 1e-10  # Hartree
LARGEST_L = 6
DIGITS = 25  # of the oracle
COPIES = {"cpu": 5, "cuda": 256}  # of the bra pair and of the ket pair
OUTPUT = {"cpu": 1e7, "cuda": 2e8}  # bytes of all copies

# ---- random quartets -------------------------------------------------------------------------------------------------


def classes(lmax=LARGEST_L):
    """The classes of each l as lists of four angular momenta: (ll|ll), (ls|ls), (ll|ss), and l beside l/2."""
    found = []
    for l in range(lmax + 1):
        found += dict.fromkeys([(l, l, l, l), (l, 0, l, 0), (l, l, 0, 0), (l, l // 2, l, (l + 1) // 2)])
    return found


def label(ls):
    return f"({Case(ls).name})"


def random_shells(rng, ls, most=MOST_PRIMITIVES):
    """A basis of four shells with at most so many primitives."""
    low, high = np.log(EXPONENTS)
    degrees = rng.integers(1, most + 1, 4)
    exponents = [np.exp(rng.uniform(low, high, k)) for k in degrees]
    coefficients = [rng.uniform(0.2, 1.0, k) * rng.choice([-1.0, 1.0], k) for k in degrees]
    return md4.Basis.from_arrays(ls, exponents, coefficients, rng.uniform(0.0, EDGE, (4, 3)))


class Quartet:
    """(ab|cd) of the four shells of a basis by md4 and by libcint.

    Attributes
    ----------
    basis : md4.Basis
    ours, turned, theirs : ndarray, shape (na, nb, nc, nd)
        By md4, by md4 from (dc|ba), and by libcint.
    largest : float
        Largest modulus of `ours`.
    spread : float
        Largest difference between copies of the block that md4 computed at once.
    """

    def __init__(self, basis, backend, alone=False):
        self.basis = basis
        engine = md4.Engine(basis, backend=backend)
        size, name = 8 * np.prod([2 * s.l + 1 for s in basis.shells]), engine.backend.name
        copies = 1 if alone else min(COPIES[name], int((OUTPUT[name] / size) ** 0.5))
        block = engine.compute([[0, 1]] * copies, [[2, 3]] * copies)
        self.ours, self.spread = first_and_spread(block)
        self.turned = host(engine.compute([[3, 2]], [[1, 0]]))[0, 0].transpose(3, 2, 1, 0)
        self.theirs = Libcint(basis).quartet((0, 1), (2, 3))
        self.largest = abs(self.ours).max()

    @property
    def difference(self):
        """Largest difference between md4 and libcint, over the largest element."""
        return abs(self.ours - self.theirs).max() / self.largest

    def bound(self):
        """The Schwarz bound sqrt((ab|ab) (cd|cd)) of the whole block."""
        engine = md4.Engine(self.basis, backend="cpu")
        blocks = [engine.compute([pair], [pair])[0, 0] for pair in ([0, 1], [2, 3])]
        return float(np.sqrt(np.prod([np.einsum("ijij->ij", block).max() for block in blocks])))

    def orders(self):
        """The same for libcint's (ab|cd), (ba|cd), (ab|dc) and (ba|dc), as text."""
        libcint, found = Libcint(self.basis), []
        for ket, bra in product((1, -1), repeat=2):
            block = libcint.quartet((0, 1)[::bra], (2, 3)[::ket])
            axes = [*(0, 1)[::bra], *(2, 3)[::ket]]
            found.append(abs(block.transpose(axes) - self.ours).max() / self.largest)
        return " ".join(f"{x:.0e}" for x in found)

    def elements(self, rng):
        """The three elements that the oracle judges."""
        suspects = [np.argmax(abs(self.ours - other)) for other in (self.theirs, self.turned)]
        flat = [*suspects, rng.integers(self.ours.size)]
        return [tuple(map(int, np.unravel_index(n, self.ours.shape))) for n in flat]

    def errors(self, elements, exact):
        """(md4's, libcint's): the largest error at some elements, over the largest element of the block."""
        mine, other = (max(abs(float(x[e]) - v) for e, v in zip(elements, exact)) for x in (self.ours, self.theirs))
        return (mine + self.spread) / self.largest, other / self.largest


def first_and_spread(blocks):
    """One block of a result (ij, kl, a, b, c, d), and the largest difference of any other from it."""
    n = blocks.shape[1]
    if isinstance(blocks, np.ndarray):
        return blocks[0, 0].copy(), abs(blocks - blocks[0, 0]).max()
    first = host(blocks[:1])[0, 0]  # row by row: all rows may not fit into the host's memory twice
    return first, max(abs(host(blocks[i : i + 1])[0] - first).max() for i in range(n))


def draw(ls, number, seed, backend, alone=False, most=MOST_PRIMITIVES):
    """Quartet `number` of a class, computed several times at once or `alone`, and the generator that made it."""
    rng = np.random.default_rng([seed, *ls, number])
    while True:
        quartet = Quartet(random_shells(rng, ls, most), backend, alone)
        if quartet.largest > NEGLIGIBLE:
            return quartet, rng


def judge(task):
    """The oracle's values of some elements; a function of this module, so that other processes can run it."""
    shells, elements = task
    return [float(x) for x in oracle.eri(shells, elements=elements, dps=DIGITS)]


def judged(quartets, pool):
    """(quartet, md4's error, libcint's error) of (quartet, rng) pairs."""
    elements = [quartet.elements(rng) for quartet, rng in quartets]
    exact = pool.imap(judge, [(quartet.basis.shells, e) for (quartet, _), e in zip(quartets, elements)])
    return [(quartet, *quartet.errors(e, x)) for (quartet, _), e, x in zip(quartets, elements, exact)]


def row(kind, number, found, note="", cartesian=""):
    """A line of the CSV; `cartesian` is the largest element of the block over Cartesian functions, if it is wanted."""
    quartet, ours, theirs = found
    shells = quartet.basis.shells
    a, b, c, d = (s.centre for s in shells)
    return {
        "kind": kind, "l": max(s.l for s in shells), "class": label(tuple(s.l for s in shells)), "number": number,
        "exponents": "; ".join(" ".join(f"{x:.3g}" for x in s.exponents) for s in shells),
        "ab": round(float(np.linalg.norm(a - b)), 3), "cd": round(float(np.linalg.norm(c - d)), 3),
        "largest": f"{quartet.largest:.3e}", "md4": f"{ours:.2e}", "libcint": f"{theirs:.2e}", "note": note,
        "cartesian": cartesian, "distance": "", "bound": "",
    }  # fmt: skip


def sample(args, pool):
    """Rounds of one random quartet a class, as long as there is time."""
    rows, number, begin = [], 0, perf_counter()
    while perf_counter() - begin < args.limit:
        quartets = [draw(ls, number, args.seed, args.backend) for ls in classes(args.lmax)]
        rows += [row("random", number, found) for found in judged(quartets, pool)]
        number += 1
        print(f"round {number}: {perf_counter() - begin:.0f} s", flush=True)
    return rows


def search(args, pool):
    """Of the first quartets of each class, the one in which md4 and libcint differ most."""
    worst = []
    for ls in classes(args.lmax):
        drawn = (draw(ls, n, args.seed, args.backend, alone=True) for n in range(args.search))
        worst.append(max(enumerate(drawn), key=lambda entry: entry[1][0].difference))
    found = judged([entry for _, entry in worst], pool)
    return [row("worst", number, result, result[0].orders()) for (number, _), result in zip(worst, found)]


# Classes in which a shell of high l has no partner of high l.
MIXED = (1, 1, 6, 0), (1, 0, 5, 0), (6, 0, 2, 2)


def primitive(args, pool):
    """Of the first uncontracted quartets of each class of `MIXED`, the one in which md4 and libcint differ most."""
    worst = []
    for ls in MIXED:
        drawn = (draw(ls, n, args.seed, args.backend, alone=True, most=1) for n in range(args.primitive))
        worst.append(max(enumerate(drawn), key=lambda entry: entry[1][0].difference))
    found = judged([entry for _, entry in worst], pool)
    return [row("primitive", number, result) | {"bound": f"{result[0].bound():.3e}"}
            for (number, _), result in zip(worst, found)]  # fmt: skip


# ---- tight beside diffuse --------------------------------------------------------------------------------------------

TIGHT, DIFFUSE = 300.0, 0.1
DISTANCES = 0.1, 0.3, 0.5, 1.0, 2.0, 3.0
DIRECTION = np.array([0.6, 0.48, 0.64])


def beside(l, exponents, distance):
    """Primitive shells a and b of l at a distance in Bohr, and two s shells with exponent 0.5."""
    centres = [0 * DIRECTION, distance * DIRECTION, [0.5, -0.2, 0.3], [0.2, 0.7, 0.0]]
    return md4.Basis.from_arrays([l, l, 0, 0], [[*exponents][:1], [*exponents][1:], [0.5], [0.5]], [[1.0]] * 4, centres)


def one_centre(l, distance):
    """The same exponents in (ll|ll), with a and b on one centre, c and d on another."""
    centres = [place * DIRECTION for place in (0.0, 0.0, distance, distance)]
    return md4.Basis.from_arrays([l] * 4, [[TIGHT], [DIFFUSE]] * 2, [[1.0]] * 4, centres)


def largest_cartesian(basis, backend):
    """Largest element of (ab|cd) over Cartesian functions instead of solid harmonics."""
    block = md4.Engine(md4.Basis(basis.shells, pure=False), backend=backend).compute([[0, 1]], [[2, 3]])
    return f"{abs(host(block)).max():.3e}"


def distance_rows(args, pool):
    """(ll|ss) with one tight and one diffuse function in the bra, in either order; two equal ones; (ll|ll)."""
    makers = {
        "tight first": lambda l, r: beside(l, (TIGHT, DIFFUSE), r),
        "diffuse first": lambda l, r: beside(l, (DIFFUSE, TIGHT), r),
        "equal": lambda l, r: beside(l, (1.0, 1.0), r),
        "one centre": one_centre,
    }
    rows = []
    for (note, make), l in product(makers.items(), (2, 4, 6)):
        quartets = [(Quartet(make(l, r), args.backend), np.random.default_rng(0)) for r in DISTANCES]
        for n, (found, r) in enumerate(zip(judged(quartets, pool), DISTANCES)):
            cartesian = largest_cartesian(found[0].basis, args.backend)
            rows.append(row("distance", n, found, note, cartesian) | {"distance": r})
    return rows


# ---- tables and the figure -------------------------------------------------------------------------------------------


def print_tables(rows):
    """By l: median and largest error of the random quartets; the worst of the search; and the distances."""
    print_random([r for r in rows if r["kind"] == "random"])
    print_worst([r for r in rows if r["kind"] == "worst"])
    print_distances([r for r in rows if r["kind"] == "distance"])
    print_worst([r for r in rows if r["kind"] == "primitive"], "bound")


def escaped(text):
    """For a cell of a Markdown table."""
    return text.replace("|", "\\|")


def print_random(rows):
    """Median and largest error relative to the block's largest element, and the largest in Hartree."""
    if not rows:
        return
    heads = [f"{name}, {what}" for name in ("md4", "libcint") for what in ("median", "largest", "largest / Hartree")]
    print(f"\n| l | quartets | {' | '.join(heads)} |\n|" + "---|" * (len(heads) + 2))
    for l in sorted({int(r["l"]) for r in rows}):
        mine = [r for r in rows if int(r["l"]) == l]
        largest = np.array([float(r["largest"]) for r in mine])
        cells = []
        for name in ("md4", "libcint"):
            errors = np.array([float(r[name]) for r in mine])
            cells += [f"{x:.0e}" for x in (np.median(errors), errors.max(), (errors * largest).max())]
        print(f"| {SPDF[l]} | {len(mine)} | {' | '.join(cells)} |")


def print_worst(rows, last="note"):
    """The quartets in which libcint and md4 differ most."""
    names = ("class", "number", "exponents", "ab", "cd", "largest", "md4", "libcint", last)
    if rows:
        print(f"\n| {' | '.join(names)} |\n|" + "---|" * len(names))
    for r in rows:
        print("| " + " | ".join(escaped(str(r[n])) for n in names) + " |")


def print_distances(rows):
    """Errors of libcint and of md4 by distance, and md4's relative to the largest Cartesian element."""
    if rows:
        places = sorted({float(r["distance"]) for r in rows})
        print(f"\n| class | order | error of | {' | '.join(f'{x:g} Bohr' for x in places)} |\n|---|---|---|"
              + "---|" * len(places))  # fmt: skip
    for note, kind in sorted({(r["note"], r["class"]) for r in rows}):
        mine = sorted((r for r in rows if (r["note"], r["class"]) == (note, kind)), key=lambda r: float(r["distance"]))
        scale = [float(r["largest"]) / float(r["cartesian"]) for r in mine]
        for name, factors in (("libcint", [1] * len(mine)), ("md4", [1] * len(mine)), ("md4, Cartesian", scale)):
            cells = [f"{float(r[name.partition(',')[0]]) * f:.0e}" for r, f in zip(mine, factors)]
            print(f"| {escaped(kind)} | {note} | {name} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=0, help="of the random shells")
    parser.add_argument("--jobs", type=int, default=1, help="processes for the oracle (%(default)d)")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no round begins (%(default)g)")
    parser.add_argument("--lmax", type=int, default=LARGEST_L, help="highest angular momentum (%(default)d)")
    parser.add_argument("--search", type=int, default=0, metavar="N", help="quartets a class to search for the worst")
    parser.add_argument("--distance", action="store_true", help="tight beside diffuse functions")
    parser.add_argument("--primitive", type=int, default=0, metavar="N", help="uncontracted quartets a mixed class")
    parser.add_argument("--csv", help="file for all rows")
    args = parser.parse_args()
    backend = md4.Engine(beside(0, (1.0, 1.0), 1.0), backend=args.backend).backend
    print(describe(backend).replace(", one core", ""))  # all cores of the CPU
    with get_context("spawn").Pool(args.jobs) as pool:
        rows = sample(args, pool)
        rows += search(args, pool) if args.search else []
        rows += distance_rows(args, pool) if args.distance else []
        rows += primitive(args, pool) if args.primitive else []
    if args.csv:
        write_csv(args.csv, rows)
    print_tables(rows)


if __name__ == "__main__":
    main()
