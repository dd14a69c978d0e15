"""Tables of README.md, bench/RESULTS.md and bench/LAB_NOTES.md, from the CSV files in bench/results.

    python bench/tables.py

writes them anew between the lines '<!-- table NAME -->' and '<!-- end of table -->' of these pages, so that no number
is copied by hand. A test compares pages and files.

scf.csv, scf-scaling.csv    J and K on the GPU, PySCF of the same run (bench/scf.py)
scf-peers.csv               J and K of other programs, of other runs on the same kind of machine
jk.csv, jk_before.csv       J and K of the molecules of issue 17, now and at 325e0e2, in one run (bench/scf.py)
eri.csv                     classes on the GPU (bench/eri.py)
cpu.csv, cpu-before.csv, cpu-cold.csv       the CPU beside libcint and PySCF, and first calls (bench/cpu.py)
scaling-devices.csv, scaling-simulated.csv  J and K on several GPUs, measured and simulated (bench/scaling_devices.py)
peers.csv                   J and K beside GPU4PySCF in one process (bench/peers.py)
three_centre.csv            classes over three centres on the GPU (bench/three_centre.py)
"""

import csv
import re
from functools import partial
from pathlib import Path

from clock import ROOT, number, read_csv

RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "bench" / "RESULTS.md", ROOT / "bench" / "LAB_NOTES.md")
MARK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
OTHER_RUN = "*"  # marks a time that is of another run than the others of its row
# Columns of bench/cpu.py that say where a row comes from.
ORIGIN = ("commit", "processor", "processors", "python", "numpy", "numba", "pyscf")
MISSING_DEVICES = "**To be measured** by `bench/scaling_devices.py`; then `bench/tables.py` and `bench/plots.py`."
MISSING = "**To be measured** by `bench/cpu.py`; then `python bench/tables.py` and `python bench/plots.py`."


def formula(name):
    """'8 waters' as a chemist writes it."""
    number = re.match(r"(\d+) waters$", name)
    return f"(H2O){number[1]}" if number else name.replace("vitaminc", "vitamin C")


def basis_name(basis):
    """'aug-cc-pv5z' as the literature writes it."""
    basis = re.sub(r"def2-(\w+)", lambda m: f"def2-{m[1].upper()}", basis)
    return re.sub(r"cc-pv(.)z", lambda m: f"cc-pV{m[1].upper()}Z", basis)


def class_name(row):
    """'(dd|dd)' in a table."""
    return f"({row['class']})".replace("|", r"\|")


def system_name(row):
    """'benzene/cc-pv5z'."""
    return f"{row['system']}/{row['basis']}"


def by_name(file):
    """{system name: row} of a file of bench/scf.py."""
    return {system_name(row): row for row in read_csv(RESULTS / file)}


# Systems of the front table, by their numbers of functions.
FRONT = ("water/cc-pv6z", "water/aug-cc-pv6z", "benzene/cc-pv5z", "8 waters/cc-pvqz", "benzene/cc-pv6z",
         "27 waters/cc-pvtz")  # fmt: skip


def builds():
    """Systems of the front table of J and K: dictionaries with 'label', 'nao' and {program: (seconds, same run)}."""
    newest, with_pyscf = by_name("jk.csv"), by_name("scf.csv")
    beside = {system_name(row): row for row in read_csv(RESULTS / "peers.csv") if row["method"] == "direct"
              and row["matrices"] == "J, K"}  # fmt: skip
    others, found = read_csv(RESULTS / "scf-peers.csv"), []
    for system in FRONT:
        row = newest.get(system) or with_pyscf[system]
        times = {"md4": (row["seconds"], True)}
        if system in with_pyscf:
            times["PySCF"] = with_pyscf[system]["pyscf"], system not in newest
        times |= {other["program"]: (other["seconds"], False) for other in others if system_name(other) == system}
        if system in beside:
            times["GPU4PySCF"] = beside[system]["peer_seconds"], True
        found.append({"label": molecule(row), "nao": int(row["nao"]), "times": times})
    return found


def seconds(time):
    """A cell of (seconds, same run), or of None."""
    return "" if time is None else f"{time[0]:.3g}" + ("" if time[1] else f" {OTHER_RUN}")


def table(columns, rows):
    """Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [columns, ["---"] * len(columns), *rows])


def build_table():
    programs = {"md4": "md4, H200", "GPU4PySCF": "GPU4PySCF 1.9, H200", "PySCF": "PySCF, 16 threads"}
    rows = [[r["label"], str(r["nao"]), *(seconds(r["times"].get(p)) for p in programs)] for r in builds()]
    return table(["system", "functions", *programs.values()], rows)


def classes():
    """Rows of eri.csv of the (ll|ll) classes with K = 1."""
    return [r for r in read_csv(RESULTS / "eri.csv") if r["K"] == 1 and len(set(r["class"]) - {"|"}) == 1]


def class_table():
    rows = [
        [class_name(r), f"{r['quartets_per_s']:.3g}", f"{r['tflops']:.3g}",
         f"{100 * r['share_of_peak']:.0f}%", f"{r['times_libcint']:.0f}x", f"{r['times_libintx']:.1f}x"]
        for r in classes()
    ]  # fmt: skip
    names = ["class", "quartets/s", "useful TFLOP/s", "share of FP64 peak", "one core of libcint", "LibintX, H200"]
    return table(names, rows)


def rate_table(k):
    """All rows of eri.csv of a degree of contraction."""
    rows = [r for r in read_csv(RESULTS / "eri.csv") if r["K"] == k]
    lines = [
        [class_name(r), f"{r['quartets_per_s']:.3g}", f"{r['tflops']:.3g}",
         f"{100 * r['share_of_peak']:.1f}", f"{r['written_tbs']:.3f}", f"{100 * r['share_of_limit']:.1f}", r["bound"],
         f"{r['times_libcint']:.0f}", f"{r['times_libintx']:.2f}" if r["times_libintx"] else "", f"{r['error']:.1e}"]
        for r in rows
    ]  # fmt: skip
    names = ["class", "quartets/s", "TFLOP/s", "% peak", "TB/s out", "% limit", "bound"]
    return table([*names, "x libcint", "x LibintX", "error"], lines)


# on CPUs --------------------------------------------------------------------------------------------------------------


def cpu_rows(name="cpu.csv"):
    """Rows of a file of bench/cpu.py, or nothing before it was measured."""
    path = RESULTS / name
    if not path.exists():
        return []
    with path.open(newline="") as file:
        # A commit such as 12e4567 is no number.
        return [{k: v if k in ORIGIN else number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def idle_rows():
    """Those measured without other work beside."""
    return [row for row in cpu_rows() if not row["busy"]]


def subject(row):
    """What a row of bench/cpu.py is about: a molecule and its basis, or a class of primitive shells."""
    if row["kind"] == "class":
        return rf"({2 * row['system']}\|{2 * row['system']})"
    name, basis = row["system"].split("/")
    return f"{name} {basis_name(basis)}"


def by_system(rows):
    """{(subject, threads): {kind: row}} in the order of the rows."""
    found = {}
    for row in rows:
        found.setdefault((subject(row), int(row["threads"])), {})[row["kind"]] = row
    return found


def cpu_cells(row):
    """md4's seconds, those of the other program, and their ratio."""
    return ["", "", ""] if row is None else [f"{row['seconds']:.3g}", f"{row['libcint']:.3g}", f"{row['ratio']:.2g}"]


def origin(rows):
    """A sentence on each machine and commit that rows are from."""
    text = ""
    for commit, processor, count, *versions in dict.fromkeys(tuple(row[key] for key in ORIGIN) for row in rows):
        python, numpy, numba, pyscf = versions
        text += f"Commit {commit.partition('/')[0]}; {processor}, {count} processors; "
        text += f"Python {python}, NumPy {numpy}, Numba {numba}, PySCF {pyscf}.\n"
    return text


def cpu_short():
    """Ratios of the molecules, as README shows them."""
    rows = [row for row in idle_rows() if row["kind"] != "class"]
    names = {
        "int2e": "tensor, libcint = 1", "jk": "J and K, direct, PySCF = 1", "scf": "SCF as it is, PySCF = 1",
        "scf-direct": "SCF, both direct, PySCF = 1",
    }  # fmt: skip
    lines = [
        [label, str(threads), *(f"{row['ratio']:.2g}" if (row := found.get(kind)) else "" for kind in names)]
        for (label, threads), found in by_system(rows).items()
    ]
    return table(["system", "threads", *names.values()], lines) + "\n" + origin(rows) if rows else MISSING


def cpu_table():
    """Seconds of md4 and of libcint or PySCF, a line for each molecule or class."""
    rows = idle_rows()
    names = ["tensor, md4", "libcint", "ratio", "J and K direct, md4", "PySCF", "ratio", "SCF, md4", "PySCF", "ratio"]
    lines = [
        [label, str(threads), *cpu_cells(found.get("int2e", found.get("class"))),
         *cpu_cells(found.get("jk")), *cpu_cells(found.get("scf"))]
        for (label, threads), found in by_system(rows).items()
    ]  # fmt: skip
    return table(["system", "threads", *names], lines) + "\n" + origin(rows) if rows else MISSING


def cpu_details(name="cpu.csv"):
    """All rows of a file, also those measured beside busy processes."""
    rows = cpu_rows(name)
    names = ["", "system", "threads", "busy beside", "first s", "s", "libcint or PySCF s", "ratio", "commit"]
    lines = [
        [row["kind"], subject(row), f"{row['threads']:.0f}", f"{row['busy']:.0f}", f"{row['first']:.3g}",
         *cpu_cells(row), row["commit"]]
        for row in rows
    ]  # fmt: skip
    return table(names, lines) if rows else MISSING


def cpu_cold():
    """First calls with an empty and with a filled cache."""
    rows = cpu_rows("cpu-cold.csv")
    found = {}
    for row in rows:
        found.setdefault((row["kind"], subject(row), int(row["threads"])), {})[row["cache"]] = row
    cells = [("empty", "first"), ("empty", "process"), ("filled", "first"), ("filled", "process")]
    lines = [
        [kind, label, str(threads), *(f"{states[cache][key]:.3g}" for cache, key in cells)]
        for (kind, label, threads), states in found.items()
    ]
    names = ["empty: first call s", "process s", "filled: first call s", "process s"]
    return table(["", "system", "threads", *names], lines) + "\n" + origin(rows) if rows else MISSING


def cpu_figure():
    """The plot of cpu.csv as bench/RESULTS.md shows it, once there is one."""
    return "![Seconds of md4 beside libcint and PySCF on the CPU](../docs/figures/cpu.svg)" if idle_rows() else MISSING


# on several GPUs ------------------------------------------------------------------------------------------------------


def device_rows(name="scaling-devices.csv"):
    """Rows of a file of bench/scaling_devices.py, or nothing before it was made."""
    path = RESULTS / name
    return read_csv(path) if path.exists() else []


def molecule(row):
    """'(H2O)64 cc-pVTZ'."""
    return f"{formula(row['system'])} {basis_name(row['basis'])}"


def way(row):
    """What a row was measured on."""
    count = int(row["devices"])
    return f"{count} GPUs, {'one process' if row['form'] == 'process' else 'ranks'}" if count > 1 else "1 GPU"


def device_table():
    """Seconds on one device, and speed-up on several."""
    rows, found = device_rows(), {}
    for row in rows:
        found.setdefault((molecule(row), row["matrices"]), {})[way(row)] = row
    ways = list(dict.fromkeys(map(way, sorted(rows, key=lambda row: (row["devices"], row["form"])))))
    lines = [
        [name, matrices, *(speed(mine.get(this)) for this in ways)] for (name, matrices), mine in found.items()
    ]
    return table(["system", "matrices", *ways], lines) + device_origin(rows) if rows else MISSING_DEVICES


def speed(row):
    """A cell: seconds, and the speed-up where there are several devices."""
    if row is None:
        return ""
    text = f"{row['seconds']:.3g} s"
    return text if row["devices"] == 1 else f"{text}, {row['speedup']:.2f}x, {100 * row['efficiency']:.0f}%"


def device_origin(rows):
    """A line for each machine and commit."""
    return "".join(f"\n{machine}.\n" for machine in dict.fromkeys(row["machine"] for row in rows))


def device_details():
    """All columns."""
    rows = device_rows()
    names = ["difference", "lists s", "uneven", "sums", "beside", "peak GB of each"]
    lines = [
        [molecule(row), row["matrices"], way(row), f"{row['seconds']:.3g}", f"{100 * row['spread']:.0f}",
         f"{row['difference']:.1e}", f"{row['lists']:.2g}",
         *(f"{100 * row[share]:.1f}%" for share in ("uneven", "sums", "beside")), str(row["peak_gb"])]
        for row in rows
    ]  # fmt: skip
    return table(["system", "matrices", "on", "seconds", "± %", *names], lines) if rows else MISSING_DEVICES


def simulated_table():
    """Efficiency by the number of workers."""
    rows = device_rows("scaling-simulated.csv")
    lines = [
        [molecule(row), row["matrices"], f"{row['workers']:.0f}", f"{row['seconds']:.3g}",
         f"{row['workers'] * row['efficiency']:.4g}", f"{100 * row['efficiency']:.0f}%",
         *(f"{100 * row[share]:.1f}%" for share in ("uneven", "cutting", "sums", "beside")),
         row["limit"] if row["workers"] > 1 else ""]
        for row in rows
    ]  # fmt: skip
    names = ["GPUs", "seconds", "speed-up", "efficiency", "uneven", "cutting", "sums", "beside", "limited by"]
    return table(["system", "matrices", *names], lines) if rows else MISSING_DEVICES


def device_figure():
    """The plot, once there is one."""
    there = device_rows() or device_rows("scaling-simulated.csv")
    return "![Efficiency of builds on several GPUs](../docs/figures/scaling-devices.svg)" if there else MISSING_DEVICES


def peers_table():
    """md4 and GPU4PySCF in one process."""
    rows = read_csv(RESULTS / "peers.csv")
    lines = [
        [molecule(row), str(int(row["nao"])), row["method"], row["matrices"], f"{row['seconds']:.3g}",
         f"{row['peer_seconds']:.3g}", f"{row['ratio']:.2f}", f"{row['difference']:.0e}"]
        for row in rows
    ]  # fmt: skip
    names = ["functions", "builds", "matrices", "md4, s", "GPU4PySCF, s", "ratio", "difference"]
    return table(["system", *names], lines) + device_origin(rows)


# Seconds of a build of J and K before digestion in place (325e0e2), and what was aimed at.
BUILDS = {
    "water/cc-pv6z": (0.15, 0.08), "vitaminc/def2-tzvpp": (0.229, 0.11), "benzene/cc-pvqz": (0.289, 0.14),
    "benzene/cc-pv5z": (1.65, 0.80), "8 waters/cc-pvqz": (0.81, 0.40), "taxol/def2-svp": (1.23, 0.5),
    "tamoxifen/def2-tzvpp": (2.31, 1.1), "benzene/cc-pv6z": (12.8, 6.0), "64 waters/cc-pvdz": (1.33, 0.55),
    "27 waters/cc-pvtz": (2.0, 0.95), "64 waters/cc-pvtz": (14.2, 7.0),
}  # fmt: skip
# The same of density fitting: set-up, J and K.
FITS = {
    "27 waters/cc-pvtz": (1.0, 0.15), "8 waters/cc-pvqz": (0.20, 0.012), "benzene/cc-pv5z": (0.20, 0.010),
    "tamoxifen/def2-tzvpp": (0.6, 0.06), "taxol/def2-tzvpp": (6, 4),
}  # fmt: skip


def jk_table():
    """Direct J and K of the molecules of `BUILDS`, before and now."""
    rows, earlier = (by_name(file) for file in ("jk.csv", "jk_before.csv"))
    lines = []
    for system, (before, aim) in BUILDS.items():
        row, old = rows[system], earlier[system]
        error = f"{row['error']:.1e}" if row["error"] == row["error"] else "not checked"
        cells = [f"{before:g}", *(f"{r['seconds']:.3g}" for r in (old, row)), f"{aim:g}"]
        lines.append([molecule(row), str(int(row["nao"])), *cells, f"{row['computed']:.3g}", error])
    names = ["functions", "before", "before, same run", "now", "aim", "quartets", "error"]
    return table(["system", *names], lines) + device_origin([*rows.values(), *earlier.values()])


def fitting_table():
    """Density fitting of md4 and of PySCF in one process."""
    rows, found = read_csv(RESULTS / "fitting.csv"), {}
    for row in rows:
        found.setdefault(system_name(row), {})[row["matrices"]] = row
    lines = []
    for name, (setup, both) in FITS.items():
        mine = found.get(name)
        if mine is None:
            continue
        row = mine["J, K"]
        cells = [f"{row['naux']:.0f}", f"{row['setup']:.3g}", f"{setup:g}", f"{row['seconds']:.3g}", f"{both:g}"]
        cells += [f"{mine[name]['seconds']:.3g}" for name in ("J", "K")]
        cells += [f"{row[name]:.3g}" if row.get(name) else "" for name in ("pyscf_setup", "pyscf_seconds")]
        difference = f"{row['pyscf_difference']:.0e}" if row.get("pyscf_difference") else ""
        lines.append([molecule(row), *cells, difference, f"{row['peak_gb']:.1f}"])
    names = ["naux", "set-up", "aim", "J and K", "aim", "J", "K"]
    return table(["system", *names, "PySCF set-up", "J and K", "difference", "peak GB"], lines) + device_origin(rows)


def fitting_device_table():
    """Density fitting on several GPUs of one process."""
    rows, found = read_csv(RESULTS / "fitting_devices.csv"), {}
    for row in rows:
        system, basis = row["system"].split("/")
        found.setdefault(molecule({"system": system.replace("waters", " waters"), "basis": basis}), []).append(row)
    counts, lines = sorted({int(row["devices"]) for row in rows}), []
    for name, mine in found.items():
        on = {int(row["devices"]): f"{row['setup']:.3g}, {row['jk']:.3g}" for row in mine}
        lines.append([name, *(on.get(n, "") for n in counts), f"{max(row['difference'] for row in mine):.0e}"])
    return table(["system", *(f"{n} GPU{'s' * (n > 1)}" for n in counts), "difference"], lines)


def three_centre_table():
    """Classes (ab|P), as blocks and as parts of a matrix."""
    rows, found = read_csv(RESULTS / "three_centre.csv"), {}
    for row in rows:
        found.setdefault(row["class"], {})[row["target"]] = row
    lines = [
        [f"({name})".replace("|", "\\|"), "; ".join(dict.fromkeys(mine[t]["plan"] for t in mine)),
         *(f"{mine[t]['triples_per_s']:.3g}" for t in mine),
         *(f"{100 * mine[t]['share_of_limit']:.0f}%" for t in mine), mine["matrix"]["bound"],
         f"{max(row['error'] for row in mine.values()):.0e}"]
        for name, mine in found.items()
    ]  # fmt: skip
    names = ["plan", "triples/s", "into a matrix", "of the limit", "into a matrix", "bound", "error"]
    return table(["class", *names], lines)


TABLES = {
    "builds": build_table, "classes": class_table, "cpu": cpu_table, "cpu-short": cpu_short, "cpu-figure": cpu_figure,
    "cpu-details": cpu_details, "cpu-cold": cpu_cold, "cpu-before": partial(cpu_details, "cpu-before.csv"),
    "devices": device_table, "devices-details": device_details, "devices-simulated": simulated_table,
    "devices-figure": device_figure, "peers": peers_table, "three-centre": three_centre_table,
    "rates-1": partial(rate_table, 1), "rates-5": partial(rate_table, 5), "rates-25": partial(rate_table, 25),
    "jk": jk_table, "fitting": fitting_table, "fitting-devices": fitting_device_table,
}  # fmt: skip


def filled(text):
    """A page with its tables made anew."""
    return MARK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]().rstrip()}\n\n{m[3]}", text)


def main():
    for page in PAGES:
        page.write_text(filled(page.read_text()))
        print(f"wrote the tables of {Path(page).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
