"""The threads of the CPU backend: shares of work, errors and interrupts in one of them, and forks."""

import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numba
import numpy as np
import pytest
from pair_lists import two_classes

import md4
from md4.contract.tensor import ao_tensor
from md4.cpu import threads
from md4.cpu.targets import ListTensor
from md4.cpu.threads import number_of_threads, run_all, run_threads
from md4.engine import Engine
from md4.support.threads import Share


class FaultError(Exception):
    """What a thread of a test raises."""


class Work:
    """Counts pieces of work as several threads take them, until all are done or `stop` is called."""

    def __init__(self, pieces, fault=None):
        self.left, self.fault, self.running, self.taken = pieces, fault or (lambda thread: None), set(), {}

    def __call__(self, thread):
        self.running.add(thread)
        try:
            while self.left > 0:
                self.left -= 1
                self.taken[thread] = self.taken.get(thread, 0) + 1
                self.fault(thread)
                time.sleep(1e-4)
        finally:
            self.running.discard(thread)

    def stop(self):
        self.left = 0


@pytest.mark.parametrize("count", [1, 2])
def test_all_pieces_are_done(count):
    work = Work(100)
    run_threads(count, work, work.stop)
    assert work.left <= 0
    assert 100 <= sum(work.taken.values()) <= 101  # counting is not atomic
    assert set(work.taken) <= set(range(count))


def both_run(thread):
    """A fault for `Work`: waits at the first call until both threads are there."""
    if threading.current_thread() not in both_run.seen:
        both_run.seen.add(threading.current_thread())
        both_run.barrier.wait(60)


@pytest.fixture(autouse=True)
def no_thread_yet():
    both_run.seen, both_run.barrier = set(), threading.Barrier(2)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", [FaultError, KeyboardInterrupt])
def test_an_error_in_one_thread_ends_the_others(which, kind):
    """Nobody works any more when it arrives at the caller, and the threads can be used again."""

    def fault(thread):
        both_run(thread)
        if thread == which:
            raise kind("in a thread")

    work = Work(10_000, fault)
    with pytest.raises(kind, match="in a thread"):
        run_threads(2, work, work.stop)
    assert not work.running
    assert sum(work.taken.values()) < 5_000
    again = Work(50)
    run_threads(2, again, again.stop)
    assert sum(again.taken.values()) >= 50


def test_an_interrupt_while_others_are_waited_for():
    """The first thread has nothing to do any more; the second hears at once that it shall stop."""
    stopped = threading.Event()

    def work(thread):
        both_run(thread)
        if thread == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert stopped.wait(60)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_threads(2, work, stopped.set)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped.is_set()


def test_threads_that_are_busy_are_not_waited_for():
    """Another calculation holds them: then the caller does everything itself."""
    busy, go = threading.Barrier(max(2, numba.config.NUMBA_NUM_THREADS)), threading.Event()
    others = busy.parties - 1

    def hold(_):
        busy.wait(60)
        go.wait(60)

    held = [threads.Share(hold, n) for n in range(others)]
    for share in held:
        threads.queue_of(others).put(share.run)
    busy.wait(60)
    work = Work(20)
    run_threads(1 + others, work, work.stop)
    assert set(work.taken) == {0}
    go.set()
    for share in held:
        share.wait()
        assert share.error is None


def test_where_no_thread_can_be_started(monkeypatch):
    """The caller does all of the work, as at the end of a process."""

    def refused(thread):
        raise RuntimeError("can't start new thread")

    for name in ("queue", "started"):
        monkeypatch.setattr(threads, name, None)
    monkeypatch.setattr(threading.Thread, "start", refused)
    work, parts = Work(20), []
    run_threads(3, work, work.stop)
    run_all(5, parts.append)
    assert set(work.taken) == {0}
    assert sorted(parts) == list(range(5))


def test_a_share_that_nobody_began_is_never_done(monkeypatch):
    """A thread that finds it later, when its memory belongs to another call, leaves it."""
    monkeypatch.setattr(threads, "queue_of", lambda count: idle)
    idle, work = SimpleQueue(), Work(20)
    run_threads(2, work, work.stop)
    run_share = idle.get()
    work.left = 20
    run_share()
    assert set(work.taken) == {0}
    assert work.left == 20


@pytest.mark.parametrize("begun", [True, False])
def test_a_share_that_has_ended_keeps_nothing(begun):
    """A thread, or the queue of one that is busy, may have it for longer than the call lasts."""

    def work(n):
        assert n == 1

    share, kept = Share(work, 1), weakref.ref(work)
    if begun:
        share.run()
    else:
        assert share.taken_back()
    del work
    assert kept() is None
    if not begun:
        share.run()
    assert share.error is None


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_each_part_once(count):
    done = []
    run_all(count, done.append)
    assert sorted(done) == list(range(count))


def test_number_of_threads(monkeypatch):
    most = numba.config.NUMBA_NUM_THREADS
    for text, number in [("1", 1), ("0", 1), ("100000", most), ("", most), ("1,4", 1), ("many", most), ("-2", most)]:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert number_of_threads() == number
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert number_of_threads() == most


def test_callers_at_once():
    """Several threads of a caller share those of md4; each gets its own work done."""
    with ThreadPoolExecutor(4) as callers:
        works = [Work(30) for _ in range(12)]
        list(callers.map(lambda work: run_threads(2, work, work.stop), works))
    assert all(work.left <= 0 and not work.running for work in works)


# within calculations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", [FaultError, KeyboardInterrupt])
def test_a_backend_is_right_after_an_error(which, kind, two_threads, monkeypatch):
    """The error of one thread ends the call, and what the call leaves does not disturb the next one."""
    monkeypatch.setattr("md4.cpu.run.ITEMS", 20)  # so that both threads come to the target
    basis = two_classes()
    engine, jk = Engine(basis, backend="cpu"), md4.JK(basis, backend="cpu")
    dm = np.eye(basis.nao)
    expected = ao_tensor(engine, "s8"), *jk.get_jk(dm)
    scatter = ListTensor.scatter

    def failing(self, thread, *args):
        both_run(thread)
        scatter(self, thread, *args)
        if thread == which:
            raise kind("while integrals are written")

    monkeypatch.setattr(ListTensor, "scatter", failing)
    with pytest.raises(kind, match="while integrals are written"):
        ao_tensor(engine, "s8")
    monkeypatch.setattr(ListTensor, "scatter", scatter)
    for ours, theirs in zip((ao_tensor(engine, "s8"), *jk.get_jk(dm)), expected):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13 * abs(theirs).max())


def test_an_error_ends_the_others_amid_their_tasks(two_threads, monkeypatch):
    """They do not go on to the end of a task, which may take long."""
    monkeypatch.setattr("md4.cpu.run.ITEMS", 1)
    monkeypatch.setattr("md4.cpu.run.TASKS", 1)
    calls, failed = [], threading.Event()

    def taken(self, thread, *args):
        both_run(thread)
        calls.append(thread)
        if thread == 0:
            failed.set()
            raise FaultError
        assert failed.wait(60)
        time.sleep(0.2)  # until the error has reached `stop`

    monkeypatch.setattr(ListTensor, "scatter", taken)
    with pytest.raises(FaultError):
        ao_tensor(Engine(two_classes(), backend="cpu"), "s8")
    assert sorted(calls) == [0, 1]


def test_an_error_in_j_alone(two_threads, monkeypatch):
    """Its threads take tasks in Python."""
    basis = two_classes()
    jk, dm = md4.JK(basis, backend="cpu"), np.eye(basis.nao)
    expected = jk.get_jk(dm, with_k=False)[0]
    contract, calls = md4.cpu.hermite_coulomb.HostCoulomb.contract, []

    def failing(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise FaultError("while J is summed")
        return contract(self, *args)

    monkeypatch.setattr(md4.cpu.hermite_coulomb.HostCoulomb, "contract", failing)
    with pytest.raises(FaultError, match="while J is summed"):
        jk.get_jk(dm, with_k=False)
    monkeypatch.setattr(md4.cpu.hermite_coulomb.HostCoulomb, "contract", contract)
    np.testing.assert_allclose(jk.get_jk(dm, with_k=False)[0], expected, rtol=0, atol=1e-13 * abs(expected).max())
