"""Steps 2 to 5 for the smallest classes: a thread computes a quartet, r and (ab|q] in registers.

Lanes of a warp share the bra pair and take ket pairs side by side. H[ab, p] of the bra primitives is in shared memory,
where all lanes read the same number at once. What a lane reads of its ket primitives, H[cd, q] among it, lies in slots
side by side (`md4.gpu.pair_layout`). The code of a primitive quartet has no loops and is specialised for the four
angular momenta. Integrals go to the result by way of shared memory: those of a block of threads are one contiguous
piece of it or, where bra and ket are exchanged, those of each thread.
"""

from itertools import chain
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, i32, i64, jit_device, types
from md4.gpu.emit.instructions import shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.stores import make_write_out
from md4.gpu.emit.unrolled import make_thread_quartet
from md4.gpu.emit.values import FP32, precision_of
from md4.gpu.h_layout import BRA_ELEMENTS, form_size
from md4.gpu.kernels.groups import PairRange, Records, Result, pair_range, primitives_of, records, result
from md4.gpu.kernels.primitive_quartets import (
    Charge,
    OperatorArguments,
    charge,
    make_zeros_upto,
    operator_arguments,
    separate,
)
from md4.gpu.pair_layout import SIDE_BY_SIDE
from md4.gpu.tuning import SHARED_BYTES
from md4.method.hermite import structure


class QuartetLimits(NamedTuple):
    """Classes and memory of a thread a quartet on a kind of device."""

    integrals: int  # most integrals of a quartet
    one_product_integrals: int  # the same where one product would do, since one side has a single Hermite function
    l: int  # highest L
    shared: int  # bytes of shared memory of a block


# Devices with FP64 tensor cores, which make the other kernels fast; and without, whose blocks have less shared memory.
TENSOR_LIMITS, PLAIN_LIMITS = QuartetLimits(135, 40, 6, 160 << 10), QuartetLimits(54, 54, 4, 60 << 10)
THREADS = 128  # of a block, half of them where integrals take more shared memory
PRIMITIVES = 32  # most bra primitives whose H is in shared memory at once
WRITTEN, ROUNDS = 15, 4  # integrals of a quartet up to which a thread writes `ROUNDS` of them at a time
SWAP_L = 5  # L from which on the side of higher l is made the bra
# l of a pair up to which single shells with it are the rows of a matrix, and `FEW_BLOCKS` hold: (highest L, most
# integrals, blocks a multiprocessor, and in a matrix). All others have one.
FEW_L, FEW_BLOCKS = 2, ((2, 9, 5, 5), (4, 27, 4, 4), (4, 45, 4, 3))


def limits_of(unit):
    """`QuartetLimits` for an arithmetic unit."""
    return PLAIN_LIMITS if unit == "fma" else TENSOR_LIMITS


def block_threads(count, single=False):
    """Threads of a block for `count` integrals each, which wait in shared memory: two blocks a multiprocessor."""
    return THREADS if (4 if single else 8) * THREADS * count <= SHARED_BYTES else THREADS // 2


class BraH(NamedTuple):
    """H[ab, p] of the bra's list in the form `BRA_ELEMENTS`.

    Attributes
    ----------
    numbers : float64 array
    size : int64
        Numbers of a primitive pair.
    group : int64
        Primitive pairs for which shared memory has room.
    """

    numbers: F64
    size: i64
    group: i64


class Slots(NamedTuple):
    """What is in the slots of the ket's list; see `md4.gpu.pair_layout`.

    Attributes
    ----------
    pairs, h : float64 array
        [p, P_z, P_y, P_x][slot], and [element of H][slot] in the form `KET_ELEMENTS`, or `KET_SINGLES` in FP32.
    first : int64 array
        Slot of each pair's first primitive.
    count : int64
        Slots.
    """

    pairs: F64
    h: F64
    first: I64
    count: i64


def in_slot(slots, n):
    """`Charge` in slot n (device function)."""
    numbers, count = slots.pairs, slots.count
    return Charge(numbers[n], numbers[count + n], numbers[2 * count + n], numbers[3 * count + n])


def make_integrals(bra_class, ket_class, turned, kind, single=False):
    """Device function: (ab|cd) of a thread's quartet, to its place in shared memory behind the room for H.

    All threads of a block call it for the same bra pair, and each for a ket pair of its own, unless it is not `live`.
    It is zero for threads that are not, and for pairs without primitives. If the bra pair is that of the call before,
    it need not be `fresh`: H is then not copied to shared memory again, if all of its primitives had room there. It
    returns where shared memory begins.

    `single`: all but R = P - Q is computed in FP32, and shared memory holds floats, those of H in rows of
    `single_h_size`.
    """
    count, l = rows(bra_class) * rows(ket_class), sum(bra_class[:2]) + sum(ket_class[:2])
    threads, precision = block_threads(count, single), precision_of(single)
    real, nbytes, staged = precision.numba, precision.bytes, single_h_size(bra_class)
    quartet = make_thread_quartet(bra_class, ket_class, turned, precision)
    zeros_upto = make_zeros_upto(kind, l, single)
    charge_at, charge_in, separation = jit_device(charge), jit_device(in_slot), jit_device(separate)
    primitives = jit_device(primitives_of)

    @jit_device
    def integrals(bra, bra_pairs, pair, h, fresh, ket, ket_pairs, pair_cd, live, operator):
        shared = cuda.shared.array(0, real)
        tid = i64(cuda.threadIdx.x)
        first, last = primitives(bra_pairs, pair)
        size = staged if single else h.size
        address, h_bytes = shared_address(shared), nbytes * h.group * size
        copied = fresh or last - first > h.group
        place, add = i32(address + h_bytes + nbytes * count * tid), 0
        for n in range(count):
            shared[h_bytes // nbytes + count * tid + n] = 0.0
        while first < last:
            many = min(h.group, last - first)
            if copied:
                cuda.syncthreads()
                if single:
                    for n in range(tid, many * size, threads):
                        primitive = quotient(n, size)
                        element = min(n - primitive * size, h.size - 1)  # those of the padding are never used
                        shared[n] = h.numbers[(first + primitive) * h.size + element]
                else:
                    for n in range(tid, many * size, threads):
                        shared[n] = h.numbers[first * size + n]
                cuda.syncthreads()
            if live:
                slot = ket.first[ket_pairs.first + pair_cd]
                begin, end = primitives(ket_pairs, pair_cd)
                for _ in range(begin, end):
                    ket_charge, h_address = charge_in(ket, slot), address
                    record = first * bra.width
                    for _ in range(many):
                        s = separation(charge_at(bra.numbers, record), ket_charge)
                        zeros = zeros_upto(s, operator)
                        quartet(
                            zeros, s.rz, s.ry, s.rx, i32(h_address), ket.h, slot, ket.count, place, i32(add)
                        )  # fmt: skip
                        h_address += nbytes * size
                        record += bra.width
                        add = 1
                    slot += SIDE_BY_SIDE
            first += h.group
        return address

    return integrals


def thread_quartet_integrals(
    la, ca, lb, cb, lc, cc, ld, cd, pure, turned, kind, singles=(False, False), matrix=False, blocks=1
):
    """Kernel factory for the class (la lb|lc ld) of shells with ca, cb, cc, cd contracted functions.

    `turned`: bra and ket are exchanged; ab runs faster than cd in the result. `singles`: whether a and c are single
    shells, with the unit function as b and d. `matrix`: the result is a part of a matrix, with columns (ij, ab) if
    `turned`, else (kl, cd).
    """
    bra_class, ket_class = (la, lb, pure, ca, cb, singles[0]), (lc, ld, pure, cc, cd, singles[1])
    nab, ncd = rows(bra_class), rows(ket_class)
    count = nab * ncd
    threads = block_threads(count)
    integrals = make_integrals(bra_class, ket_class, turned, kind)
    rounds, several = ROUNDS, 1 < count <= WRITTEN
    write_out = make_write_out(rounds, threads)
    # by how much the pair, cd and ab of an integral change from one that a thread writes to its next
    pairs_ahead, rows_ahead, ahead = threads // count, threads % count // nab, threads % count % nab

    def kernel(
        bra: Records, bra_pairs: PairRange, h: BraH, ket: Slots, ket_pairs: PairRange, npair_cd: i64, parts: i64,
        operator: OperatorArguments, out: Result,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.float64)
        tid = i64(cuda.threadIdx.x)
        pair, part = i64(cuda.blockIdx.x) // parts, i64(cuda.blockIdx.x) % parts
        pair_cd = part * threads + tid
        address = integrals(bra, bra_pairs, pair, h, True, ket, ket_pairs, pair_cd, pair_cd < npair_cd, operator)
        h_bytes = 8 * h.group * h.size
        cuda.syncthreads()
        base = out.first + pair * out.s_ij + part * threads * out.s_kl
        here = min(i64(threads), npair_cd - part * threads)
        if matrix and turned:
            row, ab, n = tid // nab, tid % nab, tid
            own, cd = row // ncd, row % ncd
            while n < here * count:
                out.numbers[base + own * out.s_kl + cd * out.s_cd + ab] = shared[h_bytes // 8 + n]
                n += threads
                own, cd, ab = own + pairs_ahead, cd + rows_ahead, ab + ahead
                if ab >= nab:
                    cd, ab = cd + 1, ab - nab
                if cd >= ncd:
                    own, cd = own + 1, cd - ncd
        elif matrix:
            for ab in range(nab):
                own, cd, n = tid // ncd, tid % ncd, tid
                while n < here * ncd:
                    out.numbers[base + ab * out.s_ab + n] = shared[h_bytes // 8 + own * count + ab * ncd + cd]
                    n += threads
                    own, cd = own + threads // ncd, cd + threads % ncd
                    if cd >= ncd:
                        own, cd = own + 1, cd - ncd
        elif turned:
            for row in range(tid >> 5, here, threads // 32):
                for n in range(tid & 31, count, 32):
                    out.numbers[base + row * out.s_kl + n] = shared[h_bytes // 8 + row * count + n]
        elif several:
            n = tid
            while n < here * count:
                write_out(out.numbers, base + n, i32(address + h_bytes + 8 * n), here * count - n)
                n += rounds * threads
        else:
            for n in range(tid, here * count, threads):
                out.numbers[base + n] = shared[h_bytes // 8 + n]

    return Kernel(kernel, (threads, blocks))


def single_h_size(bra_class):
    """Floats of H[ab, p] of a primitive pair in shared memory: whole loads of 16 bytes."""
    return -(-len(structure(*bra_class)) // FP32.vector) * FP32.vector


def rows(shells):
    """Function pairs of a class."""
    return structure(*shells)[-1][0] + 1


# launcher


def takes(unit, bra, ket):
    """Whether this kernel is for a class: few enough integrals, fewer where one product is all, and on old devices."""
    limits = limits_of(unit)
    most = limits.one_product_integrals if 1 in (bra.nherm, ket.nherm) else limits.integrals
    return bra.nab * ket.nab <= most and bra.l + ket.l <= limits.l


def few(bra, ket):
    """Whether a class is of single shells and of pairs of low l, whose H lanes read quickly."""
    return bra.single != ket.single and (bra, ket)[bra.single].l <= FEW_L


def swapped(bra, ket, matrix):
    """Whether bra and ket are exchanged: H of the side of higher l in shared memory leaves more registers.

    H of single shells is small whatever their l; then it is the side of more functions. In a `matrix` of a class of
    `few` it is the single shells, whose functions are its rows: neighbouring threads then write neighbouring pairs.
    """
    if matrix and few(bra, ket):
        return ket.single
    if bra.l + ket.l < SWAP_L:
        return False
    return bra.nab < ket.nab if bra.single != ket.single else (bra.l, bra.nab) < (ket.l, ket.nab)


def prefers(bra, ket):
    """Whether it matters which of the two is the bra."""
    return swapped(bra, ket, False) or swapped(ket, bra, False)


def blocks_of(bra, ket, matrix):
    """Blocks that share a multiprocessor; with one, threads have all the registers that they want."""
    if not few(bra, ket):
        return 1
    fits = (entry for entry in FEW_BLOCKS if bra.l + ket.l <= entry[0] and bra.nab * ket.nab <= entry[1])
    return next((entry[3] if matrix else entry[2] for entry in fits), 1)


def thread_quartet_variant(bra, ket, kind, turned, matrix):
    """Variant for a class; `turned` if bra and ket have been exchanged, and for blocks as in the factory."""
    shells, singles = ((p.la, p.nctr_a, p.lb, p.nctr_b) for p in (bra, ket)), (bra.structure[-1], ket.structure[-1])
    facts = *chain.from_iterable(shells), bra.pure, turned, kind
    if matrix or any(singles):
        facts = *facts, singles, matrix, blocks_of(bra, ket, matrix)
    return Variant(thread_quartet_integrals, facts)


def quartet_launcher(context, kind, parameter, bra, ket, turned, matrix):
    """The function that makes (ab|cd) for two `ListFacts`, into blocks that are `turned` or a part of a `matrix`."""
    count = bra.nab * ket.nab
    threads = block_threads(count)
    size, room = form_size(bra, BRA_ELEMENTS), limits_of(context.unit).shared - 8 * threads * count
    group = max(1, min(bra.max_prim, PRIMITIVES, room // (8 * size)))
    variant = thread_quartet_variant(bra, ket, kind, turned, matrix)
    shared, arguments = 8 * (group * size + threads * count), operator_arguments(context, kind, parameter)

    def launch(context, h, g, ab, cd, block):
        slots, nket = cd.data.slots, cd.npair
        parts = -(-nket // threads)
        context.launch(
            variant, ab.npair * parts, threads, shared,
            records(ab), pair_range(ab), (h, size, group), (slots.numbers, g, slots.first, slots.count),
            pair_range(cd), nket, parts, arguments, result(block),
        )  # fmt: skip

    return launch
