"""Packs GPU4PySCF, PySCF and NumPy small enough to be carried to a machine without internet, and unpacks them there.

    python bench/lab/pack_peers.py                          makes .gpu/peers.tar.xz, which git ignores
    python bench/lab/pack_peers.py --wheels DIR             with wheels in DIR; what is missing is downloaded to it
    python bench/lab/pack_peers.py --unpack /tmp/peers      there: unpacks to an empty folder, and prints the PYTHONPATH

It needs pip and a C compiler here, and CuPy for CUDA 13, SciPy and h5py there. The wheels take 150 MB. To save space,

- GPU4PySCF's libraries keep the machine code of one compute capability (--capability, 90 by default) only;
- libxc is replaced, in PySCF and in GPU4PySCF, by a library of the same functions, which end the process with a
  message; both packages can be imported, Hartree-Fock and density fitting work, functionals do not;
- tests are left out.

cuTENSOR, which GPU4PySCF uses for density fitting where it is installed, is not packed: it alone is 200 MB.
"""

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / ".gpu" / "peers.tar.xz"
WHEELS = "numpy==2.4.6", "pyscf==2.14.0", "gpu4pyscf-cuda13x==1.9.0"
PLATFORMS = [f"manylinux{version}_x86_64" for version in ("_2_28", "_2_27", "_2_17", "2014")]
STUBBED = "pyscf/lib/deps/lib/libxc.so", "gpu4pyscf/lib/deps/lib/libxc.so"
USERS_OF_LIBXC = "pyscf/lib/libxc_itrf.so", "gpu4pyscf/dft/libxc.py", "pyscf/dft/libxc.py"

# fat binaries ---------------------------------------------------------------------------------------------------------

FAT = struct.Struct("<IHHQ")  # magic number, version, size of this header, size of the entries behind it
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, size of this header, size of the code behind it, capability
START = FAT.pack(0xBA55ED50, 1, FAT.size, 0)[:8]
MACHINE_CODE = 2  # the kind of an entry that is not PTX


def pruned(data, capability):
    """A library whose fat binaries have the machine code of one compute capability (as 90), if they have any for it.

    The entries that stay move to the front, with zeros behind them, which cost nothing once they are compressed.
    """
    data, place = bytearray(data), 0
    while (place := data.find(START, place)) >= 0:
        first = place + FAT.size
        last = first + FAT.unpack_from(data, place)[3]
        kept = [code for kind, found, code in entries(data, first, last) if (kind, found) == (MACHINE_CODE, capability)]
        if not kept:
            raise SystemExit(f"a library has no machine code for compute capability {capability}; see --capability.")
        code = b"".join(kept)
        data[first:last] = code + bytes(last - first - len(code))
        FAT.pack_into(data, place, *FAT.unpack_from(data, place)[:3], len(code))
        place = last
    return bytes(data)


def entries(data, first, last):
    """(kind, capability, bytes) of each entry of a fat binary."""
    while first < last:
        kind, _, header, size, capability = ENTRY.unpack_from(data, first)
        yield kind, capability, bytes(data[first : first + header + size])
        first += header + size
    if first != last:
        raise SystemExit("a fat binary has another format than this script knows.")


# a library without functions ------------------------------------------------------------------------------------------


def stub_source(names):
    """C source of functions of these names. Those that are called on import say that there are no functionals."""
    harmless = {
        "xc_version_string": 'const char *xc_version_string(void) { return "left out"; }',
        "xc_reference": 'const char *xc_reference(void) { return "left out"; }',
        "xc_reference_doi": 'const char *xc_reference_doi(void) { return "left out"; }',
        "xc_number_of_functionals": "int xc_number_of_functionals(void) { return 0; }",
        "xc_available_functional_numbers": "void xc_available_functional_numbers(int *list) { (void)list; }",
    }
    lines = ["#include <stdio.h>", "#include <stdlib.h>"]
    for name in sorted({*names, *harmless}):
        message = f"{name}: bench/lab/pack_peers.py has left libxc out."
        lines.append(harmless.get(name) or f'void {name}(void) {{ fputs("{message}\\n", stderr); abort(); }}')
    return "\n".join(lines) + "\n"


def make_stubs(site):
    """Puts the library into the places of libxc."""
    texts = [(site / name).read_bytes() for name in USERS_OF_LIBXC]
    names = {word.decode() for text in texts for word in re.findall(rb"\bxc_\w+", text)}
    for place in STUBBED:
        path = site / place
        path.parent.mkdir(parents=True, exist_ok=True)
        command = ["cc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libxc.so", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=stub_source(names), text=True, check=True)


# packing --------------------------------------------------------------------------------------------------------------


def fetch(folder):
    """Downloads the wheels that are not there, for Python 3.12 on x86-64, and returns all of them."""
    found = []
    for wheel in WHEELS:
        name, version = wheel.replace("-", "_").split("==")
        pattern = f"{name}-{version}-*.whl"
        if not any(folder.glob(pattern)):
            options = [x for platform in PLATFORMS for x in ("--platform", platform)]
            options += ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:", "--no-deps"]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, "-d", folder, wheel], check=True)
        found.append(next(folder.glob(pattern)))
    return found


def fill(site, wheels, capability):
    """Unpacks wheels into a folder and makes them small."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
    for folder in [path for path in site.rglob("tests") if path.is_dir()]:
        shutil.rmtree(folder, ignore_errors=True)
    for path in (site / "gpu4pyscf" / "lib").glob("*.so"):
        path.write_bytes(pruned(path.read_bytes(), capability))
    make_stubs(site)


def pack(folder, capability):
    """Makes the archive."""
    PACK.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        fill(Path(work), fetch(folder), capability)
        with tarfile.open(PACK, "w:xz", preset=6) as archive:
            for path in sorted(Path(work).iterdir()):
                archive.add(path, path.name)
    print(f"{PACK}: {PACK.stat().st_size / 2**20:.1f} MiB")
    if subprocess.run(["git", "check-ignore", "-q", PACK], cwd=ROOT, check=False).returncode:
        print("git does not ignore it: add /.gpu/ to .git/info/exclude.")


# unpacking ------------------------------------------------------------------------------------------------------------


def unpack(folder):
    """Unpacks the archive. GPU4PySCF looks for cuSOLVER where the linker does, else below a folder of sys.path."""
    with tarfile.open(PACK) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    place = folder / "nvidia" / "cusolver" / "lib" / "libcusolver.so"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    try:
        place.symlink_to(cusolver())
    except Exception as error:  # it may still be where the linker looks
        print(f"cuSOLVER was not found: {error}", file=sys.stderr)
    print(os.pathsep.join([str(folder), str(ROOT)]))


def cusolver():
    """Path of cuSOLVER, as NVIDIA's finder of libraries says, which numba-cuda and CuPy use as well."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return load_nvidia_dynamic_lib("cusolver").abs_path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", metavar="DIR", type=Path, help="folder of wheels; default: a temporary one")
    parser.add_argument("--capability", type=int, default=90, help="compute capability of the GPU (%(default)d)")
    parser.add_argument("--unpack", metavar="FOLDER", type=Path, help="unpack .gpu/peers.tar.xz")
    args = parser.parse_args()
    if args.unpack:
        unpack(args.unpack)
    elif args.wheels:
        pack(args.wheels, args.capability)
    else:
        with tempfile.TemporaryDirectory() as folder:
            pack(Path(folder), args.capability)


if __name__ == "__main__":
    main()
