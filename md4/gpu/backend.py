"""The GPU backend: its memory, the steps of the method, and targets; paths are in `md4.gpu.paths`."""

from copy import copy
from functools import cache
from math import prod
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from md4.errors import DeviceError
from md4.gpu import collectives
from md4.gpu.algebra import DeviceAlgebra, rehearse_pack, rehearse_rows
from md4.gpu.buffers import Buffer, as_buffer
from md4.gpu.compile import launcher
from md4.gpu.context import DeviceContext
from md4.gpu.device_code import cuda
from md4.gpu.dry_run import DryContext, without_device
from md4.gpu.h_layout import (
    KET_ELEMENTS,
    KET_FLAT,
    KET_SINGLES,
    HForm,
    check_h,
    check_rows,
    form_size,
)
from md4.gpu.kernels.groups import NO_LIMITS
from md4.gpu.kernels.h_matrices import e_bytes, launch_h
from md4.gpu.kernels.recurrence import launch_r
from md4.gpu.kernels.thread_quartet import limits_of
from md4.gpu.pair_layout import RECORD, slot_starts
from md4.gpu.part_plans import part_plans
from md4.gpu.paths import plans
from md4.gpu.pool import ITEM_BYTES, bucket
from md4.gpu.r_layout import r_stride_of
from md4.gpu.shell_pairs import PairMaker
from md4.gpu.sums import DeviceBounds, DeviceSums
from md4.gpu.targets import DeviceBlock, DeviceTensor, StagedTensor, checked_device_array
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tracks import number_of_tracks
from md4.gpu.tuning import CHUNK_BYTES
from md4.gpu.warmup import compile_ahead
from md4.method.operators import check_order
from md4.plan import ListParts, chunks
from md4.support.display import size_text
from md4.support.log import log
from md4.support.memory import check_fits, host_memory, tensor_refusal

# Share of the memory that may be used, of a block of a tensor, and most bytes of it; larger ones gain nothing.
BLOCK_SHARE, BLOCK_BYTES = 0.2, 1 << 30
# Numbers of a line of the cache.
WHOLE_LINE = 16
# What `GpuBackend.compile_ahead` has looked at, by compute capability.
seen_ahead = set()


class HMatrices(NamedTuple):
    """H matrices of a whole list on the device, and the form in which they lie there."""

    array: object
    form: HForm

    @property
    def nbytes(self):
        """Bytes of all."""
        return self.array.size * self.array.itemsize


@cache
def chunk_size(bra, ket):
    """Numbers of r and of (ab|q] (or sums of r) of one bra pair with one ket pair of two `ListFacts`."""
    stride = r_stride_of(bra, ket)
    r = bra.max_prim * ket.max_prim * stride
    if ket.nherm == 1 and ket.mirror is None:
        return r + max(bra.max_prim * stride * ket.nab, 8 * ket.max_prim * bra.nab)
    if ket.single:
        r += bra.max_prim * stride * ket.nctr_a
    return r + ket.max_prim * blocks_of_8(ket.nherm) * bra.nab * 8


class GpuBackend:
    """`md4.backends.Backend` on a GPU; arrays are device arrays, work is asynchronous on the context's stream."""

    name, forms, bounds_kind = "cuda", 6, DeviceBounds

    def __init__(self, operator, stream=None, max_memory=None, device=None):
        self.operator, self.context = operator, DeviceContext(stream, max_memory, device)
        self.pair_maker = PairMaker(self.context)

    # the lock is held by the one thread that works on the context
    lock, stream, dry = (property(attrgetter(f"context.{name}")) for name in ("lock", "stream", "dry"))

    @property
    def sums(self):
        """How J and K are made."""
        return DeviceSums(self)

    def with_operator(self, operator):
        """The same with another operator; memory, streams and what is known of pairs are shared."""
        other = copy(self)
        other.operator = operator
        return other

    def facts(self):
        """What there is to show of it, as (name, value); asks the device nothing."""
        kernels = len(launcher.made)
        major, minor = self.context.capability
        device = f"{self.context.device}, sm_{major}{minor}"
        return [("device", device), ("arithmetic unit", self.context.unit), *self.context.pool.facts(),
                ("kernel variants loaded", kernels)]  # fmt: skip

    # several devices

    def division_facts(self):
        """What decides how work is divided: the unit, on which plans depend."""
        return f"cuda ({self.context.unit})"

    def mark(self):
        """A function that waits until the device has done what it was given so far."""
        return self.context.tracks.mark()

    def tracks(self):
        """This backend, and others for further tracks where there is memory for their rooms; see `md4.gpu.tracks`."""
        self.context.tracks.end()  # those of a build that was interrupted
        return [self, *map(self.on_track, range(1, number_of_tracks(self.context.pool.left())))]

    def on_track(self, track):
        """The same on another track."""
        other = copy(self)
        other.context = self.context.on_track(track)
        return other

    def place(self):
        """The GPU, if NCCL can add up its sums; see `md4.gpu.collectives`."""
        return collectives.place(self.context.device)

    def new_group(self):
        """The identity of a new group, which its members need to find each other."""
        return collectives.nccl().get_unique_id()

    def join(self, identity, number, size):
        """Becomes a member of a group."""
        return collectives.Group(identity, number, size, self.context.stream)

    def algebra(self):
        """Products and factorisations of matrices by CuPy; DeviceError without it."""
        return DeviceAlgebra(self)

    def rehearse_rows(self, nao, count):
        """On the context of a dry run."""
        rehearse_rows(self.context, nao, count)

    def rehearse_pack(self):
        """On the context of a dry run."""
        rehearse_pack(self.context)

    @classmethod
    def without_device(cls, operator, capability, left):
        """A backend for a dry run (`md4.gpu.dry_run`): of a compute capability, with so many bytes that seem free."""
        dry = object.__new__(cls)
        dry.operator = operator
        return without_device(dry, DryContext(capability, left))

    def compile_ahead(self, use, basis, work, progress=None, part=None):
        """Compiles the kernels that `work` asks for; see `md4.backends.Backend`. It need not be done twice.

        A dry run compiles nothing: it may be for another architecture than that of the current device.
        """
        if use != "tensor":
            self.require_asynchronous_copies()
        if isinstance(self.context, DryContext):
            return
        shells = basis.pure, basis.classes.tobytes(), basis.nprims.tobytes(), basis.mirror_axis
        key = self.context.capability, self.operator.kind, use, part, *shells
        if key not in seen_ahead:
            compile_ahead(lambda: self.asked_by(work), progress)
            seen_ahead.add(key)

    def asked_by(self, work):
        """The kernels that `work` asks for, as `md4.gpu.dry_run.DryContext` has them."""
        context = self.context
        dry = without_device(self, DryContext(context.capability, self.memory_left(), context.block_shared))
        work(dry)
        return dry.context.asked

    def require_asynchronous_copies(self):
        """DeviceError where there are none, which all kernels of J and K use."""
        if self.context.unit == "fma":
            raise DeviceError(
                "J and K on a GPU need compute capability 8.0 (A100) or newer; integrals are computed on older ones, "
                "J and K with backend='cpu'."
            )

    # memory

    def memory_left(self):
        """Bytes that may be allocated."""
        return self.context.pool.left()

    def check_fits(self, need, what, remedy="raise max_memory"):
        """`check_fits` of `need` bytes more."""
        check_fits(need, self.memory_left(), what, remedy)

    def held_bytes(self, nbytes):
        """Bytes that an array of so many bytes takes."""
        return bucket(nbytes) if nbytes else 0

    def hermite_bytes(self, pairs):
        """Bytes of the H matrices of `pairs` as panels, or in slots if these take more and a thread a quartet may."""
        items, limits = pairs.nprim * form_size(pairs, KET_FLAT), limits_of(self.context.unit)
        if pairs.nab <= limits.one_product_integrals and pairs.l <= limits.l and not pairs.derivatives:
            items = max(items, slot_starts(pairs.start)[1] * form_size(pairs.facts, KET_ELEMENTS))
        return ITEM_BYTES * items

    def with_lists(self, least, basis, lists):
        """The least workspace, which has the data of one pair of lists."""
        return least

    def chunk_bytes(self, bra, ket):
        """Bytes of r and of (ab|q] (or sums of r) of one bra pair with one ket pair, both with the most primitives."""
        return ITEM_BYTES * chunk_size(bra.facts, ket.facts)

    def least_workspace(self, bra, ket):
        """Bytes that one bra pair with one ket pair takes, pair data and H panels of all of them included."""
        chunk = max(self.chunk_bytes(bra, ket), self.chunk_bytes(ket, bra))
        records = sum(ITEM_BYTES * (p.nprim * (RECORD + p.nctr_a + p.nctr_b + 1) + 6 * p.npair + 1) for p in (bra, ket))
        # buffers are rounded up by an eighth at most
        panels = sum(ITEM_BYTES * p.nprim * form_size(p, KET_FLAT) for p in (bra, ket))
        return (chunk + records + panels) * 9 // 8 + (1 << 16)

    def chunk_pairs(self, plan, bra, ket):
        """Pairs of a chunk: about CHUNK_BYTES, or half of what is left where that is less."""
        if not plan.path.keeps_chunks:
            return bra.npair, ket.npair
        budget = max(1, self.context.pool.share(CHUNK_BYTES) // max(1, self.chunk_bytes(bra, ket)))
        if bra.npair * ket.npair <= budget:
            return bra.npair, ket.npair
        nket = min(ket.npair, budget)
        return max(1, min(bra.npair, budget // nket)), nket

    # the steps

    def prepare(self, basis, lists, cutoff):
        """`ShellPairs` and `DevicePairs` of checked lists, one after the other; UnsupportedError as `check_rows`."""
        for pairs in lists:
            check_rows(basis, pairs)
        return (self.pair_maker.prepare(basis, pairs, cutoff) for pairs in lists)

    def plan(self, bra, ket, block=None, limited=False):
        """The path for a class, and the side that goes first; `limited`, of a block without one: has it limits?"""
        matrix, limited = (False, limited) if block is None else (block.matrix, block.limits[0].size > 0)
        return plans(self.context.unit, bra, ket, matrix, limited)[0]

    def parts(self, bra, ket, axis):
        """`ListParts` of the even and the odd part; empty where the integrals are better made all together."""
        found = enumerate(part_plans(self.context.unit, bra, ket, axis))
        return [ListParts(bra.part(axis, parity), ket.part(axis, parity), plan) for parity, plan in found]

    def run_parts(self, parts, blocks):
        """Steps 1 to 5 (`md4.engine.Engine.run_steps`) for the even and the odd part of two lists, into a block each.

        Where all centres lie in a plane, H[ab, p] and r[p+q] are zero for functions of unlike parity
        (`md4.method.mirror`). So with ab, p, q and cd of one parity,

            (ab|q] = sum_p H[ab, p] r[p+q]      (ab|cd) = sum_q (ab|q] H[cd, q]

        are all integrals that are not zero. Both parts read the same r.

        Parameters
        ----------
        parts : list of ListParts
        blocks : list of DeviceBlock
            One for each of them, which ask for the same quartets.
        """
        work, sizes = [], []
        for (bra, ket, plan), block in zip(parts, blocks):
            check_order(bra.facts.l + ket.facts.l)
            ab, cd, abcd = (ket, bra, block.swapped()) if plan.swap else (bra, ket, block)
            work.append((plan.path, ab.h(plan.bra_form), cd.h(plan.ket_form), ab, cd, abcd))  # 1
            sizes.append(self.chunk_pairs(plan, ab, cd))
        for ij, kl in chunks(ab.npair, cd.npair, *map(min, zip(*sizes))):
            r = None
            for path, H_ab, H_cd, ab, cd, abcd in work:
                r = self.r(ab[ij], cd[kl], abcd[ij, kl]) if r is None else r  # 2 and 3
                path.transform(self, H_ab, H_cd, ab[ij], cd[kl], r, abcd[ij, kl])  # 4 and 5

    def hermite(self, prepared, form):
        """Step 1: H of all primitive pairs of a whole list, as `HMatrices` in a form."""
        with self.context.alone():
            return self.make_h(prepared, form)

    def make_h(self, prepared, form):
        """`hermite` for the track of this backend alone."""
        facts, data = prepared.facts, prepared.data
        check_h(facts, e_bytes(facts), self.context.block_shared)
        places, stride, count = data.start, 1, prepared.nprim
        if form in (KET_ELEMENTS, KET_SINGLES):
            slots = self.pair_maker.slots(prepared.pairs, data)
            places, stride, count = slots.place, slots.count, slots.count
        items = max(1, count) * form_size(facts, form)
        if form.single:
            doubles = self.context.pool.get(-(-items // 2))
            h = Buffer(doubles.pointer, (items,), 4, doubles)
        else:
            h = self.context.pool.get(items)
        launch_h(self.context, facts, prepared.nprim, data.records, form, places, stride, h)
        return HMatrices(h, form)

    def r(self, ab, cd, block=None):
        """Steps 2 and 3: r[bra primitive, ket primitive, t] of a chunk, rows of `md4.gpu.r_layout.r_stride_of` doubles.

        That of two parts of classes is without odd elements, see `md4.gpu.r_layout.even_r`, and the same for parts of
        either parity.
        """
        r = self.context.pool.room("r", (ab.nprim * cd.nprim or 1) * r_stride_of(ab.facts, cd.facts))
        launch_r(self.context, self.operator, ab, cd, r, NO_LIMITS if block is None else block.limits)
        return r

    # results and targets

    def scratch(self, shape):
        """Room for one block."""
        return DeviceBlock.contiguous(self.context.pool.room("block", prod(shape)), shape)

    def part_blocks(self, parts):
        """A block for each of both `ListParts`, one behind the other in the room of `scratch`."""
        shapes = [(bra.npair, ket.npair, bra.facts.nab, 1, ket.facts.nab, 1) for bra, ket, _ in parts]
        even, odd = map(prod, shapes)
        behind = -(-even // WHOLE_LINE) * WHOLE_LINE
        room = self.context.pool.room("block", behind + odd)
        rooms = room.part(0, (even,)), room.part(behind, (odd,))
        return [DeviceBlock.contiguous(*one) for one in zip(rooms, shapes)]

    def block(self, out):
        """A result of six indices as a block (ij, kl, ab, cd)."""
        return out if isinstance(out, DeviceBlock) else DeviceBlock.contiguous(as_buffer(out), out.shape)

    def fill_matrix(self, engine, out, pairs, columns, rows):
        """Makes the blocks of many `ListPair` as parts of a matrix; see `md4.backends.Backend`."""
        for bra, ket, *_ in pairs:
            shape = len(bra), len(ket), bra.facts.na, bra.facts.nb, ket.facts.na, ket.facts.nb
            engine.run_steps(bra, ket, self.matrix_block(out, rows[ket], columns[bra], shape))

    def matrix_block(self, out, row, column, shape):
        """A part of a matrix as a block; see `md4.backends.Backend`."""
        (_, _, na, nb, nc, nd), width = shape, out.shape[1]
        strides = na * nb, nc * nd * width, 1, width
        return DeviceBlock(as_buffer(out), row * width + column, strides, tuple(shape), turned=True, matrix=True)

    def result(self, shape, out=None):
        """A device array for results: `out` if given and right, or a new one."""
        return self.context.pool.array(shape) if out is None else checked_device_array(out, shape, self.context.handle)

    def block_bytes(self):
        """Most bytes of a block of a tensor."""
        return int(min(BLOCK_SHARE * self.memory_left(), BLOCK_BYTES))

    def tensor(self, engine, layout, out, device, least_block, host_tensor, progress=None):
        """The AO tensor to fill: on the device where it fits, else on the host; see `md4.backends.Backend`."""
        pool, shape, size, held = self.context.pool, layout.shape, layout.nbytes, self.held_bytes(layout.nbytes)
        if device:
            if out is None and held + least_block > pool.left():
                raise tensor_refusal(layout, held + least_block, pool.left(), device)
            return DeviceTensor(engine, layout, self.result(shape, out), None)
        host = self.host_array(layout, least_block) if out is None else out
        room = pool.left()
        if held + max(least_block, room // 4) > room:
            log.debug("the device has no room for the tensor of %s, which is collected on the host", size_text(size))
            return StagedTensor(engine, host_tensor(layout, host))
        return DeviceTensor(engine, layout, self.result(shape), host)

    def host_array(self, layout, least_block):
        """An array on the host for a tensor, which counts against the cap."""
        pool, size = self.context.pool, layout.nbytes
        if size > host_memory():
            raise tensor_refusal(layout, size, host_memory())
        if pool.cap is not None and size + least_block > pool.left():
            raise tensor_refusal(layout, size + least_block, pool.left())
        return pool.watch(np.empty(layout.shape))

    def watch(self, array):
        """Counts an array in host memory against the cap."""
        return self.context.pool.watch(array)

    def bounds(self, engine, count, room):
        """Schwarz bounds of so many pairs, from blocks of at most `room` bytes."""
        return self.bounds_kind(engine, count, room)

    def fetch(self, array):
        """A device array of another library on the host."""
        return cuda.as_cuda_array(array).copy_to_host()

    def send(self, array):
        """A host array on the device, for a caller to keep."""
        out = self.context.pool.array(array.shape, array.dtype)
        self.context.copy_in(as_buffer(out).pointer, np.ascontiguousarray(array))
        self.context.stream.synchronize()
        return out
