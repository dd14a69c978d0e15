"""What only a GPU can show: streams, memory, the kernel cache, other array libraries, and work beyond one chunk."""

import os
import subprocess
import sys

import numpy as np
import pytest
from molecules import CENTRES, WATER, Quartet, host, molecule, relative_error, tensor_error

import md4
from md4.contract.tensor import ao_tensor
from md4.errors import ArgumentError, DeviceError, MemoryLimitError
from md4.gpu.context import cuda
from md4.method.operators import OPERATORS, Operator
from md4.shells.basis import Basis

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
BRA, KET = [[0, 1]], [[2, 3]]


@pytest.fixture(scope="module")
def water():
    return molecule(WATER, "cc-pvtz")


@pytest.fixture(scope="module")
def expected(water):
    return water.intor("int2e", aosym="s8")


def triples(l, seed=0, count=8):
    """A basis of `count` shells, and all its pairs."""
    rng = np.random.default_rng(seed)
    basis = Basis.from_arrays(
        [l] * count, rng.uniform(0.4, 3, (count, 2)), rng.uniform(0.2, 1, (count, 2)), rng.uniform(-1, 1, (count, 3))
    )
    return basis, np.stack(np.meshgrid(range(count), range(count)), axis=-1).reshape(-1, 2)


def test_runs_are_identical(water):
    first = md4.int2e(water, "s8", backend="cuda")
    for _ in range(3):
        np.testing.assert_array_equal(md4.int2e(water, "s8", backend="cuda"), first)
    basis, pairs = triples(3)
    engine = md4.Engine(basis, backend="cuda")
    blocks = [host(engine.compute(pairs, pairs)) for _ in range(3)]
    np.testing.assert_array_equal(blocks[0], blocks[1])
    np.testing.assert_array_equal(blocks[0], blocks[2])


def test_two_streams_at_once():
    """Two engines with different operators and classes, their work interleaved, nothing waited for."""
    parts = [(triples(l, seed=l), operator) for l, operator in ((2, "coulomb"), (4, ("erf", 0.3)))]
    engines = [md4.Engine(basis, operator=op, backend="cuda") for (basis, _), op in parts]
    assert engines[0].backend.context.stream.handle != engines[1].backend.context.stream.handle
    results = [[e.compute(pairs, pairs) for e, ((_, pairs), _) in zip(engines, parts)] for _ in range(3)]
    for e in engines:
        e.backend.context.stream.synchronize()
    for n, ((basis, pairs), op) in enumerate(parts):
        alone = host(md4.Engine(basis, operator=op, backend="cuda").compute(pairs, pairs))
        right = md4.Engine(basis, operator=op, backend="cpu").compute(pairs, pairs[:4])
        assert relative_error(alone[:, :4], right) < 1e-12
        for result in results:
            np.testing.assert_array_equal(host(result[n]), alone)


@pytest.mark.parametrize("kind", ["numba", "handle", "cupy", "torch", "default"])
def test_streams_of_all_libraries(water, expected, kind):
    if kind == "cupy":
        stream = pytest.importorskip("cupy").cuda.Stream(non_blocking=True)
    elif kind == "torch":
        stream = pytest.importorskip("torch").cuda.Stream()
    else:
        own = cuda.stream()
        stream = {"numba": own, "handle": int(own.handle), "default": 0}[kind]
    ours = md4.int2e(water, "s8", backend="cuda", stream=stream)
    assert tensor_error(ours, expected) <= 1


def test_wrong_stream(water):
    with pytest.raises(ArgumentError, match="stream must be an integer handle or a Numba, CuPy or PyTorch stream"):
        md4.int2e(water, backend="cuda", stream="fast")


# other array libraries ------------------------------------------------------------------------------------------------


@pytest.fixture
def block():
    """A device array of `Engine.compute`, ready, and the same on the host."""
    engine = md4.Engine(Basis.from_mol(Quartet((3, 1, 2, 2)).mol()), backend="cuda")
    array = engine.compute(BRA, KET)
    engine.backend.context.stream.synchronize()
    return array, array.copy_to_host()


def pointer(array):
    return array.__cuda_array_interface__["data"][0]


def test_cupy_takes_results_uncopied(block):
    cupy = pytest.importorskip("cupy")
    for taken in (cupy.asarray(block[0]), cupy.from_dlpack(block[0])):
        assert taken.data.ptr == pointer(block[0])
        np.testing.assert_array_equal(taken.get(), block[1])


def test_torch_takes_results_uncopied(block):
    torch = pytest.importorskip("torch")
    for taken in (torch.as_tensor(block[0], device="cuda"), torch.from_dlpack(block[0])):
        assert taken.data_ptr() == pointer(block[0])
        np.testing.assert_array_equal(taken.cpu().numpy(), block[1])


def test_dlpack_keeps_the_memory():
    """A tensor taken over outlives the array it came from, whatever the pool does next."""
    torch = pytest.importorskip("torch")
    engine = md4.Engine(Basis.from_mol(Quartet((3, 1, 2, 2)).mol()), backend="cuda")
    array = engine.compute(BRA, KET)
    right = host(array)
    taken = torch.from_dlpack(array)
    del array
    cuda.current_context().deallocations.clear()
    later = [engine.compute(BRA, KET) for _ in range(3)]
    later.append(md4.Engine(Basis.from_mol(Quartet((3, 1, 2, 2), seed=9).mol()), backend="cuda").compute(BRA, KET))
    cuda.synchronize()
    np.testing.assert_array_equal(taken.cpu().numpy(), right)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_consumers_come_after_the_integrals(library):
    """Nobody waits for the engine's stream; the consumer's stream does."""
    taken_by = pytest.importorskip(library)
    engine = md4.Engine(Basis.from_mol(Quartet((3, 1, 2, 2)).mol()), backend="cuda")
    right = host(engine.compute(BRA, KET))
    for _ in range(20):
        total = taken_by.from_dlpack(engine.compute(BRA, KET)) + 0.0
        np.testing.assert_array_equal(total.get() if library == "cupy" else total.cpu().numpy(), right)


def test_tensor_stays_on_the_device(water, expected):
    cupy = pytest.importorskip("cupy")
    tensor = md4.int2e(water, "s8", backend="cuda", device=True)
    assert hasattr(tensor, "__cuda_array_interface__")
    cuda.synchronize()
    taken = cupy.from_dlpack(tensor)
    assert taken.data.ptr == pointer(tensor)
    assert tensor_error(taken.get(), expected) <= 1


@pytest.mark.parametrize("library", ["numba", "cupy", "torch"])
def test_out_of_all_libraries(water, library):
    """`out` is written in place, by compute and by int2e."""
    shape, right = (1, 1, 7, 3, 5, 5), None
    if library == "numba":
        make, read = lambda s: cuda.device_array(s, np.float64), lambda a: a.copy_to_host()
    elif library == "cupy":
        cupy = pytest.importorskip("cupy")
        make, read = cupy.empty, lambda a: a.get()
    else:
        torch = pytest.importorskip("torch")
        make = lambda s: torch.empty(s, dtype=torch.float64, device="cuda")  # noqa: E731
        read = lambda a: a.cpu().numpy()  # noqa: E731
    basis = Basis.from_mol(Quartet((3, 1, 2, 2)).mol())
    engine, out = md4.Engine(basis, backend="cuda"), make(shape)
    engine.compute(BRA, KET, out=out)
    engine.backend.context.stream.synchronize()
    right = md4.Engine(basis, backend="cpu").compute(BRA, KET)
    assert relative_error(read(out), right) < 1e-13
    n = water.nao
    whole = make((n * (n + 1) // 2,) * 2)
    md4.int2e(water, "s4", backend="cuda", device=True, out=whole)
    cuda.synchronize()
    np.testing.assert_allclose(read(whole), water.intor("int2e", aosym="s4"), rtol=0, atol=1e-12)


def test_wrong_out():
    engine = md4.Engine(Basis.from_mol(Quartet((3, 1, 2, 2)).mol()), backend="cuda")
    with pytest.raises(ArgumentError, match="out must be a device array"):
        engine.compute(BRA, KET, out=np.empty((1, 1, 7, 3, 5, 5)))
    for shape, dtype in (((1, 1, 7, 3, 5, 4), np.float64), ((1, 1, 7, 3, 5, 5), np.float32)):
        with pytest.raises(ArgumentError, match="out must be a C-contiguous float64 device array of shape"):
            engine.compute(BRA, KET, out=cuda.device_array(shape, dtype))


def test_no_gpu(water, monkeypatch):
    monkeypatch.setattr("md4.gpu.context.gpu_available", lambda: False)
    with pytest.raises(DeviceError, match="needs an NVIDIA GPU"):
        md4.int2e(water, backend="cuda")
    with pytest.raises(DeviceError, match="GPU"):
        md4.int2e(water, device=True)


# memory ---------------------------------------------------------------------------------------------------------------


class Meter:
    """Watches the device's free memory after every allocation of a pool."""

    def __init__(self, monkeypatch):
        if "PYTEST_XDIST_WORKER" in os.environ:
            pytest.skip("measures the device's free memory: run without -n")
        cuda.synchronize()
        cuda.current_context().deallocations.clear()
        self.before = self.least = self.free()
        allocate = md4.gpu.pool.Pool._allocate

        def watched(pool, size):
            raw = allocate(pool, size)
            self.least = min(self.least, self.free())
            self.held = max(getattr(self, "held", 0), pool.held)
            return raw

        monkeypatch.setattr(md4.gpu.pool.Pool, "_allocate", watched)

    @staticmethod
    def free():
        return cuda.current_context().get_memory_info()[0]

    @property
    def peak(self):
        return (self.before - self.least) / 1e6


# The driver hands memory out by 2 MiB.
GRAIN = 2 * 2**20 / 1e6


@pytest.mark.parametrize("max_memory", [100, 200, 1000])
def test_max_memory_of_a_tensor(monkeypatch, water, expected, max_memory):
    """23 MB of result; the cap holds for what the pool says and for what the driver does, and the result is right."""
    md4.int2e(water, "s8", backend="cuda")  # loads all kernels, whose code takes memory, too
    meter = Meter(monkeypatch)
    tensor = md4.int2e(water, "s8", backend="cuda", device=True, max_memory=max_memory)
    cuda.synchronize()
    assert 0 < meter.held <= max_memory * 1e6
    assert meter.peak <= max_memory + 8 * GRAIN
    assert tensor_error(host(tensor), expected) <= 1


@pytest.mark.parametrize("max_memory", [60, 300])
def test_max_memory_of_an_engine(monkeypatch, max_memory):
    """(ff|ff) of 64 x 64 pairs, 16 primitive quartets each, in chunks as small as it takes."""
    basis, pairs = triples(3)
    free = host(md4.Engine(basis, backend="cuda").compute(pairs, pairs[:40]))
    meter = Meter(monkeypatch)
    capped = md4.Engine(basis, backend="cuda", max_memory=free.nbytes / 1e6 + max_memory).compute(pairs, pairs[:40])
    cuda.synchronize()
    assert meter.held <= free.nbytes + max_memory * 1e6
    assert meter.peak <= free.nbytes / 1e6 + max_memory + 8 * GRAIN
    assert relative_error(host(capped), free) < 1e-14


def test_work_that_cannot_fit_is_refused_before_allocation(monkeypatch, water):
    meter = Meter(monkeypatch)
    with pytest.raises(MemoryLimitError, match="raise max_memory"):
        md4.int2e(water, "s1", backend="cuda", device=True, max_memory=90)  # it takes 90.5
    basis, pairs = triples(6)
    with pytest.raises(MemoryLimitError, match="raise max_memory, or give an Engine shorter pair lists"):
        md4.Engine(basis, backend="cuda", max_memory=500).compute(pairs, pairs)
    assert meter.peak <= 8 * GRAIN


def test_a_tensor_beyond_the_device_is_refused():
    basis = Basis.from_arrays([4] * 100, [[1.0]] * 100, [[1.0]] * 100, np.arange(300.0).reshape(100, 3))
    with pytest.raises(MemoryLimitError, match=r"the AO tensor of shape \(900, 900, 900, 900\) takes 5.25 TB"):
        ao_tensor(md4.Engine(basis, backend="cuda"), device=True)


def test_a_tensor_larger_than_its_share_is_staged(water, expected, monkeypatch):
    """Without room on the device for the tensor, blocks are placed by the host."""
    from md4.gpu import backend as gpu

    made = []

    class Watched(gpu.StagedTensor):
        def __init__(self, *args):
            made.append(True)
            super().__init__(*args)

    monkeypatch.setattr(gpu, "StagedTensor", Watched)
    out = np.empty_like(expected)
    md4.int2e(water, "s8", backend="cuda", out=out, max_memory=14)  # the tensor takes 11.7
    assert made
    assert tensor_error(out, expected) <= 1


# cache ----------------------------------------------------------------------------------------------------------------

RUN = """
import numpy, md4
from md4.gpu import compile as dispatch
from pyscf import gto
mol = gto.M(atom="H 0 0 0; F 0 0 0.917", basis="6-31g", verbose=0)
error = abs(md4.int2e(mol, "s8", backend="cuda") - mol.intor("int2e", aosym="s8")).max()
print(dispatch.compile_count, error)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    counts = []
    for _ in range(2):
        env = os.environ | {"MD4_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        count, error = done.stdout.split()
        assert float(error) < 1e-12
        counts.append(int(count))
    assert counts[0] > 0
    assert counts[1] == 0
    files = list(tmp_path.glob("*/*.kernel"))
    assert len(files) == counts[0]
    files[0].write_bytes(b"torn")
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "1"


# long contractions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("l", "nprim"), [(6, 10), (3, 20)], ids=["(ii|ii) K 100", "(ff|ff) K 400"])
def test_long_contractions(l, nprim):
    """K primitive pairs on either side: by linearity, the sum over uncontracted bra pairs, then over ket pairs."""
    rng = np.random.default_rng(l)
    exponents = [np.geomspace(0.3, 8, nprim) * rng.uniform(0.9, 1.1) for _ in range(4)]
    columns = [rng.uniform(0.1, 1, (nprim, 1)) for _ in range(4)]
    whole = Basis.from_arrays([l] * 4, exponents, columns, CENTRES)
    shells = [
        md4.Shell(l, s.exponents[n : n + 1], s.coefficients[n : n + 1], s.centre)
        for s in whole.shells
        for n in range(nprim)
    ]
    parts = Basis(shells, pure=True)
    split = [
        np.stack(np.meshgrid(*(np.arange(nprim) + nprim * n for n in p)), axis=-1).reshape(-1, 2)
        for p in ((0, 1), (2, 3))
    ]
    block = host(md4.Engine(whole, backend="cuda").compute(BRA, KET))[0, 0]
    by_bra = host(md4.Engine(parts, whole, backend="cuda").compute(split[0], KET)).sum(axis=(0, 1))
    by_ket = host(md4.Engine(whole, parts, backend="cuda").compute(BRA, split[1])).sum(axis=(0, 1))
    assert relative_error(block, by_bra) < 1e-12
    assert relative_error(block, by_ket) < 1e-12


@pytest.mark.parametrize("operator", ["coulomb", *((kind, 0.6) for kind in OPERATORS[1:])], ids=str)
@pytest.mark.parametrize("l", [1, 5])
def test_operators_are_those_of_the_cpu(operator, l):
    basis, pairs = triples(l, count=3)
    blocks = [host(md4.Engine(basis, operator=operator, backend=b).compute(pairs, pairs)) for b in ("cuda", "cpu")]
    assert relative_error(*blocks) < 1e-12


def test_omega_of_the_molecule(water):
    with water.with_range_coulomb(0.3):
        ours = md4.int2e(water, "s8", backend="cuda")
        assert tensor_error(ours, water.intor("int2e", aosym="s8")) <= 1
    engine = md4.Engine(Basis.from_mol(water), operator=Operator.erf(0.3), backend="cuda")
    np.testing.assert_array_equal(ao_tensor(engine, "s8"), ours)
