"""Errors of quartets in single precision (FP32) beside the bound that decides about them, for bundled basis sets.

    python bench/lab/fp32_bounds.py --collect shells.pkl        # contracted functions of the basis sets of PySCF
    python bench/lab/fp32_bounds.py shells.pkl --csv fp32.csv   # on a GPU

A quartet is computed in FP32 if T_ab T_cd |D| is below `single_ratio` tolerances (`md4.contract.screening`). So its
error has to be below T_ab T_cd |D| / `single_ratio`. Each contracted function is put into pairs with itself, with
another one of its l, and with single s primitives near and far. All quartets of hundreds of such pairs are digested to
X in FP32 and in FP64. Of each function the largest error over T_ab T_cd |D| is kept, with the same over R_ab R_cd |D|.
"""

import argparse
import csv
import pickle
import sys
import warnings

import numpy as np

import md4
from md4.contract.screening import schwarz_bounds
from md4.gpu import hermite_coulomb
from md4.gpu.buffers import Buffer, copy_to_device, copy_to_host
from md4.gpu.h_layout import BRA_ELEMENTS, KET_ELEMENTS, KET_SINGLES
from md4.gpu.kernels.digest_in_place import item_entries, launch_in_place
from md4.gpu.kernels.narrow import launch_narrow
from md4.gpu.kernels.select_quartets import Selected
from md4.gpu.tuning import SELECT

SECOND = ("itself", "another", "s near", "s far")
# Quartets with smaller R R count only where tolerances are far below the rounding of FP64; FP32 has no such numbers.
LEAST = 1e-25
# Exponents of the single primitives, and distances of the shells of a pair and of bra and ket, in Bohr.
PRIMITIVE, NEAR, FAR, APART = 0.4, 0.7, 2.5, 2.5


def collect(path):
    """Writes [(l, exponents, coefficients, basis set, element)] of all different contracted functions."""
    from pyscf import gto
    from pyscf.data.elements import ELEMENTS
    from pyscf.gto.basis import ALIAS

    warnings.simplefilter("ignore")
    found = {}
    for name in sorted(ALIAS):
        for element in ELEMENTS[1:]:
            try:
                shells = gto.basis.load(name, element)
            except Exception:  # PySCF raises many kinds where a basis set lacks an element
                continue
            for l, *rows in shells:
                table = np.array([row for row in rows if not isinstance(row, int)], dtype=float)
                for column in table[:, 1:].T:
                    used = column != 0
                    if used.sum() > 1:
                        key = l, table[used, 0].tobytes(), column[used].tobytes()
                        found.setdefault(key, (name, element))
    with open(path, "wb") as file:
        pickle.dump([(l, np.frombuffer(e), np.frombuffer(c), *source) for (l, e, c), source in found.items()], file)
    print(len(found), "contracted functions")


def pair_basis(functions, second, rng):
    """A `Basis` of two shells for each function, those of ket pairs `APART` from those of bra pairs."""
    l, exponents, coefficients, centres = [], [], [], []
    others = rng.permutation(len(functions))
    for apart in (0.0, APART):
        for n, function in enumerate(functions):
            partner = {"itself": function, "another": functions[others[n]]}.get(second)
            distance = FAR if second == "s far" else NEAR if second in ("s near", "another") else 0.0
            direction = rng.normal(size=3)
            direction *= distance / np.linalg.norm(direction)
            first = np.array([0.0, 0.0, apart])
            partner = (0, [PRIMITIVE], [1.0]) if partner is None else partner[:3]
            for (shell_l, e, c), centre in ((function[:3], first), (partner, first + direction)):
                l.append(shell_l)
                exponents.append(e)
                coefficients.append(np.reshape(c, (-1, 1)))
                centres.append(centre)
    return md4.Basis.from_arrays(l, exponents, coefficients, centres)


def quartets_of(context, count, size):
    """All quartets of `count` bra and ket pairs, in double and in single precision alike."""
    items = np.array([(i, k, min(size, count - k)) for i in range(count) for k in range(0, count, size)], np.int32)
    buffers = []
    for array in (np.arange(count, dtype=np.int32), items.reshape(-1)):
        buffer = context.pool.get(-(-array.size // 2))
        copy_to_device(buffer.pointer, array, context.stream)
        buffers.append(Buffer(buffer.pointer, (array.size,), 4, buffer))
    _, (counts,) = context.pool.upload([np.full(2, len(items))], context.stream)
    return Selected(buffers[0], (buffers[1], buffers[1]), counts, None, len(items), size)


def exchange(engine, lists, density, in_fp32):
    """X of all quartets of two prepared lists."""
    context, basis = engine.backend.context, engine.bra_basis
    bra, ket = lists
    places = [basis.ao_loc[pairs.pairs.pairs] for pairs in lists]
    owner, (d, x, *aos) = context.pool.upload([density, np.zeros_like(density), *places], context.stream)
    given, narrow = d.part(0, (d.size,)), None
    if in_fp32:
        narrow = context.pool.get(-(-d.size // 2))
        given = Buffer(narrow.pointer, (d.size,), 4, narrow)
        launch_narrow(context, d.part(0, (d.size,)), given)
    quartets = quartets_of(context, len(bra), item_entries(bra.facts, ket.facts, len(bra) * len(ket)))
    x = x.part(0, (x.size,))
    launch_in_place(
        context, engine.operator, bra.h(BRA_ELEMENTS).array, ket.h(KET_SINGLES if in_fp32 else KET_ELEMENTS).array,
        bra, ket, aos, False, (given, x, given, x), (1, 0), basis.nao, quartets, in_fp32,
    )  # fmt: skip
    found = np.empty(density.shape)
    copy_to_host(found, x.pointer, context.stream)
    for buffer in (owner, narrow, quartets.entries.owner, quartets.items[0].owner, quartets.counts.owner):
        if buffer is not None:
            context.pool.release(buffer)
    return found[0]


def block_norms(matrix, loc):
    """Frobenius norms of all blocks of shells, shape (nshell, nshell)."""
    squares = np.add.reduceat(np.add.reduceat(matrix**2, loc[:-1], axis=0), loc[:-1], axis=1)
    return np.sqrt(squares)


def errors(functions, second, rng):
    """Largest error over T T |D| and over R R |D| of each function, shape (2, number of functions)."""
    basis, count = pair_basis(functions, second, rng), len(functions)
    engine = md4.Engine(basis, backend="cuda")
    pairs = np.arange(4 * count).reshape(2, count, 2)
    lists = [engine.prepare(side) for side in pairs]
    density = rng.normal(size=(1, basis.nao, basis.nao))
    density += density.transpose(0, 2, 1)
    fp32, fp64 = (exchange(engine, lists, density, in_fp32) for in_fp32 in (True, False))
    norms, wrong = block_norms(density[0], basis.ao_loc), block_norms(fp32 - fp64, basis.ao_loc)
    bounds = schwarz_bounds(engine, list(pairs))
    worst = np.zeros((count, count))
    for a in (0, 1):
        for c in (0, 1):
            # X_ac of (ab|cd) has D_bd
            x, d = (
                m[2 * np.arange(count) + s][:, 2 * count + 2 * np.arange(count) + t]
                for m, s, t in ((wrong, a, c), (norms, 1 - a, 1 - c))
            )
            worst = np.maximum(worst, x / d)
    products = [np.outer(bounds[0][kind], bounds[1][kind]) for kind in (1, 0)]
    relative = [np.where(products[1] > LEAST, worst, 0.0) / np.maximum(p, 1e-300) for p in products]
    for prepared in lists:
        prepared.drop()
    return np.array([np.maximum(found.max(axis=0), found.max(axis=1)) for found in relative])


def coulomb_error(functions):
    """Error of J alone over `direct_scf_tol`, of two shells of each function, with all quartets in FP32; a list."""
    found = []
    for l, e, c, *_ in functions:
        centres = [[0.0, 0.0, 0.0], [0.3, 0.1, APART]]
        basis = md4.Basis.from_arrays([l] * 2, [e] * 2, [np.reshape(c, (-1, 1))] * 2, centres)
        dm = np.random.default_rng(len(found)).normal(size=(basis.nao, basis.nao))
        dm += dm.T
        exact = md4.JK(basis, backend="cuda", direct_scf_tol=0.0)
        exact_j, _ = exact.get_jk(dm, with_k=False)
        pairs, norms = exact.team.list_pairs(False), block_norms(dm, basis.ao_loc)
        product = pairs.terms * 2 * np.sqrt(basis.nao // 2)
        largest = float(max((product * norms[tuple(pairs.shells.T)]).max() * pairs.terms.max(), 1e-300))
        tolerance = 1.001 * largest / hermite_coulomb.SINGLE_RATIO
        ours, _ = md4.JK(basis, backend="cuda", direct_scf_tol=tolerance).get_jk(dm, with_k=False)
        found.append(float(abs(ours - exact_j).max() / tolerance))
    return found


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shells", nargs="?")
    parser.add_argument("--collect", metavar="FILE")
    parser.add_argument("--csv")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--l", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument(
        "--second", nargs="+", default=SECOND, choices=SECOND, help="the other shell of a pair (%(default)s)"
    )
    parser.add_argument("--builds", type=int, default=100, help="functions of each l, the worst ones, in J alone")
    parser.add_argument("--one-sign", type=int, default=500, help="functions of each l without cancellation, at random")
    args = parser.parse_args()
    if args.collect:
        return collect(args.collect)
    with open(args.shells, "rb") as file:
        shells = pickle.load(file)
    rng, rows = np.random.default_rng(0), []
    for l in args.l:
        mine, rest = (
            [s for s in shells if s[0] == l and (s[2].min() < 0 < s[2].max()) == cancels] for cancels in (1, 0)
        )
        mine += [rest[n] for n in rng.permutation(len(rest))[: args.one_sign]]
        for second in args.second if l < 2 else SECOND[2:]:  # what digests in place
            found = []
            for first in range(0, len(mine), args.batch):
                part = mine[first : first + args.batch]
                result = errors(part, second, rng)
                found += zip(part, *result.tolist())
            rows += [(name, element, l, len(e), second, *values) for (_, e, _, name, element), *values in found]
            values = np.array([row[-2:] for row in rows if row[2] == l and row[4] == second])
            print(
                f"l = {l} with {second}: {len(values)} functions, worst over T {values[:, 0].max():.1e}, over R "
                f"{values[:, 1].max():.1e}; promised {1 / SELECT.single_ratio:.0e}",
                flush=True,
            )
    rows.sort(key=lambda row: -row[-2])
    hermite_coulomb.FEWEST_SINGLES = 0  # so that few quartets are computed in FP32, too
    sources = {(name, element, l, len(e)): (l, e, c) for l, e, c, name, element in shells}
    for l in args.l:
        worst = dict.fromkeys(row[:4] for row in sorted(rows, key=lambda row: -row[-1]) if row[2] == l)
        found = coulomb_error([sources[key] for key in list(worst)[: args.builds]]) or [0.0]
        print(
            f"J alone, l = {l}: {len(found)} functions of largest error over R, error over tolerance "
            f"{max(found):.1e}; promised {4}",
            flush=True,
        )
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["basis set", "element", "l", "primitives", "second shell", "error/T", "error/R"])
            writer.writerows([*row[:-2], *(f"{value:.3e}" for value in row[-2:])] for row in rows)
    for row in rows[:15]:
        print(*row[:-2], *(f"{value:.2e}" for value in row[-2:]))


if __name__ == "__main__":
    sys.exit(main())
