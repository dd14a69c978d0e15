"""Builds of J and K, or of J alone, on the tracks of a device (`md4.gpu.tracks`), to which pairs of lists are dealt."""

from collections import deque

from md4.gpu.buffers import written_array
from md4.gpu.tracks import TRACK_SECONDS
from md4.plan import EACH


class Dealer:
    """Deals pairs of lists out to tracks, so that all have about the same to do at any time.

    Short ones go to the track that has least. Long ones, which fill a device alone, go to the first track: short ones
    beside them take what they leave of the device.

    Parameters
    ----------
    count : int
        Number of tracks.
    longest : float
        Predicted seconds of a short one, at most.
    """

    def __init__(self, count, longest):
        self.loads, self.longest = [0.0] * count, longest

    def deal(self, pairs):
        """Yields (track, `ListPair`) in the order in which tracks are given them; with one track, as they come."""
        if len(self.loads) == 1:
            yield from ((0, pair) for pair in pairs)
            return
        short, long = deque(), deque()
        for pair in pairs:
            (short if pair.seconds + EACH <= self.longest else long).append(pair)
        while short or long:
            track = self.loads.index(min(self.loads))
            if long and (track == 0 or not short):
                track, pair = 0, long.popleft()
            else:
                pair = short.popleft()
            self.loads[track] += pair.seconds + EACH
            yield track, pair


class DealtTarget:
    """Sums that all tracks of a device add to; see `md4.backends.SumsTarget`.

    A subclass has `add_pair(pair)`, which gives a `ListPair` to the track in use, and `add_up` and `result`. It may
    extend the other methods.

    Parameters
    ----------
    engine : md4.Engine
    survivors : md4.contract.survivors.Survivors
    shapes : list of tuple
        Of the results.

    Attributes
    ----------
    engine, backend, context
        Those of the track in use; `track` is its number.
    computed, wanted : int
        As in `md4.contract.screening.Statistics`, of what was taken so far.
    """

    def __init__(self, engine, survivors, shapes):
        tracks = engine.backend.tracks()  # first, since it waits for those of a build that was interrupted
        self.engines, self.survivors, self.shapes = [engine.with_backend(track) for track in tracks], survivors, shapes
        self.computed = self.wanted = 0
        self.host = None
        self.use(0)

    def use(self, track):
        """What follows is done on the track of a number."""
        self.track, self.engine = track, self.engines[track]
        self.backend = self.engine.backend
        self.context = self.backend.context

    def begin(self, lists, keeps_all):
        """The tracks begin; only one if H matrices are dropped and made again, for which all would have to wait."""
        self.dealer = Dealer(len(self.engines) if keeps_all else 1, TRACK_SECONDS)
        self.context.tracks.begin(len(self.dealer.loads))

    def take(self, pairs, report=None):
        """Gives pairs of lists to the tracks; the work is on its way when it returns."""
        try:
            for track, pair in self.dealer.deal(pairs):
                if track != self.track:
                    self.use(track)
                self.add_pair(pair)
                if report is not None:
                    report(pair.seconds)
        except BaseException:
            self.context.tracks.end()
            raise

    def end(self, lists, fetched=True):
        """Waits for the device; see `md4.backends.SumsTarget`."""
        self.context.tracks.end()
        self.use(0)
        self.finish(lists)
        if fetched:
            self.make_room()  # while the device is at work
        self.backend.mark()()
        return self.computed, self.wanted

    def finish(self, lists):
        """What is done when the tracks have ended."""

    def make_room(self):
        """Makes host memory for the results."""
        self.host = [written_array(shape) for shape in self.shapes]

    def on_host(self, sums):
        """The results on the host, from as many buffers."""
        if self.host is None:
            self.make_room()
        for array, buffer in zip(self.host, sums):
            self.context.copy_out(array, buffer.pointer)
        return self.host
