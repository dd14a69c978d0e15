"""Finds the tables of `md4.gpu.banks`: in which bank of shared memory each r[t] is best, by simulated annealing.

    python bench/banks.py                 the table, L = 2 to 13, as the module has it
    python bench/banks.py --even --steps 2000000    that of even r, L = 4 to 18
    python bench/banks.py --only 9 10     parts of it
    python bench/banks.py --count         wavefronts of a gather, for r in natural order and in that of the table

When a warp gathers [p|q] = r[p+q], 16 lanes read 8 bytes each at the same time: those of 4 p and 4 q that are
neighbours in the order of `md4.gpu.staircases`. They are served in as many wavefronts as there are different t in the
bank that has the most of them, of the 16 banks of 8 bytes. The mean of these numbers over all p and q, for all l_bra +
l_ket = L, is to be small. Two t change banks in a step; the number of t in each bank is kept, so that r has no gaps.
Even r is what the even and the odd parts of classes gather from (`md4.method.mirror`), here with z as the mirror axis.
"""

import argparse

import numba
import numpy as np

from md4.gpu.banks import BANKS, EVEN_TABLE, TABLE
from md4.gpu.staircases import hermite_order
from md4.method.angular import nherm, packed_hermite, sum_ordinal
from md4.method.mirror import part_functions, r_count

# What the functions p and q are taken from: all, or both parts.
ALL, PARTS = (None,), ((0, 0), (0, 1))


def groups(l, mirror):
    """Packed words of functions, of all or of a part, in groups of 4 as lanes gather them."""
    order = hermite_order(l, mirror=mirror)
    return packed_hermite(l)[np.where(order < 0, 0, order)].reshape(-1, 4)


def gathers(l_bra, l_ket, even):
    """Which r 16 lanes read at the same time, numbered by rising ordinals; shape (gathers, 16)."""
    number = np.arange(nherm(l_bra + l_ket))
    if even:  # what is left out stands beside zeros of H, and number 0 is read instead
        number, kept = np.zeros_like(number), part_functions(l_bra + l_ket, 0, 0)
        number[kept] = np.arange(len(kept))
    pairs = [(groups(l_bra, mirror), groups(l_ket, mirror)) for mirror in (PARTS if even else ALL)]
    return np.concatenate([number[sum_ordinal(p[:, None, :, None], q[:, None])].reshape(-1, 16) for p, q in pairs])


def different(ordinals):
    """(ordinals, each once, at the beginning of a row; how many of them)."""
    ordered = np.sort(ordinals, axis=1)
    new = np.ones(ordered.shape, dtype=bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return np.take_along_axis(ordered, np.argsort(~new, axis=1, kind="stable"), axis=1), new.sum(axis=1)


def wavefronts(banks, l_bra, l_ket, even):
    """Mean number of wavefronts of 16 lanes."""
    sets, lengths = different(gathers(l_bra, l_ket, even))
    counts = np.zeros((len(sets), BANKS), dtype=int)
    for n in range(sets.shape[1]):
        np.add.at(counts, (np.arange(len(sets)), banks[sets[:, n]]), n < lengths)
    return counts.max(axis=1).mean()


@numba.njit
def most(counts, s):
    """The largest number of a row."""
    found = 0
    for n in range(16):
        found = max(found, counts[s, n])
    return found


@numba.njit
def anneal(banks, sets, lengths, weights, members, member_counts, steps, seed):
    """Changes `banks` in place, by `steps` trials at a falling temperature."""
    np.random.seed(seed)  # noqa: NPY002 as Numba wants it, here and below
    counts = np.zeros((len(sets), 16), np.uint8)
    for s in range(len(sets)):
        for n in range(lengths[s]):
            counts[s, banks[sets[s, n]]] += 1
    for step in range(steps):
        temperature = 0.8 * weights.mean() * (1 - step / steps) ** 2 + 1e-12
        one, other = np.random.randint(len(banks)), np.random.randint(len(banks))  # noqa: NPY002
        change, old, new = 0.0, banks[one], banks[other]
        if old == new:
            continue
        for t, source, target in ((one, old, new), (other, new, old)):
            for n in range(member_counts[t]):
                s = members[t, n]
                before = most(counts, s)
                counts[s, source] -= 1
                counts[s, target] += 1
                change += weights[s] * (most(counts, s) - before)
        if change <= 0 or np.random.random() < np.exp(-change / temperature):  # noqa: NPY002
            banks[one], banks[other] = new, old
        else:
            for t, source, target in ((other, old, new), (one, new, old)):
                for n in range(member_counts[t]):
                    counts[members[t, n], source] -= 1
                    counts[members[t, n], target] += 1


def found_banks(l, steps, even, seed=1):
    """Banks of r[t] for L = `l`."""
    every = [different(gathers(n, l - n, even)) for n in range(1, l)]
    sets, lengths = (np.concatenate(parts) for parts in zip(*every))
    weights = np.concatenate([np.full(len(counts), 1 / len(counts)) for _, counts in every])
    members = [[] for _ in range(r_count(l, even))]
    for s, (ordinals, count) in enumerate(zip(sets.tolist(), lengths.tolist())):
        for t in ordinals[:count]:
            members[t].append(s)
    counts = np.array([len(m) for m in members])
    table = np.zeros((len(members), counts.max()), dtype=np.int32)
    for t, m in enumerate(members):
        table[t, : len(m)] = m
    banks = np.arange(len(members)) % BANKS
    anneal(banks, sets.astype(np.int32), lengths, weights, table, counts, steps, seed)
    return banks


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="L")
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--steps", type=int, default=4_000_000)
    parser.add_argument("--count", action="store_true")
    args = parser.parse_args()
    known = EVEN_TABLE if args.even else TABLE
    for l in args.only or known:
        if args.count:
            banked = np.array([int(c, 16) for c in known[l]])
            natural = np.arange(len(banked)) % BANKS
            for n in range(1, l):
                counts = (wavefronts(banks, n, l - n, args.even) for banks in (natural, banked))
                print(l, n, l - n, *(f"{4 * count:.2f}" for count in counts))
            continue
        banks = found_banks(l, args.steps, args.even)
        print(f'    {l}: "{"".join(f"{bank:x}" for bank in banks)}",', flush=True)


if __name__ == "__main__":
    main()
