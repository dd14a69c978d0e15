"""How a class is computed: which side is transformed first, by which kernels, with H matrices in which form."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What a backend decides for a bra and a ket list.

    Attributes
    ----------
    swap : bool
        The ket is transformed first: bra and ket change names, by (ab|cd) = (cd|ab).
    kernels : {'two', 'fused', 'single', 'low'}
        A kernel for each transform, one for both, one product where the ket has no angular momentum, or one kernel for
        all steps.
    bra_form, ket_form : str
        Forms of the H matrices of the side transformed first and second.
    """

    swap: bool
    kernels: str = "two"
    bra_form: str = "bra"
    ket_form: str = "ket"


def bra_first_flops(bra, ket):
    """FLOP of both transforms when the bra goes first: 2 N_ab Q (P + N_cd), P and Q over all primitives."""
    p, q = bra.mean_prim * bra.nherm, ket.mean_prim * ket.nherm
    return 2 * bra.nab * q * (p + ket.nab)


def cheaper_swapped(bra, ket):
    """Whether transforming the ket first costs fewer operations."""
    return bra_first_flops(ket, bra) < bra_first_flops(bra, ket)


def single_swapped(bra, ket):
    """Whether the bra is the side of two s shells, with more primitives if both are; None where neither is."""
    plain = [side.mean_prim for side in (bra, ket) if side.nherm == 1]
    if not plain:
        return None
    return bra.nherm == 1 and (ket.nherm > 1 or plain[0] > plain[1])


def chunks(nbra, nket, chunk_bra, chunk_ket):
    """Slices of bra and ket pairs that cover nbra x nket."""
    for i in range(0, nbra, chunk_bra):
        for k in range(0, nket, chunk_ket):
            yield slice(i, min(i + chunk_bra, nbra)), slice(k, min(k + chunk_ket, nket))
