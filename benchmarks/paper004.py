"""Weight offloading strategies (HAL hal-03580767, "paper 004"), table 1: its inputs and what our planner makes of them.

The paper gives hidden size, link and sums of computation, but neither layer times nor sizes nor memory. What follows
from what it does print is derived here; `inputs` says it in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.by_profit import by_profit
from planner.candidate.candidate import (
    Absence,
    Candidate,
    Side,
    TensorSchedule,
    assemble,
    at_home,
    backward_stage,
    movable,
)
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import profile
from planner.ilp.lower_bound import lower_bound_s
from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option, Tensor
from planner.schedule.compile import compile_program
from planner.schedule.simulate import simulate
from planner.schedule.verify import verify

MIB = 2**20
LINK = 12_000.0 * MIB  # bytes a second
HIDDEN = 3072
GPU_BYTES = 16 * 2**30
TEMPORARY_BYTES = 1.5 * 2**30  # per 16 rows
INTERFACE_BYTES = 20 * MIB  # per 16 rows and GPT-2 layer
BERT_TRANSFER_S = (3.893 - 2.612) / (144 - 96) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of table 1, milliseconds."""

    network: str
    depth: int
    rows: int
    sum_ms: int
    bound_ms: int
    greedy_ms: int
    l2l_ms: int

    @property
    def layers(self) -> int:
        """Layers with weights and times: GPT-2's depths count embedding and head, Bert's do not."""
        return self.depth - 2 if self.network == "GPT-2" else self.depth

    @property
    def name(self) -> str:
        return f"{self.network} {self.depth}, batch {self.rows}"


def _row(network: str, depth: int, rows: int, *ms: int) -> Row:
    sum_ms, bound_ms, greedy_ms, l2l_ms = ms
    return Row(
        network=network, depth=depth, rows=rows, sum_ms=sum_ms, bound_ms=bound_ms, greedy_ms=greedy_ms, l2l_ms=l2l_ms
    )


ROWS = (
    _row("GPT-2", 74, 64, 47421, 47421, 47493, 52707),
    _row("GPT-2", 56, 64, 35553, 35553, 35625, 39542),
    _row("GPT-2", 38, 64, 23694, 23694, 23838, 26387),
    _row("GPT-2", 74, 32, 23697, 23697, 23769, 28983),
    _row("GPT-2", 56, 32, 17762, 17762, 17834, 21751),
    _row("GPT-2", 38, 32, 11840, 11840, 11948, 14533),
    _row("GPT-2", 74, 16, 11612, 11612, 11684, 16898),
    _row("GPT-2", 56, 16, 8697, 8697, 8769, 12686),
    _row("GPT-2", 38, 16, 5794, 5794, 5902, 8487),
    _row("Bert", 144, 64, 34486, 34486, 34499, 38379),
    _row("Bert", 96, 64, 22965, 22965, 22978, 25577),
    _row("Bert", 144, 32, 17443, 17443, 17483, 21336),
    _row("Bert", 96, 32, 11617, 11617, 11657, 14230),
    _row("Bert", 144, 16, 9090, 9090, 9183, 12983),
    _row("Bert", 96, 16, 6058, 6058, 6085, 8670),
)


def layer_parameters(row: Row) -> int:
    """Weights of a layer: 12·h² for GPT-2; for Bert what the link carries in the time its L2L column implies."""
    if row.network == "GPT-2":
        return 12 * HIDDEN**2
    return round(BERT_TRANSFER_S * LINK / 4)


def chain(row: Row) -> Chain:
    """Embedding, equal layers, and a head without weights; no optimizer states, the gradient beside its weight."""
    layer_s = row.sum_ms / 1000 / row.layers
    share = layer_parameters(row) / (12 * HIDDEN**2)
    interface = round(INTERFACE_BYTES * row.rows / 16 * share**0.5)
    # Backward computes the forward again, then twice as much.
    option = Option(name="keep", forward_s=layer_s / 4, backward_s=layer_s * 3 / 4)
    ends = Option(name="keep")

    def block(name: str, elements: int, chosen: Option) -> Block:
        tensors = (
            (Tensor(name=name, elements=elements, bytes=4 * elements, gradient_bytes=4 * elements, state_bytes=0),)
            if elements
            else ()
        )
        return Block(name=name, kind=name, tensors=tensors, options=(chosen,), input_bytes=interface)

    layers = [block(f"layer{i}", layer_parameters(row), option) for i in range(row.layers)]
    return Chain(blocks=(block("embedding", 0, ends), *layers, block("head", 0, ends)))


def hardware() -> Hardware:
    """A V100 with the paper's link. Updates take no time, as in the paper; the host's memory is no limit there."""
    return Hardware(
        name="V100 16 GB",
        gpu_bytes=GPU_BYTES,
        cpu_bytes=2**50,
        h2d_bytes_per_s=LINK,
        d2h_bytes_per_s=LINK,
        gpu_update_parameters_per_s=1e18,
        cpu_update_parameters_per_s=1e18,
        cpu_memory_bytes_per_s=1e18,
    )


def budget_bytes(row: Row) -> int:
    """16 GB less the temporary tensors of a layer, which grow with the batch."""
    return round(GPU_BYTES - TEMPORARY_BYTES * row.rows / 16)


def setting(row: Row) -> Setting:
    """The row's problem."""
    budgets = Budgets(gpu_bytes=budget_bytes(row), cpu_bytes=2**50, cpu_updates=False)
    return Setting(chain=chain(row), hardware=hardware(), budgets=budgets, slices=1, clip=False)


def l2l(problem: Setting) -> Candidate:
    """L2L as the paper simulates it: one layer on the device, its weight fetched when its turn has come, forward and
    backward; what backward changed leaves while the next layer's weight comes."""
    schedules = []
    last = len(problem.chain.blocks) - 1
    for index, tensors in enumerate(movable(problem.chain, problem.hardware)):
        backward = backward_stage(problem.chain, index)
        for tensor in tensors:
            absences = [Absence(evict=index, prefetch=backward)] if index < last else []
            if index:
                absences.append(Absence(evict=backward + 1, prefetch=index, offload=backward))
            schedules.append(TensorSchedule(tensor=tensor, side=Side.GPU, update=backward, weight=tuple(absences)))
    moving = {schedule.tensor.name for schedule in schedules}
    schedules += [at_home(problem.chain, t, False) for t in problem.chain.tensors() if t.name not in moving]
    return Candidate(
        options=tuple(b.options[0].name for b in problem.chain.blocks), schedules=tuple(schedules), source="L2L"
    )


def inputs() -> list[tuple[str, str, str]]:
    """What goes in, in words: name, value, source."""
    bert = BERT_TRANSFER_S * LINK / 4 / 1e6
    return [
        ("layers of GPT-2", "depth - 2", "sums at one batch fall to zero at depth 2: 74, 56, 38 are 72, 54, 36 + 2"),
        ("layers of Bert", "depth", "its sums fall to zero at none"),
        ("seconds of a layer", "sum / layers", "table 1, first column; a quarter is forward, as backward repeats it"),
        ("weights of a GPT-2 layer", "12 · 3072², 4 bytes each", "section 7: hidden size 3072"),
        ("link", "12,000 MiB/s each way", "12 GB/s; GPT-2's overheads are multiples of 36.0 ms = 432 MiB at this rate"),
        (
            "weights of a Bert layer",
            f"{bert:.1f} M, 4 bytes each",
            "not 12 · 3072²: L2L grows by 2 × 13.34 ms a layer, greedy by multiples of 13.3 ms (L2L is no test here)",
        ),
        ("activations between layers", "20 MiB per 16 rows", "section 7, for GPT-2; Bert's by the root of the weights"),
        ("memory", "16 GiB - 1.5 GiB per 16 rows", "section 7: less than 16 GB; temporary tensors take 1 to 2 GB"),
        ("updates", "no time, no states", "section 3: at the end of backward, beside the gradient (its equation 1)"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Seconds of a step: no less is possible, the greedy plan, L2L."""

    bound_s: float
    greedy_s: float
    l2l_s: float


def answer(row: Row) -> Answer:
    """Our figures for a row of the table."""
    problem = setting(row)
    greedy = by_profit(problem, profile(problem, "fast"), spare=2)
    assert greedy is not None  # the memory suffices for two layers
    bound = lower_bound_s(problem)
    return Answer(bound_s=bound, greedy_s=step_s(greedy, problem), l2l_s=step_s(l2l(problem), problem))


def step_s(candidate: Candidate, problem: Setting) -> float:
    """Seconds of a step under the simulator, of a plan that `verify` accepts within the budget."""
    program = compile_program(assemble(problem.chain, candidate, slices=1, clip=False), problem.chain)
    verify(program, problem.chain, gpu_budget_bytes=problem.budgets.gpu_bytes)
    return simulate(program, problem.chain, problem.hardware).step_s
