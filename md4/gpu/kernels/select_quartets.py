"""Lists of the quartets that survive screening one by one, for the kernel that digests where it makes integrals.

The rule is that of `md4.contract.screening`. A block of threads takes a bra pair, and goes through the ket pairs that
may survive with it: the first ones of their list, since bounds fall. The largest |D| of a and b with each shell c and d
are in shared memory. Ket pairs that survive become entries of the bra pair: from the front of its room those that count
in double precision, from the back those for which single precision will do. The latter is asked of T instead of R. The
entries are divided into items, for which blocks of the next kernel need not wait for each other. In which order entries
and items are depends on which warp comes first.

All numbers of the rule are in single precision, rounded up, and the threshold is rounded down. So a quartet that the
rule keeps is never left out.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F32, I32, I64, cuda, f32, f64, i32, i64, jit_device, types, u32, u64
from md4.gpu.emit.scalars import quotient
from md4.gpu.tuning import SELECT

# A number less than this is 0 in the rule: products of numbers that small may vanish in single precision.
VANISHING = 1e-30
# What a threshold is multiplied with, so that rounding of products leaves nothing out.
BELOW_ONE = 1 - 2.0**-22
# Shared memory of a block besides |D|, at most.
OTHER_BYTES = 64
# Shells of a basis, at most, whose numbers take 16 bits.
MOST_SHELLS = 1 << 16


class Candidates(NamedTuple):
    """Shell pairs of all lists of a basis, one list after the other, as the rule needs them.

    Attributes
    ----------
    shells : int32 array
        Numbers of both shells, the second one times 2^16 added.
    bounds, terms, own : float32 array
        R and T (`md4.contract.screening`), and 2 sqrt(min(n, n)) |D| of the pair.
    norms : float32 array
        |D| of all pairs of shells, in rows.
    nshell : int64
    """

    shells: I32
    bounds: F32
    terms: F32
    own: F32
    norms: F32
    nshell: i64


class Rows(NamedTuple):
    """The bra pairs of a launch, and the ket list.

    Attributes
    ----------
    starts : int64 array
        Where the room of each row begins, and where that of the last one ends.
    row : int64
        Number of the first bra pair in its list.
    first_bra, first_ket : int64
        Where the lists begin in `Candidates`.
    first_c, many_c, first_d, many_d : int64
        Among which shells c and d are: the first of them, and how many.
    """

    starts: I64
    row: i64
    first_bra: i64
    first_ket: i64
    first_c: i64
    many_c: i64
    first_d: i64
    many_d: i64


class Rule(NamedTuple):
    """Which bounds of quartets count.

    Attributes
    ----------
    tolerance : float64
        Quartets below are left out.
    single : float64
        Single precision will do for quartets below, with T in place of R.
    """

    tolerance: f64
    single: f64


class Output(NamedTuple):
    """What the kernel writes.

    Attributes
    ----------
    entries : int32 array
        Numbers of ket pairs in their list.
    double_items, single_items : int32 array
        (bra pair, first entry, number of entries) of each item.
    counts : int64 array
        Numbers of both kinds of items.
    survivors : int64 array
        One number, to which that of the survivors is added.
    size : int64
        Most entries of an item.
    """

    entries: I32
    double_items: I32
    single_items: I32
    counts: I64
    survivors: I64
    size: i64


def least_product(bound, threshold):
    """The least product of a ket pair's numbers that counts beside a bra pair (device function).

    Not more than threshold / bound, whatever the rounding of a product in single precision; 0 where that might vanish.
    """
    least = threshold / bound * BELOW_ONE if threshold > 0.0 else 0.0
    return f32(least) if least > VANISHING else f32(0.0)


def select_quartets():
    """Kernel factory; all sizes are run-time numbers."""
    threads, least_of = SELECT.threads, jit_device(least_product)

    @jit_device
    def vote(pairs, rows, norms, least, single, ket, count):
        """Votes of a warp for ket pairs, one a lane, that survive and count in double or in single precision."""
        place = u64(rows.first_ket) + min(ket, u32(count - 1))
        shells = u32(pairs.shells[place])
        c, d = u32(shells & u32(0xFFFF)) - u32(rows.first_c), u32(shells >> u32(16)) - u32(rows.first_d)
        largest = max(norms[u32(c)], norms[u32(d + u32(rows.many_c))])
        largest = max(largest, pairs.own[place])
        survives = ket < count and f32(pairs.bounds[place] * largest) >= least
        in_double = survives and f32(pairs.terms[place] * largest) >= single
        return cuda.ballot_sync(-1, in_double), cuda.ballot_sync(-1, survives and not in_double)

    @jit_device
    def write(entries, ket, lane, votes, begin, end):
        """Numbers of the ket pairs that survive, from the place `begin` on or, in single precision, before `end`."""
        double, single, own = u32(votes[0]), u32(votes[1]), u32(u32(1) << u32(lane))
        in_double = begin + cuda.popc(u32(double & u32(own - 1)))
        in_single = end - 1 - cuda.popc(u32(single & u32(own - 1)))
        if (double | single) & own:
            entries[u64(in_double if double & own else in_single)] = ket

    def kernel(pairs: Candidates, rows: Rows, rule: Rule, out: Output):
        tid, row = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane = i32(tid & 31)
        begin, end = rows.starts[row] - rows.starts[0], rows.starts[row + 1] - rows.starts[0]
        # numbers of entries in double and in single precision; first items of both
        found, items = cuda.shared.array(2, types.int32), cuda.shared.array(2, types.int64)
        norms = cuda.shared.array(0, types.float32)
        place = rows.first_bra + rows.row + row
        shells = i64(pairs.shells[place])
        a, b, own = (shells & 0xFFFF) * pairs.nshell, (shells >> 16 & 0xFFFF) * pairs.nshell, pairs.own[place]
        least = least_of(f64(pairs.bounds[place]), rule.tolerance)
        single = least_of(f64(pairs.terms[place]), rule.single)
        if tid < 2:
            found[tid] = 0
        if begin < end:
            for n in range(tid, rows.many_c, threads):
                norms[n] = max(pairs.norms[a + rows.first_c + n], pairs.norms[b + rows.first_c + n], own)
            for n in range(tid, rows.many_d, threads):
                norms[rows.many_c + n] = max(pairs.norms[a + rows.first_d + n], pairs.norms[b + rows.first_d + n])
        cuda.syncthreads()
        count = u32(end - begin)
        for first in range(i32(4 * (tid - lane)), i32(end - begin), i32(4 * threads)):
            # a warp takes four times 32 ket pairs
            ket = u32(first + lane)
            votes_0 = vote(pairs, rows, norms, least, single, ket, count)
            votes_1 = vote(pairs, rows, norms, least, single, u32(ket + 32), count)
            votes_2 = vote(pairs, rows, norms, least, single, u32(ket + 64), count)
            votes_3 = vote(pairs, rows, norms, least, single, u32(ket + 96), count)
            doubles, singles = i32(0), i32(0)
            for double, single_one in (votes_0, votes_1, votes_2, votes_3):
                doubles += cuda.popc(double)
                singles += cuda.popc(single_one)
            before = i32(0)
            if lane < 2:
                before = cuda.atomic.add(found, lane, doubles if lane == 0 else singles)
            front, back = begin + cuda.shfl_sync(-1, before, 0), end - cuda.shfl_sync(-1, before, 1)
            for votes in (votes_0, votes_1, votes_2, votes_3):
                write(out.entries, ket, lane, votes, front, back)
                front, back = front + cuda.popc(votes[0]), back - cuda.popc(votes[1])
                ket = u32(ket + 32)
        cuda.syncthreads()
        if tid < 2 and found[tid] > 0:
            items[tid] = cuda.atomic.add(out.counts, tid, quotient(found[tid] + out.size - 1, out.size))
            cuda.atomic.add(out.survivors, 0, i64(found[tid]))
        cuda.syncthreads()
        many = i64(found[0])
        for n in range(tid, quotient(many + out.size - 1, out.size), threads):
            item = 3 * (items[0] + n)
            out.double_items[item] = rows.row + row
            out.double_items[item + 1] = begin + n * out.size
            out.double_items[item + 2] = min(out.size, many - n * out.size)
        many = i64(found[1])
        for n in range(tid, quotient(many + out.size - 1, out.size), threads):
            item = 3 * (items[1] + n)
            out.single_items[item] = rows.row + row
            out.single_items[item + 1] = end - min(many, (n + 1) * out.size)
            out.single_items[item + 2] = min(out.size, many - n * out.size)

    return Kernel(kernel, (threads, SELECT.blocks))


# launcher


class Selected(NamedTuple):
    """Lists of quartets in device memory.

    Attributes
    ----------
    entries : Buffer of int32
    items : tuple of Buffer of int32
        Those in double and in single precision.
    counts : Buffer of int64, shape (2,)
        Numbers of items, zero before the kernel runs.
    survivors : Buffer of int64, shape (1,)
    most_items : int
        Number of items, at most, of each kind.
    size : int
        Most entries of an item.
    """

    entries: object
    items: tuple
    counts: object
    survivors: object
    most_items: int
    size: int


def selects(context, shells):
    """Whether shared memory has room for |D| of all shells c and d, given as in `launch_select`."""
    return shared_bytes(shells) <= min(SELECT.shared, context.block_shared - OTHER_BYTES)


def shared_bytes(shells):
    """Shared memory of a block."""
    _, many_c, _, many_d = shells
    return 8 * -(-4 * (many_c + many_d) // 8)


def launch_select(context, candidates, starts, row, places, shells, rule, out):
    """Lists of the quartets of some bra pairs.

    Parameters
    ----------
    candidates : tuple
        Fields of `Candidates`.
    starts : Buffer of int64, shape (number of bra pairs + 1,)
        As in `Rows`; the first one may be any number.
    row : int
        Number of the first bra pair in its list.
    places, shells : tuple of int
        As of `md4.plan.QuartetRows`.
    rule : tuple of float
        Fields of `Rule`.
    out : Selected
    """
    context.launch(
        Variant(select_quartets, ()), starts.shape[0] - 1, SELECT.threads, shared_bytes(shells),
        candidates, (starts, row, *places, *shells), rule,
        (out.entries, *out.items, out.counts, out.survivors, out.size),
    )  # fmt: skip
