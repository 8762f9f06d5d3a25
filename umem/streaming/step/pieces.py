"""Updates of a unit's pieces: each is copied into a slot, updated there, and copied back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from umem.streaming.gradients.clipped_gradients import ClippedGradients
from umem.streaming.stage.lanes import Lane, Lanes, Moment
from umem.streaming.step.call import ParameterGroups, StepCall, parameters_of
from umem.streaming.step.operands import StagedOperands
from umem.streaming.step.unit import Piece, StreamedUnit
from umem.streaming.step.units import StreamedUnits

__all__ = ["PieceUpdate", "PieceUpdates", "are_staged", "need_whole"]


@dataclass(slots=True)
class PieceUpdate:
    """An update that is about to be queued."""

    piece: Piece
    part: ParameterGroups
    """The parameters that are updated."""
    is_last: bool
    """Whether it counts the step of a parameter that is divided."""
    operands: StagedOperands | None = None
    """Weights and gradients that are staged for it."""

    @property
    def operand_bytes(self) -> int:
        """Size of these."""
        return 0 if self.operands is None else self.operands.size_bytes


class PieceUpdates:
    """Queues the copies and updates of pieces.

    Parameters
    ----------
    units
        The optimizer's units.
    lanes
        Where the work runs.
    clipped
        Holds gradients that are on the host.
    """

    def __init__(self, units: StreamedUnits, lanes: Lanes, clipped: ClippedGradients) -> None:
        self.last: Moment = None
        """The moment after the update that was queued last."""
        self.queued: set[Piece] = set()
        """The pieces whose updates were queued in this step, or have run."""
        self._staying: dict[Piece, StagedOperands] = {}
        """By piece, weights that were staged for an update and are not on their way home."""
        self._units = units
        self._lanes = lanes
        self._clipped = clipped

    def of(self, unit: StreamedUnit, part: ParameterGroups | None) -> list[PieceUpdate]:
        """What is updated of a unit, one behind the other: `part`, or all that is queued."""
        pieces = unit.pieces[::-1] if self._units.runs_backward else unit.pieces
        if pieces[0].state is unit.state:
            return [PieceUpdate(pieces[0], unit.queued if part is None else part, is_last=True)]
        last = {it.state.divided: it for it in pieces}
        updates = []
        for piece in pieces:
            some = piece.queued if part is None else _of_piece(part, piece)
            if some:
                updates.append(PieceUpdate(piece, some, is_last=piece in last.values()))
        return updates

    def stage_operands(self, updates: Sequence[PieceUpdate], *, are_alone: bool) -> None:
        """Stage weights and gradients at home beside the state, where slots have room for them.

        Parameters
        ----------
        updates
            They get their operands.
        are_alone
            Whether weights and gradients are known to have no alias.
        """
        if not self._units.stages_operands:
            return
        by_slot: dict[int, list[PieceUpdate]] = {}
        for it in updates:
            state, slot = it.piece.state, it.piece.slot
            if slot is not None:
                some = parameters_of(it.part)
                operands = self._units.operands(
                    some, state.span, self._clipped.factors, are_alone=are_alone
                )
                if operands.size_bytes:
                    it.operands = operands
                    by_slot.setdefault(id(slot), []).append(it)
        for some_updates in by_slot.values():
            largest = max(some_updates, key=lambda it: it.operand_bytes)
            state, slot = largest.piece.state, largest.piece.slot
            assert slot is not None
            # Pieces have about as much beside as much state, and the same slot serves many.
            share = slot.memory.nbytes / max(1, state.size_bytes)
            buffer = self._units.operand_buffer(slot, largest.operand_bytes, share)
            for it in some_updates:
                if buffer is None:
                    it.operands = None
                elif it.operands is not None:
                    it.operands.bind(buffer)

    def launch(
        self, unit: StreamedUnit, call: StepCall, updates: Sequence[PieceUpdate], ready: Moment
    ) -> None:
        """Queue copies and updates.

        Parameters
        ----------
        unit
            The unit of all pieces.
        call
            The hyperparameters.
        updates
            In their order.
        ready
            The moment behind which gradients may be used.
        """
        have_weights = False
        for it in updates:
            self._launch_piece(it, call, ready)
            have_weights |= it.operands is not None and it.operands.has_weights
            unit.updated = it.piece.updated
        if have_weights:
            # Weights are updated when all of them are back.
            unit.updated = self._lanes.run(Lane.COPY_OUT, lambda: None, [unit.updated])
        self.last = unit.updated

    def _launch_piece(self, updated: PieceUpdate, call: StepCall, ready: Moment) -> None:
        piece, operands = updated.piece, updated.operands
        state, slot = piece.state, piece.slot
        state.bind(slot)
        note = functools.partial(self.queued.add, piece)
        update = call.update(state, updated.part, operands, is_last=updated.is_last, note=note)
        lanes = self._lanes
        if slot is None:
            done = lanes.run(Lane.UPDATE, update, [ready], call.tensors)
            self.queued.add(piece)
            piece.fetched, piece.updated = None, done
            # Behind the copies of other pieces, too.
            piece.returned = piece.unit.returned = lanes.run(Lane.COPY_OUT, lambda: None, [done])
            return
        if piece.fetched is None:
            self._units.fetch(piece, ready)
        arrived = piece.fetched
        if operands is not None:
            come = functools.partial(operands.copy_in, lanes)
            free = [] if slot.free is None else [slot.free]
            arrived = lanes.run(Lane.COPY_IN, come, [ready, *free, arrived])
        if operands is not None:
            self._staying[piece] = operands
        # Before it runs: behind an error, what the update has changed goes home all the same.
        self._units.pool.leaving[slot] = piece
        slot.free = done = lanes.run(Lane.UPDATE, update, [ready, arrived], call.tensors)
        self.queued.add(piece)
        if operands is not None:
            self._send_weights(piece, operands, done)
        piece.fetched, piece.updated = None, done
        if state.is_shared:
            self._units.write_back(slot)

    def begin(self) -> None:
        """Begin a step."""
        self.queued.clear()
        self._staying.clear()

    def send_weights(self, after: Moment) -> None:
        """Send home what an error has kept from it."""
        for piece, operands in list(self._staying.items()):
            if piece in self.queued:
                self._send_weights(piece, operands, after)

    def _send_weights(self, piece: Piece, operands: StagedOperands, after: Moment) -> None:
        leave = functools.partial(operands.copy_out, self._lanes)
        moment = self._lanes.run(Lane.COPY_OUT, leave, [after])
        del self._staying[piece]  # not before: what an error cuts short is done again
        if piece.slot is not None:
            piece.slot.free = moment


def need_whole(updates: Sequence[PieceUpdate]) -> bool:
    """Whether an update does not take this rank's parts, and so is a use of sharded tensors."""
    states = (it.piece.state.sharded for it in updates)
    return any(it is not None and it.is_wrapped for it in states)


def are_staged(parameters: Sequence[Any], updates: Sequence[PieceUpdate]) -> bool:
    """Whether each update has copies of the gradients of these parameters."""
    keys = set(map(id, parameters))
    return all(
        it.operands is not None and it.operands.has_gradient_of(parameter)
        for it in updates
        for parameter in parameters_of(it.part)
        if id(parameter) in keys
    )


def _of_piece(groups: ParameterGroups, piece: Piece) -> ParameterGroups:
    owned = ((number, [p for p in some if piece.state.has(p)]) for number, some in groups)
    return [(number, some) for number, some in owned if some]
