"""Work that is interrupted, forked, shared by threads, or held to little memory: right afterwards, or a clear error."""

import signal
import tracemalloc
from time import sleep

import numpy as np
import pytest
from faults import Child, copy_of, files, run

import md4
from md4.contract.tensor import ao_tensor
from md4.errors import MemoryLimitError
from md4.shells.basis import Basis

pytestmark = pytest.mark.xdist_group("faults")  # one cache for all, that of `filled`
slow = pytest.mark.slow


# signals --------------------------------------------------------------------------------------------------------------

READY = """
    print("ready", flush=True)
    while True:
        done = job()
        if spec["once"]:
            break
    report([done])
"""


def check_signalled(cache, filled, number, wait):
    """A process that a signal ends after `wait` seconds of work leaves a cache by which the next one is right."""
    child = Child(cache, READY, once=not files(cache))
    assert child.process.stdout.readline() == "ready\n"
    sleep(wait)
    child.stop(number)
    assert child.done().status in (0, 1, -number)  # no crash
    run(cache).right()
    assert run(cache).right()["compiled"] == 0
    assert {p.name for p in files(cache)} <= {p.name for p in files(filled)}


SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.thorough
@pytest.mark.parametrize("number", SIGNALS, ids=["SIGINT", "SIGTERM"])
def test_a_signal_amid_work(filled, tmp_path, number):
    check_signalled(copy_of(filled, tmp_path / "cache"), filled, number, np.random.default_rng(number).uniform(0, 0.5))


@pytest.mark.thorough
def test_a_signal_while_loops_are_compiled(filled, tmp_path):
    check_signalled(tmp_path / "cache", filled, signal.SIGTERM, 3.0)


@slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("number", SIGNALS, ids=["SIGINT", "SIGTERM"])
def test_a_signal_at_any_moment_of_a_first_use(filled, tmp_path, number, seed):
    check_signalled(tmp_path / "cache", filled, number, np.random.default_rng([number, seed]).uniform(0, 12))


@slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("number", SIGNALS, ids=["SIGINT", "SIGTERM"])
def test_a_signal_at_any_moment(filled, tmp_path, number, seed):
    wait = np.random.default_rng([number, seed]).uniform(0, 1)
    check_signalled(copy_of(filled, tmp_path / "cache"), filled, number, wait)


INTERRUPTED = """
    import signal
    rng = np.random.default_rng(spec["seed"])
    options = {"backend": spec["backend"], "max_memory": spec["max_memory"]}
    engine, jk = md4.Engine(basis, **options), md4.JK(basis, **options)

    fired = []

    def stop(*_):
        fired.append(True)
        raise KeyboardInterrupt

    def interrupted(work, seconds):
        fired.clear()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException:  # NumPy makes a TypeError of an interrupt amid a comparison
            if not fired:
                raise
        return bool(fired)

    def build():
        if rng.random() < 0.3:
            jk.reset()
        jk.get_jk(dm)

    signal.signal(signal.SIGALRM, stop)
    works, results, count = (build, lambda: ao_tensor(engine, "s8")), [job(engine, jk)], 0
    for _ in range(spec["tries"]):
        for work in works:
            begin = time.perf_counter()
            work()
            count += interrupted(work, rng.uniform(1e-5, time.perf_counter() - begin))
        if len(results) < 10:
            results.append(job(engine, jk))
    report([*results, job(engine, jk)], interrupted=count)
"""


def check_interrupted(filled, backend, tries, seed=0):
    """The same objects are right after a KeyboardInterrupt at random moments, and their memory is not used up."""
    told = run(filled, INTERRUPTED, backend=backend, tries=tries, seed=seed, max_memory=50).right()
    assert told["interrupted"] > tries // 2
    return told["interrupted"]


def test_objects_outlive_interrupts(filled, backend):
    check_interrupted(filled, backend, 40)


@slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_objects_outlive_many_interrupts(filled, seed):
    print(check_interrupted(filled, "cpu", 1000, seed), "interrupted calls")


# forks and threads ----------------------------------------------------------------------------------------------------

FORK = """
    from md4.cpu import threads

    results, (read, write) = [job()], os.pipe()
    assert threads.queue is not None  # the threads have run
    child = os.fork()
    if child == 0:
        try:
            assert threads.queue is None
            done = job()
            assert threads.queue is not None
            os.write(write, json.dumps(done).encode())
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(8)
    os.close(write)
    told = b"".join(iter(lambda: os.read(read, 1 << 16), b""))
    _, status = os.waitpid(child, 0)
    if told:
        results.append(json.loads(told))
    report([*results, job()], status=os.waitstatus_to_exitcode(status))
"""


def test_a_fork_after_use(filled):
    """The child, which has none of the threads, starts its own; it neither dies nor hangs, nor does its parent."""
    done = run(filled, FORK, timeout=60)
    told = done.right()
    assert told["status"] == 0, done.errors
    assert len(told["results"]) == 3


POOL = """
    import multiprocessing

    def one(_):
        return job()

    results = [job()]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        told = pool.map(one, range(4))
    report([*results, *told, job()])
"""


@pytest.mark.thorough
def test_a_pool_of_forks_after_use(filled):
    assert len(run(filled, POOL, timeout=60).right()["results"]) == 6


TOGETHER = """
    results, start = [job()], threading.Barrier(4)

    def one():
        start.wait()
        for _ in range(20):
            results.append(job())

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(results)
"""


@pytest.mark.thorough
def test_threads_at_once(filled):
    """Each with objects of its own, and with md4's threads for all of them."""
    assert len(run(filled, TOGETHER, timeout=120).right()["results"]) == 81


# memory ---------------------------------------------------------------------------------------------------------------

CAPS = np.geomspace(0.05, 200, 12).tolist()
# What is held beside arrays that are counted: 1.8e6 of Python's objects before the first of these, and what comes with
# them. 2.1e6 were seen in all, where a cap of 3 MB suffices for J with eight lanes and one thread.
SLACK = 2.5e6


@pytest.fixture(scope="module")
def shells():
    """Eight d shells: 36 pairs, whose 36 x 36 block of (dd|dd) takes 6.5 MB and whose whole tensor 20.5 MB."""
    rng = np.random.default_rng(0)
    l, ones = [2] * 8, [[1.0]] * 8
    return Basis.from_arrays(l, rng.uniform(0.4, 2.0, (8, 1)), ones, rng.uniform(-1, 1, (8, 3)))


def tensor_work(basis, cap, aosym):
    return ao_tensor(md4.Engine(basis, backend="cpu", max_memory=cap), aosym)


def matrix_work(basis, cap, with_k):
    return md4.get_jk(basis, np.eye(basis.nao), with_k=with_k, backend="cpu", max_memory=cap)[with_k]


def block_work(basis, cap, count):
    pairs = np.array([(a, b) for a in range(8) for b in range(a + 1)])
    return md4.Engine(basis, backend="cpu", max_memory=cap).compute(pairs[:count], pairs)


WORK = {
    "int2e s1": (tensor_work, "s1"), "int2e s4": (tensor_work, "s4"), "int2e s8": (tensor_work, "s8"),
    "J and K": (matrix_work, True), "J": (matrix_work, False), "a block": (block_work, 36), "few": (block_work, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_memory_never_exceeds_the_cap(shells, name):
    """By what NumPy asks for; what does not fit is refused."""
    work, option = WORK[name]
    check_caps(CAPS, lambda cap: work(shells, cap, option))


@pytest.mark.thorough
@pytest.mark.parametrize("with_k", [True, False])
def test_memory_for_h_matrices_never_exceeds_the_cap(with_k):
    """12 contracted f shells: H matrices of all pairs take many times what the density matrices take."""
    rng = np.random.default_rng(0)
    numbers = rng.uniform(0.4, 2.0, (12, 2)), np.ones((12, 2)), rng.uniform(-2, 2, (12, 3))
    basis = Basis.from_arrays([3] * 12, *numbers)
    check_caps((0.5, 3, 6, 20), lambda cap: matrix_work(basis, cap, with_k))


def check_caps(caps, work):
    """`work(cap)` is refused or right within the cap, for `caps` in MB; the first is too small, the last is not."""
    right, refused, wrong = work(None), 0, []
    for cap in caps:
        ours, peak = traced(lambda cap=cap: work(cap))
        if ours is None:
            refused += 1
        else:
            assert abs(ours - right).max() < 1e-11 * abs(right).max()
        if peak > cap * 1e6 + SLACK:
            wrong.append(f"cap {cap:.2f} MB, peak {peak / 1e6:.2f} MB")
    assert not wrong
    assert 0 < refused < len(caps)


def traced(work):
    """(result, None where it was refused; most bytes held meanwhile)."""
    tracemalloc.start()
    try:
        result = work()
    except MemoryLimitError:
        result = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return result, peak
