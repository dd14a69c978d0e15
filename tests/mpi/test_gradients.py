"""Gradients, and J and K of derivatives, of several ranks: as those of one process, the same on all ranks."""

from mpi_jobs import MARKS, run

pytestmark = MARKS


def test_as_one_process(tmp_path):
    run(tmp_path, 2, """
    from densities import random_densities
    from nuclear_forces import WATER, molecule

    mol = molecule(WATER, "6-31g")
    one, both = md4.JK(mol, backend="cpu"), md4.JK(mol, backend="cpu", comm=comm)
    ranks, any_ = Ranks(comm), random_densities(mol, 0, 2)
    dm = random_densities(mol)[0]

    def same_as(found, expected):
        assert abs(found - expected).max() < 1e-12 * abs(expected).max()
        assert len(set(ranks.gather(found.tobytes().hex()))) == 1

    for options in ({}, {"exchange": 0.0}, {"omega": 0.3, "tolerance": 0.1}):
        same_as(both.gradient(dm + 1e-9 * comm.rank, **options), one.gradient(dm, **options))
        assert (both.stats.computed, both.stats.skipped) == (one.stats.computed, one.stats.skipped)
        assert abs(both.stats.error_bound - one.stats.error_bound) <= 1e-10 * one.stats.error_bound
        assert one.stats.skipped or options.get("tolerance") is None
    same_as(both.product_gradient(*any_), one.product_gradient(*any_))
    for mine, theirs in zip(both.derivative_jk(any_), one.derivative_jk(any_)):
        same_as(mine, theirs)
    messages = [
        caught(both.gradient, dm[:3] if comm.rank else dm),
        caught(both.gradient, dm, tolerance=1e-9 if comm.rank else None),
        caught(both.derivative_jk, dm * 1j),
    ]
    wanted = "ArgumentError", "ArgumentError: tolerance differs", "ArgumentError"
    if comm.rank == 0:
        wanted = "RankError: rank 1: ArgumentError", *wanted[1:]
    for message, begin in zip(messages, wanted, strict=True):
        assert message.startswith(begin), message
    same_as(both.gradient(dm), one.gradient(dm))
    """).check()  # fmt: skip


def test_ranks_of_several_workers(tmp_path):
    """Of 2 and 1, each of which makes one part of three."""
    run(tmp_path, 2, """
    import md4.contract.team
    from nuclear_forces import few, symmetric

    mol = few()
    one, dm = md4.JK(mol, backend="cpu"), symmetric(mol.nao)
    md4.contract.team.chosen = lambda *_: [None] * (2 - comm.rank)
    both = md4.JK(mol, backend="cpu", comm=comm)
    found, right = both.gradient(dm, tolerance=0.1), one.gradient(dm, tolerance=0.1)
    assert abs(found - right).max() < 1e-12 * abs(right).max()
    assert both.stats == one.stats and both.stats.computed == one.stats.computed > 0
    assert abs(both.stats.error_bound - one.stats.error_bound) <= 1e-10 * one.stats.error_bound
    assert [worker.number for worker in both.team.workers] == [[0, 1], [2]][comm.rank]
    assert len(both.stats.busy) == 3 and all(both.stats.busy)
    assert len(set(Ranks(comm).gather(found.tobytes().hex()))) == 1
    """).check()  # fmt: skip


def test_fitted_as_one_process(tmp_path):
    """Of two spins and two operators; each rank does a part, and one that fails ends the call of all."""
    run(tmp_path, 2, """
    import md4.contract.fitting_gradient
    from molecules import molecule
    from solvers import solver

    ranks, parts = Ranks(comm), []
    mf = solver("UKS", molecule("O 0 0 0; H 0.3 0.2 0.9", "6-31g", spin=1), "camb3lyp").density_fit("weigend").run()
    one, both = (md4.attach(mf.copy(), backend="cpu", comm=c).nuc_grad_method().set(verbose=0) for c in (None, comm))
    want = one.kernel()
    FittingGradient = md4.contract.fitting_gradient.FittingGradient
    real = FittingGradient.forces
    FittingGradient.forces = lambda self, *given: parts.append(given[-2:]) or real(self, *given)
    found = both.kernel()
    assert parts == [(comm.rank, 2)] * 2
    assert abs(found - want).max() < 1e-11
    assert len(set(ranks.gather(found.tobytes().hex()))) == 1

    def fails(self, *given):
        if comm.rank:
            raise MemoryError("no memory")
        return real(self, *given)

    FittingGradient.forces = fails
    message = caught(both.kernel)
    assert message == ("MemoryError: no memory" if comm.rank else "RankError: rank 1: MemoryError: no memory")
    FittingGradient.forces = real
    assert abs(both.kernel() - want).max() < 1e-11
    """).check()  # fmt: skip
