"""AO tensors of several ranks: rows, gathering, files that all write to, and faults."""

from textwrap import dedent

import numpy as np
import pytest
from molecules import WATER, molecule
from mpi_jobs import EACH_A_NODE, MARKS, run

pytestmark = MARKS

PART = (2, 9, 0, 12, 3, 4, 1, 12)


def job(folder, size, script, **options):
    """What the ranks of a job report, which begins with the molecule of the fixture `mol`."""
    begin = 'from molecules import WATER, molecule\nmol = molecule(WATER, "6-31g**")\n'
    return run(folder, size, begin + dedent(script), **options).reports


@pytest.fixture(scope="module")
def mol():
    return molecule(WATER, "6-31g**")


@pytest.mark.sample("2")
@pytest.mark.parametrize("size", [2, 3])
def test_rows(tmp_path, mol, size):
    """Of all symmetries, and of a part: those of all ranks are those of the tensor, in their order."""
    reports = job(tmp_path, size, """
        part, found = (2, 9, 0, 12, 3, 4, 1, 12), []
        for name, shls_slice in [("s1", None), ("s4", None), ("s8", None), ("part", part)]:
            rows = md4.int2e(mol, name if name != "part" else "s1", shls_slice=shls_slice, backend="cpu", comm=comm)
            assert isinstance(rows, md4.TensorRows)
            assert len(rows.array) == rows.last - rows.first
            np.save(folder / f"{name}.{comm.rank}.npy", rows.array)
            found.append([rows.first, rows.last])
        report(found)
        """)  # fmt: skip
    for n, (name, shls_slice) in enumerate([("s1", None), ("s4", None), ("s8", None), ("part", PART)]):
        theirs = mol.intor("int2e", aosym=name if name != "part" else "s1", shls_slice=shls_slice)
        ours = np.concatenate([np.load(tmp_path / f"{name}.{rank}.npy") for rank in range(size)])
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        edges = [found[n] for found in reports]
        assert edges[0][0] == 0
        assert [first for first, _ in edges[1:]] == [last for _, last in edges[:-1]]
        assert all(first < last for first, last in edges)


@pytest.mark.thorough
def test_gather(tmp_path, mol):
    """Rank 0 has the whole, in more messages than one, and so it has with more ranks than shells."""
    reports = job(tmp_path, 3, """
        from md4.contract import ranks
        ranks.MESSAGE_BYTES = 100_000
        whole = [md4.int2e(mol, aosym, backend="cpu", comm=comm, gather=True) for aosym in ("s1", "s4", "s8")]
        tiny = md4.int2e(molecule("He 0 0 0", "sto-3g"), backend="cpu", comm=comm, gather=True)
        rows = md4.int2e(molecule("He 0 0 0", "sto-3g"), backend="cpu", comm=comm)
        if comm.rank == 0:
            for n, array in enumerate(whole):
                np.save(folder / f"{n}.npy", array)
        report([[array is None for array in whole], None if tiny is None else tiny.ravel().tolist(), rows.array.shape])
        """)  # fmt: skip
    for n, aosym in enumerate(("s1", "s4", "s8")):
        theirs = mol.intor("int2e", aosym=aosym)
        np.testing.assert_allclose(np.load(tmp_path / f"{n}.npy"), theirs, rtol=0, atol=1e-12)
    assert [none for none, _, _ in reports] == [[False] * 3, [True] * 3, [True] * 3]
    assert [tiny is None for _, tiny, _ in reports] == [False, True, True]
    assert reports[0][1] == pytest.approx(molecule("He 0 0 0", "sto-3g").intor("int2e").ravel().tolist())
    assert sorted(shape[0] for *_, shape in reports) == [0, 0, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("nodes", [{}, EACH_A_NODE], ids=["one node", "each a node"])
def test_a_file_of_all_ranks(tmp_path, mol, nodes):
    """Each rank has a memory map of its own of the same file, and memory for some rows only."""
    reports = job(tmp_path, 2, """
        path = folder / "eri.npy"
        if comm.rank == 0:
            np.lib.format.open_memmap(path, "w+", "f8", (24,) * 4)[:] = np.nan
        comm.Barrier()
        out = np.load(path, mmap_mode="r+")
        same = md4.int2e(mol, backend="cpu", comm=comm, out=out, max_memory=1.5) is out
        report([same, bool(np.isfinite(np.load(path, mmap_mode="r")).all())])
        """, env=nodes)  # fmt: skip
    assert reports == [[True, True]] * 2
    np.testing.assert_allclose(np.load(tmp_path / "eri.npy"), mol.intor("int2e"), rtol=0, atol=1e-12)


@pytest.mark.thorough
def test_memory_that_ranks_share(tmp_path, mol):
    """An array in shared memory as `out`: each rank writes its rows."""
    reports = job(tmp_path, 2, """
        window = MPI.Win.Allocate_shared(8 * 300 * 300 if comm.rank == 0 else 0, 8, comm=comm)
        out = np.ndarray((300, 300), buffer=window.Shared_query(0)[0])
        md4.int2e(mol, "s4", backend="cpu", comm=comm, out=out)
        report(abs(out - mol.intor("int2e", aosym="s4")).max())
        window.Free()
        """)  # fmt: skip
    assert max(reports) < 1e-12


@pytest.mark.thorough
def test_different_arguments(tmp_path):
    """An error on all ranks, with the name of what differs."""
    first, second = job(tmp_path, 2, """
        one = comm.rank == 1
        other = molecule("O 0 0 0; H 0 0 1; H 0 1 0", "6-31g**")
        report([
            caught(md4.int2e, mol, "s4" if one else "s8", backend="cpu", comm=comm),
            caught(md4.int2e, other if one else mol, backend="cpu", comm=comm),
            caught(md4.int2e, mol, omega=0.3 if one else None, backend="cpu", comm=comm),
            caught(md4.int2e, mol, "s4", backend="cpu", comm=comm, out=np.empty((300, 300)) if one else None),
            caught(md4.int2e, mol, backend="cpu", comm=comm, gather=one),
            caught(md4.int2e, mol, "s9" if one else "s8", backend="cpu", comm=comm),
            caught(md4.int2e, mol, backend="cpu", comm=comm, devices=[0] if one else None),
            caught(md4.int2e, "water", backend="cpu", comm=comm),
        ])
        """)  # fmt: skip
    names = ["aosym", "the molecule or its basis", "the operator", "out", "gather"]
    for n, name in enumerate(names):
        assert first[n] == second[n]
        assert first[n].startswith(f"ArgumentError: {name} differs between the ranks of comm (rank 0: ")
    assert first[5] == f"RankError: rank 1: {second[5]}"
    assert second[5].startswith("ArgumentError: aosym 's9' is unknown")
    assert first[6].startswith("RankError: rank 1: ArgumentError: devices cannot be [0]: the CPU backend has none")
    assert first[7] == second[7]
    assert "mol must be a pyscf.gto.Mole" in first[7]


@pytest.mark.thorough
def test_a_rank_that_fails(tmp_path):
    """The others end soon with its message: of memory before the work, of an error amid it."""
    first, second = job(tmp_path, 2, """
        from md4.contract.rows import TensorWorker
        one, compute, computed = comm.rank == 1, TensorWorker.compute, []

        def work(self, layout):
            computed.append(layout.ends)
            if one:
                raise OSError("the disk is full")
            while not (folder / "failed").exists():
                time.sleep(0.01)
            compute(self, layout)

        messages = [caught(md4.int2e, mol, backend="cpu", comm=comm, max_memory=1e-3 if one else None)]
        TensorWorker.compute = work
        out = np.lib.format.open_memmap(folder / f"{comm.rank}.npy", "w+", "f8", (24,) * 4)

        def fail():
            md4.int2e(mol, backend="cpu", comm=comm, out=out, max_memory=1)

        if one:
            import md4.contract.ranks
            stop = md4.contract.ranks.SharedCounter.stop

            def stopped(self):
                stop(self)
                (folder / "failed").touch()

            md4.contract.ranks.SharedCounter.stop = stopped
        messages.append(caught(fail))
        TensorWorker.compute = compute
        again = md4.int2e(mol, "s8", backend="cpu", comm=comm).array
        report([messages, len(computed), len(again)])
        """)  # fmt: skip
    assert first[0][0] == f"RankError: rank 1: {second[0][0]}"
    assert second[0][0].startswith("MemoryLimitError: the AO tensor of shape")
    assert second[0][1] == "OSError: the disk is full"
    assert first[0][1] == "RankError: rank 1: OSError: the disk is full"
    assert first[1] <= second[1] == 1
    assert first[2] + second[2] == 300 * 301 // 2


@pytest.mark.gpu
def test_rows_of_two_gpus(tmp_path, mol, gpu):
    """Each rank takes its own GPU where there are several."""
    reports = job(tmp_path, 2, """
        rows = md4.int2e(mol, "s4", backend="cuda", comm=comm)
        on_device = md4.int2e(mol, "s4", backend="cuda", comm=comm, device=True)
        whole = md4.int2e(mol, "s4", backend="cuda", comm=comm, gather=True)
        error = 0.0 if whole is None else abs(whole - mol.intor("int2e", aosym="s4")).max()
        report([rows.first, rows.last, abs(on_device.array.copy_to_host() - rows.array).max(), error])
        """)  # fmt: skip
    assert reports[0][0] == 0
    assert reports[0][1] == reports[1][0]
    assert reports[1][1] == 300
    assert max(max(report[2:]) for report in reports) < 1e-12
