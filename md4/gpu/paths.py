"""Ways to compute a class on the GPU."""


from md4.gpu.h_layout import BRA_ELEMENTS, KET_ELEMENTS
from md4.gpu.kernels import thread_quartet as low
from md4.gpu.predicted_times import Side, ranked
from md4.plan import Plan


def plans(unit, bra, ket):
    """All plans that two lists can be computed by, the one that is taken first; `bench/variants.py` times them."""
    if low.serves(unit, bra, ket):
        yield Plan(low.swapped(bra, ket), "low", BRA_ELEMENTS, KET_ELEMENTS)
    yield from ranked(unit, Side.of(bra), Side.of(ket))
