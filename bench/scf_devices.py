"""A whole SCF of 27 waters in cc-pVTZ on one GPU and on several: energies, cycles and seconds.

    python bench/scf_devices.py
"""

from time import perf_counter

from clock import describe
from systems import System

import md4

print(describe("cuda"))
mol = System.parse("27waters/cc-pvtz").mol()
for devices in ([0], "all"):
    mf, cycles = md4.attach(mol.RHF(), devices=devices), []
    mf.conv_tol = 1e-9
    mf.callback = lambda found, cycles=cycles: cycles.append(found["cycle"])
    begin = perf_counter()
    energy = mf.kernel()
    seconds = perf_counter() - begin
    print(f"devices {devices}: {energy:.10f} Hartree after {len(cycles)} cycles, {seconds:.1f} s", flush=True)
