"""Division of work among devices and processes.

The work of a build are pairs of lists of shell pairs (`md4.contract.screening.Screened`), for each of which a time is
predicted. Long ones are cut into parts. Every worker, which is a device or a process, gets a fixed share of these
tasks, chosen so that the predicted times are the same. The rest are small tasks, which workers take one after the other
from a counter that all share when they are done with their shares. So wrong predictions cost little, and the counter is
asked rarely.

All workers divide the same list in the same way, without a word between them.
"""

from heapq import heapify, heapreplace
from math import ceil
from typing import NamedTuple

# Share of the predicted time that is divided beforehand.
FIXED_SHARE = 0.75
# Number of tasks for each worker if all were of the same length, and the shortest task that a long one is cut into.
TASKS, SHORTEST = 32, 1e-3


class Task(NamedTuple):
    """One of equal parts of a pair of lists.

    Attributes
    ----------
    pair : int
        Number of the pair of lists.
    part, parts : int
    seconds : float
        Predicted time.
    """

    pair: int
    part: int
    parts: int
    seconds: float


class Division(NamedTuple):
    """Who does which tasks.

    Attributes
    ----------
    shares : list of list of Task
        Of each worker.
    rest : list of list of Task
        Bundles, which are taken one by one, in this order.
    """

    shares: list
    rest: list


def make_tasks(seconds, rows, workers):
    """The tasks for pairs of lists, in their order.

    Parameters
    ----------
    seconds : sequence of float
        Predicted time of each pair of lists.
    rows : sequence of int
        The largest number of parts of each.
    workers : int
    """
    if workers == 1:
        return [Task(n, 0, 1, s) for n, s in enumerate(seconds)]
    longest = max(SHORTEST, sum(seconds) / (TASKS * workers))
    tasks = []
    for n, (s, most) in enumerate(zip(seconds, rows)):
        parts = max(1, min(ceil(s / longest), most))
        tasks += [Task(n, k, parts, s / parts) for k in range(parts)]
    return tasks


def divide(tasks, workers):
    """The `Division` of tasks. Long ones are dealt out, each to the worker that has least; the others are the rest."""
    if workers == 1:
        return Division([list(tasks)], [])
    order = sorted(range(len(tasks)), key=lambda n: -tasks[n].seconds)
    fixed, total, so_far = [], sum(task.seconds for task in tasks), 0.0
    for n in order:
        if so_far >= FIXED_SHARE * total:
            break
        fixed.append(n)
        so_far += tasks[n].seconds
    shares, heap = [[] for _ in range(workers)], [(0.0, worker) for worker in range(workers)]
    heapify(heap)
    for n in fixed:
        load, worker = heap[0]
        shares[worker].append(n)
        heapreplace(heap, (load + tasks[n].seconds, worker))
    # In the order of the lists, so that their H matrices are used one after the other.
    least = min(SHORTEST, total / (4 * TASKS * workers))
    return Division([[tasks[n] for n in sorted(share)] for share in shares], bundles(tasks, order[len(fixed) :], least))


def bundles(tasks, order, least):
    """Tasks by their numbers in `order`, in bundles of at least so many seconds, except for the last one."""
    out, seconds = [], 0.0
    for n in order:
        if not out or seconds >= least:
            out.append([])
            seconds = 0.0
        out[-1].append(tasks[n])
        seconds += tasks[n].seconds
    return out
