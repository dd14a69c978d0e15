"""Tables of README.md and bench/RESULTS.md, from the CSV files in bench/results.

    python bench/tables.py

writes them anew between the lines '<!-- table NAME -->' and '<!-- end of table -->' of these pages, so that no number
is copied by hand. A test compares pages and files.

scf.csv, scf-scaling.csv    J and K on the GPU, PySCF of the same run (bench/scf.py)
scf-peers.csv               J and K of other programs, of other runs on the same kind of machine
eri.csv                     classes on the GPU (bench/eri.py)
cpu.csv                     whole molecules on the CPU beside PySCF (bench/cpu.py)
"""

import re
from pathlib import Path

from clock import ROOT, read_csv

RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "bench" / "RESULTS.md")
MARK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
OTHER_RUN = "*"  # marks a time that is of another run than the others of its row
MISSING = "**To be measured:** `python bench/cpu.py`, then `python bench/tables.py` and `python bench/plots.py`."


def formula(name):
    """'8 waters' as a chemist writes it."""
    number = re.match(r"(\d+) waters$", name)
    return f"(H2O){number[1]}" if number else name


def basis_name(basis):
    """'aug-cc-pv5z' as the literature writes it."""
    return re.sub(r"cc-pv(.)z", lambda m: f"cc-pV{m[1].upper()}Z", basis)


def builds():
    """Systems of the front table of J and K: dictionaries with 'label', 'nao' and {program: (seconds, same run)}."""
    peers = read_csv(RESULTS / "scf-peers.csv")
    largest = [r for r in read_csv(RESULTS / "scf-scaling.csv") if r["basis"] == "cc-pv6z"]
    found = []
    for row in [*read_csv(RESULTS / "scf.csv"), *largest]:
        times = {"md4": (row["seconds"], True)}
        times |= {"PySCF": (row["pyscf"], True)} if row["pyscf"] != "" else {}
        same = [p for p in peers if (p["system"], p["basis"]) == (row["system"], row["basis"])]
        times |= {p["program"]: (p["seconds"], False) for p in same}
        found.append(
            {"label": f"{formula(row['system'])} {basis_name(row['basis'])}", "nao": int(row["nao"]), "times": times}
        )
    return sorted(found, key=lambda row: row["nao"])


def seconds(time):
    """A cell of (seconds, same run), or of None."""
    return "" if time is None else f"{time[0]:.3g}" + ("" if time[1] else f" {OTHER_RUN}")


def table(columns, rows):
    """Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [columns, ["---"] * len(columns), *rows])


def build_table():
    programs = {"md4": "md4, H200", "GPU4PySCF": "GPU4PySCF 1.9, H200", "PySCF": "PySCF, 16 cores"}
    rows = [[r["label"], str(r["nao"]), *(seconds(r["times"].get(p)) for p in programs)] for r in builds()]
    return table(["system", "functions", *programs.values()], rows)


def classes():
    """Rows of eri.csv of the (ll|ll) classes with K = 1."""
    return [r for r in read_csv(RESULTS / "eri.csv") if r["K"] == 1 and len(set(r["class"]) - {"|"}) == 1]


def class_table():
    rows = [
        [rf"({r['class']})".replace("|", r"\|"), f"{r['quartets_per_s']:.3g}", f"{r['tflops']:.3g}",
         f"{100 * r['share_of_peak']:.0f}%", f"{r['times_libcint']:.0f}x", f"{r['times_libintx']:.1f}x"]
        for r in classes()
    ]  # fmt: skip
    names = ["class", "quartets/s", "useful TFLOP/s", "share of FP64 peak", "one core of libcint", "LibintX, H200"]
    return table(names, rows)


def cpu_rows():
    """Rows of cpu.csv, or nothing before it was measured."""
    path = RESULTS / "cpu.csv"
    return read_csv(path) if path.exists() else []


def cpu_table():
    """Seconds of md4 and of PySCF, a line for each system."""
    found = {}
    for row in cpu_rows():
        label = f"{formula(row['system'])} {basis_name(row['basis'])}"
        found.setdefault((label, row["threads"]), {})[row["task"]] = row
    tasks = ("int2e", "jk")
    rows = [
        [label, f"{threads:.0f}", *(c for t in tasks for c in cpu_cells(by_task.get(t)))]
        for (label, threads), by_task in found.items()
    ]
    names = ["tensor, md4", "libcint", "ratio", "J and K, md4", "PySCF", "ratio"]
    return table(["system", "threads", *names], rows) if rows else MISSING + "\n"


def cpu_figure():
    """The plot of cpu.csv as bench/RESULTS.md shows it, once there is one."""
    return "![Seconds of md4 and PySCF on the CPU](../docs/figures/cpu.svg)\n" if cpu_rows() else MISSING + "\n"


def cpu_cells(row):
    """md4's seconds, those of the other program, and their ratio."""
    if row is None:
        return ["", "", ""]
    return [f"{row['md4']:.3g}", f"{row['peer']:.3g}", f"{row['md4'] / row['peer']:.2g}"]


TABLES = {"builds": build_table, "classes": class_table, "cpu": cpu_table, "cpu-figure": cpu_figure}


def filled(text):
    """A page with its tables made anew."""
    return MARK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)


def main():
    for page in PAGES:
        page.write_text(filled(page.read_text()))
        print(f"wrote the tables of {Path(page).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
