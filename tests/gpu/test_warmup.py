"""Kernels compiled ahead, in other processes; a warm molecule compiles nothing."""

import os
import subprocess
import sys

import numpy as np
import pytest
from emulator import running

import md4
from md4.__main__ import main
from md4.contract.warmup import asked_by_shells, warmup
from md4.errors import ArgumentError, DeviceError
from md4.gpu.backend import GpuBackend
from md4.gpu.compile import Variant, kept_kernels, kernel_entry, save_kernel
from md4.gpu.kernels.recurrence import r_by_group
from md4.gpu.warmup import allowed_jobs, compile_ahead, export_kernels, import_kernels, missing
from md4.support import bundle, cache


def test_allowed_jobs(monkeypatch):
    monkeypatch.setenv("MD4_JOBS", "3")
    assert allowed_jobs() == 3
    monkeypatch.delenv("MD4_JOBS")
    assert 1 <= allowed_jobs() <= 16
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("MD4_JOBS", wrong)
        with pytest.raises(ArgumentError, match="MD4_JOBS"):
            allowed_jobs()


def asked():
    """Variants for s shells."""
    return list(asked_by_shells(0, True, "coulomb", (9, 0)))


def test_work_is_looked_at_once(monkeypatch):
    """By a dry run, which finds the kernels for `compile_ahead`."""
    asked, ahead, basis = [], GpuBackend.compile_ahead, md4.Basis.from_arrays([0], [[0.9]], [[1.0]], [[0.0] * 3])
    with running("dmma16"), monkeypatch.context() as patches:
        patches.setattr(GpuBackend, "compile_ahead", ahead)
        patches.setattr("md4.gpu.backend.seen_ahead", set())
        patches.setattr("md4.gpu.backend.compile_ahead", lambda find, progress: asked.append(find()))
        backend = md4.Engine(basis, backend="cuda").backend
        for _ in range(2):
            backend.compile_ahead("tensor", basis, lambda dry: asked.append(dry.dry))
    assert asked == [True, {}]


@pytest.mark.thorough
def test_compiling_ahead_never_fails(monkeypatch, tmp_path):
    """Its process cannot compile for this architecture, and says nothing."""
    monkeypatch.setattr("md4.gpu.warmup.current_capability", lambda: (99, 0))
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MD4_JOBS", "2")
    compile_ahead(asked)
    assert not list(tmp_path.rglob("*.kernel"))
    monkeypatch.setenv("MD4_CACHE_DIR", "/proc/nowhere")
    compile_ahead(asked)
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    for executable in ("", None, "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", executable)
        compile_ahead(asked)


KILLED = """
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from md4.gpu.warmup import end_with_parent
ProcessPoolExecutor(1, get_context("spawn"), end_with_parent).submit(os.getpid).result()
os.kill(os.getpid(), 9)
"""


def test_processes_end_with_the_one_that_made_them():
    """They share its pipe: it would not end before them."""
    assert subprocess.run([sys.executable, "-c", KILLED], capture_output=True, timeout=60, check=False).returncode == -9


def test_geometry_and_basis_belong_together(capsys):
    assert main(["warmup", "H 0 0 0; H 0 0 1"]) == 2
    assert "give both" in capsys.readouterr().err


def test_what_the_cache_holds_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    first, *rest = every = asked()
    assert missing(every, (9, 0)) == every
    path = kernel_entry(first.name, "sm_90")[0]
    path.parent.mkdir(exist_ok=True)  # functions of the CPU may be there
    path.write_bytes(b"")
    assert missing(every, (9, 0)) == rest


def test_errors(monkeypatch, capsys):
    monkeypatch.setattr("md4.gpu.available", lambda: False)
    with pytest.raises(DeviceError, match="there is nothing to warm up: kernels are compiled for the GPU"):
        warmup(1)
    assert main(["warmup", "--lmax", "1", "--backend", "cuda"]) == 2
    assert "nothing to warm up" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="lmax must be between 0 and 8"):
        warmup(9)
    with pytest.raises(ArgumentError, match="jobs must be an integer of 1 or more"):
        warmup(1, jobs=0)
    with pytest.raises(ArgumentError, match="unknown operator 'dirac'"):
        warmup(1, ["dirac"])
    basis, cartesian = (md4.Basis.from_arrays([1], [[1.0]], [[1.0]], np.zeros((1, 3)), pure) for pure in (True, False))
    for wrong, message in (
        ({"basis": 3}, "basis must be an md4.Basis, not 3"),
        ({"auxiliary": basis}, "needs the basis that it belongs to"),
        ({"basis": basis, "auxiliary": 3}, "auxiliary must be an md4.Basis, not 3"),
        ({"basis": basis, "auxiliary": cartesian}, "must be all spherical or all Cartesian"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            warmup(1, **wrong)


# files of kernels ----------------------------------------------------------------------------------------------------


VARIANTS = [Variant(r_by_group, (l, "coulomb")) for l in range(4)]


def code_of(variant):
    """Stands for the machine code of a variant."""
    return f"{variant.name} ".encode() * 20


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """A file of kernels, and an empty cache."""
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path / "old"))
    for variant in VARIANTS:
        save_kernel(variant, (9, 0), b"entry", code_of(variant))
    export_kernels(VARIANTS, (9, 0), tmp_path / "s.kernels")
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path / "new"))
    return tmp_path / "s.kernels"


def test_from_one_cache_to_another(exported, tmp_path):
    """The files of both are the same, and no kernel is missing."""
    assert missing(VARIANTS, (9, 0)) == VARIANTS
    assert import_kernels(exported, (9, 0)) == (len(VARIANTS), "sm_90")
    assert missing(VARIANTS, (9, 0)) == []
    old, new = (sorted((tmp_path / name).rglob("*.kernel")) for name in ("old", "new"))
    assert [path.name for path in old] == [path.name for path in new]
    assert [path.read_bytes() for path in old] == [path.read_bytes() for path in new]
    assert len(new) == len(VARIANTS)


def test_kernels_of_the_package_are_exported(exported, kernels_package, tmp_path):
    (kernels_package / "sm_90.kernels").write_bytes(exported.read_bytes())
    assert missing(VARIANTS, (9, 0)) == []
    export_kernels(VARIANTS, (9, 0), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == exported.read_bytes()


@pytest.mark.parametrize("fault", ["cut", "kernel", "index", "old", "architecture", "name", "none", "folder"])
def test_files_that_are_refused(exported, tmp_path, monkeypatch, fault):
    """With a sentence, and nothing of them gets into the cache."""
    whole, capability = exported.read_bytes(), (9, 0)
    if fault in ("cut", "kernel", "index"):
        place = {"cut": len(whole) - 1, "kernel": len(whole) - 9, "index": 200}[fault]
        exported.write_bytes(whole[:place] + (b"" if fault == "cut" else b"?" + whole[place + 1 :]))
    elif fault == "old":
        monkeypatch.setattr(cache, "IMPORTED", "0" * 64)
    elif fault == "architecture":
        capability = (8, 0)
    elif fault == "name":
        bundle.write(exported, "sm_90", [("fine", b"entry\ncubin"), ("../../stray", b"entry\ncubin")])
    else:
        exported.unlink()
        exported.mkdir() if fault == "folder" else None
    words = {"old": "another version of md4", "architecture": "for sm_90, not for sm_80", "name": "which no kernel of",
             "none": "No such file", "folder": "Is a directory"}  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArgumentError, match=f"{exported.name}.*{words.get(fault, 'is damaged')}"):
        import_kernels(exported, capability)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_but_kernels_is_imported(exported, tmp_path):
    """A file never becomes a function of the CPU, which is a pickle."""
    bundle.write(exported, "sm_90", [("add_loop-0123.loop", b"entry\ncubin"), ("..", b"entry\ncubin")])
    import_kernels(exported)
    names = {path.name for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert names == {"add_loop-0123.loop-sm_90.kernel", "..-sm_90.kernel"}


def test_a_cache_that_cannot_be_written(exported, monkeypatch, tmp_path):
    monkeypatch.setenv("MD4_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(ArgumentError, match="the cache /proc/nowhere cannot be written"):
        import_kernels(exported)
    with pytest.raises(ArgumentError, match="the cache /proc/nowhere did not keep it"):
        export_kernels(VARIANTS, (9, 0), tmp_path / "again")
    assert not (tmp_path / "again").exists()


IMPORT = "import sys; from md4.gpu.warmup import import_kernels; print(import_kernels(sys.argv[1], (9, 0))[0])"


@pytest.mark.thorough
def test_two_processes_import_at_once(exported):
    command = [sys.executable, "-c", IMPORT, str(exported)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [int(one.communicate()[0]) for one in both] == [len(VARIANTS)] * 2
    for variant in VARIANTS:
        assert list(kept_kernels(variant, (9, 0))) == [b"entry\n" + code_of(variant)]
    assert not list(kernel_entry(VARIANTS[0].name, "sm_90")[0].parent.glob(".*"))


RUN = """
import numpy, md4
from md4.gpu import compile as dispatch
basis = md4.Basis.from_arrays([1, 0, 1, 1], [[1.0, 0.5]] * 4, [[1.0, 0.3]] * 4, numpy.eye(4, 3))
engine = md4.Engine(basis, backend="cuda")
for bra, ket, many in (([0, 1], [2, 3], 1), ([2, 3], [1, 1], 1), ([0, 2], [3, 2], 300)):
    engine.compute([bra] * many, [ket] * many)
print(dispatch.compile_count)
"""


FIRST = """
import sys, numpy, pyscf, md4
from md4.gpu import compile as dispatch
mol = pyscf.M(atom="O 0 0 0; H 0 0 1; H 0 1 0", basis="6-31g*", verbose=0)
if sys.argv[1] == "jk":
    md4.get_jk(mol, numpy.eye(mol.nao), backend="cuda")
elif sys.argv[1] == "j":
    md4.get_jk(mol, numpy.eye(mol.nao), with_k=False, backend="cuda")
else:
    md4.int2e(mol, backend="cuda")
print(dispatch.compile_count)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("use", ["tensor", "jk", "j"])
def test_a_first_call_compiles_in_parallel(gpu, tmp_path, use):
    """By a script without a main guard, as users write them."""
    script = tmp_path / "first.py"
    script.write_text(FIRST)
    env = os.environ | {"MD4_CACHE_DIR": str(tmp_path / "cache"), "MD4_JOBS": "4"}
    command = [sys.executable, str(script), use]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
    assert len(list(tmp_path.rglob("*.kernel"))) >= 12


@pytest.mark.gpu
def test_a_warm_class_compiles_nothing(gpu, tmp_path):
    env = os.environ | {"MD4_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "md4", "warmup", "--lmax", "1", "--jobs", "4"]
    first, second = (subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2))
    assert int(first.stdout.split()[0]) > 0
    assert "0 kernels compiled" in second.stdout
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]


ALL = """
import sys, numpy, pyscf, md4
from md4.gpu import compile as dispatch
mol = pyscf.M(atom=sys.argv[1], basis=sys.argv[2], verbose=0)
dm = numpy.eye(mol.nao)
for aosym in ("s1", "s4", "s8"):
    md4.int2e(mol, aosym=aosym, backend="cuda")
    print(aosym, dispatch.compile_count)
for flags in ({}, {"with_k": False}, {"with_j": False}, {"hermi": 0}):
    md4.get_jk(mol, dm, backend="cuda", **flags)
    print(flags, dispatch.compile_count)
md4.attach(mol.RHF(), backend="cuda").kernel()
print("scf", dispatch.compile_count)
"""
FLUORIDE = "H 0 0 0; F 0 0 0.917"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("arguments", "most"), [([FLUORIDE, "--basis", "cc-pvdz"], 0), (["--lmax", "2"], 3)], ids=["molecule", "lmax"]
)
def test_a_warm_molecule_compiles_nothing(gpu, tmp_path, arguments, most):
    """Neither for integrals nor for J and K, with the general contractions of cc-pVDZ.

    `--lmax` knows no molecule: by a dry run three kernels are left, for means of primitives that it does not have.
    """
    env = os.environ | {"MD4_CACHE_DIR": str(tmp_path), "MD4_JOBS": "8"}
    warm = [sys.executable, "-m", "md4", "warmup", "--jobs", "8", *arguments]
    done = subprocess.run(warm, env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) > 0
    kernels = set(tmp_path.rglob("*.kernel"))
    done = subprocess.run(
        [sys.executable, "-c", ALL, FLUORIDE, "cc-pvdz"], env=env, capture_output=True, text=True, check=True
    )
    assert max(int(line.split()[-1]) for line in done.stdout.splitlines()) <= most, done.stdout
    assert len(set(tmp_path.rglob("*.kernel")) - kernels) <= most
