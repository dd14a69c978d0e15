"""Density fitting by several ranks on the CPU: as by one process, and a clear end of all if one of them fails."""

import pytest
from mpi_jobs import MARKS, run

pytestmark = MARKS

BEGIN = """
    import hashlib
    import md4.contract.fitting_share
    from densities import random_densities
    from md4.contract.fitting_share import Share
    from molecules import WATER, molecule
    from pyscf import df
    from solvers import solver

    ranks, one = Ranks(comm), comm.rank == 1
    water, cation = molecule(WATER, "6-31g"), molecule(WATER, "6-31g", charge=1)
    dm = random_densities(water, 0, 2)

    def made(mol=water, auxbasis="cc-pvdz-jkfit", **options):
        return md4.DF(mol, auxbasis, **({"backend": "cpu", "comm": comm} | options))

    def same_as(found, expected, tolerance=1e-11):
        "Within rounding, and the same bits on all ranks."
        bits = hashlib.sha256()
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
                assert abs(mine - theirs).max() <= tolerance
                bits.update(mine.tobytes())
        assert len(set(ranks.gather(bits.hexdigest()))) == 1
"""


@pytest.mark.sample("2")
@pytest.mark.parametrize("size", [2, 3])
def test_as_one_process(tmp_path, size):
    """Each store: J and K, J alone, other operators, rows, a file; each rank keeps its part of the rows."""
    reports = run(tmp_path, size, BEGIN + """
    alone, kept = made(comm=None), []
    for store in ("device", "host", "direct"):
        fit = made(store=store)
        assert fit.build().store == store
        for options in ({}, {"with_k": False}, {"with_j": False}, {"omega": 0.3}, {"omega": -0.3}):
            same_as(fit.get_jk(dm, 0, **options), alone.get_jk(dm, 0, **options))
        same_as(fit.get_jk(dm[0] + 1j * dm[1], 0), alone.get_jk(dm[0] + 1j * dm[1], 0))
        fitting = fit._md4_fitting()
        assert fitting.count == comm.size and fitting.size == 116
        table = fitting.shares[0].table
        kept.append(None if table is None else len(table.table))
        if one:  # not collective
            assert abs(np.concatenate(list(fit.loop(50))) - alone._cderi).max() < 1e-11
            assert abs(fit._cderi[7:9] - alone._cderi[7:9]).max() < 1e-11
            c = dm[0, :, :5]
            assert abs(fit.mo_rows(c, dm[1]) - alone.mo_rows(c, dm[1])).max() < 1e-10
            assert abs(fit.ao2mo(c) - alone.ao2mo(c)).max() < 1e-9
    report(kept)
    fit = made()
    fit._cderi_to_save = str(folder / "tensor.h5")
    fit.build()
    comm.Barrier()
    read = df.DF(water)
    read._cderi = fit._cderi_to_save
    assert abs(read.get_jk(dm, 0)[0] - alone.get_jk(dm, 0)[0]).max() < 1e-10
    """).reports  # fmt: skip
    assert [sum(of_store) for of_store in zip(*(report[:2] for report in reports))] == [116, 116]
    assert all(report[2] is None for report in reports)
    assert all(116 // size <= report[0] <= 116 // size + 1 for report in reports)


def test_mp2(tmp_path):
    """Each rank makes the energy by itself; the same on all of them, but for rounding."""
    run(tmp_path, 2, BEGIN + """
    from pyscf.mp.dfmp2 import DFMP2

    mf = md4.attach(solver("RHF", water), backend="cpu", comm=comm).run()
    theirs = DFMP2(mf).set(with_df=df.DF(water, "cc-pvdz-ri"), verbose=0)
    ours = md4.attach(theirs.copy(), backend="cpu", comm=comm)
    assert ours.kernel()[0] < -0.1 and ours.with_df._md4_fitting().count == 2
    assert abs(ours.e_corr - theirs.kernel()[0]) < 1e-10
    assert abs(ours.t2 - theirs.t2).max() < 1e-10
    """).check()  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_energies(tmp_path, size):
    """Those of PySCF's density fitting, in the same cycles; through either order of the calls."""
    run(tmp_path, size, BEGIN + """
    for kind, mol, xc in (("RHF", water, None), ("UHF", cation, None), ("RKS", water, "hse06")):
        theirs = solver(kind, mol, xc).density_fit("cc-pvdz-jkfit").run()
        one_process = md4.attach(solver(kind, mol, xc).density_fit("cc-pvdz-jkfit"), backend="cpu").run()
        ours = md4.attach(solver(kind, mol, xc).density_fit("cc-pvdz-jkfit"), backend="cpu", comm=comm).run()
        again = md4.attach(solver(kind, mol, xc), backend="cpu", comm=comm).density_fit("cc-pvdz-jkfit").run()
        assert ours.with_df._md4_fitting().count == comm.size
        for mine in (ours, again):
            assert abs(mine.e_tot - theirs.e_tot) < 1e-9
            assert abs(mine.e_tot - one_process.e_tot) < 1e-10
            assert mine.cycles == theirs.cycles
        assert len(set(ranks.gather(repr(float(ours.e_tot))))) == 1
    nearly = df.aug_etb(water, beta=1.6)
    fitted = [solver("RHF", water).density_fit(nearly) for _ in range(2)]
    energies = [md4.attach(mf, backend="cpu", comm=c).kernel() for mf, c in zip(fitted, (None, comm))]
    assert abs(energies[0] - energies[1]) < 1e-10
    """).check()  # fmt: skip


@pytest.mark.thorough
def test_several_workers_a_rank(tmp_path):
    """Ranks with different numbers of devices."""
    run(tmp_path, 2, BEGIN + """
    import md4.contract.team
    chosen = md4.contract.team.chosen
    wanted = made(comm=None).get_jk(dm, 0)
    md4.contract.team.chosen = lambda *options: [None] * (1 + comm.rank)
    for store in ("device", "direct"):
        fit = made(store=store)
        same_as(fit.get_jk(dm, 0), wanted)
        fitting = fit._md4_fitting()
        assert fitting.count == 3
        assert [share.number for share in fitting.shares] == ([1, 2] if one else [0])
    """).check()  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["device", "host", "direct"])
def test_gpus(tmp_path, gpu, store):
    """A GPU for each rank, or one for both."""
    pytest.importorskip("cupy")
    run(tmp_path, 2, BEGIN + f"""
    fit, alone = made(backend="cuda", store={store!r}), made(comm=None)
    for options in ({{}}, {{"omega": 0.3}}, {{"with_k": False}}):
        same_as(fit.get_jk(dm, 0, **options), alone.get_jk(dm, 0, **options), 1e-10)
    assert abs(np.asarray(fit._cderi) - alone._cderi).max() < 1e-10
    ours, theirs = (md4.attach(solver("RHF", water).density_fit("cc-pvdz-jkfit"), **options).run() for options in (
        {{"backend": "cuda", "comm": comm}}, {{"backend": "cpu"}}))
    assert abs(ours.e_tot - theirs.e_tot) < 1e-10
    """).check()  # fmt: skip


@pytest.mark.thorough
def test_workers_agree(tmp_path):
    """Shell pairs, the way of the metric and the store are those that fit all, whatever a rank would do alone."""
    run(tmp_path, 2, BEGIN + """
    import md4.contract.metric, md4.contract.metric_rows
    from md4.contract.three_centre import ThreeCentre
    nearly = df.aug_etb(water, beta=1.6)
    wanted, usual = made(comm=None, auxbasis=nearly).get_jk(dm, 0), made(comm=None).get_jk(dm, 0)
    if one:  # it would take eigenvectors, and no pairs at all
        from md4.cpu.algebra import HostAlgebra
        HostAlgebra.cholesky = lambda algebra, matrix: None
        ThreeCentre.screen = lambda three, cutoff: setattr(three, "pairs", [])
    fit = made(auxbasis=nearly)
    same_as(fit.get_jk(dm, 0), wanted)
    assert fit._md4_fitting().metric.how == "Cholesky"
    assert fit._md4_fitting().metric.doubt is None
    take_rows = Share._take_rows

    def poorer(share, *given):
        take_rows(share, *given)
        share.algebra.memory_left = lambda: share.columns.least_bytes + 60_000

    if one:  # it has no memory for its part of the tensor
        Share._take_rows = poorer
    little = made()
    same_as(little.get_jk(dm, 0), usual)
    assert ranks.gather(little.store) == ["direct", "direct"]
    """).check()  # fmt: skip


@pytest.mark.thorough
def test_copies_and_pickles(tmp_path):
    run(tmp_path, 2, BEGIN + """
    import copy, pickle
    fit = made()
    assert "comm=Ranks(" in repr(fit)
    wanted = fit.get_jk(dm, 0)
    same_as(fit.copy().get_jk(dm, 0), wanted)
    for other in (pickle.loads(pickle.dumps(fit)), copy.deepcopy(fit)):
        assert "comm" not in repr(other)
        if one:
            assert abs(other.get_jk(dm, 0)[0] - wanted[0]).max() < 1e-11
    moved = molecule(WATER.replace("0.7572", "0.79"), "6-31g")
    same_as(fit.reset(moved).get_jk(dm, 0), made(moved, comm=None).get_jk(dm, 0))
    """).check()  # fmt: skip


@pytest.mark.thorough
def test_faults(tmp_path):
    """What fails or differs on rank 1 ends the call of all, whose next one is right."""
    first, second, third = run(tmp_path, 3, BEGIN + """
    wanted, messages = made(comm=None).get_jk(dm, 0), []

    def faulty(name):
        "A call during which a step of rank 1 fails."
        real, fit = getattr(Share, name), made()
        if name in ("partial", "first_passes", "second_pass"):
            fit = made(store="device" if name == "partial" else "direct").build()

        def fails(share, *given):
            if one or (name == "make_inverse" and share.number == 0):
                raise MemoryError(f"no memory in {name}")
            return real(share, *given)

        setattr(Share, name, fails)
        messages.append(caught(fit.get_jk, dm, 0))
        setattr(Share, name, real)
        same_as(fit.get_jk(dm, 0), wanted)

    for name in ("begin", "stores", "keep", "partial", "first_passes", "second_pass", "make_inverse"):
        faulty(name)
    report(messages + [
        caught(made(auxbasis="cc-pvdz-ri" if one else "cc-pvdz-jkfit").build),
        caught(made(store="direct" if one else "auto").build),
        caught(made(cutoff=1e-10 if one else 1e-13).build),
        caught(made().get_jk, dm[0] if one else dm),
        caught(made().get_jk, dm, with_k=not one),
        caught(made().get_jk, dm[:, :3] if one else dm),
        caught(made(auxbasis="no-such-basis" if one else "cc-pvdz-jkfit").build),
        caught(made, comm="world"),
    ])
    same_as(made().get_jk(dm, 0), wanted)
    """).reports  # fmt: skip
    for n, name in enumerate(("begin", "stores", "keep", "partial", "first_passes", "second_pass")):
        assert second[n] == f"MemoryError: no memory in {name}"
        assert first[n] == third[n] == f"RankError: rank 1: {second[n]}"
    assert first[6] == "MemoryError: no memory in make_inverse"
    assert second[6] == third[6] == "RankError: rank 0: MemoryError: no memory in make_inverse"
    facts = ("the auxiliary basis", "store", "cutoff", "the shape of the densities", "with_k")
    for n, fact in enumerate(facts, 7):
        assert first[n] == second[n] == third[n]
        assert first[n].startswith(f"ArgumentError: {fact} differs between the ranks of comm (ranks 0, 2: ")
    assert second[12].startswith("ArgumentError: ")
    assert second[13].startswith("BasisError: ")
    assert [first[n] for n in (12, 13)] == [f"RankError: rank 1: {second[n]}" for n in (12, 13)]
    assert first[14].startswith("ArgumentError: comm must be")


@pytest.mark.thorough
def test_arguments_that_only_one_rank_has_wrong(tmp_path):
    """Rank 1 raises its own exception and the others its message: none waits, and the next call of all is right."""
    first, second = run(tmp_path, 2, BEGIN + """
    wanted = made(comm=None).get_jk(dm, 0)

    def saved():
        fit = made()
        fit._cderi_to_save = str(folder / "no-such-folder" / "tensor.h5")  # which rank 0 writes
        return fit.build().get_jk(dm, 0)

    def saved_later():
        fit = made().build()
        fit._cderi_to_save = str(folder / "no-such-folder" / "tensor.h5")
        return fit.build().get_jk(dm, 0)

    def of_another_molecule():
        fit = made()
        fit.mol = "water" if one else water
        return fit.get_naoaux()

    def long_range():
        with made(auxbasis="no-such-basis" if one else "cc-pvdz-jkfit").range_coulomb(0.3) as fit:
            return fit.get_jk(dm, 0)

    def of_a_given_tensor():
        fit = made().build()
        if one:
            fit._cderi = np.zeros((2, 91))
        return fit.get_jk(dm, 0)

    report([
        caught(made, devices=[0] if one else None),
        caught(made, devices=7 if one else None, backend="auto"),
        caught(made, backend="gpu" if one else "cpu"),
        caught(made, store="disk" if one else "auto"),
        caught(made, max_memory=-1 if one else None),
        caught(made, stream="first" if one else None),
        caught(made, cutoff=np.nan if one else 1e-13),
        caught(made, "water" if one else water),
        caught(md4.intor, water, "int3c2e" if one else "int2e", comm=comm),
        caught(of_another_molecule),
        caught(long_range),
        caught(of_a_given_tensor),
        caught(lambda: list(made().loop(0 if one else 50))),
        caught(saved),
        caught(saved_later),
    ])
    same_as(made().get_jk(dm, 0), wanted)
    """, env={"CUDA_VISIBLE_DEVICES": ""}).reports  # fmt: skip
    kinds = [message.partition(":")[0] for message in second]
    assert kinds[:11] == ["ArgumentError", "DeviceError", *8 * ["ArgumentError"], "BasisError"]
    assert first[:11] == [f"RankError: rank 1: {message}" for message in second[:11]]
    assert first[11] == second[11]
    assert "rank 1: DF.get_jk of a tensor that was given" in first[11]
    assert first[12] is None  # each rank asks for rows by itself
    assert second[12].startswith("ArgumentError: blksize")
    for n in (13, 14):
        assert first[n].startswith("FileNotFoundError: ")
        assert second[n] == f"RankError: rank 0: {first[n]}"


def test_operators_and_factors_that_differ(tmp_path):
    """Also where the tensors of both operators are there; the next call is right."""
    first, second = run(tmp_path, 2, BEGIN + """
    from md4.pyscf.scf import attach
    omega, messages = 0.5 if one else 0.3, []
    for fit in (made(), made(store="direct")):
        messages.append(caught(fit.get_jk, dm, 0, omega=omega))
        for both in (0.3, 0.5):
            fit.get_jk(dm, 0, omega=both)
        messages.append(caught(fit.get_jk, dm, 0, omega=omega))
        same_as(fit.get_jk(dm, 0, omega=0.3), made(comm=None).get_jk(dm, 0, omega=0.3))
    mf = attach(solver("RKS", water, "pbe0").density_fit("cc-pvdz-jkfit"), backend="cpu", comm=comm).run()
    forces = mf.nuc_grad_method().set(auxbasis_response=not one, verbose=0)
    messages.append(caught(forces.kernel))
    mf.xc = "bhandhlyp" if one else "pbe0"
    messages.append(caught(mf.nuc_grad_method().set(verbose=0).kernel))
    mf.xc, mf.omega = "camb3lyp", omega
    messages.append(caught(mf.kernel))
    report(messages)
    """).reports  # fmt: skip
    facts = ["the operator"] * 4 + ["auxbasis_response", "exchange", "omega"]
    for message, same, fact in zip(first, second, facts, strict=True):
        assert message == same
        assert message.startswith(f"ArgumentError: {fact} differs between the ranks of comm")
