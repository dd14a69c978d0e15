"""The tasks into which a build of J and K is cut for several workers, and the time of each; predicted times fitted.

`bench/scaling_devices.py` has the options. A file of tasks is a CSV below lines of '# name: value'. A row is a task
(`md4.contract.work.Task`): its pair of lists, both classes, mean primitives and sizes, its shell quartets, the seconds
predicted for these, and the measured ones. 'seconds' is the time from before the task's first kernel to the end of its
last one, with nothing else on the device; 'host' that until the call returned. Files of --list have neither. Those of a
GPU are predicted anew when a file is read, by the formulas as they are now; but not those of J alone on a GPU, where a
task has all pairs of lists of two degrees l_a + l_b. Its row names one of these, and it has no fit.

The lines above it are seconds of one build with one worker that are not in the tasks:

build           an ordinary build, all of it
before          until survivors are counted: order of AOs, D + D^T, density norms
counting        survivors of each pair of lists
dividing        predicted times, cutting and division for `workers` workers
start           densities to the device
end, fetch      end of the sums (J alone: to the AO basis), X and Y to the host
after           J and K of X and Y, order of AOs
lists, bounds   pair lists with their bounds, which are made once, and the bounds alone, which workers share
hermite         H matrices, which every worker makes in its first build
"""

import csv
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import numpy as np
from clock import describe, number, seconds_once
from systems import guess_density

import md4
from md4.contract.densities import in_order
from md4.contract.screening import Statistics, pair_bounds, sorted_lists
from md4.contract.survivors import ListPairs
from md4.contract.work import EACH, Task, divide
from md4.contract.worker import AHEAD, HERMITE_SHARE, PartialSums
from md4.gpu.h_layout import KET_FLAT, form_size
from md4.gpu.paths import build_time, digest_order, timed_plans
from md4.gpu.predicted_times import Side, coulomb_time, counted_rows
from md4.gpu.sums import DeviceSums
from md4.gpu.tuning import MIXED_SHELLS
from md4.method.angular import nherm
from md4.shells.basis import Basis
from md4.shells.shell_pairs import ShellPairs, pairs_by_kind, shell_pairs, starts_of

TOLERANCE = 1e-13  # direct_scf_tol
# Of --list: arithmetic unit, and bytes that the device has.
UNIT, DEVICE_BYTES = "dmma16", 139 << 30
# Pairs that are looked at together on the host.
PIECE = 100_000


@dataclass
class TaskTimes:
    """A file of tasks.

    Attributes
    ----------
    facts : dict
        What stands above the rows.
    rows : list of dict
    """

    facts: dict
    rows: list = field(repr=False)

    @classmethod
    def load(cls, path):
        with open(path, newline="") as file:
            lines = file.read().splitlines()
        heads = [text[2:].partition(": ") for text in lines if text.startswith("# ")]
        body = csv.DictReader(lines[len(heads) :])
        rows = [{name: number(value) for name, value in row.items()} for row in body]
        found = cls({name: number(value) for name, _, value in heads}, rows)
        found.predict()
        return found

    def predict(self):
        """Predicts the times of J and K on a GPU anew."""
        unit = self.facts["unit"]
        for row in self.rows if unit != "cpu" and self.with_k else ():
            row["predicted"] = row["quartets"] * predicted(unit, side(row, "ab"), side(row, "cd"), True)

    def save(self, path):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            file.writelines(f"# {name}: {value}\n" for name, value in self.facts.items())
            writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    @property
    def measured(self):
        return self.rows[0]["seconds"] != ""

    @property
    def with_k(self):
        return self.facts["matrices"] == "J, K"


def side_columns(pairs, names):
    """Columns of one side; `names` are 'ab' or 'cd'."""
    a, b = names
    return {
        f"l{a}": pairs.la, f"l{b}": pairs.lb, f"nctr_{a}": pairs.nctr_a, f"nctr_{b}": pairs.nctr_b,
        f"prim_{names}": round(pairs.mean_prim, 2), f"most_prim_{names}": pairs.max_prim, f"n{names}": pairs.nab,
        f"pairs_{names}": len(pairs),
    }  # fmt: skip


def columns(pairs, task, quartets, seconds="", host=""):
    """The row of a task of some `ListPairs`."""
    bra, ket = (pairs.lists[n].pairs for n in pairs.numbers[task.pair])
    return {
        "pair": task.pair, "part": task.part, "parts": task.parts, **side_columns(bra, "ab"),
        **side_columns(ket, "cd"), "pure": int(bra.pure), "same": int(bra is ket),
        "quartets": int(quartets), "predicted": task.seconds - EACH, "seconds": seconds, "host": host,
    }  # fmt: skip


# measured on a device -------------------------------------------------------------------------------------------------


class Tracer:
    """Takes the place of `Team.run` for one build: task by task, with a wait before and after each.

    Parameters
    ----------
    team : md4.contract.team.Team
        Of one worker.
    workers : int
        For how many workers the build is cut into tasks.
    """

    def __init__(self, team, workers):
        self.team, self.workers, self.rows, self.facts = team, workers, [], {}

    def run(self, build, progress):
        """As `Team.run`."""
        self.begin = perf_counter()
        tasks = self.tasks(build)
        build.report = lambda _: None
        (worker,) = self.team.workers
        with worker.engine.lock:
            part = self.timed("start", lambda: PartialSums(worker, build), worker)
            part.start = perf_counter()
            for task in tasks:
                self.add(part, task)
            self.timed("end", part.end, worker)
            found = self.timed("fetch", part.result, worker)
        self.finish = perf_counter()
        return found, Statistics(part.stats.computed, 0, part.stats.wanted)

    def counted(self, survivors):
        """`ListPairs.survivors`, whose time is noted."""

        def timed(*given):
            begin = perf_counter()
            found = survivors(*given)
            self.facts["counting"] = perf_counter() - begin
            return found

        return timed

    def tasks(self, build):
        """The tasks for so many workers; notes the time that they take."""
        begin = perf_counter()
        self.team.size = self.workers
        try:
            tasks = self.team.tasks(build)
        finally:
            self.team.size = 1
        divide(tasks, self.workers)
        self.facts["dividing"] = perf_counter() - begin
        return tasks

    def timed(self, name, call, worker):
        """call(), whose seconds are noted with those that the device takes."""
        begin = perf_counter()
        result = call()
        worker.backend.mark()()
        self.facts[name] = perf_counter() - begin
        return result

    def add(self, part, task):
        """One task."""
        before, host = part.stats.wanted, []

        def call():
            begin = perf_counter()
            part.add([task])
            host.append(perf_counter() - begin)

        part.backend.mark()()
        seconds = seconds_once(part.backend, call)
        pairs = part.build.survivors.pairs
        self.rows.append(columns(pairs, task, part.stats.wanted - before, seconds, host[0]))


def trace(system, workers, with_k, args):
    """`TaskTimes` of a system on one device."""
    mol = system.mol(args.seed)
    dm = guess_density(mol)
    jk = md4.JK(mol, backend=args.backend, direct_scf_tol=TOLERANCE, progress=False)
    for _ in range(args.warm):
        expected = jk.get_jk(dm, with_k=with_k)
    facts = {"system": system.name, "basis": system.basis, "nao": mol.nao, "matrices": "J, K" if with_k else "J"}
    backend = jk.engine.backend
    facts |= {"unit": getattr(getattr(backend, "context", None), "unit", "cpu"), "workers": workers}
    facts |= {"ahead": 0 if backend.sums.takes_lists else AHEAD, **around(jk, dm, with_k)}
    tracer, run, pairs = Tracer(jk.team, workers), jk.team.run, jk.team.list_pairs(with_k)
    jk.team.run, pairs.survivors = tracer.run, tracer.counted(pairs.survivors)
    try:
        begin = perf_counter()
        found = jk.get_jk(dm, with_k=with_k)
        end = perf_counter()
    finally:
        jk.team.run = run
        del pairs.survivors
    difference = max(float(abs(a - b).max()) for a, b in zip(found, expected) if a is not None)
    before = tracer.begin - begin - tracer.facts["counting"]
    facts |= {"before": before, **tracer.facts, "after": end - tracer.finish, "difference": difference}
    return TaskTimes(facts | {"machine": describe(backend)}, tracer.rows)


def around(jk, dm, with_k):
    """Seconds of a build as it is, and of what only the first one does."""
    (worker,) = jk.team.workers

    def seconds(call):
        begin = perf_counter()
        call()
        with worker.engine.lock:
            worker.backend.mark()()
        return perf_counter() - begin

    def bounds():
        with worker.engine.lock:
            pair_bounds(jk.engine, pairs_by_kind(jk.basis, jk.engine.backend.sums.mixed_shells), TOLERANCE)

    def build():
        jk.get_jk(dm, with_k=with_k)

    jk.team.forget()
    found = {"lists": seconds(lambda: jk.lists), "bounds": seconds(bounds)}
    without_h = seconds(build)
    found["build"] = float(np.median([seconds(build) for _ in range(3)]))
    return found | {"hermite": max(0.0, without_h - found["build"])}


# listed without a device ----------------------------------------------------------------------------------------------


class HostLists:
    """In place of an `Engine` on a GPU, makes pair lists without their primitives."""

    def __init__(self, basis):
        self.bra_basis = basis
        sums = SimpleNamespace(mixed_shells=MIXED_SHELLS, bound_step=partial(DeviceSums.bound_step, None))
        self.backend = SimpleNamespace(sums=sums, hermite_bytes=hermite_bytes)

    def prepare_lists(self, lists, basis, cutoff):
        """Pairs with their numbers of primitives."""
        for pairs in lists:
            pieces = [shell_pairs(basis, pairs[n : n + PIECE], cutoff=cutoff) for n in range(0, len(pairs), PIECE)]
            start = starts_of(np.concatenate([np.diff(piece.start) for piece in pieces]))
            yield SimpleNamespace(pairs=ShellPairs.of_basis(basis, pairs, start))


def hermite_bytes(pairs):
    """As that of `GpuBackend`."""
    return 8 * pairs.nprim * form_size(pairs, KET_FLAT)


def host_bounds(basis, every):
    """R_ab and T_ab of all lists by the CPU backend."""
    engine = md4.Engine(basis, backend="cpu")
    pieces = [[pairs[n : n + PIECE] for n in range(0, len(pairs), PIECE)] for pairs in every]
    return [np.concatenate(pair_bounds(engine, these, TOLERANCE), axis=1) for these in pieces]


def listed(system, with_k, args):
    """`TaskTimes` of a system without times: the tasks of one H200, which sees no plane of symmetry."""
    mol, clock = system.mol(args.seed), {}
    basis, order = Basis.from_mol(mol).regrouped()
    dm = in_order(guess_density(mol)[None], order)
    every = pairs_by_kind(basis, MIXED_SHELLS)
    begin = perf_counter()
    bounds = host_bounds(basis, every)
    clock["bounds"] = perf_counter() - begin
    lists = sorted_lists(HostLists(basis), every, bounds, TOLERANCE, int(HERMITE_SHARE * DEVICE_BYTES) // 16)
    clock["lists"] = perf_counter() - begin
    begin = perf_counter()
    swapped = partial(digest_order, UNIT) if with_k else partial(DeviceSums.coulomb_swapped, None)
    pairs = ListPairs(lists, basis, swapped, by_degrees=not with_k)
    norms = pairs.norms(dm, True, with_k)
    clock["before"] = perf_counter() - begin
    begin = perf_counter()
    survivors = pairs.survivors(norms, TOLERANCE, False)
    clock["counting"] = perf_counter() - begin
    of_one = [predicted(UNIT, *(Side.of(lists[side].pairs) for side in sides), with_k) for sides in pairs.numbers]
    seconds = survivors.by_task(np.multiply(of_one, survivors.quartets))
    rows = [
        columns(pairs, Task(n, 0, 1, seconds[n] + EACH), count)
        for n, count in enumerate(survivors.task_quartets) if count
    ]  # fmt: skip
    facts = {"system": system.name, "basis": system.basis, "nao": mol.nao, "matrices": "J, K" if with_k else "J"}
    facts |= {"unit": UNIT, "workers": 1, "ahead": AHEAD, **clock}
    return TaskTimes(facts | {"machine": describe(md4.Engine(basis, backend="cpu").backend)}, rows)


def predicted(unit, bra, ket, with_k):
    """Predicted seconds of a quartet of two `Side` on a GPU."""
    return 1e-9 * (build_time(unit, bra, ket, 2) if with_k else coulomb_time(bra, ket, 1))


# predicted times fitted -----------------------------------------------------------------------------------------------


def side(row, names):
    """`Side` of the bra ('ab') or the ket ('cd') of a row."""
    a, b = (int(row[f"l{name}"]) for name in names)
    shells = a, b, bool(row["pure"]), *(int(row[f"nctr_{name}"]) for name in names)
    primitives = int(row[f"most_prim_{names}"]), round(row[f"prim_{names}"], 1)
    return Side(a + b, int(row[f"n{names}"]), nherm(a + b), *primitives, *counted_rows(shells))


def terms(row, unit):
    """{name: ns a quartet for a coefficient of 1} of a row of J and K; a class has the terms of its formula only.

    'plan' is the time of a plan by `predicted_times`, which other fits have settled; its coefficient should be 1.
    'low ...' and 'digest' are those of `low_time` and `digest_time`, and 'task' is what a task takes besides its
    quartets. 'low result' and 'digest' differ in classes with a plan only.
    """
    bra, ket = side(row, "ab"), side(row, "cd")
    primitives, functions = bra.mean_prim * ket.mean_prim, bra.nab * ket.nab
    r, products = primitives * nherm(bra.l + ket.l), primitives * bra.nherm * ket.nherm
    found = {"task": 1 / row["quartets"], "digest": 2 * functions}
    plan = timed_plans(unit, bra, ket, True, limited=True)[0][0]
    if plan:
        return found | {"plan": plan}
    return found | {"low quartet": 1, "low r": r, "low products": products, "low result": functions}


class Fit:
    """Coefficients of `terms` for measured times, by non-negative least squares of relative errors.

    Each row counts by the root of its share of the time. So the fit is good where the time is spent.
    """

    def __init__(self, times):
        from scipy.optimize import nnls

        unit = times.facts["unit"]
        if not (times.measured and times.with_k) or unit == "cpu":
            raise SystemExit("--fit takes tasks of J and K that --trace has measured on a GPU.")
        self.rows = [row for row in times.rows if row["quartets"]]
        found = [terms(row, unit) for row in self.rows]
        self.names = list(dict.fromkeys(name for one in found for name in one))
        amounts = np.array([[one.get(name, 0.0) for name in self.names] for one in found])
        quartets, seconds = (np.array([row[name] for row in self.rows]) for name in ("quartets", "seconds"))
        measured = 1e9 * seconds / quartets
        weights = np.sqrt(seconds) / measured
        # Columns of the same size, since nnls compares them with an absolute tolerance.
        scale = np.linalg.norm(amounts * weights[:, None], axis=0)
        found, _ = nnls(amounts * weights[:, None] / scale, measured * weights)
        self.coefficients = found / scale
        self.before = 1e9 * np.array([row["predicted"] for row in self.rows]) / quartets / measured
        self.after = amounts @ self.coefficients / measured
        self.seconds = seconds

    def error(self, ratio):
        """Root mean square of relative errors, each row weighted with its time."""
        return float(np.sqrt(np.average((ratio - 1) ** 2, weights=self.seconds)))

    def __str__(self):
        lines = [f"{name:20} {value:.3g}" for name, value in zip(self.names, self.coefficients)]
        total = [float(np.average(ratio, weights=self.seconds)) for ratio in (self.before, self.after)]
        lines += [
            f"predicted over measured, all tasks: {total[0]:.3f} before, {total[1]:.3f} fitted",
            f"relative error, weighted with time: {self.error(self.before):.3f} before, {self.error(self.after):.3f}"
            f" fitted, {len(self.rows)} tasks",
        ]
        return "ns for each unit of a term of a quartet ('task': ns a task)\n" + "\n".join(lines)
