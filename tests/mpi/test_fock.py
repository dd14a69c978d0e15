"""J and K of several ranks on the CPU: as those of one process, and a clear end of all if one of them fails."""

import pytest
from mpi_jobs import MARKS, run

pytestmark = MARKS

# Small tasks, so that each rank has some. `tasks` are those of this rank.
BEGIN = """
    import hashlib
    import md4.contract.work
    from densities import CHAIN, random_densities
    from md4.contract.worker import PartialSums
    from molecules import METHANE, WATER, molecule

    md4.contract.work.SHORTEST = 1e-5
    tasks, add = [], PartialSums.add

    def watched(part, given, *more, **options):
        tasks.extend(task[:3] for task in given)
        return add(part, given, *more, **options)

    PartialSums.add = watched
    ranks = Ranks(comm)

    def same_as(found, expected):
        "Largest error relative to the largest element, of J and of K; whether all ranks have the same bits."
        bits = hashlib.sha256()
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
                assert abs(mine - theirs).max() <= 1e-12 * abs(theirs).max(initial=1.0)
                bits.update(mine.tobytes())
        assert len(set(ranks.gather(bits.hexdigest()))) == 1
"""


@pytest.mark.sample("chain-2")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["chain", "methane"])
def test_as_one_process(tmp_path, size, name):
    """Every quartet is computed by one rank, and each rank has a share."""
    reports = run(tmp_path, size, BEGIN + f"""
    mol = CHAIN if {name!r} == "chain" else molecule(METHANE, "cc-pvdz")
    one, all_ = md4.JK(mol, backend="cpu"), md4.JK(mol, backend="cpu", comm=comm)
    for hermi, count in ((1, 1), (0, 2), (2, 2)):
        dm = random_densities(mol, hermi, count)
        for options in ({{}}, {{"with_k": False}}, {{"with_j": False}}, {{"omega": 0.3}}, {{"omega": -0.3}}):
            expected = one.get_jk(dm, hermi, **options)
            tasks.clear()
            same_as(all_.get_jk(dm, hermi, **options), expected)
            assert all_.stats.wanted == one.stats.wanted and all_.stats.skipped == one.stats.skipped
            of_all = ranks.gather(list(tasks))
            every = [task for of_rank in of_all for task in of_rank]
            assert len(set(every)) == len(every)
            if hermi == 1 and not options:
                shares = [len(of_rank) for of_rank in of_all]
    real, imaginary = random_densities(mol, 1)[0], random_densities(mol, 2, seed=1)[0]
    same_as(all_.get_jk(real + 1j * imaginary), one.get_jk(real + 1j * imaginary))
    same_as(all_.get_jk(real, direct_scf_tol=1e-16), one.get_jk(real, direct_scf_tol=1e-16))
    same_as(md4.get_jk(mol, real, backend="cpu", comm=comm), one.get_jk(real))
    report(shares)
    """).reports  # fmt: skip
    assert all(report == reports[0] for report in reports)
    assert all(share > 5 for share in reports[0])


@pytest.mark.thorough
def test_update_and_reset(tmp_path):
    run(tmp_path, 2, BEGIN + """
    mol = molecule(WATER, "6-31g")
    one, all_ = md4.JK(mol, backend="cpu"), md4.JK(mol, backend="cpu", comm=comm)
    dm = random_densities(mol, 1, 2)
    for scale in (1.0, 1.001, 1.002):
        same_as(all_.update(scale * dm), one.update(scale * dm))
    assert all_.stats.wanted == one.stats.wanted
    other = molecule(METHANE, "6-31g")
    all_.reset(other)
    dm = random_densities(other)[0]
    same_as(all_.update(dm), md4.get_jk(other, dm, backend="cpu"))
    """).check()  # fmt: skip


@pytest.mark.thorough
def test_a_planar_molecule_that_is_turned(tmp_path):
    run(tmp_path, 2, BEGIN + """
    from md4.cpu.sums import HostSums
    HostSums.gains_by_plane = lambda self, basis: True
    mol = molecule("O 0.1 0.2 0.3; H 0.8 0.9 0.1; H -0.4 0.3 1.0", "6-31g*")
    one, all_ = md4.JK(mol, backend="cpu"), md4.JK(mol, backend="cpu", comm=comm)
    assert all_._frame.rotation is not None
    for hermi in (0, 1):
        dm = random_densities(mol, hermi, 2)
        same_as(all_.get_jk(dm + 1e-9 * comm.rank, hermi), one.get_jk(dm, hermi))
        assert all_.stats.wanted == one.stats.wanted
    """).check()  # fmt: skip


@pytest.mark.thorough
def test_densities_are_those_of_the_first_rank(tmp_path):
    run(tmp_path, 2, BEGIN + """
    mol = molecule(WATER, "6-31g")
    jk, dm = md4.JK(mol, backend="cpu", comm=comm), random_densities(mol)[0]
    other = dm + 1e-9 * comm.rank
    kept = other.copy()
    same_as(jk.get_jk(other), md4.get_jk(mol, dm, backend="cpu"))
    assert (other == kept).all()
    """).check()  # fmt: skip


# faults ---------------------------------------------------------------------------------------------------------------

FAULTY = BEGIN + """
    mol, one = molecule(WATER, "6-31g"), comm.rank == 1
    dm = random_densities(mol)[0]

    def made(**options):
        return md4.JK(**({"mol": mol, "backend": "cpu", "comm": comm} | options))

    def still_right():
        same_as(made().get_jk(dm), md4.get_jk(mol, dm, backend="cpu"))
"""


@pytest.mark.thorough
def test_an_exception_amid_a_build(tmp_path):
    """The rank that fails raises its own exception and the others its message; the same object builds again."""
    first, second, third = run(tmp_path, 3, FAULTY + """
    jk, failing = made(), True

    def failed(part, given, *more, **options):
        if failing and one:
            raise MemoryError("no memory for this task")
        return watched(part, given, *more, **options)

    PartialSums.add = failed
    messages = [caught(jk.get_jk, dm), caught(jk.update, dm), caught(jk.get_jk, dm, with_k=False)]
    failing = False
    same_as(jk.get_jk(dm), md4.get_jk(mol, dm, backend="cpu"))
    report(messages)
    """).reports  # fmt: skip
    assert second == 3 * ["MemoryError: no memory for this task"]
    assert first == third == 3 * ["RankError: rank 1: MemoryError: no memory for this task"]


@pytest.mark.thorough
def test_an_exception_between_the_steps_of_a_build(tmp_path):
    """Wherever rank 0 fails: while pair lists, bounds or norms are made, or when its sums are given back."""
    reports = run(tmp_path, 2, FAULTY + """
    import md4.contract.frame, md4.contract.survivors, md4.contract.team
    messages, where = [], ((md4.contract.team, "pairs_by_kind"), (md4.contract.team, "sorted_lists"),
        (md4.contract.team, "ListPairs"), (md4.contract.survivors, "Norms"), (md4.contract.frame, "in_order"),
        (md4.contract.team, "divide"), (PartialSums, "result"))
    for module, name in where:
        real = getattr(module, name)

        def broken(*given, **options):
            raise OSError(f"{name} failed")

        if comm.rank == 0:
            setattr(module, name, broken)
        messages.append([name, caught(lambda: made().get_jk(dm))])
        setattr(module, name, real)
    still_right()
    report(messages)
    """).reports  # fmt: skip
    for (name, first), (_, second) in zip(*reports, strict=True):
        assert first == f"OSError: {name} failed"
        assert second == f"RankError: rank 0: OSError: {name} failed"


DIFFERENT = {
    "molecules": ("made(mol=molecule(METHANE if one else WATER, '6-31g'))", "the molecule or its basis"),
    "geometries": (
        "made(mol=molecule(WATER.replace('3', '4') if one else WATER, '6-31g'))", "the molecule or its basis",
    ),
    "basis sets": ("made(mol=molecule(WATER, '6-31g*' if one else '6-31g'))", "the molecule or its basis"),
    "operators": ("made(omega=0.3 if one else 0.0)", "the operator"),
    "tolerances": ("made(direct_scf_tol=1e-10 if one else 1e-13)", "direct_scf_tol"),
    "shapes": ("made().get_jk(np.stack([dm, dm]) if one else dm)", "the shape of the densities"),
    "types": ("made().get_jk(dm + 0j if one else dm)", "the type of the densities"),
    "hermi": ("made().get_jk(dm, 0 if one else 1)", "hermi"),
    "with_j": ("made().get_jk(dm, with_j=not one)", "with_j"),
    "with_k": ("made().get_jk(dm, with_k=not one)", "with_k"),
    "omega": ("made().get_jk(dm, omega=-0.3 if one else None)", "the operator"),
    "tolerances of a build": ("made().get_jk(dm, direct_scf_tol=1e-9 if one else None)", "direct_scf_tol"),
    "calls": ("(made().update if one else made().get_jk)(dm)", "the call"),
    "first updates": ("[jk := made(), one and jk.__dict__.update(_last=(0, dm, None)), jk.update(dm)]", "the call"),
}


@pytest.mark.thorough
def test_what_differs_between_ranks(tmp_path):
    """An ArgumentError on all ranks, which names the thing, the ranks and their values."""
    expressions = {name: expression for name, (expression, _) in DIFFERENT.items()}
    reports = run(tmp_path, 3, FAULTY + f"""
    report({{name: caught(eval, text, globals()) for name, text in {expressions!r}.items()}})
    """).reports  # fmt: skip
    for messages in reports:
        assert messages == reports[0]
    for name, (_, fact) in DIFFERENT.items():
        message = reports[0][name]
        assert message.startswith(f"ArgumentError: {fact} differs between the ranks of comm (ranks 0, 2: "), name
        assert "; rank 1: " in message


@pytest.mark.thorough
def test_arguments_that_only_one_rank_has_wrong(tmp_path):
    first, second = run(tmp_path, 2, FAULTY + """
    report([
        caught(made, omega=np.nan if one else 0.0),
        caught(made, mol=None if one else mol),
        caught(made, max_memory=-1 if one else None),
        caught(made, devices=[0] if one else None),
        caught(made().get_jk, dm, 7 if one else 1),
        caught(made().get_jk, dm[:3] if one else dm),
        caught(made().update, dm, with_k="yes" if one else True),
    ])
    still_right()
    """).reports  # fmt: skip
    assert all(message.startswith("ArgumentError: ") for message in second)
    assert first == [f"RankError: rank 1: {message}" for message in second]


@pytest.mark.thorough
def test_other_sources_of_md4(tmp_path):
    first, second = run(tmp_path, 2, FAULTY + """
    import md4.contract.fock
    if one:
        md4.contract.fock.IMPORTED = 12345
    report(caught(made))
    """).reports  # fmt: skip
    assert first == second
    assert first.startswith("ArgumentError: the source of md4 differs")


def test_a_molecule_that_is_moved_in_place(tmp_path):
    """By all ranks, and by one only, which all hear of."""
    reports = run(tmp_path, 2, BEGIN + """
    mol = molecule(WATER, "6-31g").copy()
    jk, dm = md4.JK(mol, backend="cpu", comm=comm), random_densities(mol)
    jk.update(dm)
    mol.set_geom_(mol.atom_coords() * 1.2, unit="Bohr")
    same_as(jk.update(dm), md4.get_jk(mol, dm, backend="cpu"))
    if comm.rank == 1:
        mol.set_geom_(mol.atom_coords() * 1.2, unit="Bohr")
    report(caught(jk.get_jk, dm))
    """).reports  # fmt: skip
    assert reports[0] == reports[1]
    assert "a change of the molecule in place differs" in reports[0]


@pytest.mark.thorough
def test_a_rank_without_a_gpu(tmp_path):
    """As if rank 0 had a GPU: its backend divides the work in another way than that of a CPU."""
    reports = run(tmp_path, 2, FAULTY + """
    from md4.cpu.backend import CpuBackend
    if comm.rank == 0:
        CpuBackend.division_facts = lambda self: "cuda (sm_90)"
    report(caught(made))
    """).reports  # fmt: skip
    assert reports[0] == reports[1]
    assert "the backend differs between the ranks of comm (rank 0: 'cuda (sm_90)'; rank 1: 'cpu " in reports[0]


@pytest.mark.thorough
def test_a_rank_that_asks_for_a_gpu_in_vain(tmp_path):
    first, second = run(tmp_path, 2, FAULTY + """
    report(caught(made, backend="cuda" if one else "cpu"))
    """, env={"CUDA_VISIBLE_DEVICES": ""}).reports  # fmt: skip
    assert second.startswith("DeviceError: ")
    assert first == f"RankError: rank 1: {second}"


ELSEWHERE = """
    jk = made()
    if one:
        {end}
    for _ in range(1000):
        jk.get_jk(dm)
    report(None)
"""


@pytest.mark.thorough
def test_an_uncaught_exception_outside_of_md4(tmp_path):
    """With `python -m mpi4py` it ends all ranks; without it, the others would wait."""
    done = run(tmp_path, 2, FAULTY + ELSEWHERE.format(end="raise OSError('disk full')"), before=["-m", "mpi4py"])
    assert done.status not in (0, None)
    assert "OSError: disk full" in done.printed


@pytest.mark.thorough
def test_a_rank_that_is_killed(tmp_path):
    done = run(tmp_path, 2, FAULTY + ELSEWHERE.format(end="os.kill(os.getpid(), 9)"))
    assert done.status not in (0, None)
