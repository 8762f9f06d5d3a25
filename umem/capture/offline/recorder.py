"""Sees every operator of a step, and writes down which storages it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from umem.capture.offline.module_scopes import ModuleScopeTracker
from umem.capture.offline.operators import (
    Operator,
    Uses,
    describe_operator,
    operator_flops,
    operator_precision,
    phase_kind,
    split_launches,
)
from umem.capture.storages import BEFORE, Phase, Storages
from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.runtime.model_parts import optimizer_state, tensors_in, unwrapped, weight_classes
from umem.torch_compat import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_map_only
from umem.trace import OPTIMIZER, Access, PhaseKind, Precision

__all__ = ["Recorder"]


class Recorder(TorchDispatchMode):
    """Passes operators on to a :class:`FakeTensorMode`, and records those of one step.

    The fake mode is entered before this one. `on_operator` is called for each operator, with the
    number of operators so far in this run of the step.
    """

    def __init__(
        self, fake: FakeTensorMode, scopes: ModuleScopeTracker, on_operator: Callable[[int], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: list[Phase] = []
        self.storages = Storages(lambda: len(self.phases))
        self.operator_count = 0
        self._fake = fake
        self._scopes = scopes
        self._on_operator = on_operator
        self._is_warming_up = False
        self._is_recording = False
        # Real tensors and the fake ones that stand for them, by id of the real one; both are kept,
        # so that no other tensor gets the id.
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
        self._scopes.find_parameters()
        self._tag_known()
        with ExitStack() as hooks:
            for parameter, name in self._scopes.parameter_names.items():
                if parameter.requires_grad and parameter.is_leaf:
                    tag = partial(self._tag_gradient, name)
                    hooks.callback(parameter.register_post_accumulate_grad_hook(tag).remove)
            # For gradients that autograd has not accumulated.
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
        # Queries of a fake tensor, and marks for the profiler.
        if getattr(func, "namespace", "") in ("prim", "profiler"):
            return func(*args, **kwargs)
        plain = (torch.Tensor, torch.nn.Parameter)
        if not all(issubclass(kind, FakeTensor) or kind in plain for kind in types):
            return NotImplemented  # a subclass, which calls operators on the tensors in it
        self.operator_count += 1
        self._on_operator(self.operator_count)
        operator = describe_operator(func)
        if operator.base not in ("lift", "lift_fresh"):  # they take a real tensor and copy it
            args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        self._scopes.note_node()
        result = func(*args, **kwargs)
        # The mode remembers tensors by weak references, and a tensor that has one cannot be
        # swapped, which is how `Module.to` works on fake tensors. It needs this for real tensors
        # only, and those are kept here.
        self._fake.fake_tensor_converter.tensor_memo.clear()
        groups = list(operator.groups(args, kwargs))
        if self._is_recording:
            self._record(func, operator, groups, args, kwargs, result)
        elif self._is_warming_up:
            for value, _ in groups:
                self._note_parameters(value)
        return result

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
        results = tensors_in(result)
        # An operator's result is a view of an argument, or new.
        fresh = {id(tensor) for tensor in results if self.storages.find(tensor) is None}
        born_as = TensorClass.OTHER if self._scopes.is_optimizer else TensorClass.ACTIVATIONS
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
        records = self.storages.records
        accesses: dict[int, Access] = {}
        read_bytes: dict[int, int] = {}
        written_bytes: dict[int, int] = {}
        for position, (tensor, declared) in enumerate(uses):
            number = self.storages.find(tensor)
            if number is None:
                continue
            access = declared
            nbytes = operator.touched_bytes(position, tensor, results)
            if declared is Access.WRITE and nbytes < records[number].bytes:
                access = Access.READ | Access.WRITE  # the rest of the storage survives
            accesses[number] = accesses.get(number, access) | access
            if declared & Access.READ:
                read_bytes[number] = read_bytes.get(number, 0) + nbytes
            if declared & Access.WRITE:
                written_bytes[number] = written_bytes.get(number, 0) + nbytes
        for tensor in results:
            number = self.storages.find(tensor) if id(tensor) in fresh else None
            if number is not None:
                accesses[number] = Access.WRITE
                written_bytes[number] = records[number].bytes
        if not written_bytes:
            return  # a view, or a query of shapes
        for number, access in accesses.items():
            self.storages.note_first_access(number, access)
        floats = [t.dtype for t in (*(t for t, _ in uses), *results) if t.is_floating_point()]
        self.phases.append(
            Phase(
                name=name,
                kind=kind,
                precision=operator_precision(floats[0]) if floats else Precision.FP32,
                flops=flops,
                # Views of one storage add up to no more than the storage.
                memory_bytes=sum(
                    min(nbytes, records[number].bytes)
                    for part in (read_bytes, written_bytes)
                    for number, nbytes in part.items()
                ),
                accesses=accesses,
            )
        )

    def _phase_name(self, operator: Operator, uses: Uses) -> str:
        scope = self._scopes.scope()
        if scope == OPTIMIZER and uses:
            number = self.storages.find(uses[0][0])
            if number is not None:
                scope = f"{OPTIMIZER} {self.storages.records[number].name}"
        return f"{scope}: {operator.name}" if scope else operator.name

    def _note_parameters(self, value: object) -> None:
        for tensor in tensors_in(value):
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            if is_parameter or (tensor.requires_grad and tensor.is_leaf):
                self._scopes.add_parameter(tensor)

    def _tag_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._tag(parameter.grad, f"{name}.grad", TensorClass.GRADIENTS)

    def _before_optimizer(self, *_: object) -> None:
        for parameter, name in self._scopes.parameter_names.items():
            self._tag_gradient(name, parameter)

    def _tag_known(self) -> None:
        """Give names and classes to the tensors that parameters and optimizers hold now."""
        names = self._scopes.parameter_names
        for name, buffer in self._scopes.buffers():
            self._tag(buffer, name, TensorClass.OTHER)
        for parameter, name in names.items():
            if parameter.is_leaf:
                self._tag_gradient(name, parameter)
        for optimizer in self._scopes.optimizers():
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
        """The tensor, or a fake one for a tensor that was made outside of the recording."""
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
