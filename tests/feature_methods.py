"""Rows of what starts from a mean-field object: properties, excited states, correlation, solvents."""

import numpy as np
from feature_rows import DERIVATIVES, FITTED, FLUORIDE, FORCES, cation, energy, water
from features import PAGE, filled, plain, row
from molecules import molecule
from pyscf import adc, cc, df, fci, mcpdft, mcscf, mp, mrpt
from pyscf.gw import rpa
from solvers import solver

import md4

HYDRIDE = "Li 0 0 0; H 0 0 1.6"
FITTED_DERIVATIVES, TRANSFORMED = "derivatives of `int3c2e`", "J and K, MO integrals"
# Of correlated methods. The Schwarz bounds are integrals as well.
GRADIENT = f"`int2e`, {DERIVATIVES}"


def run(method):
    return method.set(verbose=0).run()


def converged(attach, kind="RHF", mol=None, xc=None):
    """An attached object at its minimum."""
    mf = attach(solver(kind, mol or water(), xc))
    energy(mf)
    return mf


def lithium_hydride(attach):
    """Whose active space of two orbitals has one solution only."""
    return converged(attach, mol=molecule(HYDRIDE, "6-31g"))


def fitted(attach):
    mf = attach(solver("RHF", molecule(HYDRIDE, "6-31g")).density_fit("def2-universal-jkfit"))
    energy(mf)
    return mf


# properties -----------------------------------------------------------------------------------------------------------

PROPERTIES = "Properties and geometries"


@row(PROPERTIES, "gradients of Hartree-Fock", md4=FORCES, tol=1e-7)
def gradients(attach):
    return converged(attach).Gradients().set(verbose=0).kernel()


@row(PROPERTIES, "gradients of Kohn-Sham, UKS B3LYP", md4=FORCES, tol=1e-6)
def gradients_of_functional(attach):
    return converged(attach, "UKS", cation(), "b3lyp").Gradients().set(verbose=0).kernel()


@row(PROPERTIES, "gradients of a range-separated functional, ROKS CAM-B3LYP", md4=FORCES, tol=1e-6)
def gradients_of_long_range(attach):
    return converged(attach, "ROKS", cation(), "camb3lyp").Gradients().set(verbose=0).kernel()


@row(PROPERTIES, "gradients with `density_fit()`", md4=f"{FITTED}, forces", tol=1e-7)
def gradients_fitted(attach):
    return fitted(attach).Gradients().set(verbose=0).kernel()


@row(PROPERTIES, "Hessians", pyscf=DERIVATIVES, tol=1e-5)
def hessian(attach):
    return converged(attach, mol=molecule(FLUORIDE, "sto-3g")).Hessian().set(verbose=0).kernel()


@row(PROPERTIES, "geometries by geomeTRIC (`geometric`)", md4=FORCES, tol=1e-4, needs="geometric")
def by_geometric(attach):
    from pyscf.geomopt.geometric_solver import optimize

    return optimize(attach(solver("RHF", molecule(FLUORIDE, "sto-3g"))), maxsteps=20).atom_coords()[1]


@row(PROPERTIES, "geometries by PyBerny (`pyberny`)", md4=FORCES, tol=1e-4, needs="berny")
def by_berny(attach):
    from pyscf.geomopt.berny_solver import optimize

    return np.ptp(optimize(attach(solver("RHF", molecule(FLUORIDE, "sto-3g")))).atom_coords(), axis=0)


@row(PROPERTIES, "molecular dynamics (`pyscf.md`)", md4=FORCES, tol=1e-6)
def dynamics(attach):
    from pyscf import md

    scan = attach(solver("RHF", molecule(FLUORIDE, "sto-3g"))).nuc_grad_method().as_scanner()
    return md.NVE(scan, dt=10, steps=2, verbose=0).run().mol.atom_coords()


# excited states -------------------------------------------------------------------------------------------------------

EXCITED = "Excited states"


@row(EXCITED, "TDA and TDHF", tol=1e-6)
def excitations(attach):
    mf = converged(attach)
    return [method.set(verbose=0, nstates=3).kernel()[0] for method in (mf.TDA(), mf.TDHF())]


@row(EXCITED, "TDDFT, hybrid and range-separated", tol=1e-5)
def excitations_of_functionals(attach):
    return [converged(attach, "RKS", xc=xc).TDDFT().set(verbose=0, nstates=2).kernel()[0]
            for xc in ("b3lyp", "camb3lyp")]  # fmt: skip


@row(EXCITED, "gradients of TDDFT", md4="J and K, derivatives of J and K", tol=1e-5)
def gradients_of_excited(attach):
    td = converged(attach, "RKS", xc="pbe0").TDA().set(verbose=0, nstates=2, conv_tol=1e-10).run()
    return td.Gradients().set(verbose=0).kernel(state=1)


@row(EXCITED, "EOM-CCSD: IP, EA, EE", md4=TRANSFORMED, tol=1e-6)
def equation_of_motion(attach):
    cc = run(converged(attach).CCSD())
    return [cc.ipccsd(nroots=1)[0], cc.eaccsd(nroots=1)[0], cc.eomee_ccsd_singlet(nroots=1)[0]]


@row(EXCITED, "ADC(2)", md4=TRANSFORMED, tol=1e-6)
def algebraic_diagrams(attach):
    return adc.ADC(converged(attach)).set(verbose=0).kernel(nroots=2)[0]


@row(EXCITED, "GW", md4=TRANSFORMED, tol=1e-5)
def quasiparticles(attach):
    from pyscf import gw

    method = gw.GW(converged(attach, "RKS", xc="pbe"), freq_int="exact").set(verbose=0)
    return method.run(orbs=range(3, 6)).mo_energy[3:6]


# correlation ----------------------------------------------------------------------------------------------------------

CORRELATION = "Correlation"


def correlated(name, make, start=converged, **facts):
    """A row of the energy of `make` of the object `start(attach)`."""

    @row(CORRELATION, name, **{"md4": TRANSFORMED, "tol": 1e-7, **facts})
    def energies(attach):
        return run(make(start(attach))).e_tot


correlated("MP2", lambda mf: mf.MP2())
correlated("UMP2", lambda mf: mf.MP2(), lambda attach: converged(attach, "UHF", cation()))
correlated("GMP2", mp.GMP2)
correlated("CISD", lambda mf: mf.CISD())
correlated("CCSD", lambda mf: mf.CCSD())
correlated("CCSD with `cc.direct = True`", lambda mf: mf.CCSD().set(direct=True))
correlated("QCISD", lambda mf: mf.QCISD())
correlated("`cc.rccsd.RCCSD`", cc.rccsd.RCCSD)
correlated("GCCSD", cc.GCCSD)
correlated("FCI", fci.FCI, tol=1e-6)
correlated("CASCI", lambda mf: mf.CASCI(4, 4))
correlated("UCASCI", lambda mf: mcscf.UCASCI(mf, 4, 4))
correlated("CASSCF", lambda mf: mf.CASSCF(2, 2), lithium_hydride, tol=1e-6)
correlated("UCASSCF", lambda mf: mcscf.UCASSCF(mf.to_uhf(), 2, 2).set(max_memory=4000), lithium_hydride, tol=1e-6)
correlated("MC-PDFT", lambda mf: mcpdft.CASSCF(mf, "tpbe", 2, 2, grids_level=0), lithium_hydride, tol=1e-6)


@row(CORRELATION, "MP2, CCSD, CASSCF, RPA with `density_fit()`", md4=FITTED, tol=1e-6)
def with_fitting(attach):
    mf = fitted(attach)
    return [run(method).e_tot for method in (mf.MP2(), mf.CCSD(), mf.CASSCF(2, 2), rpa.RPA(mf))]


for name, direct in (("UCCSD", False), ("UCCSD with `cc.direct = True`", True)):
    correlated(name, lambda mf, direct=direct: mf.CCSD().set(direct=direct),
               lambda attach: converged(attach, "UHF", cation()))  # fmt: skip


@row(CORRELATION, "DF-MP2, with `mp2.with_df = md4.DF(...)`", md4=f"J and K, {FITTED}")
def fitted_mp2(attach):
    mf = converged(attach)
    mp2 = mp.dfmp2.DFMP2(mf)
    mp2.with_df = (df.DF if attach is plain else md4.DF)(mf.mol, auxbasis="cc-pvdz-ri")
    return run(mp2).e_tot


@row(CORRELATION, "DF-MP2 and RPA, with `md4.attach(mp2)`", md4=f"J and K, {FITTED}")
def attached_mp2(attach):
    mf = converged(attach)
    methods = [kind(mf).set(with_df=df.DF(mf.mol, auxbasis="cc-pvdz-ri")) for kind in (mp.dfmp2.DFMP2, rpa.RPA)]
    return [run(attach(method)).e_corr for method in methods]


@row(CORRELATION, "CCSD(T)", md4=TRANSFORMED, tol=1e-7)
def triples(attach):
    return run(converged(attach).CCSD()).ccsd_t()


@row(CORRELATION, "NEVPT2", md4=TRANSFORMED, tol=1e-6)
def perturbed(attach):
    return mrpt.NEVPT(run(lithium_hydride(attach).CASSCF(2, 2))).set(verbose=0).kernel()


@row(CORRELATION, "gradients of MP2", md4=TRANSFORMED, pyscf=GRADIENT, tol=1e-6)
def gradients_of_mp2(attach):
    return run(converged(attach).MP2()).Gradients().set(verbose=0).kernel()


@row(CORRELATION, "gradients of CCSD", md4=TRANSFORMED, pyscf=GRADIENT, tol=1e-5)
def gradients_of_ccsd(attach):
    return run(converged(attach).CCSD()).Gradients().set(verbose=0).kernel()


# solvents -------------------------------------------------------------------------------------------------------------

SOLVENTS = "Solvents"
for name, add, made in (
    ("PCM", lambda mf: mf.PCM(), "`int2c2e`, `int3c2e`"), ("SMD", lambda mf: mf.SMD(), "`int2c2e`, `int3c2e`"),
    ("ddCOSMO", lambda mf: mf.ddCOSMO(), "`int3c2e`"),
):  # fmt: skip

    @row(SOLVENTS, name, pyscf=made, tol=1e-7)
    def solvated(attach, add=add):
        mf = attach(add(solver("RHF", water())))
        mf.with_solvent.verbose = 0
        return energy(mf)


@row(SOLVENTS, "gradients with PCM", md4=FORCES, tol=1e-6,
     pyscf=f"`int2c2e`, `int3c2e`, {FITTED_DERIVATIVES}")  # fmt: skip
def gradients_in_solvent(attach):
    mf = attach(solver("RHF", water())).PCM()
    mf.with_solvent.verbose = 0
    energy(mf)
    return mf.Gradients().set(verbose=0).kernel()


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    print(f"wrote the table of {PAGE}")
