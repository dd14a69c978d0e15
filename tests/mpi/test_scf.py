"""Mean-field objects of PySCF on several ranks: the same energies in the same cycles as one process, on all ranks."""

import pytest
from mpi_jobs import MARKS, run

pytestmark = MARKS

BEGIN = """
    import copy, pickle
    import md4.contract.work
    from molecules import WATER, molecule
    from solvers import solver

    md4.contract.work.SHORTEST = 1e-5
    ranks = Ranks(comm)
    water, cation = molecule(WATER, "6-31g"), molecule(WATER, "6-31g", charge=1)

    def attached(mf, **options):
        return md4.attach(mf, **({"backend": "cpu", "comm": comm} | options))

    def check(mine, expected):
        "As the object of one process, and the same bits on all ranks."
        assert mine.converged and expected.converged
        assert abs(mine.e_tot - expected.e_tot) < 1e-9
        assert mine.cycles == expected.cycles
        orbitals = [np.asarray(mine.mo_coeff).tobytes(), np.asarray(mine.mo_energy).tobytes()]
        assert len(set(ranks.gather((repr(float(mine.e_tot)), *orbitals)))) == 1
"""
SOLVERS = {
    "RHF": "solver('RHF', water)", "UHF": "solver('UHF', cation)", "ROHF": "solver('ROHF', cation)",
    "GHF": "solver('GHF', cation)", "RKS": "solver('RKS', water, 'hse06')", "UKS": "solver('UKS', cation, 'pbe0')",
    "newton": "solver('UHF', cation).newton()", "smearing": "solver('UHF', cation).smearing(0.01)",
    "symmetry": "solver('RHF', molecule(WATER, '6-31g', symmetry=True))",
    "fitted": "solver('RHF', water).density_fit()", "fitted J": "solver('RHF', water).density_fit(only_dfj=True)",
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("size, kinds", [(2, list(SOLVERS)), (3, ["RHF", "newton"])], ids=str)
def test_as_one_process(tmp_path, size, kinds):
    run(tmp_path, size, BEGIN + f"""
    for made in {[SOLVERS[kind] for kind in kinds]!r}:
        expected, mine = attached(eval(made), comm=None), attached(eval(made))
        expected.kernel()
        mine.kernel()
        check(mine, expected)
    """).check()  # fmt: skip


def test_mp2(tmp_path):
    """Each rank makes all exact integrals over orbitals by itself."""
    run(tmp_path, 2, BEGIN + """
    from pyscf import mp

    made = []
    theirs, mine = solver("RHF", water).run(), attached(solver("RHF", water)).run()
    integrals = md4.contract.pair_rows.PairRows.integrals
    md4.contract.pair_rows.PairRows.integrals = lambda *args: made.append(args[1:3]) or integrals(*args)
    for method in (mp.MP2(mine), md4.attach(mp.MP2(mine))):
        made.clear()
        assert abs(method.run().e_corr - mp.MP2(theirs).run().e_corr) < 1e-9
        assert len(set(ranks.gather(tuple(made)))) == 1 and made
    """).check()  # fmt: skip


@pytest.mark.thorough
def test_what_pyscf_makes_of_an_attached_object(tmp_path):
    """newton() of it, copies, a scanner, conversions, response functions, and the object after `detach`."""
    run(tmp_path, 2, BEGIN + """
    import pyscf.tdscf
    one, mine = (attached(solver("RHF", water), comm=c) for c in (None, comm))
    for mf in (one, mine):
        mf.kernel()
    assert mine.md4_jk.ranks.size == mine.copy().md4_jk.ranks.size == 2
    assert "comm=Ranks(" in repr(mine)
    for change in (lambda mf: mf.newton(), lambda mf: mf.to_uhf(), lambda mf: mf.to_ks("pbe"), lambda mf: mf.copy()):
        results = []
        for mf in (mine, one):
            changed = change(mf)
            changed.mo_coeff = changed.mo_occ = None
            changed.kernel()
            results.append(changed)
        check(*results)
    first, second = (pyscf.tdscf.TDA(mf).set(nstates=2, verbose=0).kernel()[0] for mf in (mine, one))
    assert abs(first - second).max() < 1e-6
    scan = mine.as_scanner()
    for geometry in (WATER, WATER.replace("0.7572", "0.79")):
        again = attached(solver("RHF", molecule(geometry, "6-31g")), comm=None).run()
        assert abs(scan(molecule(geometry, "6-31g")) - again.e_tot) < 1e-9
    for kept in (pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)):
        assert kept.md4_jk.ranks.size == 1 and "comm" not in repr(kept)
    plain = md4.detach(mine)
    assert type(plain).__name__ == "RHF" and plain.chkfile is not None
    if comm.rank == 0:
        plain.kernel()  # alone
    """).check()  # fmt: skip


def test_ranks_cannot_drift_apart(tmp_path):
    """Rank 1 is wrong in all that decides. It has the results of rank 0 nevertheless, after the same cycles."""
    run(tmp_path, 2, BEGIN + """
    from pyscf.scf import uhf
    expected = attached(solver("UHF", cation), comm=None).run()

    def spoil(cls, name):
        right = getattr(cls, name)
        def wrong(*given, **options):
            found = right(*given, **options)
            return tuple(1.01 * x for x in found) if isinstance(found, tuple) else 1.01 * found
        setattr(cls, name, wrong)

    if comm.rank == 1:
        for name in ("eig", "get_init_guess", "energy_elec", "get_grad"):
            spoil(uhf.UHF, name)
    check(attached(solver("UHF", cation)).run(), expected)
    """).check()  # fmt: skip


@pytest.mark.thorough
def test_forces(tmp_path):
    """As of one process, the same bits on all ranks, even where rank 1 is wrong. An error of one rank is one of all."""
    errors = run(tmp_path, 2, BEGIN + """
    import pyscf.grad

    def gradient(mf):
        return mf.nuc_grad_method().set(verbose=0).kernel()

    def same(array):
        return len(set(ranks.gather(array.tobytes()))) == 1

    for kind, mol, xc in (("RHF", water, None), ("UKS", cation, "hse06")):
        one, mine = (attached(solver(kind, mol, xc, conv_tol=1e-11), comm=c).run() for c in (None, comm))
        found = gradient(mine)
        assert abs(found - gradient(one)).max() < 1e-6 and same(found)
        assert same(np.array(mine.nuc_grad_method().get_jk()))
    scan = mine.nuc_grad_method().as_scanner()
    energy, found = scan(molecule(WATER.replace("0.7572", "0.79"), "6-31g", charge=1))
    assert same(found) and same(np.array(energy))

    right = pyscf.grad.rhf.GradientsBase.grad_nuc
    def wrong(self, *args, **options):
        return 1.01 * right(self, *args, **options)
    def failing(self, *args, **options):
        raise OSError("disk full")
    mine = attached(solver("RHF", water)).run()
    want = gradient(mine)
    if comm.rank == 1:
        pyscf.grad.rhf.GradientsBase.grad_nuc = wrong
    assert abs(gradient(mine) - want).max() < 1e-12
    if comm.rank == 1:
        pyscf.grad.rhf.GradientsBase.grad_nuc = failing
    report(caught(gradient, mine))
    """).reports  # fmt: skip
    assert errors == ["RankError: rank 1: OSError: disk full", "OSError: disk full"]


@pytest.mark.thorough
def test_files(tmp_path):
    """Only rank 0 writes; all begin with what it has read."""
    run(tmp_path, 3, BEGIN + """
    from pyscf.lib import chkfile
    from pyscf.scf.chkfile import load_scf
    name = str(folder / "orbitals.chk")
    mf = attached(solver("RHF", water)).set(chkfile=name, diis_file=str(folder / "diis"))
    assert mf.chkfile == (name if comm.rank == 0 else None)
    assert mf.diis_file == (str(folder / "diis") if comm.rank == 0 else None)
    mf.kernel()
    cycles = mf.cycles
    comm.Barrier()
    assert load_scf(name)[1]["e_tot"] == mf.e_tot
    again = attached(solver("RHF", water, init_guess="chkfile")).set(chkfile=name)
    again.kernel()
    assert again.cycles < cycles
    again.kernel(dm0=again.from_chk(name))
    mf.dump_chk(str(folder / "copy.chk"))
    comm.Barrier()
    assert load_scf(str(folder / "copy.chk"))[1]["e_tot"] == mf.e_tot
    missing = attached(solver("RHF", water, init_guess="chkfile")).set(chkfile=str(folder / "none.chk"))
    missing.kernel()  # PySCF takes another guess
    assert abs(missing.e_tot - mf.e_tot) < 1e-9
    """).check()  # fmt: skip


@pytest.mark.thorough
def test_faults(tmp_path):
    """What fails or differs on rank 1 ends the calculation of both, whose next calculation is right."""
    first, second = run(tmp_path, 2, BEGIN + """
    one = comm.rank == 1

    def run_of(**settings):
        mf = solver("RHF", water).set(**settings)
        return lambda: attached(mf).kernel()

    def bad(envs):
        if one and envs["cycle"] == 3:
            raise OSError("disk full")

    def early(envs):
        return bool(one and envs["cycle"] == 2)

    def wrong_density():
        mf = attached(solver("RHF", water))
        guess = mf.get_init_guess()
        mf.kernel(dm0=guess[:5] if one else guess)

    def integrals_of_its_own():
        mf = attached(solver("RHF", water))
        mf._eri = water.intor("int2e") if one else None
        mf.kernel()

    report([
        caught(run_of(callback=bad)),
        caught(run_of(conv_tol=1e-6 if one else 1e-9)),
        caught(run_of(max_cycle=3 if one else 50)),
        caught(run_of(check_convergence=early)),
        caught(lambda: attached(solver("UHF" if one else "RHF", water))),
        caught(lambda: attached(solver("RHF", molecule(WATER, "6-31g*" if one else "6-31g"))).kernel()),
        caught(lambda: attached(solver("RHF", water).COSX() if one else solver("RHF", water))),
        caught(lambda: attached(solver("RHF", water), backend="gpu" if one else "cpu")),
        caught(lambda: attached(solver("RHF", water), devices=0 if one else None)),
        caught(wrong_density),
        caught(integrals_of_its_own),
        caught(attached, solver("RHF", water), comm="world"),
    ])
    check(attached(solver("RHF", water)).run(), attached(solver("RHF", water), comm=None).run())
    """).reports  # fmt: skip
    kinds = [text.partition(": ")[0] for text in second]
    assert second[0] == "OSError: disk full"
    assert "conv_tol differs between the ranks of comm (rank 0: 1e-09; rank 1: 1e-06)" in second[1]
    assert "max_cycle differs" in second[2]
    assert "the call differs" in second[3]
    assert "the object differs between the ranks of comm (rank 0: 'RHF'; rank 1: 'UHF')" in second[4]
    assert "the molecule or its basis differs" in second[5]
    assert kinds[6:] == ["UnsupportedError", *3 * ["ArgumentError"], "UnsupportedError", "ArgumentError"]
    same = (1, 2, 3, 4, 5, 11)
    assert [first[n] for n in same] == [second[n] for n in same]
    for n in (0, 6, 7, 8, 9, 10):
        assert first[n] == f"RankError: rank 1: {second[n]}"
