"""Variants and the cache of compiled kernels, as far as no GPU is needed; see test_gpu.py for the rest."""

import subprocess
import sys

import pytest

from md4 import dispatch
from md4.dispatch import Variant, cache_folder, cached_variants, fingerprint, load_kernel
from md4.kernels.recurrence import r_integrals
from md4.kernels.scatter import scatter_block


def test_variants_are_known_by_factory_and_facts():
    one, same, other = (Variant(r_integrals, (l, "coulomb")) for l in (4, 4, 5))
    assert one == same != other
    assert hash(one) == hash(same)
    assert one.name == "r_integrals-4-coulomb"
    assert Variant(scatter_block, ("s8",)).name == "scatter_block-s8"


def test_kernels_state_their_signature():
    kernel = Variant(r_integrals, (4, "coulomb")).kernel()
    assert kernel.function.__code__.co_argcount == len(kernel.signature)
    assert set(kernel.options()) <= {"launch_bounds"}


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("MD4_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "md4"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parts[-2:] == (".cache", "md4")


def test_cached_variants(monkeypatch, tmp_path):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    assert cached_variants() == []
    folder = tmp_path / fingerprint()
    folder.mkdir()
    (folder / "h_panels-sm_90.kernel").write_bytes(b"")
    assert cached_variants() == ["h_panels-sm_90"]


def test_fingerprint_is_the_same_in_another_process():
    code = "from md4.dispatch import fingerprint; print(fingerprint())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint()
    assert len(fingerprint()) == 16


@pytest.mark.parametrize("content", [None, b"", b"not a pickle", b"\x80\x04\x95\x10", b"\x80\x04}."])
def test_torn_files_are_compiled_again(tmp_path, content):
    path = tmp_path / "x.kernel"
    if content is not None:
        path.write_bytes(content)
    assert load_kernel(path) is None


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path):
    class Kernel:
        def _reduce_states(self):
            return {"name": "x"}

    (tmp_path / "file").write_text("")
    dispatch.save_kernel(tmp_path / "file" / "x.kernel", Kernel())
    dispatch.save_kernel(tmp_path / "folder" / "x.kernel", Kernel())
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["x.kernel"]
