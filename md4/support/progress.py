"""Progress bars for work of more than two seconds, shown only on a terminal by default, and kernels that they wait for.

Kernels are compiled once, so the time for them says nothing about the rest of the work. While they are compiled, the
clocks of all bars stand still, and a bar of their own or a note says what is going on, from the first moment.

A bar counts predicted work, and says how much time is left when enough of it is done to tell.
"""

import sys
from contextlib import contextmanager
from time import time

from md4.support.locks import Lock

COMPILING = "md4 compiles, once"
# The time that is left is shown from this share of the work, this number of seconds, and this number of steps on.
SHARE, SECONDS, STEPS = 0.05, 2.0, 10
WORK, COUNTED = "{percentage:3.0f}%", "{n_fmt}/{total_fmt} {unit}s"


class Clocks:
    """The bars that are shown, and the time since which their clocks stand still.

    Attributes
    ----------
    bars : list of tqdm.tqdm
    count : int
        How often they have been stopped and not let go.
    since : float
        The time of the first of these stops.
    """

    def __init__(self):
        self.bars, self.lock = [], Lock()
        self.count, self.since = 0, 0.0

    @contextmanager
    def stopped(self, note):
        """Within it the clocks stand still, and `note` is shown behind the bars."""
        with self.lock:
            self.count += 1
            if self.count == 1:
                self.since = time()
            self.show(note)
        try:
            yield
        finally:
            self.go()

    def go(self):
        """Lets the clocks go on, unless others have stopped them, too."""
        with self.lock:
            self.count -= 1
            if self.count:
                return
            lost = time() - self.since
            for bar in self.bars:
                begin = min(lost, time() - bar.start_t)  # of a bar that was made meanwhile
                bar.start_t += begin
                bar.last_print_t += begin
            self.show("")

    def show(self, note):
        """Writes a note behind each bar, or removes it."""
        for bar in self.bars:
            bar.set_postfix_str(note, refresh=bool(note))


clocks = Clocks()


def is_terminal(stream):
    """Whether a stream is a terminal; none is none, nor one that is closed or can do no more than write."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


class Progress:
    """A bar on stderr, drawn only once `delay` seconds have passed.

    Parameters
    ----------
    total : int or float
        Number of steps; without `unit` all of the work, in any unit.
    enabled : bool, optional
        True shows the bar in any case, False never. The default is to show it if stderr is a terminal.
    delay : float
        Seconds before the bar appears.
    label : str
        Text before the bar.
    unit : str, optional
        Name of one step, if steps are counted.
    """

    def __init__(self, total, enabled=None, delay=2.0, label="md4", unit=None):
        self._bar, self._steps, self._begin, self._lock = None, STEPS if unit else 0, None, Lock()
        if is_terminal(sys.stderr) if enabled is None else enabled and sys.stderr is not None:
            from tqdm import tqdm

            self._format = "{desc}: " + (COUNTED if unit else WORK) + "|{bar}| {elapsed}%s{postfix}"
            options = {"unit": unit or "", "bar_format": self._format.replace("%s", ""), "leave": False}
            self._bar = tqdm(total=total, delay=delay, desc=label, file=sys.stderr, miniters=0, **options)
            with clocks.lock:
                clocks.bars.append(self._bar)

    @property
    def report(self):
        """`update`, or None where nobody sees the bar, so that there is no need to find out what is done."""
        return None if self._bar is None else self.update

    def update(self, n=1):
        """Reports that `n` more steps, or so much more work, are done; what is beyond the total does not count.

        Threads may call it at the same time.
        """
        bar = self._bar
        if bar is None:
            return
        with self._lock:
            done = min(bar.n + n, bar.total)
            bar.bar_format = self._format.replace("%s", self._left(done, time() - bar.start_t))
            bar.update(done - bar.n)

    def remaining(self, n, note=""):
        """Reports that `n` steps are left, whoever has done the others, and shows a note behind the bar."""
        if self._bar is not None:
            if (steps := self._bar.total - self._bar.n - n) > 0:  # else its rate would begin here
                self.update(steps)
            self._bar.set_postfix_str(note)

    def _left(self, done, elapsed):
        """The time that is left, as text, by the rate since the first update: what came before was set-up."""
        if self._begin is None:
            self._begin = done, elapsed
        steps, seconds = done - self._begin[0], elapsed - self._begin[1]
        if steps <= 0 or done < max(self._steps, SHARE * self._bar.total) or seconds < SECONDS:
            return ""
        return f", about {self._bar.format_interval(seconds * (self._bar.total - done) / steps)} left"

    def close(self):
        """Removes the bar."""
        if self._bar is not None:
            with clocks.lock:
                clocks.bars = [bar for bar in clocks.bars if bar is not self._bar]
            self._bar.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@contextmanager
def compiling(total, enabled=None, unit="kernel"):
    """A bar for code that is compiled ahead, while the clocks of bars around it stand still.

    Parameters
    ----------
    total : int
        Number of kernels, or of functions.
    enabled, unit
        As for `Progress`.

    Yields
    ------
    Progress
        Its `update` is called after each of them.
    """
    with clocks.stopped(""), Progress(total, enabled, delay=0, label=COMPILING, unit=unit) as bar:
        yield bar


def compiling_one(number):
    """As `compiling`, for a kernel that is found missing while the work goes on: bars show a note meanwhile.

    `number` counts the kernels that this process has compiled.
    """
    return clocks.stopped(f"compiling kernel {number}, once")
