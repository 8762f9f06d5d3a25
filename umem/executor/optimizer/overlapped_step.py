"""A step some of whose optimizer's parts run beside the backward pass, as planners see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import Optimizer

from umem.core.classes import TensorClass
from umem.executor.optimizer.partial_step import Part, part_name
from umem.runtime.cuda_events import new_event
from umem.trace import (
    Access,
    Trace,
    is_optimizer_phase,
    phase_of_access,
    require_durations,
    with_accesses,
)

__all__ = ["OverlappedOptimizerStep", "can_run_beside", "with_parts_beside"]

_OF_PARTS = [
    it.number for it in (TensorClass.WEIGHTS, TensorClass.GRADIENTS, TensorClass.OPTIMIZER_STATE)
]
"""What a part uses. Others are of the block's backward pass, which it begins in."""


def with_parts_beside(
    trace: Trace, in_place: npt.NDArray[np.bool_], slowdown_s_per_byte: float
) -> tuple[Trace, dict[str, int]]:
    """Let what the optimizer's parts use in place be used while later phases compute.

    Such a part takes the link's time, and next to none of the device's. So it counts as part of the
    longest phase before the next such part: state is used there, and weights and gradients are in
    use until then. Parts behind which nothing else comes stay as they are.

    Parameters
    ----------
    trace
        With durations, and with parts of the optimizer's step in the backward pass.
    in_place
        bool[tensors]: what is used in place on the host.
    slowdown_s_per_byte
        What a byte that kernels move over the link costs the computation beside them, seconds.

    Returns
    -------
    Trace
        The same phases and tensors, by the same numbers.
    dict of str to int
        The parts that run beside others by name, each with the last phase that it runs beside.
    """
    phase, tensor = phase_of_access(trace), trace.access_tensor
    own = np.array([is_optimizer_phase(name) for name in trace.phase_names])
    duration_s = require_durations(trace).copy()
    parts = np.unique(phase[own[phase] & in_place[tensor]])
    beside = {
        int(part): int(later[np.argmax(duration_s[later])])
        for part, end in pairwise([*parts, trace.phase_count])
        if len(later := np.flatnonzero(~own[part:end]) + part)
    }
    if not beside:
        return trace, {}

    target = np.arange(trace.phase_count)
    target[list(beside)] = list(beside.values())
    is_part = target[phase] != phase
    moves = is_part & in_place[tensor]
    stays = is_part & ~in_place[tensor] & np.isin(trace.tensor_class[tensor], _OF_PARTS)
    for way in (Access.READ, Access.WRITE):
        moved_bytes = np.where(moves & (trace.access_mode & way > 0), trace.tensor_bytes[tensor], 0)
        np.add.at(duration_s, target[phase], moved_bytes * slowdown_s_per_byte)
    duration_s[list(beside)] = 0.0
    # What a part uses on the device is used by both phases.
    phases = np.concatenate([np.where(moves, target[phase], phase), target[phase[stays]]])
    tensors = np.concatenate([tensor, tensor[stays]])
    modes = np.concatenate([trace.access_mode, trace.access_mode[stays]])
    _, kept = np.unique(phases * trace.tensor_count + tensors, return_index=True)
    last_phase = trace.last_phase.copy()
    np.maximum.at(last_phase, tensor[stays], target[phase[stays]].astype(np.int32))
    changed = replace(trace, duration_s=duration_s, last_phase=last_phase)
    names = {part_name(trace.phase_names[part]): last for part, last in beside.items()}
    return with_accesses(changed, phases[kept], tensors[kept], modes[kept]), names


_CHUNK = 65_536
"""Elements that one thread block of torch's fused optimizers updates."""

_CHUNKS_AT_ONCE = 16
"""On one H200 a step with its state on the host took 506 ms in this way, 513 ms with 8 chunks at
once, 515 ms with 32, and 543 ms with whole blocks' parameters, as long as behind the backward pass
(0.56 B parameters, 489 ms without the optimizer; benchmarks/results/h200-step-beside.txt)."""

_OWN_STATE = ("exp_avg", "exp_avg_sq")

_Row = tuple[torch.Tensor, ...]
"""A parameter, its gradient, its moments, and its step count last; all but the last are flat."""

_Work = tuple[dict[str, Any], Sequence[_Row]]
"""A parameter group of the optimizer, and its rows to update."""


class _Running(NamedTuple):
    """A part that was launched."""

    end: torch.cuda.Event
    asking: torch.cuda.Stream
    """The stream that owns the gradients' memory: its next kernels may reuse it."""
    work: Sequence[_Work]
    """Kept alive until the part has finished."""


def can_run_beside(optimizer: Optimizer) -> bool:
    """Whether an optimizer's parts may overlap with the backward pass: fused Adam or AdamW.

    Other kernels would read and write the state on the host several times.
    """
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
        _is_plain_group(group) for group in optimizer.param_groups
    )


class OverlappedOptimizerStep:
    """Updates blocks' parameters on a separate stream while the backward pass runs.

    A kernel that uses memory on the host waits for the link, and meanwhile occupies its
    multiprocessors. So each launch updates few chunks: enough to fill the link, while the backward
    pass has the rest of the device. The values are those of the optimizer's own step, which runs
    the same kernel on all chunks.

    Parameters
    ----------
    optimizer
        One for which :func:`can_run_beside` holds. Only a weak reference is kept.
    device
        Device of its parameters. On the CPU there is no stream, and parts run synchronously.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.names: frozenset[str] = frozenset()
        """The parts that overlap with the backward pass."""
        self._optimizer = weakref.ref(optimizer)
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._running: dict[str, _Running] = {}

    def run(self, name: str, part: Part) -> bool:
        """Launch a part after the current work of the current stream, in a backward pass.

        Returns
        -------
        bool
            False if the part cannot run in this way; nothing was done then.
        """
        optimizer = self._optimizer()
        if name not in self.names or optimizer is None:
            return False
        work: list[_Work] = []
        for group, parameters in zip(optimizer.param_groups, part, strict=True):
            rows = [_row(optimizer, it, amsgrad=group["amsgrad"]) for it in parameters]
            known = [row for row in rows if row is not None]
            if (known and not _is_plain_group(group)) or len(known) < len(rows):
                return False
            work.append((group, known))
        if self._device.type == "cuda":
            self._update_on_stream(name, work)
        else:
            _update(work)
        return True

    def _update_on_stream(self, name: str, work: Sequence[_Work]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        # After the backward pass every weight has to be updated.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self.join_all)
        asking = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(asking)
        with torch.cuda.stream(self._stream):
            _update(work)
        end = new_event()
        end.record(self._stream)
        self._running[name] = _Running(end, asking, work)

    def join(self, names: Iterable[str]) -> None:
        """Make the current stream wait for these parts, if they were launched."""
        for name in names:
            part = self._running.pop(name, None)
            if part is not None:
                part.asking.wait_event(part.end)
                current = torch.cuda.current_stream(self._device)
                if current != part.asking:
                    current.wait_event(part.end)

    def join_all(self) -> None:
        """Make the current stream wait for all launched parts."""
        self.join(list(self._running))


def _is_plain_group(group: dict[str, Any]) -> bool:
    numbers = (group["lr"], *group["betas"])
    return (
        bool(group["fused"])
        and not group["differentiable"]
        and not any(isinstance(it, torch.Tensor) for it in numbers)
    )


def _row(optimizer: Optimizer, parameter: torch.Tensor, *, amsgrad: bool) -> _Row | None:
    """The tensors for the update of a parameter; None if they cannot be cut into pieces."""
    state = optimizer.state.get(parameter, {})
    names = (*_OWN_STATE, "max_exp_avg_sq") if amsgrad else _OWN_STATE
    found = [parameter.detach(), parameter.grad, *(state.get(name) for name in names)]
    tensors = [it for it in found if isinstance(it, torch.Tensor)]
    step = state.get("step")
    if len(tensors) < len(found) or not isinstance(step, torch.Tensor):
        return None
    if any(
        type(it) is not torch.Tensor
        or it.layout is not torch.strided
        or it.is_complex()
        or not it.is_contiguous()
        or (it.dtype, it.device, it.shape) != (parameter.dtype, parameter.device, parameter.shape)
        for it in tensors
    ):
        return None
    return (*(it.view(-1) for it in tensors), step)


@torch.no_grad()
def _update(work: Sequence[_Work]) -> None:
    for group, rows in work:
        if not rows:
            continue
        torch._foreach_add_([row[-1] for row in rows], 1)
        is_decoupled = group["decoupled_weight_decay"]
        kernel: Callable[..., None] = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
        for piece in _pieces(rows):
            weights, gradients, first, second, *most, steps = map(list, zip(*piece, strict=True))
            kernel(
                weights,
                gradients,
                first,
                second,
                most[0] if most else [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
                grad_scale=None,
                found_inf=None,
            )


def _pieces(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Rows cut into launches of one dtype each. A small tensor counts as a whole chunk."""
    piece: list[_Row] = []
    room = _CHUNKS_AT_ONCE
    for *tensors, step in rows:
        size, begin = tensors[0].numel(), 0
        while begin < size:
            if piece and (room == 0 or piece[0][0].dtype != tensors[0].dtype):
                yield piece
                piece, room = [], _CHUNKS_AT_ONCE
            end = min(size, begin + room * _CHUNK)
            piece.append((*(it[begin:end] for it in tensors), step))
            room -= -(-(end - begin) // _CHUNK)
            begin = end
    if piece:
        yield piece
