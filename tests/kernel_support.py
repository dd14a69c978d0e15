"""Which kernels support what, by dry runs: `python tests/kernel_support.py` writes the table in docs/design.md."""

import sys
from dataclasses import replace
from functools import cache
from inspect import signature
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np

from md4.contract.fitting_lists import rehearse
from md4.contract.gradient import rehearse_matrices
from md4.contract.three_centre import ThreeCentre
from md4.contract.warmup import MEMORIES, asked_by, make_builds, make_forces, make_tensors, shells_up_to
from md4.gpu import digest
from md4.gpu.buffers import Buffer
from md4.gpu.kernels.unpack import launch_unpack
from md4.shells.basis import Basis

PAGE = Path(__file__).parents[1] / "docs" / "design.md"
BEGIN, END = "<!-- kernels: written by tests/kernel_support.py -->\n", "<!-- end of kernels -->\n"
CAPABILITIES = {"tensor cores of sm_90": (9, 0), "of sm_80": (8, 0), "no tensor cores": (7, 0)}
# In place of device memory.
NOTHING = Buffer(0, (1,), 8, None)
# Numbers of primitives of s, p and higher shells: the kernels for few primitive quartets are others than for many.
CONTRACTED, UNCONTRACTED = ((2, 2, 2), (3, 3, 3)), ((1, 1, 1),)
# (highest l, shells of each kind): large classes, and lists long enough for a thread a quartet.
SIZES = (5, 1), (2, 24)


def bases(pure=True, primitives=CONTRACTED + UNCONTRACTED, planar=False, general=False):
    """Small basis sets whose classes take every path."""
    of_all = product(SIZES, primitives)
    made = [shells_up_to(lmax, pure, numbers, copies, planar) for (lmax, copies), numbers in of_all]
    return made if general else [only_one_function(basis) for basis in made]


def only_one_function(basis):
    """The shells of one contracted function of a basis."""
    shells = [shell for shell in basis.shells if shell.nctr == 1]
    keep = [n for n, shell in enumerate(basis.shells) if shell.nctr == 1]
    return Basis.from_arrays(
        [shell.l for shell in shells], [shell.exponents for shell in shells],
        [shell.coefficients for shell in shells], basis.centres[keep], pure=basis.pure,
    )  # fmt: skip


def tensors(backend, basis):
    make_tensors(backend, basis)


def builds(backend, basis):
    if backend.context.unit != "fma":
        make_builds(backend, basis)


def gradients(backend, basis):
    if backend.context.unit != "fma":
        make_forces(backend, basis)
        rehearse_matrices(backend, basis, 1e-13, np.ones((1, basis.nao, basis.nao)), True, True)


def everything(backend, basis):
    for work in (tensors, builds, gradients):
        work(backend, basis)


def fitting(backend, basis):
    three = ThreeCentre(basis, basis, backend.operator, backend)
    three.rehearse()
    if backend.context.unit != "fma":
        rehearse(three, backend)
    for density in (None, NOTHING):
        launch_unpack(backend.context, None, (1, 1), None, None, (1, 1), density)
    for count in (0, 1):
        backend.rehearse_rows(1, count)


@cache
@patch.object(digest, "SELECT", replace(digest.SELECT, single_seconds=0.0))
def asked(work, kind="coulomb", capability=(9, 0), **options):
    """Variants of some work for `bases` with these options."""

    def every(backend):
        for basis in bases(**options):
            work(backend, basis)

    return frozenset(asked_by(every, kind, capability, MEMORIES[:1]))


def names(variants):
    """Names of their factories."""
    return {variant.factory.__name__ for variant in variants}


def in_fp32(variants):
    """Names of the factories of those that compute in FP32."""
    given = [(v.factory.__name__, signature(v.factory).bind(*v.facts)) for v in variants]
    for _, arguments in given:
        arguments.apply_defaults()
    return {name for name, arguments in given if arguments.arguments.get("single")}


def of_device(capability):
    """All variants of a compute capability."""
    return asked(everything, capability=capability) | asked(fitting, capability=capability)


def columns():
    """Kernels for which each column of the table says yes: a dict of sets of names."""
    contracted, uncontracted = (names(asked(everything, primitives=these)) for these in (CONTRACTED, UNCONTRACTED))
    return {
        **{name: names(of_device(cc)) for name, cc in CAPABILITIES.items()},
        "tensors": names(asked(tensors)), "J and K": names(asked(builds)),
        "J and K of a plane": names(asked(builds, planar=True)), "density fitting": names(asked(fitting)),
        "gradients": names(asked(gradients)),
        "uncontracted": uncontracted, "contracted": contracted,
        "general contractions": names(asked(everything, general=True)),
        "Cartesian": names(asked(everything, pure=False)), "FP32": in_fp32(asked(everything)),
    }  # fmt: skip


def table():
    """The table as text."""
    found = columns()
    kernels = {v.factory for cc in CAPABILITIES.values() for v in of_device(cc)}
    kernels |= {v.factory for v in asked(everything, general=True) | asked(builds, planar=True)}
    lines = ["| kernel | compiled for | " + " | ".join(found) + " |", "|---" * (len(found) + 2) + "|"]
    for factory in sorted(kernels, key=lambda this: (this.__module__, this.__name__)):
        marks = " | ".join("x" if factory.__name__ in names_ else "" for names_ in found.values())
        parameters = ", ".join(signature(factory).parameters)
        module = factory.__module__.removeprefix("md4.gpu.kernels.")
        lines.append(f"| `{module}.{factory.__name__}` | {parameters} | {marks} |")
    return "\n".join(lines) + "\n"


def main():
    text = PAGE.read_text()
    first, last = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:first] + table() + text[last:])


if __name__ == "__main__":
    sys.exit(main())
