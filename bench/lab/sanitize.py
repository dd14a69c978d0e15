"""NVIDIA's compute-sanitizer over every kernel family of md4: memcheck, racecheck, synccheck and initcheck.

    python bench/lab/sanitize.py
    python bench/lab/sanitize.py --tools racecheck --families fused "thread a quartet" --out logs
    python bench/lab/sanitize.py --list

First every family runs without a sanitizer, which fills the kernel cache; results are compared with the CPU backend.
Then each runs under each tool, several processes at a time on one GPU. Memory that md4 gives back is freed, and
every buffer is a new allocation, so that initcheck sees what nobody wrote and memcheck what is used after its end. The
exit status is 1 if a tool found anything, a result was wrong, a process failed, or a kernel of md4 never ran. Needs
compute capability 8.0 and compute-sanitizer of the CUDA toolkit.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from families import FAMILIES, counted_launches, factories, run

# Options of each tool. Failed calls of the driver are not of interest: md4 looks at what each of its own returns, and
# Numba asks the driver for functions that it may not have.
TOOLS = {
    "memcheck": ["--leak-check", "no", "--report-api-errors", "no"],
    "racecheck": ["--racecheck-report", "analysis", "--racecheck-num-workers", "2"],
    "synccheck": [],
    "initcheck": [],
    "initcheck-shared": ["--initcheck-address-space", "shared"],
}
USUAL = ["memcheck", "racecheck", "synccheck", "initcheck"]
OPTIONS = ["--target-processes", "application-only", "--show-backtrace", "device", "--demangle", "simple"]
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
# What the processes themselves say, after everything else.
REPORT = "md4 sanitize report: "

RECORD = re.compile(r"^========= (?! )(.+)$")
DETAIL = re.compile(r"^=========  +(.+)$")
PLACE = re.compile(r"\bat (?!0x)(.+?)(?:\+0x|$)")
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?\s*$")
HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
NO_FINDING = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application returned")


@dataclass
class Outcome:
    """What one process of one family said.

    Attributes
    ----------
    count : int or None
        Errors that the tool counted; None where it did not come to its end.
    findings : Counter
        How often the tool printed each finding, by its text.
    wrong : list of str
        Wrong results and errors of md4.
    launches : dict
        Launches of each kernel variant, by its name.
    seconds : float
        Wall time of the process.
    tail : str
        The last lines of what it printed.
    """

    count: int | None = None
    findings: Counter = field(default_factory=Counter)
    wrong: list = field(default_factory=list)
    launches: dict = field(default_factory=dict)
    seconds: float = 0.0
    tail: str = ""

    @property
    def clean(self):
        return self.count == 0 and not self.wrong

    def cell(self):
        """Its place in the table."""
        if self.count is None:
            text = "failed"
        else:
            text = "clean" if self.clean else f"{self.count} found" if self.count else "wrong"
        return f"{text} {self.seconds:.0f} s"


# what processes print -------------------------------------------------------------------------------------------------


def parsed(text, sanitized=True):
    """`Outcome` of a process's output, of one under a tool if `sanitized`."""
    lines, out = text.splitlines(), Outcome()
    out.tail = "\n".join(lines[-8:])
    if REPORT in text:  # what the tool prints may stand on the same line
        report, _ = json.JSONDecoder().raw_decode(text.split(REPORT)[-1])
        out.wrong, out.launches = report["wrong"], report["launches"]
        out.count = counted_errors(lines) if sanitized else 0
    out.findings = findings(lines)
    return out


def counted_errors(lines):
    """Errors by the tool's own summary, hazards and warnings included; None without a summary."""
    counts = []
    for line in lines:
        if found := HAZARDS.search(line):
            shown, errors, warnings = map(int, found.groups())
            counts.append(max(shown, errors + warnings))
        elif found := ERRORS.search(line):
            counts.append(int(found[1]))
    return max(counts, default=None)


def findings(lines):
    """Counter of the tool's findings, by the first line of each without its place and by the kernel."""
    records = []
    for line in lines:
        if found := RECORD.match(line):
            records.append([found[1].strip()])
        elif (found := DETAIL.match(line)) and records:
            records[-1].append(found[1].strip())
    return Counter(finding(r) for r in records if not r[0].startswith(NO_FINDING))


@cache
def kernel_name():
    """Pattern of the name of one of md4's kernels: its factory's name and what follows."""
    names = "|".join(sorted(factories(), key=len, reverse=True))
    return re.compile(rf"(?:{names})\w*?(?=B2v\d|\b)")


def finding(record):
    """One line for the lines of a record."""
    kernel = kernel_name().search(" ".join(record)) or PLACE.search(" ".join(record[1:]))
    head = record[0].split(" at ")[0]
    return f"{head}: {kernel[kernel.re.groups].strip()}" if kernel else head


# one family, in a process of its own ----------------------------------------------------------------------------------


def new_buffers():
    """Makes md4's pools free what was given back before they hand out more: each buffer is new, and nobody wrote it."""
    from md4.gpu.pool import Pool

    get = Pool.get

    def get_anew(pool, *request):
        pool.trim()
        return get(pool, *request)

    Pool.get = get_anew


def without_limits():
    """Makes J and K of whole rectangles, all of which is written.

    Else kernels read r and (ab|q] of quartets beyond the limits, which nobody wrote, beside those of others. They never
    use what they make of it, but initcheck cannot know that.
    """
    from md4.gpu.digest import DeviceDigest

    DeviceDigest.keep_counts = lambda *_: None


@contextmanager
def one_at_a_time(folder, variant):
    """Only one process at a time is here with a variant, so that the others find it compiled."""
    with open(Path(folder, f"{variant.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def work(name, folder, tool):
    """Runs a family on the GPU and reports."""
    new_buffers()
    if tool == "initcheck":
        without_limits()
    with counted_launches(partial(one_at_a_time, folder)) as found:
        wrong = run(name)
    launches = {variant.name: count for variant, count in found.items()}
    print(REPORT + json.dumps({"wrong": wrong, "launches": launches}), flush=True)


# the parent -----------------------------------------------------------------------------------------------------------


def find_sanitizer():
    """Path of compute-sanitizer, or None."""
    path = shutil.which("compute-sanitizer")
    return path or next((p for place in PLACES if (p := shutil.which("compute-sanitizer", path=place))), None)


def known(options, text):
    """Those of a list of options and values that a tool's help `text` names, since versions differ."""
    pairs = zip(options[::2], options[1::2])
    return [word for pair in pairs if pair[0] in text for word in pair]


def tool_command(sanitizer, tool, number):
    """The command before python; processes side by side have ports of their own."""
    text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=False).stdout
    ports = ["--port", str(49152 + 10 * number), "--launch-timeout", "120"]
    return [sanitizer, "--tool", tool.split("-")[0], *known(OPTIONS + TOOLS[tool] + ports, text)]


def run_process(command, log, timeout):
    """Runs a command with its output in `log`; returns the output, also of one that had to be killed."""
    environment = os.environ | {"MD4_JOBS": "1", "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with open(log, "w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    text = log.read_text(errors="replace")
    return text if child.returncode is None or child.returncode >= 0 else f"{text}\nended by signal {-child.returncode}"


def outcome(args, number, tool, name):
    """Runs a family in a process of its own, under a tool unless None."""
    command = [sys.executable, __file__, "--work", name, "--locks", args.locks]
    if tool:
        command = [*tool_command(args.sanitizer, tool, number), *command, "--tool", tool]
    start = time.perf_counter()
    log = Path(args.out, f"{tool or 'plain'}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log")
    out = parsed(run_process(command, log, args.timeout), tool is not None)
    out.seconds = time.perf_counter() - start
    print(f"{tool or 'plain':<17} {name:<24} {out.cell()}", flush=True)
    return out


def run_all(args, pairs, jobs):
    """{(tool, family): Outcome} of all `pairs`, `jobs` processes at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pair: pool.submit(outcome, args, number, *pair) for number, pair in enumerate(pairs)}
    return {pair: one.result() for pair, one in runs.items()}


def never_launched(outcomes):
    """Factories of md4.gpu.kernels of which no variant was launched."""
    names = {name.split("-")[0] for out in outcomes for name in out.launches}
    return sorted(factories() - names)


def table(found, tools, families):
    """Lines of tool x family."""
    rows = [["family", *(tool or "plain" for tool in tools)]]
    rows += [[name, *(found[tool, name].cell() for tool in tools)] for name in families]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def details(found):
    """Lines on everything that is not clean."""
    lines = []
    for (tool, name), out in found.items():
        if not out.clean:
            lines.append(f"{tool or 'plain'}, {name}:")
            lines += [f"    {count:>6} x {text}" for text, count in out.findings.most_common(12)]
            lines += [f"    {text}" for text in out.wrong]
            lines += [f"    | {line}" for line in out.tail.splitlines()] if out.count is None else []
    return lines


def check(args):
    """Everything; the exit status."""
    start = time.perf_counter()
    # all at once: most wait for kernels that others compile
    plain = run_all(args, [(None, name) for name in args.families], max(args.jobs, len(args.families)))
    print(f"kernels compiled, results compared: {time.perf_counter() - start:.0f} s", flush=True)
    found = run_all(args, [(tool, name) for tool in args.tools for name in args.families], args.jobs)
    print("", *table(plain | found, [None, *args.tools], args.families), *details(plain | found), sep="\n")
    missing = never_launched(plain.values()) if set(args.families) == set(FAMILIES) else []
    if missing:
        print(f"kernels that no family launched: {', '.join(missing)}")
    variants = {name for out in plain.values() for name in out.launches}
    bad = [pair for pair, out in (plain | found).items() if not out.clean]
    print(
        f"{len(found)} runs of {len(args.families)} families under {len(args.tools)} tools, {len(variants)} kernel "
        f"variants, {time.perf_counter() - start:.0f} s: {len(bad)} not clean"
    )
    return 1 if bad or missing else 0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=USUAL, metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one process (%(default)s)")
    parser.add_argument("--out", help="folder for the whole output of each process; default: none is kept")
    parser.add_argument("--sanitizer", default=find_sanitizer(), help="path of compute-sanitizer (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the families and the number of their jobs")
    parser.add_argument("--work", choices=FAMILIES, help=argparse.SUPPRESS)
    parser.add_argument("--locks", help=argparse.SUPPRESS)
    parser.add_argument("--tool", choices=TOOLS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = arguments()
    if args.list:
        print(*(f"{name:<24} {len(jobs)}" for name, jobs in FAMILIES.items()), sep="\n")
    elif args.work:
        work(args.work, args.locks, args.tool)
    elif args.sanitizer is None:
        raise SystemExit("compute-sanitizer is not on the path; give --sanitizer, it comes with the CUDA toolkit.")
    else:
        with TemporaryDirectory() as args.locks:
            args.out = args.out or args.locks
            Path(args.out).mkdir(parents=True, exist_ok=True)
            return check(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
