"""Code without loops: r of a primitive quartet in the registers of one thread, and whole quartets of small classes.

Words that unroll `md4.method.recurrence` and the tables of `md4.method.hermite` while code is generated. Where one
takes rz, ry and rx, these are R = P - Q of the primitive quartet; `zeros` is the tuple of its [0]^(m).
"""

from functools import cache
from operator import mul

from md4.gpu.emit.instructions import (
    GLOBAL,
    add_to_shared,
    global_after,
    in_tf32,
    local_double,
    shared_real,
    shared_vector,
    store,
    warp_barrier,
)
from md4.gpu.emit.values import FP32, FP64, OPEN, f64, fma, i32, i64, multiply_add, tuple_of, when, word
from md4.gpu.hermite_rows import r_numbers
from md4.method.angular import packed_hermite, sum_ordinal
from md4.method.hermite import structure
from md4.method.recurrence import by_axis, by_axis_in_plane

# Integrals of a thread a quartet that are in registers at once, and rows ab however many integrals they have; in FP32.
INTEGRALS_AT_ONCE, LEAST_ROWS, LEAST_SINGLE_ROWS = 27, 3, 6
# r of a primitive quartet in registers


def emit_by_axis(zeros, separation, even=False):
    """Yields (n, r[n]) of all n as code without loops, in the order of `md4.method.recurrence.by_axis`.

    `even`: of all t with even t_0, for R_0 = 0.
    """
    return by_axis_in_plane(zeros, separation[1:], mul, fma) if even else by_axis(zeros, separation, mul, fma)


def emit_r(zeros, separation, even=False):
    """r[t] of all t in their order, from [0]^(m) and (R_z, R_y, R_x); `even` as in `emit_by_axis`."""
    return [value for _, value in sorted(emit_by_axis(zeros, separation, even), key=lambda pair: pair[0])]


@cache
def make_pack(count):
    """Intrinsic local array -> tuple of its first `count` doubles."""

    @word(tuple_of(FP64, count), OPEN)
    def pack(array):
        return [local_double(array, n) for n in range(count)]

    return pack


# A warp writes r of its 32 quartets by way of shared memory: STAGED elements t at a time. Rows of two quartets are
# STAGE_ROW doubles apart, more than STAGED, so that they begin in different banks.
STAGED, STAGE_ROW = 16, 18
STAGE_BYTES = 32 * STAGE_ROW * 8


@cache
def make_write_r(l, stride, even):
    """Intrinsic (zeros, rz, ry, rx, array, first, live, stage, lane): r of a warp's 32 quartets, one a lane.

    `even`: those of even t_0 only, and rz stands for zero.

    r of the warp's n-th quartet goes to array[first + n stride:] for n < `live`. It goes by way of shared memory at
    `stage`, so that 8 lanes write 128 contiguous bytes.
    """

    def write_staged(base, live, stage, lane, first, count):
        """Writes r[first] to r[first + count - 1] of all quartets: 8 lanes a quartet, 16 bytes each."""
        sub = lane & 7
        with when(sub * 2 < count):
            for n in range(8):
                row = (lane >> 3) + 4 * n
                with when(row < live):
                    place = row * (8 * STAGE_ROW) + sub * 16
                    values = shared_vector(stage + place.i32)
                    store(base + (row * (8 * stride) + sub * 16 + 8 * first), values, space=GLOBAL)

    @word(None, tuple_of(FP64, l + 1), f64, f64, f64, OPEN, i64, i64, i32, i64)
    def write_r(zeros, rz, ry, rx, array, first, live, stage, lane):
        r, base = emit_r(zeros, (rz, ry, rx), even), array.at(first)
        r += [0.0] * (len(r) % 2)
        own = stage + (lane * (8 * STAGE_ROW)).i32
        for start in range(0, len(r), STAGED):
            piece = r[start : start + STAGED]
            for n in range(0, len(piece), 2):
                store(own, piece[n : n + 2], 8 * n)
            warp_barrier(stage)
            write_staged(base, live, stage, lane, start, len(piece))
            warp_barrier(stage)

    return write_r


@cache
def make_r_by_axis(l, even):
    """Intrinsic (zeros, rz, ry, rx, address): r of a quartet, axis by axis, to successive doubles of shared memory.

    `even`: those of even t_0 only, and rz stands for zero.
    """
    places = r_numbers(l, even)

    @word(None, tuple_of(FP64, l + 1), f64, f64, f64, i32)
    def r_by_axis(zeros, rz, ry, rx, address):
        for n, value in emit_by_axis(zeros, (rz, ry, rx), even):
            store(address, [value], 8 * places[n])

    return r_by_axis


@cache
def make_add_r(l):
    """Intrinsic (zeros, weight, rz, ry, rx, address): adds r times a weight to successive doubles of shared memory."""

    @word(None, tuple_of(FP64, l + 1), f64, f64, f64, f64, i32)
    def add_r(zeros, weight, rz, ry, rx, address):
        for n, value in emit_by_axis([zero * weight for zero in zeros], (rz, ry, rx)):
            place = address + 8 * n
            store(place, [shared_real(place) + value])

    return add_r


@cache
def make_write_row(count, stride, single=False):
    """Intrinsic (address, array, first, lane): `count` doubles of shared memory at `address` to array[first:].

    A warp's lanes take successive ones; `address` and `first` are the lane's own. A row of a `stride` above the count
    ends in zeros, so that whoever copies all of it reads nothing that nobody wrote. If `single`, the array has floats
    rounded to TF32.
    """
    rounds, rest = divmod(count, 32)
    size, written = (4, in_tf32) if single else (8, lambda value: value)

    @word(None, i32, OPEN, i64, i64)
    def write_row(address, array, first, lane):
        target = array.at(first, size)
        values = [shared_real(address, 256 * n) for n in range(rounds)]
        for n, value in enumerate(values):
            store(target, [written(value)], 32 * size * n, GLOBAL)
        if rest:
            with when(lane < rest):
                store(target, [written(shared_real(address, 256 * rounds))], 32 * size * rounds, GLOBAL)
        if stride > count:
            with when(lane < rest + stride - count), when(lane >= rest):
                store(target, [lane.i32 * 0 if single else 0.0], 32 * size * rounds, GLOBAL)

    return write_row


# r of a primitive quartet shared by a group of threads


@word(f64, i64, i32, i32)
def r_update(rule, old, constants):
    """r[t]^(m) by a word of `md4.gpu.kernels.recurrence.packed_rules`; `old` and `constants` are shared addresses."""

    def load(base, shift):
        return shared_real(base + ((rule >> shift).i32 & 65535))

    product = load(constants, 32) * load(old, 0)
    return multiply_add(load(constants, 48), load(old, 16), product)


@word(None, i32, f64)
def store_shared(address, value):
    """A double to a shared address."""
    store(address, [value])


# a whole quartet of a small class


@cache
def make_thread_quartet(bra_class, ket_class, turned, precision=FP64):
    """Intrinsic (zeros, rz, ry, rx, address, array, first, stride, place, add): steps 3 to 5 of one primitive quartet.

    Classes are as in `md4.gpu.staircases`. Structural zeros of H are left out. H[ab, p] comes from shared memory at
    `address`, 16 bytes at a time; the n-th structural element of the lane's H[cd, q], ordered by q, from
    array[first + n stride] (offsets below 2^32 bytes). (ab|cd) goes to shared memory at `place`, cd running fastest (ab
    if `turned`), added to what is there if `add`; a few rows ab at a time, as many as the registers hold.

    All is computed in `precision`, that of the numbers in shared memory and of the array, too.
    """
    l_bra, l_ket, bra, ket = sum(bra_class[:2]), sum(ket_class[:2]), structure(*bra_class), structure(*ket_class)
    l = l_bra + l_ket
    nab, ncd = bra[-1][0] + 1, ket[-1][0] + 1
    by_q = sorted(ket, key=lambda element: element[::-1])
    p_words, q_words, used = packed_hermite(l_bra).tolist(), packed_hermite(l_ket).tolist(), sorted({q for _, q in ket})
    real, nbytes, together = precision.numba, precision.bytes, precision.vector
    batch = max(LEAST_SINGLE_ROWS if precision is FP32 else LEAST_ROWS, INTEGRALS_AT_ONCE // ncd)

    def elements_of(base, step, q):
        """[(cd, H[cd, q])] of the lane's structural elements at q."""
        return [(cd, global_after(base, step, n, precision)) for n, (cd, this) in enumerate(by_q) if this == q]

    def transform(address, base, step, r, rows):
        acc, following = {}, elements_of(base, step, used[0])
        for q, after in zip(used, [*used[1:], None]):
            # those of the next q are on their way while this q is worked on
            elements, following, packed_q = following, elements_of(base, step, after), q_words[q]
            abq = {}
            for n in range(0, len(bra), together):
                if not any(row in rows for row, _ in bra[n : n + together]):
                    continue
                # volatile: read anew for every q rather than kept, for which there are no registers
                elements_of_bra = shared_vector(address, nbytes * n, precision)
                for (row, p), h in zip(bra[n : n + together], elements_of_bra):
                    if row in rows:
                        abq[row] = multiply_add(h, r[sum_ordinal(p_words[p], packed_q)], abq.get(row))
            for cd, h in elements:
                for ab in rows:
                    acc[ab, cd] = multiply_add(abq[ab], h, acc.get((ab, cd)))
        return acc

    @word(None, tuple_of(precision, l + 1), real, real, real, i32, OPEN, i64, i64, i32, i32)
    def thread_quartet(zeros, rz, ry, rx, address, array, first, stride, place, add):
        r, base, step = emit_r(zeros, (rz, ry, rx)), array.at(first, nbytes), (stride * nbytes).i32
        for start in range(0, nab, batch):
            acc = transform(address, base, step, r, range(start, min(start + batch, nab)))
            for (ab, cd), value in acc.items():
                add_to_shared(place, nbytes * (cd * nab + ab if turned else ab * ncd + cd), value, add, precision)

    return thread_quartet
