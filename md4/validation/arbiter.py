"""Decides by the oracle (`md4.validation.oracle`) which of md4 and libcint is right where they differ.

The error of libcint grows with the angular momentum and, for erfc, from d functions on. Therefore a difference alone
says nothing. The oracle needs mpmath and some seconds for an element, so it computes single elements of a few quartets.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from md4.method.angular import component_coefficients
from md4.validation.libcint import FLOOR, sides

MOST_RULINGS = 2  # largest number for a class
MOST_COST = 20000  # largest estimated work for one element, in the unit of `cost`
MISSING = "mpmath is not installed; pip install mpmath"


def load_oracle():
    """The module `md4.validation.oracle`, or None without mpmath."""
    try:
        from md4.validation import oracle as reference
    except ImportError:
        return None
    return reference


@dataclass(frozen=True)
class Ruling:
    """What the oracle says about one element.

    Attributes
    ----------
    label : str
        The class.
    quartet : md4.validation.libcint.Quartet
    exact : float or None
        The element; None if the oracle was not used.
    reason : str
        Why the oracle was not used.
    """

    label: str
    quartet: object
    exact: float | None = None
    reason: str = ""

    @property
    def md4_error(self):
        """md4's absolute error, in Hartree; NaN if unknown."""
        return np.nan if self.exact is None else abs(self.quartet.ours - self.exact)

    @property
    def libcint_error(self):
        """libcint's absolute error, in Hartree; NaN if unknown."""
        return np.nan if self.exact is None else abs(self.quartet.theirs - self.exact)

    def md4_passes(self, tolerance, abs_tolerance):
        """Whether the error of md4 is within both tolerances, where the relative one includes the floor of rounding.

        See `md4.validation.libcint`.
        """
        allowed = max(tolerance * self.quartet.largest, FLOOR * self.quartet.bound)
        return bool(self.md4_error <= min(allowed, abs_tolerance))

    @property
    def who(self):
        """Which of md4 and libcint is nearer to the oracle."""
        if self.exact is None:
            return f"open: {self.reason}"
        if np.isnan(self.md4_error):
            return "libcint"
        if self.md4_error == self.libcint_error:
            return "both"
        return "md4" if self.md4_error < self.libcint_error else "libcint"


def cost(shells, pure, element):
    """Estimate of the work of the oracle for one element: primitive quartets times products of monomials."""
    sizes = [np.count_nonzero(abs(c) > 1e-14, axis=0) for c in (component_coefficients(s.l, pure) for s in shells)]
    terms = prod(int(n[i % len(n)]) for n, i in zip(sizes, element))
    return prod(s.nprim for s in shells) * (5 + terms)


def as_quartet(items, one):
    """What belongs to (ab|cd), (ab|c) or (a|b), as four items for (ab|cd), (ab|c 1) or (a 1|b 1)."""
    bra, ket = sides(items)
    return [*bra, *[one] * (2 - len(bra)), *ket, *[one] * (2 - len(ket))]


def rule(label, basis, operator, quartet):
    """The `Ruling` on the worst element of a quartet."""
    oracle = load_oracle()
    if oracle is None:
        return Ruling(label, quartet, reason=MISSING)
    shells = [basis.shells[i] for i in quartet.shells]
    if cost(shells, basis.pure, quartet.element) > MOST_COST:
        return Ruling(label, quartet, reason="too many primitives for the oracle")
    parameter = operator.parameter or None
    shells, element = as_quartet(shells, None), as_quartet(quartet.element, 0)
    exact = oracle.eri(shells, basis.pure, (operator.kind, parameter), [element], dps=30)[0]
    return Ruling(label, quartet, float(exact))


def rule_on(record, basis, operator):
    """Rulings on the worst disputed quartets of a record."""
    disputed = [q for q in record.worst if q.excess > 1]
    return [rule(record.label, basis, operator, q) for q in disputed[:MOST_RULINGS]]
