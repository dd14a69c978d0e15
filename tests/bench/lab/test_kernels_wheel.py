"""bench/lab/kernels_wheel.py makes a wheel that pip installs and in which md4 finds kernels."""

import subprocess
import sys
from pathlib import Path

import pytest

import md4
from md4.contract.warmup import asked_by_shells
from md4.gpu.compile import save_kernel
from md4.support import bundle

sys.path.insert(0, str(Path(__file__).parents[3] / "bench" / "lab"))

import kernels_wheel


@pytest.fixture
def wheel(monkeypatch, tmp_path, capsys):
    """A wheel for s shells, with something shorter than machine code, and what was printed."""
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path / "cache"))

    def compile_all(variants, jobs, capability, progress):
        for variant in variants:
            save_kernel(variant, capability, b"entry", variant.name.encode())

    monkeypatch.setattr(kernels_wheel, "compile_all", compile_all)
    monkeypatch.setattr(kernels_wheel, "AUXILIARY_PRIMITIVES", (1,))
    kernels_wheel.main(["--arch", "sm_80", "sm_90", "--lmax", "0", "-o", str(tmp_path)])
    (path,) = tmp_path.glob("*.whl")
    return path, capsys.readouterr().out


@pytest.mark.thorough
def test_pip_installs_it(wheel, tmp_path, monkeypatch, kernels_package):
    path, told = wheel
    assert path.name == f"md4_kernels-{md4.__version__}-py3-none-any.whl"
    assert told.startswith(f"md4 {md4.__version__} of {Path(md4.__file__).parent}\nsm_80: ")
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(tmp_path / "lib")]
    subprocess.run([*command, str(path)], capture_output=True, check=True)
    (about,) = (tmp_path / "lib").glob("*.dist-info/METADATA")
    assert f"\nRequires-Dist: md4=={md4.__version__}\n" in about.read_text()
    monkeypatch.syspath_prepend(tmp_path / "lib")
    wanted = {variant.name for variant in asked_by_shells(0, True, "coulomb", (9, 0))}
    found = bundle.installed("sm_90")
    assert found.path.parent == tmp_path / "lib" / bundle.PACKAGE
    assert wanted < set(found.entries)
    assert all(bundle.installed_kernel(name, "sm_90") == f"entry\n{name}".encode() for name in wanted)
    assert set(bundle.installed("sm_80").entries) != set(found.entries)


def test_what_molecules_need_is_in_it(monkeypatch):
    """If their basis goes no further than the wheel, and what density fitting needs."""
    monkeypatch.setattr(kernels_wheel, "AUXILIARY_PRIMITIVES", (1,))
    monkeypatch.setattr(kernels_wheel.warmup, "asked_by_shells", lambda *_: {})
    asked = []

    def asked_by_basis(basis, *_):
        asked.append(basis.lmax)
        return {"one": 0}

    monkeypatch.setattr(kernels_wheel.warmup, "asked_by_basis", asked_by_basis)
    fitting = kernels_wheel.wanted(0, (9, 0))
    assert asked == []
    assert {"two_products", "fused_transforms"} & {variant.factory.__name__ for variant in fitting}
    monkeypatch.setattr(kernels_wheel, "MOLECULES", ("benzene/cc-pvdz", "benzene/cc-pvtz"))
    assert kernels_wheel.wanted(2, (9, 0)).keys() > {"one"}
    assert asked == [2]
