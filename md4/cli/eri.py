"""The command `md4 eri`: the tensor in memory, or row by row into a file, by one process or by the ranks of MPI."""

from contextlib import ExitStack
from math import prod, sqrt
from time import perf_counter

import md4
from md4.cli.attributes import attributes_of
from md4.cli.ending import writing
from md4.cli.options import chosen_devices, memory_in_options
from md4.cli.tensor_files import DATASET, tensor_file
from md4.contract.ranks import ranks_of
from md4.errors import ArgumentError
from md4.method.scatter import tensor_shape
from md4.pyscf.geometry import load_molecule
from md4.support.display import size_text
from md4.support.environment import way_to_extra
from md4.support.memory import host_memory

# Share of the memory that may be used beyond which a tensor goes into its file row by row.
LARGE = 0.5
# Numbers that are read at once for the norm.
AT_ONCE = 1 << 23


def run_eri(args):
    """Computes the tensor, prints its size and norm, and writes it if a file is given."""
    args.aosym = args.aosym or "s1"
    comm = world() if args.mpi else None
    ranks = ranks_of(comm)
    return ranks.together(lambda: eri(args, comm, ranks), "md4 eri")


def world():
    """The communicator of all ranks that mpiexec has started."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ArgumentError(f"--mpi needs mpi4py and an MPI library ({error}); {way_to_extra('mpi')}.") from error
    return MPI.COMM_WORLD


def eri(args, comm, ranks):
    """As `run_eri`; rank 0 prints."""
    mol = load_molecule(args.geometry, args.basis, args.charge, args.spin, args.cart)
    shape = tensor_shape(args.aosym, (mol.nao,) * 4)
    file = ranks.first(lambda: output(args, 8 * prod(shape), {DATASET: attributes_of(mol, args, args.aosym)}))
    if ranks.rank == 0:
        print(f"{mol.natm} atoms, {mol.nbas} shells, {mol.nao} AOs in {args.basis}", flush=True)
    with memory_in_options(args, smaller(args)):
        seconds, sums = tensor_and_sums(mol, shape, file, args, comm, ranks)
    squares, total = (sum(parts) for parts in zip(*ranks.gather(sums)))
    if ranks.rank == 0:
        print(f"eri {args.aosym} {shape} float64: {seconds:.2f} s, {size_text(8 * prod(shape))}")
        print(f"norm {sqrt(squares):.12e}, sum {total:.12e}")
        if file:
            print(f"wrote {args.output}")
    return 0


def smaller(args):
    """The options by which a tensor takes less memory."""
    higher = {"s1": ["--aosym s4 or s8"], "s4": ["--aosym s8"]}.get(args.aosym, [])
    return [*higher, *([] if args.output else ["-o FILE, to which a large tensor goes row by row"])]


def tensor_and_sums(mol, shape, file, args, comm, ranks):
    """The seconds and the sums of a tensor, or of this rank's rows, which go to the file if there is one."""
    start = perf_counter()
    options = {
        "aosym": args.aosym, "omega": args.omega, "backend": args.backend, "max_memory": args.max_memory,
        "devices": chosen_devices(args.devices), "comm": comm,
    }  # fmt: skip
    if file is None or (comm is None and 8 * prod(shape) <= LARGE * memory(args)):
        found = md4.int2e(mol, **options)
        rows = found if comm is None else found.array
        seconds = perf_counter() - start
        sums = sums_of(rows, range(len(rows)))
        if file is not None:
            with writing(args.output):
                file.write(rows)
    else:
        with writing(args.output), ExitStack() as stack:
            place = ranks.first(lambda: stack.enter_context(file.begun({DATASET: shape})))
            out = ranks.together(lambda: stack.enter_context(file.opened(place, comm)))
            md4.int2e(mol, out=out, **options)
            seconds = perf_counter() - start
            sums = sums_of(out, range(shape[0] * ranks.rank // ranks.size, shape[0] * (ranks.rank + 1) // ranks.size))
    return seconds, sums


def memory(args):
    """Bytes of host memory that may be used."""
    return min(host_memory(), float("inf") if args.max_memory is None else 1e6 * args.max_memory)


def output(args, size, attributes):
    """The file for tensors of `size` bytes, or None; checks that it can be written, and prints what is replaced.

    `attributes` are those of each tensor by name.
    """
    if args.output is None:
        return None
    file = tensor_file(args.output, size, args.mpi, attributes)
    if file.replaces:
        print(f"replaces {file.replaces}")
    return file


def sums_of(tensor, rows):
    """The sum of squares and the sum of some rows of a tensor, which are read piece by piece."""
    squares, total, step = 0.0, 0.0, max(1, AT_ONCE // prod(tensor.shape[1:]))
    for first in range(rows.start, rows.stop, step):
        piece = tensor[first : min(first + step, rows.stop)].reshape(-1)
        squares, total = squares + float(piece @ piece), total + float(piece.sum())
    return squares, total
