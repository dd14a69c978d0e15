"""Tunable numbers that several modules share; all others stand beside the kernels that they are for."""

from dataclasses import dataclass

# Blocks that a launch should have, to fill the device: four for each multiprocessor.
FEWEST_BLOCKS = 528


@dataclass(frozen=True)
class ReverseTuning:
    """Sums over ket pairs for gradients.

    Those of `md4.gpu.kernels.reverse_sums`, then of `reverse_fused`, then of `reverse_lanes`.
    """

    most_rows: int  # blocks of 8 rows of a block of threads
    most_warps: int  # warps of a block of threads
    most_parts: int  # blocks of threads that divide the ket pairs of a chunk among them
    few_prims: int  # primitive pairs of the bra with which a chunk takes all ket pairs where it can
    most_fused: int  # most blocks of 8 rows of U and Z that a warp keeps, two blocks of columns each
    most_singles: int  # the same in TF32, with four blocks of columns
    bra_rows: tuple  # blocks of 8 rows ab of the variants; others are filled up to the next of these
    most_words: int  # words that say where [q|p] is of a lane, up to which they are in registers
    ends_together: tuple  # ends of kets of few functions, those of each member in one variant, the longest ones last
    registers: tuple  # of a thread, about, beside those of U, Z and one operand: with these words, and without
    least_warps: int  # warps that must share one by its shared memory
    steps: tuple  # (primitive quartets of a step, slots), the first for which shared memory has room
    lane_functions: int  # most Hermite functions of derivatives, which are in lanes then
    lane_numbers: int  # most numbers of Z and W of a lane
    lane_registers: tuple  # of a lane, about, for each number of Z and W, and others
    fused_pieces: tuple  # of lists on tensor cores: fewest primitive quartets of a piece, pieces that fill a device
    lane_pieces: tuple  # the same of a lane a quartet
    single_ratio: float  # quartets below this many tolerances are computed in TF32; 0: none
    single_share: float  # part of the predicted time of all lists from which on a variant in TF32 is compiled
    single_seconds: float  # and its predicted time
    single_variants: float  # how many times as much all such variants must have, for there to be any

    @staticmethod
    def resident_warps(needs):
        """Warps that share a multiprocessor where a thread needs so many registers.

        Each of its four parts has 512 for a lane of each of its warps.
        """
        return 4 * max(1, int(512 / needs))

    def registers_for(self, needs):
        """Registers that a thread then gets at most, in eights."""
        return min(255, 2048 // self.resident_warps(needs) // 8 * 8)


REVERSE = ReverseTuning(
    most_rows=8, most_warps=8, most_parts=16, few_prims=512, most_fused=16,
    most_singles=13, bra_rows=(1, 2, 4, 8), most_words=28, ends_together=(
        ((1,), (2,), (3,)), ((1, 2), (2, 2), (2, 3), (3, 3), (2, 5)), ((2, 3, 3), (2, 4, 5), (3, 4, 5), (4, 4, 5)),
        ((2, 4, 4, 5), (3, 6, 7, 7)),
    ),
    registers=(58, 104), least_warps=8, steps=((8, 2), (4, 2), (2, 2), (1, 2), (1, 1)),
    lane_functions=35, lane_numbers=95, lane_registers=(1.7, 51),
    fused_pieces=(32, 6000), lane_pieces=(256, 12000), single_ratio=2e4, single_share=0.01,
    single_seconds=1e-3, single_variants=5,
)  # fmt: skip

# Shared memory of a block that still lets two share a multiprocessor.
SHARED_BYTES = 112 << 10


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

# Most bytes of a block of integrals, and of r and (ab|q] of a chunk, on tracks but track 0.
TRACK_BYTES = 512 << 20
# (ab|q] and r of one chunk take about this many bytes, far beyond the L2 cache: short launches lose more in their tails
# than the cache saves.
CHUNK_BYTES = 2 << 30
