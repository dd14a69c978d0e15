"""bench/lab/kernels.py adds up the times of kernels."""

import sys

from places import ROOT

from md4.gpu import tracks
from md4.gpu.compile import Variant
from md4.gpu.kernels.digest_in_place import digest_in_place
from md4.gpu.kernels.recurrence import r_by_group
from md4.gpu.recording import Recorder

sys.path.insert(0, str(ROOT / "bench" / "lab"))
from kernels import by_family, one_by_one


def test_families():
    """Of digestion in place there are two; the longest comes first."""
    shells = (1, 1, 0, 1, 1, 1, 0, 1, True, "coulomb")
    times = {Variant(r_by_group, (l, "coulomb")): (2, 1.5) for l in (19, 20)}
    times |= {Variant(digest_in_place, (*shells, single)): (1, ms) for single, ms in ((True, 4.0), (False, 2.5))}
    found = by_family(times)
    assert list(found.items()) == [
        ("digest_in_place FP32", (1, 4.0)), ("r_by_group", (4, 3.0)), ("digest_in_place FP64", (1, 2.5)),
    ]  # fmt: skip


def test_one_by_one():
    """On one stream and without records, and afterwards as before."""
    repeat, most = Recorder.repeat, tracks.MOST_TRACKS
    with one_by_one():
        assert tracks.number_of_tracks(1 << 50) == 1
        assert not Recorder.repeat(None, (), None, None)
    assert (Recorder.repeat, tracks.MOST_TRACKS) == (repeat, most)
    assert tracks.number_of_tracks(1 << 50) == most > 1
