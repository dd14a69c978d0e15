"""J in the Hermite basis on the GPU: densities and sums of Hermite functions in device memory.

See `md4.method.hermite_coulomb`. The primitive pairs of all lists of one degree are taken together.
"""

from typing import NamedTuple

import numpy as np

from md4.gpu.buffers import Buffer, words
from md4.gpu.dealing import DealtTarget
from md4.gpu.h_layout import KET_BLOCKS
from md4.gpu.hermite_rows import row_width
from md4.gpu.kernels.coulomb_threads import by_threads, in_single, launch_order, launch_quartets
from md4.gpu.kernels.hermite_coulomb import (
    launch_contraction,
    launch_hermite_densities,
    launch_hermite_products,
    launch_hermite_sums,
)
from md4.gpu.kernels.hermite_scales import BLOCKS, launch_scales
from md4.gpu.kernels.narrow import launch_narrow
from md4.gpu.kernels.primitive_quartets import (
    LARGEST_SINGLE,
    extent,
    has_range_of_single,
    largest_single_exponent,
    least_single_exponent,
)
from md4.gpu.pair_order import PairOrder, overlap, part_of_order, rows_together
from md4.gpu.r_layout import r_stride
from md4.method.angular import nherm
from md4.method.derivatives import OF_A, OF_B
from md4.plan import chunks

SINGLE_RATIO = 1e5  # quartets below this many tolerances are computed in single precision; 0: none
FEWEST_SINGLES = 1 << 21  # primitive quartets that a launch in single precision should have, about
SINGLE_SHARE = 0.04  # part of the products of gradients from which on two degrees have kernels in single precision
GRADIENT_THREAD_L = 9  # highest L of which a thread takes a primitive quartet for gradients, with kernels of their own
R_BYTES = 256 << 20  # bytes of r of a chunk


def first_aos(context, prepared, basis):
    """First AOs of the shells of the whole list, (npair, 2) on the device; kept as long as the list is."""
    data = prepared.data
    if data.first_aos is None:
        with context.alone():
            _, (first,) = context.pool.upload([basis.ao_loc[prepared.whole.pairs.pairs]], context.stream)
        data.first_aos = first
    return data.first_aos


def matrices_of(array, count):
    """The `count` matrices of a buffer, flat ones."""
    size = array.size // count
    return [array.part(n * size, (size,)) for n in range(count)]


class Degree:
    """All primitive pairs of one degree in their order, in device memory, with D and J of their Hermite functions.

    Parameters
    ----------
    pool : md4.gpu.pool.Pool
    order : md4.gpu.pair_order.PairOrder
    matrices : int
        Number of density matrices.
    mirrored, with_singles : bool
        Whether all centres lie in a plane (`md4.gpu.hermite_rows`), and whether there is D in FP32.

    Attributes
    ----------
    l : int
    records : Buffer, shape (4 nprim,)
        Exponent and centre of the primitive pair at each place.
    reach : Buffer, shape (3 nprim,)
        As in `md4.gpu.kernels.coulomb_threads.OrderedSide`.
    densities, sums, scales : list of Buffer
        D, J in fixed point, and its scales (`md4.gpu.kernels.hermite_scales`) for each matrix, shape
        (nprim row_width,).
    singles : list of Buffer
        D in FP32, or none.
    width, owner, mirror
        Numbers of a record, no pairs, and None: whoever makes r of a list asks for them. `mirror` would leave out the
        odd elements of r, but J alone reads r by ordinals of all of them.
    """

    width, owner, mirror = 4, Buffer(0, (0,), 8, None), None

    def __init__(self, pool, order, matrices, mirrored, with_singles):
        self.order, self.l, self.mirrored, nprim = order, order.l, mirrored, order.nprim
        size = nprim * row_width(order.l, mirrored)  # a multiple of 8
        halves = size // 2 if with_singles else 0
        self.buffer = pool.get(max(1, 7 * nprim + matrices * (3 * size + halves)))
        first = 4 * nprim
        self.records, self.both = self.buffer.part(0, (first,)), self.buffer.part(first, (2 * matrices * size,))
        parts = [self.buffer.part(first + n * size, (size,)) for n in range(3 * matrices)]
        self.densities, self.sums, self.scales = (parts[n * matrices : (n + 1) * matrices] for n in range(3))
        first += 3 * matrices * size
        # last, since rows of D begin at multiples of 16 bytes
        self.reach = self.buffer.part(first + matrices * halves, (3 * nprim,))
        rooms = [self.buffer.part(first + n * halves, (halves,)) for n in range(matrices if with_singles else 0)]
        self.singles = [Buffer(room.pointer, (size,), 4, room.owner) for room in rooms]

    def results(self):
        """`md4.gpu.kernels.hermite_coulomb.Sums` for each matrix."""
        return zip(self.sums, self.scales)


class Piece(NamedTuple):
    """A range of the places of a `Degree`, as launchers take slices of lists."""

    degree: Degree
    first_prim: int
    nprim: int

    @property
    def facts(self):
        return self.degree

    @property
    def data(self):
        return self.degree


class DeviceCoulomb:
    """D and J in the Hermite basis, in device memory.

    Parameters
    ----------
    backend : md4.gpu.backend.GpuBackend
        `add` works on its track.
    basis : md4.Basis
    matrices : list of Buffer
        D + D^T of each density, nao by nao, or any multiple of it, of which J is the same.
    rule : md4.plan.QuartetRule
        By which quartets survive.
    lists : list of md4.engine.PreparedPairs
        All lists, in the order of the rule's tables.
    more : int
        J_p, and zeros of D_p, are of so much higher a degree than the pairs are: 1 for derivatives.
    beside : md4.gpu.context.DeviceContext, optional
        From `DeviceContext.beside_now`, where the backend's stream is at work for long: for copies of tables.
    """

    def __init__(self, backend, basis, matrices, rule, lists, more=0, beside=None):
        self.backend, self.basis, self.matrices, self.degrees, self.more = backend, basis, matrices, {}, more
        self.beside = beside
        self.axis = basis.mirror_axis
        self.order(rule, lists)

    def degree_of(self, prepared):
        """The degree of the Hermite functions of a list."""
        return prepared.facts.l + self.more

    # before the tracks begin

    def order(self, rule, lists):
        """Orders the primitive pairs of all lists for the quartets that survive."""
        self.least, self.lists = rule.tolerance, lists
        largest = max(rule.own.max(initial=0.0), rule.norms.max(initial=0.0))
        where = extent(self.basis)
        fits = largest <= LARGEST_SINGLE and has_range_of_single(where)
        self.least_exponent = 2.0 * min(least for least, _ in where.exponents.values())
        # dry runs of derivatives have no tolerance
        wanted = self.least > 0 or (self.backend.dry and self.more > 0)
        self.with_singles = bool(wanted and SINGLE_RATIO > 0 and fits)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            products, terms = rule.bounds * rule.own, np.where(rule.bounds > 0, rule.terms / rule.bounds, 1.0)
        ends = np.cumsum([0, *map(len, lists)])
        first, degrees = np.zeros(ends[-1], dtype=np.int64), np.repeat(list(map(self.degree_of, lists)), np.diff(ends))
        counts = np.concatenate([np.zeros(0, np.int64), *(np.diff(this.pairs.start) for this in lists)])
        for l in sorted({self.degree_of(this) for this in lists if len(this)}):
            mine = np.flatnonzero(degrees == l)
            order = PairOrder(l, counts[mine], rule.bounds[mine], products[mine])
            first[mine] = order.first
            self.degrees[l] = Degree(
                self.backend.context.pool, order, len(self.matrices), self.axis is not None,
                self.with_singles and in_single(l, 0),
            )  # fmt: skip
        self.send(ends, first, rule.bounds, products, terms)

    def send(self, ends, *tables):
        """Brings the order to the device: first places, R, R f |D| and T / R of all pairs; lists begin at `ends`."""
        context = self.backend.context
        nprims = [this.nprim for this in self.lists]
        edges = np.cumsum([0, *(words(4 * nprim) for nprim in nprims)]).tolist()
        self.uploaded, parts = context.pool.upload(tables, (self.beside or context).stream)
        if self.beside is not None:
            self.beside.stream.synchronize()
        self.room, self.places = context.pool.get(max(1, edges[-1])), {}
        for n, this in enumerate(self.lists):
            room, nprim, npair = self.room.part(edges[n], (nprims[n],)), nprims[n], len(this)
            places = self.places[this] = Buffer(room.pointer, (nprim,), 4, room.owner)
            degree = self.degrees[self.degree_of(this)]
            launch_order(
                context, this, [part.part(int(ends[n]), (npair,)) for part in parts], self.axis or 0, places,
                degree.reach, degree.records,
            )  # fmt: skip

    def load(self, lists):
        """D_q of all lists, and zeros for J_q."""
        context = self.backend.context
        for degree in self.degrees.values():
            context.clear(degree.both)
        for this in lists:
            if this.nprim == 0:
                continue
            h, ao = this.h(KET_BLOCKS).array, first_aos(context, this, self.basis)
            degree = self.degrees[self.degree_of(this)]
            for matrix, density in zip(self.matrices, degree.densities):
                launch_hermite_densities(
                    context, this, h, ao, matrix, self.basis.nao, degree.l, self.places[this], self.axis, density
                )  # fmt: skip
        degrees = [*self.degrees.values()]
        launch_scales(context, self.backend.operator, degrees, context.pool.room("norms", BLOCKS * len(degrees)))
        for degree in degrees:
            for density, single in zip(degree.densities, degree.singles):
                launch_narrow(context, density, single)

    # quartets

    def add(self, l_bra, l_ket, part, parts):
        """Adds all quartets of two degrees, the larger one first, that survive, or one of several parts of them."""
        bra, ket = self.degrees[l_bra], self.degrees[l_ket]
        found = overlap(bra.order, ket.order, self.least)
        first, last = part_of_order(bra.order, found, part, parts)
        if first == last or found.width == 0:
            return
        by_thread = self.more == 0 or l_bra + l_ket <= GRADIENT_THREAD_L
        if by_thread and by_threads(l_bra, l_ket):
            self.launch(bra, ket, (first, last), found, parts)
            return
        size = 8 * r_stride(l_bra + l_ket)
        most = max(1, self.backend.context.pool.share(R_BYTES) // size)
        for low, high, width in rows_together(bra.order, found, first, last, most):
            self.contract(bra, ket, low, high - low, width, most)

    def launch(self, bra, ket, ends, found, parts):
        """One of several parts of the bra's places with all of the ket's, by `md4.gpu.kernels.coulomb_threads`."""
        backend, least, single = self.backend, self.least, False
        limits = least, least, 0.0
        fits = self.least_exponent >= least_single_exponent(bra.l + ket.l)
        if self.with_singles and fits and in_single(bra.l, ket.l) and self.worth_singles(bra, ket):
            double = SINGLE_RATIO * least
            # without a tolerance as if all of them could be
            count = found.work[-1] - (overlap(bra.order, ket.order, double).work[-1] if least > 0 else 0)
            single = count >= FEWEST_SINGLES * parts
        if single:
            limits = least, double, largest_single_exponent(bra.l + ket.l)
        for in_fp32 in (False, True) if single else (False,):
            one, two = ((side.singles if in_fp32 else side.densities) for side in (bra, ket))
            for of_bra, of_ket in zip(zip(one, bra.sums, bra.scales), zip(two, ket.sums, ket.scales)):
                launch_quartets(
                    backend.context, backend.operator, (bra.l, ket.l), bra.mirrored, self.more,
                    (bra.records, bra.reach, *ends, *of_bra), (ket.records, ket.reach, 0, found.width, *of_ket),
                    limits, found.filled, in_fp32,
                )  # fmt: skip

    def worth_singles(self, bra, ket):
        """Whether two degrees have enough of the products of all for kernels of their own, which only gradients ask."""
        if self.more == 0:
            return True
        numbers = {l: degree.order.nprim * nherm(l) for l, degree in self.degrees.items()}
        own = numbers[bra.l] * numbers[ket.l] * (1 if bra is ket else 2)
        return own >= SINGLE_SHARE * sum(numbers.values()) ** 2

    def contract(self, bra, ket, first, count, width, most):
        """So many of the bra's places with the first `width` of the ket's, r of at most `most` quartets in memory."""
        backend, nket = self.backend, min(width, most)
        for rows, columns in chunks(count, width, max(1, most // nket), nket):
            if bra is ket and columns.start >= first + rows.stop:
                continue
            one = Piece(bra, first + rows.start, rows.stop - rows.start)
            two = Piece(ket, columns.start, columns.stop - columns.start)
            r = backend.r(one, two)
            for sides in zip(*(zip(side.densities, side.sums, side.scales) for side in (bra, ket))):
                launch_contraction(backend.context, one, two, bra.mirrored, r, *sides)

    # after the tracks have ended

    def add_products(self, whole, prepared, factor, z):
        """Adds what J of a slice of a list, the `whole`, gives to Z of gradients; see `launch_hermite_products`."""
        context, degree = self.backend.context, self.degrees[self.degree_of(prepared)]
        ao, places = first_aos(context, prepared, self.basis), self.places[whole]
        for matrix, sums in zip(self.matrices, degree.results()):
            launch_hermite_products(
                context, prepared, ao, matrix, self.basis.nao, factor, sums, degree.l, places, self.axis, z
            )  # fmt: skip

    def collect(self, lists, results):
        """Adds what all lists have summed up to Y of each density, the `results`, and forgets them."""
        context = self.backend.context
        for this in lists:
            if this.nprim == 0:
                continue
            h, ao, degree = this.h(KET_BLOCKS).array, first_aos(context, this, self.basis), self.degrees[this.facts.l]
            for sums, y in zip(degree.results(), results):
                launch_hermite_sums(context, this, h, ao, sums, self.basis.nao, self.places[this], self.axis, y)
        self.forget()

    def collect_derivatives(self, lists):
        """J of derivatives of each density on the host, shape (n, 3, nao, nao), from J_p of one degree more.

        From a pair ab the derivatives by A belong to row a, those by B to row b.
        """
        context, count, nao = self.backend.context, len(self.matrices), self.basis.nao
        found, size = np.empty((2, 3, count, nao, nao)), nao**2
        if found.nbytes + self.derived_bytes(self.backend, lists) > self.backend.memory_left():
            for this in lists:  # whose H has served
                this.drop()
        room = context.pool.get(found.size)
        context.clear(room)
        for this in lists:
            if this.nprim == 0:
                continue
            ao, degree = first_aos(context, this, self.basis), self.degrees[self.degree_of(this)]
            for number, derivative in enumerate(OF_A + OF_B):
                derived = this.derived((derivative,))  # and the one before, with its H, is gone
                for n, sums in enumerate(degree.results()):
                    y = room.part((number * count + n) * size, (size,))
                    launch_hermite_sums(
                        context, derived, derived.h(KET_BLOCKS).array, ao, sums, nao, self.places[this], self.axis, y
                    )  # fmt: skip
        self.forget()
        context.copy_out(found, room.pointer)
        context.pool.release(room)
        return (found[0] + found[1].swapaxes(-1, -2)).swapaxes(0, 1)

    @staticmethod
    def derived_bytes(backend, lists):
        """Bytes of H of one derivative of the list for which it is the largest, rounded up as buffers are."""
        return max(backend.hermite_bytes(this.pairs.derived(OF_A[:1])) for this in lists) * 9 // 8

    def forget(self):
        """Gives back the memory of what `order` has made."""
        for buffer in (self.room, self.uploaded, *(degree.buffer for degree in self.degrees.values())):
            self.backend.context.pool.release(buffer)
        self.degrees, self.places, self.lists = {}, {}, []


class CoulombTarget(DealtTarget):
    """J alone of a build; see `md4.backends.Sums.coulomb`."""

    def __init__(self, engine, lists, survivors, twice):
        super().__init__(engine, survivors, [twice.shape])
        size, self.buffer = twice.size, self.context.pool.get(2 * twice.size)
        sent, self.y = (self.buffer.part(first, (size,)) for first in (0, size))
        self.context.copy_in_pieces(sent.pointer, np.ascontiguousarray(twice))
        self.context.clear(self.y)
        self.sums = DeviceCoulomb(self.backend, engine.bra_basis, matrices_of(sent, len(twice)), survivors.rule, lists)

    def begin(self, lists, keeps_all):
        """As `DealtTarget.begin`. Only D and J before and after the tracks are made by H matrices."""
        self.sums.load(lists)
        super().begin(lists, True)

    def add_pair(self, pair):
        """Adds the surviving quartets of two degrees, or a part of them."""
        self.sums.backend = self.backend
        self.sums.add(*self.backend.sums.coulomb_key(pair.bra.facts, pair.ket.facts), pair.part, pair.parts)
        quartets = self.survivors.task_quartets[pair.number]
        self.wanted += quartets * (pair.part + 1) // pair.parts - quartets * pair.part // pair.parts

    def finish(self, lists):
        """Adds what all lists have summed up to Y."""
        self.computed, self.sums.backend = self.wanted, self.backend
        self.sums.collect(lists, matrices_of(self.y, len(self.sums.matrices)))

    def add_up(self, group):
        """Replaces Y by that of all members of a `md4.gpu.collectives.Group`."""
        group.add_up((self.y,))

    def result(self):
        """Y on the host."""
        (y,) = self.on_host((self.y,))
        self.context.pool.release(self.buffer)
        return y
