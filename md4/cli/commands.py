"""The command line: `md4 eri`, `md4 validate`, `md4 warmup`, `md4 info`; also `python -m md4`."""

import argparse
import shlex
import sys
from pathlib import Path

import md4
from md4.cli.ending import exit_status, writing
from md4.cli.options import check_options, memory_in_options
from md4.errors import ArgumentError
from md4.support.files import checked_target, replacing

# Bytes on the disk that are enough for any report.
REPORT_BYTES = 1 << 19


def main(argv=None):
    """Run one command.

    Returns
    -------
    int
        The exit status: 0; 1 if a validation fails or is incomplete; 2 if something cannot be done, which one line on
        stderr explains; 130 after an interrupt; 141 if no process reads the output.

    Raises
    ------
    SystemExit
        143 after SIGTERM, 129 after SIGHUP; 2 and 0 after a usage error and after `--help`, as argparse does.
    """

    def command():
        args = parser().parse_args(argv)
        args.command = shlex.join(["md4", *(sys.argv[1:] if argv is None else argv)])
        check_options(vars(args))
        return args.run(args)

    return exit_status(command)


def parser():
    """The argument parser with its commands."""
    top = argparse.ArgumentParser(prog="md4", description="Four-centre two-electron integrals on GPU and CPU.")
    top.add_argument("--version", action="version", version=f"md4 {md4.__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    add_eri(commands.add_parser("eri", help="compute the tensor of integrals of a molecule"))
    add_validate(commands.add_parser("validate", help="compare with PySCF's libcint, class by class"))
    add_warmup(commands.add_parser("warmup", help="compile code for the GPU or the CPU ahead of its first use"))
    info = commands.add_parser("info", help="show versions, the GPU, threads, and compiled code")
    info.set_defaults(run=run_info)
    return top


def add_eri(command):
    add_molecule(command)
    command.add_argument("--aosym", metavar="SYM", help="s1 (default), s4 or s8, as in PySCF; with --df s2ij or s1")
    add_df(command)
    command.add_argument("-o", "--output", metavar="FILE", help="write the tensor to FILE, .h5 (dataset 'eri') or .npy")
    command.add_argument("--devices", metavar="LIST", help="GPUs that share the work: all, or numbers such as 0,1")
    command.add_argument("--mpi", action="store_true", help="share the work with all ranks that mpiexec has started")
    command.set_defaults(run=run_eri)


def add_validate(command):
    add_molecule(command)
    command.add_argument("--tolerance", type=float, default=1e-12, help="of a quartet's largest element (%(default)s)")
    command.add_argument("--abs-tolerance", type=float, default=1e-10, help="absolute (%(default)s)")
    command.add_argument(
        "--max-quartets", type=int, default=1000, metavar="N", help="sample of a class that has more (%(default)s)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    add_df(command)
    command.add_argument("--report", metavar="FILE", help="check more, and write a page on it to FILE, .html")
    command.set_defaults(run=run_validate)


def add_warmup(command):
    command.add_argument("geometry", nargs="?", help="with --basis: what this molecule needs, instead of --lmax")
    command.add_argument("--basis", help="basis set name, resolved as PySCF does")
    add_df(command)
    command.add_argument("--forces", action="store_true", help="what forces of this molecule need, too")
    command.add_argument("--mp2", action="store_true", help="what MP2 and MO integrals of this molecule need, too")
    command.add_argument("--lmax", type=int, default=4, metavar="L", help="classes up to (ll|ll) (%(default)s)")
    command.add_argument("--jobs", type=int, metavar="N", help="processes; default: one a processor")
    command.add_argument(
        "--operator", nargs="+", default=["coulomb"], metavar="KIND", help="coulomb (default), erf, erfc, ..."
    )
    command.add_argument("--cart", action="store_true", help="Cartesian functions instead of spherical ones")
    command.add_argument("--arch", help="compile for GPUs of this architecture, such as sm_90; needs no GPU")
    command.add_argument("--list", action="store_true", help="only print which kernels of the GPU would be compiled")
    files = command.add_mutually_exclusive_group()
    files.add_argument("--export", metavar="FILE", help="write these kernels to FILE, for other machines")
    files.add_argument(
        "--import", dest="imported", metavar="FILE",
        help="put the kernels of FILE into the cache, and compile only what J and K need on the host; only of those "
        "whom you trust",
    )  # fmt: skip
    command.add_argument("--backend", default="auto", help="auto (default), cuda or cpu")
    command.set_defaults(run=run_warmup)


def add_df(command):
    command.add_argument(
        "--df", nargs="?", const=True, metavar="AUXBASIS",
        help="the integrals of density fitting in place of (ij|kl); auxiliary basis set, by default as PySCF chooses",
    )  # fmt: skip


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
    from md4.pyscf.geometry import load_molecule

    return load_molecule(args.geometry, args.basis, args.charge, args.spin, args.cart)


def auxiliary(mol, name):
    """The auxiliary molecule for the value of `--df`: the name of a basis set, or True."""
    from md4.pyscf.geometry import load_auxiliary

    auxmol, text = load_auxiliary(mol, None if name is True else name)
    print(f"auxiliary basis {text}: {auxmol.nbas} shells, {auxmol.nao} functions")
    return auxmol


def run_eri(args):
    """The command `eri`; see `md4.cli.eri` and `md4.cli.fitting`."""
    if args.df is None:
        from md4.cli.eri import run_eri

        return run_eri(args)
    from md4.cli.fitting import run_fitting

    return run_fitting(args)


def run_validate(args):
    """Prints the table, or writes the report. The exit status says whether all checks passed."""
    path = report_path(args.report)
    options = {
        "backend": args.backend, "tolerance": args.tolerance, "abs_tolerance": args.abs_tolerance,
        "omega": args.omega, "max_quartets_per_class": args.max_quartets, "seed": args.seed,
        "max_memory": args.max_memory,
    }  # fmt: skip
    mol = molecule(args)
    auxmol = None if args.df is None else auxiliary(mol, args.df)
    with memory_in_options(args, ["--max-quartets with fewer quartets"]):
        if path is not None:
            options |= {"title": f"{args.geometry} in {args.basis}", "command": args.command}
            return write_report(mol, path, auxmol=auxmol, **options)
        return print_classes(mol, auxmol, options)


def print_classes(mol, auxmol, options):
    """Prints the table of classes, of four centres or of density fitting."""
    from md4.validation.libcint import format_table, validate
    from md4.validation.report import settled_fitting

    if auxmol is None:
        records = validate(mol, **options)
        print(format_table(records))
    else:
        records, _ = settled_fitting(mol, auxmol, **options)
        print(format_table(records, "blocks"))
    return 0 if all(record.passed for record in records) else 1


def report_path(name):
    """The path of a report, or None. Refuses a file that cannot be written, before any work is done."""
    if name is None:
        return None
    if Path(name).suffix not in (".html", ".htm"):
        raise ArgumentError(f"a report is a web page; the name must end in .html, not {name!r}.")
    path = checked_target(name, REPORT_BYTES)
    if path.exists():
        print(f"replaces {name}")
    return path


def write_report(mol, path, **options):
    """Makes a report, prints its table and verdict, and writes its page."""
    announce_missing()
    from md4.validation.libcint import format_table
    from md4.validation.page import page
    from md4.validation.report import make_report

    report = make_report(mol, **options)
    print(format_table(report.records))
    if report.fitting:
        print(format_table(report.fitting, "blocks"))
    failed, skipped = [check.name for check in report.checks if check.passed is False], report.skipped
    made = len(report.checks) - len(skipped)
    print(f"{made} other checks made: {', '.join(failed) + ' failed' if failed else 'none failed'}")
    with writing(str(path)), replacing(path) as beside:
        beside.write_text(page(report), encoding="utf-8", errors="backslashreplace")
    not_made = f", {len(skipped)} checks not made ({skipped[0].note})" if skipped else ""
    print(f"{report.verdict}{not_made}, see {path}")
    return 0 if report.passed else 1


def announce_missing():
    """Says before the work, on stderr, which package a whole report lacks."""
    from md4.validation.arbiter import MISSING, load_oracle

    if load_oracle() is None:
        print(f"md4: the report will be incomplete, because {MISSING}.", file=sys.stderr)


def run_warmup(args):
    """Compiles what a calculation would compile at its first calls, or reads it, and prints what was done."""
    from md4.cli.warmup import imported, warm_up
    from md4.support.cache import cache_folder

    if args.imported is not None:
        print(imported(args.imported, args.arch))
    else:
        options = args.lmax, args.operator, args.jobs, not args.cart
        options = *options, *warmup_bases(args), args.forces, args.mp2
        print(warm_up(args.backend, args.arch, args.list, args.export, *options))
    print(f"cache {cache_folder()}")
    return 0


def warmup_bases(args):
    """The basis and the auxiliary basis for which `warmup` should compile, or None."""
    if args.geometry is None and args.basis is None:
        for option in ("df", "forces", "mp2"):
            if getattr(args, option) not in (None, False):
                raise ArgumentError(f"--{option} needs a molecule; give a geometry and --basis as well.")
        return None, None
    if args.geometry is None or args.basis is None:
        raise ArgumentError("a geometry and --basis belong together; give both, or --lmax alone.")
    from md4.pyscf.geometry import load_molecule
    from md4.shells.basis import Basis

    mol = load_molecule(args.geometry, args.basis, None, None, args.cart)
    return Basis.from_mol(mol), None if args.df is None else Basis.from_mol(auxiliary(mol, args.df))


def run_info(_):
    """Prints versions, GPUs and the cache."""
    from md4.cli.info import format_info

    print(format_info())
    return 0
