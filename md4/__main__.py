"""The command line: `md4 eri`, `md4 validate`, `md4 warmup`, `md4 info`; also `python -m md4`."""

import argparse
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

from md4.errors import ArgumentError, MD4Error


def main(argv=None):
    """Run one command; the exit status is 0, 1 where a validation fails, 2 on a usage error."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except MD4Error as error:
        print(f"md4: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def parser():
    """The argument parser with its commands."""
    top = argparse.ArgumentParser(prog="md4", description="Four-centre two-electron integrals on GPU and CPU.")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    add_eri(commands.add_parser("eri", help="compute the tensor of integrals of a molecule"))
    add_validate(commands.add_parser("validate", help="compare with PySCF's libcint, class by class"))
    add_warmup(commands.add_parser("warmup", help="compile the GPU's kernels ahead of their first use"))
    info = commands.add_parser("info", help="show the GPU, versions, and compiled kernels")
    info.set_defaults(run=run_info)
    return top


def add_eri(command):
    add_molecule(command)
    command.add_argument("--aosym", default="s1", metavar="SYM", help="s1 (default), s4 or s8, as in PySCF")
    command.add_argument("-o", "--output", metavar="FILE", help="write the tensor to FILE, .h5 (dataset 'eri') or .npy")
    command.set_defaults(run=run_eri)


def add_validate(command):
    add_molecule(command)
    command.add_argument("--tolerance", type=float, default=1e-12, help="of a quartet's largest element (%(default)s)")
    command.add_argument("--abs-tolerance", type=float, default=1e-10, help="absolute (%(default)s)")
    command.add_argument(
        "--max-quartets", type=int, default=1000, metavar="N", help="sample of a class that has more (%(default)s)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    command.add_argument("--report", metavar="FILE", help="check more, and write a page on it to FILE, .html")
    command.set_defaults(run=run_validate)


def add_warmup(command):
    command.add_argument("geometry", nargs="?", help="with --basis: what this molecule needs, instead of --lmax")
    command.add_argument("--basis", help="basis set name, resolved as PySCF does")
    command.add_argument("--lmax", type=int, default=4, metavar="L", help="classes up to (ll|ll) (%(default)s)")
    command.add_argument("--jobs", type=int, metavar="N", help="processes; default: one a processor")
    command.add_argument(
        "--operator", nargs="+", default=["coulomb"], metavar="KIND", help="coulomb (default), erf, erfc, ..."
    )
    command.add_argument("--cart", action="store_true", help="Cartesian functions instead of spherical ones")
    command.set_defaults(run=run_warmup)


def add_molecule(command):
    """What `eri` and `validate` share: the molecule, the operator and the machine."""
    command.add_argument("geometry", help="an .xyz or QCSchema .json file, or a PySCF atom string")
    command.add_argument("--basis", required=True, help="basis set name, resolved as PySCF does")
    command.add_argument("--cart", action="store_true", help="Cartesian functions")
    command.add_argument("--charge", type=int, help="default: the file's, or 0")
    command.add_argument("--spin", type=int, help="unpaired electrons; default: the file's, or by parity")
    command.add_argument("--omega", type=float, help="erf(omega r)/r for > 0, erfc(|omega| r)/r for < 0")
    command.add_argument("--backend", default="auto", help="auto (default), cuda or cpu")
    command.add_argument("--max-memory", type=float, metavar="MB", help="hard cap on what md4 allocates")


def molecule(args):
    """The molecule that the arguments describe."""
    from md4.geometry import load_molecule

    return load_molecule(args.geometry, args.basis, args.charge, args.spin, args.cart)


def run_eri(args):
    """Compute, then write or sum up the tensor."""
    import md4

    write = writer(args.output)
    mol = molecule(args)
    start = perf_counter()
    eri = md4.int2e(mol, aosym=args.aosym, omega=args.omega, backend=args.backend, max_memory=args.max_memory)
    seconds = perf_counter() - start
    print(f"{mol.natm} atoms, {mol.nbas} shells, {mol.nao} AOs in {args.basis}")
    print(f"eri {args.aosym} {eri.shape} {eri.dtype}: {seconds:.2f} s, {eri.nbytes / 1e6:.1f} MB")
    print(f"norm {np.linalg.norm(eri.reshape(-1)):.12e}, sum {eri.sum():.12e}")
    if write:
        write(eri)
        print(f"wrote {args.output}")
    return 0


def path_in_folder(name):
    """`name` as a path; ArgumentError if its folder does not exist."""
    path = Path(name)
    if not path.parent.is_dir():
        raise ArgumentError(f"there is no folder {str(path.parent)!r} to write {path.name!r} into; make it first.")
    return path


def writer(output):
    """The function that writes a tensor to `output`, or None; refuses what it could not write, before any work."""
    if output is None:
        return None
    path = Path(output)
    if path.suffix not in (".npy", ".h5", ".hdf5"):
        raise ArgumentError(f"cannot tell the format of {output!r}; the name must end in .npy, .h5 or .hdf5.")
    path_in_folder(output)
    if path.suffix == ".npy":
        return lambda eri: np.save(path, eri)
    try:
        import h5py
    except ImportError:
        raise ArgumentError(f"writing {output!r} needs h5py; pip install h5py, or write .npy.") from None

    def write(eri):
        with h5py.File(path, "w") as file:
            file["eri"] = eri

    return write


def run_validate(args):
    """Print the table, or write the report; the exit status says whether all passed."""
    from md4.validate import format_table, validate

    path = report_path(args.report)
    options = {
        "backend": args.backend, "tolerance": args.tolerance, "abs_tolerance": args.abs_tolerance,
        "omega": args.omega, "max_quartets_per_class": args.max_quartets, "seed": args.seed,
        "max_memory": args.max_memory,
    }  # fmt: skip
    if path is None:
        records = validate(molecule(args), **options)
        print(format_table(records))
        return 0 if all(record.passed for record in records) else 1
    return write_report(molecule(args), path, title=f"{args.geometry} in {args.basis}", **options)


def report_path(name):
    """The path of a report, or None; refuses what could not be written, before any work."""
    if name is None:
        return None
    if Path(name).suffix not in (".html", ".htm"):
        raise ArgumentError(f"a report is a web page; the name must end in .html, not {name!r}.")
    return path_in_folder(name)


def write_report(mol, path, **options):
    """Make a report, print its table and verdict, and write its page."""
    from md4.page import page
    from md4.report import make_report
    from md4.validate import format_table

    report = make_report(mol, **options)
    path.write_text(page(report), encoding="utf-8")
    print(format_table(report.records))
    failed = [check.name for check in report.checks if check.passed is False]
    print(f"{len(report.checks)} other checks: {', '.join(failed) + ' failed' if failed else 'none failed'}")
    skipped = [check for check in report.checks if check.passed is None]
    if skipped:
        print(f"{len(skipped)} of them were not made: {skipped[0].note}")
    print(f"{'PASS' if report.passed else 'FAIL'}, see {path}")
    return 0 if report.passed else 1


def run_warmup(args):
    """Compile, and say what was done."""
    from md4.cache import cache_folder
    from md4.warmup import warmup

    start = perf_counter()
    done = warmup(args.lmax, args.operator, args.jobs, not args.cart, basis=warmup_basis(args))
    seconds = perf_counter() - start
    print(f"{done.compiled} kernels compiled in {seconds:.1f} s by {done.jobs} processes, {done.kept} in the cache")
    print(f"cache {cache_folder()}")
    return 0


def warmup_basis(args):
    """The basis that `warmup` is asked to compile for, or None."""
    if args.geometry is None and args.basis is None:
        return None
    if args.geometry is None or args.basis is None:
        raise ArgumentError("a geometry and --basis belong together; give both, or --lmax alone.")
    from md4.basis import Basis
    from md4.geometry import load_molecule

    return Basis.from_mol(load_molecule(args.geometry, args.basis, None, None, args.cart))


def run_info(_):
    """Print what there is."""
    from md4.info import format_info

    print(format_info())
    return 0


if __name__ == "__main__":
    sys.exit(main())
