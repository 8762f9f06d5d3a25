"""Sharded tensors, which are torch's DTensors: this rank has a part of each.

State is staged by this rank's parts. An optimizer that looks at each element by itself gets them as
plain tensors, where its parameters, gradients and state are divided alike. Any other one gets
DTensors of the slots.

A step of sharded parameters is deferred if all tensors on the memory of the parts are known,
because each of them gets a guard: the DTensor, the plain tensor inside it, the tensor that this one
is a view of, and the flat view that a library gathers the parameter from. Libraries make the
gradients of parameters that they gather together in one buffer: they are known if nothing else is
in it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from umem.adapters.interface import GatheredParameters
from umem.runtime.aliases import are_all_on_memory, has_alias
from umem.runtime.guard import PLAIN_CLASSES, are_plain, can_guard
from umem.runtime.held_memory import any_held, are_kept
from umem.runtime.unguarded import Unguarded
from umem.torch_compat import (
    DTENSOR_PART,
    storage_address,
    storage_key,
    storage_use_count,
    view_base,
)

__all__ = [
    "OptimizerState",
    "ShardedState",
    "ShardedStep",
    "ShardedUnit",
    "are_sharded",
    "local_parts",
]

OptimizerState = Mapping[torch.Tensor, Mapping[str, Any]]
"""State by parameter and name, as ``torch.optim.Optimizer.state``."""


def _class() -> Any:
    """The class of sharded tensors; None while the program has none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _is_sharded(value: object) -> bool:
    if type(value) in PLAIN_CLASSES:
        return False
    kind = _class()
    return kind is not None and isinstance(value, kind)


def are_sharded(values: Iterable[object]) -> bool:
    """Whether this rank has a part of one of some values."""
    return any(map(_is_sharded, values))


def local_parts(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """This rank's parts of sharded tensors; other tensors themselves.

    Of optimizer state, it is the same object each time. Of a parameter, it is a view.
    """
    with torch.no_grad():
        return [it.to_local() if _is_sharded(it) else it for it in tensors]


def _layout_of(tensor: Any) -> object:
    """Which ranks have which part of a sharded tensor; None for another tensor."""
    return (tensor.device_mesh, tensor.placements) if _is_sharded(tensor) else None


def _can_guard_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own class, and no subclass of it."""
    return type(tensor) is _class()


class ShardedState:
    """The sharded tensors among the state of some parameters.

    Parameters
    ----------
    state
        The state of the parameters.
    on_parts
        Whether the optimizer may update this rank's parts as plain tensors: it looks at each
        element by itself, and replaces no state.
    """

    def __init__(self, state: OptimizerState, *, on_parts: bool) -> None:
        self.tensors: list[Any] = list(filter(_is_sharded, _values_of(state)))
        self._parts = dict(zip(map(id, self.tensors), local_parts(self.tensors), strict=True))
        """By ``id`` of the tensor. To ask for them again would be a use."""
        self._may_unwrap = on_parts and all(
            _layout_of(value) == _layout_of(parameter)
            for parameter, values in state.items()
            for value in values.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        )
        self.is_wrapped = not self._may_unwrap
        """Whether the optimizer gets sharded tensors, and not this rank's parts of them."""

    @classmethod
    def of(cls, state: OptimizerState, *, on_parts: bool) -> ShardedState | None:
        """Find them; None if there are none."""
        return cls(state, on_parts=on_parts) if are_sharded(_values_of(state)) else None

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a state tensor."""
        return self._parts.get(id(value), value)

    def can_guard(self) -> bool:
        """Whether each use of the tensors would be seen."""
        return all(map(_can_guard_sharded, self.tensors))

    def choose_wrapping(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Choose what the optimizer gets, by the gradients of parameters for an update.

        Returns this rank's parts of the gradients if it is parts; else nothing.
        """
        if not self._may_unwrap:
            return []
        parts = local_parts(gradients)
        self.is_wrapped = not (
            all(map(can_guard, parts))
            and list(map(_layout_of, gradients)) == list(map(_layout_of, parameters))
        )
        return [] if self.is_wrapped else parts

    def stand_in(self, value: Any, made: Mapping[int, torch.Tensor]) -> Any:
        """What the optimizer gets for a value.

        `made` has, by ``id``, what stands for plain tensors and for this rank's parts.
        """
        own = self._parts.get(id(value), value)
        part = made.get(id(own), own)
        if own is value or not self.is_wrapped:
            return part
        if part is own:
            return value
        with torch.no_grad():
            return _class().from_local(
                part,
                device_mesh=value.device_mesh,
                placements=value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )


def _values_of(state: OptimizerState) -> Iterator[Any]:
    return (it for values in state.values() for it in values.values())


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """What is to be guarded of a unit while its update is under way."""

    parameters: list[torch.Tensor]
    """Parameters, this rank's parts of them, and what these are views of."""
    gradients: list[torch.Tensor]
    """Gradients, this rank's parts of them, and the buffers that these are in. A buffer may have
    gradients of several units: the one that is updated last guards it, behind all others."""
    flats: list[torch.Tensor]
    """What a library gathers from."""


class ShardedStep:
    """Tells what is to be guarded of units that have sharded parameters.

    Parameters
    ----------
    parameters
        All parameters of the optimizer: their gradients may be in one buffer.
    gathered
        What a library gathers them from.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], gathered: GatheredParameters) -> None:
        self._flats = gathered.flats
        self._parts: dict[int, torch.Tensor] = {}
        """Of gradients, by ``id``; those that are no single plain tensor are left out."""
        self._by_address: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        """The same by the address of their memory."""
        with Unguarded():
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is not None and _can_guard_sharded(gradient):
                    part = _part_of(gradient)
                    if part is not None:
                        self._parts[id(gradient)] = part
                        self._by_address[storage_address(part)].append(part)

    def unit(self, parameters: Iterable[torch.Tensor]) -> ShardedUnit | None:
        """What is to be guarded of some parameters, all of which have gradients.

        None where something may use them that a guard would not see.
        """
        plain: list[Any] = []
        sharded: list[Any] = []
        with Unguarded():
            for parameter in parameters:
                gradient: Any = parameter.grad
                if id(gradient) in self._parts:
                    sharded.append(parameter)
                elif are_plain((parameter, gradient)):
                    plain.append(parameter)
                else:
                    return None
            plain_gradients = [it.grad for it in plain]
            if has_alias(plain) or has_alias(plain_gradients):
                return None
            gradients = [it.grad for it in sharded]
            found = ShardedUnit([*plain, *sharded], [*plain_gradients, *gradients], [])
            is_seen = self._add_parts(found, sharded) and self._add_gradients(found, gradients)
            return found if is_seen else None

    def _add_parts(self, found: ShardedUnit, parameters: list[torch.Tensor]) -> bool:
        """Add the parts of sharded parameters; False if something else may be on their memory.

        Each has memory of its own.
        """
        if not all(map(_can_guard_sharded, parameters)):
            return False
        parts = [part for it in parameters if (part := _part_of(it)) is not None]
        if len(parts) < len(parameters):
            return False
        # Python's objects of storages count too, and are there meanwhile.
        storages = list(map(torch.Tensor.untyped_storage, parts))
        keys = list(map(storage_key, storages))
        every: list[torch.Tensor] = []
        counts = []
        for parameter, part, key in zip(parameters, parts, keys, strict=True):
            known = {id(it): it for it in (part, view_base(part)) if it is not None}
            flat = self._flats.get(id(parameter))
            if flat is not None and (not can_guard(flat) or storage_address(flat) != key):
                flat = None
            if flat is not None and (base := view_base(flat)) is not None:
                known[id(base)] = base
            every += known.values()
            if flat is not None:
                known[id(flat)] = flat
                found.flats.append(flat)
            counts.append(len(known) + 1)
        found.parameters.extend(every)
        if any_held(parts) or are_kept(storages):
            return False
        return counts == list(map(storage_use_count, keys)) and _can_guard_all(every)

    def _add_gradients(self, found: ShardedUnit, gradients: list[torch.Tensor]) -> bool:
        """Add the parts of sharded gradients; False if something else may be on their memory."""
        own = [self._parts[id(it)] for it in gradients]
        for address in dict.fromkeys(map(storage_address, own)):
            parts = self._by_address[address]
            bases = {id(it): it for it in map(view_base, parts) if it is not None}
            every = (bases | {id(it): it for it in parts}).values()
            are_all = _can_guard_all(every) and are_all_on_memory(every)
            if not are_all or (len(parts) > 1 and not _are_apart(parts)):
                return False
            found.gradients.extend(bases.values())
        found.gradients.extend(own)
        return True


def _part_of(dtensor: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a DTensor; None if that is not one plain tensor."""
    part: torch.Tensor | None = getattr(dtensor, DTENSOR_PART, None)
    is_one = part is not None and can_guard(part) and part.layout is torch.strided
    return part if is_one else None


def _can_guard_all(tensors: Collection[torch.Tensor]) -> bool:
    return are_plain(tensors) or all(map(can_guard, tensors))


def _are_apart(parts: Iterable[torch.Tensor]) -> bool:
    spans = sorted(_bytes_of(it) for it in parts if it.numel())
    return all(first[1] <= second[0] for first, second in pairwise(spans))


def _bytes_of(part: torch.Tensor) -> tuple[int, int]:
    """The bytes of its memory that a tensor may have, from the first to before the last."""
    if not part.is_contiguous():
        return 0, part.untyped_storage().nbytes()
    begin = int(part.storage_offset()) * part.itemsize
    return begin, begin + part.nbytes
