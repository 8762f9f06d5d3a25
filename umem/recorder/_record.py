"""`umem.record`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

from torch import nn
from torch.optim.optimizer import Optimizer

from umem.errors import TraceError
from umem.recorder._clock import Clock
from umem.recorder._recording import StepRecording
from umem.recorder._signature import CallShapes

__all__ = ["record"]


def record(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int = 9,
    warmup: int = 2,
    blocks: Iterable[str | nn.Module] | None = None,
    name: str | None = None,
    clock: Clock | None = None,
    optimizer_parts: bool = True,
    peak_bytes: Callable[[], int] | None = None,
    known: Collection[CallShapes] = (),
) -> StepRecording:
    """Record a training run's own steps, as a trace at the level of modules.

    Nothing else has to be called: a step ends with ``optimizer.step()``. After `warmup` steps the
    memory of one is looked at, then `steps` are timed, and the rest of the block runs as if there
    was no recording, but for one look at the shapes of each batch. Where `steps` are 6 or more,
    each of them times only a part of the model's blocks, by turns.

    Parameters
    ----------
    model
        As it is called, or what is inside a wrapper such as DDP's.
    optimizer
        Its steps are the steps.
    steps
        How many are timed; durations are their medians. Each phase is timed in 3 of them or more,
        if there are so many.
    warmup
        How many are let pass first: 1 or more, for the first one makes the optimizer's state.
    blocks
        Modules whose passes are phases of their own, or their names. By default the layers of the
        model's longest chain of modules.
    name
        Of the trace; by default the model's class.
    clock
        Takes the time; by default CUDA's events for a model on a GPU, else the host's clock.
    optimizer_parts
        Whether the optimizer's step is cut by block. If not, it is one phase, as a fused one is to
        whoever follows it.
    peak_bytes
        The most bytes allocated on the device since it was called last, which tells what operators
        hold for a moment. By default umem's allocator is asked where it serves.
    known
        Shapes that a step's first call of the model has in steps that are not to be recorded.

    Returns
    -------
    StepRecording
        A context manager. Its ``trace`` is there when ``done`` is true.

    Raises
    ------
    TraceError
        If a number is too small, `blocks` are not the model's, or the optimizer trains none of its
        parameters.

    Examples
    --------
    >>> import torch, umem
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with umem.record(model, optimizer) as recording:
    ...     for _ in range(12):
    ...         model(torch.randn(4, 8)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> recording.trace.phase_names[-1]
    'optimizer 1'
    """
    # A wrapper, such as accelerate's, calls the step of the optimizer in it.
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = cast(Any, optimizer).optimizer
    _check(model, optimizer, steps, warmup)
    return StepRecording(
        model,
        optimizer,
        steps=steps,
        warmup=warmup,
        blocks=blocks,
        name=name,
        clock=clock,
        optimizer_parts=optimizer_parts,
        peak_bytes=peak_bytes,
        known=known,
    )


def _check(model: object, optimizer: object, steps: int, warmup: int) -> None:
    if not isinstance(model, nn.Module):
        raise TraceError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise TraceError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer")
    for key, value in (("steps", steps), ("warmup", warmup)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise TraceError(f"{key} is {value!r}: give a whole number from 1 on")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in trained for parameter in model.parameters()):
        raise TraceError(
            f"the optimizer trains no parameter of {type(model).__name__}: give the optimizer of "
            "this model, made after the model was moved or wrapped"
        )
