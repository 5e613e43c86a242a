"""The solver's memory, linear in the options, against the walk over the finished program."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.candidate.candidate import Candidate, assemble, at_home
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.peak_moments import kept_bytes, moments, standing_bytes
from tests.support.random_chains import chains


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), slices=st.sampled_from((1, 2, 3, 4, 7)), rounds=st.sampled_from((1, 1, 2, 3)), data=st.data())
def test_with_everything_resident_the_highest_moment_is_the_walked_peak(
    chain: Chain, slices: int, rounds: int, data: st.DataObject
) -> None:
    chosen = [data.draw(st.integers(0, len(block.options) - 1)) for block in chain.blocks]
    options = tuple(block.options[o].name for block, o in zip(chain.blocks, chosen, strict=True))
    candidate = Candidate(
        options=options, schedules=tuple(at_home(chain, t, False) for t in chain.tensors()), source="test"
    )
    plan = assemble(chain, candidate, slices=slices, rounds=rounds, clip=False)
    walked = gpu_peak_bytes(compile_program(plan, chain), chain)

    resident = sum(t.bytes + t.state_bytes for t in chain.tensors())
    standing = standing_bytes(chain, slices, False, rounds)
    last, users = len(chain.blocks) - 1, chain.users()
    own = {t.name: 2 * last - users[t.name][0] for t in chain.tensors() if t.trainable and len(users[t.name]) == 1}
    for stage in range(2 * last + 1) if rounds > 1 else ():  # sums that stay between rounds
        standing[stage] += sum(t.gradient_bytes for t in chain.tensors() if own.get(t.name, stage) != stage)
    kept = [slices * kept_bytes(block, block.options[o]) for block, o in zip(chain.blocks, chosen, strict=True)]
    highest = max(
        resident
        + standing[m.stage]
        + m.fixed_bytes
        + sum(kept[: m.before + 1])
        + sum(size for (i, o), size in m.bytes_of.items() if chosen[i] == o)
        for m in moments(chain, slices, False, rounds)
    )
    assert walked <= highest
    if not any(t.scratch_bytes for t in (*chain.tensors(), *chain.frame_tensors)):
        # Of several rounds only those between the first and the last have all gradients, and only the last all losses.
        gradients = sum(t.gradient_bytes for t in (*chain.tensors(), *chain.frame_tensors))
        assert highest - walked <= {1: 0, 2: 4 * slices + gradients, 3: 4 * slices}[rounds]
