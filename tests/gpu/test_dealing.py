"""Pairs of lists are dealt out to tracks: each to one, all of which have about as much to do at any time."""

from hypothesis import given
from hypothesis import strategies as st

from md4.gpu.dealing import Dealer
from md4.plan import EACH, ListPair


def pairs_of(times):
    """`ListPair` of so many seconds, `EACH` included."""
    return [ListPair(None, None, False, number=n, seconds=seconds - EACH) for n, seconds in enumerate(times)]


@given(times=st.lists(st.floats(EACH, 10), max_size=60), count=st.integers(1, 6), longest=st.floats(0, 10))
def test_pairs_are_dealt_out(times, count, longest):
    """Each to one track, long ones to the first; at any time no track has more than its last one too much."""
    pairs = pairs_of(sorted(times, reverse=True))
    dealt = list(Dealer(count, longest).deal(pairs))
    assert sorted(pair.number for _, pair in dealt) == list(range(len(pairs)))
    assert count > 1 or dealt == [(0, pair) for pair in pairs]
    assert all(track == 0 for track, pair in dealt if pair.seconds + EACH > longest)
    loads, short = [0.0] * count, sum(pair.seconds + EACH <= longest for pair in pairs)
    for track, pair in dealt:
        if short and count > 1:
            assert loads[track] == min(loads)
        short -= pair.seconds + EACH <= longest
        loads[track] += pair.seconds + EACH


def test_pairs_come_one_by_one():
    """What a track already has counts."""
    dealer = Dealer(3, 1.0)
    one = pairs_of([0.5, 0.25, 0.125, 0.125, 5.0, 0.12])
    assert [track for pair in one for track, _ in dealer.deal([pair])] == [0, 1, 2, 2, 0, 1]
