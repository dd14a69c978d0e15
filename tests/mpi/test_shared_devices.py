"""Ranks that share a GPU divide its memory: on emulated devices, whose identities and free memory are made up."""

import pytest
from mpi_jobs import MARKS, run

pytestmark = MARKS

# A GPU of 20 GB, of which rank 1 finds less free than the others.
BEGIN = """
    import emulator.host
    import md4.gpu.context
    from emulator import running
    from emulator.array_library import cupy
    from md4.contract.team import divide_devices
    from md4.gpu.device_shares import Share, shares, take_share
    from md4.gpu.pool import RESERVE_BYTES
    from pyscf import gto

    mol, ranks = gto.M(atom="H 0 0 0; H 0 0.3 1.1", basis={"H": [[0, [1.1, 1]]]}, verbose=0), Ranks(comm)
    auxbasis, dm, one = {"H": [[0, [2.0, 1]], [0, [0.7, 1]]]}, np.eye(2), comm.rank == 1
    emulator.host.Context.get_memory_info = lambda context: ((18 if one else 19) * 10**9, 20 * 10**9)

    def used(name):
        "The identity of the device of this rank."
        md4.gpu.context.identity = lambda device: name

    def left(made):
        return made.engine.backend.memory_left()
"""


@pytest.mark.thorough
def test_a_device_of_all_ranks(tmp_path):
    """Each has a third of the least that one finds free; J and K are right; a cap is a cap."""
    reports = run(tmp_path, 3, BEGIN + """
    with running(), cupy():
        used("the only one")
        jk, fit = md4.JK(mol, backend="cuda", comm=comm), md4.DF(mol, auxbasis, backend="cuda", comm=comm)
        begun = left(jk)
        for made in (jk, fit):
            options = {"backend": "cpu"}
            alone = md4.JK(mol, **options) if made is jk else md4.DF(mol, auxbasis, **options)
            for mine, theirs in zip(made.get_jk(dm), alone.get_jk(dm), strict=True):
                assert abs(mine - theirs).max() < 1e-12
        assert left(jk) < begun and left(fit._md4_fitting()) < begun
        capped = md4.JK(mol, backend="cuda", comm=comm, max_memory=9000)
        report([begun, shares[0].processes, left(capped)])
    """).reports  # fmt: skip
    assert reports == 3 * [[18 * 10**9 // 3 - (512 << 20), 3, 9 * 10**9]]


@pytest.mark.thorough
@pytest.mark.parametrize("names, expected", [
    ("abc", [None, None, None]), ("aba", [2, None, 2]), ("abb", [None, 2, 2]),
])  # fmt: skip
def test_devices_of_some_ranks(tmp_path, names, expected):
    """Only those are divided that several ranks use; memory that md4 holds already is divided as well."""
    reports = run(tmp_path, 3, BEGIN + f"""
    names, expected = {names!r}, {expected!r}
    with running():
        take_share(0, Share(1, 9))  # of before
        used(names[comm.rank])
        free = left(md4.JK(mol, backend="cuda", comm=comm))
        share = shares.get(0)
        held = md4.Engine(md4.Basis.from_mol(mol), backend="cuda").backend.context.pool
        kept = held.get((1 << 27) if comm.rank == 2 else 1)
        divide_devices({{0: names[comm.rank]}}, ranks)
        report([free, share and share.processes, shares[0].nbytes if 0 in shares else None])
    """).reports  # fmt: skip
    assert [processes for _, processes, _ in reports] == expected
    for rank, (free, processes, again) in enumerate(reports):
        least = (18 if 1 in [n for n in range(3) if names[n] == names[rank]] else 19) * 10**9
        assert free == least // (processes or 1) - (512 << 20)
        if processes:
            assert (1 << 30) // 2 <= again - free < (1 << 30) // 2 + (1 << 20)


def test_a_rank_on_the_cpu(tmp_path):
    """It has no GPU to divide, and the ranks hear that they do not compute by the same backend."""
    first, second = run(tmp_path, 2, BEGIN + """
    with running():
        used("the only one")
        report(caught(md4.JK, mol, backend="cpu" if one else "cuda", comm=comm))
    """).reports  # fmt: skip
    assert first == second
    assert first.startswith("ArgumentError: the backend differs between the ranks of comm")
