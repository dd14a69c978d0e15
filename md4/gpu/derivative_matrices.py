"""J and K with a derivative on the first function, for any densities, on the GPU; equations as for the CPU's.

    J^x_ij = sum_kl (d/dA_x i j|kl) D_lk          K^x_il = sum_jk (d/dA_x i j|kl) D_jk

**J** is made in the Hermite basis as J alone is (`md4.gpu.hermite_coulomb`): J^x_ij = sum_p H^{A_x}[ij, p] J_p.

**K** needs no integrals of derivatives either. U[kl, p] = (p|kl) of a bra pair ij with all ket pairs are those of
gradients (`md4.gpu.forces`), of one degree more than ij has, and with them (`md4.gpu.kernels.half_exchange`,
`exchange_derivatives`)

    W[p, j, l] = sum_k U[kl, p] D_jk          K^x_il = sum_{p,j} H^{A_x}[ij, p] W[p, j, l]

and likewise with i and j exchanged, from the same U. W of a bra pair is complete when all kets have been there. So H of
derivatives is multiplied once a pair, not once a quartet, and all sums have a fixed order.
"""

from itertools import combinations_with_replacement, product
from math import prod
from typing import NamedTuple

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.h_layout import KET_STEPS
from md4.gpu.hermite_coulomb import DeviceCoulomb, first_aos, matrices_of
from md4.gpu.kernels import half_exchange
from md4.gpu.kernels.exchange_derivatives import launch_exchange_derivatives
from md4.gpu.kernels.half_exchange import launch_half_exchange, members_of, shares
from md4.gpu.kernels.two_products import BEHIND, bra_form
from md4.gpu.reverse_ways import chunks, hermite_of, rectangle_bytes
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import CHUNK_BYTES
from md4.method.derivatives import OF_A, OF_B
from md4.plan import even_pieces, own_ranges
from md4.shells.schwarz import block_norms, exchange_norms
from md4.shells.shell_pairs import ordered_pairs

# Primitive pairs of the bra for which U of all ket pairs is made where it can: W is read and written for each chunk.
FEW_PRIMS = 32
# Share of the memory that may be used, of W and of H of derivatives of some bra pairs.
W_SHARE = 0.3


def limits_of_kets(tolerance, bounds, norms):
    """Bounds of ket pairs from which they count with bra pairs of such bounds, for such norms of the density."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # all of them without a tolerance, as in dry runs, and where a bound is not known
        return np.nan_to_num(tolerance / (bounds * norms), nan=0.0, posinf=np.inf)


class Kets(NamedTuple):
    """What is known of a ket list.

    Attributes
    ----------
    highest : ndarray, shape (npair,)
        The largest bound from each pair to the end of the list, the last one first.
    of_j : ndarray, shape (nshell,)
        The largest norm of D of each shell j with the shells of the list.
    members : tuple of Buffer
        Fields of `md4.gpu.kernels.half_exchange.Members`.
    """

    highest: np.ndarray
    of_j: np.ndarray
    members: tuple

    @classmethod
    def of(cls, this, norms, members):
        """Of a `md4.contract.screening.PairList`, by norms of the blocks of D."""
        highest = np.maximum.accumulate(this.exact[::-1])
        return cls(highest, exchange_norms(norms, this.pairs.pairs), members)


class DeviceDerivatives:
    """J and K of derivatives; see `md4.cpu.derivative_matrices.HostDerivatives`.

    Parameters
    ----------
    engine : md4.Engine
        With the operator.
    forces : md4.gpu.forces.DeviceForces
        Of the lists of pairs.
    cutoff : float
        Primitive pairs below it are left out, as those of the lists.
    """

    def __init__(self, engine, forces, cutoff):
        self.engine, self.backend, self.basis, self.forces = engine, engine.backend, engine.bra_basis, forces
        self.cutoff, self.lists = cutoff, [this.prepared for this in forces.lists]

    def run(self, densities, with_j, with_k, tolerance, part=0, parts=1, report=None):
        """As `md4.cpu.derivative_matrices.HostDerivatives.run`; what takes long is K."""
        self.check_memory(densities, with_j, with_k)
        given, nothing = (densities, tolerance, part, parts), np.zeros((len(densities), 3, *densities.shape[1:]))
        vj = self.coulomb(*given) if with_j else nothing
        if with_k:
            return vj, self.exchange(*given, report)
        if report is not None:
            report(sum(ordered_pairs(this.pairs) for this in self.lists) / parts)
        return vj, nothing

    def coulomb(self, densities, tolerance, part, parts):
        """J^x_ij = sum_p H^{A_x}[ij, p] J_p, with the J_p of J alone."""
        twice = densities + densities.swapaxes(1, 2)
        norms = block_norms(self.basis, twice / 2).max(axis=0)
        own, largest = (np.concatenate([getattr(of, name) for of in self.forces.bounds]) for name in ("own", "largest"))
        rule = self.forces.product_rule(tolerance, largest, own * norms[tuple(self.forces.shells.T)], norms)
        context, sent = self.backend.context, self.backend.context.pool.get(twice.size)
        context.copy_in(sent.pointer, np.ascontiguousarray(twice))
        target = DeviceCoulomb(self.backend, self.basis, matrices_of(sent, len(twice)), rule, self.lists, more=1)
        target.load(self.forces.with_room_for_h(self.backend, self.lists))
        for l_ket, l_bra in combinations_with_replacement(sorted(target.degrees), 2):
            target.add(l_bra, l_ket, part, parts)
        found = target.collect_derivatives(self.lists)
        context.pool.release(sent)
        return found

    def exchange(self, densities, tolerance, part, parts, report):
        """K by W of a piece of the pairs after the other."""
        context, norms = self.backend.context, block_norms(self.basis, densities).max(axis=0)
        every = [array for ket in self.lists for array in members_of(self.basis, ket.pairs.pairs)]
        buffer, members = context.pool.upload(every, context.stream)
        found = np.empty((len(densities), 3, *densities.shape[1:]))
        numbers, sums = context.pool.get(densities.size), context.pool.get(found.size)
        context.copy_in(numbers.pointer, np.ascontiguousarray(densities))
        given = matrices_of(numbers, len(densities))
        context.clear(sums)
        kets = [Kets.of(ket, norms, members[4 * n : 4 * n + 4]) for n, ket in enumerate(self.forces.lists)]
        done, wait = 0, None
        for bra, bounds in self.bras(part, parts, len(densities)):
            self.add(bra, bounds, kets, given, tolerance, sums)
            if report is not None:  # what the device has done of the pieces before
                if wait is not None:
                    wait()
                    report(done)
                done, wait = ordered_pairs(bra.pairs), self.backend.mark()
        context.copy_out(found, sums.pointer)
        for this in (buffer, numbers, sums):
            context.pool.release(this)
        if wait is not None:
            report(done)
        return found

    def bras(self, part, parts, count):
        """Pairs of a part for so many densities, in pieces whose W fits the memory, with the bounds of each pair.

        The pairs of a piece have as many primitive pairs, but for those that are left out.
        """
        for number, (this, of_pairs) in enumerate(zip(self.forces.lists, self.forces.bounds)):
            shells = this.pairs.pairs
            every, ranges = np.arange(len(shells)), own_ranges(len(shells), (part + number) % parts, parts)
            own = np.concatenate([every[:0], *(every[these] for these in ranges)])
            prims, room = self.basis.nprims[shells[own]].prod(axis=1), self.room_for_w()
            for some in np.unique(prims).tolist():
                alike = own[prims == some]
                most = max(1, room // (some * self.prim_bytes(this.prepared, count)))
                where = [alike[piece] for piece in even_pieces(len(alike), most)]
                made = self.engine.prepare_lists([shells[piece] for piece in where], self.basis, self.cutoff)
                for piece, bra in zip(where, made):
                    if bra.nprim:
                        yield bra, of_pairs.largest[piece]

    def room_for_w(self):
        """Bytes that W of a piece may take: a share of what is left beside H of the largest list."""
        left = self.backend.memory_left() + sum(this.h_bytes for this in self.lists)
        return int(W_SHARE * max(0, left - max(self.h_bytes(this) for this in self.lists)))

    def h_bytes(self, this):
        """Bytes of H of a ket list, rounded up as buffers are."""
        return self.backend.hermite_bytes(this.pairs) * 9 // 8

    def prim_bytes(self, this, count):
        """Bytes of W and of H of both derivatives of a primitive pair of a list, for so many densities."""
        facts, columns = this.facts, 64 * blocks_of_8(hermite_of(this.facts).nherm)
        return columns * (count * (facts.na + facts.nb) * self.basis.nao + 2 * 8 * blocks_of_8(3 * facts.nab))

    def add(self, bra, bounds, kets, densities, tolerance, sums):
        """Adds the derivatives of a list of pairs to K."""
        backend, context, pairs, nao = self.backend, self.backend.context, bra.pairs.pairs, self.basis.nao
        width, functions = 8 * blocks_of_8(hermite_of(bra.facts).nherm), bra.facts.na + bra.facts.nb
        size = bra.nprim * width * functions * nao
        if 9 * size * len(densities) > backend.memory_left():
            self.forces.drop()
        room = context.pool.get(size * len(densities))
        context.clear(room)
        of_w = [(room.part(n * size, (size,)), width, functions, nao) for n in range(len(densities))]
        given = [self.basis.ao_loc[pairs], *members_of(self.basis, pairs)]
        buffer, (aos, *members) = context.pool.upload(given, context.stream)
        for ket, of_ket in zip(self.forces.with_room_for_h(backend, self.lists), kets):
            limits = limits_of_kets(tolerance, bounds, of_ket.of_j[pairs].max(axis=1))
            counts = (len(ket) - np.searchsorted(of_ket.highest, limits)).astype(np.int32)
            of_bra, both = self.forces.sent(context, counts), (aos, first_aos(context, ket, self.basis))
            ket.h(bra_form(context.unit, ket.facts))  # before what is left is divided
            for ab, cd in chunks(bra, ket, hermite_of(bra.facts), counts, context.pool.share(CHUNK_BYTES), FEW_PRIMS):
                self.add_chunk(both, ab, cd, of_ket.members, of_bra, densities, of_w)
        for derivatives, by_b in ((OF_A, False), (OF_B, True)):
            derived = bra.derived(derivatives)
            for n, w in enumerate(of_w):
                k = sums.part(n * 3 * nao**2, (3 * nao**2,))
                launch_exchange_derivatives(context, bra, members, derived.h(KET_STEPS).array, by_b, w, k)
            derived.drop()
        for this in (room, buffer):
            context.pool.release(this)

    def add_chunk(self, aos, ab, cd, members, limits, densities, of_w):
        """Adds what the ket pairs of a chunk give its bra pairs to W, of each density."""
        hermite = hermite_of(ab.facts)
        u = self.forces.half_transformed(self.backend, ab, cd, hermite, limits)
        for density, w in zip(densities, of_w):
            launch_half_exchange(self.backend.context, aos, ab, cd, members, hermite, u, limits, density, w)

    def check_warps(self):
        """MemoryLimitError if a bra pair has more warps than can be counted."""
        facts = [this.facts for this in self.lists]
        most = self.basis.nshell * max(
            prod(shares(bra, ket, blocks_of_8(hermite_of(bra).nherm), bra.na + bra.nb)[1:])
            for bra, ket in product(facts, facts)
        )  # fmt: skip
        if most > half_exchange.MOST_WARPS:
            raise MemoryLimitError(
                f"a shell pair of {self.basis!r} may have {most} warps, but derivatives of K on a GPU take "
                f"{half_exchange.MOST_WARPS}; use backend='cpu'."
            )

    def check_memory(self, densities, with_j, with_k):
        """MemoryLimitError, before anything is allocated, if there is no room for matrices and one list or pair."""
        made, needs = "derivatives of J and K", []
        if with_j:
            h, sums = DeviceCoulomb.derived_bytes(self.backend, self.lists), self.forces.coulomb_bytes(len(densities))
            # buffers are rounded up by an eighth at most
            matrices, sums = 72 * densities.size, sums * 9 // 8
            needs.append({"densities and sums": matrices, "Hermite functions": sums, "H of one list": h})
        if with_k:
            self.check_warps()
            # of each pair two members, its first AOs and its limit
            pairs = sum(60 * len(this) + 16 * self.basis.nshell for this in self.lists)
            of_w = max(this.facts.max_prim * self.prim_bytes(this, len(densities)) for this in self.lists)
            of_u = max(rectangle_bytes(bra, ket) for bra in self.lists for ket in self.lists) + 8 * BEHIND
            needs.append({
                "densities, sums and pairs": (32 * densities.size + pairs) * 9 // 8,
                "H of one list": max(map(self.h_bytes, self.lists)), "a shell pair": of_w * 9 // 8,
                "integrals": of_u * 9 // 8,
            })  # fmt: skip
        for need in needs:
            self.forces.require(self.backend, need, made)
