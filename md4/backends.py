"""What `md4.engine` and `md4.contract` ask of a backend: the protocol that `md4.cpu` and `md4.gpu` implement.

Arrays are those of the backend: NumPy arrays on the CPU, device memory on the GPU, where work is asynchronous on the
backend's stream. A backend's memory is its own: what a method returns may be used until the next call only where that
is said; else it lives as long as someone refers to it.
"""

from typing import Protocol, runtime_checkable


class Block(Protocol):
    """Integrals (ij, kl, ab, cd) of bra pairs with ket pairs, of any strides: a view of a result or scratch."""

    def swapped(self):
        """The same memory with bra and ket exchanged: (kl, ij, cd, ab)."""

    def __getitem__(self, key):
        """The part of two slices, of bra pairs and of ket pairs."""


class Path(Protocol):
    """A way through steps 2 to 5 for two lists; it keeps nothing, and serves all engines.

    `steps` is the backend, `ab` and `cd` are slices of `PreparedPairs`, `H_ab` and `H_cd` the matrices of the whole
    lists as `Backend.hermite` made them in the forms of the plan.
    """

    name: str
    # Whether one kernel does several steps: then there is `run`, else there are `transform_bra` and `transform_ket`.
    merges_steps: bool

    def transform_bra(self, steps, H_ab, ab, cd, r):
        """Step 4: (ab|q] = sum_p H[ab, p] r[p+q]; it may use `r` up, and is used up by `transform_ket`."""

    def transform_ket(self, steps, abq, H_cd, ab, cd, out):
        """Step 5: (ab|cd) = sum_q (ab|q] H[cd, q], written to the block `out`."""

    def run(self, steps, H_ab, H_cd, ab, cd, out):
        """Steps 2 to 5 into the block `out`."""


class BlockTarget(Protocol):
    """What takes blocks of integrals: an AO tensor, or sums of J and K."""

    def add(self, block, bra, ket, basis, triangle):
        """Takes a block, and forgets it.

        Parameters
        ----------
        block
            What `Backend.scratch` gave and `Engine.evaluate` filled, shape (n_bra, n_ket, n_a, n_b, n_c, n_d).
        bra, ket : PreparedPairs
            Its lists.
        basis : Basis
        triangle : bool
            Bra and ket are slices of one list, and each of its quartets counts once.
        """

    def result(self):
        """What has been summed up, for the caller to keep."""


class CoulombTarget(Protocol):
    """J alone, by way of the Hermite basis; see `md4.method.hermite_coulomb`."""

    def load(self, prepared):
        """Makes the Hermite densities D_q of a whole list."""

    def add(self, ab, cd, triangle):
        """Adds the potentials of two slices of loaded lists to each other."""

    def collect(self, prepared):
        """Transforms what a whole list has summed up, and forgets it."""

    def result(self):
        """Y, shape (n, nao, nao), a NumPy array for the caller to keep."""


class Sums(Protocol):
    """How a backend makes J and K."""

    # Shells of a class share lists up to this many whatever their number of primitives; see `shell_kinds`.
    mixed_shells: int
    # Most bytes of a block of integrals.
    block_bytes: int
    # Copies of J and K that a build keeps.
    copies: int

    def swapped(self, bra, ket):
        """Whether two lists should change places before their integrals are summed."""

    def digest(self, densities, twice):
        """A `BlockTarget` for X and Y of `md4.method.digestion`.

        `densities`, shape (n_k, nao, nao), and `twice` = D + D^T, shape (n_j, nao, nao), are NumPy arrays that it
        copies; so are its results X and Y.
        """

    def coulomb(self, basis, twice):
        """A `CoulombTarget` for D + D^T, shape (n, nao, nao)."""

    def coulomb_bytes(self, pairs):
        """Bytes that the `CoulombTarget` keeps of a list for one density matrix."""


class Bounds(Protocol):
    """Schwarz bounds of a pair list."""

    def add(self, block, first):
        """Takes the block of pairs from `first` on with themselves, and forgets it."""

    def result(self):
        """R_ab, shape (npair,), a NumPy array for the caller to keep."""


@runtime_checkable
class Backend(Protocol):
    """Memory, the steps of the method, and targets, on one device.

    Attributes
    ----------
    name : {'cuda', 'cpu'}
    operator : md4.method.operators.Operator
    lock
        Held by the one thread that uses the backend, and by those that share its memory.
    stream
        The CUDA stream on which it works; None on the CPU.
    sums : Sums
    """

    name: str
    operator: object
    lock: object
    stream: object
    sums: Sums

    def with_operator(self, operator):
        """The same backend for another operator; memory and what is known of pairs are shared."""

    def facts(self):
        """What there is to show of it: a list of (name, value); asks the device nothing."""

    def memory_left(self):
        """Bytes that may still be allocated."""

    def least_workspace(self, bra, ket):
        """Bytes that one bra pair with one ket pair of two `ShellPairs` takes, H matrices of both lists included."""

    def hermite_bytes(self, pairs):
        """Bytes of the H matrices of `ShellPairs` in one form, at most."""

    def compile_ahead(self, basis, use, progress):
        """Compiles what integrals ('tensor'), J ('j'), or J and K (`digest_flags`) of a basis need and lack."""

    def prepare(self, basis, pairs, cutoff):
        """(`ShellPairs`, what the backend keeps beside them) of a checked list of shell pairs, shape (npair, 2)."""

    def plan(self, bra, ket):
        """The `Plan` for two `ShellPairs`."""

    def chunk_pairs(self, plan, bra, ket):
        """Numbers of bra and of ket pairs of a chunk that suits memory and caches."""

    def hermite(self, prepared, form):
        """Step 1: H[ab, p] of all primitive pairs of a whole list, in a form of the plan; its reader owns it."""

    def r(self, ab, cd):
        """Steps 2 and 3: r[bra primitive, ket primitive, t], t up to l_ab + l_cd; good until the next call.

        One kernel makes [0]^(m) and r: between the steps is nothing that would be worth storing.
        """

    def scratch(self, shape):
        """Room for one block of six indices; gone with its last reference."""

    def block(self, out):
        """A result, or a scratch, of six indices as a `Block`."""

    def result(self, shape, out=None):
        """An array for a caller to keep, or the caller's `out` if it fits; ArgumentError if it does not."""

    def tensor(self, layout, out, device, least_block, host_tensor):
        """A `BlockTarget` for an AO tensor, on the device or on the host.

        Parameters
        ----------
        layout : md4.method.scatter.TensorLayout
        out, device
            As in `md4.int2e`.
        least_block : int
            Bytes that are needed beside the tensor.
        host_tensor : callable
            (layout, array) -> `BlockTarget` of NumPy blocks, for a tensor that the device has no room for.
        """

    def bounds(self, count):
        """`Bounds` for so many pairs."""

    def fetch(self, array):
        """A device array of another library as a NumPy array."""

    def send(self, array):
        """A NumPy array as an array of the device, for a caller to keep."""
