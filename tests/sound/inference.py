"""Programs that use a model whose weights exceed the budget, and change them between calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from arrays import _on_this_stream
from small_trainings import Block, Net, Run, program

CALLS = 10


def _call(run: Run, model: Any, between: Callable[[], None] = lambda: None) -> None:
    for batch in run.batches(CALLS, rows=min(128, run.size.rows)):
        run.record("output", model(batch))
        between()


@torch.jit.script
def _shrink(weight: torch.Tensor) -> None:
    weight.mul_(0.995)


@program(budget=0.5)
def weights_changed_by_script(run: Run) -> None:
    """A scripted function changes weights in place."""
    model = run.frozen_model()

    def shrink() -> None:
        for weight in model.parameters():
            _shrink(weight)

    _call(run, model, shrink)


class _Clamping(Block):
    """Clamps a weight of its own through ``.data`` in each pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.clamp_(-0.02, 0.02)
        return super().forward(x)


@program(budget=0.5)
def weights_clamped_in_the_pass(run: Run) -> None:
    """Each block changes a weight of its own by ``.data`` within its forward pass."""
    _call(run, run.frozen_model(lambda size: Net(size, _Clamping)))


@program("cuda", "cupy", budget=0.5)
def weights_changed_by_new_arrays(run: Run) -> None:
    """CuPy changes weights by arrays that are made anew each time."""
    cupy = importlib.import_module("cupy")
    model = run.frozen_model()

    def shrink() -> None:
        with _on_this_stream():
            for weight in model.parameters():
                array = cupy.asarray(weight)
                array *= cupy.float32(0.995)

    _call(run, model, shrink)


@program("cuda", "cupy", budget=0.5, expected=("NO-PLAN",), page="addresses.md")
def weights_changed_by_kept_arrays(run: Run) -> None:
    """The same by arrays that are made once, before the first call: all weights stay."""
    cupy = importlib.import_module("cupy")
    model: Any = run.made(lambda: Net(run.size))
    model.requires_grad_(False)
    run.trains(model)
    arrays = [cupy.asarray(weight) for weight in model.parameters()]
    run.begin()

    def shrink() -> None:
        with _on_this_stream():
            for array in arrays:
                array *= cupy.float32(0.995)

    _call(run, model, shrink)
