"""Milliseconds by kernel of one build of J and K: where its time goes.

    python bench/lab/kernels.py 8waters/cc-pvqz 27waters/cc-pvtz          by families of kernels
    python bench/lab/kernels.py 8waters/cc-pvqz --variants --csv k.csv    by variants

A build on one stream, every kernel between two events, after two builds as they usually are. In a usual build short
kernels run beside each other on several streams, so that small molecules take less time than all kernels together.
"""

import argparse
import sys
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
from clock import describe, synchronize, write_csv
from common import add_backend, settle
from scf import Build
from systems import NAMES, System

from md4.gpu import tracks
from md4.gpu.context import DeviceContext, cuda
from md4.gpu.recording import Recorder


@contextmanager
def one_by_one():
    """Builds run on one stream, and launch each kernel anew instead of repeating records."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(tracks, "MOST_TRACKS", 1))
        stack.enter_context(patch.object(Recorder, "repeat", lambda *_: False))
        stack.enter_context(patch.object(Recorder, "end", lambda *_: None))
        yield


def kernel_times(build):
    """{variant: (launches, milliseconds)} of one build."""
    events, launch = [], DeviceContext.launch

    def timed(context, variant, *args):
        pair = cuda.event(), cuda.event()
        pair[0].record(context.stream)
        launch(context, variant, *args)
        pair[1].record(context.stream)
        events.append((variant, pair))

    with one_by_one(), patch.object(DeviceContext, "launch", timed):
        build.run()
    synchronize(build.jk.engine.backend)
    times = defaultdict(list)
    for variant, (start, stop) in events:
        times[variant].append(start.elapsed_time(stop))
    return {variant: (len(found), sum(found)) for variant, found in times.items()}


def family(variant):
    """The factory's name; of digestion in place also the precision."""
    name = variant.factory.__name__
    return f"{name} FP{32 if variant.facts[-1] else 64}" if name == "digest_in_place" else name


def by_family(times):
    """{family: (launches, milliseconds)}, the longest first."""
    sums = defaultdict(lambda: (0, 0.0))
    for variant, (count, ms) in times.items():
        sums[family(variant)] = sums[family(variant)][0] + count, sums[family(variant)][1] + ms
    return dict(sorted(sums.items(), key=lambda entry: -entry[1][1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", help=NAMES)
    parser.add_argument("--variants", action="store_true", help="a line for each variant")
    parser.add_argument("--csv", metavar="FILE", help="all variants")
    add_backend(parser)
    args, rows = settle(parser.parse_args()), []
    for system in map(System.parse, args.systems):
        build = Build(system, args)
        if not rows:
            print(describe(build.jk.engine.backend))
        build.run()
        times = kernel_times(build)
        found = by_family(times)
        print(f"{system.name}/{system.basis}: kernels {sum(ms for _, ms in found.values()):.1f} ms: "
              + ", ".join(f"{name} x{count} {ms:.1f}" for name, (count, ms) in found.items()), flush=True)  # fmt: skip
        rows += [{"system": f"{system.name}/{system.basis}", "kernel": variant.name, "launches": count, "ms": ms}
                 for variant, (count, ms) in sorted(times.items(), key=lambda entry: -entry[1][1])]  # fmt: skip
    if args.variants:
        for row in rows:
            print(f"{row['system']} {row['kernel']} x{row['launches']} {row['ms']:.2f}")
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
