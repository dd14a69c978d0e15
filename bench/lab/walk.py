"""The walk of a shell-pair list from `Engine.compute` to its integrals, and of a density matrix to J and K.

    python bench/lab/walk.py [--backend cuda]     the files of md4 that are entered, in their order

A file counts if one of its functions is handed the list (as shell indices, as `ShellPairs`, prepared, or on the device)
or the matrices (densities, J, K, or what sums them); md4/support does not count. A call is one back up if the file that
it enters stands in a higher layer of pyproject.toml's contracts than the file that it comes from.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import md4

ROOT = Path(md4.__file__).parent
# Layers from the top, as in pyproject.toml.
LAYERS = (
    "pyscf", "contract", "engine", "cpu/backend", "cpu/sums", "cpu/targets", "cpu/h_matrices", "cpu/matrices",
    "cpu/screening", "cpu/compile", "gpu/backend", "gpu/dry_run", "gpu/warmup", "gpu/sums", "gpu/digest",
    "gpu/hermite_coulomb", "gpu/quartet_lists", "gpu/targets", "gpu/dealing", "gpu/part_plans", "gpu/pair_order",
    "gpu/paths", "gpu/shell_pairs", "gpu/predicted_times", "gpu/kernels", "gpu/context", "gpu/recording",
    "gpu/compile", "gpu/pool", "gpu/buffers", "gpu/dlpack", "gpu/device_code", "gpu/h_layout", "gpu/pair_layout",
    "gpu/gather_words",
    "gpu/staircases", "gpu/emit", "gpu/hermite_rows", "gpu/tuning",
    "backends", "plan", "shells", "method",
)  # fmt: skip


def layer(name):
    """Place of a file in `LAYERS`."""
    return next((n for n, prefix in enumerate(LAYERS) if name.startswith(prefix)), len(LAYERS))


def is_list(value):
    """Whether a value is a list of shell pairs in one of its forms."""
    if type(value).__name__ in ("ShellPairs", "PreparedPairs", "DevicePairs", "PairList"):
        return True
    return isinstance(value, np.ndarray) and value.dtype.kind == "i" and value.ndim == 2 and value.shape[1] == 2


def is_matrix(nao):
    """A test for AO matrices on the host or the device, and for what sums them."""

    def test(value):
        if type(value).__name__ in ("HostDigest", "DeviceDigest", "HostCoulomb", "DeviceCoulomb", "CoulombTarget"):
            return True
        shape = getattr(value, "shape", None)
        return isinstance(shape, tuple) and (shape[-2:] == (nao, nao) or shape[-1:] == (nao * nao,))

    return test


def walk(work, handed):
    """(files in the order in which they are handed what is looked for, calls back up as (from, to))."""
    files, up = [], []

    def note(frame, event, _):
        if event != "call":
            return
        names = []
        for this in (frame, frame.f_back):
            path = Path(this.f_code.co_filename) if this is not None else Path()
            names.append(path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None)
        here, before = names
        if here is None or here.startswith(("support/", "errors")):
            return
        values = [frame.f_locals[name] for name in frame.f_code.co_varnames[: frame.f_code.co_argcount + 1]
                  if name in frame.f_locals]  # fmt: skip
        if not any(handed(v) or (isinstance(v, tuple) and any(map(handed, v))) for v in values):
            return
        if here not in files:
            files.append(here)
        counts = before and before != here and not before.startswith(("support/", "errors"))
        if counts and layer(here) < layer(before) and (before, here) not in up:
            up.append((before, here))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return files, up


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"))
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    basis = md4.Basis.from_arrays([3, 2] * 3, [[1.0, 0.3]] * 6, [[1.0, 0.5]] * 6, rng.normal(size=(6, 3)))
    density, of_basis, bra, ket = np.eye(basis.nao), is_matrix(basis.nao), [[0, 1]], [[2, 3]]
    jobs = {
        "a pair list, Engine.compute": (lambda: md4.Engine(basis, backend=args.backend).compute(bra, ket), is_list),
        "a density, J and K": (lambda: md4.get_jk(basis, density, backend=args.backend), of_basis),
        "a density, J alone": (lambda: md4.get_jk(basis, density, with_k=False, backend=args.backend), of_basis),
    }
    for name, (work, handed) in jobs.items():
        work()  # compiled code and tables are there the second time
        files, up = walk(work, handed)
        print(f"{name}: {len(files)} files, {len(up)} calls back up")
        print("    " + " > ".join(file.removesuffix(".py") for file in files))
        for before, here in up:
            print(f"    up: {before} > {here}")


if __name__ == "__main__":
    main()
