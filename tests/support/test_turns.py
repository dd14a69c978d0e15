"""Turns of processes that compile: each name is made once, and nobody waits in vain."""

import errno
import os
import resource
import signal
import threading
from time import monotonic, sleep

import pytest
from interrupts import interrupted

from md4.support import turns
from md4.support.cache import entry_path
from md4.support.turns import WAITING, compile_in_turn, in_turn

NAMES = ["one", "two", "three", "four"]
INTERRUPTED = 42


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The folder of an empty cache, at which processes look often. Nobody waits longer than a test does."""
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(turns, "PAUSE", 0.01)
    monkeypatch.setattr(turns, "PATIENCE", 1e9)
    return entry_path("names").parent


def missing():
    return [name for name in NAMES if not entry_path(name).exists()]


def make(todo, bar):
    """Notes what is made, and by whom."""
    for name in todo:
        with open(entry_path("log"), "a") as log:
            log.write(f"{name} {os.getpid()}\n")
        sleep(0.02)
        entry_path(name).touch()
        bar.update()


def made():
    """Names in the log, and the processes that made them."""
    lines = [line.split() for line in entry_path("log").read_text().splitlines()]
    return [name for name, _ in lines], {int(process) for _, process in lines}


def forked(work):
    """A child process that does some work, and ends with status 0 if this went well."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work()
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        os._exit(status)


def status_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def take():
    compile_in_turn("names", missing, make)


def have(work):
    """work(), while this thread has the turn."""
    return in_turn("names", work, never)


def never():
    return 1


def stop_in_turn():
    """Has the turn, says so and makes nothing."""
    have(lambda: (entry_path("begun").touch(), sleep(60)))


def wait_for(path):
    end = monotonic() + 30
    while not path.exists():
        assert monotonic() < end
        sleep(0.01)


@pytest.mark.parametrize("number", [2, 8])
def test_each_is_made_once(number):
    children = [forked(take) for _ in range(number)]
    assert [status_of(child) for child in children] == [0] * number
    names, processes = made()
    assert names == NAMES
    assert len(processes) == 1


def test_threads_take_turns():
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made()[0] == NAMES


def test_what_others_have_not_made_is_made():
    """By the next, which is given that alone, and says what it had to do."""

    def begin():
        thread.start()
        sleep(0.1)
        for name in NAMES[1:]:
            entry_path(name).touch()

    given = []
    thread = threading.Thread(target=lambda: given.append(compile_in_turn("names", missing, make)))
    have(begin)
    thread.join()
    assert given == [NAMES[:1]]
    assert made()[0] == NAMES[:1]


def test_the_one_that_has_the_turn_is_killed():
    holder = forked(stop_in_turn)
    wait_for(entry_path("begun"))
    others = [forked(take) for _ in range(3)]
    sleep(0.1)
    os.kill(holder, signal.SIGKILL)
    assert [status_of(child) for child in (holder, *others)] == [-signal.SIGKILL, 0, 0, 0]
    assert made()[0] == NAMES


def test_an_interrupt_ends_the_wait():
    def interrupt():
        child = forked(take)
        sleep(0.2)
        start = monotonic()
        os.kill(child, signal.SIGINT)
        return status_of(child), monotonic() - start

    status, seconds = have(interrupt)
    assert status == INTERRUPTED
    assert seconds < 5
    assert missing() == NAMES


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_an_interrupt_at_any_line_leaves_the_turn_free():
    def take_quickly():
        compile_in_turn("names", lambda: NAMES, lambda todo, bar: done.append(todo))

    number, done = 0, []
    while interrupted(take_quickly, turns.__file__, number):
        number += 1
        child = forked(lambda: have(lambda: None))
        assert status_of(child) == 0
    assert number > 20
    assert len(done) > 1


def test_nested():
    """Whatever the names: two that each want the turn of the other do not wait."""
    assert have(lambda: in_turn("others", lambda: have(lambda: 7), never)) == 7


def test_a_fork_amid_a_turn():
    """The child waits as any other process, and when its parent has done, it keeps nothing."""
    children = []

    def fork():
        children.append(forked(take))
        children.append(forked(lambda: sleep(60)))
        sleep(0.1)
        assert missing() == NAMES

    have(fork)
    assert status_of(children[0]) == 0
    assert made()[0] == NAMES
    assert have(lambda: 7) == 7
    os.kill(children[1], signal.SIGKILL)
    status_of(children[1])


def test_nobody_waits_who_needs_nothing(folder):
    def need_nothing():
        assert compile_in_turn("names", list, make) == []

    assert status_of(have(lambda: forked(need_nothing))) == 0
    need_nothing()
    assert [path.name for path in folder.iterdir()] == ["names.turn"]


def no_locks(*_):
    raise OSError(errno.ENOLCK, "no locks available")


def no_room():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


@pytest.mark.parametrize("fault", ["nowhere", "folder", "pipe", "link", "locks", "room", "stopped"])
def test_a_process_that_cannot_wait_makes_all(fault, folder, monkeypatch):
    """As there were no turns, while another process has its turn; nothing is raised."""
    holder = forked(stop_in_turn)
    wait_for(entry_path("begun"))
    turn, begun = entry_path("names.turn"), []
    if fault == "nowhere":
        monkeypatch.setenv("MD4_CACHE_DIR", "/proc/nowhere")
    elif fault in ("folder", "pipe", "link"):
        turn.unlink()
        {"folder": os.mkdir, "pipe": os.mkfifo, "link": lambda path: os.symlink(path, path)}[fault](turn)
    elif fault == "locks":
        monkeypatch.setattr(turns.fcntl, "flock", no_locks)
    elif fault == "stopped":
        monkeypatch.setattr(turns, "PATIENCE", 1.0)

    def take_all():
        if fault == "room":
            no_room()
        compile_in_turn("names", missing, lambda todo, _: begun.append(todo))
        assert begun == [NAMES]
        start = monotonic()  # once more, at once: it waits in vain only once
        compile_in_turn("names", missing, lambda todo, _: begun.append(todo))
        assert len(begun) == 2
        assert monotonic() - start < 1.0

    child = forked(take_all)
    assert status_of(child) == 0
    os.kill(holder, signal.SIGKILL)
    status_of(holder)


def test_the_file_is_small_and_its_owners(folder):
    take()
    status = (folder / "names.turn").stat()
    assert (status.st_size, status.st_mode & 0o777) == (0, 0o600)


def test_the_bar_says_that_it_waits(capsys, monkeypatch):
    """And counts what others make."""

    def begin():
        entry_path("one").touch()
        thread = threading.Thread(target=lambda: compile_in_turn("names", missing, make, progress=True))
        monkeypatch.setattr(turns, "sleep", lambda _: seen.append(capsys.readouterr().err) or sleep(0.01))
        thread.start()
        while len(seen) < 3:
            sleep(0.01)
        entry_path("two").touch()
        while len(seen) < 6:
            sleep(0.01)
        return thread

    seen = []
    have(begin).join()
    assert f"0/3 kernels|          | 00:00, {WAITING}" in seen[0]
    assert any("1/3 kernels" in text and WAITING in text for text in seen)
    assert WAITING not in capsys.readouterr().err.rpartition("1/3")[2]
    assert made()[0] == NAMES[2:]
