"""Makes the wheel of the package md4-kernels: kernels of several architectures, compiled ahead. It needs no GPU.

    python bench/lab/kernels_wheel.py -o dist                                # the one that is published
    python bench/lab/kernels_wheel.py -o /tmp --arch sm_90 --lmax 0          # a small one, to try it

The wheel belongs to the md4 that Python imports here, by its version and its source, and to its major version of CUDA.
It holds, for each architecture, what `md4 warmup --lmax 4` compiles, what density fitting needs besides, and what
`MOLECULES` need besides. Kernels that are in the cache are not compiled again.
"""

import argparse
import base64
import hashlib
import os
import sys
import tempfile
import zipfile
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np

import md4
from md4.contract import warmup
from md4.gpu.warmup import compile_all, export_kernels, missing

sys.path.insert(0, str(Path(__file__).parents[1]))

from systems import System

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MOLECULES = ("27waters/cc-pvtz", "8waters/cc-pvqz", "8waters/def2-qzvpp", "vitaminc/def2-tzvpp", "benzene/cc-pvqz")
# Primitives of auxiliary shells, whose l goes one beyond that of orbitals.
AUXILIARY_PRIMITIVES = (1, 2, 4)
INIT = '"""Kernels of md4 for GPUs, compiled ahead: data that md4 finds, and nothing to call."""\n'
METADATA = """Metadata-Version: 2.1
Name: md4-kernels
Version: {version}
Summary: Kernels of md4 {version} for GPUs ({architectures}), compiled ahead
License: Apache-2.0
Requires-Dist: md4=={version}
Description-Content-Type: text/plain

Data for md4, which finds kernels here that it would compile otherwise. Install it as `md4[cu13,kernels]`.
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: md4\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wanted(lmax, capability):
    """The kernels for shells up to an angular momentum."""
    asked = warmup.asked_by_shells(lmax, True, "coulomb", capability) | asked_by_fittings(lmax, capability)
    for basis in (md4.Basis.from_mol(System.parse(name).mol()) for name in MOLECULES):
        if basis.lmax <= lmax:
            asked |= warmup.asked_by_basis(basis, "coulomb", capability)
    return asked


def asked_by_fittings(lmax, capability):
    """What density fitting asks for, with shells up to an angular momentum."""
    asked, ls = {}, [l for l in range(lmax + 2) for _ in range(warmup.COPIES[0])]
    for primitives, nprim in product(warmup.PRIMITIVES, AUXILIARY_PRIMITIVES):
        basis = warmup.shells_up_to(lmax, True, primitives, warmup.COPIES[0], False)
        centres = np.random.default_rng(1).uniform(-2.0, 2.0, (len(ls), 3))
        exponents, ones = 0.3 * 2.0 ** np.arange(nprim), np.ones(nprim)
        auxiliary = md4.Basis.from_arrays(ls, [exponents] * len(ls), [ones] * len(ls), centres)
        asked |= warmup.asked_by_fitting(basis, auxiliary, "coulomb", capability)
    return asked


def write_kernels(path, architecture, lmax, jobs):
    """Compiles what is missing of the kernels for an architecture, and writes all of them to a file."""
    capability, start = warmup.capability_of(architecture), perf_counter()
    asked = wanted(lmax, capability)
    todo = missing(asked, capability)
    compile_all(todo, jobs, capability, None)
    export_kernels(asked, capability, path)
    size, seconds = path.stat().st_size / 1e6, perf_counter() - start
    print(f"{architecture}: {len(asked)} kernels, {len(todo)} of them compiled, {size:.1f} MB, {seconds:.0f} s")


def write_wheel(folder, version, files):
    """Writes the wheel of a version, with files of kernels, into a folder; returns its path."""
    info, path = f"md4_kernels-{version}.dist-info", Path(folder, f"md4_kernels-{version}-py3-none-any.whl")
    about = METADATA.format(version=version, architectures=", ".join(file.stem for file in files))
    texts = {"md4_kernels/__init__.py": INIT, f"{info}/METADATA": about, f"{info}/WHEEL": WHEEL}
    contents = {name: text.encode() for name, text in texts.items()}
    contents |= {f"md4_kernels/{file.name}": file.read_bytes() for file in files}
    record = "".join(f"{name},sha256={checksum(data)},{len(data)}\n" for name, data in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return path


def checksum(data):
    """As RECORD of a wheel has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="architectures; default: sm_80 sm_90 sm_100")
    parser.add_argument("--lmax", type=int, default=4, help="highest angular momentum (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; default: one a processor")
    parser.add_argument("-o", "--output", default=".", metavar="FOLDER", help="where the wheel goes; default: here")
    args = parser.parse_args(argv)
    print(f"md4 {md4.__version__} of {Path(md4.__file__).parent}")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{architecture}.kernels") for architecture in args.arch]
        for file in files:
            write_kernels(file, file.stem, args.lmax, args.jobs)
        path = write_wheel(args.output, md4.__version__, files)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
