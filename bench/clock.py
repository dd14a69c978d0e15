"""Time, and the machine: events on the GPU's stream, the wall clock on the CPU; CSV and versions."""

import csv
import subprocess
from pathlib import Path
from time import perf_counter

import numpy as np

from md4.cli.info import versions
from md4.gpu.context import cuda
from md4.support.cache import fingerprint

ROOT = Path(__file__).resolve().parent.parent


def seconds_once(backend, call):
    """Seconds of one call: between two events of the backend's stream, or by the wall clock."""
    if backend.name == "cpu":
        begin = perf_counter()
        call()
        return perf_counter() - begin
    start, stop = cuda.event(), cuda.event()
    start.record(backend.context.stream)
    call()
    stop.record(backend.context.stream)
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3


def wall_seconds(backend, call):
    """Seconds that a caller waits for one call and its result."""
    synchronize(backend)
    begin = perf_counter()
    call()
    synchronize(backend)
    return perf_counter() - begin


def median_seconds(backend, call, repeats=5, warm=2, clock=seconds_once):
    """(median, spread) of the seconds of a call after `warm` calls; spread is (largest - smallest) / median."""
    for _ in range(warm):
        call()
    synchronize(backend)
    times = np.array([clock(backend, call) for _ in range(repeats)])
    median = float(np.median(times))
    return median, float(np.ptp(times)) / median


def synchronize(backend):
    """Waits for all work of a backend."""
    if backend.name != "cpu":
        backend.context.stream.synchronize()


def one_thread():
    """Keeps the CPU backend, BLAS and libcint on one thread."""
    import numba
    from threadpoolctl import threadpool_limits

    numba.set_num_threads(1)
    threadpool_limits(1)


def device_name(backend):
    """The GPU's or the processor's name."""
    if backend.name == "cpu":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "CPU") + ", one core"
    name = cuda.get_current_device().name
    return name.decode() if isinstance(name, bytes) else name


def commit():
    """Short commit of the working tree ('+' where it has changes), or 'unknown'; and md4's source fingerprint."""
    try:
        head = git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "md4") else "")
    except (OSError, subprocess.CalledProcessError):
        head = "unknown"
    return f"{head}/{fingerprint()[:8]}"


def git(*args):
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def describe(backend):
    """One line: device, driver, versions, commit."""
    found = versions()
    names = ("python", "numpy", "numba", "numba-cuda", "cuda-toolkit", "pyscf")
    parts = [device_name(backend), *(f"{n} {found[n]}" for n in names if found.get(n)), f"md4 {commit()}"]
    if backend.name != "cpu":
        parts.insert(1, f"sm_{''.join(map(str, backend.context.capability))} {backend.context.unit}")
    return ", ".join(parts)


def write_csv(path, rows):
    """Dictionaries with the same keys as CSV."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path):
    """Rows of a CSV; what looks like a number is one."""
    with open(path, newline="") as file:
        return [{k: number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def number(text):
    try:
        return float(text)
    except ValueError:
        return text
