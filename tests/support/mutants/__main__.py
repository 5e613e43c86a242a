"""`python -m tests.support.mutants`: a table of all, and each that is not noticed, with the reason if it has one."""

from __future__ import annotations

import gc
import logging
import sys
from collections import Counter

from tests.support.cuda import build


def main() -> int:
    """1 where one is neither noticed nor explained."""
    if reason := build.missing():
        print(reason, file=sys.stderr)
        return 2
    build.load()
    import torch

    from tests.support.cuda import torch_cuda

    device = torch_cuda.install()
    from tests.support.mutants.changes import mutants
    from tests.support.mutants.trial import CASES, explanation, noticed_by, program_of

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    every, noticed, explained = Counter[str](), Counter[str](), Counter[str]()
    for case in CASES:
        gc.collect()
        gc.freeze()
        for mutant in mutants(program_of(case)):
            every[mutant.change] += 1
            if noticed_by(device, case, mutant):
                noticed[mutant.change] += 1
                continue
            why = explanation(case, mutant)
            explained[mutant.change] += bool(why)
            print(f"{'explained' if why else 'MISSED'} [{case}] {mutant}{f': {why}' if why else ''}", flush=True)
    for change, count in every.items():
        print(f"{change:36} {count:4} {noticed[change]:4} noticed {explained[change]:4} explained")
    total, found = every.total(), noticed.total()
    print(f"{total} mutants, {found} noticed ({found / total:.1%}), {explained.total()} explained")
    return int(found + explained.total() < total)


if __name__ == "__main__":
    sys.exit(main())
