"""Real processes that compile the same kernels on one empty cache, for a GPU that need not be there."""

import os
import re
import signal
import subprocess
import sys

import pytest

PROCESS = """
import logging, signal, sys
from md4.gpu import warmup
from md4.gpu.compile import Variant
from md4.gpu.kernels.recurrence import r_in_registers
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell ignores
logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
logging.getLogger("md4").setLevel(logging.DEBUG)
variants = [Variant(r_in_registers, (l, "coulomb")) for l in range(4)]
warmup.current_capability, warmup.WORTH_PROCESSES = lambda: (9, 0), 1
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[1] == "first call":
    warmup.compile_ahead(lambda: variants)
else:
    warmup.compile_all(variants, 2, (9, 0), False)
print(len(warmup.missing(variants, (9, 0))))
"""


def begin(folder, way="first call"):
    """A process with the cache in a folder, which waits until `go` is called."""
    env = os.environ | {"MD4_CACHE_DIR": str(folder), "MD4_JOBS": "2"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", PROCESS, way], env=env, text=True, start_new_session=True, **pipes)


def go(processes):
    """Lets processes begin to compile at the same time."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def ended(process):
    """The log of a process that has found all kernels compiled when it ended."""
    out, log = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, "0\n"), log
    return log


def compiled(log):
    """Names of the kernels that were compiled for a process."""
    return re.findall(r"^compiled (\S+) in", log, re.MULTILINE)


WANTED = [f"r_in_registers-{l}-coulomb" for l in range(4)]


@pytest.mark.sample("two")
@pytest.mark.parametrize("ways", [["first call", "warm-up"], ["first call"] * 8], ids=["two", "eight"])
def test_each_kernel_is_compiled_once(tmp_path, ways):
    """By a first call or by `md4 warmup`, whoever comes first; the others say that they wait."""
    processes = [begin(tmp_path, way) for way in ways]
    go(processes)
    logs = [ended(process) for process in processes]
    assert sorted(name for log in logs for name in compiled(log)) == WANTED
    assert sorted("waiting: another process compiles" in log for log in logs) == [False] + [True] * (len(ways) - 1)
    assert len(list(tmp_path.rglob("*.kernel"))) == len(WANTED)


@pytest.mark.thorough
def test_the_others_go_on_without_the_one_that_compiled(tmp_path):
    """It is killed once it has a kernel; another one is interrupted while it waits, at once."""
    first, *others = [begin(tmp_path) for _ in range(4)]
    go([first])
    assert "are compiled by" in first.stderr.readline()
    go(others)
    for process in others:
        assert "waiting: another process compiles" in process.stderr.readline()
    others[0].send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in others[0].communicate(timeout=20)[1]
    assert first.stderr.readline().startswith("compiled ")
    first.kill()
    logs = [ended(process) for process in others[1:]]
    first.communicate(timeout=20)
    assert first.returncode == -signal.SIGKILL
    names = [name for log in logs for name in compiled(log)]
    assert len(names) == len(set(names)) < len(WANTED)
