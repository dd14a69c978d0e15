"""One case on one backend: data made, run, timed, and checked against libcint; kernels compiled ahead in parallel."""

import multiprocessing
import os
from functools import cache

import numpy as np
from cases import Sample
from clock import median_seconds, one_thread, synchronize, wall_seconds
from libcint import Libcint

import md4
from md4.gpu import paths
from md4.gpu.context import cuda, gpu_available
from md4.gpu.paths import plans as every_plan

THREADS = 256


def add_backend(parser):
    """The options that every script shares."""
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"), help="cpu runs on one thread")
    parser.add_argument("--seed", type=int, default=0, help="of the random shells")
    parser.add_argument(
        "--jobs", type=int, help="processes that compile kernels beforehand; default: the processors (GPU), 0 (CPU)"
    )


def settle(args):
    """Fills in what `add_backend`'s defaults leave open; the CPU gets one thread."""
    if args.backend == "auto":
        args.backend = "cuda" if gpu_available() else "cpu"
    if args.jobs is None:
        args.jobs = 0 if args.backend == "cpu" else min(16, os.cpu_count())
    if args.backend == "cpu":
        one_thread()
    return args


class Output:
    """Memory for results, shared by all cases of a run so that none waits for an allocation."""

    def __init__(self, backend):
        self.backend = backend
        self.buffer = None

    def shaped(self, shape):
        """An array of `shape`, every byte 0xff: NaN."""
        size = int(np.prod(shape))
        if self.buffer is None or self.buffer.size < size:
            self.buffer = None
            self.buffer = np.empty(size) if self.backend == "cpu" else cuda.device_array(size)
        flat = self.buffer[:size]
        poison(flat, self.backend)
        return flat.reshape(shape)


def poison(flat, backend):
    """NaN everywhere."""
    if backend == "cpu":
        flat[:] = np.nan
    else:
        cuda.cudadrv.driver.device_memset(flat, 0xFF, flat.nbytes)
        cuda.synchronize()


def count_nan(x, count):
    """Kernel: NaNs of x into count[0]."""
    found = 0
    for n in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        if x[n] != x[n]:
            found += 1
    if found:
        cuda.atomic.add(count, 0, found)


@cache
def nan_counter():
    return cuda.jit("void(float64[::1], int64[::1])")(count_nan)


def nans(flat, backend):
    """Elements that nothing has written."""
    if backend == "cpu":
        return int(np.isnan(flat).sum())
    count = cuda.to_device(np.zeros(1, np.int64))
    nan_counter()[1024, THREADS](flat, count)
    return int(count.copy_to_host()[0])


class Run:
    """A sample's engine, prepared pair lists and result."""

    def __init__(self, sample, backend, output):
        self.sample = sample
        self.engine = md4.Engine(sample.bra_basis, sample.ket_basis, backend=backend)
        self.backend = self.engine.backend
        self.bra = self.engine.prepare(sample.bra_pairs, sample.bra_basis)
        self.ket = self.engine.prepare(sample.ket_pairs, sample.ket_basis)
        self.out = output.shaped(sample.shape)

    @classmethod
    def make(cls, case, npair, backend, output, seed=0):
        """With (bra pairs, ket pairs) `npair`."""
        return cls(Sample.make(case, *npair, seed), backend, output)

    def evaluate(self):
        """What is timed: H matrices, r, both transforms."""
        self.bra.drop()
        self.ket.drop()
        self.engine.evaluate(self.bra, self.ket, self.out)

    def compute(self):
        """What a user calls: pair data from shell indices as well."""
        self.engine.compute(self.sample.bra_pairs, self.sample.ket_pairs, self.out)

    def seconds(self, repeats=5, warm=2):
        """(median, spread) of `evaluate`."""
        return median_seconds(self.backend, self.evaluate, repeats, warm)

    def call_seconds(self, repeats=3):
        """Median wall time of `compute`, pair data and waiting included."""
        return median_seconds(self.backend, self.compute, repeats, 1, wall_seconds)[0]

    def block(self, ij, kl):
        """The result of one quartet, on the host."""
        _, nkl, na, nb, nc, nd = self.sample.shape
        size = na * nb * nc * nd
        first = (ij * nkl + kl) * size
        piece = self.out.reshape(self.out.size)[first : first + size]
        piece = piece if self.backend.name == "cpu" else piece.copy_to_host()
        return piece.reshape(na, nb, nc, nd)

    def errors(self, count=4):
        """(against the CPU backend, against libcint): largest errors of some quartets over each one's largest element.

        NaN where an element of the result is unwritten, where PySCF is missing, or for the CPU against itself. libcint
        is independent, but from (gg|gg) on it is itself wrong by up to 1e-9 (by `md4.validation.oracle`); the CPU
        backend is good to some 1e-15.
        """
        synchronize(self.backend)
        s = self.sample
        if nans(self.out.reshape(self.out.size), self.backend.name):
            return np.nan, np.nan
        rng, (nij, nkl) = np.random.default_rng(), s.shape[:2]
        places = [(0, 0), (nij - 1, nkl - 1)]
        places += [(int(rng.integers(nij)), int(rng.integers(nkl))) for _ in range(count - 2)]
        return tuple(
            max(self.quartet_error(oracle, *place) for place in places) if oracle else np.nan
            for oracle in (self.cpu_oracle(), self.libcint_oracle())
        )

    def cpu_oracle(self):
        """(bra pair, ket pair) -> integrals by the CPU backend, or None where that is what is tested."""
        if self.backend.name == "cpu":
            return None
        engine = md4.Engine(self.sample.bra_basis, self.sample.ket_basis, backend="cpu")
        return lambda bra, ket: engine.compute(bra[None], ket[None])[0, 0]

    def libcint_oracle(self):
        """(bra pair, ket pair) -> integrals by libcint, or None without PySCF."""
        try:
            libcint = Libcint(self.sample.bra_basis, self.sample.ket_basis)
        except ImportError:
            return None
        return lambda bra, ket: libcint.quartet(libcint.shells(0, bra), libcint.shells(1, ket))

    def quartet_error(self, oracle, ij, kl):
        """Error of one quartet relative to its largest element."""
        want = oracle(self.sample.bra_pairs[ij], self.sample.ket_pairs[kl])
        return abs(self.block(ij, kl) - want).max() / abs(want).max()


def compile_case(job):
    """A few quartets of one case, so that its kernels are in the disk cache; by every plan there is if `plans`."""
    case, npair, backend, plans = job
    if npair[0] * npair[1] >= paths.FEWEST_QUARTETS:
        paths.FEWEST_QUARTETS = 1
    try:
        run = Run.make(case, (min(npair[0], 4), min(npair[1], 4)), backend, Output(backend))
        for plan in list(every_plan(run.backend.context.unit, run.bra.pairs, run.ket.pairs)) if plans else [None]:
            if plan:
                run.backend.plan = lambda *_, plan=plan: plan
            run.evaluate()
        synchronize(run.backend)
    except Exception as error:  # the run itself will say more
        print(f"compiling for {case.name} K={case.k} failed: {error!r}", flush=True)


def compile_ahead(jobs, cases, backend, plans=False):
    """`compile_case` of all (case, npair) in `jobs` processes; 0 compiles as the run goes."""
    if jobs < 1:
        return
    work = [(case, npair, backend, plans) for case, npair in cases]
    work += [(*cases[0], "cpu", False)] if backend != "cpu" else []  # the oracle of `Run.errors`
    # neighbours share kernels: apart, fewer are compiled twice at once
    work = [work[n] for n in np.random.default_rng(0).permutation(len(work))]
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(work))) as pool:
        pool.map(compile_case, work, chunksize=1)
