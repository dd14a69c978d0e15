"""PySCF's DFMP2 on `md4.DF`, and attached, in large basis sets."""

import pytest
from molecules import STORED, WATER, molecule
from places import EXAMPLES
from pyscf import df, scf
from pyscf.mp.dfmp2 import DFMP2

import md4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("atom", "basis", "fit", "auxbasis", "lmax"),
    [
        (EXAMPLES / "benzene.xyz", "cc-pvtz", "cc-pvtz-jkfit", "cc-pvtz-ri", 4),
        (WATER, "aug-cc-pv6z", "cc-pv5z-jkfit", STORED["aug-cc-pv6z-rifit"], 7),
    ],
    ids=["benzene cc-pVTZ", "water aug-cc-pV6Z"],
)
def test_energy(backend, atom, basis, fit, auxbasis, lmax):
    """Benzene, and water with k functions in the auxiliary basis for MP2; `fit` is that of Hartree-Fock."""
    mol = molecule(str(atom), basis)
    mf = scf.RHF(mol).density_fit(auxbasis=fit)
    mf.with_df = md4.DF(mol, auxbasis=fit, backend=backend)
    assert mf.run(conv_tol=1e-9).converged
    fits = md4.DF(mol, auxbasis=auxbasis, backend=backend), df.DF(mol, auxbasis=auxbasis)
    ours, theirs = (DFMP2(mf).set(with_df=one).run().e_corr for one in fits)
    print(f"correlation energy {ours:.12f}, difference to PySCF's {ours - theirs:.1e} Hartree")
    auxmol = fits[0].auxmol
    assert max(auxmol.bas_angular(n) for n in range(auxmol.nbas)) == lmax
    assert abs(ours - theirs) < 1e-9
    attached, t2 = md4.attach(DFMP2(mf).set(with_df=fits[1]), backend=backend).kernel(with_t2=False)
    assert t2 is None
    assert abs(attached - theirs) < 1e-9
