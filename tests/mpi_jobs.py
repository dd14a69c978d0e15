"""What the tests of MPI share: a script that mpiexec runs on several ranks, within a limit of time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import md4

SOURCES, TESTS = Path(md4.__file__).parent.parent, Path(__file__).parent
# The one that was installed with this Python belongs to the MPI library of its mpi4py.
BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")
# One job at a time: each has several processes. No test waits longer than its limit, even if ranks wait in vain.
MARKS = [
    pytest.mark.xdist_group("mpi"),
    pytest.mark.skipif(
        find_spec("mpi4py") is None or MPIEXEC is None,
        reason="tests of MPI need mpi4py and mpiexec: pip install mpi4py mpich",
    ),
]
SECONDS, KILL_SECONDS = 300, 20
# Open MPI starts neither as root nor with more ranks than cores unless it is told to. MPICH ignores these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip
# MPICH then takes each rank for a node of its own, or the even and the odd ranks for two nodes.
EACH_A_NODE, TWO_NODES = {"MPIR_CVAR_NOLOCAL": "1"}, {"MPIR_CVAR_ODD_EVEN_CLIQUES": "1"}

# Begins the script of each rank. `folder` belongs to the job.
PRELUDE = """
import json, os, sys, threading, time
from pathlib import Path
folder, size = Path(sys.argv[1]), int(sys.argv[2])
import mpi4py
mpi4py.rc.thread_level = {threads!r}
from mpi4py import MPI
import numpy as np
comm = MPI.COMM_WORLD
assert comm.size == size, f"mpiexec started {{size}} ranks, of which mpi4py knows {{comm.size}}"
(folder / f"{{comm.rank}}.pid").write_text(str(os.getpid()))
import md4
from md4.contract.ranks import STOPPED, Ranks

def report(value):
    (folder / f"{{comm.rank}}.json").write_text(json.dumps(value))

def caught(call, *arguments, **options):
    "The exception of a call as text, or None."
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
"""


@dataclass
class Done:
    """A job that has ended: the exit status of mpiexec, None where it was killed; what it printed and reported."""

    status: int | None
    printed: str
    folder: Path
    size: int

    def check(self):
        """AssertionError where the job failed or was killed."""
        assert self.status == 0, f"exit status {self.status} of mpiexec\n{self.printed[-4000:]}"

    @property
    def reports(self):
        """What each rank reported; AssertionError as for `check`."""
        self.check()
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(self.size)]

    @property
    def processes(self):
        """Numbers of the processes of the ranks."""
        return [int(path.read_text()) for path in self.folder.glob("*.pid")]


def needs_mpi(test):
    """A test that needs MPI. Modules say ``pytestmark = MARKS``."""
    for mark in MARKS:
        test = mark(test)
    return test


def run(folder, size, script, seconds=SECONDS, env=(), threads="multiple", before=(), prelude=PRELUDE):
    """Runs a script after `prelude` on `size` ranks. What is left after `seconds` is killed.

    `threads` is the level of threads of MPI, and `before` what stands before the script, such as ["-m", "mpi4py"].
    """
    program = folder / "job.py"
    program.write_text(prelude.format(threads=threads) + textwrap.dedent(script))
    paths = os.pathsep.join(filter(None, [str(SOURCES), str(TESTS), os.environ.get("PYTHONPATH")]))
    one_thread = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "MD4_JOBS": "1"}
    command = [MPIEXEC, "-n", str(size), sys.executable, *before, str(program), str(folder), str(size)]
    process = subprocess.Popen(
        command, env=os.environ | OPEN_MPI | one_thread | {"PYTHONPATH": paths} | dict(env), cwd=folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=seconds)
        return Done(process.returncode, printed, folder, size)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec then ends the ranks
        try:
            printed, _ = process.communicate(timeout=KILL_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
        return Done(None, printed, folder, size)
