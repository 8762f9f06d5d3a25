"""Why a step could not be recorded: the line of the user's program, and the remedy."""

from __future__ import annotations

import functools
import gc
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from umem.capture.offline.module_scopes import Places
from umem.capture.offline.operators import (
    Operator,
    Uses,
    describe_operator,
    operator_flops,
    operator_precision,
    phase_kind,
    split_launches,
    tensors_in,
)
from umem.capture.storages import BEFORE, Phase, Storages, build_trace, lifetime
from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.runtime.model_parts import optimizer_state, unwrapped, weight_classes
from umem.torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    tree_map_only,
)
from umem.trace import OPTIMIZER, Access, PhaseKind, Precision, Trace

__all__ = ["Phase", "Progress", "Recorder", "Step", "explained", "one_device", "record_step"]

_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")),
    Path(torch.__file__).resolve().parents[1],  # may be on PYTHONPATH
)

_GUARD = "`if __name__ == '__main__':`"


@contextmanager
def explained(name: str, stage: str) -> Iterator[None]:
    """Turn whatever is raised inside into a TraceError that says where and what to do.

    Parameters
    ----------
    name
        What is being recorded.
    stage
        What runs: ``make_step``, ``the step``, ``importing it``.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        place = _place(error)
        start = f"{name}: {place}: " if place else f"{name}: "
        raise TraceError(start + _reason(error, stage)) from error


def _reason(error: BaseException, stage: str) -> str:
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
        return f"{stage} ended the program: put what a script does when run under {_GUARD}"
    said = f"{stage} raised {type(error).__name__}: {_first_line(error)}"
    if "not compiled with CUDA" in str(error) or "not linked with support" in str(error):
        return f"{said}: leave out calls of torch.cuda; tensors and modules may say device='cuda'"
    return said


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _place(error: BaseException) -> str:
    """File, line and function of the innermost frame that is the user's own, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not path.is_file():
            continue
        path = path.resolve()
        if path.is_relative_to(_PACKAGE) or any(map(path.is_relative_to, _LIBRARIES)):
            continue
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


# A program written for a GPU, run on a machine without one.
#
# A trace has one device. torch without CUDA refuses to move a tensor to a GPU even where no memory
# is behind it, and its autograd has no thread for one. So whatever the program puts on a GPU is put
# on the CPU: what an operator reads and writes does not depend on it.

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
    if key == "device" and _is_gpu(value):
        return _CPU
    return value


def _is_gpu(value: object) -> bool:
    if isinstance(value, str | torch.device):
        return str(value).partition(":")[0] == "cuda"
    # A bare number is a GPU's, except True and False, which are other arguments' values.
    return isinstance(value, int) and not isinstance(value, bool)


@contextmanager
def one_device() -> Iterator[None]:
    """Put on the CPU what a program puts on a GPU, and autocast there what it autocasts."""
    start: Callable[..., None] = torch.autocast.__init__

    @functools.wraps(start)
    def on_cpu(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            dtype = dtype or torch.get_autocast_dtype("cuda")
        start(self, "cpu", dtype, enabled, cache_enabled)

    with patch.object(torch.autocast, "__init__", on_cpu), _OnCpu():
        yield


# Sees every operator of a step and writes down which storages it reads and writes.

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class Recorder(TorchDispatchMode):
    """Passes operators on to a :class:`FakeTensorMode`, and records those of one step.

    Parameters
    ----------
    fake
        Entered before this mode.
    places
        Says where an operator runs.
    on_operator
        Called at each operator, with the number of operators of this run of the step.
    """

    def __init__(
        self, fake: FakeTensorMode, places: Places, on_operator: Callable[[int], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: list[Phase] = []
        self.storages = Storages(lambda: len(self.phases))
        self.operator_count = 0
        self._fake = fake
        self._places = places
        self._on_operator = on_operator
        self._is_warming_up = False
        self._is_recording = False
        # Real tensors and what stands for them; both are kept, so that a number stays taken.
        self._fakes_of_real: dict[int, tuple[torch.Tensor, FakeTensor]] = {}

    def warm_up(self) -> None:
        """Begin the step that shows which parameters take part."""
        self.operator_count = 0
        self._is_warming_up = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the step that runs inside the block."""
        self.operator_count = 0
        self._is_warming_up = False
        self._places.find_parameters()
        self._tag_known()
        with ExitStack() as hooks:
            for parameter, name in self._places.parameter_names.items():
                if parameter.requires_grad and parameter.is_leaf:
                    hook = parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))
                    hooks.callback(hook.remove)
            # For gradients that did not come from the engine's accumulation.
            hooks.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
            self._is_recording = True
            yield
        self._is_recording = False
        self._tag_known()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Questions to a fake tensor, and marks for the profiler.
        if getattr(func, "namespace", "") in ("prim", "profiler"):
            return func(*args, **kwargs)
        if not all(issubclass(kind, FakeTensor) or kind in _PLAIN_TYPES for kind in types):
            return NotImplemented  # a subclass, which calls operators on the tensors in it
        self.operator_count += 1
        self._on_operator(self.operator_count)
        operator = describe_operator(func)
        if operator.base not in ("lift", "lift_fresh"):  # they take a real tensor and copy it
            args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        self._places.note_node()
        result = func(*args, **kwargs)
        # What it remembers are weak references, and a tensor that has one cannot be swapped, which
        # is how `Module.to` works on fake tensors. It is needed for real tensors only, and those
        # are kept here.
        self._fake.fake_tensor_converter.tensor_memo.clear()
        groups = list(operator.groups(args, kwargs))
        if self._is_recording:
            self._record(func, operator, groups, args, kwargs, result)
        elif self._is_warming_up:
            for value, _ in groups:
                self._note_parameters(value)
        return result

    # ------------------------------------------------------------------ phases

    def _record(
        self,
        func: Any,
        operator: Operator,
        groups: list[tuple[Any, Access]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
    ) -> None:
        inputs = [(tensor, access) for value, access in groups for tensor in tensors_in(value)]
        name = self._phase_name(operator, inputs)
        for tensor, _ in inputs:
            if isinstance(tensor, FakeTensor):
                self.storages.add(tensor, "input", TensorClass.OTHER, BEFORE)
        results = list(tensors_in(result))
        # What an operator returns is a view of an argument, or new.
        fresh = {id(tensor) for tensor in results if self.storages.find(tensor) is None}
        born_as = TensorClass.OTHER if self._places.is_optimizer else TensorClass.ACTIVATIONS
        for position, tensor in enumerate(results):
            part = f"{name} [{position}]" if len(results) > 1 else name
            self.storages.add(tensor, part, born_as, len(self.phases))
        if not operator.is_data_op:
            return
        if operator.is_split:
            for uses, launch_results in split_launches(groups, result):
                part = self._phase_name(operator, uses)
                self._add_phase(part, operator, PhaseKind.KERNEL, 0.0, uses, launch_results, fresh)
            return
        flops = operator_flops(func, args, kwargs, result)
        kind = phase_kind(operator, args, result)
        self._add_phase(name, operator, kind, flops, inputs, results, fresh)

    def _add_phase(
        self,
        name: str,
        operator: Operator,
        kind: PhaseKind,
        flops: float,
        uses: Uses,
        results: list[torch.Tensor],
        fresh: set[int],
    ) -> None:
        accesses: dict[int, Access] = {}
        read_bytes: dict[int, int] = {}
        written_bytes: dict[int, int] = {}
        for position, (tensor, declared) in enumerate(uses):
            number = self.storages.find(tensor)
            if number is None:
                continue
            access = declared
            nbytes = operator.touched_bytes(position, tensor, results)
            if declared is Access.WRITE and nbytes < self.storages.records[number].bytes:
                access = Access.READ | Access.WRITE  # what lies outside the view survives
            accesses[number] = accesses.get(number, access) | access
            if declared & Access.READ:
                read_bytes[number] = read_bytes.get(number, 0) + nbytes
            if declared & Access.WRITE:
                written_bytes[number] = written_bytes.get(number, 0) + nbytes
        for tensor in results:
            number = self.storages.find(tensor) if id(tensor) in fresh else None
            if number is not None:
                accesses[number] = Access.WRITE
                written_bytes[number] = self.storages.records[number].bytes
        if not written_bytes:
            return  # a view, or a question about shapes
        for number, access in accesses.items():
            self.storages.note_first_access(number, access)
        floats = [t.dtype for t, _ in uses if t.is_floating_point()]
        floats += [t.dtype for t in results if t.is_floating_point()]
        self.phases.append(
            Phase(
                name=name,
                kind=kind,
                precision=operator_precision(floats[0]) if floats else Precision.FP32,
                flops=flops,
                # Views of one storage add up to no more than the storage.
                memory_bytes=sum(
                    min(nbytes, self.storages.records[number].bytes)
                    for part in (read_bytes, written_bytes)
                    for number, nbytes in part.items()
                ),
                accesses=accesses,
            )
        )

    def _phase_name(self, operator: Operator, uses: Uses) -> str:
        where = self._places.where()
        if where == OPTIMIZER and uses:
            number = self.storages.find(uses[0][0])
            if number is not None:
                where = f"{OPTIMIZER} {self.storages.records[number].name}"
        return f"{where}: {operator.name}" if where else operator.name

    # ------------------------------------------------------------------ classes

    def _note_parameters(self, value: object) -> None:
        for tensor in tensors_in(value):
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            if is_parameter or (tensor.requires_grad and tensor.is_leaf):
                self._places.add_parameter(tensor)

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def tag(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._tag(parameter.grad, f"{name}.grad", TensorClass.GRADIENTS)

        return tag

    def _before_optimizer(self, _optimizer: Optimizer, *_: object) -> None:
        for parameter, name in self._places.parameter_names.items():
            if parameter.grad is not None:
                self._tag(parameter.grad, f"{name}.grad", TensorClass.GRADIENTS)

    def _tag_known(self) -> None:
        """Give a name and class to what parameters and optimizers hold now."""
        names = self._places.parameter_names
        for name, buffer in self._places.buffers():
            self._tag(buffer, name, TensorClass.OTHER)
        for parameter, name in names.items():
            if parameter.is_leaf and parameter.grad is not None:
                self._tag(parameter.grad, f"{name}.grad", TensorClass.GRADIENTS)
        for optimizer in self._places.optimizers():
            for name, tensor in optimizer_state(optimizer, names):
                self._tag(tensor, name, TensorClass.OPTIMIZER_STATE)
        for parameter, tensor_class in weight_classes(names):
            self._tag(parameter, names[parameter], tensor_class)

    def _tag(self, tensor: torch.Tensor, name: str, tensor_class: TensorClass) -> None:
        for part in unwrapped(tensor):
            number = self.storages.add(self._as_fake(part), name, tensor_class, BEFORE)
            if number is not None:
                record = self.storages.records[number]
                record.name, record.tensor_class = name, tensor_class

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or what stands for one that was made outside of the recording."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.requires_grad:
            raise TraceError(
                f"a {tuple(tensor.shape)} tensor that needs a gradient was made outside of "
                "make_step, with real memory: make the model inside make_step"
            )
        known = self._fakes_of_real.get(id(tensor))
        if known is None:
            known = (tensor, self._fake.from_tensor(tensor))
            self._fakes_of_real[id(tensor)] = known
        return known[1]


# Recording a training step of PyTorch, without memory and without a GPU.

Step = Callable[[], object]
"""Runs one training step; what it returns is dropped."""

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of that is done, 0 to 1."""

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
    first run makes what later ones find: optimizer state, and gradients that are kept. The second
    one is recorded, so the trace is of a step that repeats.

    A phase is an operator that reads or writes memory; views are none. An operator on lists of
    tensors, such as a fused optimizer's, is one phase for each launch that it takes on a GPU. A
    tensor of the trace is a storage, with the time from its allocation to the moment when the last
    reference to it goes.

    Parameters
    ----------
    make_step : callable
        Makes model, optimizer and data, and returns the step: a function of no arguments that runs
        forward pass, backward pass and optimizer. Whatever either puts on a GPU counts as being on
        the one device of the trace, as does what they put on the CPU.
    name, source : str
        For :class:`Trace`.
    metadata : mapping, optional
        For :class:`Trace`.
    progress : callable, optional
        Called as ``progress("record", 0.25)``: what is being done, ``build``, ``warm up`` or
        ``record``, and the share of it that is done, of which only ``record`` knows more than 0
        and 1.

    Returns
    -------
    Trace
        Without durations: :func:`umem.hardware.with_durations` has them. Its classes: parameters
        that need a gradient are ``weights`` and others ``frozen_weights``; what is accumulated into
        ``grad`` is ``gradients``; what an optimizer holds is ``optimizer_state``; what else is
        born in the step is ``activations``, or ``other`` inside an optimizer's step; the rest, such
        as data that is kept from step to step, is ``other``.

    Raises
    ------
    TraceError
        If `make_step` does not return a function, if it or the step raises, which is then the
        cause, if the step needs the data of a tensor, or if it does nothing with memory.

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
    report = progress or _no_progress
    warm_operators = 0

    def on_operator(count: int) -> None:
        if warm_operators and count % _PROGRESS_OPERATORS == 0:
            report("record", min(count / warm_operators, 1.0))

    places = Places()
    fake = FakeTensorMode()
    recorder = Recorder(fake, places, on_operator)
    with places, one_device(), fake, recorder:
        with _stage("build", report), explained(name, "make_step"):
            step = make_step()
        if not callable(step):
            raise TraceError(
                f"{name}: make_step returned {type(step).__name__}, which cannot be called: "
                "return a function of no arguments that runs one training step"
            )
        with _stage("warm up", report), explained(name, "the step"):
            recorder.warm_up()
            step()
        warm_operators = recorder.operator_count
        with (
            _stage("record", report),
            explained(name, "the step"),
            _no_garbage(),
            recorder.recording(),
        ):
            step()
    if not recorder.phases:
        raise TraceError(f"{name}: the step ran no operator that reads or writes memory")
    storages = recorder.storages.records
    lifetimes = [lifetime(storage, len(recorder.phases)) for storage in storages]
    trace, _ = build_trace(
        storages,
        lifetimes,
        recorder.phases,
        name=name,
        source=source,
        metadata=metadata or {},
    )
    return trace


@contextmanager
def _stage(stage: str, report: Progress) -> Iterator[None]:
    report(stage, 0.0)
    yield
    report(stage, 1.0)


def _no_progress(_stage: str, _share: float) -> None:
    pass


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep Python's collector out: when it runs differs from one recording to the next."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
