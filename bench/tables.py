"""Tables of README.md and of bench/RESULTS.md, from the CSV files in bench/results.

    python bench/tables.py

writes them anew between the lines '<!-- table NAME -->' and '<!-- end of table -->' of these pages, so that no number
is copied by hand. A test compares pages and files.

jk.csv, scf.csv     J and K on the GPU, the latter with PySCF of the same run (bench/scf.py)
scf-peers.csv       J and K of other programs, of other runs on the same kind of machine
peers.csv           J and K beside GPU4PySCF in one process (bench/peers.py)
eri.csv             classes on the GPU (bench/eri.py)
cpu.csv             the CPU beside libcint and PySCF (bench/cpu.py)
scaling-devices.csv     J and K on several GPUs (bench/scaling_devices.py)
fitting.csv, fitting_now.csv    density fitting beside PySCF, and newer times of md4 alone (bench/peers.py)
"""

import csv
import re
from math import isnan
from pathlib import Path

from clock import ROOT, number, read_csv

RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "bench" / "RESULTS.md")
MARK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
OTHER_RUN = "*"  # marks a time that is of another run than the others of its row
# Columns of bench/cpu.py that say where a row comes from.
ORIGIN = ("commit", "processor", "processors", "python", "numpy", "numba", "pyscf")
MISSING = "**To be measured**; then `python bench/tables.py` and `python bench/plots.py`."


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


# Systems of the figure.
FRONT = ("water/cc-pv6z", "water/aug-cc-pv6z", "benzene/cc-pv5z", "8 waters/cc-pvqz", "benzene/cc-pv6z",
         "27 waters/cc-pvtz")  # fmt: skip


def beside(method):
    """{system name: {matrices: row}} of bench/peers.py, by 'direct' builds or by 'fitting'."""
    found = {}
    for row in read_csv(RESULTS / "peers.csv"):
        if row["method"] == method:
            found.setdefault(system_name(row), {})[row["matrices"]] = row
    return found


def builds(systems=None):
    """Systems of the table of J and K, all or some: dictionaries with 'label', 'row', 'times' and 'beside'.

    'times' is {program: (seconds, same run)}, and 'beside' has the rows of GPU4PySCF by matrices.
    """
    newest, with_pyscf, peers = by_name("jk.csv"), by_name("scf.csv"), beside("direct")
    rows = {name: mine["J, K"] for name, mine in peers.items()} | with_pyscf | newest
    others, found = read_csv(RESULTS / "scf-peers.csv"), []
    for system in systems or sorted(rows, key=lambda name: rows[name]["nao"]):
        row = rows[system]
        times = {"md4": (row["seconds"], True)}
        if system in with_pyscf:
            times["PySCF"] = with_pyscf[system]["pyscf"], system not in newest
        times |= {other["program"]: (other["seconds"], False) for other in others if system_name(other) == system}
        if system in peers:
            times["GPU4PySCF"] = peers[system]["J, K"]["peer_seconds"], True
        found.append({"label": molecule(row), "row": row, "times": times, "beside": peers.get(system, {})})
    return found


def seconds(time):
    """A cell of (seconds, same run), or of None."""
    return "" if time is None else f"{time[0]:.3g}" + ("" if time[1] else f" {OTHER_RUN}")


def table(columns, rows):
    """Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [columns, ["---"] * len(columns), *rows])


def build_table():
    """J and K of molecules, and each of them alone."""
    lines = []
    for system in builds():
        row, times = system["row"], system["times"]
        cells = [f"{row['nao']:.0f}", *(seconds(times.get(program)) for program in ("md4", "GPU4PySCF", "PySCF"))]
        for matrices in ("J", "K"):
            alone = system["beside"].get(matrices)
            cells += ["", ""] if alone is None else [f"{alone[key]:.3g}" for key in ("seconds", "peer_seconds")]
        checked = "computed" in row and not isnan(row["error"])
        lines.append([system["label"], *cells, f"{row['error']:.1e}" if checked else ""])
    names = ["functions", "J, K: md4", "GPU4PySCF", "PySCF", "J: md4", "GPU4PySCF", "K: md4", "GPU4PySCF", "error"]
    return table(["system", *names], lines) + origins(system["row"] for system in builds())


def classes():
    """Rows of eri.csv of the (ll|ll) classes with K = 1."""
    return [r for r in read_csv(RESULTS / "eri.csv") if r["K"] == 1 and len(set(r["class"]) - {"|"}) == 1]


def rate_table():
    """Classes (ll|ll): rates and shares of the limit, and rates at K = 1 over those of libcint and LibintX."""
    found = {}
    for row in read_csv(RESULTS / "eri.csv"):
        if len(set(row["class"]) - {"|"}) == 1:
            found.setdefault(class_name(row), {})[int(row["K"])] = row
    degrees, lines = sorted({k for rows in found.values() for k in rows}), []
    for name, rows in found.items():
        one = rows[1]
        rates = [f"{rows[k]['quartets_per_s']:.3g}, {100 * rows[k]['share_of_limit']:.0f}%" for k in degrees]
        times = [f"{one['times_libcint']:.0f}x", f"{one['times_libintx']:.1f}x"]
        lines.append([name, *rates, one["bound"], *times, f"{max(row['error'] for row in rows.values()):.0e}"])
    names = [*(f"K = {k}: quartets/s, limit" for k in degrees), "bound", "libcint", "LibintX", "error"]
    return table(["class", *names], lines)


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


# on several GPUs ------------------------------------------------------------------------------------------------------


def device_rows():
    """Rows of bench/scaling_devices.py, or nothing before it was measured."""
    path = RESULTS / "scaling-devices.csv"
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
    return table(["system", "matrices", *ways], lines) + origins(rows) if rows else MISSING


def speed(row):
    """A cell: seconds, and the speed-up where there are several devices."""
    if row is None:
        return ""
    text = f"{row['seconds']:.3g} s"
    return text if row["devices"] == 1 else f"{text}, {row['speedup']:.2f}x, {100 * row['efficiency']:.0f}%"


def origins(rows):
    """A line for each machine and commit."""
    return "\n" + "".join(f"{machine}.\n" for machine in dict.fromkeys(row["machine"] for row in rows))


# density fitting ------------------------------------------------------------------------------------------------------


def fitting_table():
    """Density fitting of md4, its newest times, beside PySCF and GPU4PySCF."""
    files = ("fitting.csv", "fitting_now.csv")
    rows = [row for file in files if (RESULTS / file).exists() for row in read_csv(RESULTS / file)]
    peers = beside("fitting")
    newest, pyscf = {name: dict(mine) for name, mine in peers.items()}, {}
    for row in rows:
        newest.setdefault(system_name(row), {})[row["matrices"]] = row
        if row["pyscf_seconds"] and row["matrices"] == "J, K":
            pyscf[system_name(row)] = [f"{row[key]:.3g}" for key in ("pyscf_setup", "pyscf_seconds")]
    lines = []
    for name, mine in sorted(newest.items(), key=lambda item: item[1]["J, K"]["naux"]):
        row, peer = mine["J, K"], peers.get(name, {}).get("J, K")
        cells = [f"{row['naux']:.0f}", f"{row['setup']:.3g}", *(f"{r['seconds']:.3g}" for r in mine.values())]
        cells += [*pyscf.get(name, ["", ""]), f"{peer['peer_seconds']:.3g}, {peer['ratio']:.1f}x" if peer else ""]
        lines.append([molecule(row), *cells, re.search(r"md4 (\S+?),", row["machine"])[1]])
    names = ["naux", "set-up", "J, K", "J", "K", "PySCF: set-up", "J, K", "GPU4PySCF: J, K", "md4 of"]
    return table(["system", *names], lines)


TABLES = {
    "builds": build_table, "rates": rate_table, "fitting": fitting_table, "cpu": cpu_table, "cpu-short": cpu_short,
    "devices": device_table,
}  # fmt: skip


def filled(text):
    """A page with its tables made anew."""
    return MARK.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[3]}", text)


def main():
    for page in PAGES:
        page.write_text(filled(page.read_text()))
        print(f"wrote the tables of {Path(page).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
