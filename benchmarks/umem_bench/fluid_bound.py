"""A bound that knows moments: least step time of a fluid relaxation, by linear programming.

Of every tensor any share may be off the device at any moment. Residency is checked at some phases
only, the checkpoints, and between two of them bytes may cross the link at any time. Each schedule
gives a solution, so that the optimum is a lower bound for every schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import highspy
import numpy as np
import numpy.typing as npt

from umem.core.errors import PlanError
from umem.hardware import Hardware
from umem.pages.simulate.lower_bound import FastestMoves, fastest_moves
from umem.trace import Access, Trace, phase_of_access, require_durations

__all__ = ["fluid_bound_s"]

_CHECKPOINTS = 128

_IGNORED_SHARE = 1e-3
"""The smallest tensors, which have this share of the capacity together, take no memory."""

_TOLERANCE = 1e-6
"""Error of a solution, of a step's time."""

_UNIT_BYTES = 1e9


def fluid_bound_s(
    trace: Trace, hardware: Hardware, capacity_bytes: int, *, checkpoints: int = _CHECKPOINTS
) -> float:
    """Step time that no schedule can beat, moments included.

    Contents that are off the device at a checkpoint have to be written to the host before it, once
    for each time that they are made, and read from there by the phases that use them: moved, or in
    place. Both directions of the link are bounded between each two checkpoints, and what moves
    beside a kernel slows it. A phase may be held up; the sum of these times is what is minimized.

    Parameters
    ----------
    trace
        With durations.
    hardware
        The machine; of its ways to move bytes the fastest mixture counts.
    capacity_bytes
        Device memory for tensors.
    checkpoints
        Phases at which residency is checked. More give a higher bound and take longer.

    Returns
    -------
    float
        Seconds per step.

    Raises
    ------
    PlanError
        If the solver finds no solution.
    TraceError
        If the trace has no durations.
    """
    duration_s = require_durations(trace)
    at = _choose_checkpoints(trace, checkpoints)
    starts_s = np.append(0.0, np.cumsum(duration_s))
    # Times are in steps, so that the solver's tolerances fit.
    moves = fastest_moves(hardware)
    unit_s = max(float(starts_s[-1]), float(trace.tensor_bytes.sum()) / moves.link_bytes_per_s)
    # What comes before the first checkpoint lies behind the last one.
    spans_s = np.diff(np.append(starts_s[at], starts_s[-1] + starts_s[at[0]]))
    program = _Program()
    link = _Link(program, spans_s, moves, unit_s)
    resident: list[list[int]] = [[] for _ in at]
    held_bytes = np.zeros(len(at))
    for life, size_bytes in _lives(trace, at, capacity_bytes):
        size = size_bytes / _UNIT_BYTES
        away = _add_life(program, link, life, size, len(at))
        for checkpoint, variable in away:
            resident[checkpoint].append(variable)
            held_bytes[checkpoint] += size
    for variables, held in zip(resident, held_bytes, strict=True):
        over = held - capacity_bytes / _UNIT_BYTES
        if over > 0:
            program.add_row([(variable, 1.0) for variable in variables], low=over)
    link.add_rows()
    return float(starts_s[-1]) + unit_s * max(program.minimum(trace.name) - _TOLERANCE, 0.0)


# ---- what a tensor does between checkpoints ----


class _Stay(NamedTuple):
    """A tensor's contents at a checkpoint, where some of them may be on the host."""

    checkpoint: int
    """From the first one on; past the last one in the next step."""
    is_read: bool
    """A phase reads them before the next checkpoint."""
    goes_on: bool
    """They are still there at the next checkpoint, and not read before."""
    version: int | None
    """Span between checkpoints in which they were written; None if no phase writes them."""
    written_here: bool
    """By the very phase of the checkpoint."""


_Life = tuple[_Stay, ...]


def _lives(
    trace: Trace, at: npt.NDArray[np.int64], capacity_bytes: int
) -> Iterable[tuple[_Life, int]]:
    """What tensors do, and the bytes of all that do the same."""
    order = np.argsort(trace.tensor_bytes, kind="stable")
    counts = np.ones(trace.tensor_count, np.bool_)
    counts[order[np.cumsum(trace.tensor_bytes[order]) <= _IGNORED_SHARE * capacity_bytes]] = False
    by_tensor = np.lexsort((phase_of_access(trace), trace.access_tensor))
    bounds = np.searchsorted(trace.access_tensor[by_tensor], np.arange(trace.tensor_count + 1))
    phases, modes = phase_of_access(trace)[by_tensor], trace.access_mode[by_tensor]
    found: dict[_Life, int] = {}
    for tensor in np.flatnonzero(counts).tolist():
        mine = slice(bounds[tensor], bounds[tensor + 1])
        uses: dict[int, int] = {}
        for phase, mode in zip(phases[mine].tolist(), modes[mine].tolist(), strict=True):
            # The first access of a phase tells whether it needs the contents.
            uses[phase] = uses.get(phase, mode & Access.READ) | (mode & Access.WRITE)
        if uses:
            life = _life(list(uses.items()), at, trace.phase_count, bool(trace.persistent[tensor]))
            found[life] = found.get(life, 0) + int(trace.tensor_bytes[tensor])
    return found.items()


def _life(
    uses: list[tuple[int, int]], at: npt.NDArray[np.int64], phases: int, persistent: bool
) -> _Life:
    """The stays of one tensor, given its uses: (phase, mode) in order."""
    written = [number for number, (_, mode) in enumerate(uses) if mode & Access.WRITE]
    if persistent:
        # From the first write on, so that each version is there from its start.
        first = written[0] if written else 0
        uses = uses[first:] + [(phase + phases, mode) for phase, mode in uses[: first + 1]]
    step = np.concatenate([at, at + phases, [at[0] + 2 * phases]])
    stays: list[_Stay] = []
    version: int | None = None
    for number, (phase, mode) in enumerate(uses[: len(uses) - persistent]):
        writes = bool(mode & Access.WRITE)
        begin = int(np.searchsorted(step, phase, side="left"))
        is_here = begin < len(step) and step[begin] == phase
        if writes:
            version = begin if is_here else begin - 1
        following, needed = uses[number + 1] if number + 1 < len(uses) else (phase + 1, 0)
        end = int(np.searchsorted(step, following, side="left")) if needed & Access.READ else begin
        for checkpoint in range(begin, max(end, begin + is_here)):
            is_use = is_here and checkpoint == begin
            read_next = bool(needed & Access.READ) and following < step[checkpoint + 1]
            stays.append(
                _Stay(
                    checkpoint,
                    read_next or (is_use and bool(mode & Access.READ)),
                    bool(needed & Access.READ) and following >= step[checkpoint + 1],
                    version,
                    is_use and writes,
                )
            )
    return tuple(stays)


def _choose_checkpoints(trace: Trace, count: int) -> npt.NDArray[np.int64]:
    """Of each of `count` stretches of phases, the one in which most is alive."""
    change = np.zeros(trace.phase_count + 1, np.int64)
    np.add.at(change, trace.first_phase, trace.tensor_bytes)
    np.subtract.at(change, trace.last_phase + 1, trace.tensor_bytes)
    live = np.cumsum(change)[:-1]
    edges = np.linspace(0, trace.phase_count, min(count, trace.phase_count) + 1).astype(np.int64)
    return np.array([low + int(np.argmax(live[low:high])) for low, high in pairwise(edges)])


# ---- the linear program ----


@dataclass(eq=False)
class _Program:
    """Variables of 0 and more, and rows of a linear program."""

    cost: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add_variable(self, most: float = np.inf, cost: float = 0.0) -> int:
        self.cost.append(cost)
        self.most.append(most)
        return len(self.cost) - 1

    def add_row(
        self, terms: Sequence[tuple[int, float]], *, low: float = -np.inf, high: float = np.inf
    ) -> None:
        for column, value in terms:
            self.rows.append(len(self.low))
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)

    def minimum(self, name: str) -> float:
        """Least cost."""
        count = len(self.cost)
        by_column = np.argsort(self.columns, kind="stable")
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = count, len(self.low)
        program.col_cost_ = np.array(self.cost)
        program.col_lower_, program.col_upper_ = np.zeros(count), np.array(self.most)
        program.row_lower_, program.row_upper_ = np.array(self.low), np.array(self.high)
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        columns = np.array(self.columns)[by_column]
        program.a_matrix_.start_ = np.searchsorted(columns, np.arange(count + 1))
        program.a_matrix_.index_ = np.array(self.rows)[by_column]
        program.a_matrix_.value_ = np.array(self.values)[by_column]
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        # Interior points: these programs are large, sparse and degenerate.
        solver.setOptionValue("solver", "ipm")
        solver.setOptionValue("run_crossover", "off")
        solver.passModel(program)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            status = solver.modelStatusToString(solver.getModelStatus())
            raise PlanError(
                f"trace {name!r}: no fluid bound: the solver says {status}; raise the budget, or "
                "ask for another number of checkpoints"
            )
        return float(solver.getInfo().objective_function_value)


class _Link:
    """What crosses the link between each two checkpoints, and for how long it holds phases up."""

    def __init__(
        self,
        program: _Program,
        spans_s: npt.NDArray[np.float64],
        moves: FastestMoves,
        unit_s: float,
    ) -> None:
        self.program = program
        self.spans = spans_s / unit_s
        # In units of the program.
        self.limits = [
            (inward * _UNIT_BYTES / unit_s, outward * _UNIT_BYTES / unit_s)
            for inward, outward in moves.limits
        ]
        self.both = moves.link_bytes_per_s * unit_s / _UNIT_BYTES
        self.slowdown = moves.slowdown_s_per_byte * _UNIT_BYTES / unit_s
        count = len(spans_s)
        self.stall = [program.add_variable(cost=1.0) for _ in range(count)]
        self.beside = [program.add_variable(cost=self.slowdown) for _ in range(count)]
        """Bytes that move beside kernels, and slow them."""
        self.inward: list[list[int]] = [[] for _ in range(count)]
        self.outward: list[list[int]] = [[] for _ in range(count)]

    def add_rows(self) -> None:
        """Bound what crosses the link by the time there is."""
        for span, length in enumerate(self.spans):
            stall, beside = self.stall[span], self.beside[span]
            inward, outward = self.inward[span], self.outward[span]
            longer = [(stall, -1.0), (beside, -self.slowdown)]
            for in_share, out_share in self.limits:
                moved = [(variable, in_share) for variable in inward if in_share]
                moved += [(variable, out_share) for variable in outward if out_share]
                self.program.add_row(moved + longer, high=length)
            # What slows no kernel moves while phases wait, or while others are slowed.
            aside = [(stall, self.both), (beside, 1.0 + self.both * self.slowdown)]
            moved = [(variable, -1.0) for variable in inward + outward]
            self.program.add_row(aside + moved, low=0.0)


def _add_life(
    program: _Program, link: _Link, life: _Life, size: float, count: int
) -> list[tuple[int, int]]:
    """Let tensors leave and return; (checkpoint, variable of what is away) at each stay."""
    away = {stay.checkpoint % count: program.add_variable(size) for stay in life}
    written: int | None = None  # by the end of the span before `upto`, of the version at hand
    version: int | None = None
    upto = 0
    for stay in life:
        here = stay.checkpoint % count
        if stay.is_read:
            link.inward[here].append(away[here])
        elif stay.goes_on:
            returns = program.add_variable(size)
            link.inward[here].append(returns)
            following = (away[(here + 1) % count], 1.0)
            program.add_row([(returns, 1.0), (away[here], -1.0), following], low=0.0)
        if stay.version is None:
            continue
        if stay.version != version:
            version, written, upto = stay.version, None, stay.version
        end = stay.checkpoint + 1 if stay.written_here else stay.checkpoint
        while upto < end:
            moved, total = program.add_variable(size), program.add_variable(size)
            link.outward[upto % count].append(moved)
            before = [] if written is None else [(written, 1.0)]
            program.add_row([*before, (moved, 1.0), (total, -1.0)], low=0.0)
            written, upto = total, upto + 1
        assert written is not None
        program.add_row([(written, 1.0), (away[here], -1.0)], low=0.0)
    return [(stay.checkpoint % count, away[stay.checkpoint % count]) for stay in life]
