"""Derivatives of whole AO tensors, in PySCF's order and under its names.

The nabla of (nabla i j|kl) acts on the coordinates of the electron, so that the integral is minus the derivative by the
centre of i. A derivative of a shell pair is a sum of Hermite functions, as the pair is (`md4.method.derivatives`). So
lists of derivatives with lists of shell pairs are blocks of integrals like others, and from an unordered pair {a, b}
come both (nabla a b| and (nabla b a|.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from md4.contract.tensor import Request, cut_pieces
from md4.contract.three_centre import tensor_request
from md4.errors import ArgumentError
from md4.method.derivatives import OF_A, OF_B
from md4.method.operators import check_order
from md4.method.scatter import DerivativeLayout, ao_ranges
from md4.plan import ListPair
from md4.shells.shell_pairs import unique_pairs_by_class
from md4.support.arguments import checked_choice

# Number of indices and symmetries of each tensor.
TENSORS = {
    "int2e_ip1": (4, ("s1", "s2kl")), "int3c2e_ip1": (3, ("s1",)), "int3c2e_ip2": (3, ("s1", "s2ij")),
    "int2c2e_ip1": (2, ("s1",)),
}  # fmt: skip


@dataclass(frozen=True)
class DerivativeRequest(Request):
    """The part of a tensor of derivatives that is requested.

    Attributes
    ----------
    aosym : str
        The name of the integral and its symmetry.
    ranges : tuple
        The shells (first, last + 1) of the pairs with derivatives, then those of the others.
    ends : tuple of int, optional
        Rows of a triangle of the others, as in `Request`.
    in_triangle, last : bool
        As those of `DerivativeLayout`.
    """

    in_triangle: bool = False
    last: bool = False

    @classmethod
    def of_name(cls, basis, name, aosym, shls_slice):
        """A request by PySCF's name of the integral; `basis` has the unit function for fewer than four indices.

        Raises
        ------
        ArgumentError
            The symmetry is unknown or the slice impossible.
        UnsupportedError
            The angular momenta add up to 32 or more.
        """
        indices, symmetries = TENSORS[name]
        aosym, last = checked_choice("aosym", aosym, symmetries), name.endswith("ip2")
        if indices == 4:
            whole = Request.checked(basis, "s1", shls_slice)
            if aosym == "s2kl" and whole.ranges[2] != whole.ranges[3]:
                raise ArgumentError("aosym 's2kl' needs equal ranges for k and l; use 's1' otherwise.")
        else:
            whole = tensor_request(basis, aosym, shls_slice, ((0, len(basis.parts[0])),) * indices)
        ranges = (*whole.ranges[2:], *whole.ranges[:2]) if last else whole.ranges
        check_order(sum(int(basis.classes[slice(*shells), 0].max()) for shells in ranges), derivative=1)
        return cls(f"{name} {aosym}", ranges, whole.ends, aosym != "s1", last)

    def layout(self, basis):
        """`DerivativeLayout` of the tensor over a basis."""
        singles = tuple(side[1][0] == basis.unit for side in (self.ranges[:2], self.ranges[2:]))
        return DerivativeLayout(
            self.aosym, ao_ranges(basis, self.ranges), singles, self.in_triangle, self.last, self.ends
        )

    def derived_pairs(self, basis):
        """Lists of shell pairs by the derivatives that the tensor has of them, a dict."""
        found, (rows, cols) = {OF_A + OF_B: [], OF_A: [], OF_B: []}, self.ranges[:2]
        for pairs in unique_pairs_by_class(basis, np.arange(*rows), np.arange(*cols)):
            in_rows, in_cols = ((first <= pairs) & (pairs < last) for first, last in (rows, cols))
            of_a, of_b = in_rows[:, 0] & in_cols[:, 1], in_rows[:, 1] & in_cols[:, 0]
            for derivatives, chosen in zip(found, (of_a & of_b, of_a & ~of_b, of_b & ~of_a)):
                if chosen.any():
                    found[derivatives].append(pairs[chosen])
        return found

    def others(self, basis):
        """Lists of shell pairs without derivatives."""
        return unique_pairs_by_class(basis, *(np.arange(*shells) for shells in self.ranges[2:]))

    def lists(self, basis, layout):
        """As those of `Request`."""
        return [*chain.from_iterable(self.derived_pairs(basis).values()), *self.others(basis)]

    def work(self, engine, layout, block_bytes, hermite_bytes):
        """As that of `Request`; the bras are derivatives."""
        basis, sizes = engine.bra_basis, (block_bytes, hermite_bytes)
        derived, others = self.derived_pairs(basis).items(), self.others(basis)
        bras = [piece for these, lists in derived for piece in cut_pieces(engine, lists, *sizes, these)]
        return [ListPair(bra, ket, same=False) for ket in cut_pieces(engine, others, *sizes) for bra in bras]
