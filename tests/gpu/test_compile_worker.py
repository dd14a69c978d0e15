"""Compile workers make the same machine code, and nothing of theirs is in the user's process."""

import json
import operator
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from md4.contract.warmup import asked_by_shells
from md4.gpu import compile as dispatch
from md4.gpu.compile import Variant, load_kernel
from md4.gpu.compile_worker import FunctionKey, remembered, shared
from md4.gpu.kernels.bounds import pair_bounds
from md4.gpu.kernels.coulomb_threads import correlation_by_threads
from md4.gpu.kernels.digest_in_place import digest_in_place
from md4.gpu.machine_code import sections
from md4.gpu.warmup import expected_seconds


def run(code, *arguments):
    """What a process of its own prints, from JSON, and what it writes to stderr."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


COMPILE = """
import json, sys
from hashlib import sha256
from md4.gpu import compile_worker, device_code
from md4.gpu.compile import Variant
from md4.gpu.kernels.digest_in_place import digest_in_place
from md4.gpu.kernels.recurrence import r_in_registers
from md4.gpu.kernels.thread_quartet import thread_quartet_integrals
from md4.gpu.machine_code import machine_code, sections
compile_worker.compile_for((9, 0))
if sys.argv[1] == "hastened":
    compile_worker.hasten()
real, made = device_code.make_device, []
def counted(function):
    made.append(real(function))
    return made[-1]
device_code.make_device = counted
found = []
for factory, facts in ((digest_in_place, (0, 1, 0, 1, 0, 1, 0, 1, True, "coulomb", False)),
                       (digest_in_place, (1, 1, 0, 1, 0, 1, 0, 1, True, "coulomb", True)),
                       (thread_quartet_integrals, (0, 1, 0, 1, 0, 1, 0, 1, True, False, "coulomb")),
                       (r_in_registers, (2, "coulomb"))):
    parts = sections(machine_code(Variant(factory, facts).kernel(), (9, 0)))
    texts = [content for name, content in parts.items() if name.startswith((".text", ".nv.constant"))]
    found.append([len(texts), sha256(b"".join(texts)).hexdigest()])
print(json.dumps([found, len(made) - len(set(map(id, made)))]))
"""


def test_the_machine_code_is_the_same():
    """Of kernels of several families, which share device functions."""
    (plain, none), (hastened, several) = (run(COMPILE, how)[0] for how in ("plain", "hastened"))
    assert plain == hastened
    assert len({text for _, text in plain}) == 4
    assert none == 0
    assert several >= 8


USER = """
import gc, json, logging, sys
before = gc.get_threshold(), gc.get_freeze_count()
import md4
from numba.core.types.functions import BaseFunction
from numba.cuda import dispatcher
from md4.contract.warmup import asked_by_shells
from md4.gpu import device_code, warmup
logging.basicConfig(stream=sys.stderr, format="%(message)s")
logging.getLogger("md4").setLevel(logging.DEBUG)
warmup.current_capability = lambda: (9, 0)
warmup.compile_ahead(lambda: list(asked_by_shells(0, True, "coulomb", (9, 0)))[:12])
patched = BaseFunction.get_call_type, dispatcher.get_current_device, device_code.make_device
same = before == (gc.get_threshold(), gc.get_freeze_count())
print(json.dumps([[function.__module__ for function in patched], same]))
"""


class Driver:
    """A driver that loads machine code if it has the kernel."""

    CUresult = dispatch.driver.CUresult

    @staticmethod
    def cuLibraryLoadData(cubin, *_):
        return Driver.CUresult.CUDA_SUCCESS, sections(cubin)

    @staticmethod
    def cuLibraryGetKernel(parts, entry):
        known = ".text." + entry.decode() in parts
        return Driver.CUresult.CUDA_SUCCESS if known else Driver.CUresult.CUDA_ERROR_NOT_FOUND, 42


@pytest.mark.thorough
def test_workers_compile_for_the_user_without_a_device(monkeypatch, tmp_path):
    """What they leave in the cache is what a launcher loads; each kernel is logged, and nothing is patched here."""
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MD4_JOBS", "2")
    (modules, same), told = run(USER)
    assert modules == ["numba.core.types.functions", "numba.cuda.api", "numba.cuda.decorators"]
    assert same
    monkeypatch.setattr(dispatch, "driver", Driver)
    wanted = list(asked_by_shells(0, True, "coulomb", (9, 0)))[:12]
    assert all(load_kernel(variant, (9, 0)).handle == 42 for variant in wanted)
    lines = {line.split()[1]: line for line in told.splitlines() if line.startswith("compiled ")}
    assert set(lines) == {variant.name for variant in wanted}
    assert all(re.fullmatch(r"compiled \S+ in [\d.]+ s, [\d.]+ s of the processor", line) for line in lines.values())


def made_with(number, code="lambda: number"):
    """A function with a constant, as a factory makes it."""
    return eval(f"lambda number: {code}", vars(operator))(number)


@pytest.mark.parametrize("others", [(1, True, 1.0), (0.0, -0.0, False), ((1, 2), (True, 2), (1, 2.0))])
def test_equal_constants_are_not_the_same(others):
    make = shared(lambda function: [function()])
    made = [make(made_with(value)) for value in (*others, *others)]
    assert len({id(one) for one in made}) == 3
    assert all(one is other for one, other in zip(made, made[3:]))
    assert [str(one) for one in made[:3]] == [str([value]) for value in others]


def test_functions_of_other_code_or_other_globals_are_not_the_same():
    """Nor are those that take equal objects, which might change."""
    keys = [FunctionKey(made_with(1)), FunctionKey(made_with(1, "lambda: -number")), FunctionKey(made_with([1]))]
    keys += [FunctionKey(made_with([1])), FunctionKey(eval("lambda number: lambda: number", {})(1))]
    assert len(set(keys)) == 5
    assert FunctionKey(made_with(1)) in keys


def test_call_types_are_remembered():
    """Of each function type by itself, and with what belongs to the signature."""
    asked = []

    class Type:
        def __init__(self):
            self._impl_keys = {}

        def get_call_type(self, context, args, kws):
            asked.append(args)
            self._impl_keys[args] = len(asked)
            return SimpleNamespace(args=args)

        remembered = remembered(get_call_type)

    one, other = Type(), Type()
    first = one.remembered("context", (1,), {})
    one._impl_keys[1,] = "of another call"
    assert one.remembered("context", (1,), {}) is first
    assert one._impl_keys == {(1,): 1}
    places = (one, "context"), (one, "cpu"), (other, "cpu")
    assert len({id(of.remembered(where, (1,), {})) for of, where in places}) == 3
    assert asked == [(1,)] * 3
    one.remembered("context", (1,), {"word": 2})
    assert len(asked) == 4


def test_the_longest_begin_first():
    """They took 3.98, 2.76, 1.39 and 0.15 s."""
    facts = [
        (correlation_by_threads, (6, 5, "coulomb", True, 0, False, 0)),
        (digest_in_place, (4, 1, 1, 1, 1, 1, 0, 1, True, "coulomb", False)),
        (digest_in_place, (3, 1, 0, 1, 3, 1, 0, 1, True, "coulomb", True)),
        (pair_bounds, ()),
    ]
    seconds = [expected_seconds(Variant(*of)) for of in facts]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 4
