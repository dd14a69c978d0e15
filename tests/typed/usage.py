"""A program that uses md4's public names, for the type checker: `mypy` in .ci/run. Nothing runs it.

A line with an ignored error is one that a type checker must refuse: mypy complains of an ignore that is not needed.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from pyscf import gto, scf
from typing_extensions import assert_type  # a dependency of mypy; Python has it from 3.11 on

import md4

Floats = npt.NDArray[np.float64]


def tensors(mol: gto.Mole) -> None:
    assert_type(md4.int2e(mol, aosym="s8", omega=0.3, backend="cpu", max_memory=500), Floats)
    part: Floats = md4.intor(mol, "int2e_sph", shls_slice=(0, 1) * 4, out=np.empty((1, 1, 1, 1)))
    on_device = md4.int2e(mol, device=True)
    assert_type(on_device.shape, tuple[int, ...])
    md4.get_jk(mol, on_device)
    md4.int2e(mol, out=part)
    md4.intor(mol, "int2e_ip1", "s2kl")
    assert_type(md4.int2e(mol, devices="all"), Floats)
    rows = md4.int2e(mol, comm=object())
    if isinstance(rows, md4.TensorRows):
        print(rows.first, rows.array)
    md4.int2e(mol, devices="both")  # type: ignore[arg-type]
    md4.int2e("H 0 0 0")  # type: ignore[call-overload]
    md4.int2e(mol, aosym="s2")  # type: ignore[call-overload]
    md4.int2e(mol, backend="gpu")  # type: ignore[call-overload]


def orbitals(mol: gto.Mole, coefficients: Floats) -> None:
    print(md4.ao2mo.full(mol, coefficients, backend="cpu").shape)
    md4.ao2mo.general(mol, (coefficients,) * 4, "eri.h5", max_memory=500.0, compact=False)
    md4.ao2mo.half_e1(mol, (coefficients, coefficients), "half.h5", backend="gpu")  # type: ignore[arg-type]


def fitted(mol: gto.Mole, dm: Floats) -> None:
    fit = md4.DF(mol, "cc-pvdz-jkfit", backend="cpu", max_memory=100, store="direct").build()
    print(fit.mo_rows(dm, dm).shape, fit.ao2mo([dm] * 4, compact=False).shape)
    assert_type(fit.get_naoaux(), int)
    vj, vk = fit.get_jk(dm, hermi=1, omega=0.3)
    print(vj + vk, fit.store, next(fit.loop(10)))
    with fit.range_coulomb(0.3) as long_range:
        long_range.get_jk(dm)
    md4.attach(scf.RHF(mol).density_fit(with_df=fit.reset(mol)))
    md4.DF(mol, store="disk")  # type: ignore[arg-type]


def matrices(mol: gto.Mole, dm: Floats) -> None:
    vj, vk = md4.get_jk(mol, dm, direct_scf_tol=1e-12)
    print(vj + vk)
    jk = md4.JK(mol, omega=-0.3, backend="auto", progress=False)
    j, none = jk.get_jk([[1.0]], with_k=False)
    jk.update(dm, hermi=0)
    jk.reset()
    assert_type(jk.stats.computed, int)
    assert_type(jk.stats.seconds, float)
    md4.JK(mol, "cpu")  # type: ignore[arg-type]
    print(j, none)


def solvers(mol: gto.Mole) -> None:
    mf: scf.hf.RHF = md4.attach(scf.RHF(mol), backend="cuda", max_memory=1000.0)
    md4.attach(mf, devices=[0, 1])
    md4.attach(mf, devices="every")  # type: ignore[arg-type]
    md4.detach(mf)
    md4.attach("RHF")  # type: ignore[type-var]


def blocks() -> None:
    one = md4.Shell(0, np.array([1.0]), np.array([[1.0]]), np.zeros(3))
    assert_type(one.nctr, int)
    basis = md4.Basis([one], pure=False)
    other = md4.Basis.from_arrays([0, 6], [[5.0, 0.8], [1.1]], [[0.4, 0.7], [1.0]], np.zeros((2, 3)))
    assert_type(other, md4.Basis)
    assert_type((basis.nao, basis.nshell, basis.lmax, len(basis)), tuple[int, int, int, int])
    engine = md4.Engine(basis, other, operator=md4.Operator.erf(0.3), backend="cpu")
    assert_type(engine.compute([[0, 0]], np.array([[1, 0]])), Any)
    assert_type(engine.with_operator(("erfc", 0.3)), md4.Engine)
    assert_type(md4.Operator.from_omega(None).parameter, float)
    md4.Engine("cc-pvdz")  # type: ignore[arg-type]
    md4.Engine(basis, operator=0.3)  # type: ignore[arg-type]


def errors() -> None:
    try:
        raise md4.MemoryLimitError("too much")
    except md4.MD4Error as error:
        assert_type(error, md4.MD4Error)
    caught: type[ValueError] = md4.ArgumentError
    print(caught, md4.BasisError, md4.DeviceError, md4.RankError, md4.UnsupportedError, md4.__version__)
