"""Where the optimizer state of a unit's parameters lies, and what of it is staged at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from umem.runtime.aliases import have_one_memory
from umem.runtime.model_parts import memory_bytes
from umem.streaming.plan.step_timing import divide_state
from umem.streaming.stage.homes import StateMemory
from umem.streaming.stage.sharded_tensors import local_parts
from umem.streaming.stage.staged_state import OptimizerState, find_spans

__all__ = ["StatePiece", "StatePlacement"]


@dataclass(frozen=True)
class StatePiece:
    """What is staged at a time."""

    parameters: list[torch.Tensor]
    size_bytes: int
    span: tuple[int, int] | None = None
    """Elements of a large parameter, from the first to before the second; None for all."""


class StatePlacement:
    """The state of some parameters that can be streamed.

    Parameters
    ----------
    state
        The state of the parameters.
    memory
        The device's memory for state.
    """

    def __init__(self, state: OptimizerState, memory: StateMemory) -> None:
        self._state = state
        self._memory = memory
        self.movable: dict[torch.Tensor, list[torch.Tensor]] = {
            parameter: [
                part
                for part in local_parts(filter(torch.is_tensor, values.values()))
                if self._may_stream(part) and not have_one_memory(part, parameter)
            ]
            for parameter, values in state.items()
        }
        """By parameter. Behind :meth:`place` what is in one place with all others."""

    def _may_stream(self, value: torch.Tensor) -> bool:
        """Not what has an alias on the device: its memory stays where it is."""
        memory = self._memory
        return memory.is_movable(value) or (memory.may_stage(value) and memory.is_home(value))

    def place(self, *, on_device: bool | None) -> bool:
        """Put the state on the device or in host memory, or leave it for None.

        All of it is in one place: on the host where the device has no room for some of it. What has
        an alias keeps its memory, from which it is staged if it is the host's.

        Returns
        -------
        bool
            Whether it is on the device.
        """
        memory = self._memory
        values = [it for some in self.movable.values() for it in some]
        movable = list(filter(memory.is_movable, values))
        for value in movable if on_device else ():
            memory.place(value, on_device=True)
        may_stay = on_device or on_device is None or not movable
        if may_stay and not any(map(memory.is_home, values)):
            return True
        for value in movable:
            memory.place(value, on_device=False)
        # The host may have no room for some.
        self.movable = {it: list(filter(memory.is_home, of)) for it, of in self.movable.items()}
        return False

    def divide(self, piece_bytes: int | None) -> list[StatePiece]:
        """Divide the parameters, and large ones of them, into what is staged at a time.

        Parameters
        ----------
        piece_bytes
            A parameter of more bytes is staged in spans of this size, and also one of much state;
            None to stage parameters as a whole.
        """
        parameters, most_bytes = list(self._state), self._memory.staged_bytes
        sizes = [sum(value.nbytes for value in values) for values in self.movable.values()]
        pieces = []
        for run in divide_state(sizes, most_bytes):
            some, run_bytes = parameters[run.start : run.stop], sum(sizes[run.start : run.stop])
            spans = []
            if piece_bytes is not None and len(some) == 1:
                (parameter,) = some
                count = math.ceil(
                    max(memory_bytes(parameter) / piece_bytes, run_bytes / most_bytes)
                )
                staged = self.movable[parameter]
                spans = find_spans(parameter, self._state[parameter], staged, count)
            for begin, end in spans:
                part_bytes = (end - begin) * (run_bytes // parameter.numel())
                pieces.append(StatePiece(some, part_bytes, (begin, end)))
            if not spans:
                pieces.append(StatePiece(some, run_bytes))
        return pieces
