"""Runs on the CPU whose updates and copies are late, or in which all that may is computed twice.

What does not wait, or is not what it was, shows in the records.
"""

from __future__ import annotations

import functools
from typing import Any

from activation_chain import LazyMover
from faults import let_out
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from small_trainings import HOST_SIZE, Run, Size
from streamed_programs import STAGED_BYTES

from umem.capture.live import find_blocks
from umem.offloading import ActivationStore
from umem.runtime.held_memory import note_export
from umem.runtime.torch_hooks.memory_access import on_export
from umem.streaming import StreamedTraining
from umem.streaming.activations import CopiedActivations
from umem.streaming.stage import Ring
from umem.streaming.weights import ModelWeights

_MIN_WEIGHT_BYTES = 512

on_export(note_export)  # as `umem.enable` does, until the process ends


class LateRun(Run):
    """A run on late lanes, from its second step on.

    Parameters
    ----------
    eagerness
        Probability that queued work runs at an occasion; without occasions it waits for a wait.
    seed
        For the choice of that work.
    streams_weights
        Whether weights are away between their uses, too. Those of models that are not trained are.
    slots
        For the state of that many units.
    copies
        Whether activations of every second block are copied out and back.
    """

    is_umem = True

    def __init__(
        self,
        eagerness: float = 0.0,
        seed: int = 0,
        size: Size = HOST_SIZE,
        *,
        streams_weights: bool = False,
        slots: int = 2,
        copies: bool = False,
    ) -> None:
        super().__init__(size, "cpu")
        self._copies, self._activations = copies, list[CopiedActivations]()
        self._eagerness, self._seed = eagerness, seed
        self._streams_weights, self._slots = streams_weights, slots
        self._trainings: list[StreamedTraining] = []
        self._weights: list[ModelWeights] = []
        self._begun: set[int] = set()

    def begin(self) -> None:
        """Stream what is trained, and is not streamed yet."""
        for model, optimizers in self.trained:
            if id(model) not in self._begun:
                self._begun.add(id(model))
                self._stream(model, optimizers)

    def _stream(self, model: Any, optimizers: tuple[Any, ...]) -> None:
        lanes = LazyLanes(model, self._eagerness, self._seed)
        memory = HostStateMemory(
            staged_bytes=STAGED_BYTES, parameters=model.parameters(), lanes=lanes
        )
        weights = None
        if self._streams_weights or not optimizers:
            store = ActivationStore("cpu")
            weights = ModelWeights(
                model, lanes, memory, NoRoom(), store, min_bytes=_MIN_WEIGHT_BYTES
            )
            weights.begin_call()
            self._weights.append(weights)
        ring = Ring(memory, lanes)
        for optimizer in optimizers:
            training = StreamedTraining(model, optimizer, lanes, memory, weights=weights, ring=ring)
            training.step.units.set_plan(frozenset(), self._slots)
            self._trainings.append(training)
        if self._copies and optimizers:
            self._activations.append(_copied(model))

    @property
    def active(self) -> int:
        """Steps that were streamed, and copies of weights that were fetched."""
        steps = sum(training.counts.streamed for training in self._trainings)
        return steps + sum(its.streamed.counts.fetched for its in self._weights)

    def close(self) -> None:
        """End streaming."""
        for activations in self._activations:
            activations.close()
        for training in self._trainings:
            training.close()
        for its in self._weights:
            its.close()


def _copied(model: Any) -> CopiedActivations:
    blocks = find_blocks(model)
    store = ActivationStore("cpu", LazyMover(), min_bytes=64)
    activations = CopiedActivations(model, blocks, store, let_out)
    activations.set_plan({it.name: None for it in blocks[1::2]}, 1, is_measuring=False)
    return activations


class RepeatedRun(LateRun):
    """A late run in which blocks are run again in the backward pass, and results made again.

    Blocks are watched in the second step, and results proved in the third one.
    """

    def __init__(self, *, streams_weights: bool = False) -> None:
        super().__init__(0.3, streams_weights=streams_weights)
        self.again: set[str] = set()
        """Blocks that were run again."""

    def begin(self) -> None:
        """Stream and watch what is trained."""
        super().begin()
        for model, optimizers in self.trained[len(self._activations) :]:
            store = ActivationStore("cpu", LazyMover(), min_bytes=64)
            blocks = find_blocks(model)
            its = CopiedActivations(model, blocks, store, let_out, may_recompute=True)
            its.set_plan({}, 1, is_measuring=True)
            its.begin_step()
            self._activations.append(its)
            for optimizer in optimizers:
                optimizer.register_step_pre_hook(functools.partial(_update_begins, its))

    def step_ended(self) -> None:
        """Run again what may, by turns with making results again."""
        for its in self._activations:
            again = its.proofs if self.step % 2 else {}
            self.again.update(again)
            if self.step == 2 and its.remade is not None:
                its.remade.begin()
            its.set_plan({}, 1, is_measuring=False, recomputed=dict.fromkeys(again))
            its.begin_step()


def _update_begins(activations: CopiedActivations, *_: object) -> None:
    activations.update_begins()
