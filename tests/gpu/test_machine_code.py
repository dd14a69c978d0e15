"""Machine code for devices that are not there: how it is assembled, and what is read from it."""

import offline
import pytest

from md4.gpu import machine_code as made
from md4.gpu.compile import Variant
from md4.gpu.kernels.digest_in_place import digest_in_place
from md4.gpu.kernels.recurrence import r_by_group


@pytest.mark.parametrize(
    "left, taken", [((100, 0), 0), ((600, 600), 0), ((700, 600), 1), ((None, 500), 1), ((601, None), None)]
)
def test_less_stack(monkeypatch, left, taken):
    """The first of the options that leave at most 0.6 of 1000 bytes; an assembler may lack one of them."""
    options = made.OPTIONS
    stacks = {option: n for option, n in zip(options, left) if n is not None}
    monkeypatch.setattr(made, "linked", lambda code, capability, option, registers: (option, stacks[option]))
    monkeypatch.setattr(made, "stack_bytes", lambda cubin: cubin[1])
    found = made.with_less_stack(b"code", (9, 0), 1000)
    assert found == (None if taken is None else (options[taken], left[taken]))


def test_a_large_stack_is_assembled_again(monkeypatch):
    monkeypatch.setattr(made, "linked", lambda code, capability, options, registers: options)
    monkeypatch.setattr(made, "cuda", type("Cuda", (), {"compile": staticmethod(lambda *args, **options: (b"", None))}))
    kernel = Variant(r_by_group, (4, "coulomb")).kernel()
    for usual, then, options in ((599, 0, ()), (600, 361, ()), (600, 360, made.OPTIONS[0])):
        monkeypatch.setattr(made, "stack_bytes", lambda cubin, sizes=(usual, then): sizes[bool(cubin)])
        assert made.machine_code(kernel, (9, 0)) == options


def test_assembler_options():
    """Each makes machine code, and another one than usual; an unknown one makes none."""
    code = offline.compile_ltoir(Variant(r_by_group, (4, "coulomb")), (9, 0))
    found = [made.linked(code, (9, 0), options) for options in ((), *made.OPTIONS)]
    assert all(cubin.startswith(b"\x7fELF") for cubin in found)
    assert len(set(found)) == len(found)
    with pytest.raises(Exception, match="no-such-option"):
        made.linked(code, (9, 0), ("--no-such-option",))


@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)], ids=offline.sm)
def test_stack_and_entry(cc):
    """The stack is what ptxas tells of the same machine code, the entry what Numba calls the kernel."""
    variant = Variant(digest_in_place, (1, 1, 0, 3, 3, 1, 0, 2, True, "coulomb", True))
    library = offline.lowered(variant, cc)
    usage, cubin = offline.assemble_by(library.get_asm_str(cc=cc), cc, ())
    assert made.stack_bytes(cubin) == usage.stack > 0
    assert made.entry_name(cubin) == library._entry_name
