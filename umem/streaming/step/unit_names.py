"""The unit that a parameter's state belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from umem.capture.live import NO_BLOCK, Block
from umem.runtime.known_tensors import KnownTensors
from umem.runtime.model_parts import memory_bytes

__all__ = ["UnitNames", "is_outside"]

_PART_BYTES = 64 << 20
"""Parameters in a unit outside of blocks where no block has any, or not all of them now."""

_PART = "."
"""Begins the names of further units outside of blocks, and no module's."""


def is_outside(name: str) -> bool:
    """Whether a unit is outside of blocks: it is due when the model's forward pass begins."""
    return name == NO_BLOCK or name.startswith(_PART)


class UnitNames:
    """Names the units of a model: its blocks, and as many more as other parameters need.

    Parameters outside of blocks may be few and small, as a scale of the model itself, or all there
    are: flat partitions in the optimizer, which no module holds. They are divided in the
    optimizer's order, so that no unit of several parameters is larger than the largest block.

    Parameters
    ----------
    blocks
        The model's blocks.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.outside = [NO_BLOCK]
        """Units outside of blocks so far."""
        self._names: KnownTensors[str] = KnownTensors()
        self._last_bytes = 0
        sizes = [0]
        are_whole = True
        for block in blocks:
            parameters = list(block.module.parameters())
            sizes.append(sum(map(memory_bytes, parameters)))
            are_whole &= all(it.numel() for it in parameters)
            for parameter in parameters:
                if parameter not in self._names:
                    self._names[parameter] = block.name
        # ZeRO-3 takes the memory of parameters that are not in use: nothing tells a block's size.
        self.part_bytes = (max(sizes) if are_whole else 0) or _PART_BYTES
        """Parameters in a unit outside of blocks, at most."""

    def of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter's unit, which is always the same."""
        name = self._names.get(parameter)
        if name is None:
            size_bytes = memory_bytes(parameter)
            if self._last_bytes and self._last_bytes + size_bytes > self.part_bytes:
                self.outside.append(f"{_PART}{len(self.outside) + 1}")
                self._last_bytes = 0
            self._last_bytes += size_bytes
            name = self._names[parameter] = self.outside[-1]
        return name
