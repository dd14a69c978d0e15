"""Device memory: what is on loan, what is idle, and the cap, on the emulated GPU and on a real one."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
from emulator import running
from numba.cuda.cudadrv.driver import CudaAPIError

import md4
from md4.errors import DeviceError, MemoryLimitError
from md4.gpu import context as device
from md4.gpu import pool as pool_module
from md4.gpu.pool import Pool, bucket

gpu_only = pytest.mark.gpu


@pytest.fixture(params=["python", pytest.param("cuda", marks=gpu_only)])
def stream(request):
    """A stream of each device."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        yield device.cuda.stream()
    else:
        with running():
            yield device.as_stream(None)


def test_what_is_released_is_lent_again(stream):
    pool = Pool()
    one = pool.get(100)
    place, held = one.pointer, pool.held
    pool.release(one)
    pool.release(one)  # the second time nothing
    two = pool.get(100)
    assert two.pointer == place
    assert pool.held == held
    assert pool.get(100).pointer != place


def test_what_nobody_refers_to_is_lent_again(stream):
    """An exception leaves buffers behind that nobody gives back."""
    pool = Pool()

    def interrupted():
        buffer = pool.get(1000)
        places.add(buffer.pointer)
        part = buffer.part(10, (5,))  # noqa: F841 a part is a use
        raise KeyboardInterrupt

    places = set()
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    gc.collect()
    assert len(places) <= 2  # the last exception may keep the last buffer
    assert pool.held <= 2 * bucket(8000)
    assert len(pool.lent) <= 1


def test_buffers_in_garbage_that_refers_to_itself(stream):
    """Numba frees what only garbage in cycles refers to before any of it is told that it goes."""
    pool = Pool()

    class Node:
        pass

    for make, idle in ((pool.get, 1), (pool.fresh, 0)):
        node = Node()
        node.itself, node.buffer = node, make(1000)
        size, place = node.buffer.owner.nbytes, node.buffer.pointer
        del node
        gc.collect()
        assert pool._idle_bytes() == idle * size
        again = pool.get(1000)
        assert pool.memory[again.owner.number].device_pointer_value == again.pointer
        assert again.pointer == place or not idle
        assert sum(pool.live.values()) == size
        del again
        pool.trim()
        assert not pool.live


def test_a_pool_in_garbage_that_refers_to_itself(stream):
    """With all that it has lent: nothing of it is touched again."""
    pool = Pool()
    pool.itself, pool.buffers, live = pool, [pool.get(1000), pool.fresh(50)], pool.live
    pool.release(pool.get(70))
    assert len(live) == 3
    del pool
    gc.collect()
    assert not live


def test_a_pool_ends_with_its_engine(stream):
    pool = Pool()
    buffer, live = pool.get(1000), pool.live
    pool.release(pool.get(70))
    del pool, buffer
    gc.collect()
    assert not live


def test_an_interrupt_while_memory_is_lent(stream, monkeypatch):
    """Wherever it comes, the memory is idle afterwards, and lent once."""
    pool = Pool()
    pool.release(pool.get(1000))
    size = pool._idle_bytes()

    class Interrupting:
        def __init__(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr(pool_module, "Loan", Interrupting)
    for take in (pool.get, lambda items: pool.room("r", items)):
        with pytest.raises(KeyboardInterrupt):
            take(1000)
        gc.collect()
        assert pool._idle_bytes() == size
    monkeypatch.undo()
    one, two = pool.get(1000), pool.get(1000)
    assert one.pointer != two.pointer


def test_the_cap_alone(stream, monkeypatch):
    """What the cap leaves to the host does not depend on what the device has free."""
    pool = Pool(10)
    monkeypatch.setattr(Pool, "_room", lambda self: 0 if self.cap > 1e7 else 10**7)
    assert pool.below_cap() == 10**7
    lent = pool.get(1000)
    assert pool.below_cap() == 10**7 - bucket(8000)
    pool.release(lent)
    assert pool.below_cap() == 10**7  # idle, and may be given back
    table = pool.watch(np.zeros(1000))
    assert pool.below_cap() == 10**7 - 8000
    del table
    assert pool.below_cap() == 10**7
    pool.cap = 10**9
    assert pool.left() < 10**6 < pool.below_cap()


def test_a_room_is_the_same_memory_as_long_as_it_fits(stream):
    pool = Pool()
    one, other = pool.room("r", 1000), pool.room("abq", 10)
    place, held = one.pointer, pool.held
    assert other.pointer != place
    smaller = pool.room("r", 10)
    assert (smaller.pointer, smaller.shape) == (place, (10,))
    assert pool.get(1000).pointer != place
    del one, other, smaller
    larger = pool.room("r", 2000)
    assert larger.pointer != place
    assert pool.get(1000).pointer == place  # what was too small is lent again
    assert pool.held == held + bucket(8000) + bucket(16000)


def test_rooms_that_nobody_uses_are_free(stream):
    pool = Pool(1)
    place = pool.room("r", 100_000).pointer
    used = pool.room("block", 10_000)
    assert pool.left() == 1_000_000 - used.owner.nbytes
    assert pool.below_cap() == 1_000_000 - used.owner.nbytes
    assert pool.room("r", 100_000).pointer == place  # it stays where it is
    assert pool.room("block", 10).pointer == used.pointer
    other = pool.room("abq", 110_000)  # which takes the memory of r
    assert pool.held <= 1_000_000
    assert other.pointer != used.pointer
    with pytest.raises(MemoryLimitError):
        pool.room("r", 10_000)
    del other
    assert pool.room("block", 10_000).pointer != used.pointer  # the name was given up, but not what is used


def test_a_room_of_ones_own(stream):
    """Nobody else gets it as long as it is used; then it is the same memory again."""
    pool = Pool()
    one = pool.own_room("sums", 1000)
    two = pool.own_room("sums", 1000)
    place = two.pointer
    assert one.pointer != place
    assert pool.room("r", 1000).pointer not in (one.pointer, place)
    for _ in range(3):
        del two
        lent = pool.get(1000)  # not what the room keeps
        two = pool.own_room("sums", 500)
        assert two.pointer == place != lent.pointer
    del two
    assert pool.own_room("sums", 5000).pointer != place


def test_a_part_keeps_its_buffer(stream):
    pool = Pool()
    part = pool.get(1000).part(10, (5,))
    gc.collect()
    other = pool.get(1000)
    assert other.pointer != part.pointer - 80


def test_other_streams_memory_is_not_lent_again_unasked(stream):
    pool = Pool()
    fresh = pool.fresh(1000)
    size = fresh.owner.nbytes
    del fresh
    gc.collect()
    assert pool._idle_bytes() == 0
    pool.trim()
    assert pool.held == 0
    pool.release(pool.fresh(1000))
    assert pool._idle_bytes() == size


def test_interrupted_allocations_are_not_booked(stream, monkeypatch):
    """Nineteen calls of 50 MB that are interrupted leave a cap of 1000 MB as it was."""
    pool = Pool(1)
    context = type(device.cuda.current_context())

    def interrupted(self, size):
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "memalloc", interrupted)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            pool.get(50_000)
    monkeypatch.undo()
    assert pool.held == 0
    assert pool.left() == 1_000_000
    pool.get(50_000)


@pytest.mark.parametrize("code, error", [(2, MemoryLimitError), (1, CudaAPIError)])
def test_memory_that_another_process_was_quicker_to_take(code, error, stream, monkeypatch):
    pool = Pool(1)

    def refused(self, size):
        raise CudaAPIError(code, "cuMemAlloc")

    monkeypatch.setattr(type(device.cuda.current_context()), "memalloc", refused)
    with pytest.raises(error, match="cuMemAlloc" if code == 1 else "which the driver refuses"):
        pool.get(50_000)
    monkeypatch.undo()
    assert pool.held == 0


def test_items_of_another_size_are_not_uploaded(stream):
    pool = Pool()
    for dtype in (np.float32, np.complex128, np.int8):
        with pytest.raises(TypeError, match="not of 8 bytes"):
            pool.upload([np.zeros(4), np.zeros(4, dtype)], stream)
    buffer, (one, two) = pool.upload([np.arange(4.0), np.arange(3)], stream)
    assert (one.shape, two.shape, two.pointer - buffer.pointer) == ((4,), (3,), 32)


def test_what_is_given_back_in_other_threads(stream):
    pool = Pool()

    def work():
        for n in range(200):
            pool.release(pool.get(100 + n % 7))
            pool.get(100)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert pool.held == pool._idle_bytes()


# results --------------------------------------------------------------------------------------------------------------


@gpu_only
def test_results_count_until_the_driver_has_them_back(gpu):
    """Numba puts off freeing; until then the cap counts what was dropped."""
    pool = Pool(20)
    size = bucket(8 << 20)
    array = pool.array((1 << 20,))
    view = array[100:200]
    assert pool.held == size
    del array
    gc.collect()
    assert pool.held == size  # the view is a use
    assert not pool.dropped
    del view
    gc.collect()
    assert pool.held == size
    assert list(pool.dropped.values()) == [size]
    assert pool.left() == 20_000_000
    with device.cuda.defer_cleanup():
        for _ in range(6):
            pool.array((1 << 20,))
            assert pool.held <= 20_000_000
    pool.trim()
    assert pool.held == 0


@gpu_only
def test_dropped_results_do_not_lift_the_cap(gpu):
    """Tensors that are made and dropped one after the other never take more than the cap on the device."""
    free = device.cuda.current_context().get_memory_info
    basis = md4.Basis.from_arrays([2] * 12, [[1.0]] * 12, [[1.0]] * 12, np.random.default_rng(0).normal(size=(12, 3)))
    pairs = np.array([[i, k] for i in range(12) for k in range(12)])
    engine = md4.Engine(basis, backend="cuda", max_memory=200)
    for _ in range(6):
        engine.compute(pairs, pairs)  # 104 MB
        assert engine.backend.context.pool.held <= 200e6
    assert engine.backend.context.pool.peak <= 200e6
    assert free()[0] > 0


@gpu_only
@pytest.mark.parametrize(("l", "of_path"), [(2, ("run",)), (4, ("transform_bra", "transform_ket"))])
def test_interrupts_do_not_use_up_the_cap(gpu, monkeypatch, l, of_path):
    basis = md4.Basis.from_arrays([l] * 8, [[1.0]] * 8, [[1.0]] * 8, np.random.default_rng(0).normal(size=(8, 3)))
    pairs = np.array([[i, k] for i in range(8) for k in range(i)])
    engine = md4.Engine(basis, backend="cuda", max_memory=300)
    want = engine.compute(pairs, pairs).copy_to_host()
    backend, path = type(engine.backend), type(engine.backend.plan(*[engine.prepare(pairs).pairs] * 2).path)
    for steps, step in ((backend, "r"), (backend, "hermite"), *((path, name) for name in of_path)):
        run = getattr(steps, step)

        def interrupted(*args, run=run):
            run(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(steps, step, interrupted)
        for _ in range(10):
            with pytest.raises(KeyboardInterrupt):
                engine.compute(pairs, pairs)
        monkeypatch.undo()
    np.testing.assert_array_equal(engine.compute(pairs, pairs).copy_to_host(), want)
    assert engine.backend.context.pool.peak <= 300e6


# devices and processes ------------------------------------------------------------------------------------------------


def test_each_device_has_its_own_tables(monkeypatch):
    class Uploaded:
        def __init__(self, table):
            self.device_ctypes_pointer = type("Pointer", (), {"value": id(self)})

        def synchronize(self):
            pass

    monkeypatch.setattr(device.cuda, "to_device", Uploaded, raising=False)
    monkeypatch.setattr(device.cuda, "default_stream", lambda: Uploaded(None))
    found = []
    for number in (0, 1, 0):
        context = object.__new__(device.DeviceContext)
        context.device = number
        found.append(context.table(unlikely_table, 3).pointer)
    assert found[0] == found[2] != found[1]


def unlikely_table(n):
    return np.arange(n)


@gpu_only
def test_two_devices(gpu):
    """One after the other in one thread: tables, kernels and memory are each device's own."""
    if len(device.cuda.gpus) < 2:
        pytest.skip("needs two GPUs")
    basis = md4.Basis.from_arrays([3] * 4, [[1.0]] * 4, [[1.0]] * 4, np.random.default_rng(1).normal(size=(4, 3)))
    pairs = [[0, 1], [2, 3], [1, 3]]
    want = md4.Engine(basis, backend="cpu").compute(pairs, pairs)
    for number in (0, 1, 0):
        with device.cuda.gpus[number]:
            ours = md4.Engine(basis, backend="cuda").compute(pairs, pairs).copy_to_host()
            np.testing.assert_allclose(ours, want, atol=1e-12 * abs(want).max())
            vj, _ = md4.get_jk(basis, np.eye(basis.nao), backend="cuda")
            assert np.isfinite(vj).all()


def test_a_forked_process_is_refused(monkeypatch):
    monkeypatch.setattr(device, "forked_after_use", True)
    with pytest.raises(DeviceError, match="'spawn'"):
        device.require_gpu()
    with pytest.raises(DeviceError, match="backend='cpu'"), device.DeviceLock():
        pass


FORK = """
import os, sys, numpy, md4
basis = md4.Basis.from_arrays([1] * 2, [[1.0]] * 2, [[1.0]] * 2, numpy.eye(2, 3))
engine = md4.Engine(basis, backend="cuda")
block = engine.compute([[0, 1]], [[0, 1]]).copy_to_host()
child = os.fork()
if not child:
    told = []
    for work in (
        lambda: engine.compute([[0, 1]], [[0, 1]]),
        lambda: md4.Engine(basis),
        lambda: md4.get_jk(basis, numpy.eye(basis.nao)),
    ):
        try:
            work()
        except md4.DeviceError as error:
            told.append("forked" in str(error))
    ours = md4.Engine(basis, backend="cpu").compute([[0, 1]], [[0, 1]])
    os._exit(0 if told == [True] * 3 and abs(ours - block).max() < 1e-12 else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@gpu_only
def test_fork_after_use(gpu):
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["0"], done.stderr
