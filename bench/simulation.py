"""A build of J and K on more devices than there are: its real tasks, with their times, divided among N workers.

The tasks are cut and divided by `md4.contract.work`, as a build does it: by predicted times. How long each one takes
comes from a file of `task_times.py`. A part of a pair of lists takes its share of the measured time of the whole pair,
and besides what a task takes at least: the shortest one of the file. All devices are equally fast.

A worker takes its fixed share, then tasks from the counter. It asks for the next one when its device has at most
`AHEAD` left, of which the share counts as one. The answer takes --latency, and the counter needs --served for each
number, one after the other.

The sums are added up in a ring or a tree, whichever is faster, of --bandwidth GB/s a device, --network GB/s if the
workers are more than --node, with --step seconds for each of its steps. What precedes the first and follows the last
task is the same for all workers, which all do it: it is taken from the file, or scaled from that of --like, but for the
division among N workers, which is timed here.

Efficiency is the time with one worker over N times that with N. What is lost, as shares of the time with N workers:
'uneven' are devices that wait for the slowest one, 'cutting' the least times of more tasks, 'sums', and 'beside' what
all workers do. The largest of these limits; if one task takes longer than a worker's mean time, that is said instead.
'first' is the first build, with pair lists, bounds and H matrices.
"""

from heapq import heapify, heappop, heappush
from math import ceil, log2
from time import perf_counter
from typing import NamedTuple

import numpy as np

from md4.contract.work import divide, make_tasks

WORKERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
# What a class is told by, to find it in another file.
SIDES = (("la", "lb", "nctr_a", "nctr_b", "most_prim_ab"), ("lc", "ld", "nctr_c", "nctr_d", "most_prim_cd"))
# Of each worker before its first and after its last task; 'dividing' is timed here. Those that copy or add matrices.
BESIDE, COPIES = ("before", "counting"), ("start", "end", "after", "fetch")


class Costs(NamedTuple):
    """What is not measured, in seconds and bytes a second.

    Attributes
    ----------
    latency, served : float
        From the question to the answer of the counter, and between two answers.
    bandwidth, network : float
        At which sums are passed on within a node and between nodes, by each device.
    node : int
        Devices of a node.
    step : float
        What each step of a ring or tree takes besides.
    """

    latency: float = 2e-5
    served: float = 1e-6
    bandwidth: float = 2e11
    network: float = 2.5e10
    node: int = 8
    step: float = 2e-5

    def adding(self, nbytes, workers):
        """Seconds in which all workers get the sum of an array."""
        if workers == 1:
            return 0.0
        pace = self.bandwidth if workers <= self.node else self.network
        ring = 2 * (workers - 1) * (nbytes / workers / pace + self.step)
        tree = 2 * (nbytes / pace + ceil(log2(workers)) * self.step)
        return min(ring, tree)


class Work(NamedTuple):
    """Pairs of lists of a build.

    Attributes
    ----------
    facts : dict
        Of the file of tasks.
    predicted, seconds : ndarray
        Of each pair of lists.
    rows : list of int
        Largest number of parts of each.
    least : float
        Seconds of the shortest task.
    source : str
        Where the seconds come from.
    """

    facts: dict
    predicted: np.ndarray
    seconds: np.ndarray
    rows: list
    least: float
    source: str

    @classmethod
    def of(cls, times, like=None):
        """From `TaskTimes`; if it has no measured times, they are the predicted ones, corrected by those of `like`."""
        pairs = {}
        for row in times.rows:
            pairs.setdefault(row["pair"], []).append(row)
        predicted = np.array([sum(row["predicted"] for row in rows) for rows in pairs.values()])
        most = [int(rows[0]["pairs_ab"]) for rows in pairs.values()]
        if times.measured:
            least = min(row["seconds"] for row in times.rows)
            seconds = [sum(row["seconds"] - least for row in rows) for rows in pairs.values()]
            return cls(times.facts, predicted, np.array(seconds), most, least, "measured task by task")
        if like is None:
            return cls(times.facts, predicted, predicted, most, 0.0, "predicted, not measured")
        ratios = class_ratios(like)
        factor = np.array([ratios.get(class_of(rows[0]), ratios[None]) for rows in pairs.values()])
        known = sum(p for p, rows in zip(predicted, pairs.values()) if class_of(rows[0]) in ratios) / sum(predicted)
        name = f"{like.facts['system']} {like.facts['basis']}"
        source = f"predicted, each class corrected by measured / predicted of {name} ({100 * known:.0f}% of the time), "
        source += "and what is beside the tasks scaled from there"
        facts = {**times.facts, **scaled_facts(times, like)}
        return cls(facts, predicted, factor * predicted, most, min(row["seconds"] for row in like.rows), source)

    @property
    def beside(self):
        """Seconds of what all workers do, but for the division among them."""
        return sum(self.facts.get(name, 0.0) for name in (*BESIDE, *COPIES))

    @property
    def sum_bytes(self):
        """Bytes of X and Y, or of Y."""
        return 8 * int(self.facts["nao"]) ** 2 * self.facts["matrices"].count(",") + 8 * int(self.facts["nao"]) ** 2

    def tasks(self, workers):
        """(tasks for so many workers, seconds of each by (pair, parts))."""
        tasks = make_tasks(self.predicted.tolist(), self.rows, workers)
        return tasks, {(t.pair, t.parts): self.least + float(self.seconds[t.pair]) / t.parts for t in tasks}


def scaled_facts(times, like):
    """Seconds of what is beside the tasks, on the machine of `like`.

    Norms, copies and sums of matrices go with the square of the number of AOs, survivors with that of bra pairs.
    """
    bra_pairs = [sum({row["pair"]: row["pairs_ab"] for row in these.rows}.values()) for these in (times, like)]
    square = (times.facts["nao"] / like.facts["nao"]) ** 2
    found = {name: square * like.facts[name] for name in ("before", *COPIES)}
    return found | {"counting": bra_pairs[0] / bra_pairs[1] * like.facts["counting"]}


def class_of(row):
    """What tells a class, in whichever order its sides are."""
    return tuple(sorted(tuple(int(row[name]) for name in names) for names in SIDES))


def class_ratios(times):
    """{class: measured seconds, but for the least of a task, over predicted ones}, and of all classes under None."""
    found, total = {}, np.zeros(2)
    least = min(row["seconds"] for row in times.rows)
    for row in times.rows:
        both = np.array([row["seconds"] - least, row["predicted"]])
        found[class_of(row)] = found.get(class_of(row), 0) + both
        total = total + both
    return {key: float(measured / predicted) for key, (measured, predicted) in [*found.items(), (None, total)]}


def finish_times(division, seconds, costs, ahead):
    """When the device of each worker is done, shape (workers,).

    Parameters
    ----------
    division : md4.contract.work.Division
    seconds : callable
        Of a task.
    costs : Costs
    ahead : int
        Tasks that the device still has when a worker asks for the next one; its share counts as one.
    """
    ends = [[0.0] * ahead + [sum(map(seconds, share))] for share in division.shares]
    asking = [(mine[-1 - ahead], worker) for worker, mine in enumerate(ends)]
    heapify(asking)
    free = 0.0
    for task in division.rest:
        asked, worker = heappop(asking)
        free = max(asked, free) + costs.served
        mine, given = ends[worker], free + costs.latency
        mine.append(max(mine[-1], given) + seconds(task))
        heappush(asking, (mine[-1 - ahead], worker))
    return np.array([mine[-1] for mine in ends])


def simulated(work, workers, costs):
    """A row: a build by so many workers."""
    begin = perf_counter()
    tasks, seconds = work.tasks(workers)
    division = divide(tasks, workers)
    dividing = perf_counter() - begin if workers > 1 else 0.0
    ends = finish_times(division, lambda task: seconds[task.pair, task.parts], costs, int(work.facts["ahead"]))
    longest = max(seconds[task.pair, task.parts] for task in tasks)
    adding, busy = costs.adding(work.sum_bytes, workers), float(ends.max())
    total = busy + adding + work.beside + dividing
    once = float(work.seconds.sum()) + len(work.seconds) * work.least
    mean = sum(seconds[task.pair, task.parts] for task in tasks) / workers
    lost = {
        "uneven": (busy - mean) / total, "cutting": max(0.0, mean - once / workers) / total, "sums": adding / total,
        "beside": (work.beside + dividing - work.beside / workers) / total,
    }  # fmt: skip
    limit = max(lost, key=lost.get)
    return {
        "system": work.facts["system"], "basis": work.facts["basis"], "matrices": work.facts["matrices"],
        "workers": workers, "tasks": len(tasks), "asked": len(division.rest), "seconds": total,
        "first": total + first_build(work.facts, workers), "efficiency": (once + work.beside) / (workers * total),
        "longest": longest, **lost, "limit": "longest task" if limit == "uneven" and longest > mean else limit,
    }  # fmt: skip


def first_build(facts, workers):
    """Seconds that a first build takes longer; NaN if they are not known for the device."""
    if "hermite" not in facts:
        return np.nan
    return facts["bounds"] / workers + facts["lists"] - facts["bounds"] + facts["hermite"]


HEADER = """| workers | seconds | first s | speed-up | efficiency | uneven | cutting | sums | beside | limited by | tasks | by counter | longest task s |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def line(row):
    """A row of the Markdown table."""
    shares = [f"{100 * row[name]:.1f}%" for name in ("uneven", "cutting", "sums", "beside")]
    cells = [
        row["workers"], f"{row['seconds']:.4g}", f"{row['first']:.3g}", f"{row['workers'] * row['efficiency']:.4g}",
        f"{100 * row['efficiency']:.1f}%", *shares, row["limit"] if row["workers"] > 1 else "", row["tasks"],
        row["asked"], f"{row['longest']:.2g}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def told(work, costs):
    """Where the numbers of a simulation come from."""
    facts, beside = work.facts, {n: work.facts[n] for n in (*BESIDE, *COPIES) if n in work.facts}
    text = f"{facts['system']} {facts['basis']}, {facts['matrices']}: {len(work.seconds)} pairs of lists, "
    text += f"{work.seconds.sum():.4g} s ({work.source}; predicted {work.predicted.sum():.4g} s).\n"
    text += "Beside the tasks: " + ", ".join(f"{name} {value:.3g} s" for name, value in beside.items()) + ".\n"
    missing = [name for name in COPIES if name not in facts]
    if missing:
        text += f"Not known and left out: {', '.join(missing)}.\n"
    if "build" in facts:
        ratio = (work.seconds.sum() + len(work.seconds) * work.least + work.beside) / facts["build"]
        text += f"One worker by the sum of all tasks: {ratio:.3f} of an ordinary build ({facts['build']:.4g} s).\n"
    return text + f"Assumed: {costs}\nTimes of {facts['machine']}\n"


def launching(times):
    """What the host does for the devices, of which threads of one process do one at a time."""
    if not times.measured or times.facts["unit"] == "cpu":
        return ""
    host = sum(row["host"] for row in times.rows)
    return f"Launches of all tasks keep a thread busy for {host:.3g} s; one process is not faster than that.\n"


def simulate(files, like, counts, costs):
    """Prints a table for each `TaskTimes`; returns all rows."""
    rows = []
    for times in files:
        work = Work.of(times, like)
        print(told(work, costs) + launching(times), HEADER, sep="\n")
        for workers in counts:
            rows.append(simulated(work, workers, costs))
            print(line(rows[-1]), flush=True)
        print()
    return rows
