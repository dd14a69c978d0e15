"""A report on the accuracy of this installation on this device, shown as a single HTML page.

`md4 validate GEOMETRY --basis NAME --report report.html` writes it. The parts are

- the classes of the molecule against libcint (`md4.validation.libcint`). For each class beyond the tolerance, the
  oracle decides on a few quartets (`md4.validation.arbiter`);
- with an auxiliary molecule, the classes of density fitting, likewise (`md4.validation.fitting`);
- erf and erfc against libcint on a smaller sample of the same molecule;
- all operators, and 1/r up to (ii|ii) and (ii|k), against the oracle; contractions; symmetries
  (`md4.validation.identities`).

A class beyond the tolerance passes if the oracle finds md4 within the tolerance in the quartets that it computed.
"""

import os
import platform
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from time import perf_counter

import numpy as np

from md4.engine import make_backend
from md4.method.operators import Operator
from md4.shells.basis import Basis
from md4.support.display import operator_text
from md4.support.environment import gpus, version, versions
from md4.validation.arbiter import Ruling, rule, rule_on
from md4.validation.fitting import fitting_basis, validate_fitting
from md4.validation.identities import Check, contraction_checks, oracle_checks, symmetry_checks
from md4.validation.libcint import validate

OMEGAS = (0.3, -0.3)
OMEGA_QUARTETS = 100  # of a class, at most
WORST_SHOWN = 8
WORST_RULED = 3  # of those that are within tolerance


@dataclass
class Report:
    """The results, as `md4.validation.page` shows them.

    Attributes
    ----------
    title : str
        Molecule and basis.
    options : list of (str, value)
    device : list of (str, value)
    tolerance, abs_tolerance : float
    records : list of md4.validation.libcint.Record
        Classes of the molecule; `passed` is the verdict, including that of the oracle.
    rulings : list of md4.validation.arbiter.Ruling
    worst : list of md4.validation.arbiter.Ruling
        The quartets where md4 and libcint differ most.
    fitting, fitting_rulings : list of Record, list of Ruling
        As `records` and `rulings`, of the classes (ab|P) and (P|Q) of density fitting.
    operators, oracle, contractions, symmetries : list of md4.validation.identities.Check
    seconds : float
        Wall time of all checks.
    """

    title: str
    options: list
    device: list
    tolerance: float
    abs_tolerance: float
    records: list = field(default_factory=list)
    rulings: list = field(default_factory=list)
    worst: list = field(default_factory=list)
    fitting: list = field(default_factory=list)
    fitting_rulings: list = field(default_factory=list)
    operators: list = field(default_factory=list)
    oracle: list = field(default_factory=list)
    contractions: list = field(default_factory=list)
    symmetries: list = field(default_factory=list)
    seconds: float = 0.0

    @property
    def checks(self):
        """All checks except the classes."""
        return [*self.operators, *self.oracle, *self.contractions, *self.symmetries]

    @property
    def skipped(self):
        """The checks that were not made."""
        return [check for check in self.checks if check.passed is None]

    @property
    def failed(self):
        """Names of the classes and checks that failed."""
        classes = [record.label for record in (*self.records, *self.fitting) if not record.passed]
        return classes + [check.name for check in self.checks if check.passed is False]

    @property
    def passed(self):
        """Whether all checks were made, and all classes and checks passed."""
        return not self.failed and not self.skipped

    @property
    def verdict(self):
        """PASS, FAIL, or INCOMPLETE if nothing failed but not all checks were made."""
        return "FAIL" if self.failed else "INCOMPLETE" if self.skipped else "PASS"


def make_report(
    mol, backend="auto", tolerance=1e-12, abs_tolerance=1e-10, omega=None, max_quartets_per_class=1000, seed=0,
    max_memory=None, progress=None, title="molecule", auxmol=None,
    command=None,
):  # fmt: skip
    """Validates this installation with a molecule and with shells of md4's own.

    Parameters
    ----------
    title : str
        The name of the molecule on the page.
    auxmol : pyscf.gto.Mole, optional
        Its auxiliary molecule, for the integrals of density fitting.
    command : str, optional
        The command line that asked for it.

    Other parameters as `md4.validation.libcint.validate`.

    Returns
    -------
    Report
    """
    start = perf_counter()
    omega = mol.omega if omega is None else omega
    operator = Operator.from_omega(omega)
    options = [
        ("command", command or f"{__name__}.make_report"), ("molecule", title),
        ("atoms, shells, AOs", f"{mol.natm}, {mol.nbas}, {mol.nao}"),
        ("functions", "Cartesian" if mol.cart else "spherical"), ("operator", operator_text(operator)),
        ("relative and absolute tolerance", f"{tolerance:g}, {abs_tolerance:g} Hartree"),
        ("quartets of a class, at most", max_quartets_per_class), ("seed of the sample", seed),
    ]  # fmt: skip
    report = Report(title, options, device_facts(backend), tolerance, abs_tolerance)
    shared = (backend, tolerance, abs_tolerance)
    report.records = validate(mol, *shared, omega, max_quartets_per_class, seed, max_memory, progress)
    basis = Basis.from_mol(mol)
    report.rulings = settle(report.records, basis, operator, tolerance, abs_tolerance)
    report.worst = worst_of_all(report, basis, operator)
    if auxmol is not None:
        report.fitting, report.fitting_rulings = settled_fitting(
            mol, auxmol, *shared, omega, max_quartets_per_class, seed, max_memory, progress
        )
    report.operators = [omega_check(mol, *shared, w, seed, max_memory, report) for w in OMEGAS]
    report.contractions = contraction_checks(*shared)
    report.symmetries = symmetry_checks(backend, tolerance)
    report.oracle = oracle_checks(backend, tolerance)
    report.seconds = perf_counter() - start
    return report


def settled_fitting(mol, auxmol, backend, tolerance, abs_tolerance, omega, *args, **options):
    """The records of `validate_fitting`, which has these parameters, with the oracle's verdicts; and its rulings."""
    records = validate_fitting(mol, auxmol, backend, tolerance, abs_tolerance, omega, *args, **options)
    operator = Operator.from_omega(mol.omega if omega is None else omega)
    return records, settle(records, fitting_basis(mol, auxmol), operator, tolerance, abs_tolerance)


def settle(records, basis, operator, tolerance, abs_tolerance):
    """Lets the oracle decide on the records beyond the tolerance, and sets their verdicts. Returns all rulings."""
    rulings = []
    for record in records:
        found = rule_on(record, basis, operator)
        if found:
            record.passed = all(ruling.md4_passes(tolerance, abs_tolerance) for ruling in found)
        rulings += found
    return rulings


def worst_of_all(report, basis, operator):
    """The quartets with the largest excess of all classes. The oracle computes the first few that it has not seen."""
    known = {id(ruling.quartet): ruling for ruling in report.rulings}
    every = [(record.label, quartet) for record in report.records for quartet in record.worst]
    every.sort(key=lambda item: -item[1].excess)
    rulings, asked = [], 0
    for label, quartet in every[:WORST_SHOWN]:
        ruling = known.get(id(quartet))
        if ruling is None and asked < WORST_RULED:
            ruling, asked = rule(label, basis, operator, quartet), asked + 1
        rulings.append(ruling or Ruling(label, quartet, reason="not asked"))
    return rulings


def omega_check(mol, backend, tolerance, abs_tolerance, omega, seed, max_memory, report):
    """Checks erf or erfc against libcint, with decisions of the oracle, which are added to the report."""
    operator = Operator.from_omega(omega)
    records = validate(mol, backend, tolerance, abs_tolerance, omega, OMEGA_QUARTETS, seed, max_memory, progress=False)
    rulings = settle(records, Basis.from_mol(mol), operator, tolerance, abs_tolerance)
    name = operator_text(operator)
    report.rulings += [replace(ruling, label=f"{ruling.label} {name}") for ruling in rulings]
    disputed = sum(r.disputed > 0 for r in records)
    note = f"{disputed} classes beyond tolerance, {len(rulings)} quartets to the oracle" if disputed else ""
    count = f"{sum(r.quartets for r in records)} quartets of {len(records)} classes"
    error = float(np.max([r.max_rel for r in records]))
    return Check(name, "libcint", count, error, tolerance, note, all(r.passed for r in records))


def device_facts(backend):
    """The device and the software, as (name, value)."""
    found, _ = gpus()
    made = make_backend(backend, Operator.coulomb())
    rows = [("backend", made.name), *((f"GPU {i}", text) for i, text in enumerate(found))]
    rows += [("processor", processor()), ("CPU threads", os.cpu_count()), ("system", platform.platform())]
    software = versions() | {"mpmath": version("mpmath")}
    rows += [(name, installed or "not installed") for name, installed in software.items()]
    return [*rows, ("written", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))]


def processor():
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
