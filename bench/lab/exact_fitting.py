"""How exact integrals over three and two centres are, by the oracle: random (ab|P) and (P|Q), md4 and libcint.

    python bench/lab/exact_fitting.py                         16 blocks for each l of P and each kind, on the CPU or GPU
    python bench/lab/exact_fitting.py --blocks 100 --csv a.csv

Shells a and b are those of `exact.py`, of a random l up to i. P and Q are primitive shells with exponents from the same
range, as auxiliary functions are; Q has a random l up to that of P. Blocks whose largest element is below 1e-10 Hartree
are drawn again. The oracle judges three elements of each block: where md4 and libcint differ most, the
largest one, and one at random. An error is the largest of the three, over the largest element of the block or over its
Schwarz bound.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
import numpy as np
from clock import describe, write_csv
from exact import DIGITS, EDGE, EXPONENTS, MOST_PRIMITIVES, NEGLIGIBLE
from libcint import Libcint

import md4
from md4.engine import make_backend
from md4.method.operators import Operator
from md4.support.display import shell_letter
from md4.validation import oracle
from md4.validation.arbiter import as_quartet
from md4.validation.libcint import host, sides

ORBITAL_L = 6
LARGEST_L = 10
KINDS = {"(ab|P)": 3, "(P|Q)": 2}


def random_basis(rng, l, count):
    """Shells a, b and P, or P and Q."""
    low, high = np.log(EXPONENTS)
    degrees = [1] * count if count == 2 else [*rng.integers(1, MOST_PRIMITIVES + 1, 2), 1]
    ls = [l, rng.integers(l + 1)] if count == 2 else [*rng.integers(ORBITAL_L + 1, size=2), l]
    exponents = [np.exp(rng.uniform(low, high, k)) for k in degrees]
    coefficients = [rng.uniform(0.2, 1.0, k) * rng.choice([-1.0, 1.0], k) for k in degrees]
    return md4.Basis.from_arrays(ls, exponents, coefficients, rng.uniform(0.0, EDGE, (count, 3)))


def blocks(basis, backend):
    """md4's and libcint's block of all shells, and its Schwarz bound."""
    from pyscf.gto.moleintor import getints

    bra, ket = ([side] if len(side) == 2 else side for side in sides(list(range(len(basis)))))
    engine, raw = md4.Engine(basis, backend=backend), Libcint(basis)
    ours = host(engine.compute(bra, ket))[0, 0]
    bound = np.sqrt(np.prod([abs(host(engine.compute(side, side))).max() for side in (bra, ket)]))
    name, ends = "int3c2e_sph" if len(basis) == 3 else "int2c2e_sph", sum(((n, n + 1) for n in range(len(basis))), ())
    return ours, getints(name, raw.atm, raw.bas, raw.env, shls_slice=ends), bound


def judged(rng, l, count, backend):
    """Errors of a random block: md4's and libcint's over the largest element, md4's over the Schwarz bound."""
    while True:
        basis = random_basis(rng, l, count)
        ours, theirs, bound = blocks(basis, backend)
        largest = abs(ours).max()
        if largest > NEGLIGIBLE:
            break
    flat = np.argmax(abs(ours - theirs)), np.argmax(abs(ours)), rng.integers(ours.size)
    elements = [tuple(map(int, np.unravel_index(n, ours.shape))) for n in flat]
    shells, places = as_quartet(basis.shells, None), [as_quartet(e, 0) for e in elements]
    exact = oracle.eri(shells, elements=places, dps=DIGITS)
    mine, other = (max(abs(x[e] - v) for e, v in zip(elements, exact)) for x in (ours, theirs))
    return mine / largest, other / largest, mine / bound


def table(rows):
    """A line for each kind and l, in Markdown."""
    yield "| class | blocks | md4, median | md4, largest | md4, largest / bound | libcint, median | libcint, largest |"
    yield "|---|---|---|---|---|---|---|"
    for kind, l in dict.fromkeys((row["kind"], row["l"]) for row in rows):
        found = [row for row in rows if (row["kind"], row["l"]) == (kind, l)]
        ours, bound, theirs = ([float(row[name]) for row in found] for name in ("md4", "bound", "libcint"))
        numbers = np.median(ours), max(ours), max(bound), np.median(theirs), max(theirs)
        label = kind.replace("P", shell_letter(l))
        yield f"| {label} | {len(found)} | " + " | ".join(f"{x:.0e}" for x in numbers) + " |"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16, metavar="N", help="of each kind and l (%(default)s)")
    parser.add_argument("--lmax", type=int, default=LARGEST_L, metavar="L", help="largest l of P (%(default)s)")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", metavar="FILE")
    args = parser.parse_args(argv)
    print(describe(make_backend(args.backend, Operator())))
    rows = []
    for kind, count in KINDS.items():
        for l in range(args.lmax + 1):
            for n in range(args.blocks):
                errors = judged(np.random.default_rng([args.seed, count, l, n]), l, count, args.backend)
                found = zip(("md4", "libcint", "bound"), (f"{x:.2e}" for x in errors))
                rows.append({"kind": kind, "l": l, "number": n, **dict(found)})
    print("\n".join(table(rows)))
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
