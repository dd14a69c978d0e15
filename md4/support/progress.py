"""A progress bar for work of more than two seconds, shown only on a terminal by default."""

import sys


class Progress:
    """A bar on stderr, drawn only once `delay` seconds have passed.

    Parameters
    ----------
    total : int
        Number of steps.
    enabled : bool, optional
        True shows the bar in any case, False never. The default is to show it if stderr is a terminal.
    delay : float
        Seconds before the bar appears.
    label : str
        Text before the bar.
    unit : str
        Name of one step.
    """

    def __init__(self, total, enabled=None, delay=2.0, label="md4", unit="step"):
        self._bar = None
        if sys.stderr.isatty() if enabled is None else enabled:
            from tqdm import tqdm

            self._bar = tqdm(total=total, delay=delay, desc=label, unit=unit, leave=False, file=sys.stderr)

    def update(self, n=1):
        """Reports that `n` more steps are done."""
        if self._bar is not None:
            self._bar.update(n)

    def close(self):
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
