"""Interrupts at any line of a module, one after the other."""

import sys


def interrupted(work, file, number):
    """Interrupts `work()` at a line of a file, whose number counts from 0; returns whether there is such a line."""
    left = [number]

    def lines(frame, event, arg):
        if event == "line":
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
        return lines

    def calls(frame, event, arg):
        return lines if frame.f_code.co_filename == file else None

    before = sys.gettrace()
    try:
        sys.settrace(calls)
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left[0] < 0
