"""One process without others; tests of several ranks are in tests/mpi."""

import inspect
import subprocess
import sys
import threading

import numpy as np
import pytest

from md4.contract.ranks import STOPPED, Alone, Ranks, ranks_text
from md4.errors import ArgumentError


def test_alone_has_what_ranks_have():
    def methods(cls):
        return {name: inspect.signature(f) for name, f in vars(cls).items() if callable(f) and not name.startswith("_")}

    assert methods(Alone) == methods(Ranks)
    assert (Alone().rank, Alone().size, Alone().node_rank, Alone().node_size) == (0, 1, 0, 1)


def test_alone():
    alone, array = Alone(), np.arange(6.0)
    alone.same({"molecule": "water"})
    assert alone.together(lambda: 3) == alone.once_a_node(lambda: 3) == 3
    with pytest.raises(KeyError):
        alone.together(lambda: {}["nothing"])
    assert alone.broadcast(array) is array
    alone.sum([array])
    assert (array == np.arange(6.0)).all()
    assert alone.gather("x") == ["x"]
    assert repr(alone) == "Alone()"


def test_counter_of_threads():
    found = []
    with Alone().counter(workers=4) as counter:

        def take():
            found.extend(counter.next() for _ in range(1000))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(4000))
        counter.stop()
        assert counter.next() == STOPPED
    with Alone().counter() as counter:
        assert counter.next() == 0


@pytest.mark.parametrize("comm", ["world", 2, object()], ids=["str", "int", "object"])
def test_no_communicator(comm):
    with pytest.raises(ArgumentError, match="must be a communicator of mpi4py"):
        Ranks(comm)


def test_nothing_starts_mpi():
    """Neither the import of md4 nor an argument that is no communicator."""
    script = (
        "import sys, md4\nfrom md4.contract.ranks import Ranks\n"
        "try: Ranks('world')\nexcept md4.ArgumentError: pass\n"
        "print([name for name in sys.modules if name.startswith('mpi4py')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_of_ranks():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 2]) == "ranks 1, 2"
    assert ranks_text(list(range(512))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (512)"
