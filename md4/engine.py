"""The engine: two-electron integrals over lists of shell pairs. Read this first.

The matrix form of the McMurchie-Davidson scheme in the symbols of the paper (arXiv:2307.03452), for every bra pair ab
and ket pair cd:

    1.  H[ab, p], H[cd, q]                       Hermite -> AO matrices of each pair, once
    2.  [0]^(m)                                  of each primitive quartet: Boys function or another operator
    3.  r[t]^(0) from [0]^(m)                    1-index recurrence
    4.  (ab|q] = sum_p H[ab, p] [p|q]            with [p|q] = r[p+q] assembled on the fly
    5.  (ab|cd) = sum_q (ab|q] H[cd, q]          H[cd, q] includes the sign (-1)^|q|

Contraction makes the inner dimensions longer: in step 4 it contains the bra primitives, in step 5 the ket primitives.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from math import prod
from typing import Any

import numpy.typing as npt

from md4 import gpu
from md4.backends import Backend
from md4.errors import ArgumentError
from md4.gpu.devices import chosen
from md4.method.operators import OperatorLike, as_operator, check_order
from md4.plan import chunks
from md4.shells.basis import Basis
from md4.shells.shell_pairs import PRIMITIVE_CUTOFF, check_side, part_facts
from md4.support.arguments import checked_choice, checked_memory, checked_real, checked_stream
from md4.support.display import backend_text, engine_html, prepared_html, prepared_text, size_text
from md4.support.locks import locked
from md4.support.log import log
from md4.support.types import BackendName, DeviceArray, HostArray, Stream

BACKENDS = ("auto", "cuda", "cpu")


class PreparedPairs:
    """Shell pairs as a backend works with them, or a slice of such a list, or the even or odd part of either.

    Attributes
    ----------
    facts : ListFacts
        What all pairs of the list have in common.
    data
        What the backend keeps for the whole list, besides `pairs`.
    whole : PreparedPairs
        The whole list; that of a part is the part of the whole list.
    first, first_prim : int
        Where a slice begins in it, in shell pairs and in primitive pairs.
    npair, nprim : int
        Numbers of shell pairs and of primitive pairs, of the slice if it is one.
    """

    def __init__(self, pairs, data, backend):
        self.data, self.backend, self.facts = data, backend, pairs.facts
        self._pairs, self._whole = pairs, None  # not `self`: a reference to itself would keep the object alive
        self.first = self.first_prim = 0
        self.npair, self.nprim = pairs.npair, pairs.nprim
        self._h, self._parts = {}, {}

    @property
    def whole(self):
        return self if self._whole is None else self._whole

    @property
    def pairs(self):
        """`ShellPairs`, those of a slice made when they are asked for: work on a slice seldom needs them."""
        if self._pairs is None:
            self._pairs = self._whole.pairs[self.first : self.first + self.npair]
        return self._pairs

    def h(self, form):
        """H matrices of the whole list in a form of the backend; kept until dropped. Those of kets carry (-1)^|q|."""
        whole = self.whole
        found = whole._h.get(form)
        if found is None:
            found = whole._h[form] = self.backend.hermite(whole, form)
        return found

    @property
    def h_bytes(self):
        """Bytes of the H matrices that are kept for the whole list."""
        kept = self.whole._h, *(part._h for part in self.whole._parts.values())
        return sum(h.nbytes for forms in kept for h in forms.values())

    def drop(self):
        """Forgets the H matrices of the whole list and of its parts, whose memory goes back to the backend."""
        for this in (self.whole, *self.whole._parts.values()):
            this._h.clear()

    def part(self, axis, parity):
        """The same pairs with the rows and Hermite functions of one parity only; see `md4.method.mirror`.

        It has H matrices of its own, and shares all else. `pairs` are as those of the list itself.
        """
        whole = self.whole
        found = whole._parts.get((axis, parity))
        if found is None:
            found = copy(whole)
            found.facts, found._h, found._parts = part_facts(whole.facts, axis, parity), {}, {}
            whole._parts[axis, parity] = found
        return found[self.first : self.first + self.npair]

    def derived(self, derivatives):
        """The derivatives of the pairs of a whole list, which have H matrices of their own; see `ListFacts`."""
        return PreparedPairs(self.pairs.derived(derivatives), self.data, self.backend)

    def __getitem__(self, piece):
        npair = piece.stop - piece.start
        if npair == self.npair:
            return self
        view, whole = object.__new__(PreparedPairs), self.whole
        view.data, view.backend, view.facts, view._pairs, view._whole = self.data, self.backend, self.facts, None, whole
        first = self.first + piece.start
        view.first, view.npair = first, npair
        start = whole._pairs.start
        view.first_prim = start.item(first)
        view.nprim = start.item(first + npair) - view.first_prim
        return view

    def __len__(self):
        return self.npair

    def __repr__(self):
        return prepared_text(self)

    def _repr_html_(self):
        return prepared_html(self)


def pieces(bra, ket, block, chunk_bra, chunk_ket):
    """Slices of two lists of at most so many pairs, and their parts of a block."""
    if chunk_bra >= bra.npair and chunk_ket >= ket.npair:
        return [(bra, ket, block)]
    every = chunks(bra.npair, ket.npair, chunk_bra, chunk_ket)
    return ((bra[ij], ket[kl], block[ij, kl]) for ij, kl in every)


def check_basis(basis):
    """Returns `basis`; ArgumentError if it is not a `Basis`."""
    if not isinstance(basis, Basis):
        raise ArgumentError(f"a basis must be an md4.Basis, not {type(basis).__name__}; see Basis.from_mol.")
    return basis


def result_shape(bra, ket):
    """The shape of the integrals of two (basis, pairs): as the user sees it, and with all six indices.

    The user sees no index of the unit function.
    """
    sizes = [
        (shell == basis.unit, nctr * basis.ncomp(l))
        for basis, pairs in (bra, ket)
        for shell, (l, nctr) in zip(pairs[0].tolist(), basis.classes[pairs[0]].tolist())
    ]
    counts = len(bra[1]), len(ket[1])
    return (*counts, *(size for is_unit, size in sizes if not is_unit)), (*counts, *(size for _, size in sizes))


def make_backend(name, operator, stream=None, max_memory=None, device=None):
    """The backend object for 'auto', 'cuda' or 'cpu', on a device with a number, or on the current one.

    Raises
    ------
    ArgumentError
        Another name, or a stream or a memory cap that cannot be used.
    DeviceError
        'cuda', but there is no usable GPU.
    """
    checked_choice("backend", name, BACKENDS)
    stream, max_memory = checked_stream(stream), checked_memory(max_memory)
    if name == "auto":
        name = "cuda" if gpu.available() else "cpu"
    if name == "cuda":
        backend = gpu.make_backend(operator, stream, max_memory, device)
    else:
        from md4.cpu.backend import CpuBackend

        backend = CpuBackend(operator, max_memory)
    log.debug("backend %s", backend_text(backend))
    return backend


class Engine:
    """Evaluates (ab|cd) for lists of bra and ket shell pairs.

    Parameters
    ----------
    bra_basis, ket_basis : Basis
        The shells to which the indices of bra and ket pairs refer; `ket_basis` defaults to `bra_basis`.
    operator : Operator, str or (str, float), optional
        Two-electron operator; Coulomb by default. See `md4.method.operators`.
    backend : {'auto', 'cuda', 'cpu'}
        'auto' uses a GPU if there is one.
    stream : optional
        CUDA stream to work on: an integer handle, or a stream of Numba, CuPy or PyTorch. The default is a new stream.
    max_memory : float, optional
        Hard cap in MB on what this engine allocates, results included. The default is what is free.
    device : int, optional
        Number of the GPU; by default the current one of the thread.

    Raises
    ------
    ArgumentError
        Unknown backend or operator.
    DeviceError
        ``backend='cuda'`` without a usable GPU, or a device that does not exist.

    Examples
    --------
    >>> import md4, pyscf
    >>> basis = md4.Basis.from_mol(pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="cc-pvtz"))
    >>> basis.classes[:3]  # (l, nctr): three s shells of hydrogen
    array([[0, 1], [0, 1], [0, 1]])
    >>> engine = md4.Engine(basis)
    >>> engine.compute([[1, 0], [2, 0]], [[14, 14]]).shape  # (ss|ff), twice
    (2, 1, 1, 1, 7, 7)
    >>> long_range = engine.with_operator(("erf", 0.3)).compute([[1, 0], [2, 0]], [[14, 14]])
    """

    def __init__(
        self, bra_basis: Basis, ket_basis: Basis | None = None, operator: OperatorLike | None = None,
        backend: BackendName = "auto", stream: Stream = None, max_memory: float | None = None,
        device: int | None = None,
    ) -> None:  # fmt: skip
        self.bra_basis = bra_basis
        self.ket_basis = bra_basis if ket_basis is None else ket_basis
        for basis in (self.bra_basis, self.ket_basis):
            check_basis(basis)
        self.operator = as_operator("coulomb" if operator is None else operator)
        (device,) = [None] if device is None else chosen([device], backend)
        given: Any = backend
        dry = isinstance(given, Backend)  # of a dry run
        self.backend = given if dry else make_backend(backend, self.operator, stream, max_memory, device)

    @property
    def lock(self):
        """The lock that a call holds, since engines with the same backend share its workspace."""
        return self.backend.lock

    @property
    def stream(self) -> Stream:
        """The CUDA stream on which the engine works, a Numba stream; None on the CPU."""
        return self.backend.stream

    def with_operator(self, operator: OperatorLike) -> "Engine":
        """An engine with another operator. It shares all else with this one, so pairs prepared by one serve both."""
        other = copy(self)
        other.operator = as_operator(operator)
        other.backend = self.backend.with_operator(other.operator)
        return other

    def with_basis(self, basis: Basis) -> "Engine":
        """An engine over another basis, which shares all else with this one."""
        other = copy(self)
        other.bra_basis = other.ket_basis = basis
        return other

    def with_backend(self, backend):
        """An engine with another backend, which shares all else with this one."""
        other = copy(self)
        other.backend = backend
        return other

    @locked
    def compute(
        self, bra_pairs: npt.ArrayLike, ket_pairs: npt.ArrayLike, out: HostArray | DeviceArray | None = None
    ) -> Any:
        """Integrals of all bra pairs with all ket pairs.

        Parameters
        ----------
        bra_pairs, ket_pairs : array_like of int, shape (n, 2) or (n,)
            Shell indices. All pairs of a list belong to one class (l_a, nctr_a, l_b, nctr_b). A list of shape (n,)
            holds single shells of one class (l_a, nctr_a), for integrals over three or two centres.
        out : array, optional
            Array for the result: C-contiguous float64 of the result's shape, a NumPy array for the CPU, any device
            array with ``__cuda_array_interface__`` for the GPU.

        Returns
        -------
        array, shape (n_bra, n_ket, n_a, n_b, n_c, n_d), in Hartree
            The indices are (ij, kl, a, b, c, d), in C order: the integral (ab|cd) of the pairs ij and kl is at
            (((((ij n_ket + kl) n_a + a) n_b + b) n_c + c) n_d + d) * 8 bytes. The AOs of a shell are ordered as
            [contraction][component]. A list of single shells has one such index instead of two: (ab|c) of pairs with
            single shells has the shape (n_bra, n_ket, n_a, n_b, n_c). On the GPU the result is a device array. It is
            ready once the engine's stream has reached that point.

        Raises
        ------
        ArgumentError
            Pair lists or `out` that cannot be used.
        UnsupportedError
            The four angular momenta add up to more than 32.
        MemoryLimitError
            The result and the least workspace exceed `max_memory` or the memory that is free.
        """
        bra, ket = self.checked_lists(bra_pairs, ket_pairs)
        shape, whole = result_shape(bra, ket)
        if out is not None:
            out = self.backend.result(shape, out)
        (bra,), (ket,) = (self.prepare_lists([pairs], basis) for basis, pairs in (bra, ket))
        self.check_memory(bra, ket, 0 if out is not None else 8 * prod(shape))
        out = self.backend.result(shape) if out is None else out
        all_indices: Any = out
        self.evaluate(bra, ket, out if shape == whole else all_indices.reshape(whole))
        bra.drop()
        ket.drop()
        return out

    def checked_lists(self, bra_pairs, ket_pairs):
        """(basis, pairs) of both sides as `check_side` returns them; errors as in `compute`."""
        bra, ket = check_side(self.bra_basis, bra_pairs, "bra pair"), check_side(self.ket_basis, ket_pairs, "ket pair")
        check_order(sum(int(basis.classes[pairs[0], 0].sum()) for basis, pairs in (bra, ket)))
        return bra, ket

    @locked
    def prepare(
        self, pairs: npt.ArrayLike, basis: Basis | None = None, side: str = "pair", cutoff: float = PRIMITIVE_CUTOFF
    ) -> PreparedPairs:
        """Pairs for `evaluate`, without primitive pairs below `cutoff`; see `PreparedPairs` and `shell_pairs`.

        A list of shape (n,) holds single shells.
        """
        basis, pairs = check_side(check_basis(self.bra_basis if basis is None else basis), pairs, side)
        (made,) = self.prepare_lists([pairs], basis, checked_real("cutoff", cutoff, 0))
        return made

    def prepare_lists(
        self, lists: Sequence[npt.ArrayLike], basis: Basis, cutoff: float = PRIMITIVE_CUTOFF
    ) -> Iterator[PreparedPairs]:
        """Yields the `PreparedPairs` of many lists, which takes less time than `prepare` for one after the other.

        The lists are those of `check_pairs` or of `unique_pairs`, and the thread that calls holds the engine's lock.
        """
        for pairs, data in self.backend.prepare(basis, lists, cutoff):
            yield PreparedPairs(pairs, data, self.backend)

    def check_memory(self, bra, ket, result_bytes=0):
        """Raises MemoryLimitError, before anything is allocated, if result and least workspace do not fit."""
        need = self.backend.held_bytes(result_bytes) + self.backend.least_workspace(bra.pairs, ket.pairs)
        what = f"{bra.pairs!r} with {ket.pairs!r}, with {size_text(result_bytes)} of result, needs"
        self.backend.check_fits(need, what, "raise max_memory, or give an Engine shorter pair lists")

    @locked
    def evaluate(self, bra: PreparedPairs, ket: PreparedPairs, out: Any) -> None:
        """Integrals of prepared pairs into `out`, by `run_steps`."""
        self.run_steps(bra, ket, self.backend.block(out))

    def run_steps(self, bra, ket, block):
        """Steps 1 to 5 for prepared pairs, in chunks that suit the backend's memory, into a `md4.backends.Block`.

        The plan says by which path (`md4.backends.Path`), and which side is transformed first. A path that merges
        steps does all of 2 to 5 itself. [p|q] = r[p+q] is never stored on a GPU: step 4 gathers it from r. The steps
        are told the block, which may ask for some of its quartets only. The thread that calls holds the engine's lock.
        """
        check_order(bra.facts.l + ket.facts.l)
        steps = self.backend
        plan = steps.plan(bra, ket, block)
        if plan.swap:
            bra, ket, block = ket, bra, block.swapped()
        path = plan.path
        H_ab, H_cd = bra.h(plan.bra_form), ket.h(plan.ket_form)  # 1
        for ab, cd, abcd in pieces(bra, ket, block, *steps.chunk_pairs(plan, bra, ket)):
            if path.merges_steps:
                path.run(steps, H_ab, H_cd, ab, cd, abcd)  # 2 to 5
                continue
            r = steps.r(ab, cd, abcd)  # 2 and 3
            abq = path.transform_bra(steps, H_ab, ab, cd, r, abcd)  # 4
            path.transform_ket(steps, abq, H_cd, ab, cd, abcd)  # 5

    def __repr__(self):
        return f"Engine({self.bra_basis!r}, {self.ket_basis!r}, {self.operator!r}, backend={self.backend.name!r})"

    def _repr_html_(self):
        return engine_html(self)
