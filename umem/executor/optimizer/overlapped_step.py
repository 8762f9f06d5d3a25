"""Updates optimizer state that is used in place on the host, beside the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from umem.executor.optimizer.partial_step import Part
from umem.runtime.cuda_events import new_event
from umem.torch_compat import foreach_add, fused_adam, fused_adamw, queue_backward_callback

__all__ = ["CHUNK_ELEMENTS", "OverlappedOptimizerStep", "can_run_beside", "split_into_launches"]

CHUNK_ELEMENTS = 65_536
"""Elements that one thread block of torch's fused optimizers updates."""

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
    chunks
        Chunks of 65,536 elements per launch: the hardware's ``overlapped_update_chunks``.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, chunks: int) -> None:
        self.names: frozenset[str] = frozenset()
        """The parts that overlap with the backward pass."""
        self._optimizer = weakref.ref(optimizer)
        self._device = device
        self._chunks = chunks
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
            _update(work, self._chunks)
        return True

    def _update_on_stream(self, name: str, work: Sequence[_Work]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        # After the backward pass every weight has to be updated.
        queue_backward_callback(self.join_all)
        asking = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(asking)
        with torch.cuda.stream(self._stream):
            _update(work, self._chunks)
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
def _update(work: Sequence[_Work], chunks: int) -> None:
    for group, rows in work:
        if not rows:
            continue
        foreach_add([row[-1] for row in rows], 1)
        is_decoupled = group["decoupled_weight_decay"]
        kernel = fused_adamw if is_decoupled else fused_adam
        for piece in split_into_launches(rows, chunks):
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


def split_into_launches(rows: Sequence[_Row], chunks: int) -> Iterator[list[_Row]]:
    """Rows cut into launches of one dtype each. A small tensor counts as a whole chunk."""
    piece: list[_Row] = []
    room = chunks
    for *tensors, step in rows:
        size, begin = tensors[0].numel(), 0
        while begin < size:
            if piece and (room == 0 or piece[0][0].dtype != tensors[0].dtype):
                yield piece
                piece, room = [], chunks
            end = min(size, begin + room * CHUNK_ELEMENTS)
            piece.append((*(it[begin:end] for it in tensors), step))
            room -= -(-(end - begin) // CHUNK_ELEMENTS)
            begin = end
    if piece:
        yield piece
