"""Every public function with good and bad values of its arguments, for fuzzing/test_arguments.py."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import zoo
from pyscf import scf
from zoo import bad, either, good, plain

import md4
from md4.cpu import run
from md4.cpu.backend import CpuBackend
from md4.validation.libcint import validate

WORK = []  # what the CPU backend did since `counted` began


@contextmanager
def counted():
    """Meanwhile, `WORK` gets a name whenever pairs are prepared or integrals begun."""
    prepare, run_tasks = CpuBackend.prepare, run.run_tasks

    def counted_prepare(self, *args):
        WORK.append("prepare")
        return prepare(self, *args)

    def counted_tasks(*args):
        WORK.append("tasks")
        return run_tasks(*args)

    CpuBackend.prepare, run.run_tasks = counted_prepare, counted_tasks
    WORK.clear()
    try:
        yield WORK
    finally:
        CpuBackend.prepare, run.run_tasks = prepare, run_tasks


class Shaped:
    """An argument that depends on the shape of the result."""

    def __init__(self, make):
        self.make = make


def outs():
    """Arrays to write to."""
    free = {f"shaped {text}": good(lambda f=f: Shaped(f), lambda: None) for text, f in {
        "empty": np.empty, "NaN": lambda s: np.full(s, np.nan), "mapped": lambda s: np.zeros((2, *s))[1],
    }.items()}  # fmt: skip
    wrong = {f"shaped {text}": bad(lambda f=f: Shaped(f)) for text, f in {
        "float32": lambda s: np.empty(s, np.float32), "read-only": lambda s: zoo.read_only(np.empty(s)),
        "flat": lambda s: np.empty(int(np.prod(s)) + 1), "strided": lambda s: np.empty((*s, 2))[..., 0],
        "other order": lambda s: np.empty(s, ">f8"), "list": lambda s: np.empty(s).tolist(),
        "broadcast": lambda s: np.broadcast_to(0.0, s), "complex": lambda s: np.empty(s, complex),
        "unaligned": lambda s: np.zeros(8 * int(np.prod(s)) + 1, np.uint8)[1:].view(float).reshape(s),
    }.items()}  # fmt: skip
    return zoo.zoo(free, wrong, {"None": good(lambda: None)})


# The functions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A public function.

    Attributes
    ----------
    call : callable
        Takes the arguments by name and gives what two calls are to be compared by: arrays, or None.
    arguments : dict
        The values of each argument, the first of which is the default.
    shape : callable
        Of the result, from the plain arguments; for `Shaped` ones.
    conflict : callable
        Whether plain arguments, good each by itself, must be refused together.
    """

    call: object
    arguments: dict
    shape: object = lambda _: (zoo.NAO,) * 4
    conflict: object = lambda _: False


def slices():
    whole = (0, zoo.NSHELL) * 4
    return zoo.zoo(plain("good", None, whole, (0, 1, 1, 3, 0, 2, 1, 2)), plain(
        "bad", (0, 1), (0, 4) * 4, (-1, 1) * 4, (1, 1) * 4, (2, 1) * 4, (0, 1.9) * 4, (0, "1") * 4, (0, None) * 4,
        (0, 10**30) * 4, "01010101", (0, float("nan")) * 4, 8, (0, 1j) * 4, ((0, 1),) * 8, (0, "") * 4,
    ), {
        "list": good(lambda: list(whole), lambda: whole), "array": good(lambda: np.array(whole), lambda: whole),
        "(0, 3.0)": either(lambda: (0, 3.0) * 4, lambda: whole),
        "(0, True)": either(lambda: (0, True) * 4, lambda: (0, 1) * 4),
        "4 x 2": either(lambda: np.array(whole).reshape(4, 2), lambda: whole),
        "uint8": good(lambda: np.array(whole, np.uint8), lambda: whole),
        "float array": either(lambda: np.array(whole) * 1.0, lambda: whole), "set": bad(lambda: set(range(8))),
        "dict": bad(lambda: dict.fromkeys(range(8))),
    })  # fmt: skip


def names():
    found = plain("good", "int2e", "int2e_sph", "int2e_cart")
    return found | zoo.zoo(plain("bad", "int2e_yp", "int2e_ip2", "int1e_ovlp", "INT2E", b"int2e", ["int2e"]))


def symmetries():
    found = plain("good", "s1", "s4", "s8")
    return found | zoo.zoo(
        plain("bad", "s2", "S1", 1, 8, b"s1", ["s1"]), {"np.str_": either(lambda: np.str_("s4"), lambda: "s4")}
    )


def tensor_arguments():
    return {
        "mol": zoo.molecules(), "aosym": symmetries(), "omega": zoo.omegas(),
        "shls_slice": slices(), "out": outs(), "backend": zoo.backends(),
        "device": zoo.flags() | {"True": bad(lambda: True), "bool_": bad(lambda: np.bool_(True))}
                        | {t: bad(v.make) for t, v in zoo.flags().items() if v.same and v.same() is True},
        "max_memory": zoo.memories(), "stream": zoo.ignored(None), "progress": zoo.progress(),
        "devices": zoo.ignored(None), "comm": zoo.zoo({"None": good(lambda: None)}), "gather": zoo.flags(),
    }  # fmt: skip


def tensor_conflict(a):
    """'s8' has no slices, and 's4' wants equal ranges."""
    s = a["shls_slice"]
    return s is not None and (a["aosym"] == "s8" or (a["aosym"] == "s4" and (s[:2] != s[2:4] or s[4:6] != s[6:])))


def tensor_shape(a):
    """Of the result of int2e."""
    mol = zoo.molecule(cart=a["mol"].cart)
    return np.shape(mol.intor("int2e", aosym=a["aosym"], shls_slice=a["shls_slice"]))


def pair_lists():
    lists = plain("good", [[0, 0]], ((0, 0),)) | plain(
        "bad", [[0, 9]], [[-1, 0]], [[0, 0], [0, 1]], [[]], [0, 9], [0.5], [[0, 0, 0]], [[0.0, 0.0]], [["0", "0"]],
        [[0, 10**30]],
        [[None, 0]], [[0], [0, 0]], [[[0, 0]]], [[0, 1j]], [[0, float("nan")]],
    )  # fmt: skip
    return zoo.zoo(lists, {
        "array": good(lambda: np.array([[0, 1], [2, 1]], np.int8)),
        "uint64": good(lambda: np.array([[1, 0]], np.uint64)),
        "2**63": bad(lambda: np.array([[0, 2**63]], np.uint64)), "F": good(lambda: np.asfortranarray([[0, 2], [2, 2]])),
        "bool": either(lambda: [[False, False]], lambda: [[0, 0]]),
        "object": either(lambda: np.array([[0, 0]], object), lambda: [[0, 0]]),
        "masked array": either(lambda: np.ma.array([[0, 0]], mask=[[0, 1]]), lambda: [[0, 0]]),
    })  # fmt: skip


def list_shape(a):
    sizes = [1, 3, 1]
    bra, ket = (np.array(a[side]).tolist() for side in ("bra_pairs", "ket_pairs"))
    return (len(bra), len(ket), *(sizes[i] for pair in (bra[0], ket[0]) for i in pair))


def bases():
    return zoo.zoo({"Basis": good(zoo.basis), "mol": bad(zoo.molecule), "Basis class": bad(lambda: md4.Basis)})


def operators():
    usable = plain("good", "coulomb", ("erf", 0.3), ["erfc", 1], ("coulomb", 0))
    return zoo.zoo({"None": good(lambda: None)}, usable, plain(
        "bad", "erf", "", ("erf",), ("erf", -1), ("erf", float("nan")), ("erf", "0.3"), ("coulomb", 1), ("x", 1),
        (None, None),
        ("erf", None), ("erf", 1j), ("erf", 1e300), ("erf", 0), ("erf", []), ([], 1), {"erf": 1}, ("gaussian", 10**400),
    ), {"Operator": good(lambda: md4.Operator.erf(0.3)), "class": bad(lambda: md4.Operator), "True": bad(lambda: True),
        "('erf', True)": either(lambda: ("erf", True), lambda: ("erf", 1))})  # fmt: skip


def of_engine(**arguments):
    engine = md4.Engine(**arguments)
    return [engine.compute([[0, 2]], [[1, 0]])]


def of_jk(**arguments):
    return md4.JK(**arguments).get_jk(np.eye(zoo.NAO))


def of_attached(**arguments):
    mf = md4.attach(**arguments)
    return mf.get_jk(dm=np.eye(zoo.NAO * (2 if isinstance(mf, scf.ghf.GHF) else 1)))


def after(method):
    """A call of a method of a fresh JK; refused, the same object must serve the next."""

    def call(**arguments):
        jk = md4.JK(zoo.molecule(), backend="cpu")
        try:
            return getattr(jk, method)(**arguments)
        except md4.MD4Error:
            done = len(WORK)
            expect = np.einsum("ijkk->ij", zoo.molecule().intor("int2e"))
            assert abs(jk.get_jk(np.eye(zoo.NAO))[0] - expect).max() < 1e-10
            del WORK[done:]
            raise

    return call


def arrays_of(basis):
    return [basis.ao_loc, basis.exponents, basis.coefficients, basis.centres, np.array(basis.pure)]


def shells():
    one = md4.Shell(0, np.array([1.0]), np.array([[1.0]]), np.zeros(3))
    wrong = {
        "l -1": {"l": -1}, "l 1.5": {"l": 1.5}, "l 'x'": {"l": "x"}, "l None": {"l": None},
        "exponent nan": {"exponents": np.array([np.nan])},
        "exponent None": {"exponents": None}, "exponents 2": {"exponents": np.ones(2)},
        "coefficients nan": {"coefficients": np.array([[np.nan]])},
        "coefficients 'x'": {"coefficients": "x"}, "coefficients empty": {"coefficients": np.zeros((1, 0))},
        "centre 2": {"centre": np.zeros(2)},
        "centre None": {"centre": None}, "centre inf": {"centre": np.full(3, np.inf)},
        "exponent 1e300": {"l": 4, "exponents": np.array([1e300])}, "l nan": {"l": np.nan}, "l inf": {"l": np.inf},
        "l 10**9": {"l": 10**9},
    }  # fmt: skip
    return zoo.zoo(
        {"shells": good(lambda: [one]), "tuple": good(lambda: (one, one)),
         "iterator": either(lambda: iter([one]), lambda: [one]),
         "Shell": bad(lambda: one), "[None]": bad(lambda: [None]), "class": bad(lambda: [md4.Shell]),
         "generator": bad(lambda: (n for n in "ab")),
         "Basis": either(zoo.basis, lambda: zoo.basis().shells)},
        {text: bad(lambda c=c: [one, replace(one, **c)]) for text, c in wrong.items()},
    )  # fmt: skip


def per_shell(one, wrong, **more):
    """An argument of from_arrays: two shells, of which the second may be wrong."""
    found = {"good": good(lambda: [one, one])} | {f"[.., {w!r:.40}]": bad(lambda w=w: [one, w]) for w in wrong}
    others = {"one": lambda: [one], "dict": lambda: {0: one, 1: one}}
    return zoo.zoo(found, {text: bad(make) for text, make in others.items()}, more)


NAN, INF = float("nan"), float("inf")


def spherical():
    """Molecules of 5 AOs."""
    return {text: value for text, value in zoo.molecules().items() if text != "cartesian"}


def set_up():
    """What all that computes is told."""
    return {"backend": zoo.backends(), "max_memory": zoo.memories(), "stream": zoo.ignored(None)}


def a_build():
    """Of J and K."""
    return {
        "dm": zoo.densities(), "hermi": zoo.hermis(), "with_j": zoo.flags(), "with_k": zoo.flags(),
        "omega": zoo.omegas(),
    }  # fmt: skip


def counts(*values):
    """Integers, not below the smallest of some."""
    return zoo.zoo(plain("good", *values), {
        "int64(1)": good(lambda: np.int64(1), lambda: 1), "True": either(lambda: True, lambda: 1),
        "bool_": either(lambda: np.bool_(True), lambda: 1),
        "False": either(lambda: False, lambda: 0) if 0 in values else bad(lambda: False),
        "2.0": either(lambda: 2.0, lambda: 2), "10**400": either(lambda: 10**400, lambda: 10**6),
    })  # fmt: skip


def reset(mol):
    jk = md4.JK(zoo.molecule(), backend="cpu")
    jk.reset(mol)
    return jk.get_jk(np.eye(zoo.NAO))


FUNCTIONS = {
    "int2e": Function(lambda **a: [md4.int2e(**a)], tensor_arguments(), tensor_shape, tensor_conflict),
    "intor": Function(lambda **a: [md4.intor(**a)], {
        "mol": zoo.molecules(), "name": names(), "aosym": symmetries(), "omega": zoo.omegas(), **set_up(),
    }),
    "Engine": Function(of_engine, {
        "bra_basis": bases(), "ket_basis": {"None": good(lambda: None, zoo.basis)} | zoo.without(bases(), "None"),
        "operator": operators(), **set_up(),
    }),
    "Engine.compute": Function(
        lambda **a: [md4.Engine(zoo.basis(), backend="cpu").compute(**a)],
        {"bra_pairs": pair_lists(), "ket_pairs": pair_lists(), "out": outs()}, list_shape,
    ),
    "JK": Function(of_jk, {
        "mol": spherical() | {"Basis": good(zoo.basis), "l = 9": bad(zoo.high_basis)}, "omega": zoo.omegas(),
        **set_up(),
        "direct_scf_tol": zoo.tolerances(), "progress": zoo.progress(),
    }),
    "JK.get_jk": Function(after("get_jk"),
    {**a_build(), "direct_scf_tol": zoo.tolerances() | {"None": good(lambda: None, lambda: 1e-13)}}),
    "JK.update": Function(after("update"), a_build()),
    "JK.reset": Function(reset,
    {"mol": spherical() | {"None": good(lambda: None, zoo.molecule), "l = 9": bad(zoo.high_basis)}}),
    "get_jk": Function(md4.get_jk, {
        "mol": spherical(), **a_build(), **set_up(), "direct_scf_tol": zoo.tolerances(), "progress": zoo.progress(),
    }),
    "attach": Function(of_attached, {"mf": zoo.fields(), **set_up(), "mo_integrals": zoo.flags()}),
    "detach": Function(lambda mf: [md4.detach(mf).mol.nao], {
        "mf": {"attached": good(lambda: md4.attach(scf.RHF(zoo.molecule()), "cpu"))} | {t: bad(v.make) for t,
        v in zoo.fields().items()},
    }),
    "attached.get_jk": Function(lambda **a: md4.attach(scf.RHF(zoo.molecule()), "cpu").get_jk(**a), {
        **a_build(), "mol": spherical() | {"None": good(lambda: None, zoo.molecule)},
        "dm": {t: v for t, v in zoo.densities().items() if t not in ("None", "4-D", "empty")},
        "hermi": zoo.hermis() | {"None": good(lambda: None, lambda: 1)},
    }),
    "Basis": Function(lambda **a: arrays_of(md4.Basis(**a)), {"shells": shells(), "pure": zoo.flags()}),
    "Basis.from_mol": Function(lambda mol: arrays_of(md4.Basis.from_mol(mol)), {"mol": zoo.molecules()}),
    "Basis.from_arrays": Function(lambda **a: arrays_of(md4.Basis.from_arrays(**a)), {
        "l": per_shell(
            1, [-1, 1.5, "x", None, NAN, 10**9, 10**400, [], [1, 2], 1j, "1", b"1"],
            array=good(lambda: np.array([1, 1]), lambda: [1, 1]), floats=either(lambda: [1.0, 1.0], lambda: [1, 1]),
            truth=either(lambda: [True, True], lambda: [1, 1]),
        ),
        "exponents": per_shell(
            [1.0],
            [[NAN], [-1.0], [0.0], [INF], [], [1.0, 2.0], None, "x", [None], [1j], ["1.0"], [1e300], [[1.0, 2.0]], {}],
            **{'[1, [2]]': either(lambda: [1, [2]], lambda: [[1.0], [2.0]])},
            scalars=either(lambda: [1.0, 1.0], lambda: [[1.0], [1.0]]),
        ),
        "coefficients": per_shell(
            [0.5], [[NAN], [], [0.5, 0.5], None, "x", [None], [1j], ["0.5"], [[[0.5]]], [[0.5], [1.0, 2.0]], [INF]],
            **{'[1, [2]]': either(lambda: [1, [2]], lambda: [[1.0], [2.0]])},
            columns=good(lambda: [[[0.5]], [[0.5]]], lambda: [[0.5], [0.5]]),
        ),
        "centres": per_shell(
            [0.0, 0.0, 1.0],
            [[0.0], [0.0] * 4, [NAN] * 3, [INF] * 3, None, "xyz", [None] * 3, [1j] * 3, ["0"] * 3, [[0.0] * 3], 0.0],
            **{'zeros((2, 3))': good(lambda: np.zeros((2, 3)))},
            array=good(lambda: np.array([[0, 0, 1], [0, 0, 1]]), lambda: [[0.0, 0.0, 1.0]] * 2),
        ),
        "pure": zoo.flags(), "normalise": zoo.flags(),
    }),
    "Operator": Function(lambda **a: [md4.Operator(**a).parameter], {
        "kind": zoo.zoo(plain("good", "erf", "yukawa"), plain("bad", "ERF", ["erf"], ("erf", 1))),
        "parameter": zoo.zoo(zoo.without(zoo.numbers(), "-1", "0", "False"), plain("good", 0.3),
        plain("bad", 1e300, 1e-300)),
    }),
    "Operator.from_omega": Function(lambda omega: [md4.Operator.from_omega(omega).parameter], {"omega": zoo.omegas()}),
    "validate": Function(lambda **a: [[r.quartets for r in validate(**a)]], {
        "mol": zoo.molecules(), "backend": zoo.backends(), "tolerance": zoo.tolerances(),
        "abs_tolerance": zoo.tolerances(),
        "omega": zoo.omegas(), "max_quartets_per_class": counts(4, 1), "seed": counts(0, 1),
        "max_memory": zoo.memories(),
        "progress": zoo.progress(),
    }),
}  # fmt: skip
# What a call takes where nothing else is drawn: the first good value of each argument that has no better one.
USUAL = {"bra_pairs": "array", "ket_pairs": "array", "mol": "mol",
    "backend": "'cpu'",
    "device": "False",
    "progress": "False",
    "hermi": "1",
    "direct_scf_tol": "1e-13",
    "tolerance": "1e-13",
    "abs_tolerance": "1e-13",
}


def usual(name, values):
    """The text of an argument's default."""
    fallback = [t for t in ("None", "True") if t in values and values[t].verdict == "good"]
    plain_one = [t for t, v in values.items() if v.verdict == "good"]
    wanted = USUAL.get(name)
    return wanted if wanted in values else (fallback or plain_one)[0]
