"""bench/lab/sanitize.py without a GPU: what it reads in a sanitizer's output; its families reach every kernel."""

import ctypes
import json
import sys
from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from places import ROOT

from md4.gpu import backend as gpu
from md4.gpu import buffers, forces, h_layout, pool, quartet_lists, sums, tracks
from md4.gpu import context as device
from md4.gpu import hermite_coulomb as device_coulomb
from md4.gpu import shell_pairs as device_pairs
from md4.gpu import targets as device_tensor
from md4.gpu.pool import Pool
from md4.method.scatter import DERIVATIVES, EVERY_SYMMETRY
from md4.shells.shell_pairs import shell_pairs

sys.path.insert(0, str(ROOT / "bench" / "lab"))
import families
import sanitize

REPORT = sanitize.REPORT + json.dumps({"wrong": [], "launches": {"h_matrices": 3}})

# Printed as NVIDIA's manual shows it, with names as Numba gives them.
KERNEL = "_ZN22fused_transforms_1_4_5B2v1B38c8tJTIeFIjxB2IKSgI4CrvQClQZ6FczSBAA_3dE5ArrayIdLi1E1C7mutable7alignedE"
INITCHECK = f"""\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 8 bytes
=========     at {KERNEL}+0x1a70
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= Uninitialized __global__ memory read of size 8 bytes
=========     at {KERNEL}+0x1b00
=========     by thread (4,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000f0
=========
{REPORT}
========= ERROR SUMMARY: 257 errors
========= ERROR SUMMARY: 157 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACECHECK = f"""\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at digest_rows_7_3_True_True+0x90 in digest.py:41
=========     and Read access at digest_rows_7_3_True_True+0x100 in digest.py:51 [508 hazards]
=========
========= Warning: (Warp Level Programming) Potential RAW hazard detected at __shared__ 0x8c in block (0,0,0) :
=========     Write Thread (35,0,0) at h_matrices+0x90
=========     Read Thread (32,0,0) at h_matrices+0x120
=========     Current Value : 35
=========
{REPORT}
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 8 bytes
=========     at scatter_block_s8+0x100
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7cc43aa00001 is out of bounds
=========     and is inside the nearest allocation at 0x7cc43aa00000 of size 4 bytes
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""
SYNCCHECK = f"""\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at elsewhere+0x11f0 in test.cu:42
=========     by thread (32,0,0) in block (0,0,0)
{REPORT}
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(
    ("text", "count", "findings"),
    [
        (f"{REPORT}\n========= ERROR SUMMARY: 0 errors\n", 0, {}),
        (f"{REPORT}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, {}),
        (INITCHECK, 257, {"Uninitialized __global__ memory read of size 8 bytes: fused_transforms_1_4_5": 2}),
        (
            RACECHECK,
            2,
            {
                "Error: Race reported between Write access: digest_rows_7_3_True_True": 1,
                "Warning: (Warp Level Programming) Potential RAW hazard detected: h_matrices": 1,
            },
        ),
        (MEMCHECK, None, {"Invalid __global__ write of size 8 bytes: scatter_block_s8": 1}),
        (SYNCCHECK, 1, {"Barrier error detected. Divergent thread(s) in block.: elsewhere": 1}),
        (
            "========= RACECHECK SUMMARY: 100 hazards displayed (4528176 errors, 661824 warnings)\n" + REPORT,
            5190000,
            {},
        ),
        (f"{REPORT}\nended by signal 9", None, {}),
    ],
    ids=["clean", "no race", "initcheck", "racecheck", "memcheck", "synccheck", "limited", "killed"],
)
def test_what_a_tool_says(text, count, findings):
    out = sanitize.parsed(text)
    assert out.count == count
    assert out.findings == Counter(findings)
    assert out.clean == (count == 0)
    assert out.launches == ({"h_matrices": 3} if REPORT in text else {})


def test_wrong_results_are_not_clean():
    text = sanitize.REPORT + json.dumps({"wrong": ["Wrong: dddd"], "launches": {}})
    out = sanitize.parsed(text, sanitized=False)
    assert (out.count, out.wrong, out.clean) == (0, ["Wrong: dddd"], False)
    assert sanitize.details({(None, "fused"): out}) == ["plain, fused:", "    Wrong: dddd"]


def test_the_table():
    found = {("memcheck", "low"): sanitize.Outcome(0, seconds=3.2), ("racecheck", "low"): sanitize.Outcome(seconds=300)}
    assert sanitize.table(found, ["memcheck", "racecheck"], ["low"]) == [
        "family  memcheck   racecheck",
        "low     clean 3 s  failed 300 s",
    ]


def test_options_that_a_version_does_not_know():
    assert sanitize.known(["--demangle", "simple", "--port", "1"], "  --demangle arg") == ["--demangle", "simple"]


STUB = """#!/bin/sh
[ "$1" = --help ] && { echo "  --tool arg  --port arg"; exit; }
[ "$1" = --tool ] || exit 3
shift 2; [ "$1" = --port ] && shift 2
echo "========= COMPUTE-SANITIZER"; "$@"; echo "========= ERROR SUMMARY: $ERRORS errors"
"""


@pytest.mark.parametrize(
    ("errors", "kernels", "status"), [(0, {"a", "b"}, 0), (2, {"a", "b"}, 1), (0, {"a", "b", "c"}, 1)]
)
def test_the_parent(monkeypatch, tmp_path, capsys, errors, kernels, status):
    """With a sanitizer that finds as much as it is told to, and a family that says what it is told to say."""
    stub, child = tmp_path / "compute-sanitizer", tmp_path / "work.py"
    stub.write_text(STUB)
    stub.chmod(0o755)
    child.write_text(
        "import sys; print(sys.argv)\nprint(%r)" % (sanitize.REPORT + '{"wrong": [], "launches": {"a-1": 2, "b": 1}}')
    )
    monkeypatch.setenv("ERRORS", str(errors))
    monkeypatch.setattr(sanitize, "__file__", str(child))
    monkeypatch.setattr(sanitize, "factories", lambda: kernels)
    monkeypatch.setattr(sanitize, "FAMILIES", {"low": []})
    args = SimpleNamespace(
        families=["low"],
        tools=["memcheck", "synccheck"],
        jobs=2,
        timeout=60,
        out=tmp_path,
        locks=str(tmp_path),
        sanitizer=str(stub),
    )
    assert sanitize.check(args) == status
    told = capsys.readouterr().out
    assert ("kernels that no family launched: c" in told) == ("c" in kernels)
    assert "2 runs of 1 families under 2 tools, 2 kernel variants" in told
    assert told.count("2 found") == (4 if errors else 0)


def test_a_process_that_hangs_is_ended(tmp_path):
    text = sanitize.run_process(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], tmp_path / "log", 2
    )
    assert sanitize.parsed(text).count is None
    assert "ended by signal 9" in text


# the families ---------------------------------------------------------------------------------------------------------


class Memory:
    """Device memory on the host."""

    def __init__(self, size):
        self.size, self.array = size, np.zeros(size // 8)
        self.device_pointer_value = self.array.ctypes.data

    _mem = property(lambda self: self)

    def free(self):
        """What `md4.gpu.pool.lifetime` asks of Numba's."""


class Context:
    """What pools ask of Numba's."""

    deallocations, memalloc = set(), Memory

    def get_memory_info(self):
        return 1 << 40, 1 << 40


class Result:
    """What `Pool.array` gives."""

    def __init__(self, shape):
        self.shape, self.memory = shape, np.zeros(shape)
        self.__cuda_array_interface__ = {"data": (self.memory.ctypes.data, False), "shape": shape}

    def copy_to_host(self, out=None, stream=None):
        return self.memory

    def reshape(self, shape):
        return Result(shape)


def counts(maker, task, pairs):
    """As `PairMaker.count`, by the host."""
    basis = next(b for b, arrays in maker.bases.items() if arrays.arrays is task[1])
    return np.diff(shell_pairs(basis, pairs, np.exp(task[2])).start)


def every_ket(made, *given, count=forces.DeviceForces.count):
    """As `DeviceForces.count`, if nothing is left out."""
    (counts, _), batch = count(made, *given), given[2]
    for pairs, prims, *_ in counts:
        for n, number in enumerate(batch):
            pairs[n], prims[n] = len(made.lists[number]), made.lists[number].pairs.nprim
    return counts, np.zeros(2)


@pytest.fixture
def no_device(monkeypatch):
    """A GPU backend that launches nothing, on host memory; of compute capability 9.0."""
    stream = SimpleNamespace(handle=0, synchronize=lambda: None)
    stand_ins = {
        "cuda": SimpleNamespace(current_context=Context), "require_gpu": lambda: None, "as_stream": lambda _: stream,
        "current_capability": lambda: (9, 0), "current_block_shared": lambda: 227 << 10, "current_device": lambda: 0,
        "urgent_stream": lambda: stream,
        "copy_to_device": lambda pointer, array, stream: ctypes.memmove(pointer, array.ctypes.data, array.nbytes),
        "clear": lambda buffer, stream: ctypes.memset(buffer.pointer, 0, buffer.size * buffer.itemsize),
        "copy_to_host": lambda array, pointer, stream: ctypes.memmove(array.ctypes.data, pointer, array.nbytes),
    }  # fmt: skip
    modules = [
        buffers, device, device_pairs, device_coulomb, device_tensor, families, gpu, pool, quartet_lists, sums, tracks,
    ]  # fmt: skip
    for module in modules:
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(Pool, "array", lambda pool, shape, dtype=None: Result(shape))
    monkeypatch.setattr(device_pairs.PairMaker, "count", counts)
    monkeypatch.setattr(sums.DeviceBounds, "result", lambda bounds: np.ones(bounds.values.shape))
    monkeypatch.setattr(forces.DeviceForces, "count", every_ket)
    monkeypatch.setattr(gpu.GpuBackend, "compile_ahead", lambda *_, **__: None)
    monkeypatch.setattr(gpu.GpuBackend, "mark", lambda backend: lambda: None)
    monkeypatch.setattr(tracks.Tracks, "join", lambda *_: None)
    monkeypatch.setattr(device.DeviceContext, "beside_now", lambda context: context.beside)
    monkeypatch.setattr(families, "reference", lambda work: None)
    for name in ("launch", "table"):
        monkeypatch.setattr(device.DeviceContext, name, lambda *_: None)


def test_every_buffer_is_new(no_device, monkeypatch):
    made = []
    monkeypatch.setattr(Context, "memalloc", lambda context, size: made.append(size) or Memory(size))
    monkeypatch.setattr(Pool, "get", Pool.get)  # put back afterwards
    for again, allocations in ((lambda: None, 1), (sanitize.new_buffers, 3)):
        again()
        pool = Pool()
        made.clear()
        for _ in range(3):
            pool.release(pool.get(100))
        assert len(made) == allocations


def test_families_reach_everything(no_device, monkeypatch):
    """Every kernel, every form of H, every operator, both kinds of tiles, all units, several blocks of rows."""
    forms, compared, hermite = set(), [], gpu.GpuBackend.hermite
    monkeypatch.setattr(families, "compare", lambda ours, right, what, *_: compared.append(what))

    def watched(backend, prepared, form):
        forms.add(form)
        return hermite(backend, prepared, form)

    monkeypatch.setattr(gpu.GpuBackend, "hermite", watched)
    with families.counted_launches() as found:
        wrong = {name: families.run(name) for name in families.FAMILIES}
    assert not any(wrong.values()), wrong
    assert len(compared) >= sum(map(len, families.FAMILIES.values()))
    facts = {name: [v.facts for v in found if v.factory.__name__ == name] for name in families.factories()}
    assert all(facts.values()), [name for name, variants in facts.items() if not variants]
    assert forms == {form for form in vars(h_layout).values() if isinstance(form, h_layout.HForm)}
    for name in ("r_in_registers", "r_by_axis", "r_by_group", "summed_r"):
        assert {f[1] for f in facts[name]} == set(families.OPERATORS), name
    # whole, and without elements that are zero
    assert {f[2:] for f in facts["r_by_axis"]} == {(), (True,)}
    assert {f[10] for f in facts["thread_quartet_integrals"]} == set(families.OPERATORS)
    for name, place in (
        ("bra_transform", 4),
        ("ket_transform", 4),
        ("whole_panel", 6),
        ("one_product", 4),
    ):
        assert {f[place] for f in facts[name]} == {"dmma16", "dmma8"}, name
    assert {f[7] for f in facts["fused_transforms"]} == {"dmma16", "dmma8"}
    groups = {(f[6], f[8]) for f in facts["fused_transforms"]}
    assert groups == {*product((False, True), (0, 1, 2)), (False, 4), (True, 3)}
    assert any(f[10:] for f in facts["fused_transforms"])
    assert {f[5] for f in facts["fused_wide"]} == {1, 2}
    assert {f[8:] for f in facts["fused_wide"]} == {(), (False, True)}
    assert {f[9] for f in facts["thread_quartet_integrals"] if f[12:13] == (True,)} == {False, True}
    assert {f[5:] for f in facts["bra_transform"]} == {(turned, n) for turned in (False, True) for n in (1, 2)}
    assert {f[5] for f in facts["ket_transform"]} == {False, True}
    assert {f[7:] for f in facts["whole_panel"]} == set(product((False, True), repeat=2))
    assert {f[9] for f in facts["thread_quartet_integrals"]} == {False, True}
    assert {f[0] for f in facts["scatter_block"]} == {*EVERY_SYMMETRY, DERIVATIVES}
    assert {f[1:] for f in facts["h_matrices"]} == {(), (True,), (False, True)}
    assert {f[-1] for f in facts["reverse_fused"]} == {"dmma16", "tf32"}
    assert {f[-2] for f in facts["digest_in_place"]} == {"coulomb", "erf", "erfc"}
    assert {f[-2:] for f in facts["digest_rows"]} == {(True, True), (True, False), (False, True)}
