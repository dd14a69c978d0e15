"""Division of work: every quartet is computed once, whoever does it, and predicted times are shared fairly."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from md4.contract.work import FIXED_SHARE, SHORTEST, TASKS, divide, make_tasks
from md4.plan import EACH, own_ranges, part_of

times = st.lists(st.floats(0, 10), min_size=1, max_size=60)
team_sizes = st.integers(1, 40)


def everything(division):
    """All tasks of a division."""
    return [*division.rest, *(task for share in division.shares for task in share)]


@given(seconds=times, workers=team_sizes, data=st.data())
def test_tasks_are_disjoint_and_complete(seconds, workers, data):
    rows = [data.draw(st.integers(1, 50)) for _ in seconds]
    division = divide(make_tasks(seconds, rows, workers), workers)
    assert len(division.shares) == workers
    done = Counter(task[:3] for task in everything(division))
    assert set(done.values()) == {1}
    for pair, most in enumerate(rows):
        parts = [task for task in done if task[0] == pair]
        assert 1 <= len(parts) <= most
        assert sorted(parts) == [(pair, k, len(parts)) for k in range(len(parts))]


@given(weights=st.lists(st.integers(0, 1000), min_size=1, max_size=300), parts=st.integers(1, 50))
def test_parts_are_disjoint_and_complete(weights, parts):
    rows = [range(*part_of(np.array(weights), k, parts)) for k in range(parts)]
    assert [n for part in rows for n in part] == list(range(len(weights)))


@given(weights=st.lists(st.integers(1, 1000), min_size=50, max_size=300), parts=st.integers(2, 5))
def test_parts_are_equal(weights, parts):
    sums = [sum(weights[slice(*part_of(np.array(weights), k, parts))]) for k in range(parts)]
    assert max(abs(s - sum(weights) / parts) for s in sums) <= 2 * max(weights)


@given(seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=60), workers=st.integers(2, 40))
def test_shares_are_fair(seconds, workers):
    """If any task can be cut, no share is longer than another by more than the longest task."""
    tasks = make_tasks(seconds, [10**6] * len(seconds), workers)
    longest = max(sum(seconds) / (TASKS * workers), SHORTEST)
    assert max(task.seconds for task in tasks) <= 1.1 * longest + EACH
    division = divide(tasks, workers)
    shares = [sum(task.seconds for task in share) for share in division.shares]
    assert max(shares) - min(shares) <= 1.1 * longest + EACH
    total = sum(task.seconds for task in tasks)
    assert sum(shares) == pytest.approx(FIXED_SHARE * total, abs=1.1 * longest + EACH)


def test_the_rest_are_short_tasks_that_fall():
    """So that all workers end at about the same time. Tiny tasks, which are not worth asking for, are in the shares."""
    division = divide(make_tasks([1.0] * 60 + [0.01] * 1000 + [1e-6] * 1000, [1000] * 2060, 4), 4)
    lengths = [task.seconds for task in division.rest]
    assert lengths == sorted(lengths, reverse=True)
    assert SHORTEST <= lengths[-1] <= 0.02
    assert sum(task.seconds < SHORTEST for share in division.shares for task in share) == 1000


def test_tiny_work_is_all_dealt_out():
    division = divide(make_tasks([1e-6] * 50, [5] * 50, 4), 4)
    assert division.rest == []
    assert {len(share) for share in division.shares} <= {12, 13}


def test_one_worker_does_all():
    division = divide(make_tasks([3.0, 1.0, 2.0], [5, 5, 5], 1), 1)
    assert [task[:3] for task in division.shares[0]] == [(0, 0, 1), (2, 0, 1), (1, 0, 1)]
    assert division.rest == []


@given(count=st.integers(0, 300), parts=st.integers(1, 9))
def test_ranges_of_parts(count, parts):
    """Each item belongs to one part. If work falls along the items, all parts have about as much."""
    found = [own_ranges(count, part, parts) for part in range(parts)]
    items = [[n for own in ranges for n in range(count)[own]] for ranges in found]
    assert sorted(n for own in items for n in own) == list(range(count))
    assert all(own == sorted(own) for own in items)
    for ranges in found:
        assert all(one.stop < other.start for one, other in pairwise(ranges))
        assert all(own.start < own.stop for own in ranges)
    work = [sum(count - n for n in own) for own in items]
    assert max(work) - min(work) <= 4 * count  # of neighbouring slices, whose lengths differ by one
