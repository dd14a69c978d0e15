"""Intrinsics as Python functions: the LLVM IR that their generators emit, instruction by instruction.

Integers are kept as signed Python numbers of their width, pointers as numbers, aggregates as tuples. Floats are Python
numbers, too, rounded to single precision by every operation.
"""

import ctypes
from functools import cache

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.descriptor import cuda_target

from emulator.assembly import NAMES, Translation
from emulator.machine import KINDS

# Functions of LLVM and NVVM that are called by name, as Python expressions of their operands.
FUNCTIONS = {
    "llvm.fma.f64": "{} * {} + {}",
    "llvm.fma.f32": "single({} * {} + {})",
    "llvm.bitreverse.i32": "reversed32({})",
    "llvm.nvvm.shfl.sync.bfly.i32": "m.shuffle_xor({1}, {2})",
    "llvm.nvvm.shfl.sync.idx.i32": "m.shuffle_from({1}, {2})",
    "llvm.nvvm.shfl.sync.down.i32": "m.shuffle_down({1}, {2})",
    "llvm.nvvm.bar.warp.sync": "m.exchange('bar.warp.sync', None)",
    "llvm.nvvm.atomic.load.add.f64.p1f64": "m.add({}, {})",
}
EXPRESSIONS = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "shl": "{} << {}", "and": "{} & {}", "or": "{} | {}",
    "xor": "{} ^ {}", "ashr": "{} >> {}", "fadd": "{} + {}", "fsub": "{} - {}", "fmul": "{} * {}", "fdiv": "{} / {}",
    "udiv": "{} // {}", "lshr": "{} >> {}", "urem": "{} % {}", "trunc": "{}", "sext": "{}", "ptrtoint": "{}",
    "inttoptr": "{}", "addrspacecast": "{}", "select": "{1} if {0} else {2}",
    "fpext": "{}", "fptrunc": "{}",
}  # fmt: skip
UNSIGNED = {"udiv", "lshr", "urem"}
WRAPPED = {"add", "sub", "mul", "shl", "trunc", *UNSIGNED}
REALS = (ir.DoubleType, ir.FloatType)
SHARED = 3  # LLVM's address space of shared memory
COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}


class Context:
    """Numba's target context for CUDA, with arrays as plain structures."""

    def __init__(self):
        self.target = cuda_target.target_context

    def __getattr__(self, name):
        return getattr(self.target, name)

    def make_array(self, kind):
        """What finds an array's data pointer in its structure."""

        class Array:
            def __init__(self, context, builder, value):
                self.data = builder.extract_value(value, 4)

        return Array


@cache
def translated(intrinsic, arrays):
    """(Python function of the machine and the operands, what makes its operands of Python values).

    `arrays`: for each argument (dtype, ndim) of the array that it is, or None.
    """
    signature, generate = intrinsic._defn(None, *(types.int64 if a is None else array_type(*a) for a in arrays))
    context = Context()
    kinds = [context.get_value_type(t) for t in signature.args]
    returned = signature.return_type
    result = ir.VoidType() if returned == types.void else context.get_value_type(returned)
    function = ir.Function(ir.Module(), ir.FunctionType(result, kinds), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    value = generate(context, builder, signature, list(function.args))
    builder.ret_void() if returned == types.void else builder.ret(value)
    return Translator(function).compiled(), [operand_maker(t) for t in signature.args]


def called(intrinsic, machine, args):
    """What an intrinsic returns for Python values."""
    arrays = tuple([(a.dtype, a.ndim) if isinstance(a, np.ndarray) else None for a in args])
    function, makers = translated(intrinsic, arrays)
    return function(machine, *[make(a) for make, a in zip(makers, args, strict=True)])


def array_type(dtype, ndim):
    """Numba's type of a contiguous array."""
    return types.Array(getattr(types, dtype.name), ndim, "C")


def operand_maker(kind):
    """What makes an operand of this type of a Python value."""
    if isinstance(kind, types.Array):
        return lambda array: (0, 0, array.size, array.itemsize, array.ctypes.data)
    if isinstance(kind, types.BaseTuple):
        makers = [operand_maker(t) for t in kind]
        return lambda group: tuple([make(v) for make, v in zip(makers, group, strict=True)])
    if isinstance(kind, types.Float):
        return float
    if not isinstance(kind, types.Integer):
        return int
    end = 1 << (kind.bitwidth - 1)

    def number(value):
        value = int(value)
        assert -end <= value < end, f"{value} does not fit {kind}"
        return value

    return number


def wrapped(expression, bits):
    """An expression as a signed number of so many bits."""
    if bits == 1:
        return f"({expression}) & 1"
    return f"((({expression}) + {1 << (bits - 1)}) & {(1 << bits) - 1}) - {1 << (bits - 1)}"


class Translator:
    """A function of LLVM IR as Python source: straight-line code, or a loop over its blocks."""

    def __init__(self, function):
        self.function, self.names, self.lines = function, {}, []
        self.blocks = {block: n for n, block in enumerate(function.blocks)}
        for n, arg in enumerate(function.args):
            self.names[id(arg)] = f"a{n}"
        for n, instruction in enumerate(i for block in function.blocks for i in block.instructions):
            self.names[id(instruction)] = f"v{n}"

    def compiled(self):
        head = f"def f({', '.join(['m', *(self.names[id(a)] for a in self.function.args)])}):"
        self.lines, several = [head], len(self.blocks) > 1
        if several:
            self.lines += [" block, before = 0, -1", " while True:"]
        for block, n in self.blocks.items():
            if several:
                self.lines.append(f"  {'el' if n else ''}if block == {n}:")
            body = self.merges(block)
            for instruction in block.instructions:
                if not isinstance(instruction, ir.PhiInstr):
                    body += self.statements(instruction)
            self.lines += [("   " if several else " ") + line for line in body]
        names = dict(NAMES)
        exec("\n".join(self.lines), names)
        return names["f"]

    def value(self, value):
        """A Python expression for an operand."""
        if isinstance(value, ir.Constant):
            return repr(constant(value.type, value.constant))
        return self.names[id(value)]

    def merges(self, block):
        """What the phi nodes of a block do, all at once."""
        phis = [i for i in block.instructions if isinstance(i, ir.PhiInstr)]
        lines = []
        for n, before in enumerate(phis[0].incomings if phis else ()):
            values = [{b: v for v, b in phi.incomings}[before[1]] for phi in phis]
            targets, sources = (", ".join(map(self.value, x)) for x in (phis, values))
            lines.append(f"{'el' if n else ''}if before == {self.blocks[before[1]]}: {targets}, = {sources},")
        return lines

    def jump(self, block, target):
        return f"block, before = {self.blocks[target]}, {self.blocks[block]}"

    def statements(self, instruction):
        """The lines for an instruction."""
        special = getattr(self, f"on_{instruction.opname.replace(' ', '_')}", None)
        if special:
            return special(instruction, *instruction.operands)
        return [f"{self.names[id(instruction)]} = {self.expression(instruction, instruction.opname)}"]

    def on_br(self, instruction, *operands):
        if len(operands) == 1:
            return [self.jump(instruction.parent, operands[0])]
        condition, yes, no = operands
        yes, no = (self.jump(instruction.parent, block) for block in (yes, no))
        return [f"if {self.value(condition)}: {yes}", f"else: {no}"]

    def on_ret_void(self, instruction):
        return ["return"]

    def on_ret(self, instruction, value):
        return [f"return {self.value(value)}"]

    def on_store(self, instruction, value, pointer):
        kind, count = item(value.type)
        values = self.value(value) if count > 1 else f"({self.value(value)},)"
        return [f"m.store('{space(pointer)}', '{kind}', {self.value(pointer)}, {values})"]

    def on_load(self, instruction, pointer):
        kind, count = item(instruction.type)
        loaded = f"m.load('{space(pointer)}', '{kind}', {self.value(pointer)}, {count})"
        return [f"{self.names[id(instruction)]} = {loaded}{'' if count > 1 else '[0]'}"]

    def on_getelementptr(self, instruction, pointer, index):
        kind, count = item(instruction.source_etype)
        size = ctypes.sizeof(KINDS[kind]) * count
        return [f"{self.names[id(instruction)]} = {self.value(pointer)} + {size} * ({self.value(index)})"]

    def on_bitcast(self, instruction, value):
        """Of pointers, of a double and its two halves, and of a float and its bits."""
        if isinstance(value.type, ir.FloatType):
            make = "bits"
        elif isinstance(instruction.type, ir.FloatType):
            make = "from_bits"
        elif isinstance(instruction.type, ir.VectorType):
            make = "halves"
        elif isinstance(value.type, ir.VectorType):
            make = "joined"
        else:
            assert isinstance(instruction.type, ir.PointerType), "the emulator does not know this bitcast"
            make = ""
        return [f"{self.names[id(instruction)]} = {make}({self.value(value)})"]

    def on_insertelement(self, instruction, whole, part, index):
        n, whole = index.constant, self.value(whole)
        return [f"{self.names[id(instruction)]} = {whole}[:{n}] + ({self.value(part)},) + {whole}[{n + 1}:]"]

    def on_extractelement(self, instruction, whole, index):
        return [f"{self.names[id(instruction)]} = {self.value(whole)}[{index.constant}]"]

    def on_extractvalue(self, instruction, whole):
        return [f"{self.names[id(instruction)]} = {self.value(whole)}[{instruction.indices[0]}]"]

    def on_insertvalue(self, instruction, whole, part):
        (n,), whole = instruction.indices, self.value(whole)
        return [f"{self.names[id(instruction)]} = {whole}[:{n}] + ({self.value(part)},) + {whole}[{n + 1}:]"]

    def expression(self, instruction, name):
        """The right-hand side of an instruction of numbers."""
        operands, bits = instruction.operands, getattr(instruction.type, "width", None)
        values = [self.value(v) for v in operands]
        mask = (1 << getattr(operands[0].type, "width", 64)) - 1
        if name in UNSIGNED or (name == "icmp" and instruction.op[0] == "u"):
            values = [f"(({v}) & {mask})" for v in values]
        if name in ("icmp", "fcmp"):
            return COMPARISONS[instruction.op[-2:]].join(f" {v} " for v in values)
        if name == "zext":
            return f"({values[0]}) & {mask}"
        assert name in EXPRESSIONS, f"the emulator does not know {name}"
        expression = EXPRESSIONS[name].format(*values)
        if isinstance(instruction.type, ir.FloatType) and name != "select":
            return f"single({expression})"
        return wrapped(expression, bits) if name in WRAPPED else expression

    def on_call(self, instruction, *operands):
        """Inline PTX, or a function of LLVM."""
        target, name = instruction.callee, self.names[id(instruction)]
        inputs = [self.value(v) for v in instruction.args]
        if isinstance(target, ir.InlineAsm):
            asm = Translation(target.asm, target.constraint, inputs, name)
            result = ", ".join(asm.outputs)
            assign = [] if not result else [f"{name} = ({result})"]
            return [*asm.lines, *assign]
        assert target.name in FUNCTIONS, f"the emulator does not know {target.name}"
        return [f"{name} = {FUNCTIONS[target.name].format(*inputs)}"]


def item(kind):
    """PTX's name of a type of memory, and how many of them."""
    if isinstance(kind, (ir.VectorType, ir.ArrayType)):
        return item(kind.element)[0], kind.count
    if isinstance(kind, REALS):
        return ("f64" if isinstance(kind, ir.DoubleType) else "f32"), 1
    return f"b{kind.width}", 1


def space(pointer):
    """The memory that a pointer points to."""
    return "shared" if pointer.type.addrspace == SHARED else "global"


def constant(kind, value):
    """A constant of LLVM as Python has it."""
    if isinstance(kind, (ir.ArrayType, ir.VectorType, ir.LiteralStructType)):
        kinds = kind.elements if isinstance(kind, ir.LiteralStructType) else [kind.element] * kind.count
        if value is None or value is ir.Undefined:
            return tuple(constant(k, value) for k in kinds)
        return tuple(constant(v.type, v.constant) for v in value)
    if value is ir.Undefined:
        return None
    if isinstance(kind, REALS):
        return float(value or 0.0)
    number, bits = int(value or 0), getattr(kind, "width", 64)
    # LLVM would leave out the upper bits
    assert -(1 << bits) // 2 <= number < 1 << bits, f"{number} has more than {bits} bits"
    return number
