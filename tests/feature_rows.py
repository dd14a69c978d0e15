"""Rows of mean-field objects: kinds, functionals, molecules, convergence, what is done to an object."""

import copy
import pickle
import tempfile
from pathlib import Path

import numpy as np
from features import ROWS, Row, row
from molecules import WATER, molecule
from pyscf import df, scf
from solvers import solver

OXYGEN = "O 0 0 0; O 0 0 1.2"
FLUORIDE = "H 0 0 0; F 0 0 0.95"
FITTED, DERIVATIVES = "density fitting", "derivatives of `int2e`"
FORCES = "J and K, forces"


def water(basis="sto-3g", **options):
    return molecule(WATER, basis, **options)


def cation():
    return water(charge=1)


def energy(mf, tight=True):
    """The converged energy."""
    if tight:
        mf.conv_tol = 1e-11
    found = mf.kernel()
    assert np.all(mf.converged)
    return found


def add(table, name, make, finish=energy, **facts):
    """A row of `make()`, attached, and `finish`."""
    ROWS.append(Row(table, name, lambda attach: finish(attach(make())), **facts))


# kinds and functionals ------------------------------------------------------------------------------------------------

METHODS = "Methods"


@row(METHODS, "`RHF`, `UHF`, `ROHF`, `GHF`")
def hartree_fock(attach):
    molecules = {"RHF": water(), "UHF": cation(), "ROHF": cation(), "GHF": cation()}
    return [energy(attach(solver(kind, mol))) for kind, mol in molecules.items()]


for name, kind, xc in (
    ("LDA, `RKS`", "RKS", "lda,vwn"), ("GGA, `UKS`", "UKS", "pbe"), ("hybrid, `RKS`", "RKS", "b3lyp"),
    ("hybrid, `ROKS`", "ROKS", "b3lyp"), ("LDA, `GKS`", "GKS", "lda,vwn"), ("meta-GGA", "RKS", "r2scan"),
    ("range-separated: CAM-B3LYP", "RKS", "camb3lyp"), ("range-separated: HSE06", "UKS", "hse06"),
):  # fmt: skip
    add(METHODS, name, lambda kind=kind, xc=xc: solver(kind, water() if kind == "RKS" else cation(), xc))


@row(METHODS, "VV10: wB97M-V", tol=1e-7)
def nonlocal_correlation(attach):
    mf = attach(solver("RKS", water(), "wb97m_v"))
    mf.nlcgrids.level = 0
    return energy(mf)


@row(METHODS, "dispersion: `mf.disp` (`pyscf-dispersion`)", needs="pyscf.dispersion")
def dispersion(attach):
    return energy(attach(solver("RKS", water(), "pbe", disp="d3bj")))


@row(METHODS, "`density_fit()`", md4=FITTED)
def fitted(attach):
    return energy(attach(solver("RHF", water())).density_fit())


@row(METHODS, "`density_fit(only_dfj=True)`", md4=f"J and K, {FITTED}")
def fitted_j(attach):
    return energy(attach(solver("RHF", water())).density_fit(only_dfj=True))


@row(METHODS, "range-separated with `density_fit()`", md4=FITTED, tol=1e-6)
def fitted_range(attach):
    return energy(attach(solver("RKS", water(), "camb3lyp").density_fit()))


# molecules ------------------------------------------------------------------------------------------------------------

MOLECULES = "Molecules and Hamiltonians"
add(MOLECULES, "charges and spin", lambda: solver("UHF", molecule(OXYGEN, "sto-3g", spin=2, charge=0)))
add(MOLECULES, "ECP", lambda: solver("RHF", molecule("Na 0 0 0; I 0 0 2.7", "lanl2dz", ecp="lanl2dz")))
add(MOLECULES, "ghost atoms", lambda: solver("RHF", molecule(f"{WATER}; ghost-O 0 0 3", "sto-3g")))
add(MOLECULES, "symmetry, `irrep_nelec`",
    lambda: solver("ROHF", water(symmetry=True, charge=1), irrep_nelec={"B1": (1, 0)}))  # fmt: skip
add(MOLECULES, "Cartesian functions", lambda: solver("RHF", molecule(FLUORIDE, "6-31g*", cart=True)))
add(MOLECULES, "another basis set for an atom", lambda: solver("RHF", water({"O": "cc-pvdz", "H": "sto-3g"})))
add(MOLECULES, "`mol.omega`", lambda: solver("RHF", water_of_long_range()))
add(MOLECULES, "scalar relativity: `mf.sfx2c1e()`", lambda: solver("RHF", water()).sfx2c1e())
add(MOLECULES, "spin-orbit coupling: `GHF(mol).x2c1e()`", lambda: solver("GHF", cation()).x2c1e())


def water_of_long_range():
    mol = water()
    mol.omega = 0.4
    return mol


@row(MOLECULES, "an electric field in `mf.get_hcore`")
def field(attach):
    mf = attach(solver("RHF", water()))
    core = mf.get_hcore() + 0.01 * mf.mol.intor("int1e_r")[2]
    mf.get_hcore = lambda *args: core
    return [energy(mf), *mf.dip_moment(verbose=0)]


@row(MOLECULES, "QM/MM: point charges", md4=FORCES, tol=1e-7)
def charges(attach):
    from pyscf import qmmm

    mf = attach(qmmm.mm_charge(solver("RHF", water()), [[0.0, 0.0, 3.0]], [0.5]))
    return [energy(mf), *mf.Gradients().set(verbose=0).kernel().ravel()]


# convergence ----------------------------------------------------------------------------------------------------------

CONVERGENCE = "Convergence"
for name, settings in (
    ("level shift and damping", {"level_shift": 0.2, "damp": 0.2}), ("without DIIS", {"diis": None}),
    ("`direct_scf=False`", {"direct_scf": False}),
):  # fmt: skip
    add(CONVERGENCE, name, lambda settings=settings: solver("RHF", water(), max_cycle=200, **settings))


@row(CONVERGENCE, "CDIIS, ADIIS, EDIIS")
def accelerators(attach):
    return [energy(attach(solver("RHF", water())).set(DIIS=name)) for name in (scf.CDIIS, scf.ADIIS, scf.EDIIS)]


add(CONVERGENCE, "smearing", lambda: solver("RHF", water("6-31g")).smearing(0.1, "fermi"))
add(CONVERGENCE, "fractional occupation", lambda: scf.addons.frac_occ(solver("RHF", molecule("C 0 0 0", "6-31g"))))
# Energies of PySCF alone, direct and with stored integrals, differ by 1.0e-8 here, for any conv_tol.
add(CONVERGENCE, "linearly dependent functions",
    lambda: solver("RHF", molecule(f"{WATER}; ghost-O 0 0 0.12", "sto-3g"), init_guess="1e"),
    tol=1e-7)  # fmt: skip


@row(CONVERGENCE, "excited states by `mom_occ`", tol=1e-7)
def maximum_overlap(attach):
    mf = attach(solver("UHF", water()))
    mf.kernel()
    occupied = mf.mo_occ.copy()
    occupied[0][[4, 5]] = 0, 1
    excited = attach(solver("UHF", water()))
    start = excited.make_rdm1(mf.mo_coeff, occupied)
    scf.addons.mom_occ(excited, mf.mo_coeff, occupied)
    return excited.kernel(start)


add(CONVERGENCE, "`newton()`", lambda: solver("UHF", cation()).newton())


@row(CONVERGENCE, "`stability()`", tol=1e-6)
def stability(attach):
    mf = attach(solver("UHF", molecule("H 0 0 0; H 0 0 2.5", "6-31g")))
    first, (better, _, stable, _) = energy(mf), mf.stability(return_status=True)
    return [first, stable, mf.kernel(mf.make_rdm1(better, mf.mo_occ))]


for names, facts in ((("minao", "1e", "vsap"), {}), (("atom", "huckel"), {"pyscf": "`int2e`"})):

    @row(CONVERGENCE, "`init_guess` " + ", ".join(f'"{name}"' for name in names), **facts)
    def guesses(attach, names=names):
        return [energy(attach(solver("RHF", water(), init_guess=name))) for name in names]


@row(CONVERGENCE, '`chkfile`, `init_guess="chkfile"`, `from_chk`')
def checkpoint(attach):
    with tempfile.TemporaryDirectory() as folder:
        mf = attach(solver("RHF", water(), chkfile=str(Path(folder, "water.chk"))))
        first = energy(mf)
        again = attach(solver("RHF", water(), init_guess="chkfile", chkfile=mf.chkfile))
        return [first, energy(again), again.energy_tot(again.from_chk(mf.chkfile))]


# what is done to an object --------------------------------------------------------------------------------------------

OBJECTS = "Objects"


@row(OBJECTS, "scanners")
def scanner(attach):
    scan = attach(solver("RHF", molecule(FLUORIDE, "sto-3g"), conv_tol=1e-11)).as_scanner()
    return [scan(f"H 0 0 0; F 0 0 {r}") for r in (0.9, 1.0)]


@row(OBJECTS, "`reset(mol)`")
def moved(attach):
    mf = attach(solver("RHF", water()))
    return [energy(mf), energy(mf.reset(molecule("O 0 0 0; H 0 0 1; H 0 1 0", "sto-3g")))]


@row(OBJECTS, "`to_uhf()`, `to_ghf()`, `to_ks()`, `to_hf()`")
def converted(attach):
    mf = attach(solver("RHF", water()))
    mf.kernel()
    ks = mf.to_ks("pbe")
    ks.grids.level = 0
    return [energy(found) for found in (mf.to_uhf(), mf.to_ghf(), ks, ks.to_hf())]


@row(OBJECTS, "`copy()`, `copy.deepcopy`, `pickle`")
def copied(attach):
    mf = attach(solver("RHF", water()))
    return [energy(found) for found in (mf.copy(), copy.deepcopy(mf), pickle.loads(pickle.dumps(mf)))]


@row(OBJECTS, "`joblib`, with processes or threads", needs="joblib")
def in_parallel(attach):
    from joblib import Parallel, delayed

    objects = [attach(solver("RHF", molecule(f"H 0 0 0; F 0 0 {r}", "sto-3g"))) for r in (0.9, 1.0)]
    return [Parallel(n_jobs=2, prefer=prefer)(delayed(energy)(mf) for mf in objects)
            for prefer in ("threads", "processes")]  # fmt: skip


@row(OBJECTS, "`analyze()`, dipole and quadrupole moments, populations", tol=1e-6)
def analysed(attach):
    mf = attach(solver("RHF", water()))
    energy(mf)
    return [*mf.dip_moment(verbose=0), *mf.quad_moment(verbose=0).ravel(), *mf.mulliken_pop(verbose=0)[1]]


# refused --------------------------------------------------------------------------------------------------------------


def periodic():
    from pyscf.pbc import gto, scf

    return scf.RHF(gto.M(atom="He 0 0 0", a=np.eye(3) * 4, basis="sto-3g", verbose=0))


def with_integrals():
    mol = water()
    mol.incore_anyway = True
    mf = scf.RHF(mol)
    mf._eri = mol.intor("int2e", aosym="s8")
    return mf


REFUSED = {
    "periodic cells (`pyscf.pbc`)": periodic,
    "four components: `scf.DHF`": lambda: scf.DHF(water()),
    "two components over spinors: `scf.X2C`": lambda: scf.X2C(water()),
    "COSX: `mf.COSX()`": lambda: scf.RHF(water()).COSX(),
    "integrals of your own in `mf._eri`": with_integrals,
    "a tensor of your own in `mf.with_df._cderi`":
        lambda: scf.RHF(water()).density_fit(with_df=df.DF(water()).set(_cderi=np.zeros((5, 28)))),
}  # fmt: skip
