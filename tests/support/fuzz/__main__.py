"""`python -m tests.support.fuzz --from FIRST --seeds COUNT`: a line per finding, and how many of each kind."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter

import torch

from tests.support.fuzz.case import case_of
from tests.support.fuzz.shrink import shrink
from tests.support.fuzz.trial import judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzz", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--shrink", action="store_true", help="find the simplest case that fails as the first does")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)  # what the house says is not of interest here
    torch.set_num_threads(1)
    if chosen.shrink:
        print(*shrink(case_of(chosen.first), judge), sep="\n")
        return 1
    kinds, bad = Counter[str](), False
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        verdict = judge(case_of(seed))
        kinds[f"{verdict.kind} {verdict.text.partition(':')[0]}" if verdict.kind == "refused" else verdict.kind] += 1
        bad |= not verdict.fine
        if verdict.kind != "same":
            print(seed, verdict.kind, verdict.text, flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
