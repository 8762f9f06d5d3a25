"""Finds and streams the trainings of scripts, as `umem.enable` does it on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_chain import LazyMover
from faults import let_out
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from rank_processes import WarningLines
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from umem import swap
from umem.capture.live import Clock, find_blocks
from umem.hardware import load_hardware
from umem.offloading import ActivationStore
from umem.runtime.model_parts import optimizer_parameters
from umem.streaming import StreamedStatus, StreamedTraining
from umem.streaming.activations import CopiedActivations
from umem.streaming.stage import Ring
from umem.streaming.step import refusal
from umem.streaming.tune import StreamTuner, planning
from umem.streaming.weights import ModelWeights

_BASE = 10**6
"""Bytes of all that is not streamed, at any moment."""

_SLACK = 256 << 20
"""What the tuner keeps free."""

_MIN_WEIGHT_BYTES = 256
_SLOTS = 2
"""For the state of that many units, beside weights."""


class Room(Clock, NoRoom):
    """A device whose memory is always as full, and a clock that ticks when it is read."""

    def __init__(self, more_bytes: int) -> None:
        self.budget_bytes = _SLACK + _BASE + more_bytes
        self._now = 0

    def mark(self) -> int:
        self._now += 1000
        return self._now

    def take_peak_bytes(self) -> int:
        return _BASE


class Streams:
    """Streams every training of a script.

    Parameters
    ----------
    more_bytes
        Of the budget, for resident state and slots. If negative, all state is streamed, and all
        activations are copied.
    in_backward
        Whether parameters are updated in the backward pass.
    also
        Parameters that optimizers will have later.
    eagerness
        Of the lanes: whether work may run before anything waits for it.
    recomputes
        Whether blocks run forward again in the backward pass, all that can; the others are copied.
    remakes
        Whether results of cheap modules are made again instead; all blocks are copied.
    streams_weights
        Whether the weights of every model that is called are away between their uses.
    """

    def __init__(
        self,
        more_bytes: int = -1,
        *,
        in_backward: bool = False,
        also: Iterable[torch.Tensor] = (),
        eagerness: float = 0.3,
        recomputes: bool = False,
        remakes: bool = False,
        streams_weights: bool = False,
    ) -> None:
        self.trainings: list[StreamedTraining] = []
        self.status: list[StreamedStatus] = []
        """Of the trainings at the end of the script."""
        self.made_again = 0
        """Trainings whose results were made again at the end."""
        self.weights: dict[nn.Module, ModelWeights] = {}
        """Those of each model, if they are streamed."""
        self._shared: dict[StreamedTraining, tuple[LazyLanes, HostStateMemory]] = {}
        """What the optimizers of one model share."""
        self.activations: list[CopiedActivations] = []
        """Those of each training that runs blocks again."""
        self._weights_parts: dict[nn.Module, tuple[LazyLanes, HostStateMemory]] = {}
        """What they share with its weights."""
        self._recomputes, self._streams_weights = recomputes or remakes, streams_weights
        self._remakes = remakes
        self._more_bytes = more_bytes
        self._in_backward = in_backward
        self._eagerness = eagerness
        self.also = list(also)

    def see_root(self, model: nn.Module) -> None:
        """Stream the weights of a model that is to be called, if that is asked for."""
        if self._streams_weights and any(True for _ in model.parameters()):
            lanes = LazyLanes(model, self._eagerness, 1)
            memory = HostStateMemory(lanes=lanes)
            weights = ModelWeights(
                model, lanes, memory, NoRoom(), ActivationStore("cpu"), min_bytes=_MIN_WEIGHT_BYTES
            )
            weights.begin_call()
            self.weights[model], self._weights_parts[model] = weights, (lanes, memory)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        updated = [*optimizer_parameters(optimizer), *self.also]
        others = [it for it in self.trainings if it.model is model and not it.is_closed]
        if others:
            lanes, memory = self._shared[others[0]]
            tuner, ring = others[0].tuner, others[0].step.units.ring
            lanes.may_update(updated)
        elif model in self.weights:
            lanes, memory = self._weights_parts[model]
            tuner, ring = None, Ring(memory, lanes)
            lanes.may_update(updated)
            if self._recomputes:
                store = ActivationStore("cpu", LazyMover(), min_bytes=256)
                self._run_again(model, optimizer, store)
        else:
            lanes = LazyLanes(model, self._eagerness, 1, also=updated)
            memory = HostStateMemory()
            store = ActivationStore("cpu", LazyMover(), min_bytes=256)
            if self._recomputes:
                tuner, ring = None, Ring(memory, lanes)
                self._run_again(model, optimizer, store)
            else:
                room = Room(self._more_bytes)
                hardware, ring = load_hardware("h200"), None
                share = 0.0 if self._more_bytes < 0 else 1.0
                tuner = StreamTuner(model, hardware, room, room, store, state_share=share)
        training = StreamedTraining(
            model,
            optimizer,
            lanes,
            memory,
            tuner,
            streams_state=not refusal(optimizer),
            step_in_backward=self._in_backward,
            ring=ring,
            weights=self.weights.get(model),
        )
        if tuner is None:
            training.step.units.set_plan(frozenset(), _SLOTS)
        self.trainings.append(training)
        self._shared[training] = lanes, memory

    def _run_again(self, model: nn.Module, optimizer: Optimizer, store: ActivationStore) -> None:
        """Prove in the next step which blocks may run twice, which they do from then on."""
        blocks = find_blocks(model)
        activations = CopiedActivations(model, blocks, store, let_out, may_recompute=True)
        if self._remakes and activations.remade is not None:
            activations.remade.begin()
        activations.set_plan({}, 1, is_measuring=True)
        self.activations.append(activations)

        def plan(*_: object) -> None:
            handle.remove()
            again = {} if self._remakes else dict.fromkeys(activations.proofs)
            kept = dict.fromkeys(activations.names - again.keys())
            activations.set_plan(kept, 1, is_measuring=False, recomputed=again)

        handle = optimizer.register_step_post_hook(plan)

    def close(self) -> None:
        """End streaming."""
        self.status = [it.status() for it in self.trainings]
        for training in self.trainings:
            training.abandon()
        for weights in self.weights.values():
            weights.close()
        for activations in self.activations:
            self.made_again += activations.remade is not None and activations.remade.is_on
            activations.close()


@contextmanager
def streaming(streams: Streams | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Find trainings while a script runs; none for a stock run."""
    if streams is None:
        yield
        return
    called: dict[nn.Module, None] = {}
    inner: set[nn.Module] = set()

    def see(module: nn.Module, _args: object) -> None:
        if not torch.compiler.is_compiling() and module not in inner:
            called.setdefault(module)
            inner.update(module.modules())
            streams.see_root(module)

    see.__module__ = "umem.runtime.classification"  # whose hook it stands for

    # Half of it would have room for small models as a whole.
    monkeypatch.setattr(planning, "_SLACK_SHARES", (1.0,))
    # The clock ticks where it is read only, which tells nothing of a step that is not measured.
    monkeypatch.setattr("umem.streaming.tune.tuner._MOST_CORRECTIONS", 0)
    # Slots are what is tried here, also where they have no room.
    monkeypatch.setattr("umem.streaming.plan.training_plan.LEAST", ((2, 1),))
    hooks: list[Callable[..., Any]] = []
    monkeypatch.setattr(swap, "register_optimizer_step_post_hook", hooks.append)
    monkeypatch.setattr("umem.streaming.stream_state", streams.attach)
    swap.manage_automatically(lambda: list(called), is_planned=False, streams_state=True)
    handles = [
        register_module_forward_pre_hook(see),
        *map(register_optimizer_step_post_hook, hooks),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        streams.close()


@contextmanager
def watching(streams: Streams | None) -> Iterator[Callable[[], dict[str, Any]]]:
    """As :func:`streaming`, in a rank. Returns what tells what became of its trainings."""

    def found() -> dict[str, Any]:
        if streams is None:
            return {}
        status = [it.status() for it in streams.trainings]
        tuning = [it.tuning for it in status if it.tuning is not None]
        return {
            "warnings": lines,
            "counts": [dataclasses.asdict(it.counts) for it in status],
            "state_bytes": [it.state_bytes for it in status],
            "plans": [it.plans for it in tuning],
            "copied": [it.activations.tensors_out for it in tuning],
        }

    with WarningLines() as lines, pytest.MonkeyPatch.context() as patch, streaming(streams, patch):
        yield found


def three_ways(train: Callable[[Any, Streams | None, Path], Any], what: Any, folder: Path) -> Any:
    """A training's results: stock, with all state streamed, and with all state on the device."""
    ways = (None, Streams(), Streams(10**6))
    return [train(what, streams, Path(f"{folder}{way}")) for way, streams in enumerate(ways)]
