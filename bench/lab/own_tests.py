"""PySCF's own tests, run as they are and with all mean-field objects attached to md4 on a CPU.

    python bench/lab/own_tests.py pyscf/mp/test/test_mp2.py ...     files of a checkout of PySCF
    python bench/lab/own_tests.py --modes direct --limit 600 FILE   one mode, at most 600 s a file

PySCF's packages do not contain its tests, so that they have to be there. Modes are: `plain`, PySCF alone; `attached`,
each mean-field object is attached when it is made, and keeps the AO tensor as it does by default; `plain-direct` and
`direct`, the same where no object keeps a tensor, which gives correlated methods their integrals from md4. MP2 objects
are attached as well then. Tests that read `mf._eri` fail in both. What fails with md4 alone is printed with the reason.
The numbers tell how much md4 did, so that no test passes without it: objects attached, builds of J and K, fits, sets of
MO integrals, forces.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from functools import wraps
from pathlib import Path
from time import perf_counter

import pytest

MODES = ("plain", "attached", "plain-direct", "direct")
almost_equal = unittest.TestCase.assertAlmostEqual
COUNTED = ("attached", "builds", "fits", "MO sets", "forces", "refused")
counts: Counter[str] = Counter()
wrong: list[str] = []


# within pytest, as a plugin -------------------------------------------------------------------------------------------


def pytest_configure(config):
    unittest.TestCase.assertAlmostEqual = compared
    mode = os.environ["OWN_TESTS_MODE"]
    if "direct" in mode:
        from pyscf.scf import hf

        hf.SCF._is_mem_enough = lambda self: False
    if "plain" not in mode:
        count_work()
        attach_objects(mode == "direct")


def compared(self, first, second, places=None, *args, **options):
    """`assertAlmostEqual`, after which a test goes on, so that all numbers of two runs are compared."""
    try:
        almost_equal(self, first, second, places, *args, **options)
    except AssertionError:
        wrong.append(f"{first} not {second}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    wrong.clear()
    result = yield
    if wrong:
        raise AssertionError(", ".join(wrong))
    return result


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        record({"test": report.nodeid.partition("::")[2], "outcome": report.outcome,
                "why": None if report.passed else str(report.longrepr)[-1500:]})  # fmt: skip


def pytest_collectreport(report):
    if report.failed:
        record({"test": "collection", "outcome": "failed", "why": str(report.longrepr)[-1500:]})


def pytest_sessionfinish(session):
    record({"counts": counts})


def record(row):
    with open(os.environ["OWN_TESTS_FILE"], "a") as file:
        print(json.dumps(row), file=file)


def count_work():
    """Counts calls of the functions by which md4 serves PySCF."""
    from md4.pyscf import ao2mo, correlated, df, fitted_correlation, gradients, scf

    def counted(owner, name, what):
        function = getattr(owner, name)

        @wraps(function)
        def call(*args, **options):
            counts[what] += 1
            return function(*args, **options)

        setattr(owner, name, call)

    counted(scf, "build", "builds")
    counted(df.DF, "get_jk", "fits")
    for owner, name in [(correlated, "OccupiedVirtual"), (correlated, "DirectContraction"), (ao2mo, "write"),
                        (ao2mo, "write_half"), (ao2mo, "active_space"), (fitted_correlation, "mp2")]:  # fmt: skip
        counted(owner, name, "MO sets")
    counted(gradients.MD4Derivatives, "_md4_timed", "forces")
    counted(gradients.MD4FittedForces, "_md4_fitted", "forces")


def attach_objects(direct):
    """Has the constructors of PySCF attach their objects; `direct`: objects of MP2 as well."""
    from pyscf.mp import dfmp2, dfump2, mp2, ump2
    from pyscf.scf import hf

    attach_when_made(hf.SCF, lambda made: True)
    if direct:
        attach_when_made(mp2.MP2Base, lambda made: type(made) in (mp2.RMP2, ump2.UMP2))
        for cls in (dfmp2.DFMP2, dfump2.DFUMP2):
            attach_when_made(cls, lambda made, cls=cls: type(made) is cls)


def attach_when_made(cls, wanted):
    import md4

    theirs = cls.__init__

    @wraps(theirs)
    def init(self, *args, **options):
        theirs(self, *args, **options)
        if wanted(self):
            try:
                md4.attach(self, backend="cpu")
                counts["attached"] += 1
            except md4.UnsupportedError:
                counts["refused"] += 1

    cls.__init__ = init


# files ----------------------------------------------------------------------------------------------------------------


def run(path, mode, limit):
    """Outcomes by test, reasons of failures, counts, seconds and whether the limit was reached."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OWN_TESTS_MODE": mode, "OWN_TESTS_FILE": str(results), "PYTHONPATH": here}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "own_tests", "-p", "no:cacheprovider", "-c", os.devnull,
                   "--rootdir", str(path.parent), "-W", "ignore", "--tb=short", str(path)]  # fmt: skip
        begin, late = perf_counter(), False
        try:
            subprocess.run(command, check=False, env=environment, cwd=folder, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired:
            late = True
        rows = [json.loads(line) for line in results.read_text().splitlines()]
    tests = {row["test"]: row for row in rows if "test" in row}
    found = next((row["counts"] for row in rows if "counts" in row), {})
    return tests, found, perf_counter() - begin, late


def report(path, mode, tests, found, seconds, late, alone):
    """Prints a line on a file, and failures unlike those of PySCF alone, of which `alone` has the reasons."""
    outcomes = Counter(row["outcome"] for row in tests.values())
    numbers = ", ".join(f"{outcomes[name]} {name}" for name in ("passed", "failed", "skipped") if outcomes[name])
    served = ", ".join(f"{found[name]} {name}" for name in COUNTED if name in found)
    print(f"{'/'.join(path.parts[-3:])} {mode}: {numbers}, {seconds:.0f} s{', cut off' * late}; {served}", flush=True)
    failed = reasons(tests)
    for name, reason in failed.items():
        if name in alone and rounded(alone[name][-1]) == rounded(reason[-1]):
            print(f"    {name}: as without md4", flush=True)
        else:
            print(f"    {name}\n" + "\n".join(f"        {line}" for line in reason[-6:]), flush=True)
    return failed


def reasons(tests):
    """Lines of the reason of each failure, by the name of the test."""
    return {name: row["why"].splitlines() for name, row in tests.items() if row["outcome"] == "failed"}


def rounded(text):
    """`text` with its numbers rounded, as those of two runs differ, and the names of PySCF's classes."""
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda found: f"{float(found[0]):.6f}", text.replace("MD4", ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--limit", type=float, default=240, help="seconds a file and mode (%(default)g)")
    args = parser.parse_args()
    for path in args.files:
        alone: dict[str, list[str]] = {}
        for mode in args.modes:
            failed = report(path.resolve(), mode, *run(path.resolve(), mode, args.limit), alone)
            if "plain" in mode:
                alone = failed


if __name__ == "__main__":
    main()
