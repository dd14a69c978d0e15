"""Bars whose clocks stand still while kernels are compiled."""

from time import sleep

import pytest

from md4.support.progress import COMPILING, Progress, clocks, compiling, compiling_one

PAUSE = 0.3


def elapsed(bar):
    """Seconds that a bar believes to have passed."""
    return bar._bar.format_dict["elapsed"]


@pytest.fixture
def bar():
    """A bar that is shown at once."""
    with Progress(10, enabled=True, delay=0, label="work") as made:
        yield made
    assert clocks.bars == []


def test_the_clock_stands_still(bar):
    bar.update(5)
    with compiling(2, enabled=False):
        sleep(PAUSE)
    assert elapsed(bar) < PAUSE
    with compiling_one(1):
        sleep(PAUSE)
    assert elapsed(bar) < PAUSE
    sleep(PAUSE)
    assert PAUSE <= elapsed(bar) < 2 * PAUSE


def test_the_rate_leaves_the_time_out(bar):
    """Also that of the last steps, by which the time that is left is estimated."""
    for _ in range(4):
        sleep(0.11)  # longer than the time between two updates on the screen
        bar.update()
    before = bar._bar.format_dict["rate"]
    with compiling_one(1):
        sleep(1.0)
    bar.update()
    assert bar._bar.format_dict["rate"] >= before


def fail_inside():
    with compiling(3, enabled=False), compiling_one(1):
        sleep(PAUSE)
        raise ValueError("inside")


def test_nested_and_after_an_error(bar):
    """Time is left out once, and an error starts the clock again."""
    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert 0 <= elapsed(bar) < PAUSE
    sleep(PAUSE)
    assert elapsed(bar) >= PAUSE


def test_a_bar_that_begins_meanwhile():
    with compiling(1, enabled=False):
        sleep(PAUSE)
        bar = Progress(10, enabled=True, delay=0)
    assert 0 <= elapsed(bar) < PAUSE
    bar.close()


def test_what_is_seen(capsys):
    with Progress(10, enabled=True, delay=0, label="work") as bar:
        with compiling_one(7):
            assert "compiling kernel 7, once" in capsys.readouterr().err
        bar._bar.refresh()
        assert "compiling" not in capsys.readouterr().err
        with compiling(20, enabled=True) as kernels:
            sleep(0.6)  # longer than the delay of that bar
            kernels.update(5)
            seen = capsys.readouterr().err
    assert COMPILING in seen
    assert "5/20" in seen


def test_without_a_terminal_nothing_is_seen(capsys):
    with Progress(3), compiling(3) as kernels, compiling_one(1):
        kernels.update()
    assert capsys.readouterr().err == ""
