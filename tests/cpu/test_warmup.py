"""Compiling ahead: what is missing, shared by two processes, and nothing left for the first calls."""

import subprocess

import pytest
from faults import files, run

from md4.cpu import warmup
from md4.method.operators import OPERATORS
from md4.method.scatter import EVERY_SYMMETRY


def test_names():
    """Each use has its loops, and every loop is known by one name."""
    assert warmup.names_for("blocks", "erf") == ["h", "fill erf", "copy"]
    beside = ["transpose", "blocks", "norms", "count"]
    assert warmup.names_for("j", "erf") == ["h", "fill erf", "contract erf", *beside]
    assert warmup.names_for((1, 2), "erf") == ["h", "fill erf", "digest", *beside]
    assert warmup.names_for("tensor", "erf") == warmup.names_for("lists", "erf") == ["h", "fill erf"]
    beside = ["h", "fill coulomb", "bounds coulomb"]
    assert warmup.names_for("forces", "erf") == [*beside, "reverse erf", "forces"]
    assert warmup.names_for("fitting", "erf") == [*beside, "fitted erf", "forces"]
    assert warmup.names_for("matrices", "coulomb") == [*beside, "matrices"]
    assert "reverse mixture" not in warmup.every_name()
    names = warmup.every_name(OPERATORS)
    assert "reverse mixture" in names
    assert len(names) == len(set(names)) == 8 + len(EVERY_SYMMETRY) + 4 * len(OPERATORS) + len(warmup.BESIDE)
    loops = {id(warmup.arguments(name)[0]) for name in names}
    assert len(loops) == len(names)


@pytest.mark.parametrize("kinds", [("coulomb",), OPERATORS])
def test_shares(kinds):
    """Each loop is compiled by one of the two processes, which take about equally long."""
    names = warmup.every_name(kinds)
    here, there = warmup.shared(names)
    assert sorted(here + there) == sorted(names)
    here, there = (sum(warmup.COSTS[name.partition(" ")[0]] for name in these) for these in (here, there))
    assert abs(here - there - warmup.START) <= max(warmup.COSTS.values())
    assert warmup.shared(["copy"]) == (["copy"], [])


class Loops:
    """Stands for all loops; notes what is compiled here and what another process shall compile."""

    def __init__(self, monkeypatch, command):
        self.here, self.there, self.kept = [], [], set()
        monkeypatch.setattr(warmup, "ready", set())
        monkeypatch.setattr(warmup, "arguments", lambda name: (self, name))
        monkeypatch.setattr(warmup, "can_keep", lambda: True)
        monkeypatch.setattr(warmup, "command", lambda code: self.there.append(code) or command)

    def is_kept(self, name):
        return name in self.kept

    def compile(self, name):
        self.here.append(name)


@pytest.mark.parametrize("command", [["echo"], ["false"], ["/no/such/program"]])
def test_the_second_process_may_fail(command, monkeypatch):
    """What it does not compile is left to the first use."""
    monkeypatch.setenv("MD4_JOBS", "2")
    loops, names = Loops(monkeypatch, command), warmup.every_name()
    assert warmup.compile_ahead(names) == len(names)
    here, there = warmup.shared(names)
    assert loops.here == here
    assert [f"serve({there!r})" in code for code in loops.there] == [True]
    assert warmup.compile_ahead(names) == 0
    assert loops.here == here


@pytest.mark.parametrize("why", ["jobs", "cache", "interpreter"])
def test_one_process_does_it_all(why, monkeypatch):
    """Where another one is not allowed, or could not hand anything over."""
    monkeypatch.setenv("MD4_JOBS", "1" if why == "jobs" else "2")
    loops, names = Loops(monkeypatch, ["echo"]), warmup.every_name()
    if why != "jobs":
        monkeypatch.setattr(warmup, {"cache": "can_keep", "interpreter": "can_start"}[why], lambda: False)
    warmup.compile_ahead(names)
    assert sorted(loops.here) == sorted(names)
    assert not loops.there


def test_only_what_is_missing(monkeypatch):
    monkeypatch.setenv("MD4_JOBS", "1")
    loops = Loops(monkeypatch, ["echo"])
    loops.kept = {"h", "fill coulomb"}
    assert warmup.compile_ahead([*warmup.names_for("tensor", "coulomb"), warmup.scatter_name("s8")]) == 1
    assert loops.here == ["scatter s8"]
    assert warmup.compile_ahead(warmup.names_for("blocks", "coulomb")) == 1
    assert loops.here[-1] == "copy"


def test_an_error_ends_the_second_process(monkeypatch):
    monkeypatch.setenv("MD4_JOBS", "2")
    loops, started, popen = Loops(monkeypatch, ["sleep", "600"]), [], subprocess.Popen

    def fail(name):
        raise KeyboardInterrupt

    loops.compile = fail

    def noted_popen(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(warmup.subprocess, "Popen", noted_popen)
    with pytest.raises(KeyboardInterrupt):
        warmup.compile_ahead(warmup.every_name())
    assert [process.poll() is not None for process in started] == [True]


FIRST_CALLS = """
    from md4.contract.derivatives import DerivativeRequest
    from md4.contract.tensor import locked_tensor
    from md4.contract.density_fitting import DensityFitting
    from md4.contract.fitting_gradient import FittingGradient
    from md4.cpu import warmup

    asked, second_process = [], warmup.second_process
    warmup.second_process = lambda names: asked.extend(names) or second_process(names)
    missing, total = warmup.warmup(spec["kinds"], progress=False)
    before = len(compilations.buffer)
    results = [job()]
    general = np.random.default_rng(0).normal(size=(3, len(dm), len(dm)))
    jk = md4.JK(basis, backend="cpu")
    for densities, hermi in ((dm, 1), (general, 0), (general + 1j, 0), (general - general.transpose(0, 2, 1), 2)):
        for options in ({}, {"with_j": False}, {"with_k": False}):
            jk.get_jk(densities, hermi, **options)
    jk.update(dm)
    symmetric = general[0] + general[0].T
    for options in ({}, {"exchange": 0.0}, {"long_range": (0.4, 0.5)}):
        jk.gradient(symmetric, **options)
        jk.gradient([symmetric, symmetric], **options)
    jk.product_gradient(general, general)
    jk.derivative_jk(general)
    fitting = DensityFitting(basis, basis, md4.Operator(), "cpu", store="direct")
    FittingGradient(fitting).run([symmetric, symmetric], 1.0, 1.0)
    engine = md4.Engine(basis, backend="cpu")
    engine.compute([[0, 0]], [[1, 0], [3, 2]])
    ao_tensor(engine, "s4")
    locked_tensor(engine, DerivativeRequest.of_name(basis, "int2e_ip1", "s1", None))
    ao_tensor(engine, "s1", shls_slice=(0, 2, 0, 2, 1, 3, 0, 4))
    ao_tensor(engine, "s1", out=np.empty((8,) * 4))
    report(results, missing=missing, total=total, later=len(compilations.buffer) - before,
           again=warmup.warmup(spec["kinds"])[0], asked=asked)
"""


@pytest.mark.thorough
def test_the_first_calls_find_everything(tmp_path):
    """The types of the examples are those of calls, and what another process has compiled is found.

    A process that only reads finds all symbols of Numba's runtime that the code refers to.
    """
    kinds = "coulomb", "erf"
    names = warmup.every_name(kinds)
    told = run(tmp_path / "cache", FIRST_CALLS, env={"MD4_JOBS": "2"}, kinds=kinds).right()
    kept = [path for path in files(tmp_path / "cache") if path.suffix == ".loop"]
    assert told["missing"] == told["total"] == len(names) == len(kept)
    assert told["asked"] == warmup.shared(names)[1]
    assert told["later"] == told["again"] == 0
    read = run(tmp_path / "cache", FIRST_CALLS, env={"MD4_JOBS": "2"}, kinds=kinds).right()
    assert (read["compiled"], read["missing"]) == (0, 0)


# What a first tensor, and J and K besides, compile: the functions of md4 that each loop consists of, each for one
# signature, and none of Numba's own. A literal as an argument, `min`, a slice or an array that is made would add some.
FUNCTIONS = {
    "h": "add_products angular_row axis_of_derivative derive e_coefficients h_loop store_row",
    "fill coulomb": "add_signs add_up_lanes block_of_quartets cube_places cube_side fill_coulomb lane_products "
    "products quartet_count set_places",
    "scatter s8": "is_repeated numbers_of place_s8 scatter_lanes_s8 triangle",
    "digest": "digest_lanes digest_one gather quartet_weight scatter",
    "contract coulomb": "contract_coulomb cube_places cube_side lane_row quartet_count row",
}
COMPILE = """
    from md4.cpu import warmup

    warmup.compile_one(spec["loop"])
    begun = [e.data["dispatcher"].py_func.__name__ for _, e in compilations.buffer if e.is_start]
    report([], functions=sorted(begun))
"""


@pytest.mark.sample("scatter s8")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_are_compiled(name, tmp_path):
    """The time of a first call is that of its functions."""
    told = run(tmp_path / "cache", COMPILE, loop=name).report
    assert " ".join(told["functions"]) == FUNCTIONS[name]
