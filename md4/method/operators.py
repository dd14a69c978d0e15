"""Two-electron operators g(r12) as users name them; [0]^(m) of each is defined in `md4.method.zeros`."""

from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import ClassVar, TypeAlias

from md4.errors import ArgumentError, UnsupportedError
from md4.method.boys import MMAX
from md4.method.zeros import DEFINITIONS
from md4.support.arguments import checked_real, real_number, shown

OPERATORS = tuple(DEFINITIONS)
KINDS = ", ".join(map(repr, OPERATORS))
SMALLEST, LARGEST = 1e-20, 1e20  # of an operator's parameter, so that no intermediate value over- or underflows


@dataclass(frozen=True)
class Operator:
    """A two-electron operator.

    Attributes
    ----------
    kind : str
        One of `OPERATORS`.
    parameter : float
        omega or zeta in atomic units; 0 for operators that have none.

    Examples
    --------
    >>> import md4
    >>> md4.Operator.erf(0.3)
    Operator(kind='erf', parameter=0.3)
    >>> md4.Operator("yukawa", 1.2)
    Operator(kind='yukawa', parameter=1.2)
    >>> md4.Operator.from_omega(-0.3)
    Operator(kind='erfc', parameter=0.3)
    """

    kind: str = "coulomb"
    parameter: float = 0.0

    def __post_init__(self) -> None:
        checked_kind(self.kind)
        object.__setattr__(self, "parameter", checked_parameter(self.kind, self.parameter))

    @classmethod
    def coulomb(cls) -> "Operator":
        """1/r"""
        return cls("coulomb")

    @classmethod
    def erf(cls, omega: float) -> "Operator":
        """erf(omega r)/r, the long range"""
        return cls("erf", omega)

    @classmethod
    def erfc(cls, omega: float) -> "Operator":
        """erfc(omega r)/r, the short range"""
        return cls("erfc", omega)

    @classmethod
    def yukawa(cls, zeta: float) -> "Operator":
        """exp(-zeta r)/r"""
        return cls("yukawa", zeta)

    @classmethod
    def slater(cls, zeta: float) -> "Operator":
        """exp(-zeta r)"""
        return cls("slater", zeta)

    @classmethod
    def gaussian(cls, omega: float) -> "Operator":
        """exp(-omega r^2)"""
        return cls("gaussian", omega)

    @classmethod
    def gaussian_coulomb(cls, omega: float) -> "Operator":
        """exp(-omega r^2)/r"""
        return cls("gaussian_coulomb", omega)

    @classmethod
    def from_omega(cls, omega: float | None) -> "Operator":
        """PySCF's convention: 0 or None is the full Coulomb operator, omega > 0 is erf, omega < 0 is erfc."""
        value = checked_omega(omega)
        return cls.coulomb() if value == 0 else cls.erf(value) if value > 0 else cls.erfc(-value)


@dataclass(frozen=True)
class Mixture:
    """(alpha + beta erf(omega r))/r, whose [0]^(m) are summed; for gradients on the CPU, not for blocks of integrals.

    Its Fourier transform is that of 1/r times alpha + beta exp(-k^2 / 4 omega^2), which lies between alpha and alpha +
    beta. So whatever the signs are, max(|alpha|, |alpha + beta|) times a Schwarz bound of 1/r is a bound.
    """

    kind: ClassVar[str] = "mixture"
    omega: float
    alpha: float
    beta: float

    @property
    def parameter(self):
        """What the loops of this operator take in place of a number."""
        return self.omega, self.alpha, self.beta


# What `as_operator` takes.
OperatorLike: TypeAlias = Operator | str | tuple[str, float]


def as_operator(value: OperatorLike) -> Operator:
    """An `Operator`, given as an `Operator`, a kind that needs no parameter, or a pair (kind, parameter)."""
    if isinstance(value, Operator):
        return value
    if isinstance(value, str):
        return Operator(value)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return Operator(*value)
    way = f"pass an Operator, 'coulomb', or (kind, parameter), kind one of {KINDS}"
    raise ArgumentError(f"operator {shown(value)}: {way}.")


def check_order(L, derivative=0):
    """UnsupportedError if the total angular momentum `L` and a `derivative` of it exceed the order of the tables."""
    most = MMAX - derivative
    if L > most:
        raise UnsupportedError(
            f"the angular momenta of a quartet add up to L = {L}, beyond the limit of {most}"
            f"{' for derivatives' if derivative else ''}: leave out the shells of highest angular momentum, so that no "
            f"four of them exceed {most}."
        )


def checked_kind(kind):
    """Returns `kind`; ArgumentError, which lists the kinds, if it is not one of them."""
    if not isinstance(kind, str) or kind not in OPERATORS:
        raise ArgumentError(f"unknown operator {shown(kind)}: the operators are {KINDS}.")
    return kind


def checked_parameter(kind, parameter):
    """`parameter` as a float; ArgumentError if `kind` cannot use it."""
    value, name = real_number(parameter), DEFINITIONS[kind].parameter
    if not isfinite(value):
        raise ArgumentError(f"operator parameter {shown(parameter)} is not a finite real number.")
    if name is None:
        if value != 0:
            raise ArgumentError(f"operator {kind!r} takes no parameter, but got {parameter!r}: leave it out.")
    elif not SMALLEST <= value <= LARGEST:
        raise ArgumentError(
            f"operator {kind!r} needs a positive, finite parameter ({name}, between {SMALLEST:g} and {LARGEST:g}), "
            f"but got {parameter!r}: pass e.g. Operator({kind!r}, 0.3)."
        )
    return value


def checked_omega(omega):
    """`omega` in PySCF's convention as a float, 0 for None; ArgumentError if there is no such operator."""
    value = checked_real("omega", 0.0 if omega is None else omega)
    if value and not SMALLEST <= abs(value) <= LARGEST:
        raise ArgumentError(f"the modulus of omega must be 0, or {SMALLEST:g} to {LARGEST:g}, not {abs(value)!r}.")
    return value


# What kernels ask for -------------------------------------------------------------------------------------------------


def zero_function(kind, jit):
    """The function zero(m, p, q, r2, parameter, table) -> [0]^(m) of one m, bound with `jit`."""
    return DEFINITIONS[checked_kind(kind)].make_zero(jit)


def zeros_function(kind, jit):
    """The function zeros(mmax, p, q, r2, parameter, table, out, offset, stride), bound with `jit`.

    It writes out[offset + m stride] = [0]^(m) for m = 0..mmax.
    """
    return DEFINITIONS[checked_kind(kind)].make_zeros(jit)


@cache
def kind_table(kind):
    """The `table` that the device functions of a kind of operator read, float64 and two-dimensional."""
    return DEFINITIONS["erf" if kind == Mixture.kind else kind].make_table()
