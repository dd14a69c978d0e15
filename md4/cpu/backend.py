"""The CPU backend: LANES shell quartets side by side in vectors, on threads of its own.

Work is a table of tasks (`md4.cpu.run`): a bra list with a ket list, or a part of them. A thread makes blocks of one
bra pair with LANES ket pairs (`md4.cpu.integrals`) until it has some for the target, an AO tensor (`md4.cpu.targets`)
or J and K (`md4.cpu.sums`), and goes on. So even small lists need few calls from Python.
"""

from copy import copy

import numpy as np

from md4.cpu import warmup
from md4.cpu.algebra import HostAlgebra
from md4.cpu.derivatives import DerivativeTensor
from md4.cpu.emit.vectors import LANES
from md4.cpu.groups import Groups, make_groups
from md4.cpu.h_matrices import BOTH, make_h, room_bytes
from md4.cpu.run import OUT, Extent, OwnList, run_lists, sizes_of_pairs, work_of
from md4.cpu.sums import HostBounds, HostSums
from md4.cpu.targets import BlockWriter, HostBlock, ListTensor
from md4.cpu.threads import number_of_threads
from md4.errors import ArgumentError, DeviceError
from md4.method.operators import kind_table
from md4.method.scatter import DerivativeLayout
from md4.plan import ListPair, Plan
from md4.shells.shell_pairs import shell_pair_lists, starts_of
from md4.support.display import size_text
from md4.support.locks import Lock
from md4.support.memory import HostMemory, check_fits, check_out, tensor_refusal

# Bytes of all arrays of a primitive pair while `shell_pair_lists` decides which of them count.
PRIMITIVE_BYTES = 400
# Bytes of a list for each of its primitive pairs, about, where all of them count.
LIST_BYTES = 210
# Primitive pairs of lists that are made together: few enough that their arrays stay in the cache.
TOGETHER = 1 << 13
# Most bytes that fit the machine without asking, which takes 0.1 ms.
UNASKED = 1 << 20
# Share of the memory up to the cap that the threads may have beyond what one thread must have.
WORKSPACE_SHARE = 0.2


class CpuBackend:
    """Steps of `md4.engine` on the CPU; arrays are NumPy arrays."""

    name, stream, forms, dry = "cpu", None, 1, False

    def __init__(self, operator, max_memory=None):
        self.operator = operator
        self.table = kind_table(operator.kind)
        self.memory, self.lock = HostMemory(max_memory), Lock()

    @property
    def sums(self):
        """How J and K are made."""
        return HostSums(self)

    def memory_left(self):
        """Bytes that may be allocated, including those of the workspaces that are kept."""
        return self.memory.left() + self.memory.kept_bytes

    def check_fits(self, need, what, remedy="raise max_memory"):
        """`check_fits` of what is held and `need` bytes more: a cap of the number that a message names is enough."""
        if need <= min(UNASKED, self.memory.room()):
            return
        held = 0 if self.memory.cap is None else self.memory.held - self.memory.kept_bytes
        check_fits(held + need, held + self.memory_left(), what, remedy)

    def division_facts(self):
        """What decides how work is divided: the lanes, on which groups of pairs depend."""
        return f"cpu ({LANES} lanes)"

    def algebra(self):
        """Products and factorisations of matrices by NumPy and SciPy."""
        return HostAlgebra(self)

    def rehearse_rows(self, nao, count):
        """There are none."""

    def rehearse_pack(self):
        """There is none."""

    def mark(self):
        """A function that waits for nothing: all work is done when a call returns."""
        return lambda: None

    def place(self):
        """None: the sums of processes are added up by MPI."""
        return None

    def facts(self):
        """What a display of the backend shows, as (name, value)."""
        cap = "none" if self.memory.cap is None else size_text(self.memory.cap)
        return [("threads", number_of_threads()), ("quartets side by side", LANES),
                ("workspace kept", size_text(self.memory.kept_bytes)), ("memory cap", cap)]  # fmt: skip

    def with_operator(self, operator):
        """The same backend with another operator; workspaces are shared."""
        other = copy(self)
        other.operator, other.table = operator, kind_table(operator.kind)
        return other

    def compile_ahead(self, use, basis, work, progress=None, part=None):
        """Compiles the loops for some use, which are the same for all basis sets; see `md4.cpu.warmup`."""
        warmup.compile_ahead(warmup.names_for(use, self.operator.kind), progress)

    def hermite_bytes(self, pairs):
        """Bytes of the H matrices of `pairs`, by primitive pair and in lanes."""
        this = Extent.of(pairs)
        return 8 * this.elements * (this.nprim + LANES * this.vectors)

    def workspaces(self, threads, sizes):
        """Memory for up to `threads` threads, fewer if there is not enough; see `md4.cpu.run.Workspace`.

        `sizes` is a function of the number of doubles that a thread should have for blocks. What is kept from the last
        call is used again, because new memory costs page faults.
        """
        memory, kept = self.memory, self.memory.kept
        wanted, share = sizes(OUT), WORKSPACE_SHARE * (memory.room() + memory.kept_bytes)
        threads = int(min(threads, share // wanted.nbytes))
        if threads < 1:
            wanted, threads = sizes(0), 1
        if len(kept) < threads or not all(work.holds(wanted) for work in kept):
            kept.clear()
            kept += [wanted.allocated(memory) for _ in range(threads)]
        return kept[:threads]

    def held_bytes(self, nbytes):
        """Bytes that an array of so many bytes takes."""
        return nbytes

    def least_workspace(self, bra, ket):
        """Bytes of one bra pair with one ket pair, including the H matrices of all pairs and what makes these."""
        orders = [(bra, ket)] if bra is ket else [(bra, ket), (ket, bra)]
        work = max(*(sizes_of_pairs(*two).nbytes for two in orders), *map(room_bytes, (bra, ket)))
        return work + self.hermite_bytes(bra) + self.hermite_bytes(ket)

    def with_lists(self, least, basis, lists):
        """A least workspace, or what sorts out the primitive pairs of the longest list, beside all lists."""
        counts = [int(basis.nprims[pairs].prod(axis=1).sum()) for pairs in lists]
        sorting = max((PRIMITIVE_BYTES * n + 64 * len(pairs) for n, pairs in zip(counts, lists)), default=0)
        return max(least, sorting) + LIST_BYTES * sum(counts)

    def chunk_pairs(self, plan, bra, ket):
        """Whole lists: the path takes no memory that grows with them."""
        return len(bra), len(ket)

    def fill_matrix(self, engine, out, pairs, columns, rows):
        """Makes the blocks of many `ListPair` as parts of a matrix; see `md4.backends.Backend`."""
        places = {}

        def side(first, step):  # a list on both sides has two places
            made = {}
            for prepared, place in first.items():
                h = prepared.h(BOTH) if prepared is prepared.whole else None
                made[prepared] = this = own_list(self, prepared, h)
                places[this] = place * step, this.pairs.nab * step, step
            return made

        of_columns = side({pair.bra: columns[pair.bra] for pair in pairs}, 1)
        of_rows = side({pair.ket: rows[pair.ket] for pair in pairs}, out.shape[1])
        lists = [ListPair(of_columns[pair.bra], of_rows[pair.ket], same=False) for pair in pairs]
        run_lists(self, lists, BlockWriter(out), places=places)

    def result(self, shape, out=None):
        """An array for results: `out`, which is checked, or a new one."""
        return self.scratch(shape) if out is None else check_out(out, shape)

    def block_bytes(self):
        """More than any tensor has: lists are taken as a whole."""
        return 1 << 60

    def tensor(self, engine, layout, out, device, least_block, host_tensor, progress=None):
        """The AO tensor to fill; see `md4.backends.Backend`."""
        if device:
            raise DeviceError("device=True keeps the result on a GPU; it needs backend='cuda'.")
        if out is None:
            out = self.host_array(layout, least_block)
        else:
            self.check_fits(least_block, f"the least workspace for the AO tensor of shape {layout.shape} takes")
        derived = isinstance(layout, DerivativeLayout)
        name = "derivatives" if derived else warmup.scatter_name(layout.aosym)
        warmup.compile_ahead([*warmup.names_for("tensor", self.operator.kind), name], progress)
        return DerivativeTensor(engine, layout, out) if derived else ListTensor(engine, layout, out)

    def host_array(self, layout, least_block):
        """An array for a tensor, which counts against the cap."""
        need = least_block + layout.nbytes
        if need > self.memory_left():
            raise tensor_refusal(layout, need, self.memory_left())
        return self.memory.empty(layout.shape)

    def watch(self, array):
        """Counts an array against the cap."""
        return self.memory.watch(array)

    def scratch(self, shape):
        """Memory for one block of integrals."""
        return self.memory.empty(shape)

    def bounds(self, engine, count, room):
        """The target for the Schwarz bounds of `count` pairs."""
        return HostBounds(self, count)

    def fetch(self, array):
        """Raises ArgumentError: this backend accepts no device arrays."""
        raise ArgumentError("the density matrix is a device array, but the backend is 'cpu'; give a NumPy array.")

    def send(self, array):
        """The array itself."""
        return array

    def block(self, out):
        """`out` of six indices as a block (ij, kl, ab, cd)."""
        if isinstance(out, HostBlock):
            return out
        nij, nkl, na, nb, nc, nd = out.shape
        return HostBlock(out.reshape(nij, nkl, na * nb, nc * nd))

    def matrix_block(self, out, row, column, shape):
        """A part of a matrix as a block; see `md4.backends.Backend`."""
        nij, nkl, na, nb, nc, nd = shape
        nab, ncd = na * nb, nc * nd
        part = out[row : row + nkl * ncd, column : column + nij * nab]
        return HostBlock(part.reshape(nkl, ncd, nij, nab).transpose(2, 0, 3, 1))

    def prepare(self, basis, lists, cutoff):
        """Yields (`ShellPairs`, `Groups`) of checked lists; short ones are made together."""
        warmup.compile_ahead(warmup.names_for("lists", self.operator.kind))
        for some in self.together(basis, lists):
            made = shell_pair_lists(basis, some, cutoff)
            for pairs in made:
                self.memory.watch(pairs)
            for pairs, groups in zip(made, make_groups(made)):
                yield pairs, self.memory.watch(groups)

    def together(self, basis, lists):
        """Yields the lists, several at once, as long as they have at most TOGETHER primitive pairs.

        MemoryLimitError for a list whose primitive pairs do not fit while it is decided which of them count.
        """
        if not lists:
            return
        pairs, first = np.concatenate(lists), starts_of([len(this) for this in lists])
        counts = np.add.reduceat(basis.nprims[pairs[:, 0]] * basis.nprims[pairs[:, 1]], first[:-1])
        some, total = [], 0
        for this, primitives in zip(lists, counts.tolist()):
            self.check_fits(
                PRIMITIVE_BYTES * primitives + 64 * len(this), f"{primitives} primitive pairs of {len(this)} shell "
                "pairs that are sorted out, and what is there already, take", "raise max_memory, or make less at once",
            )  # fmt: skip
            room = self.memory.room() + self.memory.kept_bytes
            if some and (total + primitives > TOGETHER or PRIMITIVE_BYTES * (total + primitives) > room):
                yield some
                some, total = [], 0
            some.append(this)
            total += primitives
        if some:
            yield some

    def plan(self, bra, ket, block=None):
        """The side that makes less work as a bra is the bra. There is one path for all classes."""
        one, two = Extent.of(bra.pairs), Extent.of(ket.pairs)
        return Plan(LANES_OF_QUARTETS, work_of(two, one) < work_of(one, two), BOTH, BOTH)

    def hermite(self, prepared, form):
        """Step 1: `HMatrices` of a whole list."""
        return make_h(prepared.pairs, prepared.data, self.memory)


class LanesOfQuartets:
    """The path of all classes on the CPU: steps 2 to 5 for LANES ket pairs at a time."""

    name, merges_steps = "lanes", True

    def run(self, steps, H_ab, H_cd, ab, cd, out):
        """Steps 2 to 5 into a `HostBlock`."""
        bra, ket = (own_list(steps, side, h) for side, h in ((ab, H_ab), (cd, H_cd)))
        ij, kl, of_ab, of_cd = (stride // 8 for stride in out.array.strides)
        places = {bra: (0, ij, of_ab), ket: (0, kl, of_cd)}
        run_lists(steps, [ListPair(bra, ket, same=False)], BlockWriter(out.array), places=places)


def own_list(steps, side, h):
    """A prepared list with its H matrices, or a slice of one, which has groups and matrices of its own."""
    if side is side.whole:
        return OwnList(side.pairs, side.data, h)
    groups = Groups.of(side.pairs)
    return OwnList(side.pairs, groups, make_h(side.pairs, groups, steps.memory))


LANES_OF_QUARTETS = LanesOfQuartets()
