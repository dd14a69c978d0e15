"""The command `md4 eri --df`: the integrals (ij|P) and (P|Q) of density fitting, the first ones piece by piece."""

from contextlib import ExitStack, nullcontext
from math import prod, sqrt
from time import perf_counter

import md4
from md4.cli.attributes import attributes_of
from md4.cli.ending import HeldSignals, writing
from md4.cli.eri import LARGE, memory, output, sums_of
from md4.cli.options import memory_in_options
from md4.cli.tensor_files import write_rows
from md4.method.scatter import THREE_CENTRE, TWO_CENTRE, first_row, tensor_shape
from md4.pyscf.geometry import load_auxiliary, load_molecule
from md4.support.display import size_text


def run_fitting(args):
    """Computes both tensors, prints their sizes and norms, and writes them if a file is given."""
    mol = load_molecule(args.geometry, args.basis, args.charge, args.spin, args.cart)
    auxmol, name = load_auxiliary(mol, None if args.df is True else args.df)
    args.aosym = args.aosym or "s2ij"
    counts = mol.nao, mol.nao, auxmol.nao, 1
    shapes = {"int3c2e": tensor_shape(THREE_CENTRE[args.aosym], counts)}
    shapes["int2c2e"] = tensor_shape(TWO_CENTRE, (auxmol.nao, 1, auxmol.nao, 1))
    symmetries = {"int3c2e": args.aosym, "int2c2e": "s1"}
    attributes = {tensor: attributes_of(mol, args, aosym, name) for tensor, aosym in symmetries.items()}
    file = output(args, sum(8 * prod(shape) for shape in shapes.values()), attributes)
    print(f"{mol.natm} atoms, {mol.nbas} shells, {mol.nao} AOs in {args.basis}")
    print(f"{auxmol.nbas} shells, {auxmol.nao} functions in {name}", flush=True)
    with memory_in_options(args), ExitStack() as stack:
        if file is not None:
            stack.enter_context(writing(args.output))
            place = stack.enter_context(file.begun(shapes))
        for tensor, shape in shapes.items():
            pieces = three_centres(mol, auxmol, args) if tensor == "int3c2e" else two_centres(auxmol, args)
            with nullcontext() if file is None else file.opened(place, tensor=tensor) as out:
                squares, total, seconds = taken(pieces, out)
            symmetry = f" {args.aosym}" if tensor == "int3c2e" else ""
            print(f"{tensor}{symmetry} {shape} float64: {seconds:.2f} s, {size_text(8 * prod(shape))}")
            print(f"norm {sqrt(squares):.12e}, sum {total:.12e}", flush=True)
    if file is not None:
        print(f"wrote {', '.join(file.names)}")
    return 0


def three_centres(mol, auxmol, args):
    """Yields (ij|P) as (first row, rows), some shells i at a time."""
    symmetry = THREE_CENTRE[args.aosym]
    rows = [first_row(symmetry, int(ao)) for ao in mol.ao_loc]
    width = 8 * prod(tensor_shape(symmetry, (mol.nao, mol.nao, auxmol.nao, 1))[1:])
    for first, last in row_ranges([width * row for row in rows], LARGE * memory(args)):
        shells = first, last, 0, last if args.aosym == "s2ij" else mol.nbas, 0, auxmol.nbas
        yield rows[first], md4.int3c2e(mol, auxmol, args.aosym, shls_slice=shells, **options(args))


def row_ranges(ends, most):
    """Yields ranges (first, last) that together cover all items, each with at most `most` bytes, or of one item.

    `ends` are the bytes before each item, followed by the bytes of all.
    """
    first = 0
    for last in range(1, len(ends)):
        if last == len(ends) - 1 or ends[last + 1] - ends[first] > most:
            yield first, last
            first = last


def two_centres(auxmol, args):
    """Yields (P|Q) as (first row, rows)."""
    yield 0, md4.int2c2e(auxmol, **options(args))


def options(args):
    """The arguments that both tensors share."""
    return {"omega": args.omega, "backend": args.backend, "max_memory": args.max_memory}


def taken(pieces, out):
    """The sum of squares, the sum, and the seconds of a tensor, whose pieces are written to `out` if it is not None."""
    squares, total, seconds, start = 0.0, 0.0, 0.0, perf_counter()
    for row, piece in pieces:
        seconds += perf_counter() - start
        more, sums = sums_of(piece, range(len(piece)))
        squares, total = squares + more, total + sums
        if out is not None:
            with HeldSignals() as signals:
                write_rows(out, piece, signals, row)
        start = perf_counter()
    return squares, total, seconds
