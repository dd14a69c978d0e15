"""Division of work among devices and processes.

The work of a build are pairs of lists of shell pairs (`md4.contract.survivors.ListPairs`), for each of which a time is
predicted. Long ones are cut into parts. Every worker, which is a device or a process, gets a fixed share of these
tasks, chosen so that the predicted times are the same. The rest are short tasks, which workers take one after the other
from a counter that all share when they are done with their shares. So wrong predictions cost little, and the counter is
asked rarely.

All workers divide the same list in the same way, without a word between them.
"""

from heapq import heapify, heapreplace
from math import ceil
from typing import NamedTuple

from md4.plan import EACH

# Share of the predicted time that is divided beforehand.
FIXED_SHARE = 0.75
# Number of tasks for each worker if all were of the same length.
TASKS = 32
# Seconds: the shortest task that a long one is cut into, or that the counter is asked for.
SHORTEST = 1e-3


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
        Of each worker, the longest first.
    rest : list of Task
        Are taken one by one, in this order.
    """

    shares: list
    rest: list


def make_tasks(seconds, rows, workers):
    """The tasks for pairs of lists, the longest first.

    Parameters
    ----------
    seconds : sequence of float
        Predicted time of each pair of lists.
    rows : sequence of int
        The largest number of parts of each; 0 where there is nothing to do.
    workers : int
    """
    longest = max(SHORTEST, sum(seconds) / (TASKS * workers))
    tasks = []
    for n, (s, most) in enumerate(zip(seconds, rows)):
        parts = max(1, min(ceil(s / longest), int(s / SHORTEST), most)) if workers > 1 else 1
        tasks += [Task(n, k, parts, s / parts + EACH) for k in range(parts if most else 0)]
    return sorted(tasks, key=lambda task: -task.seconds)


def divide(tasks, workers):
    """The `Division` of tasks that are sorted by `make_tasks`.

    The rest are the shortest ones that are worth asking for. All others are dealt out, each to the worker that has
    least.
    """
    if workers == 1:
        return Division([tasks], [])
    worth = [n for n, task in enumerate(tasks) if task.seconds >= SHORTEST]
    wanted, so_far, rest = (1 - FIXED_SHARE) * sum(task.seconds for task in tasks), 0.0, set()
    for n in reversed(worth):
        if so_far >= wanted:
            break
        rest.add(n)
        so_far += tasks[n].seconds
    shares, heap = [[] for _ in range(workers)], [(0.0, worker) for worker in range(workers)]
    heapify(heap)
    for n, task in enumerate(tasks):
        if n not in rest:
            load, worker = heap[0]
            shares[worker].append(task)
            heapreplace(heap, (load + task.seconds, worker))
    return Division(shares, [tasks[n] for n in sorted(rest)])
