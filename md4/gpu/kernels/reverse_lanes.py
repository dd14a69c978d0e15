"""Steps 1 and 2 of gradients where these take least: a lane takes a function ab of a primitive quartet, without H.

    W[ab, q] = sum_cd Gamma[ab, cd] H[cd, q]          Z[ab, p] += sum_q W[ab, q] [p|q]

W needs no H in memory: sum_cd Gamma[ab, cd] c d is one polynomial about P times a Gaussian, and is W by the powers of
1/2p that a monomial has in Hermite Gaussians (`md4.gpu.emit.polynomials`). All of the ket that this takes is p, P - C,
P - D and coefficients.

A block of threads takes some ab of a primitive bra pair, and goes through the primitive ket pairs that count with it
(`md4.gpu.kernels.select_kets`). Some of its warps make r of 32 quartets each, a lane a quartet, in shared memory. Then
all warps go through these: the lanes of a warp are several rows ab of several quartets, so that lanes of one quartet
read the same r, and each has its own W and Z in registers. Gamma comes from memory, quartets side by side
(`md4.gpu.kernels.gamma_blocks`). At the end the sums over quartets are added to Z in memory. The code depends on the
degree of p and the shells of the ket only: how many ab there are, and how they are divided, is known at a launch.

H has the sign (-1)^|q|, and R = P - Q. So Z lacks no sign here, and gets the one that it has in the other kernels,
(-1)^|p|, when it is added to memory.
"""

from functools import cache
from itertools import product
from math import inf
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, cuda, i32, i64, jit_device, types, u32, u64
from md4.gpu.emit.instructions import address_of, make_empty, shared_address
from md4.gpu.emit.polynomials import make_add_lanes, make_add_to_z, make_lane_products
from md4.gpu.emit.scalars import load_shared, load_shared_int, quotient, store_shared_int
from md4.gpu.emit.unrolled import make_r_by_axis, store_shared
from md4.gpu.kernels.gamma_blocks import tile_place
from md4.gpu.kernels.groups import Records
from md4.gpu.kernels.primitive_quartets import (
    Charge,
    OperatorArguments,
    charge,
    make_zeros_upto,
    operator_arguments,
    separate,
)
from md4.gpu.kernels.reverse_fused import KetPrimitives, quartets_of
from md4.gpu.kernels.reverse_sums import ReverseSums
from md4.gpu.pair_layout import FROM_A, FROM_B, RECORD
from md4.gpu.staircases import hermite_order
from md4.gpu.tuning import REVERSE, SHARED_BYTES
from md4.method.angular import component_coefficients, hermite_triples, nherm


class Rows(NamedTuple):
    """How the functions ab of a bra pair are divided.

    Attributes
    ----------
    count : int64
        All of them.
    quartet_bits : int64
        A warp has the same ab of 2^`quartet_bits` quartets at a time.
    blocks : int64
        Blocks of threads that share them.
    sets : int64
        Warps of a block that make r.
    """

    count: i64
    quartet_bits: i64
    blocks: i64
    sets: i64


def functions_of(l, lowest):
    """The powers of the Hermite functions p up to degree l, from the ordinal `lowest` on, in the order of Z."""
    order = hermite_order(l, lowest)
    return tuple(tuple(powers) for powers in hermite_triples(l)[order[order >= 0]].tolist())


def stride_of(l):
    """Doubles of r of a lane in shared memory, an odd number, for r up to degree l."""
    return nherm(l) | 1


def set_bytes(l):
    """Bytes of shared memory of 32 quartets: of each r, two integers and a double."""
    return 256 * (stride_of(l) + 2)


def reverse_lanes(lc, ld, pure, single, l, lowest, kind):
    """Kernel factory: the ket's shells, and the p up to degree l that begin with the ordinal `lowest`.

    How many functions ab there are, and contracted functions of the ket's shells, are run-time numbers.
    """
    functions, highest = functions_of(l, lowest), l + lc + ld
    nc, nd = (component_coefficients(of_shell, pure).shape[1] for of_shell in (lc, ld))
    count, stride, of_set = len(functions), stride_of(highest), set_bytes(highest)
    products, empty = make_lane_products(lc, ld, pure, single, functions), make_empty(count)
    add_lanes, add_to_z = make_add_lanes(count), make_add_to_z(functions)
    zeros_upto, make_r = make_zeros_upto(kind, highest), make_r_by_axis(highest, False)
    charge_at, separation_of = jit_device(charge), jit_device(separate)
    quartets, in_tile = jit_device(quartets_of), jit_device(tile_place)
    to_c, to_d, coefficients = FROM_A, FROM_B, RECORD

    def kernel(
        records: Records, first_prim: i64, kets: KetPrimitives, of_kets: Records, nctr_c: i64, nctr_d: i64, gamma: F64,
        dead: i64, operator: OperatorArguments, rows: Rows, z: ReverseSums, parts: i64, each: i64,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.float64)
        tid, place = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane, warp, rest = tid & 31, tid >> 5, quotient(place, rows.blocks)
        own = quotient(rest, parts)
        row_block, part, prim = place - rest * rows.blocks, rest - own * parts, first_prim + own
        n, behind = quartets(kets, own, part, each)
        if n >= behind:
            return
        together = i64(1) << rows.quartet_bits
        of_round = lane & (together - 1)
        first_row = (row_block * (i64(cuda.blockDim.x) >> 5) + warp) << (5 - rows.quartet_bits)
        row = first_row + (lane >> rows.quartet_bits)
        bra, base = charge_at(records.numbers, prim * records.width), i32(shared_address(shared))
        sums, pairs, width = empty(), of_kets.numbers, u64(of_kets.width)
        d_step, of_quartet = 256 * rows.count, nctr_c * nctr_d * (nc * nd) * rows.count
        c_step, of_row, own_set = nctr_d * nd * d_step, 256 * min(row, rows.count - 1), i32(base + of_set * warp)
        while n < behind:
            if warp < rows.sets:
                number = u64(min(n + tid, behind - 1))
                ket, shells = u64(u32(kets.numbers[number])), i64(kets.shells[number])
                at, numbers_at = ket * width, i32(own_set + 256 * stride + 16 * lane)
                s = separation_of(bra, Charge(pairs[at], pairs[at + u64(1)], pairs[at + u64(2)], pairs[at + u64(3)]))
                make_r(zeros_upto(s, operator), s.rz, s.ry, s.rx, i32(own_set + 8 * stride * lane))
                store_shared_int(numbers_at, i32(ket))
                store_shared_int(i32(numbers_at + 4), i32(shells if n + tid < behind else dead))
                store_shared(i32(numbers_at + 8), 0.5 / pairs[at])
            cuda.syncthreads()
            done, end = i64(0), min(behind - n, 32 * rows.sets)
            # one loop over quartets and their pairs of contracted functions
            c, d, of_cd, at, half, r = i32(0), i32(0), i64(0), u64(0), 0.0, i32(0)
            while done < end:
                if c == 0 and d == 0:
                    in_set = (done + of_round) & 31
                    here = i32(base + of_set * ((done + of_round) >> 5))
                    r, numbers_at = i32(here + 8 * stride * in_set), i32(here + 256 * stride + 16 * in_set)
                    at = u64(u32(load_shared_int(numbers_at))) * width
                    shells, half = i64(load_shared_int(i32(numbers_at + 4))), load_shared(i32(numbers_at + 8))
                    of_cd = address_of(gamma, in_tile(shells, of_quartet)) + of_row
                of_c, of_d, of_ket = at + u64(coefficients), at + u64(coefficients + nctr_c), address_of(pairs, at)
                coefficient = pairs[of_c + u64(c)] * pairs[of_d + u64(d)]
                sums = products(
                    sums, of_cd, c_step, d_step, of_ket + 8 * to_c, of_ket + 8 * to_d, half, coefficient, r
                )  # fmt: skip
                d, of_cd = i32(d + 1), of_cd + nd * d_step
                if d == nctr_d:
                    c, d, of_cd = i32(c + 1), i32(0), of_cd + (nc - 1) * c_step
                    if c == nctr_c:
                        c, done = i32(0), done + together
            cuda.syncthreads()
            n += 32 * rows.sets
        mask = i32(together >> 1)
        while mask > 0:
            sums, mask = add_lanes(sums, mask), i32(mask >> 1)
        if of_round == 0 and row < rows.count:
            target = (part * z.nprim + prim - z.first_prim) * (((count + 7) >> 3) * z.rows) + row
            add_to_z(sums, z.numbers, 8 * target, 8 * z.rows)

    return Kernel(kernel, registers=REVERSE.registers_for(register_needs(count, nherm(lc + ld))))


# launcher


class LanePlan(NamedTuple):
    """Bits of the quartets of a warp, warps of a block, those that make r, blocks that share the rows; predicted time.
    """

    quartet_bits: int
    warps: int
    sets: int
    blocks: int
    cycles: float = 0.0


def register_needs(np, nq):
    """Registers of a thread, about: those of Z and W, not all of which are there at once, and others."""
    of_each, others = REVERSE.lane_registers
    return of_each * (np + nq) + others


@cache
def lane_plan(bra, ket, hermite, room):
    """`LanePlan` for `ListFacts` of the bra, the ket, and the Hermite functions of the bra; None for larger classes.

    Of those of up to five warps that take at most `room` bytes of shared memory, the one that is predicted to take
    least. Any device has room for one of them.
    """
    np, nq = hermite.nherm, nherm(ket.l)
    if np > REVERSE.lane_functions or np + nq > REVERSE.lane_numbers:
        return None
    l, most = hermite.l + ket.l, min(2, room // set_bytes(hermite.l + ket.l))
    plans = (
        LanePlan(bits, warps, sets, -(-bra.nab // (warps << (5 - bits))))
        for bits, warps, sets in product((5, 4, 3, 2), range(1, 6), range(1, most + 1)) if sets <= warps
    )  # fmt: skip
    found = (plan._replace(cycles=cycles(plan, np, nq, ket.nab, l)) for plan in plans)
    return min(found, key=lambda plan: plan.cycles)


def cycles(plan, np, nq, ncd, l):
    """About what 32 quartets take, in cycles of a multiprocessor, which has fewer warps than hide latency or not.

    The numbers were fitted to the times of 45 plans for each class of vitamin C in def2-TZVPP on an H200, of which it
    chooses such as take 5% longer than the fastest ones, on average (bench/LAB_NOTES.md).
    """
    bits, warps, sets, blocks, _ = plan
    together = min(REVERSE.resident_warps(register_needs(np, nq)) // warps, 2 * SHARED_BYTES // (sets * set_bytes(l)))
    if together == 0:
        return inf
    # products, W, and r, of which lanes of many quartets read two lines at once
    of_row = 0.5 * (np * nq + 5 * nq + ncd) + 0.5 * nherm(l) * (2 if bits == 5 else 1) + 10
    of_r = 2 * (nherm(l) + 100) * (1 + (warps / sets - 1) / together)
    return blocks * (of_row * (warps << (5 - bits)) + of_r) * max(1.0, 12 / (together * warps)) ** 0.5


def launch_reverse_lanes(context, operator, plan, ab, cd, gamma, shells, hermite, kets, z, parts, each):
    """Adds what the listed primitive quartets give the bra pairs `ab` to Z.

    Parameters
    ----------
    operator : md4.method.operators.Operator
    plan : LanePlan
    gamma : Buffer
        Of the shell quartets, side by side in tiles.
    shells : int
        How many shell quartets there are.
    ab, cd, hermite, kets, z, parts, each
        As for `md4.gpu.kernels.reverse_fused.launch_reverse_fused`.
    """
    ket, l = cd.facts, hermite.l
    of_ket = ket.la, ket.lb, ket.pure, ket.structure[-1]
    context.launch(
        Variant(reverse_lanes, (*of_ket, l, hermite.first, operator.kind)), plan.blocks * parts * ab.nprim,
        32 * plan.warps, plan.sets * set_bytes(l + ket.l), (ab.data.records, ab.data.width), ab.first_prim, kets,
        (cd.data.records, cd.data.width), ket.nctr_a, ket.nctr_b, gamma, shells,
        operator_arguments(context, operator.kind, operator.parameter),
        (ab.facts.nab, plan.quartet_bits, plan.blocks, plan.sets), z, parts, each,
    )  # fmt: skip
