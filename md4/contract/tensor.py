"""Whole AO tensors: every shell quartet of a molecule, class by class, block by block.

The unordered shell pairs are cut into pieces of one class each. A block is one bra piece with one ket piece. If bra and
ket range over the same pairs, only blocks with ket <= bra are computed, and each integral is written to all its places.
A slice of a tensor (`md4.contract.slices`) is made in the same way, of the pairs that it needs.
"""

from dataclasses import dataclass, replace
from math import isqrt

import numpy as np

from md4.contract.slices import slice_pairs
from md4.contract.stores import checked_store
from md4.contract.workspace import HermiteStore, least_block
from md4.cpu.targets import HostTensor
from md4.errors import ArgumentError
from md4.method.operators import check_order
from md4.method.scatter import SYMMETRIES, TensorLayout, ao_ranges
from md4.plan import ListPair
from md4.support.arguments import as_list, checked_choice, checked_flag, shown, whole_number
from md4.support.log import log
from md4.support.progress import Progress

# Share of the memory that may be used, of the H matrices that are kept between blocks.
HERMITE_SHARE = 0.4
# Slices of a tensor for which kernels are compiled ahead, at most.
SLICES = 4


@dataclass(frozen=True)
class Request:
    """The part of a tensor that is requested.

    Attributes
    ----------
    aosym : str
        Its symmetry.
    ranges : tuple
        The shells (first, last + 1) of each index.
    ends : tuple of int, optional
        As those of `TensorLayout`: the AOs of the first index, if they are fewer.
    """

    aosym: str
    ranges: tuple
    ends: tuple | None = None

    @classmethod
    def checked(cls, basis, aosym, shls_slice):
        """A request from the arguments of a user.

        Raises
        ------
        ArgumentError
            The symmetry is unknown or the slice impossible.
        UnsupportedError
            The angular momenta add up to more than the highest order of the tables.
        """
        request = cls._of(basis, checked_choice("aosym", aosym, SYMMETRIES), shls_slice)
        check_order(sum(int(basis.classes[first:last, 0].max()) for first, last in request.ranges))
        return request

    @classmethod
    def _of(cls, basis, aosym, shls_slice):
        if shls_slice is None:
            return cls(aosym, ((0, basis.nshell),) * 4)
        if aosym == "s8":
            raise ArgumentError("aosym 's8' has no shls_slice; use 's4' or 's1' for a part of the tensor.")
        ends = shell_numbers(shls_slice, 8)
        ranges = tuple(zip(ends[::2], ends[1::2]))
        if not all(0 <= first < last <= basis.nshell for first, last in ranges):
            raise ArgumentError(f"shls_slice {tuple(ends)} must hold non-empty ranges within 0..{basis.nshell} shells.")
        if aosym == "s4" and (ranges[0] != ranges[1] or ranges[2] != ranges[3]):
            raise ArgumentError("aosym 's4' needs equal ranges for i and j, and for k and l; use 's1' otherwise.")
        return cls(aosym, ranges)

    @property
    def swap(self):
        """Whether bra and ket range over the same pairs."""
        return set(self.ranges[:2]) == set(self.ranges[2:])

    def layout(self, basis):
        """`TensorLayout` of the tensor over a basis."""
        return TensorLayout(self.aosym, ao_ranges(basis, self.ranges), self.swap, self.ends)

    def lists(self, basis, layout):
        """The lists of shell pairs of a tensor or a slice of it."""
        return [pairs for some in slice_pairs(basis, self, layout.ends)[:2] for pairs in some]

    def work(self, engine, layout, block_bytes, hermite_bytes):
        """`ListPair` of all blocks of a tensor or a slice of it, of pieces as those of `cut_pieces`."""
        needed = slice_pairs(engine.bra_basis, self, layout.ends)
        bra, ket = (cut_pieces(engine, lists, block_bytes, hermite_bytes) for lists in needed[:2])
        return [*(block_work(bra, bra, True) if needed.triangle else ()), *block_work(bra, ket, False)]


def shell_numbers(shls_slice, count):
    """The `count` integers of a slice, two for each index; ArgumentError if it is something else."""
    given = as_list(shls_slice)
    if given is None or len(given) != count:
        what = shown(shls_slice) if given is None else len(given)
        raise ArgumentError(f"shls_slice must hold {count} shell numbers (two for each index), not {what}.")
    ends = [whole_number(end) for end in given]
    if None in ends:
        raise ArgumentError(f"shls_slice must hold integers, not {shown(given[ends.index(None)])}.")
    return ends


def checked_request(basis, aosym, shls_slice, out, device):
    """The `Request` of the arguments of `ao_tensor`. All are checked, except an `out` on the device."""
    request = Request.checked(basis, aosym, shls_slice)
    if not checked_flag("device", device) and out is not None:
        checked_store(out, request.layout(basis).shape)
    return request


def segmented(engine, request):
    """Engine and request over a basis in which general contractions are split where that saves work."""
    given, basis = engine.bra_basis, engine.bra_basis.segmented()
    if basis is given:
        return engine, request
    shell = np.searchsorted(basis.ao_loc, given.ao_loc)
    ranges = tuple((int(shell[a]), int(shell[b])) for a, b in request.ranges)
    return engine.with_basis(basis), replace(request, ranges=ranges)


def piece_size(pairs_nab, h_bytes, block_bytes, hermite_bytes):
    """Number of pairs in a piece.

    A block of two such pieces fits `block_bytes`, and the H matrices of a piece fit a quarter of `hermite_bytes`.
    """
    return max(1, min(isqrt(max(1, block_bytes // 8)) // pairs_nab, hermite_bytes // (4 * max(1, h_bytes))))


def cut_pieces(engine, lists, block_bytes, hermite_bytes, derivatives=()):
    """Prepared pairs of lists of one class each, or derivatives, in pieces that are short enough for a block."""

    def prepared(some):
        made = engine.prepare_lists(some, basis)
        return [pairs.derived(derivatives) for pairs in made] if derivatives else made

    basis, dry, pieces = engine.bra_basis, engine.backend.dry, []
    for pairs, whole in zip(lists, prepared(lists)):
        h_bytes = engine.backend.hermite_bytes(whole.pairs) // len(whole) + 1
        size = piece_size(whole.pairs.nab, h_bytes, block_bytes, hermite_bytes)
        if size >= len(pairs):
            pieces.append(whole)
        else:
            pieces += prepared([pairs[n : n + size] for n in range(0, len(pairs), size)])
    return one_of_each(pieces, lambda piece: (*facts(piece), round(10 * piece.nprim / len(piece)))) if dry else pieces


def facts(side):
    """What the kernels for a list depend on, besides the plan."""
    return side.facts, side.npair, side.nprim > side.npair


def one_of_each(items, kind):
    """One of the items of each kind: where kernels are only noted, the others would ask for no more."""
    return list({kind(item): item for item in items}.values())


def block_work(bra_pieces, ket_pieces, swap):
    """`ListPair` of all blocks; if `swap` is true, only those with ket <= bra."""
    for n, bra in enumerate(bra_pieces):
        for ket in ket_pieces[: n + 1] if swap else ket_pieces:
            yield ListPair(bra, ket, swap and bra is ket)


def ao_tensor(engine, aosym="s1", shls_slice=None, out=None, device=False, progress=None):
    """The AO tensor (ij|kl) of the engine's basis; arguments and errors are those of `md4.int2e`."""
    request = checked_request(engine.bra_basis, aosym, shls_slice, out, device)
    with engine.lock:
        return locked_tensor(engine, request, out, device, progress)


def locked_tensor(engine, request, out=None, device=False, progress=None):
    """As `ao_tensor`, for a `Request` and a thread that holds the engine's lock."""
    engine, request = segmented(engine, request)
    layout = request.layout(engine.bra_basis)
    target = slice_target(engine, request, layout, out, device, progress)
    compile_ahead(engine, request, [layout], progress)
    with Progress(1.0, enabled=progress, label="ERI") as bar:
        add_slice(engine, request, layout, target, bar.report)
    return target.result()


def slice_target(engine, request, layout, out=None, device=False, progress=None):
    """The backend's target for a tensor or a slice of it; MemoryLimitError if it does not fit."""
    least = least_bytes(engine, request, layout)
    return engine.backend.tensor(engine, layout, out, device, least, HostTensor, progress)


def least_bytes(engine, request, layout):
    """Bytes that a tensor or a slice of it needs besides: lists of shell pairs, and a quartet with its workspace."""
    basis, backend = engine.bra_basis, engine.backend
    least = least_block(engine, *request.ranges, derivatives=layout.derivatives)
    return least if backend.dry else backend.with_lists(least, basis, request.lists(basis, layout))


def compile_ahead(engine, request, layouts, progress=None):
    """Compiles the missing kernels for a tensor or for slices of it, of which some are looked at if they are many."""
    layouts = layouts[:: 1 + len(layouts) // SLICES]

    def work(backend):
        dry = engine.with_backend(backend)
        for layout in layouts:
            add_slice(dry, request, layout, slice_target(dry, request, layout))

    part = request, len(layouts)
    engine.backend.compile_ahead("tensor", engine.bra_basis, work, progress, part)


def add_slice(engine, request, layout, target, report=None):
    """Computes a tensor or a slice of it into a target.

    Parameters
    ----------
    engine, request
        As `segmented` returns them.
    layout : TensorLayout
    target
        From `slice_target`.
    report : callable, optional
        Is told how much more of the work for the slice is done, about; 1 is all of it.
    """
    backend = engine.backend
    hermite_bytes = int(HERMITE_SHARE * backend.memory_left())
    pairs = request.work(engine, layout, backend.block_bytes(), hermite_bytes)
    if backend.dry:
        pairs = one_of_each(pairs, lambda pair: (*map(facts, pair[:2]), backend.plan(*pair[:2])))
    log.debug("tensor %s of %d AOs: %d pairs of lists of shell pairs", request.aosym, engine.bra_basis.nao, len(pairs))
    batches = HermiteStore(hermite_bytes, backend).batches
    if report is None:
        for batch in batches(pairs):
            target.take(batch)
        return
    pairs = [pair._replace(seconds=seconds_of(backend, pair)) for pair in pairs]
    whole, left = sum(pair.seconds for pair in pairs), 1.0

    def tell(seconds):
        nonlocal left
        share = min(seconds / whole if whole else 0.0, left)
        left -= share
        report(share)

    for batch in batches(pairs):
        target.take(batch, tell)
    report(left)  # all is done, whatever was predicted


def seconds_of(backend, pair):
    """Predicted seconds of a `ListPair` without bounds; which list is the ket does not matter for a tensor."""
    bra, ket = pair.bra.pairs, pair.ket.pairs
    quartets = len(bra) * (len(bra) + 1) / 2 if pair.same else len(bra) * len(ket)
    return quartets * min(backend.sums.seconds(bra, ket, 1), backend.sums.seconds(ket, bra, 1))
