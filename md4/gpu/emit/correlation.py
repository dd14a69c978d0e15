"""Code for J in the Hermite basis: r[p+q] of one primitive quartet times the Hermite densities of either side.

Words that are unrolled while code is generated. Densities and sums are those of `md4.method.hermite_coulomb` and
carry the sign (-1)^|q|. Of the bra, the sign is taken off when a density is read, and put on again when a sum is
written. The order of functions in a row is that of `md4.gpu.hermite_rows`. Sums are added up in fixed point
(`md4.gpu.kernels.hermite_scales`).
"""

from functools import cache
from itertools import chain, product

from md4.gpu.emit.instructions import add_scaled, global_number, load, new_block, shared_real, store
from md4.gpu.emit.unrolled import emit_by_axis
from md4.gpu.emit.values import FP64, INT, OPEN, f64, fma, i32, i64, select, tuple_of, word
from md4.gpu.emit.warp_sums import emit_warp_place, emit_warp_sum
from md4.gpu.hermite_rows import r_numbers, row_parts, row_words
from md4.method.angular import hermite_ordinal, sum_ordinal

# Numbers that a warp sums at once; see `md4.gpu.emit.warp_sums`.
LANES = 32
# The same where r is in shared memory, for want of registers.
FEW_SUMS = 16
# Functions p whose D_p are loaded together, and whose r[p+q] are where r is in shared memory: a multiple of 4.
ROWS = 4
# Products r[p+q] D_q in the code of a quartet from which on each group of functions p is a block of its own, as linking
# takes more than linear time for a block; with fewer it gains little, and some classes spill more.
MANY_PRODUCTS = 1250


def even_ranges(count, most):
    """Ranges that cover range(count), of at most `most` numbers each; all lengths but the last are even."""
    parts = max(1, -(-count // most))
    size = max(2, -(-count // parts) + 1 & ~1)
    return [range(n, min(n + size, count)) for n in range(0, count, size)]


def pieces(places, ranges):
    """The parts of a sequence of places that are at some ranges of it."""
    return [places[some.start : some.stop] for some in ranges]


def degree(word):
    """Degree of a packed Hermite triple."""
    return word >> 24


def add_groups(values, base, scales, lane):
    """Adds the sums of `values` over the warp to those in fixed point at `base`, with `scales`; `lane` is an i32.

    The values are doubles or floats.
    """
    mine = emit_warp_place(lane)
    for first in range(0, len(values), LANES):
        some = values[first : first + LANES]
        total, before = emit_warp_sum(some, lane), (mine + first).u64 * 8
        add_scaled(base + before, scales + before, total, live=(mine, "lt", len(some)))


def load_numbers(address, offset, precision=FP64):
    """`precision.vector` real numbers of global memory that no one writes meanwhile.

    PTX, so that they are loaded where they are used: kept longer, they would take registers that are missing.
    """
    return load("global.nc", address, offset, precision, precision.vector)


def load_places(address, places, precision):
    """{place: number} of some places of a row at `address`, by loads of `precision.vector` numbers each.

    Of these numbers, all of which are there, the row begins with the first.
    """
    found, at_once = {}, precision.vector
    for first in sorted({place // at_once * at_once for place in places}):
        numbers = load_numbers(address, precision.bytes * first, precision)
        found.update(zip(range(first, first + at_once), numbers))
    return {place: found[place] for place in places}


@cache
def make_load_row(places, precision):
    """Intrinsic (array, first) -> array[first + n] for the n of `places`; see `load_places`."""

    @word(tuple_of(precision, len(places)), OPEN, i64)
    def load_row(array, first):
        return load_places(array.at(first, precision.bytes), places, precision).values()

    return load_row


@cache
def make_add_row(places, precision):
    """Intrinsic (x, sums, scales, first): x_n, in a precision, to sums[first + place] for the n-th of `places`.

    Sums are in fixed point and have scales; see `add_scaled`.
    """

    @word(None, tuple_of(precision, len(places)), OPEN, OPEN, i64)
    def add_row(x, sums, scales, first):
        address, scale = sums.at(first), scales.at(first)
        for place, value in zip(places, x):
            add_scaled(address, scale, value, 8 * place)

    return add_row


def with_density(places, l, mirrored, more):
    """Those places in a row up to degree l that have a density, which is of so many degrees less: 0 or 1."""
    words = row_words(l, mirrored).tolist()
    return tuple(place for place in places if degree(words[place]) + more <= l)


@cache
def make_quartet_sums(l_bra, l_ket, functions, precision=FP64, staged=False, mirrored=False, more=0):
    """Intrinsic (zeros, weight, rz, ry, rx, d_ket, j_ket, d, j, scales, first, lane, stage) -> j_ket.

    A lane has one primitive quartet; the lanes of a warp share the bra primitive. `zeros` are its [0]^(0..L), `d_ket`
    and `j_ket` its D_q and J_q for the `functions` q, by their places; no others take part. J has functions of `more`
    degrees than D (0 or 1), whose D_q are not in `d_ket` (`with_density`), and L is that much lower. D_p begins at
    d[first]. The sum over p of r[p+q] D_p is added to J_q. The sum of r[p+q] D_q over q and the warp is added to
    j[first:], with scales[first:]. All of r is scaled by `weight`. R and scales are doubles, all other real numbers are
    in `precision`. If `mirrored`, R_z is zero, and r[p+q] with it unless p and q have the same parity.

    r is in registers; or, if `staged`, in shared memory: the m-th of lane n at `stage` + (32 m + n) numbers, where
    `stage` is the lane's own address. From there each is loaded once for `ROWS` functions p and the q of a degree,
    which have most sums p + q in common.
    """
    l, nq, real, nbytes = l_bra + l_ket - more, len(functions), precision.numba, precision.bytes
    p_words, q_words = row_words(l_bra, mirrored).tolist(), row_words(l_ket, mirrored).tolist()
    dense_p = with_density(range(len(p_words)), l_bra, mirrored, more)
    dense_q = with_density(functions, l_ket, mirrored, more)
    orders, ket, of_d = (tuple_of(precision, count) for count in (l + 1, nq, len(dense_q)))
    places = r_numbers(l, mirrored)

    # functions p whose sums over the warp are made at once, and the q of each degree that go with them
    most, groups = FEW_SUMS if staged else LANES, []
    for of_p, of_q in zip(row_parts(l_bra, mirrored), row_parts(l_ket, mirrored)):
        mine = [q for q in functions if q in of_q]
        degrees = [[q for q in mine if degree(q_words[q]) == n] for n in range(l_ket + 1)]
        groups += [(group, degrees) for group in pieces(of_p, even_ranges(len(of_p), most)) if mine]
    many = (2 - more) * sum(len(group) * sum(map(len, degrees)) for group, degrees in groups) >= 2 * MANY_PRODUCTS

    def signed(p, value):
        return -value if degree(p_words[p]) % 2 else value

    def numbers_of_quartet(zeros, separation, stage):
        """A function t -> r[t], which loads it if it is staged."""
        r = emit_by_axis(zeros, separation, mirrored)
        if not staged:
            return dict(r).__getitem__
        for t, value in r:
            store(stage, [value], 32 * nbytes * places[t])
        return lambda t: load("volatile.shared", stage, 32 * nbytes * places[t], precision)[0]

    @word(ket, orders, real, f64, f64, f64, of_d, ket, OPEN, OPEN, OPEN, i64, i64, i32)
    def quartet_sums(zeros, weight, rz, ry, rx, d_ket, j_ket, d, j, scales, first, lane, stage):
        zeros, separation = [zero * weight for zero in zeros], [x.narrowed(precision) for x in (rz, ry, rx)]
        number = numbers_of_quartet(zeros, separation, stage)
        d_q, j_q = dict(zip(dense_q, d_ket)), dict(zip(functions, j_ket))
        source, target, scale, lane = d.at(first, nbytes), j.at(first), scales.at(first), lane.i32
        for group, degrees in groups:
            if many and group != groups[0][0]:
                new_block(lane)
            j_p = dict.fromkeys(group, 0.0)
            for n in range(0, len(group), ROWS):
                rows = group[n : n + ROWS]
                d_p = load_places(source, [p for p in rows if p in dense_p], precision)
                d_p = {p: signed(p, value) for p, value in d_p.items()}
                for of_degree in degrees:
                    known = {}
                    for q, p in product(of_degree, rows):
                        if p not in d_p and q not in d_q:
                            continue
                        t = sum_ordinal(p_words[p], q_words[q])
                        value = known[t] if t in known else known.setdefault(t, number(t))
                        if p in d_p:
                            j_q[q] = fma(value, d_p[p], j_q[q])
                        if q in d_q:
                            j_p[p] = fma(value, d_q[q], j_p[p])
            place = 8 * group[0]
            if any(q in d_q for q in chain(*degrees)):
                add_groups([signed(p, j_p[p]) for p in group], target + place, scale + place, lane)
        return j_q.values()

    return quartet_sums


@cache
def make_load_words(count):
    """Intrinsic (words, first, last) -> words[min(first + 32 n, last)] for n < count, of an int32 array."""

    @word(tuple_of(INT, count), OPEN, i64, i64)
    def load_words(words, first, last):
        values = []
        for n in range(count):
            place = first + 32 * n
            values.append(global_number(words.at(select(place < last, place, last), 4), kind=INT))
        return values

    return load_words


@cache
def make_signed(count):
    """Intrinsic (x, words) -> (-1)^|p| x_p."""

    @word(tuple_of(FP64, count), tuple_of(FP64, count), tuple_of(INT, count))
    def signed(x, places):
        return [select(packed.has(1 << 24), -value, value) for value, packed in zip(x, places)]

    return signed


class Walk:
    """Shared addresses of r[p + q] as q goes through its groups of one degree and one s, for one p.

    idx(p+q) = idx(p) + idx(q) + s_p s_q + l_p l_q (l_p + l_q + 2)/2, whose last term grows by
    l_p (l_p + 2 l_q + 3)/2 from l_q to l_q + 1.
    """

    def __init__(self, start, packed):
        s, l = packed >> 16 & 255, packed >> 24 & 255
        self.row = self.base = start + ((packed & 65535) << 3)
        self.s_step, self.growth = s << 3, l << 3
        self.l_step = l * (l + 3) << 2

    def next_s(self):
        self.row = self.row + self.s_step

    def next_degree(self):
        self.row = self.base = self.base + self.l_step
        self.l_step = self.l_step + self.growth


@cache
def make_correlate(l_ket, count, mirrored, parity):
    """Intrinsic (words, r, d, d_bra, j_bra, weight, j, scales, first, lane) -> j_bra, for one quartet of a warp.

    A lane has `count` functions p of the bra, by their packed words, and their D_p and J_p. r of the quartet is at the
    shared address `r`, D_q of the ket begins at d[first]. The sum over q of r[p+q] D_q is added to J_p. The sum of
    r[p+q] D_p over the warp's functions p, times `weight`, is added to j[first:], with scales[first:]. If `mirrored`,
    all p and q are of one `parity`.
    """
    bra, part = tuple_of(FP64, count), row_parts(l_ket, mirrored)[parity]

    @word(bra, tuple_of(INT, count), i32, OPEN, bra, bra, f64, OPEN, OPEN, i64, i64)
    def correlate(places, r, d, d_p, j_p, weight, j, scales, first, lane):
        walks, source, target = [Walk(r, packed) for packed in places], d.at(first), j.at(first)
        scale, lane, sums, pair, place = scales.at(first), lane.i32, [], None, part.start
        for lq in range(l_ket + 1):
            for s in range(lq + 1):
                for z in range(s + 1 if not mirrored or (lq - s) % 2 == parity else 0):
                    q = hermite_ordinal(lq - s, s - z, z)
                    if place % 2 == 0:
                        pair = load_numbers(source, 8 * place)
                    total = None
                    for n, walk in enumerate(walks):
                        value = shared_real(walk.row, 8 * q)
                        j_p[n] = fma(value, pair[place % 2], j_p[n])
                        total = value * d_p[n] if n == 0 else fma(value, d_p[n], total)
                    sums.append(total * weight)
                    place += 1
                    if len(sums) == LANES or place == part.stop:
                        begin = 8 * (place - len(sums))
                        add_groups(sums, target + begin, scale + begin, lane)
                        sums = []
                for walk in walks:
                    walk.next_s()
            for walk in walks:
                walk.next_degree()
        return j_p

    return correlate
