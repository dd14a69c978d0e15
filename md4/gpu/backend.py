"""The GPU backend: memory, streams, and the launch of each step; the kernels are in `md4.gpu.kernels`."""

from copy import copy
from math import prod

import numpy as np

from md4.errors import DeviceError
from md4.gpu.buffers import as_buffer, copy_to_device, copy_to_host
from md4.gpu.compile import launcher
from md4.gpu.context import DeviceContext
from md4.gpu.device_code import cuda
from md4.gpu.h_layout import KET_ELEMENTS, KET_PLAIN, form_size
from md4.gpu.hermite_coulomb import DeviceCoulomb
from md4.gpu.kernels import resident
from md4.gpu.kernels.digestion import digest_swapped, launch_bounds
from md4.gpu.kernels.fused import launch_fused
from md4.gpu.kernels.h_matrices import RECORD, launch_h
from md4.gpu.kernels.hermite_coulomb import hermite_width
from md4.gpu.kernels.one_product import launch_ket_sums, launch_one_product, needs_sums, sums_size
from md4.gpu.kernels.recurrence import launch_r
from md4.gpu.kernels.resident import launch_resident_bra
from md4.gpu.kernels.thread_quartet import launch_thread_quartet
from md4.gpu.kernels.two_products import abq_size, launch_bra_transform, launch_ket_transform
from md4.gpu.paths import plans
from md4.gpu.shell_pairs import PairMaker
from md4.gpu.targets import DeviceBlock, DeviceDigest, DeviceTensor, StagedTensor, checked_device_array
from md4.gpu.tuning import CHUNK_BYTES, MIXED_SHELLS, blocks_of_8, r_stride
from md4.method.hermite_coulomb import hermite_bytes
from md4.support.memory import host_memory, tensor_refusal

# What `GpuBackend.compile_ahead` has looked at.
seen_ahead = set()


class GpuBackend:
    """Steps of `md4.engine` on the GPU; arrays are device arrays, work is asynchronous on `stream`."""

    name = "cuda"

    def __init__(self, operator, stream=None, max_memory=None):
        self.operator, self.context = operator, DeviceContext(stream, max_memory)
        self.pair_maker = PairMaker(self.context)

    @property
    def lock(self):
        """Held by the one thread that works on the context."""
        return self.context.lock

    # memory

    def memory_left(self):
        """Bytes that may be allocated."""
        return self.context.pool.left()

    def facts(self):
        """What there is to show of it, as (name, value); asks the device nothing."""
        kernels = len(launcher.made)
        return [("arithmetic unit", self.context.unit), *self.context.pool.facts(), ("kernel variants loaded", kernels)]

    def compile_ahead(self, basis, use, progress):
        """Compiles what a first call asks of a basis, `use` as in `md4.gpu.variants.needed_variants`."""
        if use != "tensor":
            self.require_asynchronous_copies()
        shells = basis.pure, basis.classes.tobytes(), basis.nprims.tobytes()
        key = self.context.device, self.context.real, self.operator.kind, use, *shells
        if key not in seen_ahead:
            from md4.gpu.variants import needed_variants
            from md4.gpu.warmup import compile_ahead

            compile_ahead(needed_variants(self.context.unit, self.operator.kind, basis, use), progress)
            seen_ahead.add(key)

    def with_operator(self, operator):
        """The same with another operator; memory, streams and what is known of pairs are shared."""
        other = copy(self)
        other.operator = operator
        return other

    def hermite_bytes(self, pairs):
        """Bytes of the H matrices of `pairs`: of a panel; other forms take less, but for columns of mixed lists."""
        return 8 * pairs.nprim * form_size(pairs, KET_PLAIN)

    def chunk_bytes(self, bra, ket):
        """Bytes of r and of (ab|q] (or sums of r) of one bra pair with one ket pair, both with the most primitives."""
        stride = r_stride(bra.l + ket.l)
        r = bra.max_prim * ket.max_prim * stride
        if ket.nherm == 1:
            return 8 * (r + max(bra.max_prim * stride * ket.nab, 8 * ket.max_prim * bra.nab))
        return 8 * (r + ket.max_prim * blocks_of_8(ket.nherm) * bra.nab * 8)

    def least_workspace(self, bra, ket):
        """Bytes that one bra pair with one ket pair takes, pair data and H panels of all of them included."""
        chunk = max(self.chunk_bytes(bra, ket), self.chunk_bytes(ket, bra))
        records = sum(8 * (p.nprim * (RECORD + p.nctr_a + p.nctr_b + 1) + 6 * p.npair + 1) for p in (bra, ket))
        # buffers are rounded up by an eighth at most
        return (chunk + records + self.hermite_bytes(bra) + self.hermite_bytes(ket)) * 9 // 8 + (1 << 16)

    def chunk_pairs(self, plan, bra, ket):
        """Pairs of a chunk: about CHUNK_BYTES, or half of what is left where that is less."""
        if plan.kernels == "low":  # keeps nothing between steps
            return len(bra), len(ket)
        budget = max(1, min(CHUNK_BYTES, self.context.pool.left() // 2) // max(1, self.chunk_bytes(bra, ket)))
        nket = min(len(ket), budget)
        return max(1, min(len(bra), budget // nket)), nket

    def result(self, shape, out=None):
        """A device array for results: `out` if given and right, or a new one."""
        return self.context.pool.array(shape) if out is None else checked_device_array(out, shape)

    def target(self, aosym, box, shape, out, device, least_block):
        """The AO tensor to fill: on the device where it fits, else on the host."""
        size = 8 * prod(shape)
        room = self.context.pool.left()
        if device:
            if out is None and size + least_block > room:
                raise tensor_refusal(shape, size + least_block, room)
            return DeviceTensor(self, aosym, box, self.result(shape, out), None)
        if out is None and size > host_memory():
            raise tensor_refusal(shape, size, host_memory())
        if out is None and self.context.pool.cap is not None:
            if size + least_block > room:
                raise tensor_refusal(shape, size + least_block, room)
            room -= size
        host = self.context.pool.watch(np.empty(shape)) if out is None else out
        if size + max(least_block, room // 4) > room:
            return StagedTensor(self, aosym, box, host)
        return DeviceTensor(self, aosym, box, self.result(shape), host)

    def scratch(self, shape):
        """Room for one block."""
        return DeviceBlock.contiguous(self.context.pool.get(prod(shape)), shape)

    def block(self, out):
        """A result of six indices as a block (ij, kl, ab, cd)."""
        return out if isinstance(out, DeviceBlock) else DeviceBlock.contiguous(as_buffer(out), out.shape)

    # J and K

    mixed_shells = MIXED_SHELLS
    block_bytes = 2 << 30  # of one block of integrals, at most: benzene cc-pV5Z 1.81 s, with 512 MB 1.87 s
    digest_copies = 1  # of J and K that a build keeps
    digest_swapped = staticmethod(digest_swapped)

    def digest(self, densities, twice):
        """What sums J and K of blocks."""
        self.require_asynchronous_copies()
        return DeviceDigest(self, densities, twice)

    def coulomb(self, basis, twice):
        """What sums J alone."""
        self.require_asynchronous_copies()
        return DeviceCoulomb(self, basis, twice)

    def require_asynchronous_copies(self):
        """DeviceError where there are none, which all kernels of J and K use."""
        if self.context.unit == "fma":
            raise DeviceError(
                "J and K on a GPU need compute capability 8.0 (A100) or newer; integrals are computed on older ones, "
                "J and K with backend='cpu'."
            )

    def coulomb_bytes(self, pairs):
        """Bytes that it keeps of a list for one density matrix."""
        return hermite_bytes(pairs, hermite_width(pairs))

    def first_aos(self, prepared, basis):
        """First AOs of the shells of a whole list, on the device as long as the list is."""
        if prepared.places is None:
            _, (places,) = self.context.pool.upload([basis.ao_loc[prepared.pairs.pairs]], self.context.stream)
            prepared.places = places
        return prepared.places

    def new_bounds(self, count):
        """Room for the Schwarz bounds of as many pairs."""
        return self.context.pool.get(count)

    def store_bounds(self, block, bounds, first):
        """R_ab of a block of a pair list with itself, to `bounds` from `first` on; forgets the block."""
        launch_bounds(self.context, block, bounds.part(first, (block.dims[0],)))
        self.context.pool.release(block.array)

    def fetch_bounds(self, bounds):
        """Bounds on the host."""
        host = np.empty(bounds.shape)
        copy_to_host(host, bounds.pointer, self.context.stream)
        self.context.pool.release(bounds)
        return host

    def fetch(self, array):
        """A device array of another library on the host."""
        return cuda.as_cuda_array(array).copy_to_host()

    def send(self, array):
        """A host array on the device, for a caller to keep."""
        out = self.context.pool.array(array.shape, array.dtype)
        copy_to_device(as_buffer(out).pointer, np.ascontiguousarray(array), self.context.stream)
        self.context.stream.synchronize()
        return out

    def release(self, h):
        """Gives H panels back."""
        self.context.pool.release(h)

    # the steps

    def prepare(self, basis, pairs, cutoff):
        """`ShellPairs` and `DevicePairs` of a checked list."""
        return self.pair_maker.prepare(basis, pairs, cutoff)

    def plan(self, bra, ket):
        """The kernels for a class, and the side that goes first."""
        return next(plans(self.context.unit, bra, ket))

    def hermite(self, prepared, form):
        """Step 1: H of all primitive pairs, in the form that the kernels read."""
        pairs = prepared.pairs
        data, count = prepared.data, pairs.nprim
        places, stride = data.start, 1
        if form == KET_ELEMENTS:
            columns = self.pair_maker.columns(pairs, data)
            places, stride, count = columns.place, columns.slots, columns.slots
        h = self.context.pool.get(max(1, count) * form_size(pairs, form))
        launch_h(self.context, pairs, data.records, form, places, stride, h)
        return h

    def r(self, plan, ab, cd):
        """Steps 2 and 3: r[bra primitive, ket primitive, t] of a chunk."""
        if plan.kernels == "low":
            return None
        bra, ket = ab.pairs, cd.pairs
        l, total = bra.l + ket.l, bra.nprim * ket.nprim
        r = self.context.pool.get(max(1, total) * r_stride(l))
        sides = [(s.data.records, s.data.width, s.first_prim, s.pairs.nprim) for s in (ab, cd)]
        launch_r(self.context, l, self.operator, *sides, total, r)
        return r

    def transform_bra(self, plan, h, ab, cd, r):
        """Step 4: (ab|q] of a chunk, [p|q] assembled in the operands; with one kernel for both transforms, put off."""
        if plan.kernels != "two":
            return h, r
        bra, ket = ab.pairs, cd.pairs
        abq = self.context.pool.get(abq_size(bra, ket))
        if ket.nprim:
            launch = launch_resident_bra if resident.serves(self.context.unit, bra, ket) else launch_bra_transform
            launch(self.context, h, ab, cd, r, abq)
        self.context.pool.release(r)
        return abq

    def transform_ket(self, plan, abq, h, ab, cd, out):
        """Step 5: (ab|cd) of a chunk into `out`, and what was put off."""
        if plan.kernels == "two":
            launch_ket_transform(self.context, abq, h, plan.ket_form, ab, cd, out)
            self.context.pool.release(abq)
            return
        h_ab, r = abq
        if plan.kernels == "low":
            launch_thread_quartet(self.context, self.operator, h_ab, h, ab, cd, plan.swap, out)
        elif plan.kernels == "single":
            self.single_product(h_ab, r, h, ab, cd, out)
        else:
            launch_fused(self.context, h_ab, r, h, ab, cd, out)
            self.context.pool.release(r)

    def single_product(self, h, r, weights, ab, cd, out):
        """Steps 4 and 5 for kets of two s shells; gives r back."""
        if needs_sums(cd.pairs):
            sums = self.context.pool.get(max(1, sums_size(ab.pairs, cd.pairs)))
            launch_ket_sums(self.context, weights, r, ab, cd, sums)
            self.context.pool.release(r)
            r, weights = sums, None
        launch_one_product(self.context, h, r, weights, ab, cd, out)
        self.context.pool.release(r)


