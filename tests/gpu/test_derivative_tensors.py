"""Tensors of derivatives on the emulated GPU: as on the CPU, for every class, path and target."""

import numpy as np
import pytest
from emulator import running
from gpu.kernels.test_plain_python import CLASSES, assert_same, basis_of
from molecules import WATER, molecule

import md4
from md4.contract.derivatives import DerivativeRequest
from md4.contract.tensor import locked_tensor
from md4.errors import MemoryLimitError, UnsupportedError
from md4.gpu import backend as gpu
from md4.gpu.backend import GpuBackend
from md4.gpu.h_layout import check_h
from md4.gpu.paths import plans
from md4.method.derivatives import OF_A, OF_B
from md4.method.operators import Operator
from md4.shells.shell_pairs import derived_facts, list_facts

# Shells, what they consist of, the integral, its symmetry and the unit
TENSORS = {
    "(ps|ps)": ((1, 0), {}, "int2e_ip1", "s1", "dmma16"),
    "(ps|ps), dmma8": ((1, 0), {}, "int2e_ip1", "s2kl", "dmma8"),
    "(ps|ps), fma": ((1, 0), {}, "int2e_ip1", "s2kl", "fma"),
    "(ps|ps) of two functions, K = 4, Cartesian": (
        (1, 0), {"nprim": 2, "nctr": 2, "pure": False}, "int2e_ip1", "s2kl", "dmma16"
    ),
    "(ds|ds)": ((2, 0), {}, "int2e_ip1", "s2kl", "dmma16"),
    "(dp|dp), Cartesian": ((2, 1), {"pure": False}, "int2e_ip1", "s2kl", "dmma16"),
    "(ds|d) by a": ((2, 0), {"pure": False}, "int3c2e_ip1", "s1", "dmma16"),
    "(ps|p) by P": ((1, 0), {"nprim": 2}, "int3c2e_ip2", "s2ij", "dmma16"),
    "(dp|d) by P": ((2, 1), {}, "int3c2e_ip2", "s1", "dmma8"),
    "(d|d)": ((2, 1, 0), {"nctr": 2, "nprim": 2}, "int2c2e_ip1", "s1", "dmma16"),
    "(d|d), Cartesian": ((2, 1, 0), {"pure": False}, "int2c2e_ip1", "s1", "fma"),
}  # fmt: skip


def request_of(ls, name="int2e_ip1", aosym="s1", shls_slice=None, **shells):
    """(basis, request)."""
    basis = basis_of(ls, **shells)
    basis = basis if name == "int2e_ip1" else md4.Basis.joined([basis])
    return basis, DerivativeRequest.of_name(basis, name, aosym, shls_slice)


@pytest.mark.sample("(ps|p) by P", "(d|d), Cartesian")
@pytest.mark.parametrize("case", TENSORS.values(), ids=TENSORS)
def test_as_on_the_cpu(case):
    ls, shells, name, aosym, unit = case
    basis, request = request_of(ls, name, aosym, **shells)
    right = locked_tensor(md4.Engine(basis, backend="cpu"), request)
    with running(unit) as machine:
        assert_same(locked_tensor(md4.Engine(basis, backend="cuda"), request), right)
    assert {"h_matrices", "scatter_block"} < machine.kernels


@pytest.mark.races
@pytest.mark.parametrize("aosym", ["s1", "s2kl"])
def test_slices(aosym):
    """Pairs that only have derivatives by one centre; on a stream that does nothing before it is waited for."""
    basis, request = request_of((1, 0, 0), aosym=aosym, shls_slice=(1, 3, 0, 2, 0, 2, 0, 2))
    right = locked_tensor(md4.Engine(basis, backend="cpu"), request)
    with running(late={0}):
        assert_same(locked_tensor(md4.Engine(basis, backend="cuda"), request), right)


@pytest.mark.sample("dmma16-(pp|ps)-bra")
@pytest.mark.parametrize("side", ["bra", "ket"])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("unit", ["dmma16", "fma"])
def test_all_plans_of_a_class(unit, name, side):
    """Two pairs, or their derivatives, with one; an engine takes derivatives on either side."""
    ls, nprim, nctr, _ = CLASSES[name]
    basis, every = basis_of(ls, nprim, nctr), OF_A + OF_B

    def made(engine, plan=None):
        bra, ket = engine.prepare([[0, 1]] * 2), engine.prepare([[2, 3]])
        bra, ket = (bra.derived(every), ket) if side == "bra" else (bra, ket.derived(every))
        found = list(plans(unit, bra, ket))
        if plan is not None:
            engine.backend.plan = lambda *_: found[plan]
        shape = (2, 1, *(n for this in (bra, ket) for n in (this.pairs.nab // this.pairs.nb, this.pairs.nb)))
        out = engine.backend.result(shape)
        engine.evaluate(bra, ket, out)
        return out, len(found)

    right, _ = made(md4.Engine(basis, backend="cpu"))
    with running(unit):
        _, count = made(md4.Engine(basis, backend="cuda"))
        for plan in range(count):
            assert_same(made(md4.Engine(basis, backend="cuda"), plan)[0].copy_to_host(), right)


@pytest.mark.thorough
@pytest.mark.parametrize("operator", [Operator("erf", 0.4), Operator("erfc", 0.4), Operator("yukawa", 1.2)], ids=str)
def test_operators(operator):
    basis, request = request_of((1, 0), "int3c2e_ip1")
    right = locked_tensor(md4.Engine(basis, None, operator, "cpu"), request)
    with running():
        assert_same(locked_tensor(md4.Engine(basis, None, operator, "cuda"), request), right)


def test_under_the_name_of_pyscf():
    """Also in memory of the device, and in an array that is given."""
    mol = molecule("He 0 0 0; H 0.3 0.2 0.9", "sto-3g", charge=1)
    right = md4.intor(mol, "int2e_ip1", backend="cpu")
    with running():
        out = np.empty_like(right)
        assert md4.intor(mol, "int2e_ip1", backend="cuda", out=out) is out
        assert_same(out, right)
        assert_same(md4.intor(mol, "int2e_ip1", backend="cuda", device=True).copy_to_host(), right)


@pytest.mark.parametrize("name, aosym", [("int2e_ip1", "s2kl"), ("int3c2e_ip2", "s1")])
def test_a_tensor_without_room_on_the_device(name, aosym, monkeypatch):
    """Blocks are placed by the host."""
    basis, request = request_of((1, 0), name, aosym)
    right = locked_tensor(md4.Engine(basis, backend="cpu"), request)

    def staged(backend, engine, layout, out, device, least, host_tensor, progress=None):
        return gpu.StagedTensor(engine, host_tensor(layout, np.full(layout.shape, np.nan)))

    monkeypatch.setattr(GpuBackend, "tensor", staged)
    with running():
        assert_same(locked_tensor(md4.Engine(basis, backend="cuda"), request), right)


def test_little_memory(monkeypatch):
    """Lists in pieces, whose H matrices are given up between blocks."""
    basis, request = request_of((1, 1, 0), "int3c2e_ip1")
    right = locked_tensor(md4.Engine(basis, backend="cpu"), request)
    monkeypatch.setattr(gpu, "BLOCK_BYTES", 2000)
    monkeypatch.setattr("md4.contract.tensor.HERMITE_SHARE", 1e-9)
    with running():
        assert_same(locked_tensor(md4.Engine(basis, backend="cuda"), request), right)


def test_memory_is_refused_before_it_is_taken():
    with running(), pytest.raises(MemoryLimitError, match=r"shape \(3, 7, 7, 7, 7\) takes .* use aosym='s2kl'"):
        md4.intor(molecule(WATER, "sto-3g"), "int2e_ip1", backend="cuda", max_memory=0.05)


def test_what_a_gpu_cannot_make(monkeypatch):
    """E coefficients that shared memory does not hold, as of pairs of l = 16 and 15 on an H100."""
    basis, request = request_of((1, 0))
    monkeypatch.setattr(gpu, "e_bytes", lambda facts: 1 << 20)
    with running(), pytest.raises(UnsupportedError, match=r"l = 0 and 0 with 1 and 1 functions are beyond"):
        locked_tensor(md4.Engine(basis, backend="cuda"), request)


def test_most_rows():
    pairs = list_facts(0, 0, True, 500, 500, 500, 500, 1, False)
    with pytest.raises(UnsupportedError, match="0 and 0 with 500 and 500 functions are beyond what this GPU"):
        check_h(derived_facts(pairs, OF_A + OF_B), 0, 1)
    check_h(derived_facts(pairs, OF_A), 0, 1)


@pytest.mark.parametrize("single", [False, True])
def test_facts(single):
    """Those of pairs and of their list are the same."""
    facts = derived_facts(list_facts(2, 0, True, 1, 1, 5, 1, 1, single), OF_A)
    assert (facts.l, facts.nab) == (3, 15)
    assert (facts.first, facts.nherm) == ((10, 10) if single else (0, 20))
