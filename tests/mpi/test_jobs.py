"""Jobs of the tests of MPI: ranks that wait in vain are killed within the limit of time."""

import time
from pathlib import Path

import mpi_jobs

pytestmark = mpi_jobs.MARKS

# Without md4, which takes longer to be imported.
PRELUDE = """
import os, sys, time
from pathlib import Path
from mpi4py import MPI
comm = MPI.COMM_WORLD
Path(sys.argv[1], f"{{comm.rank}}.pid").write_text(str(os.getpid()))
"""


def test_a_job_that_waits_in_vain_is_killed(tmp_path):
    start = time.monotonic()
    done = mpi_jobs.run(tmp_path, 2, """
        print("begun", flush=True)
        if comm.rank == 0:
            comm.Barrier()
        time.sleep(600)
        """, seconds=5, prelude=PRELUDE)  # fmt: skip
    assert done.status is None
    assert done.printed.count("begun") == 2
    assert time.monotonic() - start < 60
    assert len(done.processes) == 2
    while any(alive(process) for process in done.processes):
        assert time.monotonic() - start < 60
        time.sleep(0.1)


def alive(process):
    """Whether a process still runs; one that has ended may wait for its parent as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
