"""Steps 2 to 5 for the smallest classes: a thread a quartet, everything in registers.

Lanes of a warp share the bra pair and take ket pairs side by side: H[ab, p] of the bra is one broadcast from shared
memory, H[cd, q] is read coalesced, and the integrals of a block of threads are one contiguous piece of the result, to
which they go through shared memory. Code is straight-line, specialised for the four angular momenta.
"""

from md4 import operators
from md4.angular import nherm
from md4.device import F64, F64_2D, I64, cuda, jit_device, table_on_device, types
from md4.dispatch import Kernel, Variant, launch
from md4.hermite import structure
from md4.kernels.hermite import form_size
from md4.ptx import shared_address
from md4.straight import make_low_quartet, make_pack
from md4.tiles import LOW_COMPONENTS, LOW_QUARTETS, LOW_THREADS

i64 = types.int64


def low_integrals(la, lb, lc, ld, pure, kind):
    """Kernel factory for the class (la lb|lc ld), one contracted function a shell."""
    orders, nab, ncd = la + lb + lc + ld + 1, rows(la, lb, pure), rows(lc, ld, pure)
    count, threads = nab * ncd, LOW_THREADS
    zeros_upto, pack = operators.zeros_function(kind, jit_device), make_pack(orders)
    quartet = make_low_quartet(la, lb, lc, ld, pure)

    def kernel(
        bra, bra_width, start, first_pair, h, h_size, ket, ket_width, g_start, g_first_pair, g, g_nprim, npair_cd,
        parts, parameter, table, out, out_first, s_ij, shared_h,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.float64)
        tid = i64(cuda.threadIdx.x)
        pair, part = i64(cuda.blockIdx.x) // parts, i64(cuda.blockIdx.x) % parts
        first, last = start[first_pair + pair], start[first_pair + pair + 1]
        address = shared_address(shared)
        pair_cd = part * threads + tid
        place, zero, add = types.int32(address + shared_h + 8 * count * tid), cuda.local.array(orders, types.float64), 0
        for n in range(count):
            shared[shared_h // 8 + count * tid + n] = 0.0
        for i in range(first, last):
            cuda.syncthreads()
            for n in range(tid, h_size, threads):
                shared[n] = h[i * h_size + n]
            cuda.syncthreads()
            if pair_cd < npair_cd:
                p, x, y, z = bra[i * bra_width], bra[i * bra_width + 1], bra[i * bra_width + 2], bra[i * bra_width + 3]
                for k in range(g_start[g_first_pair + pair_cd], g_start[g_first_pair + pair_cd + 1]):
                    record = k * ket_width
                    rx, ry, rz = x - ket[record + 1], y - ket[record + 2], z - ket[record + 3]
                    r2 = rx * rx + ry * ry + rz * rz
                    zeros_upto(orders - 1, p, ket[record], r2, parameter, table, zero, 0, 1)
                    quartet(pack(zero), rx, ry, rz, address, g, i64(k), g_nprim, place, types.int32(add))
                    add = 1
        cuda.syncthreads()
        base = out_first + pair * s_ij + part * threads * count
        for n in range(tid, min(i64(threads), npair_cd - part * threads) * count, threads):
            out[base + n] = shared[shared_h // 8 + n]

    signature = (F64, i64, I64, i64, F64, i64, F64, i64, I64, i64, F64, *[i64] * 3, types.float64, F64_2D, F64)
    return Kernel(kernel, (*signature, *[i64] * 3), (threads, 1))


def rows(la, lb, pure):
    """Function pairs of a pair of uncontracted shells."""
    return structure(la, lb, pure)[-1][0] + 1


# launcher


def serves(bra, ket):
    """Whether this kernel takes a class: few enough components, one contracted function a shell, a large batch."""
    return (
        bra.nctr_a * bra.nctr_b * ket.nctr_a * ket.nctr_b == 1
        and bra.nab * ket.nab <= LOW_COMPONENTS
        and nherm(bra.l + ket.l) <= nherm(4)
        and len(bra) * len(ket) >= LOW_QUARTETS
    )


def launch_low(operator, h, g, ab, cd, block, stream):
    """(ab|cd) of whole lists into `block`, whose ket pairs are contiguous."""
    bra, ket = ab.pairs, cd.pairs
    parts = -(-len(ket) // LOW_THREADS)
    h_size = form_size(bra, "row")
    facts = (bra.la, bra.lb, ket.la, ket.lb, bra.pure, operator.kind)
    launch(
        Variant(low_integrals, facts), len(bra) * parts, LOW_THREADS, stream,
        8 * (h_size + LOW_THREADS * bra.nab * ket.nab),
        ab.data.records, ab.data.width, ab.data.start, ab.first, h, h_size, cd.data.records, cd.data.width,
        cd.data.start, cd.first, g, cd.data.nprim, len(ket), parts, operator.parameter,
        table_on_device(operators.operator_table, operator), block.array, block.first, block.strides[0], 8 * h_size,
    )  # fmt: skip
