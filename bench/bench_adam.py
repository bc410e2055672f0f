"""The optimizer pass beside the limit that memory sets, torch's and DeepSpeed's. ``tiermem bench adam`` does the same.

    python bench/bench_adam.py [--all] [--disk DIR] [--numel MI] [--rounds N] [--threads 1,2] [--no-others]
        [--no-numba]

Ratios are medians over turns in one run; a busy machine makes those at more than one thread meaningless.
DeepSpeedCPUAdam is measured where it is installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import console, print_machine

from tiermem.bench_adam import Options, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every instruction set with all chunks and formats")
    parser.add_argument("--disk", type=Path, help="measure updates with states in this directory too")
    parser.add_argument("--numel", type=int, default=64, help="Mi parameters")
    parser.add_argument("--chunks", default="64,1024", help="Ki elements")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default="")
    parser.add_argument("--no-others", action="store_true")
    parser.add_argument("--no-numba", action="store_true")
    given = parser.parse_args()
    print_machine()
    options = Options(
        numel=given.numel << 20,
        chunks=[int(chunk) << 10 for chunk in given.chunks.split(",") if chunk],
        threads=[int(count) for count in given.threads.split(",") if count],
        rounds=given.rounds,
        everything=given.all,
        others=not given.no_others,
        numba=not given.no_numba,
        disk=given.disk,
    )
    run(options, console)


if __name__ == "__main__":
    main()
