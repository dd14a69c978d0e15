"""Objects show themselves: tables are well-formed, escaped, cheap, and say what the object says."""

import numpy as np
import pytest
from pages import Page

import md4
from md4.cpu import digestion, h_matrices, hermite_coulomb, integrals, targets
from md4.cpu.emit.vectors import LANES
from md4.cpu.h_matrices import BOTH
from md4.gpu.h_layout import BRA_STAIRCASE
from md4.shells.shell_pairs import shell_pairs
from md4.support import display


def rows(thing):
    """The rows of what a notebook would show of a thing."""
    return Page(thing._repr_html_()).rows


def values(thing):
    """{name: value} of its rows of two cells."""
    return {row[0]: row[1] for row in rows(thing) if len(row) == 2}


@pytest.fixture(scope="module")
def basis():
    return md4.Basis.from_arrays(
        l=[0, 0, 2, 1],
        exponents=[[5.0, 0.8], [4.0, 0.7], [1.1], [2.0, 0.5, 0.1]],
        coefficients=[[0.4, 0.7], [0.4, 0.7], [1.0], [[0.4, 0.1], [0.7, 0.2], [0.1, 0.9]]],
        centres=np.arange(12.0).reshape(4, 3) / 5,
    )


def test_basis(basis):
    assert rows(basis) == [
        ["l", "nprim", "nctr", "shells", "AOs"],
        ["s", "2", "1", "2", "2"],
        ["p", "3", "2", "1", "6"],
        ["d", "1", "1", "1", "5"],
    ]
    assert f"{basis.nshell} spherical shells, {basis.nao} AOs" in basis._repr_html_()
    assert sum(int(row[4]) for row in rows(basis)[1:]) == basis.nao


def test_shell_pairs(basis):
    pairs = shell_pairs(basis, [[3, 0], [3, 1]])
    shown = values(pairs)
    assert shown["class"] == "p2s"
    assert int(shown["shell pairs"]) == len(pairs) == 2
    assert int(shown["primitive pairs"]) == pairs.nprim
    assert int(shown["function pairs of a shell pair, N_ab"]) == pairs.nab == 6
    assert int(shown["Hermite functions of a primitive pair, N_p"]) == pairs.nherm == 4


def test_prepared_pairs_tell_what_is_kept(basis):
    prepared = md4.Engine(basis, backend="cpu").prepare([[2, 0], [2, 1]])
    assert "no H yet" in repr(prepared)
    size = sum(array.nbytes for array in prepared.h(BOTH))
    assert f"H as {BOTH} {display.size_text(size)}" in repr(prepared)
    assert values(prepared)[f"H[ab, p], form {BOTH}"] == display.size_text(size)
    assert values(prepared[1:2])["slice of a list, from pair"] == "1"
    assert "\n" not in repr(prepared)


@pytest.mark.parametrize("nbytes, text", [
    (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1001, "1.01 kB"), (0.2, "1 B"), (815_001, "816 kB"), (999_001, "1 MB"),
    (12_300_000, "12.3 MB"), (12_300_001, "12.4 MB"),
])  # fmt: skip
def test_the_least_memory_is_rounded_up(nbytes, text):
    assert display.least_text(nbytes) == text


def test_engine(basis):
    engine = md4.Engine(basis, backend="cpu", operator=("erf", 0.3), max_memory=50)
    shown = values(engine)
    assert shown["operator"] == "erf(0.3)"
    assert shown["backend"] == "cpu"
    assert shown["memory cap"] == "50 MB"
    assert "\n" not in repr(engine)
    engine.compute([[2, 0]], [[1, 0]])
    shown = values(engine)
    assert shown["workspace kept"] == display.size_text(sum(a.nbytes for a in engine.backend.memory.kept[0]))
    assert int(shown["quartets side by side"]) == LANES
    assert int(shown["threads"]) >= 1


def test_engine_shows_both_basis_sets(basis):
    other = md4.Basis(basis.shells[:1])
    assert md4.Engine(basis, other, backend="cpu")._repr_html_().count("spherical shells") == 2


def test_jk(basis):
    jk = md4.JK(basis, backend="cpu", direct_scf_tol=1e-11)
    assert values(jk)["last build / s"] == "none yet"
    assert "lists" not in jk.__dict__  # showing it made none
    jk.get_jk(np.eye(basis.nao))
    shown = values(jk)
    assert shown["direct_scf_tol / Hartree"] == "1e-11"
    assert int(shown["quartets computed"]) == jk.stats.computed
    listed = [row for row in rows(jk) if len(row) == 6][1:]
    assert [int(row[1]) for row in listed] == [len(this) for this in jk.lists]
    assert "\n" not in repr(jk)
    assert "array" not in repr(jk.lists[0])


FACTORIES = (
    h_matrices.h_matrices, integrals.fill_blocks, hermite_coulomb.contract_r, digestion.digest_blocks,
    targets.scatter_blocks, targets.copy_blocks,
)  # fmt: skip


def test_showing_compiles_nothing(basis):
    jk = md4.JK(basis, backend="cpu")
    before = [len(factory.made) for factory in FACTORIES]
    for thing in (basis, jk, jk.engine):
        assert thing._repr_html_().startswith("<div>")
    assert [len(factory.made) for factory in FACTORIES] == before


@pytest.mark.gpu
def test_gpu(gpu, basis):
    engine = md4.Engine(basis, backend="cuda", max_memory=500)
    engine.compute([[2, 0]], [[1, 0]])
    shown = values(engine)
    assert shown["memory cap"] == "500 MB"
    assert shown["device memory held"] == display.size_text(engine.backend.context.pool.held)
    assert int(shown["kernel variants loaded"]) > 0
    prepared = engine.prepare([[2, 0]])
    prepared.h(BRA_STAIRCASE)
    assert f"H as {BRA_STAIRCASE}" in repr(prepared)
    assert values(prepared)["data of primitive pairs"] == display.size_text(prepared.data.nbytes)
    assert int(values(prepared.pairs)["primitive pairs"]) == prepared.pairs.nprim


def test_text_is_escaped():
    page = display.block("<a>", display.table(("<b>",), [("<c> & d",)], "<e>"), display.facts([("<f>", "<g>")]))
    assert Page(page).rows == [["<b>"], ["<c> & d"], ["<f>", "<g>"]]
    assert not set(page.split("<")) & {"a>", "b>", "c> ", "e>", "f>", "g>"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (12345, "12\N{THIN SPACE}345"), (1.23456e-9, "1.23e-09"), ("(dd|pp)", "(dd|pp)"), (True, "True")],
)
def test_cells(value, text):
    assert display.cell(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e6, "2 MB"), (999_600, "1 MB"), (3e9, "3 GB"),
     (29_521_805.1e6, "29.5 TB"), (1e18, "1000 PB")],
)
def test_sizes(nbytes, text):
    assert display.size_text(nbytes) == text
