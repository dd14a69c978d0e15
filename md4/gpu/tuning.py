"""Every tunable of the GPU kernels: tile ladders, thread counts, memory budgets."""

from dataclasses import dataclass
from math import prod

from md4.method.angular import nherm


@dataclass(frozen=True)
class TileTuning:
    """Register tiles of the products on tensor cores, and the blocks of threads that work on them."""

    columns: tuple  # blocks of 8 columns of a warp for 1, 2, ... fragments of 16 rows: as many as registers hold
    turned_columns: tuple  # the same of a turned tile for 1, 2, ... blocks of 8 rows; even numbers
    turned_rows: int  # blocks of 8 rows from which on step 4 is turned in any case: its staircase is finer
    warps: int  # warps of a block
    stages: int  # steps that the ring of copies has room for

    @property
    def most_rows(self):
        """Most fragments of 16 rows of a tile, and most blocks of 8 rows of a turned one."""
        return len(self.columns)

    @property
    def most_columns(self):
        """Most blocks of 8 columns of a block of threads."""
        return self.warps * max(*self.columns, *self.turned_columns)


TILES = TileTuning(
    columns=(8, 8, 6, 4, 4, 3, 3, 2, 2, 2, 2), turned_columns=(8, 8, 8, 8, 8, 6, 6, 4, 4, 4, 4), turned_rows=4,
    warps=4, stages=3,
)  # fmt: skip

# Blocks that a launch should have, to fill the device: four for each multiprocessor.
FEWEST_BLOCKS = 528
R_THREADS = 128
H_THREADS = 128
# With fewer primitive pairs than this, several blocks share the H of one, to fill the device.
H_BLOCKS = 4096
# r is made by a thread in registers up to the first L; by columns up to the second, in so many bytes of shared memory
# at most; by a group of threads above. Measured, ns a quartet, by columns and otherwise: L = 4: 0.23, 0.089;
# 7: 0.28, 0.32; 9: 0.54, 2.76; 12: 1.7, 5.0; 16: 5.3, 11.4; 18: 14.3, 17.7.
STRAIGHT_L = 4
COLUMN_L = 18
R_BYTES = 75 << 10
SCATTER_THREADS = 256
# Shared memory of a block that still lets two share a multiprocessor.
SHARED_BYTES = 112 << 10


@dataclass(frozen=True)
class ResidentTuning:
    """Step 4 with the panel of H in shared memory."""

    panel_bytes: int  # most bytes of a panel
    groups: int  # groups of columns that a warp takes one after the other, about


RESIDENT = ResidentTuning(panel_bytes=64 << 10, groups=8)


@dataclass(frozen=True)
class SumsTuning:
    """Sums of r over the primitives of kets of two s shells."""

    warps: int  # warps of a block


SUMS = SumsTuning(warps=8)


@dataclass(frozen=True)
class FusedTuning:
    """Both products in one kernel."""

    rows: int  # most fragments of 16 rows ab
    doubles: int  # doubles of accumulators that a lane has registers for
    columns: int  # most blocks of 8 cd
    contracted_columns: int  # the same for contracted bras of two fragments of rows
    blocks: int  # fewest blocks that share a multiprocessor
    panels: int  # primitives of a bra whose H is in shared memory at once, if it can be
    kets: int  # ket pairs that a warp takes one after the other
    primitives: int  # most primitive quartets of a quartet, which a warp goes through one after the other
    write_rounds: int  # doubles that a lane writes at a time


FUSED = FusedTuning(
    rows=2, doubles=80, columns=5, contracted_columns=4, blocks=2, panels=4, kets=8, primitives=32, write_rounds=10
)

# The kernel for the smallest classes: threads of a block; integrals in registers at once, and the fewest rows of them
# ((pp|pp) K = 25 3.8e8 quartets/s with 27 integrals, 3.5e8 with 36; (ps|dp) spills with fewer than 3 rows); most
# integrals and highest L of a quartet (at L = 6 (gs|ds) 2.0e9 quartets/s against 8.1e8 of the fused kernel, (fd|ps)
# 1.15e9 against 4.2e8, though it spills; (fs|dp) 6.7e8 against 7.2e8); the L from which the side of higher l is made
# the bra; most integrals where one product would do ((ff|ss) K = 5 2.7e8 against 3.9e8); bra primitives whose H is in
# shared memory at once, if its bytes suffice; fewest quartets worth a variant.
LOW_THREADS = 128
LOW_TILE = 27
LOW_ROWS = 3
LOW_COMPONENTS = 135
LOW_L = 6
LOW_SWAP_L = 5
LOW_SINGLE = 40
LOW_PRIMITIVES = 32
LOW_SHARED = 160 << 10
LOW_QUARTETS = 1 << 16
# Integrals of a quartet up to which, and from two on, a thread writes so many at a time: (ps|ps) 2.28e10 quartets/s
# against 1.87e10, (ds|ps) 1.30e10 against 1.25e10; but (pp|pp) K = 25 3.25e8 against 3.84e8.
LOW_WRITTEN = 15
LOW_ROUNDS = 4
# The same on devices without FP64 tensor cores, whose blocks have less shared memory: integrals, L, bytes.
LOW_PLAIN = 54, 4, 60 << 10

# Digestion by columns: most functions a at a time, most values of a column that wait in shared memory (two of each a
# and b), threads of a block, blocks of a multiprocessor for each number of functions a.
DIGEST_ROWS = 7
DIGEST_VALUES = 24
DIGEST_THREADS = 128
# Bytes from one row of 2 x 32 sums in shared memory to the next: not a multiple of 128, lest rows share banks.
DIGEST_ROW_BYTES = 520
# And from one row of 32 values that are read to the next, of which a quarter of a warp reads four at a time.
STAGE_ROW = 288
DIGEST_BLOCKS = {1: 5, 2: 5, 3: 4, 4: 4, 5: 4, 6: 3, 7: 3}
# Integrals that a lane takes at most by going through bra pairs one after the other, as long as there are this many
# warps; and the largest quartet that a lane digests alone.
DIGEST_INTEGRALS = 64
DIGEST_WARPS = 8448
QUARTET_INTEGRALS = 81

# J in the Hermite basis: up to this L and N_p N_q a thread takes a primitive quartet in registers and, from L = 7 on,
# local memory. Measured, ns so and by the other kernel, for (l_bra, l_ket): (4, 4) 2.0, 2.5; (5, 4) 3.9, 4.7;
# (6, 4) 6.3, 5.8; (5, 5) 10.3, 5.9.
COULOMB_STRAIGHT_L = 10
COULOMB_PRODUCTS = 2500
# Threads of a block; blocks that are worth more than longer runs of bra primitives, and their longest run; functions p
# that a lane takes at most; warps that are worth more than longer runs of ket primitives, and their longest run; bytes
# of r of a chunk.
COULOMB_THREADS = 128
COULOMB_BLOCKS = 4096
COULOMB_BRAS = 64
COULOMB_FUNCTIONS = 5
COULOMB_WARPS = 16896
COULOMB_KETS = 32
COULOMB_BYTES = 256 << 20

# (ab|q] and r of one chunk take about this many bytes, far beyond the L2 cache: short launches lose more in their tails
# than the cache saves ((fd|gd) 10.0 ns a quartet with 1.1 GB of (ab|q], 12.6 to 16.8 with 34 MB).
CHUNK_BYTES = 2 << 30


def blocks_of_8(n):
    """Number of 8-wide blocks that hold n."""
    return (n + 7) // 8


@dataclass(frozen=True)
class Tile:
    """A warp's register tile and the block around it.

    Attributes
    ----------
    rows8, nt : int
        Blocks of 8 rows and of 8 columns.
    warps : int
        Warps of a block, side by side along the columns.
    stages : int
        Buffers of the ring through which the operands come.
    unit : {'dmma16', 'dmma8', 'fma'}
        Arithmetic: m16n8k8 (compute capability 9.0+), m8n8k4 (8.0+), or plain multiply-adds.
    turned : bool
        Rows of the product are on the side of an instruction that is 8 wide, columns on that of 16.
    """

    rows8: int
    nt: int
    warps: int
    stages: int
    unit: str
    turned: bool = False

    @property
    def mt(self):
        """Fragments of 16 rows."""
        return self.rows8 // 2

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def columns(self):
        """Column fragments of a block."""
        return self.nt * self.warps


def row_split(nrow):
    """(row blocks, row fragments of each) of a matrix of `nrow` rows."""
    fragments = (nrow + 15) // 16
    blocks = -(-fragments // TILES.most_rows)
    return blocks, -(-fragments // blocks)


def panel_rows(nrow):
    """Blocks of 8 rows that a panel of `nrow` rows is padded to."""
    blocks, mt = row_split(nrow)
    return 2 * blocks * mt


def reach_levels(count):
    """Numbers of row blocks that a tile of `count` has code for, the largest first: all of few, fewer of many."""
    return [n for n in range(count, 0, -1) if count <= 6 or n >= count - 3 or n % 2 == 0]


def turned_split(nrow):
    """(row blocks, blocks of 8 rows of each) of a turned tile for `nrow` rows."""
    blocks = -(-blocks_of_8(nrow) // TILES.most_rows)
    return blocks, -(-blocks_of_8(nrow) // blocks)


def turned_panel_rows(nrow):
    """Blocks of 8 rows that a panel for turned tiles is padded to."""
    return prod(turned_split(nrow))


def choose_tile(nrow, steps, unit):
    """The tile for `nrow` rows and `steps` inner blocks of 8 a primitive."""
    _, mt = row_split(nrow)
    return Tile(2 * mt, TILES.columns[mt - 1], TILES.warps, min(TILES.stages, steps + 1), unit)


def turned_tile(nrow, steps, unit):
    """A turned tile of step 4, or None where a tile of few rows would not save 8 of padding."""
    _, rows8 = turned_split(nrow)
    if blocks_of_8(nrow) < TILES.turned_rows and rows8 % 2 == 0:
        return None
    return turned_ket_tile(nrow, steps, unit)


def turned_ket_tile(nrow, steps, unit):
    """A turned tile of step 5."""
    _, rows8 = turned_split(nrow)
    return Tile(rows8, TILES.turned_columns[rows8 - 1], TILES.warps, min(TILES.stages, steps + 1), unit, True)


def r_stride(l):
    """Doubles from one quartet's r to the next: even, for 16-byte copies."""
    return (nherm(l) + 1) // 2 * 2


def r_group(l):
    """Threads that share one quartet in the r kernel above COLUMN_L: few, so that few idle at low degrees.

    Measured at L = 24, ns a quartet by 32, 64, 128, 256 threads: 117, 76, 61, 55.
    """
    return 128 if l <= 20 else 256


def r_threads(l):
    """Threads of a block of that kernel."""
    return max(R_THREADS, r_group(l))


def r_lanes(l):
    """Quartets of a warp that makes r by columns: as many as let three warps share a multiprocessor's memory."""
    return max(1, min(32, 1 << (R_BYTES // (8 * (nherm(l) | 1))).bit_length() - 1))


def r_column_bytes(l):
    """Shared memory of such a warp."""
    return 8 * r_lanes(l) * (nherm(l) | 1)


def r_column_blocks(l):
    """Warps that share a multiprocessor, by shared memory and by registers."""
    return max(1, min(8, 2 * SHARED_BYTES // r_column_bytes(l)))


def digest_shape(na, nb):
    """(functions a at a time, blocks of a multiprocessor, functions b at a time) of the digestion by columns."""
    rows = -(-na // -(-na // DIGEST_ROWS))
    return rows, DIGEST_BLOCKS[rows], min(nb, DIGEST_VALUES - rows)


def digest_stage(rows):
    """Bytes that a warp reads for one b: the integrals of all a, D_bd and D_bc of 32 columns, and D + D^T of all a."""
    return STAGE_ROW * (rows + 2) + 64


def digest_shared(rows, b_step):
    """Shared memory of a block: for each warp sums of 32 columns, and what is read now and next."""
    return DIGEST_THREADS // 32 * (DIGEST_ROW_BYTES * (rows + b_step) + 2 * digest_stage(rows) + 256)


def quartet_doubles(nb, nc, nd):
    """Doubles that a thread keeps which digests a quartet: D and X of a and of all b, D and Y of the ket."""
    return 2 * (nb + 1) * (nc + nd) + 2 * nc * nd


def quartet_blocks(na, nb, nc, nd):
    """Blocks of a multiprocessor that digest quartets, by registers and by shared memory."""
    by_registers = 65536 // DIGEST_THREADS // (2 * quartet_doubles(nb, nc, nd) + 64)
    return max(1, min(by_registers, 2 * SHARED_BYTES // (8 * na * nb * nc * nd * DIGEST_THREADS)))


def bra_pairs_of_a_warp(integrals, warps):
    """Bra pairs that a warp takes one after the other.

    By the integrals of a lane for each bra pair, and the number of warps if each took one.
    """
    return max(1, min(DIGEST_INTEGRALS // integrals, warps // DIGEST_WARPS))


def coulomb_chunk(nbra, blocks):
    """Bra primitives that a block goes through, `blocks` blocks each taking other ket primitives."""
    return max(1, min(COULOMB_BRAS, nbra, nbra * blocks // COULOMB_BLOCKS))


def coulomb_functions(count):
    """(functions p of a lane, warps that share the `count` functions of a bra primitive)."""
    groups = -(-count // (32 * COULOMB_FUNCTIONS))
    return -(-count // (32 * groups)), groups


def coulomb_kets(nket, warps):
    """Ket primitives that a warp goes through, `warps` warps each taking other functions of bra primitives."""
    return max(1, min(COULOMB_KETS, nket, nket * warps // COULOMB_WARPS))


def coulomb_warps(warp_bytes):
    """(warps of a block, its shared memory): four warps, or fewer where two blocks of four would not fit."""
    warps = max(1, min(COULOMB_THREADS // 32, SHARED_BYTES // warp_bytes))
    return warps, warps * warp_bytes


def coulomb_straight(l_bra, l_ket):
    """Whether a thread takes a primitive quartet with J in the Hermite basis."""
    return l_bra + l_ket <= COULOMB_STRAIGHT_L and nherm(l_bra) * nherm(l_ket) <= COULOMB_PRODUCTS

# On a GPU, shells of one class that differ in their numbers of primitives share lists up to this many, where a list for
# each number would give it less to do than a launch costs; more of them run faster apart.
MIXED_SHELLS = 40


# Most bytes of a block of integrals of J and K.
DIGEST_BLOCK_BYTES = 2 << 30
