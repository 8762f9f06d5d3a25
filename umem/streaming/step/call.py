"""The hyperparameters of an optimizer's step, and optimizers for parts of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer

from umem.core.interrupts import call_all
from umem.runtime.model_parts import plain_step
from umem.streaming.stage.lanes import Lanes
from umem.streaming.stage.sharded_tensors import local_parts
from umem.streaming.step.known_optimizers import replaces_state
from umem.torch_compat import version_counter

if TYPE_CHECKING:
    from umem.streaming.step.pieces import PieceUpdate

__all__ = ["ParameterGroups", "StepCall", "parameters_of"]

ParameterGroups = list[tuple[int, list[Any]]]
"""Parameters by the number of their group of the optimizer."""


def parameters_of(groups: ParameterGroups) -> list[Any]:
    """All parameters, in their order."""
    return [parameter for _, some in groups for parameter in some]


def _nothing() -> None:
    pass


class StepCall:
    """One call of ``step()``: hyperparameters as they are now."""

    def __init__(self, optimizer: Optimizer, lanes: Lanes) -> None:
        self.optimizer = optimizer
        self.tensors: list[Tensor] = []
        """Hyperparameters that are tensors: copies, which the lanes hold until the updates end."""
        self._attributes = {
            name: self._fixed(value)
            for name, value in vars(optimizer).items()
            if name not in ("param_groups", "state")
        }
        self._groups = [
            {name: self._fixed(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._values = [dict(group) for group in optimizer.param_groups]
        """Keeps tensors alive, whose ``id`` would be another one's otherwise."""
        self._signature = _signature(optimizer)
        self._replaces_state = replaces_state(optimizer)
        self._plain_step = plain_step(type(optimizer))
        self.has_failed = False
        """Whether the optimizer's own step has raised, as it would have without umem."""
        self.ready = lanes.mark()
        """The moment at which gradients and hyperparameters are complete."""

    def run(self, part: Any, note: Callable[[], object] = _nothing) -> None:
        """Run the optimizer's own step on what :meth:`shadow` has made.

        `note`, a function of C, is called behind it: no interrupt comes between.
        """
        begins, ends = (partial(setattr, self, "has_failed", it) for it in (True, False))
        call_all(begins, partial(self._plain_step, part), note, ends)

    def _fixed(self, value: Any) -> Any:
        """A hyperparameter that later changes in place do not reach."""
        if isinstance(value, Tensor):
            self.tensors.append(value.clone())
            return self.tensors[-1]
        if isinstance(value, list):
            return list(map(self._fixed, value))
        if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
            return tuple(map(self._fixed, value))
        return value

    def fuses(self, number: int) -> bool:
        """Whether a fused kernel updates the parameters of a group."""
        return bool(self._groups[number].get("fused"))

    @property
    def scale(self) -> Any:
        """A tensor, by which a fused kernel divides gradients for a ``GradScaler``, or None."""
        return self._attributes.get("grad_scale")

    @property
    def found_inf(self) -> Any:
        """A tensor, 1 where the ``GradScaler`` skips the step, or None."""
        return self._attributes.get("found_inf")

    @property
    def unscales(self) -> bool:
        """Whether a fused kernel divides gradients by the scale of a GradScaler, in place."""
        return self.scale is not None

    def has_hyperparameters_of(self, optimizer: Optimizer) -> bool:
        """Whether the hyperparameters are the same now. Nothing waits for the device."""
        return self._signature == _signature(optimizer)

    def shadow(self, part: ParameterGroups, state: Any) -> Any:
        """An optimizer of the same class for some parameters, with their state."""
        shadow: Any = object.__new__(type(self.optimizer))
        vars(shadow).update(self._attributes)
        shadow.param_groups = [
            {**self._groups[number], "params": some} for number, some in part if some
        ]
        shadow.state = state
        return shadow

    def update(
        self, updated: PieceUpdate, note: Callable[[], object] = _nothing
    ) -> Callable[[], None]:
        """The update of a piece: of some parameters, or of the span of one.

        `note` is as of :meth:`run`.
        """
        state, part, beside = updated.piece.state, updated.part, updated.beside
        if state.span is not None:
            return self._update_of_span(updated, note)
        # Only where something stands in for parameters: each key takes a call of Python.
        gradients: dict[Any, Any] = {}
        parts: dict[Any, Tensor] = {}
        if beside is not None or state.sharded is not None:
            gradients = {parameter: parameter.grad for parameter in parameters_of(part)}
            own = state.choose_wrapping(list(gradients), list(gradients.values()))
            if own and beside is None:
                # Now: to ask for a part is a use, for which a guard would wait.
                parts = _parts_of(gradients, own)
        binding = state.binding

        def update() -> None:
            groups, views = part, binding.views
            made = parts
            if beside is not None:
                updated.multiply(beside)
                made = {p: updated.stand_in(p, of, beside) for p, of in gradients.items()}
            elif parts:
                increment_version(list(parts))  # as an update of the whole does
            if made:
                groups = [(number, [made[it] for it in some]) for number, some in part]
                views = {made[it]: binding.views[it] for it in made}
            self.run(self.shadow(groups, views), note)
            if self._replaces_state:
                state.keep(binding, parameters_of(part), self.optimizer.state)

        return update

    def _update_of_span(
        self, updated: PieceUpdate, note: Callable[[], object]
    ) -> Callable[[], None]:
        ((number, parameter),) = [(number, it) for number, some in updated.part for it in some]
        state, is_last, beside = updated.piece.state, updated.is_last, updated.beside
        gradient, binding = parameter.grad, state.binding

        def update() -> None:
            if beside is not None:
                updated.multiply(beside)
            piece = updated.stand_in(parameter, gradient, beside)
            own = self.optimizer.state
            values = state.values_of_span(binding, parameter, own, is_last=is_last)
            before = dict(values)
            self.run(self.shadow([(number, [piece])], {piece: values}), note)
            for name, value in values.items():
                if isinstance(value, Tensor) and value is not before[name]:
                    before[name].copy_(value)
                    values[name] = before[name]
            if is_last:
                state.keep_numbers(binding, parameter, own)

        return update


def _parts_of(parameters: Collection[Tensor], gradients: Iterable[Tensor]) -> dict[Any, Tensor]:
    """This rank's parts of parameters, with those of their gradients."""
    parts = {it: of.detach() for it, of in zip(parameters, local_parts(parameters), strict=True)}
    for part, gradient in zip(parts.values(), gradients, strict=True):
        part.grad = gradient
    return parts


def _signature(optimizer: Optimizer) -> list[Any]:
    """Hyperparameters, for a comparison."""
    scaler = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
    groups = [
        {name: _seen(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return [list(map(_seen, scaler)), *groups]


def _seen(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_seen, value))
    if isinstance(value, Tensor):
        number = value.tolist() if value.device.type == "cpu" else None
        return id(value), version_counter(value), number
    return value
