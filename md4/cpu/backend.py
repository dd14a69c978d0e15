"""The CPU backend: the steps of the method with NumPy and Numba, and matrix products by BLAS.

[p|q] of a chunk is one matrix with the rows (bra primitive, p) and the columns (ket primitive, q). Step 4 is one
product for each bra pair with all ket pairs, and step 5 is one product for each ket pair with all bra pairs. In this
way small classes make large matrices, too.
"""

from copy import copy
from math import isqrt

import numba
import numpy as np

from md4.cpu import loops
from md4.cpu.h_matrices import SIGNED, UNSIGNED, h_runs
from md4.cpu.loops import LANES
from md4.cpu.sums import HostBounds, HostSums
from md4.cpu.targets import HostBlock
from md4.errors import ArgumentError, DeviceError, MemoryLimitError
from md4.method import operators
from md4.method.angular import hermite_triples, nherm
from md4.plan import Plan, cheaper_swapped
from md4.shells.shell_pairs import shell_pairs
from md4.support.display import size_text
from md4.support.locks import Lock
from md4.support.memory import HostMemory, check_out, tensor_refusal

# Approximate size (bytes) of [p|q] of one chunk: it is still in cache when BLAS reads it, and gives each step enough
# work.
PQ_BYTES = 4 << 20
# Bytes of all arrays of a primitive pair while `shell_pairs` decides which of them count.
PRIMITIVE_BYTES = 400


class CpuBackend:
    """Steps of `md4.engine` on the CPU; arrays are NumPy arrays."""

    name, stream = "cpu", None

    def __init__(self, operator, max_memory=None):
        self.operator = operator
        self.table = operators.operator_table(operator)
        self.memory, self.lock = HostMemory(max_memory), Lock()
        self.kept = {}

    @property
    def sums(self):
        """How J and K are made."""
        return HostSums(self)

    def memory_left(self):
        """Bytes that may be allocated, including those of the workspace that is kept."""
        return self.memory.left() + self.kept_bytes

    @property
    def kept_bytes(self):
        """Bytes of workspace that is kept for the next call."""
        return sum(array.nbytes for array in self.kept.values())

    def facts(self):
        """What a display of the backend shows, as (name, value)."""
        cap = "none" if self.memory.cap is None else size_text(self.memory.cap)
        made = sum(len(loop.made) for loop in loops.FACTORIES)
        return [("threads", numba.get_num_threads()), ("workspace kept", size_text(self.kept_bytes)),
                ("memory cap", cap), ("compiled loops in use", made)]  # fmt: skip

    def with_operator(self, operator):
        """The same backend with another operator; workspaces are shared."""
        other = copy(self)
        other.operator, other.table = operator, operators.operator_table(operator)
        return other

    def compile_ahead(self, basis, use, progress):
        """Does nothing: the few loops are the same for all basis sets."""

    def hermite_bytes(self, pairs):
        """Bytes of the H matrices of `pairs`."""
        return 8 * pairs.nprim * pairs.nab * pairs.nherm

    def workspace(self, name, shape):
        """An array that the next call with this `name` uses again, because new memory costs page faults."""
        size = int(np.prod(shape))
        if name not in self.kept or len(self.kept[name]) < size:
            self.kept.pop(name, None)  # frees its memory first
            self.kept[name] = self.memory.empty(size)
        return self.kept[name][:size].reshape(shape)

    def chunk_bytes(self, bra, ket):
        """Largest number of bytes of one bra pair with one ket pair: r, [p|q], (ab|q], and (ab|cd) with a copy."""
        inner = bra.max_prim * bra.nherm, ket.max_prim * ket.nherm
        r = bra.max_prim * ket.max_prim * nherm(bra.l + ket.l)
        return 8 * (r + inner[0] * inner[1] + max(bra.nab * inner[1], ket.nab * inner[0]) + 2 * bra.nab * ket.nab)

    def least_workspace(self, bra, ket):
        """Bytes of one bra pair with one ket pair, including the H matrices of all pairs."""
        return self.chunk_bytes(bra, ket) + self.hermite_bytes(bra) + self.hermite_bytes(ket)

    def chunk_pairs(self, plan, bra, ket):
        """Numbers of bra and ket pairs of a chunk, so that its [p|q] stays in cache.

        The two numbers are about equal, but there are at least a few LANES of ket pairs.
        """
        room = min(PQ_BYTES, (self.memory.room() + self.kept_bytes) / 2)
        area = max(1, int(room) // self.chunk_bytes(bra, ket))
        nket = min(len(ket), max(isqrt(area), min(area, 2 * LANES)))
        nbra = max(1, min(len(bra), area // nket))
        return nbra, max(1, area // nbra)

    def result(self, shape, out=None):
        """An array for results: `out`, which is checked, or a new one."""
        return self.scratch(shape) if out is None else check_out(out, shape)

    def tensor(self, layout, out, device, least_block, host_tensor):
        """The AO tensor to fill; see `md4.backends.Backend`."""
        if device:
            raise DeviceError("device=True keeps the result on a GPU; it needs backend='cuda'.")
        need = least_block + (layout.nbytes if out is None else 0)
        if need > self.memory_left():
            raise tensor_refusal(layout.shape, need, self.memory_left())
        return host_tensor(layout, self.memory.empty(layout.shape) if out is None else out)

    def scratch(self, shape):
        """Memory for one block of integrals."""
        return self.memory.empty(shape)

    def bounds(self, count):
        """The target for the Schwarz bounds of `count` pairs."""
        return HostBounds(count)

    def fetch(self, array):
        """Raises ArgumentError: this backend accepts no device arrays."""
        raise ArgumentError("the density matrix is a device array, but the backend is 'cpu'; give a NumPy array.")

    def send(self, array):
        """The array itself."""
        return array

    def block(self, out):
        """`out` of six indices as a block (ij, kl, ab, cd)."""
        nij, nkl, na, nb, nc, nd = out.shape
        return HostBlock(out.reshape(nij, nkl, na * nb, nc * nd))

    def prepare(self, basis, pairs, cutoff):
        """`ShellPairs` of a checked list, and None, because nothing else is kept."""
        self.check_pair_memory(basis, pairs)
        made = shell_pairs(basis, pairs, cutoff=cutoff)
        self.memory.watch(made, pair_bytes(made))
        return made, None

    def check_pair_memory(self, basis, pairs):
        """MemoryLimitError for a list whose primitive pairs do not fit while it is decided which of them count."""
        primitives = int(np.multiply(*basis.nprims[pairs].T).sum())
        need, room = PRIMITIVE_BYTES * primitives + 64 * len(pairs), self.memory.room()
        if need > room:
            raise MemoryLimitError(
                f"{primitives} primitive pairs of {len(pairs)} shell pairs take {need / 1e6:.1f} MB to be sorted out, "
                f"but {room / 1e6:.1f} MB may be used; raise max_memory or give shorter pair lists."
            )

    def plan(self, bra, ket):
        """The side whose order needs fewer operations goes first. There is one path for all classes."""
        return Plan(PRODUCTS, cheaper_swapped(bra, ket), UNSIGNED, SIGNED)

    def hermite(self, prepared, form):
        """Step 1: the H matrices of a whole list, in a `FlatH` form."""
        pairs, prims = prepared.pairs, prepared.pairs.primitives
        h = self.memory.empty(pairs.nprim * pairs.nab * pairs.nherm)
        owner = np.repeat(np.arange(pairs.npair), np.diff(pairs.start))
        loops.h_matrices()(
            pairs.start, owner, pairs.la, pairs.lb, prims.exponent, prims.pa, prims.pb, prims.coef_a, prims.coef_b,
            *(loops.angular_tables(l, pairs.pure) for l in (pairs.la, pairs.lb)), hermite_triples(pairs.l),
            form.sign, h,
        )  # fmt: skip
        return h

    def r(self, ab, cd):
        """Steps 2 and 3: r[i, k, t], shape (bra primitives, ket primitives, nherm(L))."""
        bra, ket = ab.pairs, cd.pairs
        l = bra.l + ket.l
        r = self.workspace("r", (bra.nprim, ket.nprim, nherm(l)))
        loops.r_integrals(self.operator.kind)(
            l, bra.primitives.exponent, bra.primitives.centre, ket.primitives.exponent, ket.primitives.centre,
            self.operator.parameter, self.table, loops.lane_table(l), r,
        )  # fmt: skip
        return r


class Products:
    """The path of all classes on the CPU: steps 4 and 5 as matrix products over whole chunks."""

    name, merges_steps = "products", False

    def transform_bra(self, steps, H_ab, ab, cd, r):
        """Step 4: (ab|q], shape (bra pairs, nab, ket primitives * N_q)."""
        bra, ket = ab.pairs, cd.pairs
        pq = steps.workspace("pq", (bra.nprim * bra.nherm, ket.nprim * ket.nherm))
        loops.assemble()(r, loops.gather_index(bra.l, ket.l), pq)
        abq = steps.workspace("abq", (bra.npair, bra.nab, pq.shape[1]))
        for run, rows, h in h_runs(H_ab, ab):
            np.matmul(h, pq[rows].reshape(len(h), h.shape[2], pq.shape[1]), out=abq[run])
        return abq

    def transform_ket(self, steps, abq, H_cd, ab, cd, out):
        """Step 5: writes (ab|cd) to a `HostBlock`."""
        nbra, nab, inner = abq.shape
        rows = abq.reshape(nbra * nab, inner)
        for run, columns, h in h_runs(H_cd, cd):
            left = rows[:, columns].reshape(len(rows), len(h), h.shape[2])
            block = np.matmul(left.transpose(1, 0, 2), h.transpose(0, 2, 1))
            out.array[:, run] = block.reshape(len(h), nbra, nab, cd.pairs.nab).transpose(1, 0, 2, 3)


PRODUCTS = Products()


def pair_bytes(pairs):
    """Bytes of the arrays of a list."""
    arrays = (pairs.pairs, pairs.start, *pairs.primitives.arrays)
    return sum(array.nbytes for array in arrays)
