"""J and K with a derivative on the first function, for any densities, on the CPU.

    J^x_ij = sum_kl (d/dA_x i j|kl) D_lk          K^x_il = sum_jk (d/dA_x i j|kl) D_jk

The blocks of integrals of derivatives of a bra pair with a group of ket pairs are made by the loops that make those of
the pairs themselves (`md4.cpu.integrals`), from H of the derivatives. From a pair ab the derivatives by A belong to the
rows of a, those by B to the rows of b.
"""

from math import prod, sqrt

import numpy as np

from md4.cpu.compile import Loop, part
from md4.cpu.digestion import gather, scatter
from md4.cpu.emit.vectors import LANES, broadcast, fma, integers, load, multiply, store, total
from md4.cpu.groups import FIELD, TASK, Groups, aligned_empty, lane_layout
from md4.cpu.h_matrices import h_bytes, make_h, pieces
from md4.cpu.run import OwnList, run_lists, sizes_of_lists
from md4.cpu.threads import number_of_threads
from md4.plan import ListPair, groups_within, own_ranges
from md4.shells.schwarz import block_norms, exchange_norms
from md4.shells.shell_pairs import ordered_pairs
from md4.support.locks import once

# Share of the memory that may be used, of H of the derivatives of a list.
H_SHARE = 0.25


@part
def digest_block(blocks, at, weight, sizes, of_b, d_cd, d_jc, d_jd, k_ic, k_id, i0, j0, with_j, with_k, vj):
    """Adds the block of one derivative to rows i of J and, in lanes, to those of K; i is of shell a, or b if `of_b`."""
    na, nb, nc, nd = sizes
    for a in range(na):
        for b in range(nb):
            i, j = (b, a) if of_b else (a, b)
            sum_j = broadcast(0.0)
            for c in range(nc):
                jc = multiply(weight, load(d_jc, (j * nc + c) * LANES))
                ic = load(k_ic, (i * nc + c) * LANES)
                for d in range(nd):
                    value = load(blocks, at)
                    at += LANES
                    if with_j:
                        sum_j = fma(value, load(d_cd, (c * nd + d) * LANES), sum_j)
                    if with_k:
                        here = (i * nd + d) * LANES
                        store(k_id, here, fma(value, jc, load(k_id, here)))
                        ic = fma(multiply(weight, value), load(d_jd, (j * nd + d) * LANES), ic)
                store(k_ic, (i * nc + c) * LANES, ic)
            if with_j:
                vj[i0 + i, j0 + j] += total(sum_j)


def digest_derivatives(items, tasks, lists, blocks, densities, with_j, with_k, lanes_of, vj, vk):
    """Adds blocks of derivatives to J and K of one thread, shapes (n, 3, nao, nao); `lanes_of` is memory for lanes."""
    size = len(lanes_of) // 7
    lanes_of[:] = 0.0
    d_cd, d_ac, d_ad, d_bc, d_bd, k_c, k_d = (
        lanes_of[:size], lanes_of[size : 2 * size], lanes_of[2 * size : 3 * size], lanes_of[3 * size : 4 * size],
        lanes_of[4 * size : 5 * size], lanes_of[5 * size : 6 * size], lanes_of[6 * size :],
    )  # fmt: skip
    weights, first_c, first_d = np.empty(LANES), np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    for item in range(len(items)):
        task = tasks[items[item, 0]]
        bra, ket = lists[task[TASK.bra]], lists[task[TASK.ket]]
        na, nb, nc, nd = bra[FIELD.na], bra[FIELD.nb], ket[FIELD.na], ket[FIELD.nb]
        order_cd, aos_ab = integers(ket[FIELD.order], 1), integers(bra[FIELD.aos], 1)
        aos_cd = integers(ket[FIELD.aos], 1)
        ab, group, width = integers(bra[FIELD.order], 1)[items[item, 1]], items[item, 2], ket[FIELD.width]
        a0, b0, per_group = aos_ab[2 * ab], aos_ab[2 * ab + 1], LANES // width
        lanes = min(per_group, ket[FIELD.npair] - group * per_group) * width
        for lane in range(LANES):
            weights[lane] = 0.0
        for lane in range(0, lanes, width):
            cd = order_cd[group * per_group + lane // width]
            first_c[lane], first_d[lane] = aos_cd[2 * cd], aos_cd[2 * cd + 1]
            # half of both permutations of a shell with itself, which are the same
            weights[lane] = 0.5 if first_c[lane] == first_d[lane] else 1.0
        weight = load(weights, 0)
        for s in range(len(densities)):
            density = densities[s]
            for lane in range(0, lanes, width):
                for c in range(nc):
                    for d in range(nd):
                        one, two = first_c[lane] + c, first_d[lane] + d
                        d_cd[(c * nd + d) * LANES + lane] = weights[lane] * (density[one, two] + density[two, one])
            gather(density, a0, na, first_c, nc, lanes, width, d_ac)
            gather(density, a0, na, first_d, nd, lanes, width, d_ad)
            gather(density, b0, nb, first_c, nc, lanes, width, d_bc)
            gather(density, b0, nb, first_d, nd, lanes, width, d_bd)
            for block in range(3 if a0 == b0 else 6):
                at = items[item, 3] + block * na * nb * nc * nd * LANES
                x, of_b = block % 3, block >= 3
                row, rows, other = (b0, nb, a0) if of_b else (a0, na, b0)
                d_jc, d_jd = (d_ac, d_ad) if of_b else (d_bc, d_bd)
                digest_block(
                    blocks, at, weight, (na, nb, nc, nd), of_b, d_cd, d_jc, d_jd, k_c, k_d, row, other, with_j, with_k,
                    vj[s, x],
                )  # fmt: skip
                scatter(k_c, row, rows, first_c, nc, lanes, width, vk[s, x])
                scatter(k_d, row, rows, first_d, nd, lanes, width, vk[s, x])
            for lane in range(lanes):  # what a group of fewer pairs would find
                for n in range(nc * nd):
                    d_cd[n * LANES + lane] = 0.0


digest = once(lambda: Loop(digest_derivatives, allocates=True))


def longest_bytes(this):
    """Bytes that `make_h` takes for the derivatives of the pair of a list with the most primitive pairs."""
    longest = int(np.argmax(np.diff(this.pairs.start)))
    pairs = this.derived[longest : longest + 1]
    return h_bytes(pairs, lane_layout(pairs))


class HostDerivatives:
    """J and K of derivatives.

    Parameters
    ----------
    backend : md4.cpu.backend.CpuBackend
        For the operator.
    basis : md4.Basis
    lists : list of md4.cpu.forces.ForceList
    """

    def __init__(self, backend, basis, lists):
        self.backend, self.basis, self.lists = backend, basis, lists

    def run(self, densities, with_j, with_k, tolerance, part=0, parts=1, report=None):
        """(J, K), each of the shape (n, 3, nao, nao), or a part of the terms of both.

        `report` is called now and then with the number of ordered pairs of AOs that have been made.
        """
        shape, memory, used = (len(densities), 3, *densities.shape[1:]), self.backend.memory, {0}
        memory.watch(self, 16 * prod(shape))  # of the result
        lanes, threads = (7 * int(np.diff(self.basis.ao_loc).max()) ** 2 * LANES,), number_of_threads()
        of_bras, of_kets = self.divided_memory(8 * threads * (lanes[0] + 2 * prod(shape)))
        sums = [(memory.empty(lanes, aligned_empty), memory.zeros(shape), memory.zeros(shape)) for _ in range(threads)]

        def add(thread, items, tasks, lists, blocks):
            used.add(thread)
            digest()(items, tasks, lists, blocks, densities, with_j, with_k, *sums[thread])

        some = [
            (this, slice(own.start + where.start, own.start + where.stop)) for number, this in enumerate(self.lists)
            for own in own_ranges(len(this.derived), (part + number) % parts, parts) if own.start < own.stop
            for where in pieces(this.derived[own], lane_layout(this.derived[own]), of_bras)
        ]  # fmt: skip
        kets = list(zip(self.lists, self.factors(densities, with_j, with_k)))
        batches = [kets[one.start : one.stop] for one in groups_within([*map(self.ket_bytes, self.lists)], of_kets)]
        for this, where in some:
            pairs = this.derived[where]
            groups = Groups.of(pairs)
            bra, bounds = OwnList(pairs, groups, make_h(pairs, groups, memory)), this.largest[where]
            for batch in batches:
                listed = [
                    ListPair(bra, ket.prepared, False, bounds * factor[pairs.pairs].max(axis=1), ket.given.exact)
                    for ket, factor in batch
                ]
                run_lists(self.backend, listed, add, self.basis.ao_loc, tolerance)
                for ket, _ in batch if len(batches) > 1 else ():
                    ket.prepared.drop()
            if report is not None:
                report(ordered_pairs(pairs))
        _, vj, vk = sums[0]
        for thread in used - {0}:
            vj += sums[thread][1]
            vk += sums[thread][2]
        return vj, vk

    def ket_bytes(self, this):
        """Bytes of the H matrices of a list."""
        return self.backend.hermite_bytes(this.pairs)

    def divided_memory(self, of_sums):
        """Bytes for H of the derivatives of some pairs, and for H of ket lists; MemoryLimitError if one does not fit.

        `of_sums`: bytes of the sums of all threads.
        """
        kept, backend = sum(this.prepared.h_bytes for this in self.lists), self.backend
        bras, pairs = zip(*((this.derived, this.pairs) for this in self.lists))
        need = of_sums + sizes_of_lists(bras, pairs).nbytes
        one, ket = (max(map(of, self.lists)) for of in (longest_bytes, self.ket_bytes))
        backend.check_fits(
            need + one + ket - kept, "J and K of derivatives with lists of shell pairs, H matrices of one list and the "
            "workspace of a thread take at least", "raise max_memory or give fewer densities at once",
        )  # fmt: skip
        left = backend.memory_left() + kept
        of_kets = max(ket, min(H_SHARE * left, (left - need) / 2))
        if sum(map(self.ket_bytes, self.lists)) > of_kets:
            for this in self.lists:
                this.prepared.drop()
        return max(one, min(H_SHARE * left, left - need - of_kets)), of_kets

    def factors(self, densities, with_j, with_k):
        """For each ket list and each shell j of a bra pair what F' R times this bounds, shape (nshell,).

        That is what a quartet adds to an element of J or K; see the page "Theory".
        """
        norms = block_norms(self.basis, densities).max(axis=0)
        for this in self.lists:
            pairs, own = this.pairs.pairs, 2 * sqrt(min(this.pairs.na, this.pairs.nb))
            of_j = own * np.maximum(norms, norms.T)[tuple(pairs.T)].max(initial=0.0) if with_j else 0.0
            yield np.maximum(of_j, exchange_norms(norms, pairs) if with_k else np.zeros(len(norms)))
