"""Launches of J and K, recorded and launched again.

A build of a small molecule launches thousands of short kernels, and Python takes longer to find the arguments of a
kernel than the device takes to run it. The next build launches nearly all of them again with the same arguments: only
the contents of D, X and Y are others. So the launches of a rectangle of quartets are kept as a CUDA graph, which the
host launches in the time of a single kernel.

A record holds no device memory, only addresses. It is used only if all of them stand for the same as before:

    D, X, Y               their address is in the key, like the operator and the numbers of matrices
    limits of ket pairs   their address is in the key; the numbers are those of each build
    the stream            a graph has none; the number of the track, whose rooms it uses, is in the key
    pair data             are made once and live as long as the list, whose number is in the key
    H                     are asked for again, in the same forms, and must be at the same addresses
    r, (ab|q], the block  are rooms of the pool, which must be at the same addresses and large enough
    constant tables       live as long as the process, like kernels

A rectangle in which other memory was asked for, or something was copied to the device, is not recorded: that was done
once for all, or would be missing in the record.
"""

from collections import deque
from typing import NamedTuple

from md4.gpu.buffers import transfers
from md4.gpu.compile import Graph
from md4.gpu.tracks import stream_like

# Launches that are kept. A build of more of them is long enough to hide what the host does.
MOST_LAUNCHES = 20_000
# Builds for which a rectangle that does not occur any more is kept: builds of two operators may alternate.
KEPT_BUILDS = 2


class Recording(NamedTuple):
    """What is being recorded.

    Attributes
    ----------
    key : tuple
        Of the rectangle.
    launches : deque of md4.gpu.compile.Launch
        One more than may be kept at most, since an exception may leave a recording without an end.
    work : tuple
        `Recorder.other_work` when it began.
    """

    key: tuple
    launches: deque
    work: tuple


class Record:
    """What a rectangle launches.

    Attributes
    ----------
    build : int
        The last build that used it.
    forms : list of tuple
        The forms of H, as in `h_places`.
    h : list of int
        Addresses of H.
    rooms : list of tuple
        (name, address, bytes) of the pool's rooms.
    graph : md4.gpu.compile.Graph
        Its launches.
    """

    __slots__ = ("build", "forms", "graph", "h", "rooms")

    def __init__(self, build, forms, h, rooms, graph):
        self.build, self.forms, self.h, self.rooms, self.graph = build, forms, h, rooms, graph


def h_places(forms, bra, ket):
    """Addresses of the H of two lists that a rectangle uses.

    Parameters
    ----------
    forms : list of tuple
        (None, form of bra, form of ket); of parts of the lists (axis, parity) instead of None.
    bra, ket : md4.engine.PreparedPairs
        Slices of the lists.
    """
    places = []
    for mirror, *of_both in forms:
        sides = (bra, ket) if mirror is None else (side.whole.part(*mirror) for side in (bra, ket))
        places += [side.h(form).array.pointer for side, form in zip(sides, of_both)]
    return places


class Recorder:
    """The records of one device context, whose lock the thread that calls holds.

    A rectangle is recorded when it occurs in a second build: where the rectangles of each build are others, as those of
    a large molecule in an SCF, recording them would be in vain.

    Parameters
    ----------
    pool : md4.gpu.pool.Pool
        That of the context.

    Attributes
    ----------
    launches : deque or None
        Where `md4.gpu.context.DeviceContext.launch` notes launches.
    count : int
        Number of the launches that are kept.
    """

    def __init__(self, pool):
        self.pool, self.build, self.count = pool, 0, 0
        # Records of rectangles, and the last build in which a rectangle without one occurred, by their keys.
        self.records, self.seen = {}, {}
        self.recording = self.launches = None
        # On which launches are taken down, by the handles of the tracks' streams.
        self.streams = {}

    def next_build(self):
        """Begins a build, and forgets what did not occur in the last ones."""
        self.stop()
        self.build += 1
        oldest = self.build - KEPT_BUILDS
        self.records = {key: record for key, record in self.records.items() if record.build >= oldest}
        self.seen = {key: build for key, build in self.seen.items() if build >= oldest}
        self.count = sum(record.graph.count for record in self.records.values())

    @property
    def other_work(self):
        """What changes if memory is asked for, or something else is done than launches."""
        return self.pool.requests, transfers.count

    def stop(self):
        """Ends a recording; what was noted is forgotten."""
        self.recording = self.launches = self.pool.noted = None

    def repeat(self, key, bra, ket, stream):
        """Launches what is recorded of a rectangle; if it returns False, its launches are to follow, and then `end`.

        Parameters
        ----------
        key : tuple
            All that the launches depend on, but for the addresses of H and of rooms.
        bra, ket : md4.engine.PreparedPairs
            Slices of lists.
        stream : int
            The handle of the stream of its track.
        """
        self.stop()
        record = self.records.get(key)
        if record is None:
            if key not in self.seen:
                if len(self.seen) < MOST_LAUNCHES:
                    self.seen[key] = self.build
                return False
        elif (loans := self.loans(record, bra, ket)) is not None:
            record.build = self.build
            record.graph.launch(stream)
            del loans  # in use up to here
            return True
        self.begin(key)
        return False

    def loans(self, record, bra, ket):
        """The rooms that a record uses, if these and H are where they were; else None."""
        if h_places(record.forms, bra, ket) != record.h:
            return None
        return self.pool.rooms_at(record.rooms)

    def begin(self, key):
        """Begins to record, if there is room for more."""
        dropped = self.records.pop(key, None)
        if dropped is not None:
            self.count -= dropped.graph.count
        self.seen[key] = self.build
        if self.count < MOST_LAUNCHES:
            self.pool.noted = {}
            self.recording = Recording(key, deque(maxlen=MOST_LAUNCHES + 1), self.other_work)
            self.launches = self.recording.launches

    def end(self, key, bra, ket, forms, stream):
        """Keeps the launches since `repeat`, if that can be; `forms` are those of H, as in `h_places`."""
        recording, noted = self.recording, self.pool.noted
        self.stop()
        if recording is None or recording.key != key or self.count + len(recording.launches) > MOST_LAUNCHES:
            return
        h, rooms = h_places(forms, bra, ket), self.pool.room_places(noted)
        if rooms is None or self.other_work != recording.work:
            return
        if stream not in self.streams:
            self.streams[stream] = stream_like(stream)
        self.records[key] = Record(self.build, forms, h, rooms, Graph(recording.launches, self.streams[stream]))
        self.count += len(recording.launches)
        self.seen.pop(key, None)
