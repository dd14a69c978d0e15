"""The ranks of a communicator: what they agree on, share and sum, and that none waits in vain."""

import pytest
from mpi_jobs import EACH_A_NODE, MARKS, TWO_NODES, run

pytestmark = MARKS


@pytest.mark.sample("2")
@pytest.mark.parametrize("size", [2, 3])
def test_numbers_of_a_counter_are_disjoint_and_complete(tmp_path, size):
    """Two threads a rank, and two counters after each other. A later counter begins at 0."""
    reports = run(tmp_path, size, """
        ranks, found = Ranks(comm), []

        def take(counter, mine):
            mine.extend(iter(counter.next, STOPPED))

        for last in (500, 50):
            mine = [[], []]
            with ranks.counter(workers=2) as counter:
                threads = [threading.Thread(target=take, args=(counter, numbers)) for numbers in mine]
                for thread in threads:
                    thread.start()
                numbers = [counter.next() for _ in range(last)]
                ranks.gather(None)  # all have taken theirs
                counter.stop()
                for thread in threads:
                    thread.join()
                assert counter.next() == STOPPED
            found.append(sorted(sum(ranks.gather(sum(mine, numbers)), [])))
        report([len(found[0]), all(numbers == list(range(len(numbers))) for numbers in found)])
        """).reports  # fmt: skip
    for count, complete in reports:
        assert count >= 500 * size
        assert complete


@pytest.mark.thorough
@pytest.mark.parametrize("nodes", [{}, EACH_A_NODE], ids=["one node", "each a node"])
def test_the_counter_answers_while_its_rank_is_elsewhere(tmp_path, nodes):
    """Rank 0, which has the counter, sleeps outside MPI until the others have their numbers."""
    reports = run(tmp_path, 3, """
        ranks = Ranks(comm)
        with ranks.counter() as counter:
            if comm.rank == 0:
                while len(list(folder.glob("*.numbers"))) < comm.size - 1:
                    time.sleep(0.01)
            numbers = [counter.next() for _ in range(20)]
            (folder / f"{comm.rank}.numbers").touch()
        report(numbers)
        """, env=nodes).reports  # fmt: skip
    assert sorted(number for report in reports for number in report) == list(range(60))
    assert sorted(reports[0]) == list(range(40, 60))


@pytest.mark.thorough
def test_the_same_facts(tmp_path):
    first, second, third = run(tmp_path, 3, """
        ranks = Ranks(comm)
        ranks.same({"molecule": "water", "omega": 0.3})
        different = {"molecule": "water", "omega": 0.3 if comm.rank == 1 else 0.4}
        missing = {"molecule": "water"} | ({"sources": "abc"} if comm.rank == 2 else {})
        messages = [caught(ranks.same, different), caught(ranks.same, missing)]
        report([messages, ranks.gather(comm.rank)])
        """).reports  # fmt: skip
    assert first == second == third
    (different, missing), gathered = first
    assert different.startswith("ArgumentError: omega differs")
    assert "ranks 0, 2: 0.4; rank 1: 0.3" in different
    assert "ranks 0, 1: not known; rank 2: 'abc'" in missing
    assert gathered == [0, 1, 2]


@pytest.mark.thorough
def test_a_failure_of_one_rank_is_one_of_all(tmp_path):
    first, second, third = run(tmp_path, 3, """
        ranks = Ranks(comm)

        class Odd(Exception):
            "Cannot be pickled."
            def __init__(self, one, two):
                self.lock = threading.Lock()

        def work(error, *failing):
            if comm.rank in failing:
                raise error
            return comm.rank

        messages = [
            caught(ranks.together, lambda: work(md4.MemoryLimitError("too much"), 1)),
            caught(ranks.together, lambda: work(ValueError("bad"), 1, 2)),
            caught(ranks.together, lambda: work(ValueError("bad"), 0, 1, 2)),
            caught(ranks.together, lambda: work(Odd(1, 2), 0)),
            caught(lambda: ranks.together(lambda: ranks.node_rank) + ranks.together(lambda: work(OSError("gone"), 2))),
        ]
        report([messages, ranks.together(lambda: work(None))])
        """).reports  # fmt: skip
    memory = "rank 1: MemoryLimitError: too much"
    assert [messages[0] for messages, _ in (first, second, third)] == [
        f"RankError: {memory}", memory.partition(": ")[2], f"RankError: {memory}",
    ]  # fmt: skip
    assert first[0][1] == "RankError: rank 1: ValueError: bad (rank 2 failed as well)"
    assert second[0][1] == third[0][1] == "ValueError: bad"
    assert first[0][2] == second[0][2] == third[0][2] == "ValueError: bad"
    assert first[0][3].startswith("Odd: ")
    assert second[0][3] == third[0][3] == f"RankError: rank 0: {first[0][3]}"
    assert first[0][4] == second[0][4] == "RankError: rank 2: OSError: gone"
    assert [result for _, result in (first, second, third)] == [0, 1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["inside", "around", "counter"])
def test_a_failure_while_others_count(tmp_path, place):
    """The rank that fails stops the counter, so the others end."""
    reports = run(tmp_path, 3, f"""
        ranks, place = Ranks(comm), {place!r}

        def work(counter):
            try:
                if comm.rank == 0:
                    raise ValueError("bad")
                while counter.next() < STOPPED:
                    time.sleep(1e-4)
            except ValueError:
                counter.stop()
                raise

        def build():
            with ranks.counter() as counter:
                return ranks.together(lambda: work(counter)) if place == "inside" else work(counter)

        report([caught(lambda: ranks.together(build) if place == "around" else build()), ranks.gather(comm.rank)])
        """).reports  # fmt: skip
    assert reports == [["ValueError: bad", [0, 1, 2]]] + 2 * [["RankError: rank 0: ValueError: bad", [0, 1, 2]]]


@pytest.mark.thorough
def test_a_failure_anywhere_in_nested_work(tmp_path):
    """Rank 1 fails at different places of a work that calls all methods. The others raise its message, wherever."""
    reports = run(tmp_path, 3, """
        ranks = Ranks(comm)

        def step(n):
            if comm.rank == 1 and n == where:
                raise OSError(f"disk {n} is full")

        def inner():
            step(1)
            ranks.gather(0)
            step(2)
            ranks.together(lambda: step(3))
            step(4)

        def work():
            step(0)
            ranks.together(inner)
            with ranks.counter() as counter:
                step(5)
                counter.next()
            ranks.once_a_node(lambda: step(6))
            ranks.broadcast(np.zeros(3))
            step(7)
            return "done"

        messages = []
        for where in range(8):
            messages.append(caught(ranks.together, work))
            assert ranks.gather(comm.rank) == [0, 1, 2] and ranks.together(lambda: 5) == 5
        report(messages)
        """).reports  # fmt: skip
    assert reports[1] == [f"OSError: disk {where} is full" for where in range(8)]
    assert reports[0] == reports[2] == [f"RankError: rank 1: {message}" for message in reports[1]]


@pytest.mark.thorough
def test_an_end_that_comes_early(tmp_path):
    """A rank that leaves its work while others go on is an error on all."""
    reports = run(tmp_path, 2, """
        ranks = Ranks(comm)

        def work():
            for _ in range(3 - comm.rank):
                ranks.together(lambda: None)

        report([caught(ranks.together, work, "loop"), ranks.first(lambda: comm.rank)])
        """).reports  # fmt: skip
    assert reports[0] == reports[1]
    assert "rank 0: end of a step (level 2); rank 1: loop (level 1)" in reports[0][0]
    assert reports[0][1] == 0


@pytest.mark.thorough
def test_the_first_for_all(tmp_path):
    reports = run(tmp_path, 3, """
        ranks, called = Ranks(comm), []

        def work():
            called.append(comm.rank)
            return {"rank": comm.rank, "array": np.full((500, 700), 1.5)}

        def bad():
            raise OSError("disk full")

        found = ranks.first(work)
        assert found["array"].shape == (500, 700) and (found["array"] == 1.5).all()
        report([called, found["rank"], caught(ranks.first, bad)])
        """).reports  # fmt: skip
    message = "OSError: disk full"
    assert reports == [[[0], 0, message], *2 * [[[], 0, f"RankError: rank 0: {message}"]]]


@pytest.mark.thorough
def test_different_calls(tmp_path):
    reports = run(tmp_path, 2, """
        ranks, zeros = Ranks(comm), np.zeros((3, 2))
        one = comm.rank == 1
        report([
            caught(ranks.gather if one else ranks.same, {}),
            caught(ranks.sum if one else ranks.broadcast, [zeros] if one else zeros),
            caught(ranks.broadcast, zeros[:2] if one else zeros),
            caught(ranks.sum, [zeros.astype(int) if one else zeros]),
            caught(ranks.sum, [zeros, zeros] if one else [zeros]),
            caught(ranks.together, lambda: None),
        ])
        """).reports  # fmt: skip
    assert reports[0] == reports[1]
    *messages, last = reports[0]
    assert last is None
    assert all(message.startswith("ArgumentError: the call differs between the ranks") for message in messages)
    assert "rank 0: comparison; rank 1: gather" in messages[0]
    assert "(3, 2) and type float64; rank 1: broadcast of an array of shape (2, 2)" in messages[2]
    assert "type float64; rank 1: sum of arrays of shape (3, 2) and type int64" in messages[3]


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_arrays(tmp_path, size):
    """Of several types and orders in memory, in messages of 240 bytes: ten elements, and the rest."""
    reports = run(tmp_path, size, """
        import md4.contract.ranks as module
        module.MESSAGE_BYTES = 240
        ranks, results = Ranks(comm), []

        def made(rank, kind):
            rng = np.random.default_rng(rank)
            x = rng.normal(size=(7, 11)) * 10.0 ** rng.integers(-9, 9, size=(7, 11))
            return {
                "real": x, "complex": x + 1j * x[::-1], "columns": np.asfortranarray(x), "part": x[1::2, ::-3],
                "integers": x.astype(np.int64), "none": x[:0], "few": x[:1, :1],
            }[kind]

        kinds = ["real", "complex", "columns", "part", "integers", "none", "few"]
        for kind in kinds:
            mine = made(comm.rank, kind)
            taken = ranks.broadcast(mine)
            assert taken.dtype == mine.dtype and (taken == made(0, kind)).all()
            assert (mine == made(comm.rank, kind)).all()
        mine = [made(comm.rank, kind) for kind in kinds]
        ranks.sum(mine)
        for ours, kind in zip(mine, kinds):
            terms = [made(rank, kind) for rank in range(comm.size)]
            assert ours.dtype == terms[0].dtype
            assert (abs(ours - sum(terms)) <= 1e-15 * sum(map(abs, terms))).all()
        report([ours.tobytes().hex() for ours in mine])
        """).reports  # fmt: skip
    assert all(report == reports[0] for report in reports)


@pytest.mark.slow
def test_arrays_of_more_than_31_bits(tmp_path):
    reports = run(tmp_path, 2, """
        ranks, count = Ranks(comm), 2**28 + 12345
        array = ranks.broadcast(np.arange(count, dtype=float) if comm.rank == 0 else np.zeros(count))
        assert array.nbytes > 2**31 and array[-1] == count - 1
        ranks.sum([array])
        report([bool((array == 2 * np.arange(count, dtype=float)).all())])
        """, seconds=600).reports  # fmt: skip
    assert reports == [[True], [True]]


@pytest.mark.thorough
@pytest.mark.parametrize("nodes, firsts", [({}, [0]), (TWO_NODES, [0, 1]), (EACH_A_NODE, [0, 1, 2])], ids=str)
def test_once_a_node(tmp_path, nodes, firsts):
    """The first rank of each node is done before the others begin, which is right also if MPI has no such nodes."""
    reports = run(tmp_path, 3, """
        ranks = Ranks(comm)

        def work():
            begun = time.monotonic()
            time.sleep(0.05)
            return begun, time.monotonic()

        def bad():
            if comm.rank == 0:
                raise OSError("disk full")

        report([ranks.node_rank, ranks.once_a_node(work), caught(ranks.once_a_node, bad)])
        """, env=nodes).reports  # fmt: skip
    made = [rank for rank, (node_rank, *_) in enumerate(reports) if node_rank == 0]
    assert made in (firsts, [0])
    ended = max(times[1] for node_rank, times, _ in reports if node_rank == 0)
    assert all(times[0] >= ended for node_rank, times, _ in reports if node_rank != 0)
    assert [text for *_, text in reports] == ["OSError: disk full"] + 2 * ["RankError: rank 0: OSError: disk full"]


@pytest.mark.thorough
def test_communicators(tmp_path):
    """Messages of md4 do not meet the caller's; communicators are shared, and freed with the caller's."""
    reports = run(tmp_path, 2, """
        ranks = Ranks(comm)
        other = 1 - comm.rank
        request = comm.irecv(source=other)
        ranks.gather("md4's")
        comm.send("mine", other)
        assert request.wait() == "mine"
        inner = comm.Dup()
        assert Ranks(comm)._channel is ranks._channel
        assert Ranks(inner)._channel is not ranks._channel
        inner.Free()
        for _ in range(2500):  # more than MPICH has
            copy = comm.Dup()
            Ranks(copy).gather(None)
            copy.Free()
        half = comm.Split(color=comm.rank)
        intercomm = half.Create_intercomm(0, comm, other)
        for bad in ("world", 1, MPI, MPI.Comm, MPI.COMM_NULL, intercomm):
            assert "ArgumentError: comm must be" in caught(Ranks, bad), bad
        report([repr(ranks), repr(Ranks(half)), Ranks(half).gather(comm.rank)])
        """).reports  # fmt: skip
    assert reports == [
        [f"Ranks({rank} of 2, {rank} of 2 on this node)", "Ranks(0 of 1, 0 of 1 on this node)", [rank]]
        for rank in range(2)
    ]


def test_threads_that_mpi_does_not_allow(tmp_path):
    reports = run(tmp_path, 2, """
        ranks = Ranks(comm)

        def count(workers):
            with ranks.counter(workers) as counter:
                assert counter.next() < 2

        report([caught(count, 1), caught(count, 2), caught(count, 1 + comm.rank)])
        """, threads="funneled").reports  # fmt: skip
    message = "ArgumentError: 2 devices of one process need an MPI that was started for several threads"
    assert [first for first, *_ in reports] == [None, None]
    assert all(both.startswith(message) for _, both, _ in reports)
    assert reports[0][2].startswith("RankError: rank 1: " + message)
    assert reports[1][2].startswith(message)


def test_an_error_of_one_rank_that_was_caused_by_one_of_all(tmp_path):
    """As a caller's who gives up on one rank only; the others hear of it, also if it ends its program."""
    first, second = run(tmp_path, 2, """
    ranks, jk = Ranks(comm), md4.JK(md4.Basis.from_arrays([0], [[1.0]], [[1.0]], [[0, 0, 0]]), backend="cpu", comm=comm)

    def work(make):
        def given_up():
            try:
                jk.get_jk(np.zeros((2, 2)))
            except md4.MD4Error as error:
                if comm.rank == 0:
                    raise make() from error
        return given_up

    messages = [caught(ranks.together, work(lambda: RuntimeError("given up")))]
    try:
        ranks.together(work(lambda: SystemExit(0)))
    except (SystemExit, md4.MD4Error) as error:
        messages.append(f"{type(error).__name__}: {error}")
    report([*messages, jk.get_jk(np.eye(1))[0].item() > 0])
    """).reports  # fmt: skip
    assert first == ["RuntimeError: given up", "SystemExit: 0", True]
    assert second == ["RankError: rank 0: RuntimeError: given up", "RankError: rank 0: SystemExit: 0", True]


def test_threads_that_begin_with_other_communicators(tmp_path):
    """Each has one of its own, and rank 1 uses them in another order."""
    run(tmp_path, 2, """
    basis, own = md4.Basis.from_arrays([0], [[1.0]], [[1.0]], [[0, 0, 0]]), [comm.Dup(), comm.Dup()]
    found = {}

    def work(n):
        time.sleep(0.5 * (n if comm.rank == 0 else 1 - n))
        found[n] = md4.JK(basis, backend="cpu", comm=own[n]).get_jk(np.eye(1))[0].item()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] > 0
    """, seconds=60).check()  # fmt: skip
