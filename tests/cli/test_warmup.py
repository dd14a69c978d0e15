"""`md4 warmup` on the CPU, and which backend it takes."""

import os
import re
import subprocess
import sys

import pytest

from md4.__main__ import main
from md4.contract.warmup import Warmup
from md4.cpu.warmup import BESIDE
from md4.support import bundle

USES = """
import numpy, pyscf, md4
mol = pyscf.M(atom="O 0 0 0; H 0 0 1; H 0 1 0", basis="6-31g*", cart=CART, verbose=0)
for aosym in ("s1", "s4", "s8"):
    md4.int2e(mol, aosym=aosym, backend="cpu")
md4.int2e(mol, shls_slice=(0, 2, 1, 4, 0, 3, 2, 3), backend="cpu")
dm = numpy.eye(mol.nao)
for flags in ({}, {"with_k": False}, {"with_j": False}, {"hermi": 0}, {"hermi": 2}):
    md4.get_jk(mol, dm, backend="cpu", **flags)
md4.get_jk(mol, numpy.array([dm, dm + 1j]), backend="cpu")
md4.attach(mol.RHF(), backend="cpu").kernel()
basis = md4.Basis.from_mol(mol)
md4.Engine(basis, backend="cpu").compute([[0, 0]], [[0, 0]])
"""


def functions(folder):
    """The compiled functions of a cache."""
    return {path.name for path in folder.rglob("*.loop")}


@pytest.mark.thorough
def test_a_warm_process_compiles_nothing(tmp_path):
    """For anything that the public functions do on the CPU."""
    env = os.environ | {"MD4_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "md4", "warmup", "--backend", "cpu"]
    first, second = (subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2))
    warm = functions(tmp_path)
    assert first.stdout.startswith(f"{len(warm)} functions of the CPU compiled in")
    assert second.stdout.startswith("0 functions of the CPU compiled in")
    assert f"{len(warm)} were in the cache" in second.stdout
    for cart in ("True", "False"):
        subprocess.run([sys.executable, "-c", USES.replace("CART", cart)], env=env, check=True)
    assert functions(tmp_path) == warm


@pytest.fixture
def warmed(monkeypatch):
    """The kinds for which the CPU was warmed up; no work is done."""
    kinds = []
    monkeypatch.setattr("md4.cpu.warmup.warmup", lambda given: kinds.append(given) or (3, 7))
    monkeypatch.setattr("md4.cpu.warmup.lost", lambda names: [])
    monkeypatch.setattr("md4.gpu.available", lambda: False)
    return kinds


def test_without_a_gpu_it_is_the_cpu(warmed, capsys):
    assert main(["warmup", "--operator", "erf"]) == 0
    printed = capsys.readouterr()
    assert re.match(r"3 functions of the CPU compiled in \d+\.\d s, 4 were in the cache\n", printed.out)
    assert "no GPU can be used" in printed.err
    assert main(["warmup", "--backend", "cpu", "He 0 0 0", "--basis", "sto-3g"]) == 0
    assert capsys.readouterr().err == ""
    assert warmed == [("erf",), ("coulomb",)]


def test_a_list_of_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("md4.cpu.warmup.warmup", None)
    monkeypatch.setattr("md4.cpu.warmup.missing", lambda names: list(names)[1:3])
    assert main(["warmup", "--backend", "cpu", "--list"]) == 0
    *names, last = capsys.readouterr().out.splitlines()
    assert names[:2] == ["fill coulomb", "copy"]
    assert last.startswith("2 functions of the CPU would be compiled") or "2 functions of the CPU" in "".join(names)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_keeps_nothing(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("md4.cpu.warmup.warmup", lambda kinds: (3, 7))
    assert main(["warmup", "--backend", "cpu"]) == 2
    assert "did not keep them; set MD4_CACHE_DIR" in capsys.readouterr().err


def test_the_gpu_is_not_replaced_by_the_cpu(warmed, capsys):
    assert main(["warmup", "--backend", "cuda"]) == 2
    assert "nothing to warm up" in capsys.readouterr().err
    assert warmed == []


def test_the_backend_of_a_machine_with_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("md4.gpu.available", lambda: True)
    asked = []

    def compiled(*args, **options):
        asked.append((args, options))
        return warmup_result

    warmup_result = type("Done", (), {"missing": [None] * 5, "kept": 6, "jobs": 7})
    monkeypatch.setattr("md4.contract.warmup.warmup", compiled)
    assert main(["warmup", "--lmax", "2", "--jobs", "7"]) == 0
    flags = {"listed": False, "forces": False, "mp2": False}
    options = {"basis": None, "auxiliary": None, "arch": None, **flags}
    assert asked == [((2, ["coulomb"], 7, True), options)]
    assert "5 kernels compiled in" in capsys.readouterr().out
    assert main(["warmup", "O 0 0 0", "--basis", "cc-pvdz", "--df", "cc-pvdz-jkfit"]) == 0
    assert "auxiliary basis cc-pvdz-jkfit: " in capsys.readouterr().out
    (_, options) = asked[1]
    assert [options[name].lmax for name in ("basis", "auxiliary")] == [2, 3]
    assert main(["warmup", "O 0 0 0", "--basis", "cc-pvdz", "--mp2"]) == 0
    assert asked[2][1]["mp2"]


def test_density_fitting_needs_a_molecule(capsys):
    for option in ("--df", "--forces", "--mp2"):
        assert main(["warmup", "--lmax", "2", option]) == 2
        assert f"{option} needs a molecule" in capsys.readouterr().err


def test_mp2_goes_without_density_fitting(capsys):
    assert main(["warmup", "He 0 0 0", "--basis", "cc-pvdz", "--df", "--mp2", "--arch", "sm_90", "--list"]) == 2
    assert "mp2=True (--mp2) takes a basis, and no auxiliary one (--df)" in capsys.readouterr().err


HYDROGEN = ["H 0 0 0; H 0 0 0.74", "--basis", "sto-3g", "--arch", "sm_90"]


@pytest.mark.thorough
def test_kernels_for_other_machines(tmp_path, kernels_package):
    """They are compiled without a GPU, into the cache that a machine with one would read, and into a file.

    With the file, imported or in md4-kernels, another machine compiles nothing, and has the same bytes.
    """

    def warmup(cache, *arguments, path=None):
        env = os.environ | {"MD4_CACHE_DIR": str(tmp_path / cache)}
        if path is not None:
            env["PYTHONPATH"] = f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        command = [sys.executable, "-m", "md4", "warmup", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    def kernels(cache):
        return {path.name: path.read_bytes() for path in (tmp_path / cache).rglob("*-sm_90.kernel")}

    file = kernels_package / "sm_90.kernels"
    told = warmup("first", *HYDROGEN, "--jobs", "2", "--export", str(file)).splitlines()
    made = kernels("first")
    assert told[0].startswith(f"{len(made)} kernels compiled in")
    assert told[1].startswith(f"{len(made)} kernels written to {file} (")
    assert len(made) > 10
    assert warmup("second", "--import", str(file)).startswith(f"{len(made)} kernels for sm_90 read from {file}")
    assert kernels("second") == made
    nothing = re.compile(rf"0 kernels compiled in .*, {len(made)} were there")
    assert nothing.match(warmup("second", *HYDROGEN))
    assert nothing.match(warmup("third", *HYDROGEN, path=kernels_package.parent))
    assert kernels("third") == {}
    again = tmp_path / "again"
    warmup("third", *HYDROGEN, "--export", str(again), path=kernels_package.parent)
    assert again.read_bytes() == file.read_bytes()


def test_import_without_a_gpu_takes_any_architecture(tmp_path, monkeypatch, capsys):
    """And compiles what the CPU does beside kernels of any kind."""
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path / "cache"))
    path, compiled = tmp_path / "x", []
    monkeypatch.setattr("md4.cpu.warmup.compile_ahead", compiled.append)
    bundle.write(path, "sm_80", [("h_panels", b"entry\ncubin")])
    monkeypatch.setattr("md4.gpu.available", lambda: False)
    assert main(["warmup", "--import", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"1 kernels for sm_80 read from {path}\ncache ")
    assert compiled == [BESIDE]
    assert main(["warmup", "--import", str(path), "--arch", "sm_90"]) == 2
    monkeypatch.setattr("md4.gpu.available", lambda: True)
    monkeypatch.setattr("md4.gpu.context.current_capability", lambda: (9, 0))
    assert main(["warmup", "--import", str(path)]) == 2
    assert capsys.readouterr().err.count("for sm_80, not for sm_90") == 2


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    """What was there stays, and the message is one line."""
    path = tmp_path / "x"
    path.write_bytes(b"before")
    done = Warmup([], 1, 1, {}, (9, 0))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("md4.contract.warmup.warmup", lambda *_, **__: done)
    monkeypatch.setattr("md4.cpu.warmup.compile_ahead", lambda _: 0)
    monkeypatch.setattr("os.fsync", full)
    assert main(["warmup", *HYDROGEN, "--export", str(path)]) == 2
    told = capsys.readouterr().err
    assert f"cannot write '{path}': No space left on device" in told
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"before"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--import", "x", "--lmax", "2", "--list"], "--import takes all kernels of a file; leave out"),
        (["--import", "x", "--mp2"], "--import takes all kernels of a file; leave out"),
        (["--import", "x", *HYDROGEN], "--import takes all kernels of a file; leave out"),
        (["--import", "x", "--backend", "cpu"], "for kernels of GPUs; leave out --backend cpu"),
        (["--export", "x", "--backend", "cpu"], "for kernels of GPUs; leave out --backend cpu"),
        (["--export", "x", "--list"], "--list compiles nothing that --export could write"),
        (["--export", "/nowhere/x"], "there is no folder '/nowhere'"),
        (["--export", "."], "is a folder"),
        (["--export", "x"], "there is nothing to warm up"),
        (["--import", "nowhere"], "cannot read 'nowhere': No such file or directory"),
    ],
)
def test_options_that_do_not_go_together(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("md4.gpu.available", lambda: False)
    assert main(["warmup", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_list(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    assert main(["warmup", "He 0 0 0", "--basis", "sto-3g", "--arch", "sm_90", "--list", "--jobs", "2"]) == 0
    *kernels, last, _ = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{len(kernels)} kernels would be compiled, 0 are there; about ")
    assert any("scatter_block-s8" in line for line in kernels)
    assert not list(tmp_path.rglob("*.kernel"))


def test_an_architecture_that_is_unknown(capsys):
    assert main(["warmup", "--arch", "sm_12"]) == 2
    assert "arch must be one of sm_75, " in capsys.readouterr().err
