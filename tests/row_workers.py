"""Several workers that share the rows of pairs of AOs, on the CPU or on GPUs, and who of them makes which pieces."""

from contextlib import contextmanager

import pytest

import md4
from md4.contract.pair_rows import PairRows


def engines(basis, count, backend="cpu", **options):
    """Engines of a `RowTeam`; on GPUs each has another one, and the test is skipped where there are too few."""
    if backend == "cuda" and md4.gpu.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    numbers = range(count) if backend == "cuda" else [None] * count
    return [md4.Engine(basis, backend=backend, device=number, **options) for number in numbers]


@contextmanager
def divided(count):
    """Within it, rows are made by so many workers, each piece by one of them, and all rows together."""
    made, integrals = {}, PairRows.integrals

    def watched(rows, first, last, out, columns):
        integrals(rows, first, last, out, columns)
        if not rows.engine.backend.dry:
            made.setdefault(rows.engine.lock, []).append((first, last))
            ends.add(rows.nrow)

    ends = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairRows, "integrals", watched)
        yield
    assert len(made) == count
    every = sorted(piece for pieces in made.values() for piece in pieces)
    assert [first for first, _ in every] == [0, *(last for _, last in every[:-1])]
    assert {every[-1][1]} == ends
