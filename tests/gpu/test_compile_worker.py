"""Compile workers make the same machine code, and nothing of theirs is in the user's process."""

import gc
import json
import subprocess
import sys
from functools import partial

import offline
import pytest

from md4.gpu import device_code
from md4.gpu.compile import Variant
from md4.gpu.compile_worker import FunctionKey, remembered, shared
from md4.gpu.kernels.bounds import pair_bounds
from md4.gpu.kernels.digest_in_place import digest_in_place
from md4.gpu.kernels.recurrence import r_by_group


def run(code, *arguments):
    """What a process of its own prints, as JSON."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


COMPILE = """
import json, sys
from hashlib import sha256
from md4.gpu import compile_worker, device_code
from md4.gpu.compile import Variant
from md4.gpu.kernels.digest_in_place import digest_in_place
from md4.gpu.kernels.digest_quartets import digest_quartets
from md4.gpu.kernels.recurrence import r_in_registers
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
                       (digest_quartets, (1, 1, 1, 1, True, True)), (digest_quartets, (1, 1, 1, 1, True, False)),
                       (r_in_registers, (1, "coulomb")), (r_in_registers, (2, "coulomb"))):
    parts = sections(machine_code(Variant(factory, facts).kernel(), (9, 0)))
    texts = [content for name, content in parts.items() if name.startswith((".text", ".nv.constant"))]
    found.append([len(texts), sha256(b"".join(texts)).hexdigest()])
print(json.dumps([found, len(made) - len(set(map(id, made)))]))
"""


def test_the_machine_code_is_the_same():
    """Of kernels of several families, each twice, so that they share device functions."""
    (plain, none), (hastened, several) = (run(COMPILE, how) for how in ("plain", "hastened"))
    assert plain == hastened
    assert len({text for _, text in plain}) == 6
    assert none == 0
    assert several >= 20
