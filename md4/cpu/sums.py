"""J and K on the CPU: sums of blocks, and Schwarz bounds; J alone is in `md4.cpu.hermite_coulomb`."""

import numpy as np

from md4.cpu.derivative_matrices import HostDerivatives
from md4.cpu.digestion import digest_blocks
from md4.cpu.emit.vectors import LANES
from md4.cpu.fitting_forces import HostFittingForces
from md4.cpu.forces import HostForces
from md4.cpu.groups import Groups, aligned_empty, lane_layout, plain_layout
from md4.cpu.h_matrices import h_bytes, make_h, pieces
from md4.cpu.hermite_coulomb import HostCoulomb
from md4.cpu.run import WORK_SECONDS, Extent, OwnList, diagonal, run_lists, sizes_of_pairs, work_of
from md4.cpu.threads import number_of_threads
from md4.method.hermite_coulomb import hermite_bytes
from md4.shells.schwarz import row_norms

# Share of the memory up to the cap that H matrices for Schwarz bounds may take.
H_SHARE = 0.2


class HostSums:
    """How the CPU makes J and K; see `md4.backends.Sums`."""

    # Lists of few pairs would leave lanes empty, so those of all primitive counts are one list.
    mixed_shells = 1 << 62
    makes_forces, takes_bounds, coulomb_key = True, True, None

    def __init__(self, backend):
        self.backend = backend

    @property
    def copies(self):
        """Number of copies of J and K: one for each thread."""
        return number_of_threads()

    def copy_bytes(self, widest):
        """Bytes of blocks of D, J and K in lanes, of shells of at most so many functions."""
        return 80 * widest**2 * LANES

    def gains_by_plane(self, basis):
        """No: the CPU computes all integrals, also those that are zero by reflection in a plane."""
        return False

    def bound_step(self, functions):
        """0: lists are sorted by their bounds."""
        return 0

    def swapped(self, bra, ket):
        """Whether bra and ket change places, because there is less work then."""
        one, two = Extent.of(bra), Extent.of(ket)
        return work_of(two, one) < work_of(one, two)

    coulomb_swapped = swapped

    def seconds(self, bra, ket, matrices, axis=None):
        """Predicted time of a quartet of two lists in one thread."""
        return WORK_SECONDS * work_of(Extent.of(bra), Extent.of(ket)) / (len(bra) * len(ket))

    coulomb_seconds = seconds

    def digest(self, engine, lists, survivors, densities, twice):
        """Sums of J and K; see `HostDigest`."""
        return HostDigest(engine, survivors, densities, twice)

    def coulomb(self, engine, lists, survivors, twice):
        """J alone; see `HostCoulomb`."""
        return HostCoulomb(engine, survivors, twice)

    def forces(self, basis, lists, beside=()):
        """Gradients; see `HostForces`."""
        return HostForces(self.backend, basis, lists)

    def fitting_forces(self, basis, pairs, blocks):
        """Gradients of density fitting; see `HostFittingForces`."""
        return HostFittingForces(self.backend, basis, pairs, blocks)

    def derivatives(self, engine, forces, cutoff):
        """J and K of derivatives; see `HostDerivatives`. The lists have no primitive pairs below the cutoff."""
        return HostDerivatives(self.backend, engine.bra_basis, forces.lists)

    def coulomb_bytes(self, pairs):
        """Bytes of D and J of a list for one density matrix, also in lanes, where each thread has a J of its own."""
        in_lanes = 8 * pairs.nherm * LANES * lane_layout(pairs).vectors
        return hermite_bytes(pairs, pairs.nherm) + (2 + number_of_threads()) * in_lanes


class HostBounds:
    """Schwarz bounds of lists, each of which is taken as a whole."""

    def __init__(self, backend, count):
        self.backend, self.values = backend, np.zeros(count)

    def take(self, prepared, place):
        """R_ab of all pairs of a prepared list from a place on, in pieces whose H matrices fit the memory."""
        pairs, backend = prepared.pairs, self.backend
        whole = plain_layout(pairs)  # a pair needs all of its primitives in the same lane here
        for where in pieces(pairs, whole, H_SHARE * backend.memory.room()):
            piece = pairs[where]
            layout = whole if len(piece) == len(pairs) else plain_layout(piece)
            need = h_bytes(piece, layout) + sizes_of_pairs(piece, piece).nbytes
            backend.check_fits(need, "lists of shell pairs and the Schwarz bound of one pair of shells take")
            groups = Groups.of(piece, layout)
            self._take_piece(OwnList(piece, groups, make_h(piece, groups, backend.memory)), place + where.start)

    def _take_piece(self, piece, first):
        pairs, order = piece.pairs, piece.data.order

        def keep(thread, items, tasks, lists, blocks):
            size, rows = pairs.nab, np.arange(pairs.nab)
            for _, _, group, place in items.tolist():
                block = blocks[place : place + size * size * LANES].reshape(size, size, LANES)
                these = order[group * LANES : (group + 1) * LANES]
                values = block[rows, rows].T.reshape(LANES, pairs.na, pairs.nb)[: len(these)]
                self.values[first + these] = row_norms(values)

        diagonal(self.backend, piece, keep)

    def result(self):
        """R_ab, shape (npair,)."""
        return self.values


class HostDigest:
    """X and Y in host memory, which take whole lists; see `md4.backends.Sums.digest` and `md4.backends.SumsTarget`."""

    def __init__(self, engine, survivors, densities, twice):
        # always the same layout, since the loop would be compiled for each one
        self.densities, self.twice = np.ascontiguousarray(densities), np.ascontiguousarray(twice)
        self.backend, self.survivors, self.quartets, self.used = engine.backend, survivors, 0, set()
        self.ao_loc, memory = engine.bra_basis.ao_loc, engine.backend.memory
        lanes = (10 * int(np.diff(self.ao_loc).max()) ** 2 * LANES,)
        # now, so that workspaces and H matrices have what is left
        self.sums = [
            (memory.empty(lanes, aligned_empty), memory.zeros(densities.shape), memory.zeros(twice.shape))
            for _ in range(number_of_threads())
        ]
        memory.watch(self, densities.nbytes + twice.nbytes)  # of the result

    def begin(self, lists, keeps_all):
        """Nothing is needed of the lists."""

    def take(self, pairs, report=None):
        """Makes and digests the integrals of all `ListPair` that survive."""
        pairs, tolerance = map(self.survivors.bounded, pairs), self.survivors.rule.tolerance
        self.quartets += run_lists(self.backend, [*pairs], self.add, self.ao_loc, tolerance, report)

    def add(self, thread, items, tasks, lists, blocks):
        """Digests blocks to the sums of a thread."""
        self.used.add(thread)
        digest_blocks()(items, tasks, lists, blocks, self.densities, self.twice, *self.sums[thread])

    def end(self, lists, fetched=True):
        """(computed, wanted) quartets, which are the same."""
        return self.quartets, self.quartets

    def result(self):
        """(X, Y), shapes (n_k, nao, nao) and (n_j, nao, nao)."""
        x, y = np.zeros(self.densities.shape), np.zeros(self.twice.shape)
        for thread in self.used:
            x += self.sums[thread][1]
            y += self.sums[thread][2]
        return x, y
