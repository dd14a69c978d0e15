"""Variants and the cache of compiled kernels, as far as no GPU is needed; see gpu/test_backend.py for the rest."""

import ctypes
import pickle
import struct
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import pytest
from offline import LENGTHS, used_variants

from md4.errors import DeviceError
from md4.gpu import compile as dispatch
from md4.gpu import device_code
from md4.gpu.buffers import Buffer
from md4.gpu.compile import Graph, Launch, Packing, Variant, load_kernel, numba_type
from md4.gpu.device_code import F64, I32, I64_2D, f64, i64, types
from md4.gpu.kernels.recurrence import r_by_group
from md4.gpu.kernels.scatter import scatter_block
from md4.gpu.warmup import missing
from md4.support import bundle, cache
from md4.support.cache import cache_folder, cached_names, fingerprint


def test_variants_are_known_by_factory_and_facts():
    one, same, other = (Variant(r_by_group, (l, "coulomb")) for l in (4, 4, 5))
    assert one is same is not other
    assert pickle.loads(pickle.dumps(one)) is one
    assert one.name == "r_by_group-4-coulomb"
    assert Variant(scatter_block, ("s8",)).name == "scatter_block-s8"


def test_kernels_state_their_signature():
    kernel = Variant(r_by_group, (4, "coulomb")).kernel()
    assert kernel.function.__code__.co_argcount == len(kernel.types())
    assert set(kernel.options()) <= {"launch_bounds"}


def plain_functions(function):
    """Python functions that device code takes from outside and that nothing has made a device function of."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            value = cell.cell_contents
            inner = getattr(value, "py_func", None)
            found += [value] if isinstance(value, FunctionType) else plain_functions(inner) if inner else []
    return found


def test_types_are_those_of_the_kernel(monkeypatch):
    """They take no device functions, and leave no others behind for those who compile."""
    made, make = [], device_code.make_device
    monkeypatch.setattr(device_code, "make_device", lambda function: made.append(function) or make(function))
    variants = list(used_variants("dmma16", lmax=3, lengths=LENGTHS[-1:]) | used_variants("fma", lmax=1))
    found = [variant.types() for variant in variants]
    assert made == []
    kernels = [variant.kernel() for variant in variants]
    assert found == [kernel.types() for kernel in kernels]
    assert not any(plain_functions(kernel.function) for kernel in kernels)
    assert len(made) > len(variants)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("MD4_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "md4"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parts[-2:] == (".cache", "md4")


def test_cached_names(monkeypatch, tmp_path):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    assert cached_names(".kernel") == []
    folder = tmp_path / fingerprint()
    folder.mkdir()
    for name in ("h_panels-sm_90.kernel", "r-0123.loop"):
        (folder / name).write_bytes(b"")
    assert cached_names(".kernel") == ["h_panels-sm_90"]
    assert cached_names(".loop") == ["r-0123"]


def test_fingerprint_is_the_same_in_another_process():
    code = "from md4.support.cache import fingerprint; print(fingerprint())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint()
    assert len(fingerprint()) == 16


class Driver:
    """A driver that knows one cubin, with one kernel."""

    CUresult, CUkernel, CUfunction = dispatch.driver.CUresult, int, int

    @staticmethod
    def cuLibraryLoadData(code, *_):
        known = code == b"cubin"
        return Driver.CUresult.CUDA_SUCCESS if known else Driver.CUresult.CUDA_ERROR_INVALID_IMAGE, "library"

    @staticmethod
    def cuLibraryGetKernel(library, name):
        known = name == b"entry"
        return Driver.CUresult.CUDA_SUCCESS if known else Driver.CUresult.CUDA_ERROR_NOT_FOUND, 42


class Pairs(NamedTuple):
    places: I64_2D
    count: i64


class Side(NamedTuple):
    numbers: F64
    pairs: Pairs
    flag: types.boolean


def packed(packing, count):
    """What the driver reads in each slot."""
    slots = [ctypes.string_at(packing.pointers[n], 8) for n in range(count)]
    assert len(packing.pointers) == count
    return [struct.unpack("<q", slot)[0] for slot in slots]


def test_arguments_are_packed_as_numba_takes_them():
    """An array is (meminfo, parent, size, itemsize, data, *shape, *strides), a group its members in a row."""
    packing = Packing([numba_type(kind) for kind in (Side, f64, I32)])
    for pointer, size, rows, count, flag, real in ((512, 7, 3, -5, True, 0.3), (1024, 0, 1, 2**40, False, -1e300)):
        numbers, places = Buffer(pointer, (size,), 8, None), Buffer(pointer + 8, (rows, 2), 8, None)
        words = Buffer(pointer + 16, (size + 1,), 4, None)
        packing.write((Side(numbers, Pairs(places, count), flag), real, words))
        assert packed(packing, 26) == [
            0, 0, size, 8, pointer, size, 8,
            0, 0, 2 * rows, 8, pointer + 8, rows, 2, 16, 8,
            count, flag, struct.unpack("<q", struct.pack("<d", real))[0],
            0, 0, size + 1, 4, pointer + 16, size + 1, 4,
        ]  # fmt: skip


@pytest.mark.parametrize("failing", ["cuLaunchKernel", "cuGraphInstantiate", "cuGraphLaunch", None])
def test_a_graph(monkeypatch, failing):
    """It is made of launches with the arguments that they had, and an error leaves no stream that records."""
    packing, launched, names = Packing([F64, i64]), [], []

    def call(name, *results):
        def called(*args):
            names.append(name)
            error = Driver.CUresult.CUDA_ERROR_LAUNCH_FAILED if name == failing else Driver.CUresult.CUDA_SUCCESS
            if name == "cuLaunchKernel":
                launched.append((*args[1:9], packed(packing, 8)[2:]))
            return error, *results

        return called

    results = {"cuStreamBeginCapture": (), "cuStreamEndCapture": ("graph",), "cuGraphInstantiate": ("handle",),
               "cuGraphDestroy": (), "cuGraphExecDestroy": (), "cuGraphLaunch": (), "cuLaunchKernel": ()}  # fmt: skip
    calls = {name: call(name, *found) for name, found in results.items()}
    kept = {name: getattr(dispatch.driver, name) for name in ("CUresult", "CUstreamCaptureMode")}
    kept["cuGetErrorName"] = lambda error: (0, error.name.encode())
    for module in ("md4.gpu.buffers.driver", "md4.gpu.compile.driver"):
        stand_in = SimpleNamespace(**calls, **kept)
        monkeypatch.setattr(module, stand_in)
    launcher = object.__new__(dispatch.Launcher)
    launcher.lock, launcher.packing, launcher.function, launcher.pointers = threading.Lock(), packing, "kernel", 0
    noted = []
    for number in (3, 4):
        packing.write((Buffer(512 * number, (number,), 8, None), -number))
        noted.append(Launch(launcher, 10 + number, 32, 64, packing.memory.raw))
    raised = pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED") if failing else nullcontext()
    with raised:
        Graph(noted, SimpleNamespace(handle=9)).launch(7)
    assert names.count("cuStreamEndCapture") == names.count("cuGraphDestroy") + (failing == "cuLaunchKernel") == 1
    for number, (*launch, slots) in zip((3, 4), launched):
        assert launch == [10 + number, 1, 1, 32, 1, 1, 64, 9]
        assert slots == [number, 8, 512 * number, number, 8, -number]


def test_shared_memory_is_asked_for(monkeypatch):
    """Also for a kernel whose static shared memory is a part of the 48 kB that need not be asked for."""
    asked = []
    names = SimpleNamespace(
        CUkernel=int, CUfunction=int, CUfunction_attribute=dispatch.driver.CUfunction_attribute,
        cuLaunchKernel=lambda *args: (0,), cuKernelSetAttribute=lambda _, size, *args: (asked.append(size), 0)[1:],
    )  # fmt: skip
    monkeypatch.setattr(dispatch, "driver", names)
    monkeypatch.setattr(dispatch, "check", lambda error, doing: None)
    device = SimpleNamespace(device=SimpleNamespace(id=0))
    monkeypatch.setattr(dispatch, "cuda", SimpleNamespace(current_context=lambda: device))
    launcher = dispatch.Launcher(dispatch.Loaded(1, None), [i64])
    for size in (1 << 10, (48 << 10) - 8, 48 << 10, 40 << 10, 100 << 10):
        launcher.launch(1, 32, 0, size, (3,))
    assert asked == [(48 << 10) - 8, 48 << 10, 100 << 10]


@pytest.mark.parametrize(
    ("entry", "cubin", "handle"), [(b"entry", b"cubin", 42), (b"entry", b"other", None), (b"other", b"cubin", None)]
)
def test_kernels_from_disk(monkeypatch, tmp_path, entry, cubin, handle):
    """What the driver does not take is compiled again."""
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "driver", Driver)
    variant = Variant(r_by_group, (4, "coulomb"))
    assert load_kernel(variant, (9, 0)) is None
    dispatch.save_kernel(variant, (9, 0), entry, cubin)
    loaded = load_kernel(variant, (9, 0))
    assert (loaded and loaded.handle) == handle
    assert load_kernel(variant, (8, 0)) is None


def test_machine_code_that_the_driver_refuses(monkeypatch, tmp_path):
    """An error says so, with the name of the kernel; the next process tries again."""
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "driver", Driver)
    monkeypatch.setattr(dispatch, "machine_code", lambda kernel, capability: b"other")
    monkeypatch.setattr(dispatch, "entry_name", lambda cubin: "entry")
    with pytest.raises(DeviceError, match="refuses the machine code of the kernel r_by_group-4-coulomb"):
        dispatch.launcher(Variant(r_by_group, (4, "coulomb")), (9, 0), "no device")


def test_a_kernel_under_another_name_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "driver", Driver)
    one, other = (Variant(r_by_group, (l, "coulomb")) for l in (4, 5))
    dispatch.save_kernel(one, (9, 0), b"entry", b"cubin")
    paths = [dispatch.kernel_entry(this.name, "sm_90")[0] for this in (one, other)]
    paths[0].rename(paths[1])
    assert load_kernel(other, (9, 0)) is None


def test_kernels_hold_no_pickle(monkeypatch, tmp_path):
    """Reading them executes nothing on the host."""
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path))
    variant = Variant(r_by_group, (4, "coulomb"))
    dispatch.save_kernel(variant, (9, 0), b"entry", b"cubin")
    head, facts, entry, cubin = dispatch.kernel_entry(variant.name, "sm_90")[0].read_bytes().split(b"\n")
    assert head.startswith(cache.MAGIC)
    assert (entry, cubin) == (b"entry", b"cubin")
    assert b"r_by_group-4-coulomb" in facts


# md4-kernels ----------------------------------------------------------------------------------------------------------


VARIANTS = [Variant(r_by_group, (l, "coulomb")) for l in (4, 5)]


@pytest.fixture
def packaged(kernels_package, monkeypatch, tmp_path):
    """The file of a package md4-kernels that has `VARIANTS`, which the driver knows; the cache is empty."""
    monkeypatch.setenv("MD4_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "driver", Driver)
    made = dispatch.launcher.made
    before = dict(made)
    made.clear()
    bundle.write(kernels_package / "sm_90.kernels", "sm_90", [(one.name, b"entry\ncubin") for one in VARIANTS])
    yield kernels_package / "sm_90.kernels"
    made.clear()
    made.update(before)


def compiled_names(monkeypatch):
    """Names of the kernels that this process compiles from now on, into what the driver knows."""
    names = []
    monkeypatch.setattr(dispatch, "entry_name", lambda cubin: "entry")
    monkeypatch.setattr(dispatch, "machine_code", lambda kernel, capability: names.append(kernel) or b"cubin")
    return names


def test_kernels_of_the_package_are_not_compiled(packaged, monkeypatch):
    """Neither here nor ahead, and nothing is written to the cache, where the same bytes would be."""
    compiled = compiled_names(monkeypatch)
    assert missing(VARIANTS, (9, 0)) == []
    assert missing(VARIANTS, (8, 0)) == VARIANTS
    for one in VARIANTS:
        assert dispatch.launcher(one, (9, 0), "packaged").loaded.handle == 42
        assert list(dispatch.kept_kernels(one, (9, 0))) == [b"entry\ncubin"]
    assert compiled == []
    assert cached_names(".kernel") == []
    dispatch.save_kernel(VARIANTS[0], (9, 0), b"entry", b"cubin")
    first, second = dispatch.kept_kernels(VARIANTS[0], (9, 0))
    assert first == second


def test_the_cache_comes_first(packaged, monkeypatch):
    dispatch.save_kernel(VARIANTS[0], (9, 0), b"entry", b"other")
    assert list(dispatch.kept_kernels(VARIANTS[0], (9, 0))) == [b"entry\nother", b"entry\ncubin"]
    assert load_kernel(VARIANTS[0], (9, 0)).handle == 42  # the driver refuses what is in the cache


@pytest.mark.parametrize("fault", ["damaged", "cut", "old", "foreign", "refused"])
def test_a_package_of_no_use_costs_time_only(packaged, monkeypatch, caplog, fault):
    """What is compiled is what the driver gets; the log has at most one line, whatever the number of kernels."""
    caplog.set_level("INFO", "md4")
    whole = packaged.read_bytes()
    if fault in ("damaged", "cut"):  # the last bytes are those of both kernels
        packaged.write_bytes(whole[:-30] + bytes(30) if fault == "damaged" else whole[:-3])
    else:
        code = b"entry\nother" if fault == "refused" else b"entry\ncubin"
        with monkeypatch.context() as patches:
            if fault == "old":
                patches.setattr(cache, "IMPORTED", "0" * 64)
            architecture = "sm_80" if fault == "foreign" else "sm_90"
            bundle.write(packaged, architecture, [(one.name, code) for one in VARIANTS])
    compiled = compiled_names(monkeypatch)
    for one in VARIANTS:
        assert dispatch.launcher(one, (9, 0), fault).loaded.handle == 42
    assert len(compiled) == len(VARIANTS)
    assert len(caplog.records) == (fault != "refused")
