"""A whole SCF of 27 waters in cc-pVTZ on one GPU and on several: energies, cycles and seconds.

    python bench/scf_devices.py
    python bench/scf_devices.py --system water/6-31g --backend cpu --devices 0
"""

import argparse
from time import perf_counter

from clock import describe
from systems import System

import md4


def timed_scf(mol, backend, devices):
    """(energy in Hartree, cycles, seconds, the `md4.JK`) of an RHF calculation."""
    mf, cycles = md4.attach(mol.RHF(), backend=backend, devices=devices), []
    mf.conv_tol = 1e-9
    mf.callback = lambda found: cycles.append(found["cycle"])
    begin = perf_counter()
    energy = mf.kernel()
    return energy, len(cycles), perf_counter() - begin, mf.md4_jk


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", type=System.parse, default=System.parse("27waters/cc-pvtz"))
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--devices", nargs="+", default=["0", "all"], help="of each calculation: 'all' or a number")
    args = parser.parse_args(argv)
    mol = args.system.mol()
    for devices in args.devices:
        taken = devices if devices == "all" else [int(devices)]
        energy, cycles, seconds, jk = timed_scf(mol, args.backend, taken if args.backend == "cuda" else None)
        if devices == args.devices[0]:
            print(describe(jk.engine.backend).replace(", one core", ""))  # all cores of the CPU
        print(f"devices {devices}: {energy:.10f} Hartree after {cycles} cycles, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
