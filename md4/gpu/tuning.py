"""Every tunable of the GPU kernels: tile ladders, thread counts, memory budgets."""

from dataclasses import dataclass
from typing import NamedTuple

from md4.method.mirror import r_count


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


@dataclass(frozen=True)
class ReverseTuning:
    """Sums over ket pairs for gradients.

    Those of `md4.gpu.kernels.reverse_sums`, then of `reverse_fused`, then of `reverse_lanes`.
    """

    most_rows: int  # blocks of 8 rows of a block of threads
    most_warps: int  # warps of a block of threads
    warps: int  # warps of a multiprocessor that have registers
    most_parts: int  # blocks of threads that divide the ket pairs of a chunk among them
    few_prims: int  # primitive pairs of the bra with which a chunk takes all ket pairs where it can
    most_fused: int  # most blocks of 8 rows of U and Z that a warp keeps, two blocks of columns each
    few_fused: int  # up to so many it keeps four blocks of columns
    most_words: int  # words that say where [q|p] is of a lane, up to which they are in registers
    registers: tuple  # of a thread, about, beside those of U, Z and one operand: with these words, and without
    least_warps: int  # warps that must share one by its shared memory
    steps: tuple  # (primitive quartets of a step, slots), the first for which shared memory has room
    lane_bytes: int  # of a lane a quartet: most bytes of shared memory of a warp
    lane_doubles: int  # most doubles of Z of a lane
    lane_products: int  # most products in its code
    lane_warps: int  # most warps that share the functions p
    fused_pieces: tuple  # of lists on tensor cores: fewest primitive quartets of a piece, pieces that fill a device
    lane_pieces: tuple  # the same of a lane a quartet

    def lane_blocks(self, nbytes, doubles):
        """Warps, each with so many bytes of shared memory, that share a multiprocessor."""
        return max(1, min(16 if doubles <= 8 else 12, 2 * SHARED_BYTES // nbytes))

    def blocks(self, doubles, words, warps):
        """Blocks of so many warps that share a multiprocessor, with so many doubles and words (0: in memory) of a lane.

        Each of the four parts of a multiprocessor has 512 registers for its warps' lanes; a few may be lacking.
        """
        registers = 2 * doubles + words + self.registers[0 if words else 1]
        return max(1, 4 * int(512 / registers + 0.3) // warps)


REVERSE = ReverseTuning(
    most_rows=8, most_warps=8, warps=8, most_parts=16, few_prims=512, most_fused=16, few_fused=7,
    most_words=28, registers=(56, 104), least_warps=8, steps=((8, 2), (4, 2), (2, 2), (1, 2), (1, 1)),
    lane_bytes=16 << 10, lane_doubles=40, lane_products=1000, lane_warps=5,
    fused_pieces=(32, 6000), lane_pieces=(256, 12000),
)  # fmt: skip
# Shared memory of a block that still lets two share a multiprocessor.
SHARED_BYTES = 112 << 10


@dataclass(frozen=True)
class WholePanelTuning:
    """Step 4 with panels of H in shared memory (`md4.gpu.kernels.whole_panel`)."""

    panel_bytes: int  # most bytes of a panel of an uncontracted bra
    groups: int  # blocks of columns that a block of threads takes one after the other then, about
    contracted_rows: int  # most blocks of 8 functions ab of contracted bras
    columns: tuple  # of these, blocks of 8 columns of a warp for 1, 2, ... blocks of 8 rows
    blocks: tuple  # blocks of threads that share a multiprocessor, for the same
    ahead: tuple  # whether [p|q] is gathered a step ahead, for the same
    stages: tuple  # primitive pairs whose H and r shared memory has room for, for the same


WHOLE_PANEL = WholePanelTuning(
    panel_bytes=64 << 10, groups=8, contracted_rows=5, columns=(8, 8, 8, 6, 6), blocks=(4, 4, 3, 3, 2),
    ahead=(False, False, True, True, True), stages=(3, 2, 2, 2, 2),
)


@dataclass(frozen=True)
class SumsTuning:
    """Sums of r over the primitives of kets of two s shells."""

    warps: int  # warps of a block
    most_warps: int  # up to which several warps share a ket pair, where there are few
    l: int  # highest L of sums that are made with r (`md4.gpu.kernels.summed_r`)
    fewest: int  # fewest such sums
    most_blocks: int  # most warps of a multiprocessor that make them

    def blocks(self, l):
        """Warps of a multiprocessor that make sums with r up to L = `l`, by shared memory."""
        return max(1, min(self.most_blocks, 2 * SHARED_BYTES // RECURRENCE.stage(l)))


SUMS = SumsTuning(warps=8, most_warps=16896, l=14, fewest=1 << 14, most_blocks=16)


@dataclass(frozen=True)
class FusedTuning:
    """Both products in one kernel."""

    rows: int  # most fragments of 16 rows ab
    doubles: int  # doubles of accumulators that a lane has registers for
    columns: int  # most blocks of 8 cd
    contracted_columns: int  # the same for contracted bras of two fragments of rows
    blocks: int  # fewest blocks that share a multiprocessor
    part_products: int  # most blocks of 8 q times blocks of 8 cd of a part, with which four share one
    panels: int  # primitives of a bra whose H is in shared memory at once, if it can be
    kets: int  # fewest ket pairs that a warp takes one after the other
    at_once: tuple  # ket pairs of a group, one primitive pair each, for 1, 2, ... fragments of rows: the first that fit
    contracted_at_once: tuple  # the same for contracted bras
    group_doubles: int  # doubles of accumulators up to which several ket pairs fit
    groups: int  # such groups that a warp takes one after the other
    contracted_groups: int  # the same for contracted bras
    ahead_doubles: int  # doubles of H[cd, q] of a group up to which they are fetched before the products
    primitives: int  # most primitive quartets of a quartet, which a warp goes through one after the other
    write_rounds: int  # doubles that a lane writes at a time


FUSED = FusedTuning(
    rows=2, doubles=80, columns=5, contracted_columns=4, blocks=2, part_products=19, panels=4, kets=8,
    at_once=((4, 2, 1), (2, 1)), contracted_at_once=((3, 2, 1), (2, 1)), group_doubles=48, groups=8,
    contracted_groups=4, ahead_doubles=16, primitives=32, write_rounds=10,
)  # fmt: skip


@dataclass(frozen=True)
class FusedWideTuning:
    """The same where several warps may share a quartet (`md4.gpu.kernels.fused_wide`)."""

    shares: tuple  # warps that may share one, powers of 2; the first with a tile
    functions: int  # fewest functions ab, and cd
    fragments: int  # most fragments of 16 rows ab
    doubles: tuple  # most doubles of accumulators of a lane, for 1, 2, ... fragments of a warp
    columns: int  # most blocks of 8 cd
    least_q: int  # fewest blocks of 8 q at a time, if there are as many
    warps: tuple  # (warps of a block, blocks that share a multiprocessor); the first that shared memory holds
    kets: int  # fewest ket pairs that the warps of a quartet take one after the other


FUSED_WIDE = FusedWideTuning(
    shares=(1, 2), functions=21, fragments=4, doubles=(72, 72, 84), columns=8, least_q=2, warps=((4, 2), (8, 1)), kets=8
)


@dataclass(frozen=True)
class DigestTuning:
    """Digestion of blocks into J and K."""

    threads: int  # threads of a block
    warps: int  # fewest warps that must be left when each takes several bra pairs one after the other
    block_bytes: int  # most bytes of a block of integrals


@dataclass(frozen=True)
class DigestRowsTuning:
    """Digestion by warps (`md4.gpu.kernels.digest_rows`)."""

    rows: int  # most functions a, and b, of a tile
    tile: int  # most integrals of a tile
    blocks: tuple  # (blocks that share a multiprocessor, most doubles of a thread in registers)
    sum_row: int  # bytes from one row of 2 x 32 parts of X to the next; a multiple of 128 would put them in one bank
    lane_integrals: int  # most integrals of a lane in several bra pairs


@dataclass(frozen=True)
class DigestMirroredTuning:
    """Digestion of even and odd parts (`md4.gpu.kernels.digest_mirrored`)."""

    blocks: tuple  # (blocks that share a multiprocessor, most doubles of a thread in registers)
    lane_integrals: int  # most integrals of a lane in several bra pairs


@dataclass(frozen=True)
class DigestQuartetsTuning:
    """Digestion by the threads that make the integrals (`md4.gpu.kernels.digest_in_place`)."""

    integrals: int  # most integrals of a quartet
    lane_integrals: int  # most integrals of a lane in an item
    lane_quartets: int  # most quartets of a lane in an item
    items: int  # so many items should be there before each has several quartets of a lane
    blocks: int  # most blocks that share the items
    run: int  # most lanes with the same shell c that add up their parts of X first, a power of 2


DIGEST = DigestTuning(threads=128, warps=8448, block_bytes=2 << 30)
DIGEST_ROWS = DigestRowsTuning(
    rows=7, tile=35, blocks=((6, 17), (5, 23), (4, 41), (3, 63)), sum_row=520, lane_integrals=256
)
DIGEST_MIRRORED = DigestMirroredTuning(blocks=((6, 17), (5, 23), (4, 41), (3, 63)), lane_integrals=256)
DIGEST_QUARTETS = DigestQuartetsTuning(
    integrals=135, lane_integrals=512, lane_quartets=16, items=16896, blocks=8448, run=8
)


@dataclass(frozen=True)
class SelectTuning:
    """Lists of surviving quartets (`md4.gpu.kernels.select_quartets`)."""

    threads: int  # threads of a block
    blocks: int  # blocks that share a multiprocessor
    shared: int  # most bytes of shared memory of a block
    entries: int  # most entries of a launch
    single_ratio: float  # quartets below this many tolerances are computed in single precision; 0: none
    single_seconds: float  # predicted time of rows from which on a variant in single precision is worth its compilation


SELECT = SelectTuning(
    threads=256, blocks=5, shared=160 << 10, entries=1 << 26, single_ratio=1e5, single_seconds=5e-4
)


@dataclass(frozen=True)
class ShellOrderTuning:
    """Lists of pairs that are sorted by shells where their Schwarz bounds reach the same power of 2^bound_step."""

    functions: int  # most functions ab of such pairs
    bound_step: int  # the larger, the more neighbours share a shell, and the more quartets are asked in vain


SHELL_ORDER = ShellOrderTuning(functions=25, bound_step=2)


@dataclass(frozen=True)
class HermiteCoulombTuning:
    """J in the Hermite basis (`md4.gpu.kernels.hermite_coulomb`)."""

    threads: int  # threads of a block
    thread_l: int  # highest L of two degrees of which a thread takes a primitive quartet
    mirrored_thread_l: int  # the same where all centres lie in a plane
    gradient_thread_l: int  # and that of J of gradients, which compile such kernels for themselves
    thread_ket_l: int  # and highest l of the ket
    ket_functions: int  # most functions q of the ket whose D_q and J_q are in registers at once
    staged_l: int  # L from which on r is in shared memory in FP64
    staged_single_l: int  # the same in FP32
    mirrored_staged_l: int  # both where all centres lie in a plane
    mirrored_staged_single_l: int
    thread_blocks: int  # blocks that a launch should have before each takes several bra primitives
    thread_bras: int  # most bra primitives of a block, about
    thin: int  # a block goes through so many times as many, most of which do not count, at most
    single_ratio: float  # quartets below this many tolerances are computed in single precision; 0: none
    single_l: int  # highest L in single precision
    fewest_singles: int  # primitive quartets that a launch in single precision should have, about
    lane_functions: int  # most Hermite functions p of a lane where a warp takes a bra primitive
    warps: int  # warps that a launch should have before each takes several ket primitives
    warp_kets: int  # most ket primitives of a warp
    r_bytes: int  # bytes of r of a chunk
    fewest_blocks: tuple  # blocks of threads that a multiprocessor is to hold in FP64, for L = 0, 1, ...
    fewest_single_blocks: tuple  # the same in FP32
    mirrored_blocks: tuple  # both where all centres lie in a plane
    mirrored_single_blocks: tuple

    def blocks(self, l, single, mirrored):
        """Blocks that a multiprocessor is to hold at once where a thread takes a primitive quartet."""
        blocks = self.fewest_single_blocks if single else self.fewest_blocks
        if mirrored:
            blocks = self.mirrored_single_blocks if single else self.mirrored_blocks
        return blocks[min(l, len(blocks) - 1)]

    def first_staged(self, single, mirrored):
        """L from which on r is in shared memory."""
        if mirrored:
            return self.mirrored_staged_single_l if single else self.mirrored_staged_l
        return self.staged_single_l if single else self.staged_l


HERMITE_COULOMB = HermiteCoulombTuning(
    threads=128, thread_l=12, mirrored_thread_l=12, gradient_thread_l=9, thread_ket_l=6, ket_functions=35,
    staged_l=7, staged_single_l=9, mirrored_staged_l=8, mirrored_staged_single_l=10, thread_blocks=8192,
    thread_bras=64, thin=4, single_ratio=1e5, single_l=12, fewest_singles=1 << 21, lane_functions=5,
    warps=16896, warp_kets=32, r_bytes=256 << 20,
    fewest_blocks=(5, 5, 5, 4, 3, 2), fewest_single_blocks=(8, 7, 6, 6, 5, 4, 3, 2),
    mirrored_blocks=(5, 5, 5, 4, 3, 2), mirrored_single_blocks=(8, 7, 6, 6, 5, 4, 3, 2),
)  # fmt: skip


@dataclass(frozen=True)
class TracksTuning:
    """Streams of a build of J and K (`md4.gpu.tracks`)."""

    count: int  # most of them
    seconds: float  # predicted time of a task up to which it may go to any of them; longer ones fill the device alone
    nbytes: int  # most bytes of a block of integrals, and of r and (ab|q] of a chunk, but on track 0
    share: int  # bytes that must be free for each track but track 0

    def number(self, left):
        """How many tracks there may be where so many bytes may be used."""
        return max(1, min(self.count, 1 + left // self.share))


TRACKS = TracksTuning(count=6, seconds=2e-3, nbytes=512 << 20, share=4 << 30)


@dataclass(frozen=True)
class AssemblerTuning:
    """Kernels that spill many registers as the assembler usually orders their instructions (`md4.gpu.compile`)."""

    stack: int  # bytes of local memory of a thread from which on other options are tried
    left: float  # share of them that may be left for these to be taken
    options: tuple  # of the assembler, in turn: fewer registers are aimed at; hardly any reordering


ASSEMBLER = AssemblerTuning(stack=600, left=0.6, options=(("--register-usage-level=0",), ("-O1",)))


@dataclass(frozen=True)
class UnpackTuning:
    """Rows of pairs of AOs as symmetric matrices (`md4.gpu.kernels.unpack`)."""

    threads: int  # threads of a block, a multiple of 32
    rows: int  # rows of the table that a block takes
    blocks: int  # blocks that a multiprocessor is to hold at once
    sums_blocks: int  # the same of the kernel that also makes sums, which needs more registers


UNPACK = UnpackTuning(threads=256, rows=8, blocks=5, sums_blocks=4)

# (ab|q] and r of one chunk take about this many bytes, far beyond the L2 cache: short launches lose more in their tails
# than the cache saves.
CHUNK_BYTES = 2 << 30


@dataclass(frozen=True)
class RecurrenceTuning:
    """How r is made: `md4.gpu.kernels.recurrence`."""

    registers_l: int  # highest L whose r a thread makes in registers
    axis_l: int  # highest L whose r a lane makes axis by axis; a group of threads above
    threads: int  # of a block, in registers
    stage_bytes: int  # most shared memory of a warp, axis by axis: three warps share a multiprocessor's
    small_group: int  # threads that share a quartet up to `small_group_l`: few, so that few idle at low degrees
    large_group: int  # above
    small_group_l: int  # highest L of the small group

    def lanes(self, l, even=False):
        """Quartets of a warp that makes r axis by axis, a power of 2; the arguments are those of `r_count`."""
        return max(1, min(32, 1 << (self.stage_bytes // (8 * (r_count(l, even) | 1))).bit_length() - 1))

    def stage(self, l, even=False):
        """Bytes of shared memory of such a warp."""
        return 8 * self.lanes(l, even) * (r_count(l, even) | 1)

    def warps(self, l, even=False):
        """Such warps of a multiprocessor, by shared memory and by registers."""
        return max(1, min(8, 2 * SHARED_BYTES // self.stage(l, even)))

    def group(self, l):
        """Threads that share a quartet."""
        return self.small_group if l <= self.small_group_l else self.large_group

    def group_threads(self, l):
        """Threads of a block of such groups."""
        return max(self.threads, self.group(l))


RECURRENCE = RecurrenceTuning(
    registers_l=4, axis_l=18, threads=128, stage_bytes=75 << 10, small_group=128, large_group=256,
    small_group_l=20,
)  # fmt: skip


class QuartetLimits(NamedTuple):
    """Classes and memory of a thread a quartet on a kind of device."""

    integrals: int  # most integrals of a quartet
    one_product_integrals: int  # the same where one product would do, since one side has a single Hermite function
    l: int  # highest L
    shared: int  # bytes of shared memory of a block


@dataclass(frozen=True)
class ThreadQuartetTuning:
    """A thread a quartet: `md4.gpu.kernels.thread_quartet`."""

    threads: int  # of a block, half of them where integrals take more shared memory
    integrals_at_once: int  # in registers
    blocks_of_doubles: tuple  # that digest in place: (highest L, most integrals, blocks a multiprocessor), else one
    blocks_of_singles: tuple  # the same in FP32: blocks for L = 0, 1, ...
    least_rows: int  # ab that are in registers at once, however many integrals that are
    least_single_rows: int  # the same in FP32
    swap_l: int  # L from which on the side of higher l is made the bra
    few_l: int  # l of a pair up to which single shells with it are the rows of a matrix, and `few_blocks` hold
    few_blocks: tuple  # (highest L, most integrals, blocks a multiprocessor, and in a matrix); all others have one
    primitives: int  # most bra primitives whose H is in shared memory at once
    fewest_quartets: int  # that are worth a variant
    written: int  # integrals of a quartet up to which a thread writes `rounds` of them at a time
    rounds: int
    tensor: QuartetLimits  # devices with FP64 tensor cores, which make the other kernels fast
    plain: QuartetLimits  # devices without, whose blocks also have less shared memory

    def limits(self, unit):
        """`QuartetLimits` for an arithmetic unit."""
        return self.plain if unit == "fma" else self.tensor

    def rows_at_once(self, ncd, single=False):
        """Rows ab whose `ncd` integrals are in registers at once."""
        return max(self.least_single_rows if single else self.least_rows, self.integrals_at_once // ncd)

    def blocks_in_place(self, l, count, single):
        """Blocks that a multiprocessor is to hold at once where quartets of `count` integrals are digested in place.

        `l` is their total angular momentum. Not more than shared memory has room for the integrals of.
        """
        if single:
            blocks = self.blocks_of_singles[min(l, len(self.blocks_of_singles) - 1)]
        else:
            fits = (entry for entry in self.blocks_of_doubles if l <= entry[0] and count <= entry[1])
            blocks = next((entry[2] for entry in fits), 1)
        nbytes = (4 if single else 8) * self.block_threads(count, single) * count
        return max(1, min(blocks, 2 * SHARED_BYTES // nbytes))

    def blocks(self, l, count, matrix):
        """Blocks a multiprocessor, of `few_blocks`; the `count` integrals are a part of a `matrix`, or not."""
        fits = (entry for entry in self.few_blocks if l <= entry[0] and count <= entry[1])
        return next((entry[3] if matrix else entry[2] for entry in fits), 1)

    def block_threads(self, count, single=False):
        """Threads of a block for `count` integrals each, which wait in shared memory: two blocks a multiprocessor."""
        return self.threads if (4 if single else 8) * self.threads * count <= SHARED_BYTES else self.threads // 2


THREAD_QUARTET = ThreadQuartetTuning(
    threads=128, integrals_at_once=27, blocks_of_doubles=((6, 9, 5), (6, 15, 4), (6, 27, 3), (4, 45, 3)),
    blocks_of_singles=(5, 5, 5, 4, 4, 3, 2), least_rows=3, least_single_rows=6, swap_l=5, few_l=2,
    few_blocks=((2, 9, 5, 5), (4, 27, 4, 4), (4, 45, 4, 3)), primitives=32, fewest_quartets=1 << 16, written=15,
    rounds=4, tensor=QuartetLimits(135, 40, 6, 160 << 10), plain=QuartetLimits(54, 54, 4, 60 << 10),
)  # fmt: skip


# On a GPU, shells of one class that differ in their numbers of primitives share lists up to this many, where a list for
# each number would give it less to do than a launch costs; more of them run faster apart.
MIXED_SHELLS = 40

# The highest l of a basis from which on planar molecules are turned into a plane of constant z for J and K.
PLANE_L = 3
