"""Bars whose clocks stand still while kernels are compiled."""

import io

import pytest

from md4.support.progress import COMPILING, Progress, clocks, compiling, compiling_one


class Clock:
    """Seconds that pass only where a test says so."""

    now = 1000.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """The clock of md4's bars and of tqdm's."""
    made = Clock()
    monkeypatch.setattr("md4.support.progress.time", made)
    monkeypatch.setattr("tqdm.std.time", made)
    return made


@pytest.fixture
def bar(clock):
    """A bar that is shown at once."""
    with Progress(10, enabled=True, delay=0, label="work") as made:
        yield made
    assert clocks.bars == []


def elapsed(bar):
    """Seconds that a bar believes to have passed."""
    return bar._bar.format_dict["elapsed"]


def test_the_clock_stands_still(bar, clock):
    clock.wait(2)
    bar.update(5)
    with compiling(2, enabled=False):
        clock.wait(30)
    with compiling_one(1):
        clock.wait(3)
    assert elapsed(bar) == 2
    clock.wait(1)
    assert elapsed(bar) == 3


def test_the_time_that_is_left(clock, capsys):
    """It is shown once it can be told, and leaves out set-up and the time in which kernels were compiled."""
    with Progress(1.0, enabled=True, delay=0, label="work") as bar:
        clock.wait(20)
        for seconds, done, left in ((0, 0.01, False), (3, 0.01, False), (1, 0.18, True)):
            with compiling_one(1):
                clock.wait(60)
            capsys.readouterr()
            clock.wait(seconds)
            bar.update(done)
            assert ("left" in capsys.readouterr().err) == left
        bar._bar.refresh()
        assert "work:  20%" in (seen := capsys.readouterr().err)
        assert "00:24, about 00:16 left" in seen  # 0.19 of the work in 4 s
        clock.wait(1)
        bar.update(2.0)
        assert "work: 100%" in capsys.readouterr().err


def test_few_steps_tell_no_time(clock, capsys):
    """Of three functions that are compiled, the first one says nothing about the others."""
    with Progress(3, enabled=True, delay=0, unit="function") as bar:
        clock.wait(9)
        bar.update()
        assert "1/3 functions" in (seen := capsys.readouterr().err)
        assert "left" not in seen


def test_compiling_is_seen_at_once(capsys):
    with compiling(3, enabled=True, unit="function"):
        assert f"{COMPILING}: 0/3 functions" in capsys.readouterr().err


def test_nobody_asks_what_is_done_where_nobody_sees_it():
    with Progress(3) as hidden, Progress(3, enabled=True) as shown:
        assert hidden.report is None
        assert shown.report == shown.update


def fail_inside(clock):
    with compiling(3, enabled=False), compiling_one(1):
        clock.wait(5)
        raise ValueError("inside")


def test_nested_and_after_an_error(bar, clock):
    """Time is left out once, and an error starts the clock again."""
    clock.wait(1)
    with pytest.raises(ValueError, match="inside"):
        fail_inside(clock)
    assert elapsed(bar) == 1
    clock.wait(1)
    assert elapsed(bar) == 2


def test_a_bar_that_begins_meanwhile(clock):
    with compiling(1, enabled=False):
        clock.wait(5)
        bar = Progress(10, enabled=True, delay=0)
        clock.wait(2)
    assert elapsed(bar) == 0
    bar.close()


def test_what_is_seen(clock, capsys):
    with Progress(10, enabled=True, delay=0, label="work") as bar:
        with compiling_one(7):
            assert "compiling kernel 7, once" in capsys.readouterr().err
        bar._bar.refresh()
        assert "compiling" not in capsys.readouterr().err
        with compiling(20, enabled=True) as kernels:
            clock.wait(1)
            kernels.update(5)
            seen = capsys.readouterr().err
    assert COMPILING in seen
    assert "5/20" in seen


def test_without_a_terminal_nothing_is_seen(capsys):
    with Progress(3), compiling(3) as kernels, compiling_one(1):
        kernels.update()
    assert capsys.readouterr().err == ""


class Writer:
    """A stream that can do no more, as those of loggers."""

    def write(self, text):
        return len(text)


def closed():
    """A stream that is closed."""
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Writer(), closed()])
@pytest.mark.parametrize("enabled", [None, False])
def test_streams_that_are_no_terminals(stream, enabled, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream)
    with Progress(10, enabled=enabled) as bar:
        assert bar.report is None
