"""What PySCF does with a mean-field object to which md4 is attached: a calculation for each row of docs/attach.md.

    python tests/feature_methods.py      writes the table of this page anew

A calculation is a function of `attach`. With `md4.attach` its numbers must be those that it has with a function that
does nothing. The calculations are in `feature_rows.py` and in `feature_methods.py`.
"""

import contextlib
import ctypes
import re
from dataclasses import dataclass, field

import pytest
from places import ROOT

import md4
import md4.pyscf.scf
import md4.pyscf.tensors
from md4.contract.amplitudes import DirectContraction
from md4.contract.fitting_gradient import FittingGradient
from md4.contract.four_index import FourIndex
from md4.contract.transform import OneIndexOfEachSide

PAGE = ROOT / "docs" / "attach.md"
MARK = re.compile(r"(<!-- rows -->\n).*?(<!-- end of rows -->)", re.DOTALL)
# Integrals of libcint over two electrons, by which PySCF's drivers call them.
TWO_ELECTRONS = re.compile(r"int(2e|3c2e|2c2e)\w*")
KINDS = (
    (r"int2e(_sph|_cart)?", "`int2e`"), (r"int3c2e(_sph|_cart)?", "`int3c2e`"), (r"int2c2e(_sph|_cart)?", "`int2c2e`"),
    (r".*_optimizer", None), (r"int2e_\w+", "derivatives of `int2e`"), (r"int[23]c2e_\w+", "derivatives of `int3c2e`"),
)  # fmt: skip


@dataclass
class Row:
    """A row of a table.

    Attributes
    ----------
    table, name : str
        Where it belongs, and what is done, in Markdown.
    run : callable
        The calculation: from `attach` to numbers.
    md4, pyscf : str
        What md4 and PySCF make of the integrals, as `counted` finds it.
    tol : float
        Largest difference from PySCF alone, in atomic units.
    needs : str
        A module without which it cannot run, or an empty string.
    """

    table: str
    name: str
    run: callable
    md4: str = "J and K"
    pyscf: str = ""
    tol: float = 1e-8
    needs: str = ""

    def cells(self):
        return [self.name, self.md4, self.pyscf, f"{self.tol:.0e}".replace("e-0", "e-")]

    def attach(self, mf, backend):
        """md4 with direct builds, as those of large molecules, unless PySCF needs the memory."""
        mf = md4.attach(mf, backend=backend)
        return mf if "density fitting" in self.md4 else mf.set(max_memory=0)


ROWS: list[Row] = []


def row(table, name, **facts):
    """Adds a calculation to the rows."""

    def add(run):
        ROWS.append(Row(table, name, run, **facts))
        return run

    return add


def plain(mf):
    """PySCF alone."""
    return mf


@dataclass
class Makers:
    """Who made integrals."""

    by_md4: set = field(default_factory=set)
    by_pyscf: set = field(default_factory=set)

    def add(self, name):
        """An integral of libcint that was looked up."""
        kind = next((kind for pattern, kind in KINDS if re.fullmatch(pattern, name)), None)
        if kind:
            self.by_pyscf.add(kind)

    @property
    def md4(self):
        return ", ".join(sorted(self.by_md4))

    @property
    def pyscf(self):
        return ", ".join(sorted(self.by_pyscf, key=lambda name: (name.startswith("d"), name)))


@contextlib.contextmanager
def counted():
    """`Makers` of the two-electron integrals that are made within the context.

    A driver of PySCF gets libcint's function by its name from a library of ctypes, each time if it is not kept there.
    """
    makers = Makers()
    get = ctypes.CDLL.__getattr__

    def looked_up(library, name):
        if TWO_ELECTRONS.fullmatch(name):
            makers.add(name)
            return library[name]
        return get(library, name)

    def watched(cls, method, kind):
        original = getattr(cls, method)

        def call(*args, **options):
            makers.by_md4.add(kind)
            return original(*args, **options)

        patch.setattr(cls, method, call)

    with pytest.MonkeyPatch.context() as patch:
        for library in vars(ctypes.cdll).values():
            for name in [name for name in vars(library) if TWO_ELECTRONS.fullmatch(name)]:
                delattr(library, name)
        patch.setattr(ctypes.CDLL, "__getattr__", looked_up)
        watched(md4.pyscf.scf.MD4SCF, "_md4_get_jk", "J and K")
        watched(md4.pyscf.tensors.Tensors, "fitting", "density fitting")
        watched(OneIndexOfEachSide, "blocks", "MO integrals")
        watched(FourIndex, "passes", "MO integrals")
        watched(DirectContraction, "contracted", "MO integrals")
        watched(md4.JK, "gradient", "forces")
        watched(FittingGradient, "run", "forces")
        watched(md4.JK, "derivative_jk", "derivatives of J and K")
        yield makers


def table():
    """All rows in Markdown, with a line for each of their tables."""
    lines, before = [["what", "integrals by md4", "by PySCF", "agrees to"], ["---"] * 4], None
    for found in ROWS:
        if found.table != before:
            lines.append([f"**{found.table}**", "", "", ""])
        lines.append(found.cells())
        before = found.table
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(text):
    """The page with its table made anew."""
    return MARK.sub(lambda m: f"{m[1]}\n{table()}\n{m[2]}", text)
