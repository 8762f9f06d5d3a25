"""A step's plan at the addresses of a running program: batches of hints for the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from umem.core.classes import TensorClass
from umem.pages.run.admission import HintRow
from umem.pages.run.machine import Machine
from umem.pages.run.mapped_blocks import MappedBlock
from umem.pages.run.step_plan import PhasePlan, StepPlan
from umem.pages.run.tensor_addresses import TensorAddresses, whole_blocks
from umem.runtime.hints import HintBatch
from umem.trace import Trace

__all__ = ["Hints", "PhaseWork", "Program", "bind_program"]

_CLASSES = tuple(TensorClass)


@dataclass(frozen=True, eq=False)
class Hints:
    """Page hints that are submitted together."""

    batch: HintBatch
    lookups: tuple[tuple[int, Callable[[], int]], ...]
    """Hints whose addresses change in each step: number in the batch, and what looks it up."""
    tensors: tuple[int, ...] = ()
    """Of each hint, by number in the trace."""


@dataclass(frozen=True, eq=False)
class PhaseWork:
    """A phase's plan, with its evictions and prefetches as batches."""

    plan: PhasePlan
    leaving: Hints | None = None
    coming: Hints | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """One plan in executable form."""

    plan: StepPlan
    work: tuple[PhaseWork, ...]
    addresses: TensorAddresses
    mapped: tuple[MappedBlock, ...]
    away_at_start: tuple[MappedBlock, ...]
    """Blocks that live from step to step and are off the device when a step begins."""

    def away_after(self, other: Program, away: Iterable[int]) -> frozenset[int]:
        """Tensors that are off the device when this program replaces another one."""
        addresses = {other.addresses.fixed.get(tensor, 0) for tensor in away} - {0}
        return frozenset(
            tensor
            for tensor, address in self.addresses.fixed.items()
            if address in addresses and not self.plan.candidate.mapped[tensor]
        )

    def blocks(self, tensors: Iterable[int]) -> tuple[MappedBlock, ...]:
        """The blocks of those of these tensors that live from step to step."""
        return _blocks(self.plan.candidate.trace, self.addresses, tensors)

    def away_bytes(self, away: Iterable[int]) -> dict[TensorClass, int]:
        """Bytes by class of the mapped blocks and of these tensors."""
        trace = self.plan.candidate.trace
        total: dict[TensorClass, int] = defaultdict(int)
        for _, size_bytes, tensor_class in self.mapped:
            total[tensor_class] += size_bytes
        for tensor in away:
            size_bytes = whole_blocks(int(trace.tensor_bytes[tensor]))
            total[_CLASSES[trace.tensor_class[tensor]]] += size_bytes
        return total


def bind_program(plan: StepPlan, addresses: TensorAddresses, machine: Machine) -> Program:
    """Give a plan the addresses of its tensors; the machine's engine takes the batches."""
    trace, mapped = plan.candidate.trace, plan.candidate.mapped

    def hints(row: tuple[HintRow, ...]) -> Hints | None:
        return _hints(row, trace, addresses, machine)

    return Program(
        plan,
        tuple(PhaseWork(it, hints(it.leaving), hints(it.coming)) for it in plan.phases),
        addresses,
        _blocks(trace, addresses, (it for it in addresses.fixed if mapped[it])),
        _blocks(trace, addresses, plan.away_at_start),
    )


def _blocks(
    trace: Trace, addresses: TensorAddresses, tensors: Iterable[int]
) -> tuple[MappedBlock, ...]:
    return tuple(
        (
            addresses.fixed[tensor],
            whole_blocks(int(trace.tensor_bytes[tensor])),
            _CLASSES[trace.tensor_class[tensor]],
        )
        for tensor in tensors
        if addresses.fixed.get(tensor)
    )


def _hints(
    row: tuple[HintRow, ...],
    trace: Trace,
    addresses: TensorAddresses,
    machine: Machine,
) -> Hints | None:
    if not row:
        return None
    lookups: list[tuple[int, Callable[[], int]]] = []
    for number, (_, tensor) in enumerate(row):
        if not addresses.fixed.get(tensor):  # 0 for tensors freed since they were recorded
            lookups.append((number, addresses.gradients.get(tensor, int)))
    batch = machine.engine.batch(
        [op for op, _ in row],
        [addresses.fixed.get(tensor, 0) for _, tensor in row],
        [whole_blocks(int(trace.tensor_bytes[tensor])) for _, tensor in row],
        [_CLASSES[trace.tensor_class[tensor]] for _, tensor in row],
        machine.index,
    )
    return Hints(batch, tuple(lookups), tuple(tensor for _, tensor in row))
