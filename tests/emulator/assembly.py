"""Inline PTX as Python statements: the few instructions that md4 uses, each by what the PTX manual says of it."""

import re
import struct
from ctypes import c_float
from math import inf, isnan, sqrt

COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
INSTRUCTION = re.compile(r"(?:@(!?)(\w+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)


def split(text):
    """Operands of an instruction, at commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip()]


class Translation:
    """Python statements for a piece of PTX.

    Parameters
    ----------
    text, constraints : str
        Of `llvmlite.ir.InlineAsm`.
    inputs : list of str
        Python expressions of the operands.
    prefix : str
        Begins the names of what the statements make.

    Attributes
    ----------
    lines, outputs : list of str
        Statements, and the names of the results.
    """

    def __init__(self, text, constraints, inputs, prefix):
        count = sum(part.startswith("=") for part in constraints.split(","))
        self.prefix, self.outputs = prefix, [f"{prefix}_{n}" for n in range(count)]
        self.operands = [*self.outputs, *inputs]
        self.lines, self.registers = [], set()
        for statement in re.sub(r"^\s*\{|\}\s*$", "", text).split(";") if ";" in text else []:
            if statement.strip():
                self.instruction(statement.strip())

    def value(self, text):
        """A Python expression for a register, an operand or a number."""
        text = text.strip()
        if text.startswith("$"):
            return self.operands[int(text[1:])]
        if text.startswith("0d"):
            return f"float('{struct.unpack('>d', bytes.fromhex(text[2:]))[0]!r}')"
        if text.startswith("0f"):
            return repr(struct.unpack(">f", bytes.fromhex(text[2:]))[0])
        return f"{self.prefix}_{text}" if text in self.registers else str(int(text))

    def address(self, text):
        """The same of an address in brackets."""
        base, _, offset = text.strip("[] ").partition("+")
        return f"{self.value(base)} + {int(offset or 0)}"

    def group(self, text):
        """A tuple of what is in braces, or of the one that is not."""
        return "(" + "".join(f"{self.value(part)}, " for part in text.strip("{} ").split(",")) + ")"

    def instruction(self, text):
        if text.startswith(".reg"):
            self.registers |= {name.strip() for name in text.split(None, 2)[2].split(",")}
            return
        negated, predicate, opcode, rest = INSTRUCTION.fullmatch(text).groups()
        line = self.statement(opcode.split("."), split(rest))
        condition = f"if {'not ' if negated else ''}{self.value(predicate)}: " if predicate else ""
        self.lines.append(condition + line)

    def statement(self, opcode, operands):
        """One instruction as one statement."""
        name, kind = opcode[0], opcode[-1]
        make = getattr(self, f"on_{name}", None)
        assert make is not None, f"the emulator does not know {'.'.join(opcode)}"
        return make(opcode, kind, operands)

    def simple(self, operands, expression):
        return f"{self.value(operands[0])} = {expression.format(*map(self.value, operands[1:]))}"

    def on_ld(self, opcode, kind, operands):
        space = "shared" if "shared" in opcode else "global"
        count = 4 if "v4" in opcode else 2 if "v2" in opcode else 1
        return f"{self.group(operands[0])} = m.load('{space}', '{kind}', {self.address(operands[1])}, {count})"

    def on_st(self, opcode, kind, operands):
        space = "shared" if "shared" in opcode else "global"
        return f"m.store('{space}', '{kind}', {self.address(operands[0])}, {self.group(operands[1])})"

    def on_red(self, opcode, kind, operands):
        add = "add_integer" if kind == "u64" else "add"
        return f"m.{add}({self.address(operands[0])}, {self.value(operands[1])})"

    def on_cp(self, opcode, kind, operands):
        if kind == "commit_group":
            return "m.commit_copies()"
        if kind == "wait_group":
            return f"m.wait_copies({self.value(operands[0])})"
        sizes = ", ".join(map(self.value, operands[2:]))
        return f"m.copy({self.address(operands[0])}, {self.address(operands[1])}, {sizes})"

    def on_bar(self, opcode, kind, operands):
        return f"m.meet({', '.join(map(self.value, operands))})"

    def on_mma(self, opcode, kind, operands):
        d, a, b, c = map(self.group, operands)
        single = "single_" if kind == "f32" else ""
        return f"{d} = m.{single}{opcode[3]}({a}, {b}, {c})"

    def on_mad(self, opcode, kind, operands):
        product = "{} * {}" if kind == "s32" else "({} & 0xffffffff) * ({} & 0xffffffff)"
        return self.simple(operands, f"{product} + {{}}")

    def on_setp(self, opcode, kind, operands):
        comparison = "not {} <= {}" if opcode[1] == "gtu" else f"{{}} {COMPARISONS[opcode[1]]} {{}}"
        return self.simple(operands, f"({comparison}) and {{}}" if "and" in opcode else comparison)

    def on_abs(self, opcode, kind, operands):
        return self.simple(operands, "abs({})")

    def on_selp(self, opcode, kind, operands):
        return self.simple([operands[0], operands[3], operands[1], operands[2]], "{1} if {0} else {2}")

    def on_mov(self, opcode, kind, operands):
        return self.simple(operands, "{}")

    def on_add(self, opcode, kind, operands):
        return self.simple(operands, "single({} + {})" if kind == "f32" else "{} + {}")

    def approximate(self, opcode, kind, operands):
        """The functions that the device computes to about the last bit of a float."""
        assert opcode[1:] == ["approx", "ftz", "f32"]
        return self.simple(operands, f"single({opcode[0]}({{}}))")

    on_rcp = on_rsqrt = on_ex2 = approximate

    def on_cvta(self, opcode, kind, operands):
        return self.simple(operands, "m.shared_offset({})")

    def on_mul(self, opcode, kind, operands):
        return self.simple(operands, "{} * {}")

    def on_cvt(self, opcode, kind, operands):
        return self.simple(operands, "rounded({})" if opcode[1:] == ["rni", "s64", "f64"] else "{}")


# what the statements call ---------------------------------------------------------------------------------------------


def reversed32(x):
    """The 32 bits of a number in the other order."""
    return struct.unpack("<i", struct.pack("<I", int(f"{x & 0xFFFFFFFF:032b}"[::-1], 2)))[0]


def halves(x):
    """Low and high half of a double."""
    return struct.unpack("<ii", struct.pack("<d", x))


def joined(parts):
    """The double of two halves."""
    return struct.unpack("<d", struct.pack("<ii", *parts))[0]


def single(x):
    """A number rounded to single precision."""
    return c_float(x).value


def bits(x):
    """The bits of a float as a signed number."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


def from_bits(n):
    """The converse of `bits`."""
    return struct.unpack("<f", struct.pack("<i", n))[0]


def rounded(x):
    """The nearest 64-bit integer; the least one for what is no number."""
    return -(2**63) if isnan(x) or x < -(2**63) else 2**63 - 1 if x >= 2**63 else round(x)


def rcp(x):
    return 1.0 / x if x else inf


def rsqrt(x):
    return 1.0 / sqrt(x) if x else inf


def ex2(x):
    return 2.0**x


FUNCTIONS = (reversed32, halves, joined, single, bits, from_bits, rounded, rcp, rsqrt, ex2)
NAMES = {function.__name__: function for function in FUNCTIONS}
