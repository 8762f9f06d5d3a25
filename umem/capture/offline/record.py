"""Recording of a training step of PyTorch, without memory and without a GPU."""

from __future__ import annotations

import functools
import gc
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from umem import patches
from umem.capture.offline.module_scopes import ModuleScopeTracker
from umem.capture.offline.recorder import Recorder
from umem.capture.storages import build_trace, lifetime
from umem.core.errors import TraceError
from umem.core.garbage import no_garbage_collection
from umem.torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from umem.trace import Trace

__all__ = ["Progress", "Step", "explained", "record_step"]

Step = Callable[[], object]
"""Runs one training step; its result is dropped."""

Progress = Callable[[str, float], None]
"""Called with the name of a stage and the share of it that is done, 0 to 1."""

_PROGRESS_OPERATORS = 256


def record_step(
    make_step: Callable[[], Step],
    *,
    name: str,
    source: str,
    metadata: Mapping[str, str | int | float] | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Run a training step without memory and record what it does to memory, operator by operator.

    `make_step` and the step run as they are, under torch's :class:`FakeTensorMode`: tensors have
    shapes and types but no data, so a step of any size runs anywhere. The step runs twice. The
    first run makes optimizer state, and gradients that are kept. The second one is recorded, so the
    trace is of a step that repeats.

    A phase is an operator that reads or writes memory; views are none. An operator on lists of
    tensors, such as a fused optimizer's, is one phase for each launch that it takes on a GPU. A
    tensor of the trace is a storage, which lives from its allocation to the moment when the last
    reference to it goes.

    Parameters
    ----------
    make_step : callable
        Makes model, optimizer and data, and returns the step: a function of no arguments that runs
        forward pass, backward pass and optimizer. The trace has one device, on which all tensors
        are, whether these functions put them on a GPU or on the CPU.
    name, source : str
        For :class:`Trace`.
    metadata : mapping, optional
        For :class:`Trace`.
    progress : callable, optional
        Called as ``progress("record", 0.25)`` with a stage, ``build``, ``warm up`` or ``record``,
        and the share of it that is done. Only ``record`` reports more than 0 and 1.

    Returns
    -------
    Trace
        Without durations, which :func:`umem.hardware.with_durations` adds. Its classes: parameters
        that need a gradient are ``weights`` and others ``frozen_weights``; gradients accumulated
        into ``grad`` are ``gradients``; an optimizer's tensors are ``optimizer_state``; other
        tensors born in the step are ``activations``, or ``other`` inside an optimizer's step; all
        others, such as data that is kept from step to step, are ``other``.

    Raises
    ------
    TraceError
        If `make_step` does not return a function, if it or the step raises (then the cause), if the
        step needs the data of a tensor, or if it does nothing with memory.

    Examples
    --------
    >>> import torch
    >>> def make_step():
    ...     model = torch.nn.Linear(1024, 1024)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     inputs = torch.randn(32, 1024)
    ...     def step():
    ...         model(inputs).square().mean().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     return step
    >>> record_step(make_step, name="linear", source="example").phase_names[0]
    'forward: aten.addmm'
    """
    warm_operators = 0

    def report(stage: str, share: float) -> None:
        if progress is not None:
            progress(stage, share)

    def on_operator(count: int) -> None:
        if warm_operators and count % _PROGRESS_OPERATORS == 0:
            report("record", min(count / warm_operators, 1.0))

    @contextmanager
    def stage(stage: str, running: str) -> Iterator[None]:
        report(stage, 0.0)
        with explained(name, running):
            yield
        report(stage, 1.0)

    maker = getattr(make_step, "__name__", "")
    maker = maker if maker.isidentifier() else "make_step"
    scopes, fake = ModuleScopeTracker(), _FakeMode()
    recorder = Recorder(fake, scopes, on_operator)
    with scopes, _one_device(), fake, recorder:
        with stage("build", maker):
            step = make_step()
        if not callable(step):
            raise TraceError(
                f"{name}: {maker} returned {type(step).__name__}, which cannot be called: "
                "return a function of no arguments that runs one training step"
            )
        with stage("warm up", "the step"):
            recorder.warm_up()
            step()
        warm_operators = recorder.operator_count
        gc.collect()  # it would run at other moments in each recording
        with stage("record", "the step"), no_garbage_collection(), recorder.recording():
            step()
    if not recorder.phases:
        raise TraceError(f"{name}: the step ran no operator that reads or writes memory")
    storages, phases = recorder.storages.records, recorder.phases
    lifetimes = [lifetime(storage, len(phases)) for storage in storages]
    return build_trace(
        storages, lifetimes, phases, name=name, source=source, metadata=metadata or {}
    )[0]


class _FakeMode(FakeTensorMode):
    """A mode that tensors share with their deep copies, which get copies of all attributes."""

    def __deepcopy__(self, _memo: object) -> _FakeMode:
        return self


# torch without CUDA refuses to move even a tensor without memory to a GPU, and its autograd has no
# thread for one. So all tensors for a GPU are put on the CPU, where operators read and write the
# same.

_CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Replaces the device in calls of torch's functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(_CPU)
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = {key: _on_cpu(key, value) for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = tuple(_on_cpu("device", value) for value in args)
        return func(*args, **kwargs)


def _on_cpu(key: str, value: Any) -> Any:
    if key == "pin_memory":
        return False
    return _CPU if key == "device" and _is_gpu(value) else value


def _is_gpu(value: object) -> bool:
    if isinstance(value, str | torch.device):
        return str(value).partition(":")[0] == "cuda"
    return type(value) is int  # a bare number is a GPU's; True and False are other arguments'


@contextmanager
def _one_device() -> Iterator[None]:
    """Put on the CPU what the program puts on a GPU, and autocast there too."""
    patches.wrap("autocast", _autocast_on_cpu)
    try:
        with _OnCpu():
            yield
    finally:
        patches.undo("autocast")


def _autocast_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_cpu(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            dtype = dtype or torch.get_autocast_dtype("cuda")
        original(self, "cpu", dtype, enabled, cache_enabled)

    return on_cpu


_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")),
    Path(torch.__file__).resolve().parents[1],  # may be on PYTHONPATH
)


@contextmanager
def explained(name: str, running: str) -> Iterator[None]:
    """Turn an exception of the user's program into a TraceError with its line and the remedy.

    `running` is the part of the program that runs: a function, ``the step``, ``importing it``.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        place = _place(error)
        start = f"{name}: {place}: " if place else f"{name}: "
        raise TraceError(start + _reason(error, running)) from error


def _reason(error: BaseException, running: str) -> str:
    if isinstance(error, TraceError):
        return str(error)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return (
            f"{error.func} needs the data of a tensor, which a step recorded without memory does "
            "not have: leave out .item(), float() and `if` on tensors, and masks used as indices; "
            "return tensors from the step instead"
        )
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} cannot be recorded: it does not say which shape it returns"
    if isinstance(error, SystemExit):
        return (
            f"{running} ended the program: put what a script does when run under "
            "`if __name__ == '__main__':`"
        )
    message = str(error)
    reason = f"{running} raised {type(error).__name__}: {message.strip().partition(chr(10))[0]}"
    if "not compiled with CUDA" in message or "not linked with support" in message:
        reason += ": leave out calls of torch.cuda; tensors and modules may say device='cuda'"
    return reason


def _place(error: BaseException) -> str:
    """File, line and function of the innermost frame in the user's own code, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not path.is_file():
            continue
        path = path.resolve()
        if path.is_relative_to(_PACKAGE) or any(map(path.is_relative_to, _LIBRARIES)):
            continue
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""
