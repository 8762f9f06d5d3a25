"""Parameters that are DTensors, and every tensor on the memory of this rank's part of them.

A step of such parameters is deferred if all tensors on the memory are known, because each of them
gets a guard: the DTensor, the plain tensor inside it, the tensor that this one is a view of, and
the flat view from which FSDP2 gathers the parameter. FSDP2 makes the gradients of parameters that
it gathers together in one buffer: they are known if nothing else is in it.

FSDP2 gathers on streams of its own, which wait for the program's stream when the model's forward
pass begins, and no more before a block. To wait for all updates then would hide nothing. So these
streams are left out of what counts as part of the program's stream. Instead they wait before each
gathering, for the updates of what is gathered (:func:`order_gathering`). The flat view is guarded
until then, too: whatever else reads it waits, on the stream that reads.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from umem import patches
from umem.runtime.aliases import are_all_on_memory, has_alias
from umem.runtime.guard import Guard, are_plain, can_guard, guard_of
from umem.runtime.held_memory import any_held, are_kept
from umem.runtime.model_parts import can_guard_dtensor
from umem.runtime.unguarded import Unguarded
from umem.torch_compat import (
    DTENSOR_PART,
    fsdp_gathering,
    fsdp_groups,
    storage_address,
    storage_key,
    storage_use_count,
    view_base,
)

__all__ = ["FlatGuard", "GatheredParameters", "ShardedStep", "ShardedUnit", "order_gathering"]


class FlatGuard(Guard):
    """Guards what FSDP2 gathers from, from a step to the first gathering after it.

    Parameters
    ----------
    settle
        Called before each other use, in the thread that uses a tensor.
    gather
        Called before a gathering, for each of its streams.
    """

    def __init__(self, settle: Callable[[], None], gather: Callable[[], None]) -> None:
        super().__init__(settle)
        self.gather = gather


@functools.cache
def order_gathering() -> bool:
    """Have FSDP2's streams wait for updates of what they gather, until the process ends.

    Called when there is such a stream. Returns whether they do: if not, in a torch with other
    names, these streams have to wait for all updates at once, as others do.
    """
    return patches.wrap("fsdp_gathering", _settling)


def _settling(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
        _settle(*fsdp_gathering(group))
        return gather(group, *args, **kwargs)

    return unshard


def _settle(flats: list[torch.Tensor], streams: Iterator[AbstractContextManager[Any]]) -> None:
    """Have each stream wait for updates of what is gathered, which nothing guards from then on.

    The guard is for these streams alone: the program's stream has waited too then, and any other
    one waits for that, as it does in a program without umem.
    """
    guards = {id(guard): guard for it in flats if isinstance(guard := guard_of(it), FlatGuard)}
    if not guards:  # an earlier gathering since the step has waited
        return
    have_waited = False
    for stream in streams:
        with stream:
            for guard in guards.values():
                guard.gather()
        have_waited = True
    for guard in guards.values() if have_waited else ():
        guard.give_back(flats)


@dataclass(frozen=True, slots=True)
class GatheredParameters:
    """What FSDP2 gathers the parameters of its modules from."""

    flats: dict[int, torch.Tensor] = field(default_factory=dict)
    """Flat views of this rank's parts, by ``id`` of the parameter."""
    streams: list[Any] = field(default_factory=list)
    """The streams of the gathering."""

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> GatheredParameters:
        """Find them, as they are now. Where a torch has other names for them there are none."""
        found = cls()
        streams: dict[int, Any] = {}
        for group in fsdp_groups(modules):
            found.flats.update((id(it), flat) for it, flat in group.parameters)
            streams |= {id(it): it for it in group.streams}
        found.streams.extend(streams.values())
        return found


@dataclass(slots=True)
class ShardedUnit:
    """What is to be guarded of a unit while its update is under way."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    """Plain ones."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Plain ones, this rank's parts of DTensors, and the buffers that these are in. A buffer may
    have gradients of several units: the one that is updated last guards it, behind all others."""
    dtensors: list[nn.Parameter] = field(default_factory=list)
    """Parameters that are DTensors."""
    dtensor_gradients: list[torch.Tensor] = field(default_factory=list)
    """Their gradients, in the same order."""
    parts: list[torch.Tensor] = field(default_factory=list)
    """This rank's parts of the parameters, and what these are views of."""
    flats: list[torch.Tensor] = field(default_factory=list)
    """What FSDP2 gathers from."""


class _GradientMemory:
    """The tensors that are known on one memory."""

    __slots__ = ("bases", "parts")

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        """Of DTensors."""
        self.bases: dict[int, torch.Tensor] = {}
        """What they are views of, by ``id``."""

    def add(self, part: torch.Tensor) -> None:
        """Note a part, and what it is a view of."""
        self.parts.append(part)
        base = view_base(part)
        if base is not None:
            self.bases[id(base)] = base

    def is_known(self) -> bool:
        """Whether nothing else is on it, all can be guarded, and parts are apart."""
        every = (self.bases | {id(it): it for it in self.parts}).values()
        return (
            _can_guard_all(every)
            and are_all_on_memory(every)
            and (len(self.parts) == 1 or _are_apart(self.parts))
        )


class ShardedStep:
    """Tells what is to be guarded of units that have DTensors among their parameters.

    Parameters
    ----------
    parameters
        All parameters of the optimizer: their gradients may be in one buffer.
    gathered
        What FSDP2 gathers them from.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], gathered: GatheredParameters) -> None:
        self._flats = gathered.flats
        self._memories: defaultdict[int, _GradientMemory] = defaultdict(_GradientMemory)
        """By address."""
        self._parts: dict[int, torch.Tensor] = {}
        """Of gradients, by ``id``; those that are no single plain tensor are left out."""
        with Unguarded():
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is not None and can_guard_dtensor(gradient):
                    part = _part_of(gradient)
                    if part is not None:
                        self._parts[id(gradient)] = part
                        self._memories[storage_address(part)].add(part)

    def unit(self, parameters: Iterable[nn.Parameter]) -> ShardedUnit | None:
        """What is to be guarded of some parameters, all of which have gradients.

        None where something may use them that a guard would not see.
        """
        found = ShardedUnit()
        with Unguarded():
            for parameter in parameters:
                gradient: Any = parameter.grad
                if id(gradient) in self._parts:
                    found.dtensors.append(parameter)
                    found.dtensor_gradients.append(gradient)
                elif are_plain((parameter, gradient)):
                    found.parameters.append(parameter)
                    found.gradients.append(gradient)
                else:
                    return None
            if has_alias(found.parameters) or has_alias(found.gradients):
                return None
            return found if self._add_parts(found) and self._add_gradients(found) else None

    def _add_parts(self, found: ShardedUnit) -> bool:
        """Add the parts of parameters; False if something else may be on their memory.

        Each has memory of its own.
        """
        if not all(map(can_guard_dtensor, found.dtensors)):
            return False
        parts = [part for it in found.dtensors if (part := _part_of(it)) is not None]
        if len(parts) < len(found.dtensors):
            return False
        # Python's objects of storages count too, and are there meanwhile.
        storages = list(map(torch.Tensor.untyped_storage, parts))
        keys = list(map(storage_key, storages))
        counts = []
        for parameter, part, key in zip(found.dtensors, parts, keys, strict=True):
            known = {id(it): it for it in (part, view_base(part)) if it is not None}
            found.parts += known.values()
            flat = self._flats.get(id(parameter))
            if flat is not None and can_guard(flat) and storage_address(flat) == key:
                base = view_base(flat)
                if base is not None and id(base) not in known:
                    known[id(base)] = base
                    found.parts.append(base)
                known[id(flat)] = flat
                found.flats.append(flat)
            counts.append(len(known) + 1)
        if any_held(parts) or are_kept(storages):
            return False
        return counts == list(map(storage_use_count, keys)) and _can_guard_all(found.parts)

    def _add_gradients(self, found: ShardedUnit) -> bool:
        """Add the parts of gradients; False if something else may be on their memory."""
        own = [self._parts[id(it)] for it in found.dtensor_gradients]
        for address in dict.fromkeys(map(storage_address, own)):
            memory = self._memories[address]
            if not memory.is_known():
                return False
            found.gradients += memory.bases.values()
        found.gradients += own
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
