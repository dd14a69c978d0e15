"""Machine code of kernel variants before and after a change, without a GPU.

    python bench/lab/machine_code.py FILE [FACTORY ...] [--sm 90] [--most 6]   compile a sample, write its contents
    python bench/lab/machine_code.py AFTER --compare BEFORE                    what became more or less

For each variant: registers, spills, shared memory, number of instructions, and of the opcodes that decide on speed. The
sample holds `most` variants of each factory that classes up to (ii|ii) use, the same ones for the same source of names.
Needs ptxas and nvdisasm (`pip install nvidia-cuda-nvdisasm`).
"""

import argparse
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

OPCODES = (
    "DMMA", "DFMA", "DMUL", "DADD", "LDS", "STS", "LDG", "STG", "LDGSTS", "LDL", "STL", "RED", "ATOM", "ATOMG", "SHFL",
    "BAR", "WARPSYNC", "MOV", "SEL", "FSEL", "IMAD", "IADD3", "LEA", "BRA", "BSSY", "LDC", "ULDC", "LDCU",
)  # fmt: skip


def find_nvdisasm():
    """The disassembler of the CUDA wheels."""
    found = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("cu*/bin/nvdisasm"))
    return str(found[-1]) if found else "nvdisasm"


def contents(variant, cc):
    """What the machine code of a variant consists of."""
    import offline

    usage, code = offline.assemble(offline.compile_ptx(variant, [cc])[cc], cc, variant.kernel().registers)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(code)
        cubin.flush()
        text = subprocess.run([find_nvdisasm(), "-c", cubin.name], capture_output=True, text=True, check=True).stdout
    codes = Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", text, re.MULTILINE))
    numbers = {"registers": usage.registers, "spills": usage.spill, "stack": usage.stack, "shared": usage.shared}
    return {**numbers, "instructions": codes.total(), **{code: codes[code] for code in OPCODES if codes[code]}}


def sample(cc, most, factories):
    """Up to `most` variants of each factory, spread over their names."""
    import offline

    found = {}
    for variant in sorted(offline.every_variant(cc), key=lambda v: v.name):
        if not factories or variant.factory.__name__ in factories:
            found.setdefault(variant.factory.__name__, []).append(variant)
    return [v for all_ in found.values() for v in (all_[:: -(-len(all_) // most)] if most else all_)]


def compare(before, after):
    """Prints what differs."""
    one, two = (json.loads(Path(name).read_text()) for name in (before, after))
    same = 0
    for name in sorted(one.keys() & two.keys()):
        keys = one[name].keys() | two[name].keys()
        changes = {k: (one[name].get(k, 0), two[name].get(k, 0)) for k in keys}
        changes = {k: v for k, v in changes.items() if v[0] != v[1]}
        same += not changes
        if changes:
            print(name + ": " + ", ".join(f"{k} {a} to {b}" for k, (a, b) in sorted(changes.items())))
    print(f"{same} of {len(one.keys() & two.keys())} variants the same")
    for name in sorted(one.keys() ^ two.keys()):
        print(f"only {'before' if name in one else 'after'}: {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="where to write, or the file before")
    parser.add_argument("factories", nargs="*", help="names of kernel factories; default: all")
    parser.add_argument("--sm", default="90", choices=("80", "90", "100"))
    parser.add_argument("--most", type=int, default=6, help="variants of a factory; 0: all")
    parser.add_argument("--compare", metavar="BEFORE")
    args = parser.parse_args()
    if args.compare:
        compare(args.compare, args.file)
        return
    cc = (int(args.sm) // 10, 0)
    out = {}
    for variant in sample(cc, args.most, args.factories):
        out[variant.name] = contents(variant, cc)
        print(variant.name, out[variant.name], flush=True)
        Path(args.file).write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
