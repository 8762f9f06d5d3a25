"""What makes one step like another: the shapes that its batches have."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from umem.recorder._tensors import named_tensors
from umem.tensor_memory import plain_tensors

__all__ = ["CallShapes", "SignatureWatch", "StepSignature", "call_shapes"]

CallShapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and type of each tensor that a call of the model is given."""


@dataclass(frozen=True)
class StepSignature:
    """Shapes of what the model is called with in one step.

    Parameters
    ----------
    calls
        One entry for each call that gradients are wanted of, in order: a step that accumulates
        gradients over four batches has four.
    """

    calls: tuple[CallShapes, ...]

    def __str__(self) -> str:
        return "; ".join(
            ", ".join(f"{name} {'x'.join(map(str, shape))} {kind}" for name, shape, kind in call)
            for call in self.calls
        )


def call_shapes(args: Sequence[object], kwargs: Mapping[str, object]) -> CallShapes:
    """Shapes of a call's tensors, by position or keyword."""
    return tuple(
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for given in (args, kwargs)
        for name, tensor in named_tensors(given)
    )


class SignatureWatch:
    """Signatures of the step in flight, and of the one before it."""

    def __init__(self) -> None:
        self.calls: list[CallShapes] = []
        self._last: StepSignature | None = None
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._last_storages: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def signature(self) -> StepSignature | None:
        """Of the step in flight as far as it has got; between two steps, of the last one."""
        return StepSignature(tuple(self.calls)) if self.calls else self._last

    def agrees(self, expected: StepSignature) -> bool:
        """Whether the step in flight can still turn out to be one of that signature."""
        if not self.calls:
            return self._last == expected
        return expected.calls[: len(self.calls)] == tuple(self.calls)

    def add(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, note_storages: bool
    ) -> None:
        """The model is called, in the step in flight."""
        self.calls.append(call_shapes(args, kwargs))
        if note_storages:
            self._storages += [
                weakref.ref(part.untyped_storage())
                for _, tensor in named_tensors((args, kwargs))
                for part in plain_tensors(tensor)
            ]

    def end_step(self) -> StepSignature:
        """The optimizer has stepped."""
        self._last = StepSignature(tuple(self.calls))
        self.calls = []
        self._last_storages, self._storages = self._storages, []
        return self._last

    def kept_storages(self) -> frozenset[int]:
        """Addresses of the storages that were inputs of the last step and are there now."""
        storages = (reference() for reference in self._last_storages)
        return frozenset(storage._cdata for storage in storages if storage is not None)

    def forget_storages(self) -> None:
        """Let go of the references to inputs."""
        self._storages, self._last_storages = [], []
