"""What the fault tests share: a small job in a process of its own, caches to spoil, and the ways to spoil them."""

import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from molecules import molecule
from places import LEAST_WORK

import md4
from md4.shells.basis import Basis

SOURCES = Path(md4.__file__).parent
TOLERANCE = 1e-12
# A user beside the one who runs the tests; the owner of what others planted.
NOBODY = 65534


def small_molecule():
    """Two atoms, an s and a p shell each."""
    return molecule("H 0 0 0; H 0.2 0.1 0.9", {"H": [[0, [1.2, 0.4], [0.4, 0.7]], [1, [0.8, 1.0]]]}, unit="Bohr")


@cache
def expected():
    """(int2e in s8, J, K) of `small_molecule` with `density`, by PySCF."""
    from pyscf import scf

    mol = small_molecule()
    return mol.intor("int2e", aosym="s8"), *scf.hf.get_jk(mol, density(mol.nao))


def density(nao):
    """A symmetric matrix."""
    dm = np.random.default_rng(0).normal(size=(nao, nao))
    return dm + dm.T


# Begins every script of a child. A restricted one that is root's loses what root may do whatever permissions are, by
# PR_CAPBSET_DROP of CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER; see prctl(2). Two threads share all work,
# however small it is. `compilations` counts what Numba compiles, by its own events, however md4 keeps the results.
PRELUDE = """
import ctypes, importlib, json, os, signal, sys, threading, time
spec = json.loads(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests in the background may ignore it
if spec["restricted"] and os.geteuid() == 0 and not spec.get("dropped"):
    libc = ctypes.CDLL(None)
    assert not any(libc.prctl(24, c, 0, 0, 0) for c in (1, 2, 3))
    os.execv(sys.executable, [sys.executable, sys.argv[0], json.dumps(spec | {"dropped": True})])
if spec["file_bytes"]:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (spec["file_bytes"],) * 2)
import numba
import numpy as np
from numba.core import event
import md4
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.contract.tensor import ao_tensor

for module, least in spec["least_work"]:
    setattr(importlib.import_module(f"md4.cpu.{module}"), least, 1)
compilations = event.RecordingListener()
event.register("numba:compile", compilations)
basis = Basis([Shell(l, np.array(e), np.array(c), np.array(r)) for l, e, c, r in spec["shells"]], True)
dm = np.array(spec["density"])

def job(engine=None, jk=None):
    tensor = ao_tensor(engine or md4.Engine(basis, backend=spec["backend"]), "s8")
    j, k = (jk or md4.JK(basis, backend=spec["backend"])).get_jk(dm)
    return [tensor.tolist(), j.tolist(), k.tolist()]

def report(results, **more):
    print(json.dumps({"results": results, "compiled": len(compilations.buffer) // 2} | more), flush=True)
"""
JOB = "report([job()])"
# Two seconds apart.
SIGNALS_AT_MOST = 60


@dataclass
class Done:
    """A child that has ended: what it reported and left."""

    status: int
    text: str
    errors: str

    @property
    def report(self):
        """Its last line; AssertionError where it failed."""
        assert self.status == 0, f"exit status {self.status}\n{self.text}\n{self.errors[-3000:]}"
        return json.loads(self.text.strip().splitlines()[-1])

    def right(self):
        """Its report, results compared with PySCF's."""
        report = self.report
        assert report["results"]
        for result in report["results"]:
            assert_right(result)
        return report


def assert_right(result):
    """Compares [int2e, J, K] with `expected`."""
    for ours, theirs in zip(result, expected(), strict=True):
        assert abs(np.array(ours) - theirs).max() < TOLERANCE


class Child:
    """A process that runs `script` after `PRELUDE`, with the cache in `folder` and md4 from `sources`.

    `restricted`: without root's power to read and write everything. `file_bytes`: no file can grow beyond. `more` is
    there as `spec[...]` for the script.
    """

    def __init__(self, folder, script=JOB, restricted=False, file_bytes=0, sources=SOURCES.parent, env=(), **more):
        basis = Basis.from_mol(small_molecule())
        shells = [(s.l, s.exponents.tolist(), s.coefficients.tolist(), s.centre.tolist()) for s in basis.shells]
        spec = {"restricted": restricted, "file_bytes": file_bytes, "backend": "cpu"} | more
        spec |= {"shells": shells, "density": density(basis.nao).tolist(), "least_work": LEAST_WORK}
        program = Path(folder).parent / f"job-{os.getpid()}-{id(self):x}.py"
        program.write_text(PRELUDE + textwrap.dedent(script))
        paths = os.pathsep.join(filter(None, [str(sources), os.environ.get("PYTHONPATH")]))
        here = {"MD4_CACHE_DIR": str(folder), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        # compiled in four fifths of the time; without any optimization nothing would be kept on disk
        numba = {"NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2", "NUMBA_OPT": "1"}
        environment = os.environ | numba | here | dict(env)
        self.process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(spec)], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=Path(folder).parent,
        )  # fmt: skip

    def stop(self, number):
        """Sends a signal until the process ends: Python may lose an interrupt, in a callback or while it cleans up."""
        for _ in range(SIGNALS_AT_MOST):
            self.process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
                return
        os.killpg(self.process.pid, signal.SIGKILL)
        raise AssertionError(f"it did not hear signal {number}")

    def done(self, timeout=240):
        """Waits for its end."""
        try:
            text, errors = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            text, errors = self.process.communicate()
            errors += "\nkilled: it hung"
        return Done(self.process.returncode, text, errors)


def run(folder, *args, timeout=240, **options):
    """`Done` of a child."""
    return Child(folder, *args, **options).done(timeout)


# caches ---------------------------------------------------------------------------------------------------------------


def files(folder):
    """All files of a cache, whatever they are."""
    return sorted(p for p in Path(folder).rglob("*") if p.is_symlink() or not p.is_dir())


def copy_of(folder, to):
    """A copy of a cache."""
    return Path(shutil.copytree(folder, to))


def remade(path, content):
    """A file with new content."""
    path.unlink()
    path.write_bytes(content)


def planted(marker):
    """A pickle that makes the file `marker` when it is loaded."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    return pickle.dumps(Bomb())


def truncate(path, rng):
    remade(path, path.read_bytes()[: rng.integers(max(1, path.stat().st_size))])


def flip(path, rng):
    content = bytearray(path.read_bytes() or b"?")
    for n in rng.integers(len(content), size=3):
        content[n] ^= int(rng.integers(1, 256))
    remade(path, bytes(content))


def garbage(path, rng):
    remade(path, rng.bytes(int(rng.integers(1, 4000))))


def empty(path, rng):
    remade(path, b"")


def directory(path, rng):
    path.unlink()
    path.mkdir()


def loop(path, rng):
    path.unlink()
    path.symlink_to(path)


def foreign(path, rng):
    """Another user's, which only that user may read."""
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o600)


def unreadable(path, rng):
    path.chmod(0)


def read_only(folder):
    """Takes all write permissions of a cache away."""
    for path in (*Path(folder).rglob("*"), Path(folder)):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))


# How a file of the cache may be spoilt; the last needs root.
DAMAGES = [truncate, flip, garbage, empty, directory, loop, unreadable, *([foreign] if os.geteuid() == 0 else [])]
