"""The protocol of a backend: what `md4.engine` and `md4.contract` use, and `md4.cpu` and `md4.gpu` implement.

Arrays are those of the backend: NumPy arrays on the CPU, and device memory on the GPU, where work is asynchronous on
the backend's stream. What a method returns lives as long as something refers to it. Where it is said, it may be used
only until the next call, because the backend uses the memory again.
"""

from typing import Protocol, runtime_checkable


class Block(Protocol):
    """Integrals (ij, kl, ab, cd) of bra pairs with ket pairs, of any strides: a view of a result or of scratch."""

    def swapped(self):
        """The same memory with bra and ket exchanged: (kl, ij, cd, ab)."""

    def __getitem__(self, key):
        """The part that belongs to two slices, one of bra pairs and one of ket pairs."""


class Path(Protocol):
    """A way to do steps 2 to 5 for two lists. It has no state, and all engines share it.

    `steps` is the backend, `ab` and `cd` are slices of `PreparedPairs`, `H_ab` and `H_cd` the matrices of the whole
    lists as `Backend.hermite` made them in the forms of the plan. What belongs to a quartet that the block does not ask
    for may be anything, in r, in (ab|q] and in the block.
    """

    name: str
    # Whether the engine calls `run` for steps 2 to 5, which may get r from `Backend.r`. Else the path has
    # `transform_bra` and `transform_ket`.
    merges_steps: bool

    def transform_bra(self, steps, H_ab, ab, cd, r, out):
        """Step 4: (ab|q] = sum_p H[ab, p] r[p+q]. The result is valid until the next call."""

    def transform_ket(self, steps, abq, H_cd, ab, cd, out):
        """Step 5: (ab|cd) = sum_q (ab|q] H[cd, q], written to the block `out`."""

    def run(self, steps, H_ab, H_cd, ab, cd, out):
        """Steps 2 to 5 into the block `out`."""


class Target(Protocol):
    """What takes integrals: an AO tensor, or sums of J and K (`SumsTarget`). How it makes them is its own business."""

    def take(self, pairs, report=None):
        """Takes the integrals of all quartets, or of those that survive.

        Parameters
        ----------
        pairs : list of md4.plan.ListPair
            The H matrices of all their lists have room at the same time.
        report : callable, optional
            Is told how much more is done, in predicted seconds (`Sums.seconds`).
        """

    def result(self):
        """The tensor or the sums, which belong to the caller."""


class SumsTarget(Target, Protocol):
    """Sums of J and K, or of J alone, of one build.

    Where there is a `Backend.place`, it has `add_up(group)`: the sums become those of all members of the group.
    """

    def begin(self, lists, keeps_all):
        """Called once, before the first `take`.

        Parameters
        ----------
        lists : iterable of PreparedPairs
            All lists; the H matrices of one may be dropped when the next one is asked for.
        keeps_all : bool
            Whether none is dropped between `begin` and `end`, as there is room for all.
        """

    def end(self, lists, fetched=True):
        """Called once, after the last `take`; waits for the device.

        Parameters
        ----------
        lists : iterable of PreparedPairs
            As in `begin`.
        fetched : bool
            Whether `result` will be asked for.

        Returns
        -------
        computed, wanted : int
            As in `md4.contract.screening.Statistics`.
        """


class Sums(Protocol):
    """The part of a backend that makes J and K."""

    # Classes of at most this many shells are not split by their number of primitives; see `shell_kinds`.
    mixed_shells: int
    # Number of copies of J and K that a build keeps.
    copies: int
    # Whether it makes gradients, and whether its targets ask for `md4.contract.survivors.Survivors.bounded`.
    makes_forces: bool
    takes_bounds: bool

    def copy_bytes(self, widest):
        """Bytes that each copy takes besides J and K, for shells of at most `widest` functions."""

    def gains_by_plane(self, basis):
        """Whether builds take less time if all centres have the same x, y or z, so that planar molecules are turned."""

    def bound_step(self, functions):
        """s, where pairs of `functions` ab may be sorted by powers of 2^s that their bounds reach, and then by shells.

        0 where they are to be sorted by their bounds themselves.
        """

    def seconds(self, bra, ket, matrices, axis=None):
        """Predicted time of a quartet of two lists in J and K, for a number of density matrices.

        `axis` is `Basis.mirror_axis`.
        """

    def coulomb_seconds(self, bra, ket, matrices, axis=None):
        """Predicted time of a quartet of two lists in J alone."""

    def swapped(self, bra, ket):
        """Whether two lists change places before their integrals are summed."""

    def coulomb_swapped(self, bra, ket):
        """Whether two lists change places before J alone is made of them."""

    # None, or a function of two lists: all pairs of lists of the same key are one `ListPair` for J alone.
    coulomb_key: object

    def digest(self, engine, lists, survivors, densities, twice):
        """A `SumsTarget` for X and Y of `md4.method.digestion`, a pair of NumPy arrays.

        Parameters
        ----------
        engine : md4.Engine
            Its backend is this one; its `run_steps` makes blocks of integrals.
        lists : list of PreparedPairs
            All lists, in the order of the rule's tables.
        survivors : md4.contract.survivors.Survivors
            What is known of each `ListPair`, by its `number`.
        densities, twice : ndarray, shapes (n_k, nao, nao) and (n_j, nao, nao)
            D, and D + D^T.
        """

    def coulomb(self, engine, lists, survivors, twice):
        """As `digest`, for Y alone, a NumPy array."""

    def coulomb_bytes(self, pairs):
        """Bytes that the target of J alone keeps of a list for one density matrix."""


class Bounds(Protocol):
    """Schwarz bounds of the pairs of some lists, each of which has a place."""

    def take(self, prepared, first):
        """Takes a prepared list, whose first pair has the place `first`."""

    def result(self):
        """R_ab, shape (count,), a NumPy array for the caller to keep; 0 where nothing was taken."""


class Algebra(Protocol):
    """Dense linear algebra on the device of a backend, for density fitting.

    All arrays are float64, and C-contiguous where nothing else is said. A method is called within ``with working():``.

    Attributes
    ----------
    xp
        The array library: NumPy, or CuPy, which has the same functions.
    has_host_memory : bool
        Whether the memory of the host is another than that of the device.
    has_groups : bool
        Whether there is `add_groups`; products serve where not.
    block_bytes, chunk_bytes : int
        Bytes that products should work on at a time, and those of integrals that should be made at a time.
    """

    xp: object
    has_host_memory: bool
    has_groups: bool
    block_bytes: int
    chunk_bytes: int

    def working(self):
        """A context in which the device and the backend's stream are those of `xp`."""

    def memory_left(self):
        """Bytes that may still be allocated on the device."""

    def host_left(self):
        """Bytes that may still be allocated on the host."""

    def check_fits(self, need, what, remedy="raise max_memory"):
        """As `Backend.check_fits`."""

    def held_bytes(self, nbytes):
        """Bytes that an array of so many bytes takes on the device."""

    def empty(self, shape):
        """An array of `xp` that counts against the cap as long as it is there."""

    def host_table(self, shape):
        """A NumPy array from which copies to the device are fast; it counts against the cap."""

    def send(self, array):
        """A NumPy array of any type as an array of `xp`."""

    def wrapped(self, array):
        """An array of the backend as an array of `xp`, which shares its memory."""

    def fetch(self, array, out=None):
        """An array of `xp` on the host, in `out` if it is given; waits for it."""

    def later(self, array, out=None):
        """A function that fetches `array` as it is now, and does not wait for work that is started in between.

        It may write to `out`, a C-contiguous NumPy array, from now on, and has its values there.
        """

    def taken(self, array):
        """An array of another device's `Algebra`, whose work on it is done, on this device; it is only read."""

    def put_columns(self, part, table, first):
        """Copies `part`, shape (rows, n), to columns first to first + n of a host table, beside what is done next.

        Before `part` is written again, and before the table is read, `await_copies` is called.
        """

    def await_copies(self):
        """What is done next comes after the copies that were started."""

    def row_blocks(self, table, blocks):
        """Yields (first, rows of a host table on the device) of blocks (first, last); valid until the next one."""

    def sorted_rows(self, array, places, out):
        """out[n] = array[places[n]]"""

    def gather(self, table, columns, out):
        """out[n, ...] = table[n, columns[...]]"""

    def unpack(self, table, places, out, rows=None):
        """out[n, i, j] = out[n, j, i] = table[n, places[i, j]] for i >= j; returns out[:, :, :nao].

        With `rows`, an array of int64, it is row rows[n] of the table.
        `out` has the shape (n, nao, matrix_width(nao)). `places`, (nao, nao) of int64, holds the same for j, i or
        another column that is equal.
        """

    def pack(self, squares, columns, weights, out, scales=None, row=None, add=False):
        """out[n, c] = weights[c] squares[i, n, j] + scales[n] row[c] of columns[c] = i nao + j or j nao + i, i >= j.

        The second term is there if `scales` and `row` are given. With `add`, the sum is added to `out`. `squares` has
        the shape (nao, n, nao). Returns `out`.
        """

    def matrix_width(self, nao):
        """Numbers from one row to the next of the matrices of `unpack`; what is behind the columns is not written."""

    def unpack_and_sum(self, table, places, out, density):
        """As `unpack`, and sum_ij density[i, j] out[n, i, j] for each n. `density`, (nao, nao), is symmetric."""

    def half_transform(self, table, places, orbitals, out):
        """out[n, i, o] = sum_j table[n, places[i, j]] orbitals[j, o], where `takes_rows`; returns `out`.

        `places`, (nao, nao), is symmetric, and `out` a view of any strides.
        """

    def takes_rows(self, nao, count):
        """Whether `half_transform` takes so many AOs and orbitals: matrices and products are not faster."""

    def add_groups(self, array, rows, factors, sources, targets, out):
        """out[targets[n], :, :width] += factors[sources[n]] array[rows[n]]^T for all n, where `has_groups`.

        Parameters
        ----------
        array, factors : array, shapes (m, width) and (nao, count)
        rows, sources, targets : ndarray of int, shape (n,)
            On the host; the targets ascend.
        out : array, shape (nao, count, at least width)
        """

    def sums_bytes(self, nao):
        """Bytes of workspace that `unpack_and_sum` needs for a row of the table."""

    def gather_to_host(self, table, columns, out):
        """As `gather`, into a NumPy array."""

    def product(self, a, b, out, factor=1.0, add=False):
        """out = factor a b, or out += factor a b; returns `out`.

        The rows or the columns of `a` and `b` are contiguous, the rows of `out` are; they may be parts of matrices.
        """

    def add_times(self, matrix, vector, out):
        """out += matrix vector; returns `out`. The rows or the columns of the matrix are contiguous."""

    def cholesky(self, matrix):
        """L of L L^T, with zeros above the diagonal; None if the matrix is not positive definite."""

    def eigh(self, matrix):
        """Eigenvalues in ascending order, and eigenvectors as columns, of a symmetric matrix."""

    def svd(self, matrix):
        """U, s and V^T, with s in descending order."""

    def lower_solver(self, lower):
        """A function (array, transposed=False) that overwrites `array` with L^-1, or L^-T, times it, and returns it."""


@runtime_checkable
class Backend(Protocol):
    """Memory, the steps of the method, and targets, on one device.

    Attributes
    ----------
    name : {'cuda', 'cpu'}
    operator : md4.method.operators.Operator
    lock
        The lock that a thread holds while it uses the backend or another one that shares its memory.
    stream
        The CUDA stream on which it works; None on the CPU.
    sums : Sums
    forms : int
        Largest number of forms in which H of a list is kept at the same time, those of its parts included.
    dry : bool
        Whether nothing is computed, and kernels are only noted (`md4.gpu.dry_run`).
    """

    name: str
    operator: object
    lock: object
    stream: object
    sums: Sums
    forms: int
    dry: bool

    def with_operator(self, operator):
        """The same backend for another operator. Memory and pair data are shared."""

    def facts(self):
        """What a display of the backend shows, as a list of (name, value). It does not access the device."""

    def division_facts(self):
        """What must be the same for all that divide work among them (`md4.contract.work`), as a short text."""

    def algebra(self):
        """The `Algebra` of the device; DeviceError where a package for it is missing."""

    def rehearse_rows(self, nao, count):
        """Asks for the kernels by which an `Algebra` makes matrices of rows of pairs, or products with orbitals."""

    def rehearse_pack(self):
        """Asks for the kernel of `Algebra.pack`."""

    def mark(self):
        """A function that waits until all work so far is done."""

    def place(self):
        """What tells the device from all others, if it can add up sums with them by itself; else None.

        Then there are `new_group()`, the identity of a new group of devices; `join(identity, number, size)`, by which
        all devices become its members at the same time; and `add_up(group)` of the targets of J and K.
        """

    def memory_left(self):
        """Bytes that may still be allocated."""

    def held_bytes(self, nbytes):
        """Bytes that an array of so many bytes takes."""

    def least_workspace(self, bra, ket):
        """Bytes for one bra pair with one ket pair of two `ShellPairs`, including the H matrices of both lists."""

    def check_fits(self, need, what, remedy="raise max_memory"):
        """MemoryLimitError that says `what` takes so much, and a remedy, if `need` bytes more do not fit."""

    def with_lists(self, least, basis, lists):
        """Bytes of a least workspace, and of checked lists of shell pairs where they count while they are made."""

    def hermite_bytes(self, pairs):
        """Largest number of bytes of the H matrices of `ShellPairs` in one form."""

    def compile_ahead(self, use, basis, work, progress=None, part=None):
        """Compiles the missing kernels for some work.

        Parameters
        ----------
        use : {'tensor', 'j', 'forces', 'fitting', 'matrices'} or tuple
            Integrals, J alone, forces, those of density fitting, J and K of derivatives, or the
            `md4.method.digestion.digest_flags` of J and K.
        basis : Basis
        work : callable
            work(backend) does the work, or the same work in little, with the backend that it is given. A GPU is left
            out of it: the backend only notes the kernels that it would launch (`md4.gpu.dry_run`).
        progress : bool, optional
            As in `md4.int2e`.
        part : hashable, optional
            What of the basis the work needs; by default all. The same work is looked at once.
        """

    def prepare(self, basis, lists, cutoff):
        """Yields (`ShellPairs`, data of the backend) of checked lists of shell pairs, each of shape (npair, 2)."""

    def plan(self, bra, ket, block=None):
        """The `Plan` for two `PreparedPairs`, whose integrals go to `block`, by default one of contiguous quartets."""

    def chunk_pairs(self, plan, bra, ket):
        """Numbers of bra and of ket pairs of a chunk of two `PreparedPairs`, chosen for memory and caches."""

    def hermite(self, prepared, form):
        """Step 1: H[ab, p] of all primitive pairs of a whole list, in a form of the plan. It belongs to the caller."""

    def r(self, ab, cd, block=None):
        """Steps 2 and 3: r[bra primitive, ket primitive, t], t up to l_ab + l_cd; valid until the next call.

        Quartets beyond the limits of a `block` need not be computed.

        Only a backend whose paths, or the engine for them, keep r in memory has it. One kernel makes [0]^(m) and r, so
        that [0]^(m) need not be stored.
        """

    def scratch(self, shape):
        """Memory for one block of six indices; valid until the next call."""

    def block(self, out):
        """A result, or scratch memory, of six indices as a `Block`."""

    def matrix_block(self, out, row, column, shape):
        """A part of a matrix as a `Block`: rows are (kl, cd), columns (ij, ab), `shape` is that of the six indices.

        `out` is C-contiguous; `row` and `column` are those of the first element.
        """

    def fill_matrix(self, engine, out, pairs, columns, rows):
        """Makes the integrals of many `ListPair` as parts of a matrix, as those of `matrix_block`.

        The dicts `columns` and `rows` hold the first column of each bra list and the first row of each ket list;
        `engine` as in `Sums.digest`.
        """

    def result(self, shape, out=None):
        """A new array that belongs to the caller, or the caller's `out`; ArgumentError if `out` cannot be used."""

    def block_bytes(self):
        """Most bytes of the integrals of a `ListPair` of a tensor, for the memory that is free now."""

    def tensor(self, engine, layout, out, device, least_block, host_tensor, progress=None):
        """A `Target` for an AO tensor, on the device or on the host.

        Parameters
        ----------
        engine : md4.Engine
            As in `Sums.digest`.
        layout : md4.method.scatter.TensorLayout
        out, device
            As in `md4.int2e`.
        least_block : int
            Bytes that are needed in addition to the tensor.
        host_tensor : callable
            (layout, array) -> `md4.cpu.targets.HostTensor`, which places NumPy blocks, for a tensor that does not fit
            on the device.
        progress : bool, optional
            As in `md4.int2e`, for what is compiled before.
        """

    def host_array(self, layout, least_block):
        """A NumPy array for a tensor, which belongs to the caller and counts against the cap as long as it is there.

        MemoryLimitError if it does not fit together with `least_block` bytes.
        """

    def watch(self, array):
        """Counts a NumPy array against the cap as long as it is there; returns it."""

    def bounds(self, engine, count, room):
        """`Bounds` for `count` pairs, and blocks of at most `room` bytes; `engine` as in `Sums.digest`."""

    def fetch(self, array):
        """A device array of another library as a NumPy array."""

    def send(self, array):
        """A NumPy array as an array of the device, which belongs to the caller."""
