"""Tracks: the streams on which one build of J and K, or one gradient, is at work at the same time.

Most kernels of a small molecule have too few blocks to fill a GPU, and each waits for the one before. So the tasks of a
build are dealt out to several tracks. Track 0 is the engine's own stream, and whatever else is done uses it alone, but
for bounds of gradients and norms of tables (`in_turn`).
One thread of the host gives work to all tracks, one call after the other. What tracks share, and why that is safe:

    rooms (r, (ab|q], ...)  each track has its own (`md4.gpu.pool.Pool.room`)
    other memory            A buffer may be given back while kernels of any track still use it, and they were launched
                            before that. So a track that takes memory from the pool during a build comes after all that
                            any track was given so far (`Tracks.follow`). Memory that goes back to the driver is freed
                            by cuMemFree, which waits for the device.
    H, slots, first AOs,    are made by the first task that needs them. What makes them comes after all that other
    densities in FP32 for   tracks were given, and before all that they will be given (`Tracks.alone`). Then they are
    J and K                 only read.
    pair data, densities,   are made before the tracks begin, and only read.
    of Hermite functions
    also in FP32, scales of
    J and orders of pairs
    for J alone, tables of
    screening, bounds of
    gradients
    numbers of ket pairs    of each task and its sums have a place of their own, as has each list or table of norms.
    of gradients; norms     They are read after the tracks have ended, by the host and by the tracks that begin then.
    tables of J of          The host writes them by the stream beside the tracks while these count, and waits for it.
    gradients               That stream comes after all that the engine's was given before (`beside_now`), and no memory
                            is given back in between.
    first quartets and      of each task have a place of their own, which the host writes or reads by the stream beside
    derivatives             the tracks (`DeviceContext.beside`): before the task begins, and once it has ended.
    X, Y, J of Hermite      are set to zero before the tracks begin, and kernels add to them atomically. They are read
    functions, counts       after the tracks have ended.
    constant tables         The host waits until they are written.
    records of launches     hold a stream and rooms, so the track is in their key.

Where tracks were interrupted before they ended, `active` still says so: then the next use of the pool waits for them,
and the next build ends them.
"""

import weakref
from contextlib import contextmanager
from itertools import cycle

from cuda.bindings import driver

from md4.gpu.buffers import check
from md4.gpu.device_code import cuda

MOST_TRACKS = 6
TRACK_SECONDS = 2e-3  # predicted time of a task up to which it may go to any track; longer ones fill the device alone
TRACK_SHARE = 4 << 30  # bytes that must be free for each track but track 0


def number_of_tracks(left):
    """How many tracks there may be where so many bytes may be used."""
    return max(1, min(MOST_TRACKS, 1 + left // TRACK_SHARE))


def urgent_stream():
    """A new stream whose kernels go before those that wait on others, and that no work on stream 0 holds up."""
    cuda.current_context()
    error, _, highest = driver.cuCtxGetStreamPriorityRange()
    check(error, "asking for the priorities of streams")
    return new_stream(highest)


def stream_like(handle):
    """A new stream with the priority of the one with a handle."""
    error, priority = driver.cuStreamGetPriority(handle)
    check(error, "asking for the priority of a stream")
    return new_stream(priority)


def new_stream(priority):
    """A new stream of a priority."""
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
    error, handle = driver.cuStreamCreateWithPriority(flags, priority)
    check(error, "making a stream")
    stream = cuda.external_stream(int(handle))
    weakref.finalize(stream, driver.cuStreamDestroy, handle)
    return stream


@contextmanager
def in_turn(backends):
    """Within it the tracks of some `GpuBackend.tracks` are at work; yields their contexts, again and again."""
    tracks = backends[0].context.tracks
    tracks.begin(len(backends))
    try:
        yield cycle([backend.context for backend in backends])
    finally:
        tracks.end()


class Tracks:
    """The streams of one engine.

    Parameters
    ----------
    stream : numba.cuda.cudadrv.driver.Stream
        The engine's.

    Attributes
    ----------
    active : int
        Number of tracks that are at work; 1 outside of builds and gradients.
    """

    def __init__(self, stream):
        self.streams, self.events, self.active = [stream], [], 1

    def stream(self, track):
        """The stream of a track, made when it is first asked for."""
        while len(self.streams) <= track:
            self.streams.append(urgent_stream())
        return self.streams[track]

    def join(self, first, second):
        """What the track `second` will be given comes after what the track `first` was given."""
        while len(self.events) <= first:
            self.events.append(cuda.event(timing=False))
        event = self.events[first]
        event.record(self.streams[first])
        event.wait(self.streams[second])

    def others(self, track):
        """All tracks at work but one."""
        return [other for other in range(self.active) if other != track]

    def begin(self, count):
        """So many tracks begin to work, after what the engine's stream was given."""
        self.active = count
        for other in self.others(0):
            self.join(0, other)

    def end(self):
        """What the engine's stream will be given comes after what all tracks were given."""
        for other in self.others(0):
            self.join(other, 0)
        self.active = 1

    def follow(self, track):
        """What a track will be given comes after what all others were given."""
        for other in self.others(track):
            self.join(other, track)

    @contextmanager
    def alone(self, track):
        """What a track is given meanwhile comes after what others were given, and before what they will be given."""
        self.follow(track)
        try:
            yield
        finally:
            for other in self.others(track):
                self.join(track, other)

    def mark(self):
        """A function that waits until all tracks have done what they were given so far."""
        marks = []
        for stream in self.streams[: self.active]:
            marks.append(cuda.event(timing=False))
            marks[-1].record(stream)

        def wait():
            for event in marks:
                event.synchronize()

        return wait
