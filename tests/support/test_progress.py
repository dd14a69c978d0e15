"""Bars whose clocks stand still while kernels are compiled."""

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


def test_the_rate_leaves_the_time_out(bar, clock):
    """Also that of the last steps, by which the time that is left is estimated."""
    for _ in range(4):
        clock.wait(1)
        bar.update()
    with compiling_one(1):
        clock.wait(60)
    clock.wait(1)
    bar.update()
    assert bar._bar.format_dict["rate"] == pytest.approx(1.0)


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
